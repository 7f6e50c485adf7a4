"""Threads that fill: idle ones sleep until they are called, and somebody watches the clock all the same."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from streamload.cache.shard import Shard, shard_of
from streamload.cache.tier import Tier
from streamload.errors import OriginUnavailable
from streamload.metrics import Counters
from streamload.origins.origin import Origin, OriginOptions, open_origin
from streamload.prefetch import prefetcher as ahead_
from streamload.prefetch import scheduler
from streamload.prefetch.prefetcher import Prefetcher, PrefetchOptions
from streamload.testing.server import Fault, ShardServer
from streamload.testing.shards import write_shards
from tests.support.fills import requests_for
from tests.support.tiers import until

PATIENT = OriginOptions(connect_seconds=300, stall_seconds=300)
FAILS_AFTER = {"00001.tar": 0.0, "00002.tar": 0.3}


def test_who_watched_the_clock_calls_another_when_it_goes_to_work(tmp_path: Path) -> None:
    """Two of three threads come to wait for bytes; the last one tries again what failed, when it is due."""
    write_shards(tmp_path / "data", [5, 5, 5])
    counts, opened = Counters(), Counter[str]()

    def open_(shard: Shard, stop: threading.Event) -> Origin:
        name = shard.name.rpartition("/")[2]
        opened[name] += 1
        if name in FAILS_AFTER and opened[name] == 1:
            stop.wait(FAILS_AFTER[name])
            raise OriginUnavailable(f"{name}: not now")
        return open_origin(shard.url, options=PATIENT, counters=counts, stop=stop)

    with ShardServer(tmp_path / "data") as server:
        for name in ("00000.tar", "00001.tar"):
            server.misbehave(name, Fault(silent=True))
        shards = [shard_of(f"{server.url}/0000{number}.tar", None) for number in range(3)]
        tier = Tier(tmp_path / "tier", 1 << 30, counts)
        ahead = Prefetcher(
            tier,
            open_,
            PrefetchOptions(threads=3, tombstones=False, retry_seconds=0.6),
            counts=counts,
        )
        ahead.want(requests_for(shards))
        try:
            until(tier.published(shards[2].digest).exists)
            assert opened == {"00000.tar": 1, "00001.tar": 2, "00002.tar": 2}
        finally:
            ahead.close()


def test_one_who_is_called_calls_the_next_while_there_is_more_to_take(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Nobody looks by the clock here; a call for each shard is all that brings four threads to work."""
    monkeypatch.setattr(scheduler, "_IDLE_SECONDS", 300.0)
    monkeypatch.setattr(scheduler, "HELD_SECONDS", 600.0)
    write_shards(tmp_path / "data", [5] * 5)
    counts, begun = Counters(), set[str]()
    go_on = threading.Event()

    def open_(shard: Shard, stop: threading.Event) -> Origin:
        begun.add(shard.name.rpartition("/")[2])
        go_on.wait(60)
        return open_origin(shard.url, options=PATIENT, counters=counts, stop=stop)

    with ShardServer(tmp_path / "data") as server:
        shards = [shard_of(f"{server.url}/0000{number}.tar", None) for number in range(5)]
        tier = Tier(tmp_path / "tier", 1 << 30, counts)
        ahead = Prefetcher(tier, open_, PrefetchOptions(threads=4), counts=counts)
        try:
            go_on.set()
            until(lambda: len(ahead._scheduler._change._waiters) == 4)
            ahead.want(
                requests_for((), shards[4:])
            )  # behind it, who is called first isn't the one who watches the clock
            until(tier.published(shards[4].digest).exists)
            until(lambda: len(ahead._scheduler._change._waiters) == 4)
            go_on.clear()
            ahead.want(requests_for((), shards[:4]))
            until(lambda: len(begun) == 5)
            go_on.set()
            until(lambda: all(tier.published(shard.digest).exists() for shard in shards))
        finally:
            go_on.set()
            ahead.close()


def test_a_look_at_a_shard_that_is_there_wakes_one_thread(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(scheduler, "_IDLE_SECONDS", 300.0)
    monkeypatch.setattr(scheduler, "HELD_SECONDS", 600.0)
    write_shards(tmp_path / "data", [5])
    counts, looked = Counters(), threading.Semaphore(0)
    with ShardServer(tmp_path / "data") as server:
        shard = shard_of(f"{server.url}/00000.tar", None)
        tier = Tier(tmp_path / "tier", 1 << 30, counts)

        def open_(shard: Shard, stop: threading.Event) -> Origin:
            return open_origin(shard.url, options=PATIENT, counters=counts, stop=stop)

        woken, enforce_limits = list[int](), tier.budget.enforce_limits
        monkeypatch.setattr(
            tier.budget, "enforce_limits", lambda: (woken.append(threading.get_ident()), enforce_limits())
        )
        ahead = Prefetcher(
            tier, open_, PrefetchOptions(threads=6), counts=counts, sink=lambda result: looked.release()
        )
        try:
            ahead.want(requests_for((), [shard]))
            assert looked.acquire(timeout=60)
            until(lambda: len(ahead._scheduler._change._waiters) == 6)
            woken.clear()
            ahead._scheduler._not_before.clear()
            ahead.want(requests_for([shard]))
            assert looked.acquire(timeout=60)
            until(lambda: len(ahead._scheduler._change._waiters) == 6)
            assert len(woken) <= 3  # who looks, who watches meanwhile, and who looked, again
        finally:
            ahead.close()


def test_what_is_not_wanted_any_more_is_not_remembered() -> None:
    thread = scheduler.FillScheduler(1, lambda: None, threading.Event())
    for number in range(20):
        shard = shard_of(f"https://host/{number}.tar", None)
        thread.want(requests_for([shard]))
        assert thread.take() == shard
        thread.settle(shard, 600.0, is_refused=True)
    assert repr(thread) == "<FillScheduler 1 requests, 1 needed, 1 looked at, busy=[]>"


@pytest.mark.parametrize("is_needed", [False, True])
def test_behind_a_shard_without_room_no_other_is_taken_unless_a_reader_waits_for_it(is_needed: bool) -> None:
    end = threading.Event()
    thread = scheduler.FillScheduler(2, lambda: None, end)
    first, second = (shard_of(f"https://host/{number}.tar", None) for number in range(2))
    thread.want([scheduler.FillRequest(first, 1.0, is_needed=is_needed), scheduler.FillRequest(second, 2.0)])
    assert thread.take() == first
    thread.settle(first, 600.0, is_refused=True)
    end.set()  # nothing is waited for
    assert thread.take() == (second if is_needed else None)


def test_a_part_holds_room_as_long_as_it_is_filled(tmp_path: Path) -> None:
    tier, heartbeat = Tier(tmp_path / "tier", 1 << 30), ahead_.Heartbeat(300.0)
    part = tier.claim("a" * 32)
    assert part is not None
    assert part.reserve(1 << 20, 0.0)
    try:
        with heartbeat.of(part, "a" * 32):
            assert heartbeat.holds_room()
        assert not heartbeat.holds_room()
    finally:
        heartbeat.close()
        part.discard()


def test_heartbeats_of_a_few_shards_are_watched(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ahead_, "_WATCHED", 3)
    tier, heartbeat = Tier(tmp_path / "tier", 1 << 30), ahead_.Heartbeat(300.0)
    digests = [f"{number:032x}" for number in range(9)]
    try:
        for digest in digests:
            assert heartbeat.stopped(tier, digest) == []
        assert "others' of 0 shards" in repr(heartbeat)  # they have no parts
        parts = [tier.claim(digest) for digest in digests]
        for digest in digests:
            assert heartbeat.stopped(tier, digest) == []
        assert "others' of 3 shards" in repr(heartbeat)
        for part in parts:
            assert part is not None
            part.discard()
    finally:
        heartbeat.close()
