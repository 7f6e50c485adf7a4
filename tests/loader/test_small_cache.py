"""A cache with too little room for what is open at once: what is cut, what is read by range, what is said."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import streamload
from streamload import Workers
from streamload.cache.directory import granted_bytes
from streamload.cache.part import reserved_bytes
from streamload.cache.tier import Tier
from streamload.testing.server import Fault, ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from streamload.worker import shortage
from tests.support import flat
from tests.support.tiers import until

SHARDS, SAMPLES = 10, 30
OPTIONS = ShardOptions(image_side=(8, 8), padding_bytes=(8_000, 10_000))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("small")
    write_shards(place, [SAMPLES] * SHARDS, seed=71, options=OPTIONS)
    return place


@pytest.fixture
def server(data: Path) -> Iterator[ShardServer]:
    with ShardServer(data, latency_seconds=0.005) as server:
        yield server


def room_for(data: Path, shards: float) -> int:
    return int(shards * reserved_bytes(max(path.stat().st_size for path in data.glob("*.tar"))))


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def make(server: ShardServer, cache: Path, limit: int, **options: Any) -> streamload.Loader:
    given: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "map_sample": only_key, "cache_size": limit}
    urls = f"{server.url}/{{00000..{SHARDS - 1:05d}}}.tar"
    return flat.make_loader(urls, cache_dir=cache, **{**given, **options})


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is waited for as long as it takes: a busy machine makes it in seconds."""
    for name in ("_NO_ROOM_SECONDS", "_STANDOFF_SECONDS"):
        monkeypatch.setattr(f"streamload.worker.shortage.{name}", 600.0)


def keys(batches: Any) -> list[list[str]]:
    return [batch["key"] for batch in batches]


def expected(data: Path) -> list[str]:
    return sorted(key for path in data.glob("*.tar") for key, _ in read_oracle(path))


def test_lanes_and_window_that_werent_given_are_cut_to_the_room_and_nothing_is_read_by_range(
    server: ShardServer, data: Path, tmp_path: Path, patient: None, caplog: pytest.LogCaptureFixture
) -> None:
    total_bytes = sum(path.stat().st_size for path in data.glob("*.tar"))
    with make(server, tmp_path / "cache", room_for(data, 4.1)) as loader:
        cold = keys(loader)
        state = loader.state_dict()
        sent = sum(request.sent for request in server.log)
        assert sorted(key for batch in cold for key in batch) == expected(data)
        assert sorted(key for batch in keys(loader) for key in batch) == expected(data)
        assert loader.stats().range_reads == 0
    # The head of a shard comes twice; what the next epoch begins with may have come, as far as there is room.
    assert sent <= total_bytes * (1 + 5.1 / SHARDS)
    ((_, lanes, window),) = state["sources"]
    assert 1 <= lanes < 8
    assert SAMPLES / 4 < window < 3 * SAMPLES
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"reads with lanes={lanes} and shuffle={window}, not 8 and 10,000" in said
    with make(server, tmp_path / "cache", room_for(data, 4.1)) as loader:
        assert keys(loader) == cold  # whatever the cache holds


@pytest.mark.deep
def test_a_run_that_goes_on_keeps_what_was_cut_whatever_room_there_is(
    server: ShardServer, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(server, tmp_path / "small", room_for(data, 4.1)) as loader:
        before = loader.state_dict()
        batches = iter(loader)
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = keys(batches)
    caplog.clear()
    with make(server, tmp_path / "large", 10**9) as loader:
        loader.load_state_dict(state)
        assert keys(loader) == rest
        wide = [source[1:] for source in before["sources"]]
        assert [source[1:] for source in loader.state_dict()["sources"]] != wide == [[8, 10_000]]
    assert not caplog.records
    with make(server, tmp_path / "small", room_for(data, 4.1)) as loader:
        loader.load_state_dict(before)  # of no epoch yet: nothing was decided
        assert keys(loader)[1:] == rest


def test_what_was_given_is_kept_and_read_by_range_at_once_where_it_is_certain_not_to_fit(
    server: ShardServer, data: Path, tmp_path: Path, patient: None, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"lanes": 8, "shuffle": 100, "num_workers": 0}
    with make(server, tmp_path / "cache", room_for(data, 4.1), **given) as loader:
        narrow = keys(loader)
        assert loader.stats().range_reads > 0
    (said,) = [r.getMessage() for r in caplog.records if "no room" in r.getMessage()]
    assert re.search(r"\(lanes=8 and shuffle=100; lanes=\d and shuffle=\d+ would fit\)", said)
    with make(server, tmp_path / "large", 10**9, **given) as loader:
        assert keys(loader) == narrow


def test_from_a_server_without_ranges_no_shard_is_fetched_for_each_sample(
    server: ShardServer, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.misbehave("*", Fault(ignore_range=True))
    given = {"lanes": 8, "shuffle": 100, "num_workers": 0}
    with make(server, tmp_path / "cache", room_for(data, 2.1), **given) as loader:
        narrow = keys(loader)
        assert loader.stats().origin_bytes <= 2 * sum(path.stat().st_size for path in data.glob("*.tar"))
    assert "its origin gives no byte ranges" in caplog.text
    with make(server, tmp_path / "large", 10**9, **given) as loader:
        assert keys(loader) == narrow


def test_one_lane_is_kept_where_two_shards_fit_and_the_order_where_fewer_do(
    server: ShardServer, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for room, expected, says in ((2.05, [1, 1], "lanes=1"), (1.9, [8, 10_000], "raise cache_size")):
        caplog.clear()
        with make(server, tmp_path / f"{room}", room_for(data, room), num_workers=0) as loader:
            next(iter(loader))
            assert loader.state_dict()["sources"] == [["0", *expected]]
        assert says in caplog.text


@pytest.mark.deep
def test_sizes_are_asked_for_only_where_the_room_may_be_too_little(
    server: ShardServer, data: Path, tmp_path: Path
) -> None:
    asked = []
    for limit in (room_for(data, SHARDS + 1), 10**12):
        with make(server, tmp_path / f"{limit}", limit, num_workers=0) as loader:
            keys(loader)
        asked.append(len(server.log) - sum(asked))
    assert asked[0] == asked[1] + 1  # a byte of one shard
    with make(server, tmp_path / "one", room_for(data, 4.1), train=False) as loader:
        keys(loader)
    assert len(server.log) - sum(asked) <= asked[1]


def test_a_shared_cache_says_how_large_shards_are_before_their_origin_does(
    server: ShardServer, data: Path, tmp_path: Path
) -> None:
    shared = {"shared_cache": str(tmp_path / "shared"), "num_workers": 0}
    with make(server, tmp_path / "one", 10**12, write_back=True, **shared) as loader:
        keys(loader)
        until(lambda: loader.stats().shared_stored == SHARDS)
    asked = len(server.log)
    with make(server, tmp_path / "two", room_for(data, 4.1), **shared) as loader:
        keys(loader)
        ((_, lanes, _),) = loader.state_dict()["sources"]
    assert lanes < 8
    assert len(server.log) == asked


def in_step(rank: int, url: str, rooms: list[int], place: Path) -> None:
    """One of two ranks on two nodes: its cache has this much room."""
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2
    )
    with streamload.make_loader(
        f"{url}/{{00000..{SHARDS - 1:05d}}}.tar",
        workers=Workers(map_sample=only_key),
        batch_size=4,
        num_workers=0,
        order=streamload.Order(num_batches=20),
        cache_dir=place / f"node-{rank}",
        cache_size=rooms[rank],
    ) as loader:
        found = keys(loader)
        state = streamload.gather_state(loader)
    (place / f"{rank}.json").write_text(json.dumps([found, state["sources"]]))
    torch.distributed.destroy_process_group()


def test_several_nodes_read_with_the_least_that_fits_on_one_of_them(
    server: ShardServer, data: Path, tmp_path: Path
) -> None:
    rooms = [10**9, room_for(data, 2.5)]
    ranks = (server.url, rooms, tmp_path)
    torch.multiprocessing.start_processes(in_step, ranks, nprocs=2, start_method="fork")
    (first, one), (second, other) = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (0, 1))
    assert one == other
    assert one[0][1] < 8
    given = [key for steps in (first, second) for batch in steps for key in batch]
    assert len(given) == len(set(given)) == 160


@pytest.mark.deep
def test_with_half_of_the_data_fitting_a_few_lanes_never_wait_for_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, patient: None
) -> None:
    """Shards that are kept from the last epoch make way for those that lanes wait for."""
    larger = ShardOptions(image_side=(8, 8), padding_bytes=(60_000, 62_000))
    paths = write_shards(tmp_path / "data", [32] * 20, seed=3, options=larger)
    with ShardServer(tmp_path / "data") as server:
        limit = sum(path.stat().st_size for path in paths) // 2
        urls = f"{server.url}/{{00000..00019}}.tar"
        options = {"cache_dir": tmp_path / "cache", "cache_size": limit, "map_sample": only_key}
        shape = {"lanes": 4, "shuffle": 16, "batch_size": 16, "num_workers": 4}
        with flat.make_loader(urls, **options, **shape) as loader:
            for _ in range(2):
                assert sum(len(batch["key"]) for batch in loader) == 640
            assert loader.stats().range_reads == 0
    assert "no room" not in caplog.text


def test_a_shard_that_is_published_while_room_is_measured_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else lanes that fit would be taken for too many, and read by range from then on."""
    tier = Tier(tmp_path / "tier", 10**8)
    digest, size = "a" * 32, 10**6
    part = tier.claim(digest)
    assert part is not None
    assert part.reserve(size, 0.0)
    for name, length in (("names", 0), ("data", size)):
        (part.path / name).write_bytes(bytes(length))
    granted = granted_bytes(part.path)

    def publish_after(path: Path) -> int:
        size_bytes = granted_bytes(path)
        part.publish()
        return size_bytes

    monkeypatch.setattr(shortage, "granted_bytes", publish_after)
    fills: Any = SimpleNamespace(tier=tier, prefetcher=None)
    nothing: Any = None
    room = shortage.Shortage(nothing, nothing, fills, nothing)._room({digest})
    assert tier.published(digest).exists()
    assert room.free_bytes == tier.budget.allowed_bytes - granted
