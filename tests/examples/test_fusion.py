"""examples/train_fusion.py, as a user runs it."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_fusion.py"


@pytest.mark.deep
def test_the_fusion_example_gives_samples_to_the_source_that_is_learned_and_reports_it(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "fusion.svg"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--report", str(picture)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"(\w+): share (\d+)% → (\d+)%, held-out loss (\S+) → (\S+),", done.stdout)
    photographs, noise = ({"name": name, "to": int(to), "loss": float(b)} for name, _, to, _, b in lines)
    assert (photographs["name"], noise["name"]) == ("photographs", "noise")
    assert photographs["to"] > 55
    assert photographs["loss"] < noise["loss"] - 0.5
    drawn = picture.read_text()
    assert ElementTree.fromstring(drawn) is not None
    for panel in ("share of the samples", "training loss", "alignment", "held-out loss"):
        assert panel in drawn
