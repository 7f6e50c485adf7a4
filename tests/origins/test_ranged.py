"""A shard of a web server in several ranges at once: each byte asked for once, and never a wrong one."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.errors import DatasetChanged, OriginError, OriginStopped
from streamload.origins import sockets
from streamload.origins.origin import OriginOptions, open_origin
from streamload.origins.parallel import OrderedParts
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from tests.support.tally import Tally
from tests.support.tiers import until

BODY = random.Random(1).randbytes(1_500_003)
OTHER = random.Random(2).randbytes(1_500_003)
SIDE_BY_SIDE: dict[str, Any] = {
    "first_get_bytes": 100_000,
    "quick_bytes_per_second": float("inf"),  # nothing is as quick as that
    "first_part_bytes": 50_000,
    "part_limit_bytes": 200_000,
    "parts": 4,
    "attempts": 4,
    "backoff_seconds": 0.01,
    "stall_seconds": 0.4,
    "chunk_bytes": 64 * 1024,
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    (tmp_path / "a.tar").write_bytes(BODY)
    with ShardServer(tmp_path) as server:
        yield server


def read(server: ShardServer, start: int = 0, tally: Tally | None = None, **options: Any) -> bytes:
    given = OriginOptions(**{**SIDE_BY_SIDE, **options})
    stream = open_origin(f"{server.url}/a.tar", options=given, counters=tally).open(start)
    try:
        return b"".join(stream.chunks())
    finally:
        stream.close()


def assert_each_byte_was_asked_for_once(server: ShardServer, start: int = 0) -> None:
    asked = sorted((seen.start, seen.stop or len(BODY)) for seen in server.log)
    assert [begin for begin, _ in asked] == [start, *(min(end, len(BODY)) for _, end in asked[:-1])]
    assert asked[-1][1] >= len(BODY)
    sent = sorted(server.ranges("a.tar"))
    assert [begin for begin, _ in sent] == [start, *(end for _, end in sent[:-1])]
    assert sent[-1][1] == len(BODY)


@pytest.mark.parametrize("start", [0, 1, 777_777, len(BODY) - 10])
def test_ranges_side_by_side_ask_for_each_byte_once(server: ShardServer, start: int) -> None:
    tally = Tally()
    assert read(server, start, tally) == BODY[start:]
    assert_each_byte_was_asked_for_once(server, start)
    assert tally == {"origin_requests": len(server.log), "origin_bytes": len(BODY) - start}
    if start == 0:
        sizes = {seen.start: (seen.stop or 0) - (seen.start or 0) for seen in server.log}
        assert server.log[0].start == 0
        assert sizes[0] == 100_000
        assert [sizes[begin] for begin in range(100_000, 300_000, 50_000)] == [50_000] * 4
        assert 100_000 < max(sizes.values()) <= 200_000  # they grow, by how quickly they come
        assert all("If-Match" in seen.headers for seen in server.log[1:])


def test_as_many_are_under_way_at_once_as_allowed(server: ShardServer) -> None:
    server.stop_after(0.1)  # at the end of the first of four ranges
    stream = open_origin(f"{server.url}/a.tar", options=OriginOptions(**SIDE_BY_SIDE)).open()
    got = 0
    for chunk in stream.chunks():
        got += len(chunk)
        if got >= 140_000:
            break
    ranges = {100_000, 150_000, 200_000}
    until(lambda: ranges <= {seen.start for seen in server.log})
    assert server.log[0].start == 0
    others = [seen.start for seen in server.log[1:] if seen.start not in ranges]
    # The fourth, unless nobody reads any more before it is its turn; and one in place of the first.
    assert sorted(others) in ([], [250_000], [300_000], [250_000, 300_000])
    stream.close()


def test_what_lay_waiting_for_its_turn_comes_as_one_piece(server: ShardServer) -> None:
    stream = open_origin(f"{server.url}/a.tar", options=OriginOptions(**SIDE_BY_SIDE)).open()
    chunks, got = stream.chunks(), 0
    while got < 150_000:
        got += len(next(chunks))
    assert got == 150_000  # the first answer, and the first of four ranges
    until(lambda: not any(thread.name == "streamload-range" for thread in threading.enumerate()))
    assert [len(next(chunks)) for _ in range(3)] == [50_000] * 3  # read as 32 KiB and the rest
    stream.close()


def test_a_quick_server_is_asked_for_all_the_rest_over_the_same_connection(server: ShardServer) -> None:
    assert read(server, quick_bytes_per_second=0.0) == BODY
    assert [(seen.start, seen.stop) for seen in server.log] == [(0, 100_000), (100_000, None)]
    assert_each_byte_was_asked_for_once(server)


def test_a_quick_server_that_stops_doing_ranges_sends_what_was_read_again(server: ShardServer) -> None:
    server.misbehave("a.tar", Fault(first=1), Fault(ignore_range=True))
    tally = Tally()
    assert read(server, tally=tally, quick_bytes_per_second=0.0) == BODY
    assert tally == {"origin_requests": 3, "origin_retries": 1, "origin_bytes": len(BODY) + 100_000}


def test_a_shard_within_the_first_range_is_one_request(server: ShardServer) -> None:
    assert read(server, first_get_bytes=len(BODY) + 1) == BODY
    assert len(server.log) == 1


def test_a_total_that_may_be_the_length_of_the_range_is_not_trusted(server: ShardServer) -> None:
    assert read(server, first_get_bytes=len(BODY)) == BODY
    assert [(seen.start, seen.stop) for seen in server.log] == [(0, len(BODY)), (None, None)]


def test_with_one_part_a_shard_is_one_plain_request(server: ShardServer) -> None:
    assert read(server, parts=1) == BODY
    assert [(seen.start, seen.stop) for seen in server.log] == [(None, None)]


@pytest.mark.parametrize("healthy", [1, 2], ids=["while it is read", "while it waits"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(first=1, cut_after_bytes=20_000),
        Fault(first=1, cut_after_bytes=20_000, reset=True),
        Fault(first=1, cut_after_bytes=20_000, framing="chunked"),
        Fault(first=1, cut_after_bytes=20_000, framing="close"),
        Fault(first=1, stall_after_bytes=20_000),
        Fault(first=1, silent=True),
        Fault(first=3, status=503),
        Fault(first=3, status=429),
        Fault(first=1, status=416),
        Fault(first=1, status=403),
        Fault(first=4, ignore_range=True),
        Fault(first=2, headers={"Content-Range": "bytes 5-9/1500003"}),
        Fault(first=2, headers={"Content-Range": "nonsense"}),
        Fault(first=2, headers={"Content-Range": ""}),
        Fault(first=2, headers={"Content-Range": "bytes 100000-149999/7"}),
    ],
    ids=lambda fault: " ".join(
        f"{n}={v}" for n in fault.__slots__ if (v := getattr(fault, n)) and n != "first"
    ),
)
def test_a_range_that_fails_is_mended_over_one_connection(
    server: ShardServer, fault: Fault, healthy: int
) -> None:
    server.misbehave("a.tar", Fault(first=healthy), fault)
    assert read(server, chunk_bytes=8192) == BODY
    assert any(seen.start and seen.stop is None for seen in server.log)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(ignore_range=True),
        Fault(first=1, status=416),
        Fault(first=1, headers={"Content-Range": "bytes 5-9/1500003"}),
        Fault(first=1, headers={"Content-Range": "bytes */7"}),
    ],
)
def test_a_server_that_does_not_do_ranges_is_asked_plainly(server: ShardServer, fault: Fault) -> None:
    server.misbehave("a.tar", fault)
    tally = Tally()
    assert read(server, tally=tally) == BODY
    assert not tally["origin_retries"]
    assert len(server.log) == (1 if fault.ignore_range else 2)


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_a_range_without_a_length_is_read_to_its_end(server: ShardServer, framing: Any) -> None:
    server.misbehave("a.tar", Fault(framing=framing))
    assert read(server) == BODY
    assert_each_byte_was_asked_for_once(server)


def test_a_server_that_does_not_tell_the_size_is_read_by_one_connection(server: ShardServer) -> None:
    server.misbehave("a.tar", Fault(first=1, headers={"Content-Range": "bytes 0-99999/*"}))
    assert read(server) == BODY
    assert len(server.log) == 2


@pytest.mark.parametrize(
    "after",
    [
        Fault(body=OTHER),
        Fault(body=OTHER, ignore_range=True),
        Fault(body=OTHER[:1000]),
        Fault(body=OTHER, ignore_conditions=True, headers={"ETag": '"other"'}),
        Fault(
            body=OTHER,
            ignore_conditions=True,
            headers={"ETag": "", "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"},
        ),
        Fault(status=412),
    ],
    ids=["If-Match", "ranges ignored", "much shorter", "If-Match ignored", "only its date tells", "412"],
)
def test_an_overwrite_between_two_ranges_is_an_error_and_never_a_mix(
    server: ShardServer, after: Fault
) -> None:
    server.misbehave("a.tar", Fault(first=3), after)
    got: list[bytes] = []
    with pytest.raises((DatasetChanged, OriginError)) as caught:
        got.extend(open_origin(f"{server.url}/a.tar", options=OriginOptions(**SIDE_BY_SIDE)).open().chunks())
    assert isinstance(caught.value, DatasetChanged)
    assert BODY.startswith(b"".join(got))


def test_ranges_are_asked_where_the_first_answer_came_from_with_its_headers(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(BODY)
    with ShardServer(tmp_path) as near, ShardServer(tmp_path) as far:
        near.misbehave("a.tar", Fault(status=302, headers={"Location": f"{far.url}/a.tar?sig=hunter2"}))
        storage = {"headers": {"Authorization": "Bearer hunter2"}}
        options = OriginOptions(**SIDE_BY_SIDE)
        assert b"".join(open_origin(f"{near.url}/a.tar", storage, options).open().chunks()) == BODY
        assert len(near.log) == 1
        assert_each_byte_was_asked_for_once(far)
        assert not any("Authorization" in seen.headers for seen in far.log)
        far.misbehave("a.tar", Fault(first=2), Fault(first=1, status=403))  # its signature has expired
        assert b"".join(open_origin(f"{near.url}/a.tar", storage, options).open().chunks()) == BODY


@pytest.mark.parametrize("fault", [Fault(), Fault(stall_after_bytes=20_000), Fault(silent=True)])
@pytest.mark.sampled(1)
def test_nothing_is_left_over_after_a_close_in_the_middle(
    server: ShardServer, fault: Fault, no_leaks: Any
) -> None:
    read(server)
    before = len(server.log)
    with no_leaks():
        options = OriginOptions(**{**SIDE_BY_SIDE, "stall_seconds": 60.0})
        stream = open_origin(f"{server.url}/a.tar", options=options).open()
        got = 0
        chunks = stream.chunks()
        while got < 110_000:
            got += len(next(chunks))
        until(lambda: len(server.ranges("a.tar")) - before >= 5)  # the second of four ranges is being sent
        server.misbehave("a.tar", fault)
        while got < 160_000:
            got += len(next(chunks))
        until(lambda: len(server.log) - before >= 6)
        stream.close()
        stream.close()


def test_a_stopped_loader_ends_all_ranges(server: ShardServer, no_leaks: Any) -> None:
    server.misbehave("a.tar", Fault(first=2), Fault(stall_after_bytes=20_000))
    stop = threading.Event()
    options = OriginOptions(**{**SIDE_BY_SIDE, "stall_seconds": 60.0})
    with no_leaks():
        threading.Timer(0.3, stop.set).start()
        with pytest.raises(OriginStopped):
            list(open_origin(f"{server.url}/a.tar", options=options, stop=stop).open().chunks())


class Slice:
    took = 0.5

    def __init__(self, log: list[str], start: int, stop: int) -> None:
        self.log, self.place, self.size_bytes = log, (start, stop), stop - start
        self.seconds: float | None = None
        log.append("ask")

    def chunks(self) -> Iterator[bytes]:
        self.log.append("give")
        start, stop = self.place
        yield BODY[start : (start + stop) // 2]
        self.seconds = self.took
        yield BODY[(start + stop) // 2 : stop]

    def cancel(self) -> None:
        self.log.append("cancel")


@given(
    st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 7), st.integers(1, 900), st.integers(1, 900)
)
def test_ordered_parts_give_every_byte_once_and_keep_to_their_number(
    start: int, length: int, at_once: int, first: int, limit: int
) -> None:
    log: list[str] = []
    options = OriginOptions(first_part_bytes=first, part_limit_bytes=max(first, limit))
    parts = OrderedParts(lambda a, b: Slice(log, a, b), start, start + length, at_once, options)
    assert b"".join(parts.chunks()) == BODY[start : start + length]
    assert "cancel" not in log
    waiting = 0
    for what in log:
        waiting += 1 if what == "ask" else -1
        assert waiting <= at_once + 1  # the one that gives may have come in full
    assert log.count("ask") == log.count("give")


class _Busy(socket.socket):
    """A socket whose reader gets the processor late."""

    late_seconds = 0.05

    def recv_into(self, *args: Any) -> int:
        time.sleep(self.late_seconds)
        return super().recv_into(*args)


class _PatientBusy(sockets._Patient, _Busy):
    pass


def test_a_busy_reader_does_not_make_a_quick_connection_slow(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_PatientSocket", _PatientBusy)
    options = {"first_get_bytes": 500_000, "chunk_bytes": 32 * 1024, "quick_bytes_per_second": 1.5e6}
    assert read(server, **options) == BODY
    assert [request.start for request in server.log] == [0, 500_000]


def test_what_has_come_is_not_waited_for_and_what_has_not_is() -> None:
    far, near = socket.socketpair()
    with far, _PatientBusy(near.family, near.type, fileno=near.detach()) as reader:
        reader.settimeout(sockets.WAKE_SECONDS)
        far.sendall(b"abc")
        before_seconds = sockets.waited_seconds()
        assert reader.recv_into(bytearray(3)) == 3
        assert sockets.waited_seconds() == before_seconds
        threading.Timer(0.2, far.sendall, (b"d",)).start()
        assert reader.recv_into(bytearray(3)) == 1
        assert sockets.waited_seconds() > before_seconds


def test_a_process_that_was_stopped_has_not_waited_all_the_while() -> None:
    far, near = socket.socketpair()
    with far, _PatientBusy(near.family, near.type, fileno=near.detach()) as reader:
        reader.settimeout(sockets.WAKE_SECONDS)
        reader.stall_seconds, reader.late_seconds = 0.25, 0.4
        threading.Timer(1.1, far.sendall, (b"d",)).start()
        assert reader.recv_into(bytearray(3)) == 1
