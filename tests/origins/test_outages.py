"""An endpoint that is away is waited for; a shard that fails alone is given up.

How it shows that it works: real servers fail for one shard, for all, or are gone, and come back in the
middle of the retries.
"""

from __future__ import annotations

import contextlib
import functools
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Cache, Order, Shards
from streamload.errors import (
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginOutage,
    OriginStopped,
    OriginUnavailable,
)
from streamload.loader import worker_config
from streamload.origins import endpoints
from streamload.origins.origin import Origin, OriginOptions, open_origin
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from streamload.urls import endpoint
from tests.support.tally import Tally
from tests.support.tiers import until

BODY = random.Random(1).randbytes(1_000_003)
QUICK = OriginOptions(
    attempts=3, outage_seconds=60.0, backoff_seconds=0.01, backoff_limit_seconds=0.05, stall_seconds=0.3
)


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    for by_name in (endpoints._served, endpoints._away, endpoints._back, endpoints._failing):
        by_name.clear()
    yield
    for by_name in (endpoints._served, endpoints._away, endpoints._back):
        by_name.clear()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    for name in "abc":
        (tmp_path / f"{name}.tar").write_bytes(BODY)
    with ShardServer(tmp_path) as server:
        yield server


def read(origin: Origin) -> bytes:
    return b"".join(origin.open().chunks())


@contextlib.contextmanager
def reading(url: str, storage_options: dict[str, Any] | None = None) -> Iterator[Future[bytes]]:
    """A shard that is being read, and the block begins when each attempt has failed three times over."""
    tally = Tally()
    with ThreadPoolExecutor() as pool:
        future = pool.submit(read, open_origin(url, storage_options, QUICK, tally))
        until(lambda: tally["origin_retries"] >= 3 * QUICK.attempts)
        yield future


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=503),
        Fault(silent=True),
        Fault(cut_after_bytes=0, reset=True),
        Fault(status=403),
        Fault(status=404),
    ],
    ids=["503", "silent", "reset", "403", "404"],
)
def test_a_server_that_is_away_is_waited_for(
    server: ShardServer, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(open_origin(f"{server.url}/a.tar", options=QUICK)) == BODY
    server.misbehave("*", fault)
    with reading(f"{server.url}/b.tar") as future:
        server.misbehave("*")
        assert future.result(60) == BODY
    messages = [record.message for record in caplog.records]
    assert [message.split(" (")[0] for message in messages] == [
        f"{server.url} is down",
        f"{server.url} is back",
    ]
    assert "STREAMLOAD_ORIGIN_WAIT" in messages[0]


def test_a_server_that_is_gone_in_the_middle_of_a_shard_is_waited_for(server: ShardServer) -> None:
    server.stop_after(0.5)
    tally = Tally()
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read, open_origin(f"{server.url}/a.tar", None, QUICK, tally))
        until(lambda: tally["origin_bytes"] > 0)
        server.close()
        until(lambda: tally["origin_retries"] >= 3 * QUICK.attempts)
        with ShardServer(server.root, port=server.port):
            assert reading.result(60) == BODY


def test_an_object_store_that_is_away_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    for name in "ab":
        (tmp_path / "bucket" / f"{name}.tar").write_bytes(BODY)
    with ShardServer(tmp_path) as front:
        storage = {"anon": True, "endpoint_url": front.url}
        assert read(open_origin("s3://bucket/a.tar", storage, QUICK)) == BODY
        front.misbehave("*", Fault(status=500))
        with reading("s3://bucket/b.tar", storage) as future:
            front.misbehave("*")
            assert future.result(60) == BODY


@pytest.mark.parametrize("command", ["cat {}", "curl -sf file://{} | cat"])
def test_a_command_whose_endpoint_is_away_is_waited_for(tmp_path: Path, command: str) -> None:
    there, away = tmp_path / "there", tmp_path / "away"
    there.mkdir()
    for name in "ab":
        (there / f"{name}.tar").write_bytes(BODY)
    first, second = (f"pipe:{command.format(there / name)}" for name in ("a.tar", "b.tar"))
    assert read(open_origin(first, options=QUICK)) == BODY
    there.rename(away)
    with reading(second) as future:
        away.rename(there)
        assert future.result(60) == BODY
    (there / "b.tar").unlink()
    with pytest.raises(OriginError, match=r"b\.tar"):
        read(open_origin(second, options=QUICK))


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://host:8080/a/b.tar", "https://host:8080"),
        ("s3://bucket/a.tar", "s3://bucket"),
        ("pipe:s5cmd cat 's3://bucket/a.tar'", "pipe:s5cmd s3://bucket"),
        ("pipe:cat /mnt/a.tar", "pipe:cat"),
        ("pipe:", "pipe:"),
        ("/mnt/a.tar", ""),
    ],
)
def test_an_endpoint_is_a_host_or_a_program_at_a_host(url: str, name: str) -> None:
    assert endpoint(url) == name


@pytest.mark.parametrize(
    ("status", "error", "retries"),
    [(500, OriginUnavailable, 2), (403, OriginDenied, 2), (404, OriginNotFound, 2), (401, OriginDenied, 0)],
)
def test_a_shard_that_fails_alone_is_given_up(
    server: ShardServer, status: int, error: type[OriginError], retries: int
) -> None:
    assert read(open_origin(f"{server.url}/a.tar", options=QUICK)) == BODY
    server.misbehave("b.tar", Fault(status=status))
    tally = Tally()
    with pytest.raises(error, match=f"{status}.*given up after 3 attempts" if retries else f"{status}"):
        read(open_origin(f"{server.url}/b.tar", None, QUICK, tally))
    assert tally["origin_retries"] == retries


def test_a_shard_that_fails_alone_is_given_up_though_the_one_asked_about_has_gone(
    server: ShardServer,
) -> None:
    assert read(open_origin(f"{server.url}/a.tar", options=QUICK)) == BODY
    (server.root / "a.tar").unlink()
    server.misbehave("b.tar", Fault(status=500))
    with pytest.raises(OriginUnavailable, match="given up after 3 attempts"):
        read(open_origin(f"{server.url}/b.tar", options=QUICK))


def test_after_an_outage_a_shard_has_all_attempts_again_and_no_more(server: ShardServer) -> None:
    assert read(open_origin(f"{server.url}/a.tar", options=QUICK)) == BODY
    server.misbehave("*", Fault(status=503))
    with reading(f"{server.url}/b.tar") as future:
        server.misbehave("b.tar", Fault(status=500))
        server.misbehave("*")
        with pytest.raises(OriginUnavailable, match="given up after 3 attempts"):
            future.result(60)


def test_a_server_that_never_gave_anything_is_not_waited_for(server: ShardServer) -> None:
    server.misbehave("*", Fault(status=503))
    with pytest.raises(OriginUnavailable, match="given up after 3 attempts"):
        read(open_origin(f"{server.url}/a.tar", options=QUICK))


@pytest.mark.parametrize("way", ["a closed port", "no such name", "a store's closed port"])
def test_where_nobody_is_and_nothing_has_come_from_is_said_and_soon_given_up(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    monkeypatch.setattr(endpoints, "_FIRST_CONTACT_SECONDS", 0.2)
    patient = replace(QUICK, attempts=10_000)
    url, storage = f"{server.url}/a.tar", None
    if way == "no such name":
        gone = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(gone))
    elif way != "a closed port":
        url, storage = "s3://bucket/a.tar", {"anon": True, "endpoint_url": server.url}
    server.close()
    with pytest.raises(OriginUnavailable, match=r"a\.tar.*given up after \d+ attempts"):
        read(open_origin(url, storage, patient))
    assert [record.message.split(" (")[0] for record in caplog.records if record.name == "streamload"] == [
        f"{endpoint(url)} can't be reached"
    ]
    with pytest.raises(OriginUnavailable, match=r"b\.tar"):  # and no other shard is tried for as long
        read(open_origin(url.replace("a.tar", "b.tar"), storage, replace(patient, backoff_seconds=3600.0)))


def test_a_closed_port_of_a_server_that_gave_something_is_an_outage(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "_FIRST_CONTACT_SECONDS", 0.0)
    assert read(open_origin(f"{server.url}/a.tar", options=QUICK)) == BODY
    server.close()
    with reading(f"{server.url}/b.tar") as future, ShardServer(server.root, port=server.port):
        assert future.result(60) == BODY


@pytest.mark.parametrize("status", [503, 404])
def test_an_outage_has_one_deadline_for_all_its_shards(server: ShardServer, status: int) -> None:
    assert read(open_origin(f"{server.url}/a.tar", options=QUICK)) == BODY
    server.misbehave("*", Fault(status=status))
    brief = replace(QUICK, outage_seconds=0.5)
    began = time.monotonic()
    with pytest.raises(OriginOutage, match=rf"b\.tar.*{status}.*STREAMLOAD_ORIGIN_WAIT"):
        read(open_origin(f"{server.url}/b.tar", options=brief))
    assert time.monotonic() - began >= 0.5
    tally = Tally()
    with pytest.raises(OriginOutage, match=r"c\.tar"):
        read(open_origin(f"{server.url}/c.tar", None, brief, tally))
    assert tally["origin_retries"] < QUICK.attempts  # no second wait
    server.misbehave("*")
    assert read(open_origin(f"{server.url}/c.tar", options=brief)) == BODY


def test_an_outage_that_nothing_has_met_for_long_is_over(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(open_origin(f"{server.url}/a.tar", options=QUICK)) == BODY
    server.misbehave("*", Fault(status=503))
    with pytest.raises(OriginOutage):
        read(open_origin(f"{server.url}/b.tar", options=replace(QUICK, outage_seconds=0.1)))
    monkeypatch.setattr(endpoints, "_FORGOTTEN_SECONDS", 0.0)
    with reading(f"{server.url}/b.tar") as future:
        server.misbehave("*")
        assert future.result(60) == BODY


def test_a_shard_that_fails_like_one_that_was_given_before_is_given_up_while_others_come(
    server: ShardServer,
) -> None:
    """Shards are deleted once they were read, and one was never there: that is no outage."""
    assert read(open_origin(f"{server.url}/a.tar", options=QUICK)) == BODY
    server.misbehave("a.tar", Fault(status=404))
    server.misbehave("b.tar", Fault(status=404))
    tally = Tally()
    with ThreadPoolExecutor() as pool:
        brief = replace(QUICK, outage_seconds=2.0)
        failing = pool.submit(read, open_origin(f"{server.url}/b.tar", None, brief, tally))
        until(lambda: tally["origin_retries"] >= 1)
        assert read(open_origin(f"{server.url}/c.tar", options=QUICK)) == BODY
        with pytest.raises(OriginNotFound, match=r"b\.tar"):
            failing.result(60)


def test_a_loader_that_stops_does_not_wait_for_an_endpoint(server: ShardServer) -> None:
    assert read(open_origin(f"{server.url}/a.tar", options=QUICK)) == BODY
    server.misbehave("*", Fault(silent=True))
    stop, tally = threading.Event(), Tally()
    with ThreadPoolExecutor() as pool:
        endless = replace(QUICK, outage_seconds=3600.0)
        reading = pool.submit(read, open_origin(f"{server.url}/b.tar", None, endless, tally, stop))
        until(lambda: tally["origin_retries"] > QUICK.attempts)
        stop.set()
        with pytest.raises(OriginStopped):
            reading.result(60)


@pytest.mark.parametrize("wait", [60, 0])
def test_what_an_outage_costs_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: int) -> None:
    """Without the wait it is the shards that were on their way."""
    quick = functools.partial(OriginOptions, attempts=3, backoff_seconds=0.01, backoff_limit_seconds=0.05)
    monkeypatch.setattr(worker_config, "OriginOptions", quick)
    monkeypatch.setenv("STREAMLOAD_ORIGIN_WAIT", str(wait))
    write_shards(tmp_path / "data", [20] * 12, seed=1)
    with (
        ShardServer(tmp_path / "data") as server,
        streamload.make_loader(
            f"{server.url}/{{00000..00011}}.tar",
            batch_size=10,
            num_workers=1,
            cache_dir=tmp_path / "cache",
            cache_size="1GB",
            order=Order(lanes=1),
            shuffle=20,
            cache=Cache(ahead="1KB"),
            shards=Shards(max_bad_shards=None),
        ) as loader,
        ThreadPoolExecutor() as pool,
    ):
        batches = iter(loader)
        count = len(next(batches)[0])
        server.misbehave("*", Fault(status=503))
        before = len(server.log)
        # Shards are asked for as batches are taken.
        rest = pool.submit(lambda: sum(len(images) for images, _ in batches))
        until(lambda: len(server.log) >= before + 10)
        server.misbehave("*")
        count += rest.result(120)
        given_up = loader.stats().shards_given_up
    assert (count == 240) is (given_up == 0) is (wait > 0)


def test_what_is_known_of_servers_is_forgotten_with_the_last_who_remembers() -> None:
    endpoints._served["http://host"] = ()
    first, second = endpoints.remember(), endpoints.remember()
    first()
    first()
    assert endpoints._served
    second()
    assert not endpoints._served


def test_a_shard_whose_last_attempt_failed_just_before_its_server_came_back_is_not_given_up(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(open_origin(f"{server.url}/a.tar")) == BODY
    server.misbehave("b.tar", Fault(status=503))
    probe = endpoints.Endpoint.is_away

    def comes_back(self: Any, error: OriginError, session: Any) -> bool:
        """The other shard, which had seen the outage, goes on before this one looks."""
        other = endpoints._served[server.url][-1]
        other._record(error, 60.0)
        other.served()
        server.misbehave("b.tar")
        return probe(self, error, session)

    monkeypatch.setattr(endpoints.Endpoint, "is_away", comes_back)
    tally = Tally()
    assert read(open_origin(f"{server.url}/b.tar", None, QUICK, tally)) == BODY
    assert tally["origin_retries"] == QUICK.attempts


def test_a_shard_that_fails_alone_after_an_outage_is_given_up(server: ShardServer) -> None:
    assert read(open_origin(f"{server.url}/a.tar")) == BODY
    other = endpoints._served[server.url][-1]
    other._record(OriginUnavailable("503"), 60.0)
    other.served()
    server.misbehave("b.tar", Fault(status=503))
    with pytest.raises(OriginUnavailable, match="given up after 3 attempts"):
        read(open_origin(f"{server.url}/b.tar", None, QUICK))
