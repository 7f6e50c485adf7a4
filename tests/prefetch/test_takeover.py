"""Fillers that die or are stopped: another takes their shard over, from a copy of what is whole."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamload.cache.shard import Shard, shard_of
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier
from streamload.metrics import Counters
from streamload.origins.origin import open_origin
from streamload.prefetch.prefetcher import Prefetcher, PrefetchOptions
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards
from tests.support.fills import requests_for
from tests.support.tiers import until

COUNT = 40
LIMIT = 1 << 30
STOPPED_SECONDS = 0.3
PATIENCE_SECONDS = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "data", [COUNT], seed=44)
    with ShardServer(tmp_path / "data") as server:
        yield server


class Filling:
    """A prefetcher that wants the server's one shard."""

    def __init__(self, server_url: str, root: Path):
        self.counts = Counters()
        self.tier = Tier(root, LIMIT, self.counts)
        self.shard = shard_of(f"{server_url}/00000.tar", None)
        self.ahead = Prefetcher(
            self.tier,
            self._open,
            PrefetchOptions(threads=1, stopped_seconds=STOPPED_SECONDS),
            counts=self.counts,
        )
        self.ahead.want(requests_for([self.shard]))

    def _open(self, shard: Shard, stop: threading.Event):  # type: ignore[no-untyped-def]
        return open_origin(shard.url, counters=self.counts, stop=stop)

    @property
    def is_published(self) -> bool:
        return self.tier.published(self.shard.digest).exists()

    def close(self) -> None:
        self.ahead.close()


def fill_until_killed(server_url: str, root: Path) -> None:
    filling = Filling(server_url, root)
    while not filling.is_published:
        time.sleep(0.01)
    filling.close()


@pytest.fixture
def other(server: ShardServer, tmp_path: Path) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process that has filled a part of the shard, and waits for more bytes."""
    server.stop_after(0.6)
    process = multiprocessing.get_context("fork").Process(
        target=fill_until_killed, args=(server.url, tmp_path / "tier")
    )
    process.start()
    tier = Tier(tmp_path / "tier", LIMIT)
    view = ShardView(tier, shard_of(f"{server.url}/00000.tar", None))

    def has_much() -> bool:
        view.refresh()
        return view.count >= COUNT * 0.4

    until(has_much)
    view.close()
    yield process
    if process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
    process.join()


def samples(filling: Filling) -> list[tuple[str, dict[str, bytes]]]:
    view = ShardView(filling.tier, filling.shard)
    found = []
    for number in range(view.count):
        read = view.read(number)
        assert read is not None
        entry, members = read
        found.append((entry.key, {extension: bytes(data) for extension, data in members.items()}))
    view.close()
    return found


@pytest.mark.parametrize("by", [signal.SIGSTOP, signal.SIGKILL])
def test_what_is_whole_is_taken_over_and_not_fetched_again(
    by: signal.Signals, server: ShardServer, other: multiprocessing.process.BaseProcess, tmp_path: Path
) -> None:
    assert other.pid is not None
    os.kill(other.pid, by)
    filling = Filling(server.url, tmp_path / "tier")
    until(lambda: len(server.ranges("00000.tar")) == 2)
    server.go_on()
    until(lambda: filling.is_published)
    filling.close()
    assert samples(filling) == read_oracle(tmp_path / "data" / "00000.tar")
    (_, _), (start, stop) = server.ranges("00000.tar")
    assert start > 0.3 * stop
    assert filling.counts.snapshot().shards_taken_over == 1


def test_a_stopped_filler_that_goes_on_finds_its_shard_published_and_clears_up(
    server: ShardServer, other: multiprocessing.process.BaseProcess, tmp_path: Path
) -> None:
    assert other.pid is not None
    os.kill(other.pid, signal.SIGSTOP)
    filling = Filling(server.url, tmp_path / "tier")
    until(lambda: len(server.ranges("00000.tar")) == 2)
    server.go_on()
    until(lambda: filling.is_published)
    assert len(filling.tier.parts(filling.shard.digest)) == 1  # the stopped one's own: nobody else touches it
    os.kill(other.pid, signal.SIGCONT)
    other.join(PATIENCE_SECONDS)
    assert other.exitcode == 0
    filling.close()
    assert not filling.tier.parts(filling.shard.digest)
    assert samples(filling) == read_oracle(tmp_path / "data" / "00000.tar")


def test_a_filler_whose_origin_is_silent_isnt_taken_over(
    server: ShardServer, other: multiprocessing.process.BaseProcess, tmp_path: Path
) -> None:
    filling = Filling(server.url, tmp_path / "tier")
    looks = 0

    def has_looked_long_enough() -> bool:
        nonlocal looks
        looks += not filling.ahead.filling(filling.shard)
        time.sleep(STOPPED_SECONDS)
        return looks > 8

    until(has_looked_long_enough)
    assert len(server.ranges("00000.tar")) == 1
    server.go_on()
    until(lambda: filling.is_published)
    filling.close()
    assert filling.counts.snapshot().shards_published == 0


def test_a_part_whose_filler_died_before_it_had_begun_is_in_nobodys_way(
    server: ShardServer, tmp_path: Path
) -> None:
    tier = Tier(tmp_path / "tier", LIMIT)
    shard = shard_of(f"{server.url}/00000.tar", None)
    (tier.root / "parts" / f"{shard.digest}.00000000").mkdir(mode=0o700)
    filling = Filling(server.url, tmp_path / "tier")
    until(lambda: filling.is_published)
    filling.close()
    assert not tier.parts(shard.digest)


def test_of_two_dead_fillers_the_one_that_was_farther_is_taken_up(
    server: ShardServer, other: multiprocessing.process.BaseProcess, tmp_path: Path
) -> None:
    other.kill()
    other.join()
    tier = Tier(tmp_path / "tier", LIMIT)
    shard = shard_of(f"{server.url}/00000.tar", None)
    (farther,) = tier.parts(shard.digest)
    for nonce in ("00000000", "ffffffff"):  # one in front of it, one behind it in the listing
        nothing = tier.root / "parts" / f"{shard.digest}.{nonce}"
        nothing.mkdir(mode=0o700)
        (nothing / "index").touch(mode=0o600)
    part = tier.claim(shard.digest)
    assert part is not None
    assert part.orphan is not None
    assert part.orphan.path == farther
    part.discard()
    assert not tier.parts(shard.digest)
