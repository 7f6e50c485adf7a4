"""Stores whose libraries refresh their tokens themselves, from a token server: what happens when one ends."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamload.cache.shared.store import Store
from streamload.cli.options import storage_options_of
from streamload.errors import OriginDenied, OriginOutage
from streamload.origins import endpoints
from streamload.origins.origin import OriginOptions, open_origin
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from tests.support import token_store  # noqa: F401  registers cloudstore://

BODY = random.Random(2).randbytes(100_000)
OPTIONS = OriginOptions(
    attempts=3,
    stall_seconds=100.0,
    backoff_seconds=0.01,
    backoff_limit_seconds=0.1,
    first_part_bytes=20_000,
    part_limit_bytes=40_000,
    outage_seconds=600.0,
)


class Cloud:
    """A store and a token server."""

    def __init__(self, store: ShardServer, tokens: ShardServer) -> None:
        self.store, self.tokens = store, tokens
        self.options: dict[str, Any] = {"store": store.url, "tokens": f"{tokens.url}/token"}

    def issue(self, token: str) -> None:
        (self.tokens.root / "token").write_text(token)

    def accept(self, token: str, status: int | None = None) -> None:
        self.store.misbehave("*", Fault(requires=token, status=status))


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    for name in ("store", "tokens"):
        (tmp_path / name).mkdir()
    for name in "abc":
        (tmp_path / "store" / f"{name}.tar").write_bytes(BODY)
    end = endpoints.remember()
    with ShardServer(tmp_path / "store") as store, ShardServer(tmp_path / "tokens") as tokens:
        cloud = Cloud(store, tokens)
        cloud.issue("token-1")
        cloud.accept("token-1")
        yield cloud
    end()


def read(name: str, storage: dict[str, Any], options: OriginOptions = OPTIONS) -> bytes:
    return b"".join(open_origin(f"cloudstore://bucket/{name}.tar", storage, options).open().chunks())


def test_a_library_that_refreshes_in_time_has_no_refusal(cloud: Cloud) -> None:
    storage = {**cloud.options, "seconds": 0.0}
    assert read("a", storage) == BODY
    cloud.issue("token-2")
    cloud.accept("token-2")
    assert read("b", storage) == BODY
    assert all(request.status in {200, 206} for request in cloud.store.log)


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_is_revoked_before_its_expiry_is_looked_up_anew(cloud: Cloud, status: int) -> None:
    assert read("a", cloud.options) == BODY
    cloud.issue("token-2")
    origin = open_origin("cloudstore://bucket/b.tar", cloud.options, OPTIONS)
    chunks = origin.open().chunks()
    first = next(chunks)
    cloud.accept("token-2", status)
    assert first + b"".join(chunks) == BODY
    store = Store("cloudstore://bucket", cloud.options, 100.0, None)
    assert store.read("c.tar", len(BODY)) == BODY
    cloud.issue("token-3")
    cloud.accept("token-3", status)
    assert store.read("c.tar", len(BODY)) == BODY


def test_a_token_that_comes_late_costs_no_shard_and_one_that_never_comes_ends_the_wait(cloud: Cloud) -> None:
    assert read("a", cloud.options) == BODY
    cloud.accept("token-2")
    timer = threading.Timer(0.3, cloud.issue, ["token-2"])
    timer.start()
    assert read("b", cloud.options) == BODY
    timer.join()
    cloud.accept("token-3")
    with pytest.raises(OriginOutage, match="answers 401"):
        read("c", cloud.options, replace(OPTIONS, outage_seconds=0.3))


def test_a_token_server_that_is_away_for_a_while_costs_no_shard(cloud: Cloud) -> None:
    storage = {**cloud.options, "seconds": 0.0}
    assert read("a", storage) == BODY
    cloud.tokens.misbehave("*", Fault(status=500))
    timer = threading.Timer(0.3, cloud.tokens.misbehave, ["*"])
    timer.start()
    assert read("b", storage) == BODY
    timer.join()


def test_a_token_in_a_file_of_options_is_read_again(cloud: Cloud, tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"store": cloud.store.url, "token": "token-1"}))
    storage = storage_options_of(f"@{file}")
    assert storage is not None
    assert read("a", storage) == BODY
    file.write_text(json.dumps({"store": cloud.store.url, "token": "token-2"}))
    cloud.accept("token-2")
    assert read("b", storage) == BODY


def test_a_token_that_is_refused_from_the_beginning_is_denied_at_once(cloud: Cloud) -> None:
    cloud.accept("token-2")
    with pytest.raises(OriginDenied, match="answers 401"):
        read("a", cloud.options)
    assert len(cloud.store.log) == 2
