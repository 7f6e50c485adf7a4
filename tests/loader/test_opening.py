"""How far samples move in the first epoch: over local shards, remote ones, and from older states."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed

import streamload
from streamload.daemon.warm import warm
from streamload.loader.state import _checksum
from streamload.order.plan import WITH_ARRIVALS
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat
from tests.support.kills import Child, Stage
from tests.support.order_oracle import Case, sequence

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


def test_a_small_local_data_set_is_shuffled_in_its_first_epoch(tmp_path: Path) -> None:
    paths = [str(path) for path in write_shards(tmp_path, [COUNT] * 4, options=ShardOptions((1, 1)))]
    with make(paths, tmp_path / "cache", batch_size=8) as loader:
        first, later = epoch(loader), epoch(loader)
    assert place_correlation(first) < 0.3
    assert place_correlation(later) < 0.3
    assert sorted(first) == sorted(later) == [(shard, n) for shard in range(4) for n in range(COUNT)]


def test_a_small_remote_data_set_comes_as_it_arrives_cold_and_warm_and_is_shuffled_from_then_on(
    tmp_path: Path,
) -> None:
    counts = [COUNT, 40, COUNT, 200]
    write_shards(tmp_path / "data", counts, options=ShardOptions((1, 1)))
    with ShardServer(tmp_path / "data") as server:
        urls = f"{server.url}/{{00000..00003}}.tar"
        options: dict[str, Any] = {"batch_size": 10, "lanes": 3}
        with make(urls, tmp_path / "cache", **options) as loader:
            cold, later = epoch(loader), epoch(loader)
            window = loader.state_dict()["sources"][0][2]
        warm(urls, cache_dir=tmp_path / "warm", cache_size="1GB")
        with make(urls, tmp_path / "warm", **options) as loader:
            assert epoch(loader) == cold
    entries = [list(range(count)) for count in counts]
    case = Case(0, entries, groups=1, lanes=3, window=window, opens_after=WITH_ARRIVALS)
    assert cold == [(shard, number) for _, shard, number in sequence(case, 0, 1)[0]]
    assert sorted(cold) == sorted(later) == [(n, i) for n, count in enumerate(counts) for i in range(count)]
    assert place_correlation(later) < 0.3


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


@pytest.mark.parametrize("opens_after", [None, 64])
def test_a_state_from_before_keeps_its_opening(opens_after: int | None, tmp_path: Path) -> None:
    """The middle and the begin of an epoch, and the state that the resumed run saves."""
    counts = [40, 10, 25, 5, 30, 10]
    write_shards(tmp_path / "data", counts, seed=2)
    options: dict[str, Any] = {"batch_size": 5, "shuffle": 20, "lanes": 2}
    entries = [list(range(count)) for count in counts]
    case = Case(0, entries, groups=1, lanes=2, window=20, opens_after=opens_after)
    expected = [(shard, number) for _, shard, number in sequence(case, 0, 1)[0]]
    with ShardServer(tmp_path / "data") as server:
        urls = f"{server.url}/{{00000..00005}}.tar"
        with make(urls, tmp_path / "cache", **options) as loader:
            state = loader.state_dict() | {"opens_after": [opens_after]}
        with make(urls, tmp_path / "cache", **options) as loader:
            loader.load_state_dict({**state, "checksum": _checksum(state)})
            assert epoch(loader) == expected
            assert loader.state_dict()["opens_after"] == [opens_after]


def test_the_order_follows_arrivals_where_shards_of_a_source_are_not_local_files(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path / "data", [3])
    remote, layout = "http://host/{00000..00009}.tar", {"batch_size": 100, "rank": 0, "world_size": 4}
    mixed = [streamload.Source(remote, 3), streamload.Source([str(path)], 1)]
    for urls, options, expected in (
        ([str(path)], {}, [0]),
        (remote, {}, [WITH_ARRIVALS]),
        (remote, {"groups": 4}, [WITH_ARRIVALS]),
        ([str(path), "http://host/0.tar"], {}, [WITH_ARRIVALS]),
        ("pipe:cat {0..9}.tar", {}, [WITH_ARRIVALS]),
        (remote, {"shuffle": 0}, [0]),
        (mixed, {}, [WITH_ARRIVALS, 0]),
    ):
        with make(urls, tmp_path / "cache", **layout, **options) as loader:
            assert loader.state_dict()["opens_after"] == expected


def batches_of_node(shards: str, place: Path, rank: int, copy: str, stage: Stage) -> list[Any]:
    """The keys of each batch of one of two nodes, and how its windows open."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    with make(
        shards, place / f"node-{rank}", batch_size=4, num_samples=160, lanes=2, shuffle=40, copy=copy
    ) as loader:
        keys = [batch["key"] for batch in loader]
        return [keys, loader.state_dict()["opens_after"]]


@pytest.mark.parametrize("copies", [("always", "never"), ("never", "always"), ("never", "never")])
def test_windows_open_slowly_on_all_nodes_where_one_of_them_copies_files(
    copies: tuple[str, str], tmp_path: Path
) -> None:
    write_shards(tmp_path / "data", [40] * 4, options=ShardOptions((1, 1)))
    shards = f"{tmp_path}/data/{{00000..00003}}.tar"
    nodes = [
        Child(lambda stage, rank=rank: batches_of_node(shards, tmp_path, rank, copies[rank], stage))  # type: ignore[misc]
        for rank in range(2)
    ]
    with nodes[0], nodes[1]:
        by_node = [node.finish(120) for node in nodes]
    copied = "always" if "always" in copies else "never"
    with make(
        shards, tmp_path / "one", batch_size=8, num_samples=160, lanes=2, shuffle=40, groups=2, copy=copied
    ) as loader:
        expected = [sorted(batch["key"]) for batch in loader]
    assert [opens_after for _, opens_after in by_node] == [[WITH_ARRIVALS if copied == "always" else 0]] * 2
    global_batches = zip(by_node[0][0], by_node[1][0], strict=True)
    assert [sorted([*first, *second]) for first, second in global_batches] == expected
