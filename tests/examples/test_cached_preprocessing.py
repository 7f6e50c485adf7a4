"""examples/cached_preprocessing.py, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "cached_preprocessing.py"


def epochs_of(cache: Path, *arguments: str) -> list[tuple[int, int]]:
    """How many images each epoch computed and read."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "STREAMLOAD_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"epoch \d: (\d+) images computed, (\d+) read", done.stdout)
    return [(int(computed), int(read)) for computed, read in said]


@pytest.mark.deep
def test_the_example_computes_each_image_once_and_reads_it_ever_after(tmp_path: Path) -> None:
    assert epochs_of(tmp_path / "made") == [(192, 0), (0, 192)]


@pytest.mark.deep
def test_a_second_run_reads_from_the_beginning_and_computes_what_has_changed(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(12):
        folder = tmp_path / "images" / f"class-{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80 + number, 70), (number * 20, 0, 0)).save(folder / f"{number}.png")
    given = ("--images", str(tmp_path / "images"), "--batch-size", "4")
    assert epochs_of(tmp_path / "cache", *given) == [(12, 0), (0, 12)]
    Image.new("RGB", (90, 70), (0, 99, 0)).save(tmp_path / "images" / "class-1" / "1.png")
    assert epochs_of(tmp_path / "cache", *given) == [(1, 11), (0, 12)]
