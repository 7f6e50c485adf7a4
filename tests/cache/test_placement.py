"""Which tier a run takes: on disk, in memory, or "auto", and that all who read the same take the same."""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload.cache import memory, placement
from streamload.cache.locks import FileLock
from streamload.cache.placement import (
    SharedDecision,
    agreement_on,
    decide,
    place_tier,
    why_not_writable,
)
from streamload.cache.shard import shard_of
from streamload.cache.tier import Choice, Tier, memory_root
from streamload.daemon.warm import warm
from streamload.errors import CacheError
from streamload.metrics import Counters
from streamload.options import Settings, file_system, read_settings
from streamload.prefetch import fallback
from streamload.prefetch.fallback import FallbackTier
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards
from tests.support import flat
from tests.support.disks import small_disk, why_no_small_disk
from tests.support.kills import Child
from tests.support.tiers import in_a_child

COUNTS = [20, 30, 25, 15]
pytestmark = pytest.mark.usefixtures("shm")
needs_mounts = pytest.mark.skipif(bool(why_no_small_disk()), reason=why_no_small_disk())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "data", COUNTS, seed=11)
    with ShardServer(tmp_path / "data") as server:
        yield server


def urls(server: ShardServer, count: int = 4) -> list[str]:
    return [f"{server.url}/{number:05d}.tar" for number in range(count)]


def settings(tmp_path: Path, cache: str = "auto", **options: Any) -> Settings:
    return read_settings(
        cache_dir=tmp_path / "disk", cache_size="1GB", cache=cache, **{"memory_size": "1GB", **options}
    )


def make(server: ShardServer, tmp_path: Path, **options: Any) -> streamload.Loader:
    given = {"batch_size": 5, "num_workers": 2, "with_keys": True, "cache_dir": tmp_path / "disk"}
    given |= {"cache_size": "1GB", "memory_size": "1GB"}
    return flat.make_loader(urls(server), **{**given, **options})


def keys_of(loader: streamload.Loader) -> list[str]:
    return sorted(key for _, _, origin in loader for key in origin["__key__"])


def oracle(tmp_path: Path) -> list[str]:
    paths = sorted((tmp_path / "data").glob("*.tar"))
    return sorted(key for path in paths for key, _ in read_oracle(path))


def data_bytes(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "data").glob("*.tar"))


def published(root: Path) -> int:
    return len(list(root.glob("shards/*/data")))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_in_memory_gives_all_samples_and_is_warm_for_the_next_run(
    workers: int, server: ShardServer, tmp_path: Path, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        with make(server, tmp_path, cache="memory", num_workers=workers) as loader:
            assert keys_of(loader) == oracle(tmp_path)
            arrived = loader.stats().origin_bytes
    assert arrived == 0
    assert not (tmp_path / "disk").exists()
    (root,) = shm.iterdir()
    assert root.name == f"streamload-{os.geteuid()}"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert published(root) == len(COUNTS)
    assert json.loads((root / "tier.json").read_text())["limit_bytes"] == 10**9
    assert f"cache in memory at {root} (argument)" in caplog.text


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
@pytest.mark.parametrize(("share", "where"), [(2.0, "memory"), (0.5, "disk")])
def test_auto_is_in_memory_if_the_data_fits_and_else_on_disk(
    share: float, where: str, method: str, server: ShardServer, tmp_path: Path, shm: Path
) -> None:
    size = int(share * data_bytes(tmp_path))
    with make(server, tmp_path, cache="auto", memory_size=size, multiprocessing_context=method) as loader:
        assert keys_of(loader) == oracle(tmp_path)
    assert published(memory_root(settings(tmp_path))) == (len(COUNTS) if where == "memory" else 0)
    assert published(tmp_path / "disk") == (len(COUNTS) if where == "disk" else 0)
    assert not list(shm.glob("*.*"))  # the answer is taken away by who stood by it


def test_the_variable_says_the_same_as_the_argument(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMLOAD_CACHE", "memory")
    monkeypatch.setenv("STREAMLOAD_MEMORY_SIZE", "70MB")
    warm(urls(server), cache_dir=tmp_path / "disk")
    root = memory_root(settings(tmp_path))
    assert Tier.open(root).limit_bytes == 70 * 10**6
    with make(server, tmp_path, memory_size=None) as loader:
        assert keys_of(loader) == oracle(tmp_path)
        assert loader.stats().origin_bytes == 0


def shards(number: int) -> list[Any]:
    return [shard_of(f"https://host/{n:05d}.tar", None) for n in range(number)]


def test_sizes_are_asked_of_a_few_shards_and_the_rest_taken_to_be_as_large(tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(shard: Any) -> int:
        asked.append(shard.name)
        return 9_000_000

    assert decide(settings(tmp_path), shards(100), ask).chosen == "memory"
    assert len(asked) <= 16
    assert len(set(asked)) == len(asked)
    assert {"https://host/00000.tar"} < set(asked)
    assert decide(settings(tmp_path), shards(105), ask).chosen == "disk"
    assert decide(settings(tmp_path), shards(105), ask, nodes=2).chosen == "memory"


def test_a_size_that_is_not_known_means_disk(tmp_path: Path) -> None:
    answer = decide(settings(tmp_path), shards(3), lambda shard: None if "1" in shard.name else 1000)
    assert answer == Choice("disk", "auto: the size of the data is unknown")


def test_of_local_shards_only_the_indexes_take_memory(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "data", [3] * 50)
    local = [shard_of(str(path), None) for path in paths]
    assert decide(settings(tmp_path, memory_size="2MB"), local, lambda shard: None).chosen == "memory"


def test_an_origin_that_does_not_answer_means_disk_and_the_error_is_left_to_the_reader(
    server: ShardServer, tmp_path: Path
) -> None:
    server.misbehave("00001.tar", Fault(status=404))
    with make(server, tmp_path, cache="auto") as loader:
        assert len(keys_of(loader)) == sum(COUNTS) - COUNTS[1]
    assert published(tmp_path / "disk") == len(COUNTS) - 1


def test_what_is_on_disk_already_is_not_fetched_into_memory(server: ShardServer, tmp_path: Path) -> None:
    warm(urls(server, 2), cache_dir=tmp_path / "disk", cache_size="1GB")
    with make(server, tmp_path, cache="auto") as loader:
        assert keys_of(loader) == oracle(tmp_path)
        assert loader.stats().tier_hits >= 2
    assert published(tmp_path / "disk") == len(COUNTS)


def test_what_other_runs_need_of_the_memory_is_not_free(server: ShardServer, tmp_path: Path) -> None:
    given = settings(tmp_path, memory_size=3 * data_bytes(tmp_path))
    warm(urls(server), cache="memory", memory_size=3 * data_bytes(tmp_path))
    tier = Tier.open(memory_root(given))
    size = 2 * data_bytes(tmp_path)
    assert decide(given, shards(1), lambda shard: size).chosen == "memory"
    run = placement.demand.DemandFile(tier.root / "runs")
    run.announce(shard.digest for shard in tier.shards())
    assert decide(given, shards(1), lambda shard: size).chosen == "disk"
    run.close()


def test_a_cache_dir_in_memory_is_the_place_of_the_tier_in_memory(shm: Path) -> None:
    given = read_settings(cache_dir=shm / "mine", cache="memory", memory_size="70MB")
    placed = place_tier(given, shards(1))
    assert placed.tier.root == shm / "mine"
    assert placed.tier.limit_bytes == 70_000_000
    auto = read_settings(cache_dir=shm / "mine", cache="auto", memory_size="70MB")
    assert decide(auto, shards(1), lambda shard: 10**12) == Choice("memory", "auto: cache_dir is in memory")


def test_no_more_than_what_is_free_is_taken_whatever_was_asked_for(shm: Path) -> None:
    free_bytes = memory.free_memory().free_bytes
    for where in ("memory", "disk"):  # a directory in memory that was taken for a disk
        given = read_settings(cache_dir=shm / where, cache_size="900TB", cache=where, memory_size="900TB")
        assert 0 < place_tier(given, shards(1)).tier.limit_bytes < 0.95 * free_bytes


def test_the_tier_in_memory_keeps_its_limit_until_another_is_given(tmp_path: Path) -> None:
    place_tier(settings(tmp_path, "memory", memory_size="80MB"), shards(1))
    kept = place_tier(settings(tmp_path, "memory", memory_size=None), shards(1))
    assert kept.tier.limit_bytes == 80_000_000


OTHER_USER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to be another user needs root")


@pytest.fixture
def open_to_all(tmp_path: Path) -> Path:
    """As /var/tmp and /dev/shm are."""
    place = tmp_path / "for all"
    place.mkdir()
    place.chmod(0o1777)
    return place


def plant(link: Path, target: Path) -> None:
    """Another user makes a link to a directory of ours."""
    target.mkdir(mode=0o700)
    link.symlink_to(target)
    os.chown(link, OTHER_USER, OTHER_USER, follow_symlinks=False)


@needs_root
def test_a_link_that_another_has_put_in_the_place_of_the_tier_is_refused(tmp_path: Path, shm: Path) -> None:
    shm.chmod(0o1777)
    plant(memory_root(settings(tmp_path)), tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="symbolic link"):
        place_tier(settings(tmp_path, "memory"), shards(1))
    assert decide(settings(tmp_path), shards(1), lambda shard: 1).chosen == "disk"
    assert not list((tmp_path / "elsewhere").iterdir())


@needs_root
def test_a_planted_link_on_the_way_is_refused_and_one_of_ours_is_followed(
    tmp_path: Path, open_to_all: Path
) -> None:
    """The default directory has a name that anybody can guess."""
    plant(open_to_all / "streamload-0", tmp_path / "mine")
    for root in (open_to_all / "streamload-0", open_to_all / "streamload-0" / "cache"):
        assert "symbolic link of another user's" in why_not_writable(root)
        with pytest.raises(CacheError, match=r"symbolic link of another user's.*STREAMLOAD_CACHE_DIR"):
            Tier(root, 1 << 20)
    assert not list((tmp_path / "mine").iterdir())
    (open_to_all / "of-mine").symlink_to("streamload-0/../direct")
    (open_to_all / "direct").symlink_to(tmp_path / "mine")
    assert Tier(open_to_all / "direct", 1 << 20).limit_bytes == 1 << 20
    with pytest.raises(CacheError, match="symbolic link of another user's"):  # it leads over the planted one
        Tier(open_to_all / "of-mine", 1 << 20)


@needs_root
def test_a_link_that_is_planted_at_the_last_moment_is_refused(
    tmp_path: Path, open_to_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def planted_first(path: Path, *args: Any, **named: Any) -> None:
        if path == open_to_all / "tier" and not path.is_symlink():
            monkeypatch.undo()
            plant(path, tmp_path / "mine")
        mkdir(path, *args, **named)

    monkeypatch.setattr(Path, "mkdir", planted_first)
    with pytest.raises(CacheError, match="symbolic link of another user's"):
        Tier(open_to_all / "tier", 1 << 20)
    assert not list((tmp_path / "mine").iterdir())


@needs_root
def test_nothing_is_put_where_a_link_to_the_spare_of_a_tier_leads(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "_MEMORY", shm)
    shm.chmod(0o1777)
    there = fallback.place(tmp_path / "tier")
    assert there is not None
    assert there.parent == shm
    plant(there, tmp_path / "mine")
    assert FallbackTier(tmp_path / "tier", Counters()).open() is None
    fallback.remove_unused(tmp_path / "tier")
    assert not list((tmp_path / "mine").iterdir())
    assert there.is_symlink()


@needs_root
@pytest.mark.parametrize("kind", ["file", "link"])
def test_an_answer_that_another_user_has_written_is_none(tmp_path: Path, shm: Path, kind: str) -> None:
    shm.chmod(0o1777)
    agreement = agreement_on(settings(tmp_path), shards(1))
    there = agreement._path
    if kind == "link":
        plant(there, tmp_path / "mine")
    else:
        there.write_text('{"where": "memory", "why": "I said so"}')
        there.chmod(0o666)
        os.chown(there, OTHER_USER, OTHER_USER)
    before = there.lstat()
    assert agreement.join(lambda: Choice("disk", "ours")) == Choice("disk", "ours")
    agreement.close()
    assert there.lstat() == before


@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o2775])
def test_a_volume_of_roots_where_all_may_write_holds_a_cache_of_each_user(mode: int) -> None:
    """A Kubernetes emptyDir is root's, mode 0777."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # another user can't get at a test's own directory
        volume = Path(name)
        os.chown(volume, 0, OTHER_USER)
        volume.chmod(mode)
        check_volume(volume)


def check_volume(volume: Path) -> None:
    def work(uid: int) -> None:
        given = read_settings(cache_dir=volume, cache_size="1MB", environ={})
        assert given.cache_dir == volume / f"streamload-{uid}"
        assert why_not_writable(given.cache_dir) == ""
        assert not given.cache_dir.exists()
        tier = place_tier(given, shards(1)).tier
        assert tier.root == given.cache_dir
        assert tier.root.stat().st_mode & 0o777 == 0o700
        assert read_settings(cache_dir=tier.root, environ={}).cache_dir == tier.root

    in_a_child(lambda: work(OTHER_USER), uid=OTHER_USER)
    work(0)
    assert {path.name for path in volume.iterdir()} == {"streamload-0", f"streamload-{OTHER_USER}"}


@needs_root
def test_a_cache_in_a_directory_that_is_opened_to_all_afterwards_is_refused(tmp_path: Path) -> None:
    """A cold one beside it would take its room twice."""
    Tier(tmp_path / "tier", 1 << 20)
    (tmp_path / "tier").chmod(0o777)
    given = read_settings(cache_dir=tmp_path / "tier", environ={})
    assert given.cache_dir == tmp_path / "tier"
    assert "others may write into" in why_not_writable(given.cache_dir)
    with pytest.raises(CacheError, match="others may write into"):
        place_tier(given, shards(1))


def test_without_a_disk_auto_is_in_memory_whatever_the_size(tmp_path: Path) -> None:
    (tmp_path / "disk").touch()
    answer = decide(settings(tmp_path), shards(3), lambda shard: None)
    assert answer == Choice("memory", f"auto: {tmp_path / 'disk'} is not a directory")


@needs_mounts
def test_without_room_on_the_disk_auto_is_in_memory(tmp_path: Path, shm: Path) -> None:
    def work(stage: object) -> list[str]:
        small_disk(tmp_path / "full", 1 << 20)
        given = read_settings(cache="auto", memory_size="1GB")
        given._values["cache_dir"] = tmp_path / "full" / "cache"  # as a default: not one that was named
        return list(decide(given, shards(3), lambda shard: None))

    with Child(work) as child:
        where, why = child.finish(30)
    assert where == "memory"
    assert why == f"auto: only 1.0 MB free at {tmp_path / 'full' / 'cache'}"


@needs_mounts
@pytest.mark.parametrize("cache", ["memory", "auto"])
def test_a_container_with_64_mb_of_shared_memory(
    cache: str, server: ShardServer, tmp_path: Path, shm: Path
) -> None:
    def work(stage: object) -> list[Any]:
        small_disk(shm, 64 << 20)
        given = settings(tmp_path, cache, memory_size=None)
        try:
            placed = place_tier(given, [shard_of(url, None) for url in urls(server)])
        except CacheError as exc:
            return [str(exc), ""]
        placed.close()
        return [str(placed.tier.root), placed.answer.why]

    with Child(work) as child:
        said, why = child.finish(60)
    if cache == "memory":
        assert said.startswith(f"there is too little memory for a cache at {shm}/streamload-")
        assert "67.1 MB free" in said
        assert "--shm-size" in said
    else:
        assert said == str(tmp_path / "disk")
        assert "auto: there is too little memory" in why


def answer_of(agreement: SharedDecision, where: Any) -> Choice:
    return agreement.join(lambda: Choice(where, "said so"))


def test_as_long_as_one_stands_by_an_answer_all_get_it(tmp_path: Path, shm: Path) -> None:
    first, second, third = (agreement_on(settings(tmp_path), shards(3)) for _ in range(3))
    other = agreement_on(settings(tmp_path), shards(4))
    assert answer_of(first, "memory").chosen == "memory"
    assert answer_of(second, "disk").chosen == "memory"
    assert answer_of(other, "disk").chosen == "disk"
    first.close()
    assert answer_of(third, "disk").chosen == "memory"
    second.close()
    third.close()
    third.close()
    assert answer_of(first, "disk").chosen == "disk"
    first.close()
    other.close()
    assert not list(shm.iterdir())


def test_processes_that_start_at_once_decide_once(tmp_path: Path, shm: Path) -> None:
    log = tmp_path / "log"
    go = tmp_path / "go"

    def work(stage: object) -> str:
        def decide_slowly() -> Choice:
            with log.open("a") as lines:
                lines.write(f"{os.getpid()}\n")
            time.sleep(0.2)
            return Choice("memory" if os.getpid() % 2 else "disk", str(os.getpid()))

        while not go.exists():
            time.sleep(0.001)
        agreement = agreement_on(settings(tmp_path), shards(3))
        why = agreement.join(decide_slowly).why
        (tmp_path / f"done-{os.getpid()}").touch()
        while len(list(tmp_path.glob("done-*"))) < 4:
            time.sleep(0.001)
        agreement.close()
        return why

    children = [Child(work) for _ in range(4)]
    try:
        for child in children:
            child.__enter__()
        go.touch()
        answers = {child.finish(60) for child in children}
    finally:
        for child in children:
            child.__exit__(None, None, None)
    assert len(answers) == 1
    assert answers <= set(log.read_text().split())
    assert not list(shm.iterdir())


def test_the_answer_of_a_killed_process_does_not_stand_and_is_removed(tmp_path: Path, shm: Path) -> None:
    def work(stage: Any) -> None:
        answer_of(agreement_on(settings(tmp_path), shards(3)), "memory")
        stage.enter("standing")
        threading.Event().wait()

    with Child(work) as child:
        child.stage.wait_for("standing", 30)
        stays = agreement_on(settings(tmp_path), shards(3))
        assert answer_of(stays, "disk").chosen == "memory"
        stays.close()
        child.kill()
    assert len(list(shm.iterdir())) == 1
    again = agreement_on(settings(tmp_path), shards(5))
    assert answer_of(again, "disk").chosen == "disk"
    again.close()
    assert not list(shm.iterdir())


def test_who_does_not_come_to_an_answer_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shm: Path
) -> None:
    monkeypatch.setattr(placement, "_PATIENCE_SECONDS", 0.2)
    stands = agreement_on(settings(tmp_path), shards(3))
    answer_of(stands, "memory")
    (path,) = shm.iterdir()
    stands.close()
    deciding = FileLock.acquire(path, create=True)
    assert deciding is not None
    waits = agreement_on(settings(tmp_path), shards(3))
    assert answer_of(waits, "disk") == Choice("disk", "said so")
    waits.close()
    deciding.close()


def test_what_a_tier_in_memory_holds_counts_as_free_for_it(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings(tmp_path, "memory", memory_size="1MB")
    tier = Tier(memory_root(asked), 1 << 30)
    part = tier.claim("a" * 32)
    assert part is not None
    assert part.reserve(1 << 21, 0.0)
    (part.path / "names").touch()
    (part.path / "data").write_bytes(bytes(1 << 21))
    part.publish()
    monkeypatch.setattr(memory, "available", lambda root: memory.FreeMemory(0, "memory"))
    assert placement.memory_budget(asked) == 10**6
    tier.trash(tier.published("a" * 32))
    with pytest.raises(CacheError, match="too little memory"):
        placement.memory_budget(asked)


def test_a_tier_in_memory_gives_way_when_memory_gets_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = 64 << 30
    monkeypatch.setattr(memory, "available", lambda root: memory.FreeMemory(free_bytes, "memory"))
    with tempfile.TemporaryDirectory(dir=memory.PLACE) as place:
        tier = Tier(Path(place) / "tier", 1 << 30, enforce_seconds=0.0)
        for digest in ("a" * 32, "b" * 32):
            part = tier.claim(digest)
            assert part is not None
            assert part.reserve(1 << 20, 0.0)
            (part.path / "names").touch()
            (part.path / "data").write_bytes(bytes(1 << 20))
            part.publish()
        tier.budget.enforce_limits()
        assert tier.budget.bound.startswith("its limit")
        assert len(list(tier.own("shards"))) == 2
        free_bytes = 0
        if not file_system(tmp_path).is_memory:  # the disk has its own room
            on_disk = Tier(tmp_path / "tier", 1 << 20)
            assert on_disk.budget.bound.startswith("its limit")
        tier.budget.enforce_limits()
        assert len(list(tier.own("shards"))) == 1
