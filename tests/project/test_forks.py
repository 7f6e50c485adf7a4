"""Forks beside threads: a child has no copies of their files, no locks of theirs, and closes nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamload import descriptors, limits
from streamload.cache.fill import Filled, fill
from streamload.cache.locks import FileLock, exclusive
from streamload.cache.shard import shard_of
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier
from streamload.errors import CacheError, LimitReached
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


@pytest.fixture
def end_slowly() -> Iterator[Callable[[int], None]]:
    """A call that makes the end of its thread take so many microseconds, behind the last line of Python."""
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0  # called with the thread's value
    libc.pthread_setspecific.argtypes = [ctypes.c_uint, ctypes.c_void_p]

    def end_slowly(microseconds: int) -> None:
        assert libc.pthread_setspecific(key, microseconds) == 0

    yield end_slowly
    libc.pthread_key_delete(key)


def started(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    limits.start(thread)
    thread.join()


def pooled(work: Callable[[], None]) -> None:
    with limits.Threads(2, "streamload-test") as pool:
        pool.submit(work).result()


def noted(work: Callable[[], None]) -> None:
    def work_of_another() -> None:
        limits.note_thread()
        work()

    thread = threading.Thread(target=work_of_another)
    thread.start()
    thread.join()


def threads_at_fork() -> set[int]:
    """The threads of this process just after a fork."""
    child = os.fork()
    if not child:
        os._exit(0)
    threads = {int(name) for name in os.listdir("/proc/self/task")}
    os.waitpid(child, 0)
    return threads


@pytest.mark.parametrize("run", [started, pooled, noted])
def test_a_fork_waits_for_threads_that_have_not_left_the_c_libraries(
    run: Callable[[Callable[[], None]], None], end_slowly: Callable[[int], None]
) -> None:
    """They have run their last line of Python, and been joined."""
    ended: list[int] = []

    def work() -> None:
        ended.append(threading.get_native_id())
        end_slowly(100_000)

    run(work)
    assert not threads_at_fork() & set(ended)


def test_a_fork_goes_on_beside_a_thread_that_runs_and_one_that_never_ends(
    end_slowly: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_ENDING_SECONDS", 0.01)
    may_end = threading.Event()
    running = threading.Thread(target=may_end.wait)
    ending = threading.Thread(target=end_slowly, args=(2_000_000,))
    for thread in (running, ending):
        limits.start(thread)
    while ending.is_alive():
        time.sleep(0.001)
    assert threads_at_fork() >= {running.native_id, ending.native_id}
    assert running in limits._threads
    assert ending not in limits._threads  # nor waited for again
    may_end.set()
    running.join()


def test_a_pool_says_which_thread_it_may_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with limits.Threads(2, "streamload-test") as pool:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(LimitReached, match="the thread streamload-test can't be started"):
            pool.submit(bool)


_TLS_BESIDE_FORKS = """
import os, signal, ssl, threading
from streamload import limits

def greet(_):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    connection = context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="localhost")
    try:
        connection.do_handshake()
    except ssl.SSLWantReadError:
        pass

hung = 0
for _ in range(150):
    with limits.Threads(3, "greeting") as pool:
        list(pool.map(greet, range(3)))
    child = os.fork()
    if not child:
        signal.alarm(20)
        thread = threading.Thread(target=greet, args=(0,))
        thread.start()
        thread.join()
        os._exit(0)
    hung += os.waitpid(child, 0)[1] != 0
    if hung:
        break
print(hung)
"""


def test_a_child_opens_tls_connections_after_threads_that_had_some_have_ended() -> None:
    """OpenSSL takes its locks once more as a thread ends."""
    assert subprocess.check_output([sys.executable, "-c", _TLS_BESIDE_FORKS]) == b"0\n"


def test_what_ends_with_a_process_does_not_end_with_its_children() -> None:
    ended = list[str]()
    end = descriptors.in_this_process(ended.append)
    assert said_by_child(lambda: (end("by a child"), ended)[1]) == ""
    end("by itself")
    assert ended == ["by itself"]
