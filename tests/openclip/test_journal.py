"""A journal beside the checkpoints of open_clip's own training: noise is found, left out, looked back at."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.openclip.tiny import Run, write_colour_shards

NOISE = [
    b"quarterly report of the zoning board",
    b"lorem ipsum dolor",
    b"404 not found",
    b"click to subscribe",
]
STEPS = 40  # of an epoch: ceil(1,224 / 32), for two workers


@pytest.fixture
def noisy(tmp_path: Path) -> tuple[list[Path], list[str]]:
    """Shards of which the last has captions that say nothing of its pictures; and its keys."""
    shards = write_colour_shards(tmp_path / "train", [200] * 6, seed=1)
    (source,) = write_colour_shards(tmp_path / "noise", [24], seed=9)
    noise = shards[0].with_name("00006.tar")
    keys = []
    with tarfile.open(source) as pictures, tarfile.open(noise, "w") as tar:
        for member in pictures.getmembers():
            file = pictures.extractfile(member)
            assert file is not None
            payload = file.read()
            if member.name.endswith(".txt"):
                keys.append(member.name.removesuffix(".txt"))
                payload = random.Random(member.name).choice(NOISE)
                member.size = len(payload)
            tar.addfile(member, io.BytesIO(payload))
    return [*shards, noise], keys


def streamload(folder: Path, *arguments: object) -> Any:
    """The result of a command as JSON, in the environment of the training."""
    done = subprocess.run(
        [sys.executable, "-m", "streamload", *map(str, arguments), "--json"],
        env={"STREAMLOAD_CACHE_DIR": str(folder / "cache"), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.deep
@pytest.mark.timeout(900)  # two trainings, and commands that each import open_clip
def test_noise_is_found_left_out_and_each_step_is_made_again(
    noisy: tuple[list[Path], list[str]], train: Callable[..., Run], tmp_path: Path
) -> None:
    shards, noise = noisy
    urls = f"{shards[0].parent}/{{00000..00006}}.tar"
    sizes = "--train-num-samples 1224 --workers 2 --save-frequency 1"
    arguments = ["--train-data", urls, *sizes.split()]
    first = train(*arguments)
    run = tmp_path / "run"
    journal = run / "journal"
    suspects = [spike["suspects"][0]["key"] for spike in streamload(tmp_path, "runs", "spikes", journal)]
    # One sample in fifty is noise. Losses differ by processor, so another row stands out now and then.
    assert len(suspects) >= 4, suspects
    assert sum(key in noise for key in suspects) >= 0.7 * len(suspects), suspects

    (run / "checkpoints" / "epoch_2.pt").unlink()
    (journal / "left_out.jsonl").write_text("".join(f"{key}\n" for key in noise))
    second = train(*arguments, "--resume", "latest")
    before, after = first.keys(0, 1), second.keys(0, 0)
    assert len(before) == len(after) == STEPS
    for one, other in zip(before, after, strict=True):
        for key, instead in zip(one, other, strict=True):
            assert (instead not in noise) if key in noise else (instead == key)

    old, new = (segment["segment"] for segment in streamload(tmp_path, "runs", "show", journal))
    for step in (STEPS - 1, 2 * STEPS - 2):
        of_first = [*first.keys(0, 0), *first.keys(0, 1)][step]
        of_second = [*first.keys(0, 0), *after][step]
        for segment, keys in ((old, of_first), (new, of_second)):
            rows = streamload(tmp_path, "replay", journal, "--step", step, "--segment", segment)
            assert [row["key"] for row in rows] == keys
