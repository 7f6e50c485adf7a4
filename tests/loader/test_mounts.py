"""Trainings over shards on a network mount: a FUSE file system that counts, stalls, fails and goes away."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload.daemon.warm import warm
from streamload.errors import OriginOutage
from streamload.loader import worker_config
from streamload.origins.origin import OriginOptions
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from tests.support import flat
from tests.support.kills import Child, Stage
from tests.support.mounts import CountingMount
from tests.support.tiers import until

COUNTS = [40] * 6
FORK: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
IN_ORDER: dict[str, Any] = {"shuffle": 0, "lanes": 1, "ahead": "1KB"}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[CountingMount]:
    write_shards(tmp_path / "data", COUNTS)
    with CountingMount(tmp_path / "data", tmp_path / "nas") as mounted:
        yield mounted


def urls(mount: CountingMount) -> str:
    return f"{mount.path}/{{00000..{len(COUNTS) - 1:05d}}}.tar"


def size_of(mount: CountingMount) -> int:
    return sum(path.stat().st_size for path in mount.source.glob("*.tar"))


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def make(shards: str, cache: Path, **options: Any) -> streamload.Loader:
    defaults: dict[str, Any] = {
        "batch_size": 8,
        "num_workers": 0,
        "cache_size": "100MB",
        "map_sample": only_key,
    }
    return flat.make_loader(shards, cache_dir=cache, **(defaults | options))


def keys(loader: Any) -> list[str]:
    return [key for batch in loader for key in batch["key"]]


def everything() -> list[str]:
    return [f"{shard:05d}{number:06d}" for shard, count in enumerate(COUNTS) for number in range(count)]


def epochs_of_rank(place: str, cache: Path, rank: int, go: Path, stage: Stage) -> list[list[str]]:
    """Two epochs of one of two ranks; before the second it waits for a file."""
    with make(place, cache, rank=rank, world_size=2, **FORK | {"num_workers": 2}) as loader:
        first = keys(loader)
        stage.enter("first epoch")
        while not go.exists():
            time.sleep(0.01)
        return [first, keys(loader)]


def test_two_ranks_of_two_workers_read_each_byte_of_a_mount_once(
    mount: CountingMount, tmp_path: Path
) -> None:
    place, cache, go = urls(mount), tmp_path / "cache", tmp_path / "go"
    ranks = [
        Child(lambda stage, rank=rank: epochs_of_rank(place, cache, rank, go, stage))  # type: ignore[misc]
        for rank in range(2)
    ]
    with ranks[0], ranks[1]:
        assert all(rank.stage.wait_for("first epoch", 120) for rank in ranks)
        first_bytes = mount.read_bytes()
        go.touch()
        results = [rank.finish(120) for rank in ranks]
    assert round(first_bytes / size_of(mount), 2) == 1.0  # the kernel may read a page twice
    assert mount.read_bytes() == first_bytes
    for epoch in range(2):
        assert sorted(key for result in results for key in result[epoch]) == everything()


def test_a_mount_that_stalls_in_one_shard_holds_up_no_other_and_not_the_end(
    mount: CountingMount, tmp_path: Path
) -> None:
    mount.stall("00003.tar")

    def work(stage: Stage) -> list[str]:
        loader = make(urls(mount), tmp_path / "cache", **IN_ORDER | FORK)
        got = []
        with loader:
            for batch in loader:
                got += batch["key"]
                if len(got) == 3 * COUNTS[0]:
                    until(mount.stalled)
                    break
        return got

    with Child(work) as child:
        got = child.finish(120)
    assert len(got) == 3 * COUNTS[0]
    assert mount.stalled()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers that notice trouble within seconds, and wait long for its end."""
    quick = functools.partial(OriginOptions, attempts=2, backoff_seconds=0.01, stall_seconds=1.0)
    monkeypatch.setattr(worker_config, "OriginOptions", quick)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("trouble", ["ESTALE", "EIO", "stall", "killed", "unmounted"])
def test_a_mount_that_is_away_is_waited_for_and_no_sample_is_lost(
    trouble: str, mount: CountingMount, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def repair() -> None:
        while "is down" not in caplog.text:
            time.sleep(0.01)
        mount.go_on()
        if not mount.is_served:
            mount.unmount()
            mount.mount()

    with make(urls(mount), tmp_path / "cache", **IN_ORDER) as loader:
        batches = iter(loader)
        got = list(next(batches)["key"])
        if trouble == "stall":
            mount.stall()
        elif trouble in ("killed", "unmounted"):
            mount.kill() if trouble == "killed" else mount.unmount()
        else:
            mount.fail(getattr(errno, trouble))
        with ThreadPoolExecutor(1) as pool:
            repaired = pool.submit(repair)
            got += [key for batch in batches for key in batch["key"]]
            repaired.result()
        assert loader.stats().shards_given_up == 0
    assert got == everything()
    assert f"{mount.path} is down" in caplog.text
    assert f"{mount.path} is back" in caplog.text


@pytest.mark.usefixtures("impatient")
def test_a_mount_that_stays_away_ends_the_run_with_an_outage(mount: CountingMount, tmp_path: Path) -> None:
    with make(urls(mount), tmp_path / "cache", origin_wait=0.5, **IN_ORDER) as loader:
        batches = iter(loader)
        next(batches)
        mount.fail(errno.EIO)
        with pytest.raises(OriginOutage, match="nothing has come"):
            keys(batches)


def test_a_file_that_was_replaced_is_noticed_as_an_etag_is(mount: CountingMount, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with make(urls(mount), cache) as loader:
        assert sorted(keys(loader)) == everything()
    write_shards(tmp_path / "other", [16], seed=5)
    os.replace(tmp_path / "other" / "00000.tar", mount.source / "00000.tar")
    before = mount.read_bytes()
    with make(urls(mount), cache) as loader:  # also with revalidate="never", as files are replaced in place
        assert sorted(keys(loader)) == everything()[:16] + everything()[COUNTS[0] :]
        assert loader.stats().shards_changed == 1
    assert mount.read_bytes() - before == (mount.source / "00000.tar").stat().st_size


def test_a_cache_that_is_too_small_reads_in_place_and_says_so(
    mount: CountingMount, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    with make(urls(mount), cache, cache_size=size_of(mount) // 10) as loader:
        assert sorted(keys(loader)) == everything()
        assert loader.stats().origin_bytes == 0
    (line,) = [record for record in caplog.records if "network file system" in record.getMessage()]
    assert line.levelno == logging.WARNING
    assert f"fuse.counting at {mount.path}" in line.getMessage()
    assert "less than a fifth" in line.getMessage()


def test_a_cache_smaller_than_what_is_open_reads_samples_by_range(
    mount: CountingMount, tmp_path: Path
) -> None:
    options = {"cache_size": size_of(mount) * 3 // 10, "lanes": 6, "shuffle": 100, "copy": "always"}
    with make(urls(mount), tmp_path / "cache", **options) as loader:
        assert sorted(keys(loader)) == everything()
        assert sorted(keys(loader)) == everything()
        assert loader.stats().range_reads


@pytest.mark.parametrize("copy", ["auto", "always"])
def test_a_state_of_a_run_without_copies_goes_on_with_them_and_back(
    copy: str, mount: CountingMount, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"lanes": 3, "shuffle": 60}
    with make(f"{mount.source}/{{00000..00005}}.tar", tmp_path / "local", **options) as loader:
        expected = keys(loader) + keys(loader)
    with make(urls(mount), tmp_path / "in place", copy="never", **options) as loader:
        batches = iter(loader)
        got = [key for _ in range(11) for key in next(batches)["key"]]
        state = json.loads(json.dumps(loader.state_dict()))
    with make(urls(mount), tmp_path / "copies", copy=copy, **options) as loader:
        loader.load_state_dict(state)
        batches = iter(loader)
        got += [key for _ in range(7) for key in next(batches)["key"]]
        state = json.loads(json.dumps(loader.state_dict()))
        assert loader.stats().origin_bytes
    with make(urls(mount), tmp_path / "in place", copy="never", **options) as loader:
        loader.load_state_dict(state)
        assert got + keys(loader) + keys(loader) == expected
        assert loader.stats().origin_bytes == 0


def test_the_first_pass_over_copied_shards_opens_as_over_remote_ones_and_its_state_goes_anywhere(
    mount: CountingMount, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"lanes": 3, "shuffle": 60}
    with (
        ShardServer(mount.source) as server,
        make(f"{server.url}/{{00000..00005}}.tar", tmp_path / "http", **options) as loader,
    ):
        expected = keys(loader)
        remote = loader.state_dict()
    with make(urls(mount), tmp_path / "copies", **options) as loader:
        batches = iter(loader)
        got = [key for _ in range(7) for key in next(batches)["key"]]
        state = loader.state_dict()
    assert state["opens_slowly"] == remote["opens_slowly"] == [True]
    assert got == expected[:56]
    with make(urls(mount), tmp_path / "in place", copy="never", **options) as loader:
        loader.load_state_dict(state)
        assert got + keys(loader) == expected


def test_warm_copies_what_a_training_then_finds(mount: CountingMount, tmp_path: Path) -> None:
    report = warm(urls(mount), cache_dir=tmp_path / "cache", cache_size="100MB")
    assert (report.shards_complete, report.shards_local, report.bytes_arrived) == (6, 0, size_of(mount))
    before = mount.read_bytes()
    assert before == size_of(mount)
    with make(urls(mount), tmp_path / "cache") as loader:
        assert sorted(keys(loader)) == everything()
        assert loader.num_batches == len(everything()) // 8
    assert mount.read_bytes() == before
    again = warm(urls(mount), cache_dir=tmp_path / "cache", cache_size="100MB")
    assert again.shards_found_complete == 6


def test_nodes_share_what_one_of_them_read_of_a_mount(mount: CountingMount, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"shared": str(tmp_path / "shared"), "write_back": True}
    for node in range(2):
        with make(urls(mount), tmp_path / f"node-{node}", **shared) as loader:
            assert sorted(keys(loader)) == everything()
            wait_for_writes(tmp_path / "shared")
    assert mount.read_bytes() == size_of(mount)


def wait_for_writes(shared: Path) -> None:
    while len([*shared.rglob("index*")]) < len(COUNTS):
        time.sleep(0.01)
