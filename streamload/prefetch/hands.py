"""Who brings what a daemon finds missing: threads of this process (here), or a cluster (ray_engine.py)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from streamload.cache.fill import Filled
from streamload.cache.shard import Shard
from streamload.cache.shard_cache import verdict_cause
from streamload.cache.tier import Tier
from streamload.errors import StreamloadError
from streamload.metrics import Counters
from streamload.prefetch.ahead import STOPPED_SECONDS, Ahead, OpenOrigin
from streamload.prefetch.goals import Goal

Brought = Callable[[Shard, int], None]
"""Told, from any thread, that a unit is where it is wanted, and of how many bytes it is."""
Failed = Callable[[Shard, str], float]
"""Told, from any thread, why a unit can't be had now; says in how many seconds it is tried again."""
WaitOf = Callable[[Shard], float]
"""Says how soon a unit is needed, in shard visits."""

NO_ROOM_SECONDS = 30.0


class Hands(Protocol):
    """Those who bring units. Thread-safe; for one daemon; `close()` is idempotent."""

    def want(self, units: Sequence[Shard]) -> None:
        """Say what is to be brought, in order of need; it replaces what was said before."""
        ...

    def count(self, due: Sequence[Shard]) -> int:
        """How many units they can have at once, now; of those that are due, in order of need."""
        ...

    def has_begun(self, unit: Shard) -> bool:
        """Whether a unit is worked on, and better brought to its end than left."""
        ...

    def check(self) -> None:
        """Look whether all is well; called again and again.

        Raises:
            StreamloadError: they can't go on, whatever the unit.
        """
        ...

    def close(self) -> None:
        """Stop where they are; what they have begun stays for whoever takes it up."""
        ...


Engine = Callable[[Brought, Failed, WaitOf], Hands]
"""Makes the hands of a daemon, which is told by them how units end."""


class Here:
    """Threads of this process; see Hands. Units go through the tier of this node.

    Args:
        brought, failed, wait_of: see there.
        tier: of this node.
        goal: where units are delivered.
        open_origin: gives the origin of a unit; the event ends its waits.
        threads: units that are worked on at once.
        preparing: as many of those that are prepared, which takes a CPU each; None: as many as all.
        no_room_seconds: after which a unit that finds no room in the tier has failed.
        stopped_seconds: how long a filler of the same tier may show no life before it is taken over from.
        counts: of what arrives.
    """

    def __init__(
        self,
        brought: Brought,
        failed: Failed,
        wait_of: WaitOf,
        *,
        tier: Tier,
        goal: Goal,
        open_origin: OpenOrigin,
        threads: int,
        preparing: int | None = None,
        no_room_seconds: float = NO_ROOM_SECONDS,
        stopped_seconds: float = STOPPED_SECONDS,
        counts: Counters,
    ):
        self._tell_brought, self._tell_failed = brought, failed
        self._tier, self._goal, self._threads = tier, goal, threads
        self._preparing = threads if preparing is None else min(preparing, threads)
        self._no_room_seconds = no_room_seconds
        self._lock = threading.Lock()
        self._units: dict[str, Shard] = {}  # that are wanted, by digest; guarded by _lock
        self._ahead = Ahead(
            tier,
            open_origin,
            threads=threads,
            counts=counts,
            report=self._report,
            wait_of=wait_of,
            stopped_seconds=stopped_seconds,
            failed=lambda shard, error: self._failed(shard, str(error)),
        )

    def want(self, units: Sequence[Shard]) -> None:
        """See Hands."""
        with self._lock:
            self._units = {shard.digest: shard for shard in units}
        self._ahead.want((), units)

    def count(self, due: Sequence[Shard]) -> int:
        """See Hands."""
        return self._preparing if due and due[0].recipe else self._threads

    def has_begun(self, unit: Shard) -> bool:
        """See Hands."""
        return self._ahead.filling(unit)

    def check(self) -> None:
        """See Hands.

        Raises:
            CacheError: the tier of this node can't be used any more.
        """
        self._ahead.check()
        with self._lock:
            units = list(self._units.values())
        for shard in units:
            if self._ahead.refused_seconds(shard) > self._no_room_seconds:
                limit = self._tier.limit_bytes
                self._failed(shard, f"no room in {self._tier.root}, whose limit is {limit:,} bytes")

    def close(self) -> None:
        """See Hands."""
        self._ahead.close()

    def _report(self, shard: Shard, result: Filled) -> None:
        """A filling thread tells how a look at a shard ended."""
        with self._lock:
            is_wanted = shard.digest in self._units
        if not is_wanted:
            return
        if result is Filled.GAVE_UP:
            why = "given up by another process of this node"
            with contextlib.suppress(OSError, StreamloadError):
                why = verdict_cause(self._tier.verdict(shard.digest))
            self._failed(shard, why)
        if result is not Filled.PUBLISHED:
            return
        directory = self._tier.published(shard.digest)
        try:
            self._goal.deliver(shard, directory)
            size = (directory / "data").stat().st_size if shard.in_place is None else 0
        except (StreamloadError, OSError) as exc:
            self._failed(shard, str(exc))
            return
        self._ended(shard)
        self._tell_brought(shard, size)

    def _failed(self, shard: Shard, why: str) -> float:
        self._ended(shard)
        return self._tell_failed(shard, why)

    def _ended(self, shard: Shard) -> None:
        """Tell of a unit once, until it is wanted again."""
        with self._lock:
            self._units.pop(shard.digest, None)
