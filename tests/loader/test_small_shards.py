"""Steps over many small shards: what they do doesn't grow with the shards that are open."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import streamload
from streamload import Workers, descriptors
from streamload.testing.shards import write_shards

SHARDS, SAMPLES_PER_SHARD, BATCH = 500, 8, 16
FIRST, STOP = 110, 142
"""The steps that are counted: the widest window is open, and its lanes haven't come to the end of the pass."""


def key_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def calls_of_a_step(data: Path, cache: Path, window: int) -> tuple[float, int]:
    """The calls of a step in a warm epoch, of Python's functions and built-in ones, and the open files."""
    calls, files = 0, 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with streamload.make_loader(
        f"{data}/{{00000..{SHARDS - 1:05d}}}.tar",
        workers=Workers(map_sample=key_of),
        batch_size=BATCH,
        num_workers=0,
        shuffle=window,
        cache_dir=cache,
    ) as loader:
        if not (cache / "shards").is_dir() or len(list((cache / "shards").iterdir())) < SHARDS:
            assert sum(1 for _ in loader) == SHARDS * SAMPLES_PER_SHARD // BATCH
        loader.set_epoch(1)
        for step, _ in enumerate(loader):
            if step == FIRST:
                before = sys.getprofile()
                sys.setprofile(count)
            elif step == STOP:
                sys.setprofile(before)
                files = descriptors.count()
                break
    return calls / (STOP - FIRST), files


def test_a_step_makes_as_many_calls_with_400_open_shards_as_with_50(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [SAMPLES_PER_SHARD] * SHARDS, seed=1)
    few, few_files = calls_of_a_step(tmp_path / "data", tmp_path / "cache", 400)
    many, many_files = calls_of_a_step(tmp_path / "data", tmp_path / "cache", 3200)
    assert many_files > 4 * few_files > 200  # each open shard keeps two
    assert many <= 1.3 * few, f"{few:.0f} calls, {many:.0f} with more open shards"
