"""A process that reads shards out of a tier and fills what isn't there, as a worker of the loader does."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from streamload.cache.demand import DemandFile
from streamload.cache.shard import Shard
from streamload.cache.shard_cache import tombstone_error
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier
from streamload.metrics import Counters
from streamload.origins.origin import (
    Origin,
    OriginOptions,
    Version,
    open_origin,
)
from streamload.prefetch.fallback import FallbackTier
from streamload.prefetch.prefetcher import Prefetcher, PrefetchOptions
from tests.faults.data import OpenOrigin, Samples, digest_of
from tests.support.fills import requests_for

QUICK = OriginOptions(
    connect_seconds=0.5, stall_seconds=0.2, slow_seconds=0.4, backoff_seconds=0.01, backoff_limit_seconds=0.5
)
"""Deadlines for attempts: what takes seconds in training takes tenths here."""
PATIENT = OriginOptions()
_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Reading:
    """What a process reads.

    Attributes:
        root, limit_bytes: of the tier.
        shards: in this order, each once.
        ahead: how many shards behind the one that is read are filled.
        deadline_seconds: after which it is a hang.
        no_room_seconds: after which samples of a shard that finds no room are read by range.
        stopped_seconds: after which a filler that shows no life is taken over from.
        between: called after each sample, with the number of samples so far.
    """

    root: Path
    shards: Sequence[Shard]
    limit_bytes: int = 1 << 30
    origin: OriginOptions = QUICK
    ahead: int = 1
    threads: int = 1
    deadline_seconds: float = 20.0
    no_room_seconds: float = 3.0
    stopped_seconds: float = 0.6
    open_origin: OpenOrigin | None = None
    between: Callable[[int], object] = lambda n: None

    def opened(self, shard: Shard, stop: threading.Event, counts: Counters) -> Origin:
        """The origin of a shard."""
        if self.open_origin is not None:
            return self.open_origin(shard, stop, counts)
        return open_origin(shard.url, options=self.origin, counters=counts, stop=stop)


@dataclass
class Read:
    """What came of a reading: samples by shard, counters, and the error that ended it."""

    seen: dict[str, Samples] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


class Hang(Exception):
    """A reading came to no end in its time."""


def read(reading: Reading) -> Read:
    """Read all shards; an error ends it and is returned with what came before."""
    counts, found = Counters(), Read()
    try:
        tier = Tier(reading.root, reading.limit_bytes, counts)
        tier.sweep()
        with (
            contextlib.closing(DemandFile(tier.root / "runs")) as run,
            contextlib.closing(FallbackTier(reading.root, counts)) as spare,
            contextlib.closing(_ahead(reading, tier, spare, counts)) as ahead,
        ):
            for place, shard in enumerate(reading.shards):
                run.announce(coming.digest for coming in reading.shards[place:])
                ahead.want(requests_for([shard], reading.shards[place + 1 : place + 1 + reading.ahead]))
                _read_shard(reading, _Places(tier, spare), ahead, shard, found)
    except Exception as exc:
        found.error = exc
    found.counts = counts.snapshot().as_dict()
    return found


def read_in_child(reading: Reading) -> dict[str, Any]:
    """The same as plain values, for a `Child`; what it raised stands there as its name and text."""
    found = read(reading)
    error = None
    if found.error is not None:
        kinds = [kind.__name__ for kind in type(found.error).__mro__]
        error = {"kinds": kinds, "text": str(found.error)}
    return {"seen": found.seen, "counts": found.counts, "error": error}


class _Places(NamedTuple):
    """Where shards are: in the tier, and in memory what that doesn't take."""

    tier: Tier
    spare: FallbackTier

    def now(self) -> list[Tier]:
        return [tier for tier in (self.tier, self.spare.tier) if tier is not None]


def _read_shard(reading: Reading, places: _Places, ahead: Prefetcher, shard: Shard, found: Read) -> None:
    samples = found.seen.setdefault(shard.digest, [])
    deadline = time.monotonic() + reading.deadline_seconds
    origin = reading.opened(shard, threading.Event(), Counters())

    def fetch(shard: Shard, version: Version, start: int, stop: int) -> bytes:
        return origin.read(start, stop, version)

    with contextlib.closing(origin), contextlib.closing(ShardView(places.now, shard, fetch)) as view:
        while True:
            view.refresh()
            while len(samples) < view.count and (sample := view.read(len(samples))) is not None:
                entry, members = sample
                samples.append([entry.key, digest_of({name: bytes(data) for name, data in members.items()})])
                reading.between(sum(map(len, found.seen.values())))
            if view.ended and len(samples) == view.count:
                break
            ahead.check()
            if view.is_stuck:
                ahead.store_in_fallback(shard)
            if ahead.refused_seconds(shard) > reading.no_room_seconds:
                _ = ahead.store_index_only(shard) or ahead.store_in_fallback(shard)
            if time.monotonic() > deadline:
                raise Hang(
                    f"{view!r}: {len(samples)} samples after {reading.deadline_seconds:g} s; {ahead!r}"
                )
            time.sleep(_POLL_SECONDS)
        reader = view.reader
        if view.gave_up and reader is not None:
            raise tombstone_error(reader.status, reader.cause)


def _ahead(reading: Reading, tier: Tier, spare: FallbackTier, counts: Counters) -> Prefetcher:
    return Prefetcher(
        tier,
        lambda shard, stop: reading.opened(shard, stop, counts),
        PrefetchOptions(reading.threads, index_only=True, stopped_seconds=reading.stopped_seconds),
        counts=counts,
        fallback_tier=spare,
    )
