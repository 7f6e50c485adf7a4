"""Many small shards: steps do no more the more shards are open, and a shard's fill does little."""

import itertools
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import streamload
from streamload import Workers, descriptors
from streamload.cache.fill import Filled, fill
from streamload.cache.shard import shard_of
from streamload.cache.tier import Tier
from streamload.origins.origin import Origin
from streamload.testing.shards import write_shards

SAMPLES_PER_SHARD, BATCH, STEPS = 8, 16, 32


def key_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def calls_of_a_step(data: Path, cache: Path, open_shards: int, is_resumed: bool) -> tuple[float, int]:
    """The calls of a step in a warm epoch, of Python's functions and built-in ones, and the open files.

    The counted steps begin when the whole window is open, and end before the lanes finish the pass.

    Args:
        is_resumed: whether a state of the epoch is loaded a few steps before.
    """
    calls, files, window, shards = 0, 0, open_shards * SAMPLES_PER_SHARD, open_shards * 5 // 4 + 100
    first = window // 2 // BATCH + 4

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with streamload.make_loader(
        f"{data}/{{00000..{shards - 1:05d}}}.tar",
        workers=Workers(map_sample=key_of),
        batch_size=BATCH,
        num_workers=0,
        shuffle=window,
        cache_dir=cache,
    ) as loader:
        assert sum(1 for _ in loader) == shards * SAMPLES_PER_SHARD // BATCH
        start = 0
        if is_resumed:
            start = first - 4
            for _ in itertools.islice(loader, start):
                pass
            loader.load_state_dict(loader.state_dict())
        for step, _ in enumerate(loader, start):
            if step == first:
                before = sys.getprofile()
                sys.setprofile(count)
            elif step == first + STEPS:
                sys.setprofile(before)
                files = descriptors.count()
                break
    return calls / STEPS, files


@pytest.mark.parametrize("is_resumed", [False, True], ids=["from the start", "resumed"])
def test_a_step_makes_as_many_calls_with_400_open_shards_as_with_50(tmp_path: Path, is_resumed: bool) -> None:
    write_shards(tmp_path / "data", [SAMPLES_PER_SHARD] * 600, seed=1)
    few, few_files = calls_of_a_step(tmp_path / "data", tmp_path / "cache", 50, is_resumed)
    many, many_files = calls_of_a_step(tmp_path / "data", tmp_path / "cache", 400, is_resumed)
    assert many_files > 4 * few_files > 160  # each open shard keeps two
    assert many <= 1.3 * few, f"{few:.0f} calls, {many:.0f} with more open shards"


def test_the_fill_of_a_small_local_shard_makes_a_thousand_calls_at_most(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [1] * 40, seed=1)
    tier, calls = Tier(tmp_path / "tier", 1 << 30), 0
    shards = [shard_of(str(path), None) for path in sorted((tmp_path / "data").glob("*.tar"))]

    def no_origin() -> Origin:
        raise AssertionError("a local shard is read in place")

    def fill_all(first: int, last: int) -> None:
        for shard in shards[first:last]:
            part = tier.claim(shard.digest)
            assert part is not None
            outcome = fill(part, shard, no_origin, next_use=lambda: 1.0, stop=threading.Event())
            assert outcome.result is Filled.PUBLISHED

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    fill_all(0, 20)
    before = sys.getprofile()
    sys.setprofile(count)
    fill_all(20, 40)
    sys.setprofile(before)
    assert 20 * 100 < calls < 20 * 1000, f"{calls / 20:.0f} calls a shard"
