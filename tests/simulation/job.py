"""One simulated process: it fills and reads shards by the shipped modules, as a loader's worker does."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from streamload.cache.demand import DemandFile
from streamload.cache.selection import Selection
from streamload.cache.shard import Shard
from streamload.cache.shard_cache import ShardCache
from streamload.cache.tier import Tier
from streamload.errors import CacheFull, DatasetChanged
from streamload.metrics import Counters
from streamload.origins.origin import Origin, OriginOptions, Version
from streamload.origins.protocol import Session
from streamload.origins.retrying import RetryingOrigin
from streamload.prefetch.prefetcher import Prefetcher, PrefetchOptions
from tests.support.fills import requests_for

from .engine import Process
from .threads import Event
from .world import Content, SimulatedOrigin, Truth, World

STOPPED_SECONDS = 0.5
_POLL_SECONDS = 0.02
_NO_ROOM_SECONDS = 1.0


class _LargeDisk(NamedTuple):
    """The limit alone is what the simulation is about, whatever this machine has free."""

    total: int = 1 << 40
    free: int = 1 << 40


@dataclass
class Plan:
    """What a job does: the places of its shards in order, how many it has open, how many it fills at once."""

    order: Sequence[int]
    open_shards: int
    threads: int


@dataclass
class Job:
    """Reads each shard of its plan to its end and compares each sample with what it has to be.

    Attributes:
        outcome: how it ended: "" as long as it didn't; "done", "full".
    """

    world: World
    plan: Plan
    root: Path
    limit_bytes: int
    counts: Counters = field(default_factory=Counters)
    outcome: str = ""
    changed: int = 0
    """How often a shard turned out to be of another version."""

    def main(self) -> None:
        """The process."""
        task = self.world.engine.here()
        assert task is not None
        self.process: Process = task.process
        tier = Tier(self.root, self.limit_bytes, self.counts, disk_usage=lambda path: _LargeDisk())
        tier.sweep()
        ahead = Prefetcher(
            tier,
            self._open_origin,
            PrefetchOptions(self.plan.threads, index_only=True, stopped_seconds=STOPPED_SECONDS),
            counts=self.counts,
        )
        run = DemandFile(tier.root / "runs")
        cache = ShardCache(
            tier,
            self.world.shards,
            Selection((), reads_all=True),
            skip=True,
            counts=self.counts,
            counted=lambda shard: True,
            fetch=self._fetch,
        )
        outcome = "done"
        try:
            for place in range(len(self.plan.order)):
                self._read(place, cache, ahead, run)
        except CacheFull:
            outcome = "full"
        cache.close()
        run.close()
        ahead.close()
        if self.process.descriptors:
            self.world.engine.fail(f"{self.process.name} ends with {self.process.descriptors} open")
        self.outcome = outcome

    def _read(self, place: int, cache: ShardCache, ahead: Prefetcher, run: DemandFile) -> None:
        """Read one shard, with those behind it open as well."""
        coming = [int(number) for number in self.plan.order[place:]]
        in_use, later = coming[: self.plan.open_shards], coming[self.plan.open_shards :]
        cache.keep_open(in_use)
        run.announce(self.world.shards[number].digest for number in coming)
        shards = self.world.shards
        ahead.want(requests_for([shards[n] for n in in_use], [shards[n] for n in later[:2]]))
        number = in_use[0]
        truth = self.world.truths[number]
        reading = _Reading(truth)
        count = 0
        while True:
            try:
                for other in in_use[1:]:
                    cache.arrived(other)
                is_over = reading.go_on(cache, number)
                if is_over or reading.count > count:
                    self.world.engine.progress()
                    count = reading.count
                if is_over:
                    break
            except DatasetChanged:
                if not any(self.world.truths[n].changes for n in in_use):
                    self._fail(f"DatasetChanged of {truth.shard.name}, which doesn't change")
                self.changed += 1
                reader = cache.view(number).reader
                if reader is not None and reader.status == "DatasetChanged":
                    break  # given up for that: samples of an index-only copy can't be read any more
                cache.keep_open(())
                reading = _Reading(truth)
            if reading.error:
                self._fail(reading.error)
            ahead.check()
            refused_seconds = ahead.refused_seconds(truth.shard)
            if refused_seconds > _NO_ROOM_SECONDS and not ahead.store_index_only(truth.shard):
                raise CacheFull(truth.shard.name)
            time.sleep(_POLL_SECONDS)
        if reading.error:
            self._fail(reading.error)

    def _fail(self, what: str) -> None:
        self.world.engine.fail(f"{self.process.name}: {what}")

    def _open_origin(self, shard: Shard, stop: threading.Event) -> Origin:
        return self._origin(shard, stop, self.process)

    def _origin(self, shard: Shard, stop: Any, process: Process | None) -> Origin:
        session = Session(OriginOptions(backoff_seconds=0.05), self.counts, stop)
        origin = SimulatedOrigin(self.world, self.world.of[shard.digest], process, stop)
        return RetryingOrigin(origin, session, self.world.engine.rng)

    def _fetch(self, shard: Shard, version: Version, start: int, stop: int) -> bytes:
        self.counts.add("range_reads", 1)
        return self._origin(shard, Event(self.world.engine), None).read(start, stop, version)


class _Reading:
    """One visit of a shard: which samples came, and whether they are what they should be."""

    def __init__(self, truth: Truth):
        self._truth = truth
        self._versions: list[Content] = list(truth.contents)
        """Those that all samples so far are of."""
        self.count = 0
        """Samples that came and were right."""
        self.error = ""

    def go_on(self, cache: ShardCache, shard: int) -> bool:
        """Read what has arrived; whether that was all, or wrong."""
        numbers, ended = cache.arrived(shard)
        while self.count < len(numbers):
            got = cache.view(shard).read(int(numbers[self.count]))
            if got is None:
                return False
            entry, members = got
            self._versions = [one for one in self._versions if one.holds(self.count, entry.key, members)]
            if int(numbers[self.count]) != self.count or entry.number != self.count or not self._versions:
                self.error = f"sample {self.count} of {self._truth.shard.name} came as {entry}"
                return True
            self.count += 1
        if ended:
            reader = cache.view(shard).reader
            self._judge(reader.status if reader is not None else "nothing")
        return ended

    def _judge(self, status: str) -> None:
        if status == "DatasetChanged" and self._truth.changes:
            return
        if status != self._truth.status or self.count not in [len(one.samples) for one in self._versions]:
            self.error = (
                f"{self._truth.shard.name} ({self._truth.kind}) ended as {status!r} after {self.count} of "
                f"{len(self._versions[0].samples)} samples"
            )
