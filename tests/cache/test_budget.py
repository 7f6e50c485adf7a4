"""The limit and the floor of free disk: for a fill, when others fill the disk, for two jobs on one tier."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Cache, Workers
from streamload.cache.demand import DemandFile
from streamload.cache.fill import Filled, fill
from streamload.cache.locks import FileLock
from streamload.cache.part import Part
from streamload.cache.shard import shard_of
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier, open_tier
from streamload.errors import CacheFull
from streamload.options import FreeDisk, read_settings
from streamload.origins.origin import Origin, open_origin
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.support import flat

A, B, C = (letter * 32 for letter in "abc")
KIB = 1024


@dataclass
class Disk:
    """A disk of a given size, on which the tier and others lie."""

    root: Path
    total: int
    others: int = 0

    @property
    def free(self) -> int:
        files = [path for path in self.root.rglob("*") if path.is_file()]
        taken = sum(-(-path.stat().st_size // 4096) * 4096 for path in files)
        return max(0, self.total - self.others - taken)

    def usage(self, path: Path) -> Disk:
        assert path == self.root
        return self


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "tier", 1000 * KIB)


def tier_on(disk: Disk, floor: int, limit: int = 1 << 30, **options: Any) -> Tier:
    keep = FreeDisk(size_bytes=floor)
    return Tier(disk.root, limit, free_disk=keep, disk_usage=disk.usage, **options)


def begin(tier: Tier, digest: str, size: int, next_use: float = 0) -> Part | None:
    part = tier.claim(digest)
    assert part is not None
    if part.reserve(size, next_use):
        (part.path / "names").write_bytes(b"")
        return part
    part.discard()
    return None


def publish(tier: Tier, digest: str, size: int) -> Path:
    part = begin(tier, digest, size)
    assert part is not None
    (part.path / "data").write_bytes(os.urandom(size))
    part.publish()
    return tier.published(digest)


def held(tier: Tier) -> set[str]:
    return {shard.digest[0] for shard in tier.shards()}


def test_a_fill_leaves_the_floor_free_whatever_the_limit_says(disk: Disk) -> None:
    tier = tier_on(disk, 500 * KIB)
    publish(tier, A, 300 * KIB)
    publish(tier, B, 300 * KIB)  # A makes way
    assert held(tier) == {"b"}
    assert disk.free >= 500 * KIB
    assert begin(tier, C, 600 * KIB) is None
    assert tier.budget.bound.startswith("the free space of its disk")


def test_what_is_reserved_and_not_yet_written_counts(disk: Disk) -> None:
    tier = tier_on(disk, 400 * KIB)
    first = begin(tier, A, 300 * KIB)
    assert first is not None
    assert disk.free > 900 * KIB
    assert begin(tier, B, 300 * KIB) is None
    (first.path / "data").write_bytes(bytes(300 * KIB))
    assert begin(tier, B, 300 * KIB) is None
    assert begin(tier, B, 200 * KIB) is not None
    first.discard()


def test_what_is_written_while_the_disk_is_measured_counts_too(disk: Disk) -> None:
    tier = tier_on(disk, 400 * KIB)
    first = begin(tier, A, 300 * KIB)
    assert first is not None

    @dataclass
    class Measured:
        total: int
        free: int

    def usage(path: Path) -> Measured:
        found = Measured(disk.total, disk.free)
        (first.path / "data").write_bytes(bytes(300 * KIB))
        return found

    other = Tier(disk.root, None, free_disk=FreeDisk(size_bytes=400 * KIB), disk_usage=usage)
    assert begin(other, B, 350 * KIB) is None
    first.discard()


def test_without_a_floor_the_disk_alone_is_the_limit(disk: Disk) -> None:
    tier = tier_on(disk, 0)
    publish(tier, A, 900 * KIB)
    assert begin(tier, B, 1100 * KIB) is None
    assert held(tier) == {"a"}


def test_when_others_fill_the_disk_the_tier_makes_way_down_to_the_floor_but_not_below_what_is_open(
    disk: Disk,
) -> None:
    tier = tier_on(disk, 200 * KIB, enforce_seconds=0)
    for digest in (A, B, C):
        publish(tier, digest, 200 * KIB)
    reader = FileLock.acquire(tier.published(B) / "names", shared=True)
    assert reader is not None
    disk.others = 200 * KIB
    tier.budget.enforce_limits()
    assert held(tier) == {"b", "c"}
    assert disk.free >= 200 * KIB
    disk.others = 700 * KIB
    for _ in range(2):
        tier.budget.enforce_limits()
        assert held(tier) == {"b"}
    reader.close()
    tier.budget.enforce_limits()
    assert held(tier) == set()
    disk.others = 0
    publish(tier, A, 200 * KIB)


def test_a_fill_that_was_granted_its_room_counts_when_others_fill_the_disk(disk: Disk) -> None:
    tier = tier_on(disk, 200 * KIB, enforce_seconds=0)
    publish(tier, A, 200 * KIB)
    part = begin(tier, B, 400 * KIB)
    assert part is not None
    tier.budget.enforce_limits()
    disk.others = 250 * KIB
    tier.budget.enforce_limits()
    assert held(tier) == {"b"}
    (part.path / "data").write_bytes(bytes(400 * KIB))
    part.publish()
    assert disk.free >= 200 * KIB


def test_nothing_goes_while_there_is_enough_free(disk: Disk) -> None:
    tier = tier_on(disk, 100 * KIB, enforce_seconds=0)
    for digest in (A, B, C):
        publish(tier, digest, 200 * KIB)
    tier.budget.enforce_limits()
    tier.budget.enforce_limits()
    assert held(tier) == {"a", "b", "c"}


def test_the_last_limit_that_was_given_holds_for_all_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="streamload")
    first = Tier(tmp_path / "tier", 900 * KIB)
    assert not caplog.records
    other = Tier(tmp_path / "tier", 500 * KIB)
    assert Tier(tmp_path / "tier").limit_bytes == 500 * KIB
    publish(first, A, 200 * KIB)
    publish(first, B, 200 * KIB)
    publish(first, C, 200 * KIB)
    assert len(held(first)) == 2
    assert first.limit_bytes == other.limit_bytes
    (line,) = caplog.records
    assert f"limit changed from {900 * KIB} to {500 * KIB} bytes" in line.getMessage()


def test_a_run_that_gives_no_limit_takes_the_one_that_the_tier_has(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    assert open_tier(read_settings(cache_dir=root, cache_size="3MB", environ={})).limit_bytes == 3_000_000
    assert open_tier(read_settings(cache_dir=root, environ={})).limit_bytes == 3_000_000
    environ = {"STREAMLOAD_CACHE_SIZE": "2MB"}
    assert open_tier(read_settings(cache_dir=root, environ=environ)).limit_bytes == 2_000_000
    assert open_tier(read_settings(cache_dir=root, environ={})).limit_bytes == 2_000_000


def test_what_lies_beside_the_shards_is_within_the_limit(tmp_path: Path) -> None:
    """The lock, the tier's record, and what runs announce, of each process up to 32 KiB."""
    tier = Tier(tmp_path / "tier", 200 * KIB)
    assert begin(tier, A, 150 * KIB) is not None
    run = DemandFile(tier.root / "runs")
    run.announce(f"{number:032x}" for number in range(4096))
    other = Tier(tmp_path / "other", 200 * KIB)
    shutil.copytree(tier.root / "runs", other.root / "runs", dirs_exist_ok=True)
    lock = FileLock.acquire(other.root / "runs" / run.path.name)  # else it is a dead process's
    assert lock is not None
    with pytest.raises(CacheFull):
        begin(other, A, 150 * KIB)
    lock.close()
    run.close()


def test_a_lower_limit_is_kept_to_by_those_who_run_already(tmp_path: Path) -> None:
    running = Tier(tmp_path / "tier", 900 * KIB, enforce_seconds=0)
    for digest in (A, B, C):
        publish(running, digest, 200 * KIB)
    running.budget.enforce_limits()
    Tier(tmp_path / "tier", 500 * KIB)
    running.budget.enforce_limits()
    assert len(held(running)) == 2
    assert running.used_bytes <= running.limit_bytes == 500 * KIB


# --- whole runs ---

COUNTS = [30, 30, 30, 30]
OPTIONS = ShardOptions(padding_bytes=(4000, 6000))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "data", COUNTS, seed=51, options=OPTIONS)
    with ShardServer(tmp_path / "data") as server:
        yield server


def make(server: ShardServer, cache: Path, shards: int = 4, **options: Any) -> streamload.Loader:
    given = {"batch_size": 1, "num_workers": 2, "map_sample": key_of, "with_keys": True, "shuffle": 10}
    return flat.make_loader(
        f"{server.url}/{{00000..{shards - 1:05d}}}.tar", cache_dir=cache, **{**given, "lanes": 1, **options}
    )


def key_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def eventually(holds: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def test_a_running_job_follows_a_lower_limit_within_seconds_though_it_does_nothing(
    server: ShardServer, tmp_path: Path
) -> None:
    with make(server, tmp_path / "cache", cache_size="10MB") as loader:
        assert len(list(loader)) == sum(COUNTS)
        used = Tier(tmp_path / "cache").used_bytes
        other = Tier(tmp_path / "cache", used * 2 // 3)
        assert eventually(lambda: other.used_bytes <= used * 2 // 3)
        assert len(list(loader)) == sum(COUNTS)
        assert other.used_bytes <= used * 2 // 3


def is_even(entry: Any) -> bool:
    return entry.number % 2 == 0


def is_odd(entry: Any) -> bool:
    return entry.number % 2 == 1


def test_two_jobs_with_other_limits_that_keep_other_samples_share_a_tier(
    server: ShardServer, tmp_path: Path
) -> None:
    keys = [key for n in range(4) for key, _ in read_oracle(tmp_path / "data" / f"{n:05d}.tar")]
    with (
        make(server, tmp_path / "cache", keep=is_even, cache_size="9MB") as even,
        make(server, tmp_path / "cache", keep=is_odd, cache_size="5MB", seed=1) as odd,
    ):
        for _ in range(2):
            seen = [(a["key"][0], b["key"][0]) for a, b in zip(even, odd, strict=True)]
            assert sorted(a for a, _ in seen) == keys[::2]
            assert sorted(b for _, b in seen) == keys[1::2]
    assert [len(server.requests(f"{n:05d}.tar")) for n in range(4)] == [1, 1, 1, 1]
    assert Tier(tmp_path / "cache").limit_bytes == 5_000_000


def test_a_job_that_lowers_the_limit_in_the_middle_of_anothers_epoch_takes_nothing_from_it(
    server: ShardServer, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    keys = [key for n in range(4) for key, _ in read_oracle(data / f"{n:05d}.tar")]
    some = sum(path.stat().st_size for path in data.glob("*.tar")) * 3 // 4
    with make(server, tmp_path / "cache", keep=is_even, cache_size="9MB") as even:
        first = iter(even)
        seen = [next(first)["key"][0] for _ in range(20)]
        with make(server, tmp_path / "cache", keep=is_odd, cache_size=some, seed=1) as odd:
            assert sorted(batch["key"][0] for batch in odd) == keys[1::2]
        assert sorted([*seen, *(batch["key"][0] for batch in first)]) == keys[::2]
        tier = Tier(tmp_path / "cache")
        assert tier.limit_bytes == some
        assert eventually(lambda: tier.used_bytes <= some)


def test_a_data_set_that_grows_between_runs_costs_what_is_new(server: ShardServer, tmp_path: Path) -> None:
    """By two shards, and by some samples of one that it had."""
    data = tmp_path / "data"

    def run(shards: int) -> list[str]:
        with streamload.make_loader(
            f"{server.url}/{{00000..{shards - 1:05d}}}.tar",
            batch_size=1,
            num_workers=2,
            workers=Workers(map_sample=key_of),
            cache_dir=tmp_path / "cache",
            cache_size="1GB",
            cache=Cache(revalidate="start"),
        ) as loader:
            found = sorted(batch["key"][0] for batch in loader)
        assert found == sorted(key for n in range(shards) for key, _ in read_oracle(data / f"{n:05d}.tar"))
        return found

    before = run(4)
    write_shards(tmp_path / "more", [30, 30, 30, 45, 30, 30], seed=51, options=OPTIONS)
    for name in ("00003.tar", "00004.tar", "00005.tar"):
        (tmp_path / "more" / name).rename(data / name)
    asked = len(server.log)
    assert len(run(6)) == len(before) + 15 + 60
    sizes = {path.name: path.stat().st_size for path in data.glob("*.tar")}
    sent = dict.fromkeys(sizes, 0)
    for request in server.log[asked:]:
        sent[request.path] += request.sent
    assert all(sent[f"{n:05d}.tar"] <= 1 for n in range(3))
    assert all(sizes[name] <= sent[name] <= sizes[name] + 1 for name in sizes if name >= "00003.tar")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", place]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def free_bytes(place: Path) -> int:
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def test_a_run_leaves_its_floor_free_and_makes_way_for_a_file_of_others(
    tmp_path: Path, small_disk: Path
) -> None:
    """Workers may keep shards of their last batches open, and open shards stay: there are many small ones."""
    floor, counts = 300_000, [6] * 20
    write_shards(tmp_path / "data", counts, seed=51, options=OPTIONS)
    options = {"cache_size": "1GB", "free_disk": floor}
    with (
        ShardServer(tmp_path / "data") as server,
        make(server, small_disk / "cache", shards=len(counts), **options) as loader,
    ):
        for _ in range(2):
            assert len(list(loader)) == sum(counts)
            assert free_bytes(small_disk) >= floor
        (small_disk / "checkpoint").write_bytes(bytes(free_bytes(small_disk) - floor // 2))
        assert eventually(lambda: free_bytes(small_disk) >= floor)


def test_by_default_a_fifth_of_a_small_disk_stays_free(
    server: ShardServer, tmp_path: Path, small_disk: Path
) -> None:
    with make(server, small_disk / "cache", cache_size="1GB") as loader:
        assert len(list(loader)) == sum(COUNTS)
        assert free_bytes(small_disk) >= (1 << 20) // 5


def test_a_verdict_for_which_the_disk_has_no_room_leaves_nothing_locked(
    server: ShardServer, small_disk: Path
) -> None:
    tier = Tier(small_disk / "cache", 1 << 30, free_disk=FreeDisk(size_bytes=0))
    shard = shard_of(f"{server.url}/nowhere.tar", None)
    stop = threading.Event()

    def opened_on_a_full_disk() -> Origin:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (small_disk / "log").write_bytes(bytes(2 << 20))
        return open_origin(shard.url, stop=stop)

    part = tier.claim(shard.digest)
    assert part is not None
    outcome = fill(part, shard, opened_on_a_full_disk, next_use=lambda: 0.0, stop=stop)
    assert outcome.result is Filled.NO_ROOM
    assert not tier.parts(shard.digest)
    (small_disk / "log").unlink()
    part = tier.claim(shard.digest)
    assert part is not None
    outcome = fill(part, shard, lambda: open_origin(shard.url, stop=stop), next_use=lambda: 0.0, stop=stop)
    assert outcome.result is Filled.GAVE_UP


def test_a_disk_that_fills_up_during_a_fill_costs_another_shard_and_not_the_fill(
    server: ShardServer, tmp_path: Path, small_disk: Path
) -> None:
    tier = Tier(small_disk / "cache", 1 << 30, free_disk=FreeDisk(size_bytes=0))
    stop = threading.Event()

    def filled(name: str) -> Filled:
        shard = shard_of(f"{server.url}/{name}", None)
        part = tier.claim(shard.digest)
        assert part is not None
        return fill(
            part, shard, lambda: open_origin(shard.url, stop=stop), next_use=lambda: 0.0, stop=stop
        ).result

    assert filled("00000.tar") is Filled.PUBLISHED
    server.stop_after(0.3)
    results: list[Filled] = []
    thread = threading.Thread(target=lambda: results.append(filled("00001.tar")))
    thread.start()
    shard = shard_of(f"{server.url}/00001.tar", None)
    view = ShardView(tier, shard)
    while not view.count:
        view.refresh()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        (small_disk / "log").write_bytes(bytes(1 << 20))
    server.go_on()
    thread.join()
    assert results == [Filled.PUBLISHED]
    assert [held.digest for held in tier.shards()] == [shard.digest]
    assert (tier.published(shard.digest) / "data").read_bytes() == (
        tmp_path / "data" / "00001.tar"
    ).read_bytes()
    view.close()
