"""How far samples move in the first epoch: over local shards, remote ones, and from states of format 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from order_oracle import Case, sequence

import streamload
from streamload.daemon.warm import warm
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests import flat

COUNT = 150
FORMAT_2 = """{"streamload_state": 2, "data": "8da518adceab84959516e1e3719d692c", "choice": ["map_sample"],
"train": true, "seed": 0, "groups": 1, "sources": [["0", 2, 20]], "epoch": 0, "sequence": 0, "began": 0,
"position": 35, "changes": [[0, [4294967296]]], "weights": [1.0], "at": {"0": {"owed": [0], "sources": [
{"cursor": {"position": 35, "pass": 0, "skip": 35, "lanes": [0, 0, 0, 0, [[-1, 0, 0], [-1, 0, 0]]], "done":
[[1, 10]]}, "begun": {"0": [40, true, -1, 0], "4": [30, true, -1, 0], "1": [10, true, -1, 0], "2": [25, true,
-1, 0], "3": [5, true, -1, 0]}}]}}}"""
"""A state after seven batches of five, as commit 8ec393e saved it, but for the versions of the files."""


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def make(urls: Any, cache: Path, **options: Any) -> streamload.Loader:
    defaults: dict[str, Any] = {"map_sample": only_key, "cache_dir": cache, "cache_size": "1GB"}
    return flat.make_loader(urls, num_workers=0, **{**defaults, **options})


def epoch(loader: streamload.Loader) -> list[tuple[int, int]]:
    """The shard and the number of each sample, by its key."""
    return [(int(key[:5]), int(key[5:])) for batch in loader for key in batch["key"]]


def place_correlation(samples: list[tuple[int, int]]) -> float:
    """How much a sample's place in its shard says of its place in the epoch."""
    return float(np.corrcoef(np.arange(len(samples)), [number for _, number in samples])[0, 1])


@pytest.mark.parametrize(("is_local", "most"), [(True, 0.3), (False, 0.5)])
def test_a_small_data_set_is_shuffled_in_its_first_epoch(is_local: bool, most: float, tmp_path: Path) -> None:
    """The same order cold and warm."""
    paths = write_shards(tmp_path / "data", [COUNT] * 4, options=ShardOptions(image_side=(1, 1)))
    with ShardServer(tmp_path / "data") as server:
        urls: Any = [str(path) for path in paths] if is_local else f"{server.url}/{{00000..00003}}.tar"
        with make(urls, tmp_path / "cache", batch_size=8) as loader:
            cold, later = epoch(loader), epoch(loader)
        if not is_local:
            warm(urls, cache_dir=tmp_path / "warm", cache_size="1GB")
        with make(urls, tmp_path / "warm", batch_size=8) as loader:
            assert epoch(loader) == cold
        before = sequence(whole_of(make(urls, tmp_path / "cache"), [COUNT] * 4, 8), 0, 1)[0]
    assert place_correlation([sample for _, *sample in before]) > 0.95  # type: ignore[misc]
    assert place_correlation(cold) < most
    assert place_correlation(later) < most
    assert sorted(cold) == sorted(later) == [(shard, n) for shard in range(4) for n in range(COUNT)]


def whole_of(loader: streamload.Loader, counts: list[int], lanes: int) -> Case:
    """The order of states of format 2, by the defaults."""
    with loader:
        (_, default_lanes, window), *_ = loader.state_dict()["sources"]
    assert lanes == default_lanes
    entries = [list(range(count)) for count in counts]
    return Case(0, entries, groups=1, lanes=lanes, window=window, opens_after=None)


def test_a_state_of_format_2_goes_on_in_the_order_that_its_epoch_began_with(tmp_path: Path) -> None:
    counts = [40, 10, 25, 5, 30, 10]
    paths = [str(path) for path in write_shards(tmp_path / "data", counts, seed=2)]
    options = {"batch_size": 5, "shuffle": 20, "lanes": 2}
    with make(paths, tmp_path / "cache", **options) as loader:
        state = {**json.loads(FORMAT_2), "data": loader.state_dict()["data"]}
        loader.load_state_dict(state)
        rest = epoch(loader)
        saved = loader.state_dict()
        loader.set_epoch(0)
        again = epoch(loader)
    entries = [list(range(count)) for count in counts]
    case = Case(0, entries, groups=1, lanes=2, window=20, opens_after=None)
    expected = [(shard, number) for _, shard, number in sequence(case, 0, 1)[0]]
    assert rest == expected[35:]
    assert again == expected
    assert saved["opens_after"] == [None]
    with make(paths, tmp_path / "cache", **options) as loader:
        assert epoch(loader) != expected


def test_where_shards_are_read_over_a_link_the_window_opens_after_the_first_batch(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path / "data", [3])
    remote, layout = "http://host/{00000..00009}.tar", {"batch_size": 100, "rank": 0, "world_size": 4}
    mixed = [streamload.Source(remote, 3), streamload.Source([str(path)], 1)]
    for urls, options, expected in (
        ([str(path)], {}, [0]),
        (remote, {}, [400]),
        (remote, {"groups": 4}, [100]),
        ([str(path), "http://host/0.tar"], {}, [400]),
        (remote, {"shuffle": 0}, [0]),
        (mixed, {}, [300, 0]),
    ):
        with make(urls, tmp_path / "cache", **layout, **options) as loader:
            assert loader.state_dict()["opens_after"] == expected
