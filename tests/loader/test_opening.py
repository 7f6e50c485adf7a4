"""How far samples move in the first epoch: over local shards and remote ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed

import streamload
from streamload.daemon.warm import warm
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat
from tests.support.kills import Child, Stage
from tests.support.order_oracle import Case, sequence

COUNT = 150


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
    case = Case(0, entries, groups=1, lanes=3, window=window, opens_slowly=True)
    assert cold == [(shard, number) for _, shard, number in sequence(case, 0, 1)[0]]
    assert sorted(cold) == sorted(later) == [(n, i) for n, count in enumerate(counts) for i in range(count)]
    assert place_correlation(later) < 0.3


def test_the_order_follows_arrivals_where_shards_of_a_source_are_not_local_files(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path / "data", [3])
    remote, layout = "http://host/{00000..00009}.tar", {"batch_size": 100, "rank": 0, "world_size": 4}
    mixed = [streamload.Source(remote, 3), streamload.Source([str(path)], 1)]
    for urls, options, expected in (
        ([str(path)], {}, [False]),
        (remote, {}, [True]),
        (remote, {"groups": 4}, [True]),
        ([str(path), "http://host/0.tar"], {}, [True]),
        ("pipe:cat {0..9}.tar", {}, [True]),
        (remote, {"shuffle": 0}, [False]),
        (mixed, {}, [True, False]),
    ):
        with make(urls, tmp_path / "cache", **layout, **options) as loader:
            assert loader.state_dict()["opens_slowly"] == expected


def batches_of_node(shards: str, place: Path, rank: int, copy: str, stage: Stage) -> list[Any]:
    """The keys of each batch of one of two nodes, and how its windows open."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    with make(
        shards, place / f"node-{rank}", batch_size=4, num_samples=160, lanes=2, shuffle=40, copy=copy
    ) as loader:
        keys = [batch["key"] for batch in loader]
        return [keys, loader.state_dict()["opens_slowly"]]


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
    assert [opens_slowly for _, opens_slowly in by_node] == [[copied == "always"]] * 2
    global_batches = zip(by_node[0][0], by_node[1][0], strict=True)
    assert [sorted([*first, *second]) for first, second in global_batches] == expected
