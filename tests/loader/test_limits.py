"""Whatever runs out, a run goes on with less, or ends with an error that names the limit: none just stops."""

from __future__ import annotations

import multiprocessing.popen_fork
import multiprocessing.synchronize  # noqa: F401 - before a user without rights has to find it
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload.cache.copying
import streamload.loader.pool  # noqa: F401 - before they have to be found without a descriptor
from streamload import Workers, limits
from streamload.cache.shard import Shard, ShardList
from streamload.cache.tier import Tier
from streamload.descriptors import Descriptor, give_up_when_short
from streamload.errors import LimitReached, StreamloadError
from streamload.ipc.buffers import BufferPool, buffers_for
from streamload.metrics import Counters
from streamload.origins.origin import Origin
from streamload.prefetch import fallback
from streamload.prefetch.prefetcher import Prefetcher, PrefetchOptions
from streamload.prefetch.scheduler import FillScheduler
from streamload.testing.shards import write_shards
from streamload.urls import expand_urls
from tests.support import flat
from tests.support.disks import NotPossibleHere, small_disk
from tests.support.fills import requests_for
from tests.support.kills import Child
from tests.support.tiers import until

SHARDS, SAMPLES = 40, 4
FILES = 85
"""About 45 are taken by a loader before it opens a shard; each of the 40 shards would take two."""
_NOBODY = 65534
_MAY_SET_LIMITS = sys.platform.startswith("linux")

pytestmark = pytest.mark.skipif(not _MAY_SET_LIMITS, reason="the limits are Linux's")


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> str:
    paths = write_shards(tmp_path_factory.mktemp("data"), [SAMPLES] * SHARDS, seed=3)
    return str(paths[0].parent / f"{{00000..{SHARDS - 1:05d}}}.tar")


def named(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"], "bytes": len(sample["jpg"])}


def make(urls: str, cache: Path, **options: Any) -> Any:
    """A loader whose shards are all open at once, unless the options say otherwise."""
    defaults = {"num_workers": 0, "batch_size": 8, "lanes": SHARDS, "shuffle": SHARDS * SAMPLES}
    workers = Workers(map_sample=options.pop("map_sample", named))
    return flat.make_loader(urls, workers=workers, cache_dir=cache, **(defaults | options))


def keys_of(loader: Any) -> list[str]:
    return [key for batch in loader for key in batch["key"]]


def outcome(run: Callable[[], Any]) -> dict[str, Any]:
    """What a run gives in a process of its own, whose limits end with it."""

    def work(stage: object) -> dict[str, Any]:
        limits.PATIENCE_SECONDS = 0.5
        try:
            return {"value": run(), "kind": "", "text": ""}
        except Exception as exc:
            kinds = [kind.__name__ for kind in type(exc).__mro__]
            return {"value": None, "kind": kinds, "text": str(exc)}

    with Child(work) as child:
        found: dict[str, Any] = child.finish(120)
    return found


def allow_files(more: int) -> None:
    """Let this process, and those that it starts, have so many more files open, whatever they ask for."""
    most = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def use_up_files() -> list[int]:
    opened = []
    with suppress(OSError):
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    return opened


@pytest.mark.parametrize("count", [pytest.param(0, marks=pytest.mark.deep), 1])
@pytest.mark.parametrize("origin", ["", "pipe:cat "])
@pytest.mark.sampled(1)
def test_a_low_limit_of_open_files_changes_no_sample_and_no_order(
    count: int, origin: str, urls: str, tmp_path: Path
) -> None:
    with make(origin + urls, tmp_path / "plenty") as loader:
        expected = keys_of(loader)

    def run() -> list[str]:
        allow_files(more=FILES)
        with make(origin + urls, tmp_path / "few", num_workers=count) as loader:
            return keys_of(loader)

    found = outcome(run)
    assert found["text"] == ""
    assert found["value"] == expected
    assert len(set(expected)) == SHARDS * SAMPLES


def test_a_state_from_a_machine_with_a_higher_limit_goes_on(urls: str, tmp_path: Path) -> None:
    with make(urls, tmp_path) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
        rest = [key for batch in batches for key in batch["key"]]

    def run() -> list[str]:
        allow_files(more=FILES)
        with make(urls, tmp_path) as loader:
            loader.load_state_dict(state)
            return keys_of(loader)

    assert outcome(run)["value"] == rest


@pytest.mark.deep
def test_a_shard_that_was_evicted_while_it_was_closed_is_fetched_again_and_the_order_stays(
    urls: str, tmp_path: Path
) -> None:
    total_bytes = sum(path.stat().st_size for path in Path(urls).parent.iterdir())
    with make("pipe:cat " + urls, tmp_path / "plenty", shuffle=40, lanes=8) as loader:
        expected = keys_of(loader)

    def run() -> list[str]:
        allow_files(more=FILES)
        cache_bytes = total_bytes * 2 // 3
        with make(
            "pipe:cat " + urls, tmp_path / "few", shuffle=40, lanes=8, cache_size=cache_bytes
        ) as loader:
            return keys_of(loader)

    found = outcome(run)
    assert found["text"] == ""
    assert found["value"] == expected


class Spare:
    """Files that are kept open for later."""

    def __init__(self, numbers: list[int]):
        self.numbers = numbers

    def give_up(self) -> bool:
        os.close(self.numbers.pop())
        return True


def test_memory_for_a_batch_takes_the_descriptor_of_a_shard_that_can_be_opened_again() -> None:
    def run() -> int:
        slots = BufferPool(batches=2)
        allow_files(more=20)
        spare = Spare(use_up_files())
        count = len(spare.numbers)
        give_up_when_short(spare.give_up)
        assert slots.empty((1000,), torch.uint8) is not None
        return count - len(spare.numbers)

    assert outcome(run) == {"value": 1, "kind": "", "text": ""}


def opens_files(sample: dict[str, Any]) -> dict[str, Any]:
    """Open for good what the process may still open, and what its shards give up for that."""
    with suppress(OSError):
        while True:
            Descriptor.open(os.devnull, os.O_RDONLY)
    return named(sample)


def test_a_worker_whose_table_of_open_files_is_full_ends_the_run_with_the_number_to_set(
    urls: str, tmp_path: Path
) -> None:
    def run() -> None:
        fallback.PATIENCE_SECONDS = 0.5
        allow_files(more=60)
        with make(urls, tmp_path, num_workers=1, map_sample=opens_files) as loader:
            keys_of(loader)

    found = outcome(run)
    assert "LimitReached" in found["kind"] or "RuntimeError" in found["kind"]
    assert "ulimit -n" in found["text"]


def test_a_shard_that_lacks_files_ends_the_run_although_those_that_are_there_need_none(
    urls: str, tmp_path: Path
) -> None:
    there, lacking = ShardList(expand_urls(urls), None)[:2]

    def run() -> None:
        fallback.PATIENCE_SECONDS = 0.5
        tier = Tier(tmp_path, 1 << 30)
        ahead = Prefetcher(tier, no_origin, PrefetchOptions(threads=1), counts=Counters())
        with closing(ahead):
            ahead.want(requests_for([there]))
            until(tier.published(there.digest).exists)
            allow_files(more=5)
            os.close(use_up_files().pop())  # which is enough for a look
            ahead.want(requests_for([there, lacking]))
            for _ in range(200):
                ahead.look_again()
                ahead.check()
                time.sleep(0.02)

    found = outcome(run)
    assert "LimitReached" in found["kind"]
    assert f"{lacking.name} can't be stored in the cache" in found["text"]
    assert "ulimit -n" in found["text"]


def no_origin(shard: Shard, stop: threading.Event) -> Origin:
    raise AssertionError(f"{shard.name} is indexed where it is")


def test_a_training_process_whose_table_of_open_files_is_full_is_told_so_when_it_starts(
    urls: str, tmp_path: Path
) -> None:
    def run() -> None:
        allow_files(more=60)
        loader = make(urls, tmp_path, num_workers=1)
        use_up_files()
        keys_of(loader)

    found = outcome(run)
    assert "ulimit -n" in found["text"]
    assert "LimitReached" in found["kind"]


def test_processes_that_are_refused_are_an_error_that_names_the_limit(tmp_path: Path, urls: str) -> None:
    def run() -> None:
        become_nobody(tmp_path, Path(urls).parent)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        keys_of(make(urls, tmp_path / "cache", num_workers=2))

    found = outcome(run)
    assert "LimitReached" in found["kind"], found
    assert "ulimit -u" in found["text"]


def test_the_process_of_a_command_that_is_refused_ends_the_run_and_gives_no_shard_up(
    tmp_path: Path, urls: str
) -> None:
    def run() -> int:
        become_nobody(tmp_path, Path(urls).parent)
        one_by_one = {"lanes": 1, "shuffle": 0, "ahead": 1}
        loader = make("pipe:cat " + urls, tmp_path / "cache", max_bad_shards=None, **one_by_one)
        batches = iter(loader)
        next(batches)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        with pytest.raises(LimitReached, match=r"process of a command can't be started.*ulimit -u"):
            list(batches)
        return int(loader.stats().shards_given_up)

    assert outcome(run) == {"value": 0, "kind": "", "text": ""}


def become_nobody(*places: Path) -> None:
    """Root may have any number of processes."""
    if os.geteuid() == 0:
        for place in places:
            os.chown(place, _NOBODY, _NOBODY)
            for folder in (place, *place.parents):
                with suppress(OSError):
                    folder.chmod(folder.stat().st_mode | 0o055)
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)


def test_threads_that_are_refused_are_an_error_that_names_the_limit(tmp_path: Path) -> None:
    def run() -> list[str]:
        become_nobody(tmp_path)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        with pytest.raises(LimitReached, match="ulimit -u"):
            FillScheduler(2, lambda: None, threading.Event()).start()
        return []

    assert outcome(run)["text"] == ""


def test_fewer_threads_than_wanted_fetch_fewer_shards_at_once() -> None:
    end = threading.Event()
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def refuse_the_third(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    scheduler = FillScheduler(4, end.wait, end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_the_third)
        scheduler.start()
    assert len(scheduler._threads) == 2
    scheduler.close()


def test_memory_maps_that_are_refused_are_an_error_that_names_the_limit() -> None:
    def run() -> list[str]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = (pages + 1000) * resource.getpagesize()
        pool = buffers_for(1, 4)[0]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        with pytest.raises(LimitReached, match="ulimit -v"):
            pool.empty((1 << 30,), torch.uint8)
        with pytest.raises(LimitReached, match="ulimit -v"):
            limits.anonymous_memory(1 << 30)
        return []

    assert outcome(run)["text"] == ""


def test_each_shortage_is_explained_by_the_limit_that_it_met() -> None:
    said = {
        number: limits.advice(OSError(number, os.strerror(number))) for number in (24, 23, 11, 12)
    }  # EMFILE, ENFILE, EAGAIN, ENOMEM
    assert "ulimit -n" in said[24]
    assert "fs.file-max" in said[23]
    assert "ulimit -u" in said[11]
    assert said[12]
    assert limits.advice(OSError(2, "no such file")) == ""
    assert isinstance(limits.reached("x", OSError(24, "too many")), StreamloadError)


def test_a_full_table_of_open_files_is_said_to_be_full() -> None:
    def run() -> list[int]:
        allow_files(more=3)
        use_up_files()
        return [limits.open_files(), limits.most_files()]

    count, most = outcome(run)["value"]
    assert count == most > 0


@pytest.mark.deep
def test_a_disk_without_inodes_costs_no_sample(urls: str, tmp_path: Path) -> None:
    with make("pipe:cat " + urls, tmp_path / "plenty", lanes=4, shuffle=20) as loader:
        expected = keys_of(loader)
    (tmp_path / "disk").mkdir()

    def run() -> list[str] | str:
        try:
            small_disk(tmp_path / "disk", 64 << 20, inodes=40)  # for three shards or so
        except NotPossibleHere as exc:
            return str(exc)
        with make("pipe:cat " + urls, tmp_path / "disk" / "cache", lanes=4, shuffle=20) as loader:
            return keys_of(loader)

    found = outcome(run)
    if isinstance(found["value"], str):
        pytest.skip(found["value"])
    assert found["text"] == ""
    assert found["value"] == expected


def large(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"], "image": torch.zeros(1 << 19)}


def test_shared_memory_of_a_container_may_be_smaller_than_a_batch(urls: str, tmp_path: Path) -> None:
    def run() -> list[int] | str:
        try:
            small_disk(Path("/dev/shm"), 1 << 20)
        except NotPossibleHere as exc:
            return str(exc)
        with make(urls, tmp_path, num_workers=1, map_sample=large) as loader:
            return [len(batch["key"]) for batch in loader if batch["image"].nbytes == 8 << 21]

    found = outcome(run)
    if isinstance(found["value"], str):
        pytest.skip(found["value"])
    assert found["text"] == ""
    assert sum(found["value"]) == SHARDS * SAMPLES


def test_without_a_limit_of_files_many_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert limits.most_files() > 100_000
