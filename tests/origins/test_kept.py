"""Connections that a filling thread keeps for its next shard."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamload.errors import OriginNotFound
from streamload.origins import sockets
from streamload.origins.origin import KeptConnections, OriginOptions, open_origin
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from tests.support.tally import Tally

BODY, OTHER = (random.Random(seed).randbytes(200_003) for seed in (1, 2))
OPTIONS = OriginOptions(attempts=4, backoff_seconds=0.01, connect_seconds=2.0)
STOP = threading.Event()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    (tmp_path / "a.tar").write_bytes(BODY)
    (tmp_path / "b.tar").write_bytes(OTHER)
    with ShardServer(tmp_path) as server:
        yield server


@pytest.fixture
def kept() -> Iterator[KeptConnections]:
    kept = KeptConnections()
    yield kept
    kept.close()


def read(server: ShardServer, path: str, kept: KeptConnections, tally: Tally | None = None) -> bytes:
    origin = open_origin(f"{server.url}/{path}", None, OPTIONS, tally, STOP, kept=kept)
    with contextlib.closing(origin), contextlib.closing(origin.open()) as stream:
        return b"".join(stream.chunks())


def peers(server: ShardServer) -> list[int]:
    return [request.peer for request in server.log]


def test_a_thread_reads_its_shards_over_one_connection(server: ShardServer, kept: KeptConnections) -> None:
    assert [read(server, path, kept) for path in ("a.tar", "b.tar", "a.tar")] == [BODY, OTHER, BODY]
    assert len(server.log) == 3
    assert len(set(peers(server))) == 1


def test_each_thread_has_its_own_connection(server: ShardServer, kept: KeptConnections) -> None:
    bodies: list[bytes] = []
    begun = threading.Barrier(2)

    def read_two() -> None:
        begun.wait(60)
        bodies.extend(read(server, path, kept) for path in ("a.tar", "b.tar"))

    threads = [threading.Thread(target=read_two) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(bodies) == sorted([BODY, OTHER] * 2)
    assert len(set(peers(server))) == 2


def test_without_kept_connections_each_shard_has_its_own(server: ShardServer) -> None:
    for path in ("a.tar", "b.tar"):
        with contextlib.closing(open_origin(f"{server.url}/{path}", None, OPTIONS).open()) as stream:
            assert b"".join(stream.chunks())
    assert len(set(peers(server))) == 2


def test_a_connection_that_was_idle_for_long_is_not_used_again(
    server: ShardServer, kept: KeptConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_KEPT_SECONDS", -1.0)
    assert [read(server, path, kept) for path in ("a.tar", "b.tar")] == [BODY, OTHER]
    assert len(set(peers(server))) == 2


def test_a_connection_that_the_server_closed_meanwhile_costs_no_retry(
    server: ShardServer, kept: KeptConnections
) -> None:
    tally = Tally()
    assert read(server, "a.tar", kept, tally) == BODY
    server._server.break_connections()
    assert read(server, "b.tar", kept, tally) == OTHER
    assert tally["origin_retries"] == 0
    assert tally["origin_requests"] == 2


@pytest.mark.parametrize("status", [404, 421, 503])
def test_a_refused_shard_is_asked_for_again_over_another_connection(
    server: ShardServer, kept: KeptConnections, status: int
) -> None:
    assert read(server, "a.tar", kept) == BODY
    server.misbehave("b.tar", Fault(first=1, status=status))
    assert read(server, "b.tar", kept) == OTHER
    _, refused, served = peers(server)
    assert refused != served


@pytest.mark.parametrize(
    "fault",
    [
        Fault(first=1, cut_after_bytes=70_000),
        Fault(first=1, cut_after_bytes=70_000, reset=True),
        Fault(first=1, cut_after_bytes=70_000, framing="chunked"),
        Fault(first=1, framing="close"),
    ],
    ids=["cut", "reset", "cut chunk", "closed"],
)
def test_a_shard_after_a_broken_one_has_its_own_bytes(
    server: ShardServer, kept: KeptConnections, fault: Fault
) -> None:
    server.misbehave("a.tar", fault)
    assert [read(server, path, kept) for path in ("a.tar", "b.tar")] == [BODY, OTHER]


def test_a_shard_after_one_that_was_left_half_read_has_its_own_bytes(
    server: ShardServer, kept: KeptConnections
) -> None:
    (server.root / "large.tar").write_bytes(bytes(3 << 20))
    origin = open_origin(f"{server.url}/large.tar", None, OPTIONS, None, STOP, kept=kept)
    with contextlib.closing(origin.open()) as stream:
        assert next(iter(stream.chunks()))
    assert read(server, "b.tar", kept) == OTHER
    assert len(set(peers(server))) == 2


def test_a_missing_shard_leaves_others_readable(server: ShardServer, kept: KeptConnections) -> None:
    with pytest.raises(OriginNotFound):
        read(server, "missing.tar", kept)
    assert read(server, "a.tar", kept) == BODY


def test_sessions_that_differ_share_no_connection(server: ShardServer, kept: KeptConnections) -> None:
    assert read(server, "a.tar", kept) == BODY
    origin = open_origin(f"{server.url}/b.tar", None, OPTIONS, None, threading.Event(), kept=kept)
    with contextlib.closing(origin.open()) as stream:
        assert b"".join(stream.chunks()) == OTHER
    assert len(set(peers(server))) == 2
