"""Channels: what is put arrives whole and in order, whatever its size, whoever is killed, whoever reads."""

from __future__ import annotations

import multiprocessing
import os
import queue
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Workers, limits
from streamload.errors import LimitReached, NotSendable, OptionError
from streamload.ipc import queues
from streamload.ipc.queues import MessageQueue, context_with_queues
from streamload.testing.shards import write_shards
from tests.support import flat
from tests.support.tiers import until

SIZES = [0, 1, 1900, 2040, 2048, 2100, 5000, 1 << 16, 3, (1 << 20) + 7, 12 << 20, 10]
PATIENCE_SECONDS = 60.0
_NOBODY = 65534
NoLeaks = Callable[..., AbstractContextManager[None]]


def content(size: int) -> bytes:
    return bytes(range(256)) * (size // 256 + 1) + bytes([size % 251])


def put_each(channel: MessageQueue, name: str, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        channel.put((name, number, content(size)))


def put_for_ever(channel: MessageQueue, name: str, sizes: list[int]) -> None:
    while True:
        put_each(channel, name, sizes)


def answer(asked: MessageQueue, answers: MessageQueue) -> None:
    while (number := asked.get(PATIENCE_SECONDS)) is not None:
        answers.put(number * 2)


@pytest.fixture(
    params=[
        "fork",
        pytest.param("spawn", marks=pytest.mark.deep),
        pytest.param("forkserver", marks=pytest.mark.deep),
    ]
)
def context(request: pytest.FixtureRequest) -> BaseContext:
    context = context_with_queues(request.param)
    assert isinstance(context, BaseContext)
    return context


@contextmanager
def running(context: BaseContext, run: Callable[..., None], *given: Any) -> Iterator[Any]:
    process = context.Process(target=run, args=given)  # type: ignore[attr-defined]
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


def test_values_of_any_size_arrive_in_order(context: BaseContext) -> None:
    channel: Any = context.Queue()
    assert isinstance(channel, MessageQueue)
    with running(context, put_each, channel, "a", SIZES):
        for number, size in enumerate(SIZES):
            assert channel.get(PATIENCE_SECONDS) == ("a", number, content(size))
        with pytest.raises(queue.Empty):
            channel.get(timeout=0)


def test_what_goes_one_way_is_answered_the_other(context: BaseContext) -> None:
    asked: Any = context.Queue()
    answers: Any = context.Queue()
    with running(context, answer, asked, answers) as process:
        for number in range(200):
            asked.put(number)
            assert answers.get(PATIENCE_SECONDS) == 2 * number
        asked.put(None)
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0


def test_nobody_waits_to_put_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "_ROOM_BYTES", 212_992)  # Linux' default, where more may be allowed
    channel = MessageQueue()
    sizes = [1900] * 300 + SIZES + [100, 5000] * 2000 + [1]
    put_each(channel, "a", sizes)  # nobody reads meanwhile
    assert "streamload-late" in {thread.name for thread in threading.enumerate()}
    for number, size in enumerate(sizes):
        assert channel.get(PATIENCE_SECONDS) == ("a", number, content(size))
    until(lambda: "streamload-late" not in {thread.name for thread in threading.enumerate()})
    put_each(channel, "b", SIZES[:4])
    assert "streamload-late" not in {thread.name for thread in threading.enumerate()}
    assert [channel.get(PATIENCE_SECONDS)[1] for _ in range(4)] == [0, 1, 2, 3]


def test_nothing_overtakes_what_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, has_room = MessageQueue(), threading.Event()
    is_sent = channel._is_sent

    def is_sent_with_room(message: memoryview) -> bool:
        is_late = threading.current_thread().name == "streamload-late"
        return (has_room.is_set() or (has_been_full.is_set() and not is_late)) and is_sent(message)

    has_been_full = threading.Event()
    monkeypatch.setattr(channel, "_is_sent", is_sent_with_room)
    channel.put(1)  # no room
    has_been_full.set()
    channel.put(2)  # there would be some
    has_room.set()
    assert [channel.get(PATIENCE_SECONDS) for _ in range(2)] == [1, 2]
    channel.close()


def test_many_put_at_once_each_in_its_order() -> None:
    context: Any = context_with_queues("fork")
    channel: Any = context.Queue()
    sizes = [10, 3000, 1000, 2000, 100_000] * 100
    seen: dict[str, int] = {}
    with (
        running(context, put_each, channel, "a", sizes),
        running(context, put_each, channel, "b", sizes),
        running(context, put_each, channel, "c", sizes),
    ):
        for _ in range(3 * len(sizes)):
            name, number, data = channel.get(PATIENCE_SECONDS)
            assert number == seen.get(name, 0)
            assert data == content(sizes[number])
            seen[name] = number + 1
    assert seen == dict.fromkeys("abc", len(sizes))


@pytest.mark.deep
def test_a_killed_process_keeps_nobody_from_putting() -> None:
    context: Any = context_with_queues("fork")
    for attempt in range(20):
        channel: Any = context.Queue()
        with running(context, put_for_ever, channel, "killed", [100, 3000, 50_000]) as process:
            for _ in range(3):
                channel.get(PATIENCE_SECONDS)
            time.sleep(attempt * 0.0003)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        with running(context, put_each, channel, "other", SIZES):
            others = []
            while len(others) < len(SIZES):
                name, number, data = channel.get(PATIENCE_SECONDS)
                assert data == content(SIZES[number] if name == "other" else [100, 3000, 50_000][number])
                others += [number] * (name == "other")
        assert others == list(range(len(SIZES)))


def test_it_is_waited_for_no_longer_than_was_said() -> None:
    channel = MessageQueue()
    with pytest.raises(queue.Empty):
        channel.get(timeout=0.05)


def test_nothing_is_left_open(no_leaks: NoLeaks) -> None:
    with no_leaks():
        channel = MessageQueue()
        put_each(channel, "a", SIZES * 5)
        for _ in SIZES * 5:
            channel.get(PATIENCE_SECONDS)
        put_each(channel, "b", SIZES[:8])  # these are never read
        channel.close()
        channel.close()
        del channel


def in_a_child(run: Callable[[], None]) -> None:
    """What a forked child does with its own limits; it has to end well."""
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def open_all_that_is_allowed() -> list[int]:
    most = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 4
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    opened = []
    with suppress(OSError):
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    return opened


def test_who_has_too_many_files_open_puts_as_soon_as_fewer_are() -> None:
    def run() -> None:
        channel = MessageQueue()
        opened = open_all_that_is_allowed()
        put_each(channel, "a", [5000, 1, 5000])
        with pytest.raises(queue.Empty):
            channel.get(0.05)
        for descriptor in opened:
            os.close(descriptor)
        assert [channel.get(PATIENCE_SECONDS)[1] for _ in range(3)] == [0, 1, 2]

    in_a_child(run)


def test_a_process_with_too_many_open_files_is_told_how_many_to_allow_and_loses_no_value() -> None:
    def run() -> None:
        limits.PATIENCE_SECONDS = 0.05
        channel = MessageQueue()
        put_each(channel, "a", [5000, 1])
        opened = open_all_that_is_allowed()
        with pytest.raises(LimitReached, match=r"Too many open files.*ulimit -n"):
            channel.get(PATIENCE_SECONDS)
        os.close(opened.pop())
        assert channel.get(PATIENCE_SECONDS) == ("a", 0, content(5000))
        assert channel.get(PATIENCE_SECONDS) == ("a", 1, content(1))

    in_a_child(run)


def test_a_value_without_a_file_arrives_where_no_file_may_be_opened() -> None:
    def run() -> None:
        limits.PATIENCE_SECONDS = 0.05
        channel = MessageQueue()
        put_each(channel, "a", [1, 5000])
        open_all_that_is_allowed()
        assert channel.get(PATIENCE_SECONDS) == ("a", 0, content(1))
        with pytest.raises(LimitReached, match="ulimit -n"):
            channel.get(PATIENCE_SECONDS)

    in_a_child(run)


def test_a_worker_that_keeps_too_many_files_open_sends_an_error_in_place_of_its_batch() -> None:
    def run() -> None:
        limits.PATIENCE_SECONDS = 0.05
        channel = MessageQueue()
        opened = open_all_that_is_allowed()
        channel.put((3, b"x" * 5000))
        channel.put((4, b"small"))
        readable = select.poll()
        readable.register(channel._reader, select.POLLIN)
        assert readable.poll(PATIENCE_SECONDS * 1000)
        os.close(opened.pop())
        number, refused = channel.get(PATIENCE_SECONDS)
        assert number == 3
        with pytest.raises(LimitReached, match=r"can't be sent.*ulimit -n"):
            refused.reraise()
        assert channel.get(PATIENCE_SECONDS) == (4, b"small")

    in_a_child(run)


def test_a_batch_waits_as_long_as_earlier_ones_are_on_their_way() -> None:
    """Files that are sent and not received yet count for their user (ETOOMANYREFS), who is waited for."""

    def run() -> None:
        limits.PATIENCE_SECONDS = 0.05
        channel = MessageQueue()
        if os.geteuid() == 0:
            os.setuid(_NOBODY)  # root may have any number of files on their way
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        put_each(channel, "a", [5000] * 100)
        assert len(channel._late) > 10
        time.sleep(0.3)  # longer than a shortage is waited for
        assert [channel.get(PATIENCE_SECONDS)[1] for _ in range(100)] == list(range(100))

    in_a_child(run)


def test_what_cannot_be_pickled_is_an_error_in_its_place() -> None:
    channel = MessageQueue()
    channel.put((7, [lambda: None]))
    number, refused = channel.get(PATIENCE_SECONDS)
    assert number == 7
    with pytest.raises(NotSendable, match="can't be sent"):
        refused.reraise()


def not_sendable(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"], "made": (lambda: 1) if sample["__key__"].endswith("7") else None}


def environment(sample: dict[str, Any]) -> dict[str, Any]:
    return {"has": str({name: os.environ[name] for name in ("A_NAME", "ANOTHER") if name in os.environ})}


def threads(sample: dict[str, Any]) -> dict[str, Any]:
    return {"threads": sorted(thread.name for thread in threading.enumerate())}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        write_shards(tmp_path_factory.mktemp("data"), [40] * 2, seed=8)[0].parent / "{00000..00001}.tar"
    )


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_a_batch_that_cannot_be_sent_is_an_error(urls: str, tmp_path: Path, method: str) -> None:
    """With a queue of multiprocessing the training would wait without end: its thread only prints."""
    options: Any = {"num_workers": 2, "cache_dir": tmp_path, "multiprocessing_context": method}
    with flat.make_loader(urls, batch_size=4, workers=Workers(map_sample=not_sendable), **options) as loader:
        for _ in range(2):
            with pytest.raises(NotSendable, match="can't be sent"):
                list(loader)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")  # torch's, in front of the error
def test_what_cannot_be_sent_to_workers_is_named(urls: str, tmp_path: Path, method: str) -> None:
    options: Any = {"num_workers": 1, "cache_dir": tmp_path, "multiprocessing_context": method}
    options["map_sample"] = lambda sample: {"key": sample["__key__"]}
    with flat.make_loader(urls, **options) as loader:
        if method == "fork":
            assert len(list(loader)) == 1  # 64 of the 80 samples
            return
        for _ in range(2):
            with pytest.raises(OptionError, match=f"map_sample=.*<lambda>.*{method!r}.*top level"):
                iter(loader)


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_a_lambda_is_not_blamed_for_what_else_hinders_forked_workers(
    urls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hindered(process: Any) -> None:
        raise TypeError("no processes today")

    options: Any = {"num_workers": 1, "cache_dir": tmp_path, "multiprocessing_context": "fork"}
    monkeypatch.setattr(multiprocessing.get_context("fork").Process, "start", hindered)
    with (
        flat.make_loader(urls, workers=Workers(map_sample=lambda sample: sample), **options) as loader,
        pytest.raises(TypeError, match="no processes today"),
    ):
        iter(loader)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep), "forkserver"])
def test_workers_have_the_environment_of_their_rank(
    urls: str, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forkserver has that of the moment when it was started, which may be long ago."""
    options: Any = {"num_workers": 1, "cache_dir": tmp_path, "multiprocessing_context": method}
    for given in ({"A_NAME": "first", "ANOTHER": ""}, {"A_NAME": "second"}):
        with monkeypatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            with flat.make_loader(
                urls, batch_size=80, workers=Workers(map_sample=environment), **options
            ) as loader:
                (batch,) = loader
            assert set(batch["has"]) == {str(given)}


def test_batches_need_no_thread(urls: str, tmp_path: Path) -> None:
    with streamload.make_loader(
        urls, batch_size=4, num_workers=2, cache_dir=tmp_path, workers=Workers(map_sample=threads)
    ) as loader:
        before = threading.enumerate()
        for batch in loader:
            of_workers = {name for names in batch["threads"] for name in names}
            assert threading.enumerate() == before
    assert any(name.startswith("streamload-fill") for name in of_workers)
    assert not [name for name in of_workers if "Queue" in name or "late" in name]


def test_where_there_are_no_such_files_batches_come_all_the_same(
    urls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert context_with_queues("spawn") == "spawn"
    options: Any = {"num_workers": 2, "cache_dir": tmp_path, "multiprocessing_context": "fork"}
    with flat.make_loader(urls, batch_size=4, with_keys=True, **options) as loader:
        assert len({key for *_, origin in loader for key in origin["__key__"]}) == 80
