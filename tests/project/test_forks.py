"""Forks beside threads that open and close files: a child keeps no copy, and closes nothing else."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamload.cache.fill import Filled, fill
from streamload.cache.locks import FileLock, exclusive
from streamload.cache.shard import shard_of
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier
from streamload.errors import CacheError
from streamload.origins.origin import open_origin
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards

FORKS = 60


@contextlib.contextmanager
def beside(*works: Callable[[], object]) -> Iterator[None]:
    """Threads that do something again and again for a block."""
    end = threading.Event()

    def again(work: Callable[[], object]) -> None:
        while not end.is_set():
            work()

    threads = [threading.Thread(target=again, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


def said_by_child(look: Callable[[], object]) -> str:
    """What a forked child has to say, at once."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, str(look() or "").encode()[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as words:
        found = words.read()
    os.waitpid(child, 0)
    return found


def open_below(place: Path) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(f"{place}/"):
                found.append(target)
    return found


@pytest.mark.deep
def test_a_child_that_is_forked_beside_threads_has_none_of_their_locks_and_all_other_files(
    tmp_path: Path,
) -> None:
    """A lock that stays open in a child is held for its life; a stale number is another file's by then."""
    ours = tmp_path / "tier"
    ours.mkdir()

    def lock() -> None:
        with exclusive(ours / "lock"):
            pin = FileLock.acquire(ours / "names", shared=True, create=True)
            assert pin is not None
            pin.close()

    kept = [os.open(tmp_path / "unrelated", os.O_RDWR | os.O_CREAT) for _ in range(3)]

    def other_files() -> None:
        os.close(os.open(tmp_path / "unrelated", os.O_RDONLY))

    def look() -> str:
        with contextlib.suppress(OSError):
            for descriptor in kept:
                os.fstat(descriptor)
            return " ".join(open_below(ours))
        return "an unrelated descriptor is closed"

    with beside(lock, lock, other_files):
        said = [said_by_child(look) for _ in range(FORKS)]
    assert [words for words in said if words] == []
    for descriptor in kept:
        os.close(descriptor)


def test_a_child_that_is_forked_in_the_middle_of_a_fill_has_none_of_its_files(tmp_path: Path) -> None:
    """Nor those of a reader: what is evicted later would take its room for as long as the child lives."""
    write_shards(tmp_path / "data", [30], seed=4)
    tier = Tier(tmp_path / "tier", 1 << 30)
    with ShardServer(tmp_path / "data") as server:
        server.stop_after(0.5)
        shard = shard_of(f"{server.url}/00000.tar", None)
        part = tier.claim(shard.digest)
        assert part is not None
        results: list[Filled] = []

        def work() -> None:
            opened = lambda: open_origin(shard.url)  # noqa: E731
            results.append(fill(part, shard, opened, next_use=lambda: 0.0, stop=threading.Event()).result)

        thread = threading.Thread(target=work)
        thread.start()
        view = ShardView(tier, shard)
        while not view.count:
            view.refresh()
        assert view.read(0) is not None
        here = {Path(path).name for path in open_below(tier.root)}
        assert said_by_child(lambda: " ".join(open_below(tier.root))) == ""
        server.go_on()
        thread.join()
    assert here == {"data", "index", "names"}
    assert results == [Filled.PUBLISHED]
    view.close()


def test_a_child_that_goes_on_with_its_parents_view_is_refused_and_takes_nothing_away(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [3], seed=4)
    tier = Tier(tmp_path / "tier", 1 << 30)
    with ShardServer(tmp_path / "data") as server:
        shard = shard_of(f"{server.url}/00000.tar", None)
        part = tier.claim(shard.digest)
        assert part is not None
        fill(part, shard, lambda: open_origin(shard.url), next_use=lambda: 0.0, stop=threading.Event())
    view = ShardView(tier, shard)

    def read() -> str:
        with pytest.raises(CacheError, match="iterate the loader again"):
            view.read(0)
        return "refused"

    assert said_by_child(read) == "refused"
    assert view.read(0) is not None
    view.close()


def test_the_end_of_a_commands_leash_is_not_held_by_a_child() -> None:
    """The watcher of a command kills it once nobody holds that end: a child would keep it alive."""

    def ends() -> str:
        """The ends of pipes to write to."""
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                facts = Path(f"/proc/self/fdinfo/{name}").read_text()
                if target.startswith("pipe:") and int(facts.split("flags:")[1].split()[0], 8) & os.O_WRONLY:
                    found.add(target)
        return " ".join(found)

    before = set(ends().split())
    stream = open_origin("pipe:echo begun; sleep 600").open()
    chunks = stream.chunks()
    assert next(chunks) == b"begun\n"
    leash = set(ends().split()) - before
    assert len(leash) == 1
    assert not leash & set(said_by_child(ends).split())
    stream.close()
