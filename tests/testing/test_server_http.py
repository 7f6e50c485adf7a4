"""The shard server is right where it should be, and wrong only as it is told."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

from streamload.testing.faults import Fault
from streamload.testing.link import Link
from streamload.testing.server import ShardServer

BODY = bytes(range(256)) * 4000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    (tmp_path / "a.tar").write_bytes(BODY)
    with ShardServer(tmp_path) as server:
        yield server


def get(url: str, method: str = "GET", **headers: str) -> urllib3.BaseHTTPResponse:
    with urllib3.PoolManager() as pools:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return pools.request(method, url, headers=sent, retries=False, timeout=10)


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [("bytes=0-0", 0, 1), ("bytes=100-", 100, None), ("bytes=5-9", 5, 10), ("bytes=-7", -7, None),
     ("bytes=10-99999999", 10, None)],
)  # fmt: skip
def test_ranges_are_those_of_a_slice(server: ShardServer, asked: str, start: int, stop: int | None) -> None:
    answer = get(f"{server.url}/a.tar", Range=asked)
    assert answer.status == 206
    assert answer.data == BODY[start:stop]
    first = start if start >= 0 else len(BODY) + start
    assert answer.headers["Content-Range"] == f"bytes {first}-{first + len(answer.data) - 1}/{len(BODY)}"
    assert server.ranges("a.tar") == [(first, first + len(answer.data))]


def test_a_range_behind_the_end_is_416(server: ShardServer) -> None:
    answer = get(f"{server.url}/a.tar", Range=f"bytes={len(BODY)}-")
    assert (answer.status, answer.headers["Content-Range"]) == (416, f"bytes */{len(BODY)}")


def test_conditions_are_heeded(server: ShardServer) -> None:
    etag = get(f"{server.url}/a.tar", "HEAD").headers["ETag"]
    assert get(f"{server.url}/a.tar", Range="bytes=5-", If_Range=etag).status == 206
    assert get(f"{server.url}/a.tar", Range="bytes=5-", If_Range='"x"').data == BODY
    assert get(f"{server.url}/a.tar", Range="bytes=5-", If_Match=etag).status == 206
    assert get(f"{server.url}/a.tar", Range="bytes=5-", If_Match='"x"').status == 412


def test_nothing_outside_of_the_root_is_served(server: ShardServer, tmp_path: Path) -> None:
    (tmp_path.parent / "secret").write_text("x")
    answers = subprocess.run(
        ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--path-as-is", f"{server.url}/../secret"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert answers.stdout == "404"
    assert get(f"{server.url}/%2e%2e/secret").status == 404


def test_an_entry_of_the_log_says_what_was_asked_and_sent(server: ShardServer) -> None:
    get(f"{server.url}/a.tar?x=1", Range="bytes=5-9")
    get(f"{server.url}/b.tar", "HEAD")
    one, two = server.log
    assert (one.method, one.path, one.start, one.stop, one.status, one.sent) == (
        "GET",
        "a.tar",
        5,
        10,
        206,
        5,
    )
    assert (two.method, two.path, two.start, two.stop, two.status, two.sent) == (
        "HEAD",
        "b.tar",
        None,
        None,
        404,
        0,
    )
    assert 0 <= one.seconds <= two.seconds


def test_faults_take_turns(server: ShardServer) -> None:
    server.misbehave("a.tar", Fault(first=2, status=500), Fault(first=1, body=b"page"), Fault(status=403))
    assert [get(f"{server.url}/a.tar").status for _ in range(5)] == [500, 500, 200, 403, 403]
    server.misbehave("a.tar")
    assert get(f"{server.url}/a.tar").data == BODY


def test_a_token_ends_after_some_requests_and_another_is_taken(server: ShardServer) -> None:
    server.misbehave(
        "*", Fault(first=2, requires="one"), Fault(requires="two", status=403, body=b"it has ended")
    )
    url = f"{server.url}/a.tar"
    assert get(url).status == 401
    assert get(url, Authorization="Bearer one").data == BODY
    assert get(url, Authorization="Bearer one").data == b"it has ended"
    assert get(url, Authorization="Bearer two", Range="bytes=5-9").data == BODY[5:10]
    assert get(f"{url}?signature=two").data == BODY
    assert [request.status for request in server.log] == [401, 200, 403, 206, 200]


def test_it_stops_after_a_fraction_until_it_may_go_on(server: ShardServer) -> None:
    server.stop_after(0.5)
    got: dict[str, bytes] = {}

    def read(name: str, start: int) -> None:
        got[name] = get(f"{server.url}/a.tar", Range=f"bytes={start}-").data

    readers = [threading.Thread(target=read, args=(str(start), start)) for start in (0, 900_000)]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + 10
    while len(server.log) < 2 or sum(request.sent for request in server.log) < 512_000:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert sorted(request.sent for request in server.log) == [0, 512_000]
    assert not got
    server.go_on()
    for reader in readers:
        reader.join()
    assert got == {"0": BODY, "900000": BODY[900_000:]}


def test_connections_share_the_link(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(BODY)
    with ShardServer(tmp_path, bytes_per_second=4 * len(BODY)) as server:
        readers = [threading.Thread(target=get, args=(f"{server.url}/a.tar",)) for _ in range(4)]
        began = time.monotonic()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert time.monotonic() - began >= 0.95  # never faster than the link; how much slower isn't tested


def test_closing_ends_everything_that_is_under_way(tmp_path: Path, no_leaks: Any) -> None:
    (tmp_path / "a.tar").write_bytes(BODY)
    with no_leaks():
        server = ShardServer(tmp_path)
        server.misbehave("a.tar", Fault(first=1, silent=True), Fault(first=1, stall_after_bytes=10), Fault())
        server.stop_after(0.1)

        def read() -> None:
            with pytest.raises(urllib3.exceptions.HTTPError):
                get(f"{server.url}/a.tar")

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        while len(server.log) < 3:
            time.sleep(0.01)
        server.close()
        server.close()
        for reader in readers:
            reader.join()


def test_in_a_process_of_its_own_it_is_steered_and_ends(tmp_path: Path, no_leaks: Any) -> None:
    (tmp_path / "a.tar").write_bytes(BODY)
    with no_leaks():
        with ShardServer.spawn(tmp_path, bytes_per_second=1e9) as server:
            server.misbehave("a.tar", Fault(first=1, status=503))
            assert get(f"{server.url}/a.tar").status == 503
            assert get(f"{server.url}/a.tar", Range="bytes=7-").data == BODY[7:]
            assert [request.status for request in server.log] == [503, 206]
            assert server.ranges("a.tar") == [(7, len(BODY))]
            server.stop_after(0.5)
            server.go_on()
        server.close()


def test_in_a_process_of_its_own_it_serves_https(tmp_path: Path, trusted: tuple[str, str]) -> None:
    (tmp_path / "a.tar").write_bytes(BODY)
    with ShardServer.spawn(tmp_path, tls=trusted) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with urllib3.PoolManager(ca_certs=trusted[0]) as pool:
            assert pool.request("GET", f"{server.url}/a.tar").data == BODY


def test_a_link_is_shared_by_pieces_of_a_thousandth_of_a_second_and_of_packets_at_least() -> None:
    def piece(rate: float | None) -> int:
        return Link(rate, threading.Event()).piece_bytes

    assert piece(400e6) == 400_000
    assert piece(20e6) == 20_000
    assert piece(5e6) == 16 * 1024
    assert piece(1e6) == 10_000  # a hundredth of a second's: what is slow still goes on evenly
    assert piece(20) == 1
    assert piece(None) == piece(1e12) == 4 * 1024 * 1024


class _Clock:
    """Stands still but for waits, each of which takes a little longer than it was asked to."""

    def __init__(self, late_seconds: float) -> None:
        self.now, self.late_seconds = 100.0, late_seconds

    def __call__(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        self.now += seconds + self.late_seconds
        return False


@pytest.mark.parametrize("late_seconds", [0.0, 0.0002, 0.005])
def test_a_lone_connection_gets_all_of_a_link_however_late_its_waits_end(late_seconds: float) -> None:
    clock = _Clock(late_seconds)
    link = Link(20e6, clock, clock)  # type: ignore[arg-type]
    for _ in range(1000):
        link.take(20_000)
    assert -1e-9 < clock.now - 101.0 < late_seconds + 1e-9


def test_time_in_which_nobody_asks_a_link_for_anything_is_gone() -> None:
    clock = _Clock(0.0)
    link = Link(20e6, clock, clock)  # type: ignore[arg-type]
    link.take(20_000)
    clock.now += 5.0
    for _ in range(1000):
        link.take(20_000)
    assert clock.now - 105.001 == pytest.approx(1.0)
