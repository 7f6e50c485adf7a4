"""Single-flight among nodes that share a cache: which node fetches a shard from its origin.

Of several nodes that want a shard at the same moment, the one that holds its lease (leases.py) fetches and
stores it; the others wait for it in the shared cache. A wait ends when the shard is there, when the holder
releases its lease or dies, and in any case after some time: then the origin is asked, as it is whenever the
shared cache fails. So this only saves traffic: a node that doesn't wait fetches the same bytes.

All waits in vain share one time budget of the process, whoever held the leases: it holds the longest wait for
one shard, and refills in ten times as long.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from streamload.cache.shard import Shard
from streamload.cache.shared.breaker import CircuitBreaker
from streamload.cache.shared.leases import Leases, is_dead_or_stopped, own_address
from streamload.cache.shared.tier import SharedTier
from streamload.errors import OriginStopped, SharedTierError

logger = logging.getLogger("streamload")

LEASE_SECONDS = 30.0
"""A holder without a heartbeat for so long isn't waited for: half of what daemons allow, as a batch
may be waiting. A daemon sends two heartbeats in that time."""
_SETTLE_SECONDS = 0.5
"""When a holder dies, all that wait for it may notice at the same moment."""
_LEAST_PAUSE_SECONDS = 0.5
_MOST_PAUSE_SECONDS = 2.0
_PAUSE_SHARE = 0.1
"""A wait is at most so much longer than necessary, and a long one polls seldom."""
_REFILL_TIMES = 10
"""The budget for waits in vain refills in so many times the longest wait."""
_LEAST_SHARE = 0.1
"""No wait begins with less of the budget left."""

_GOODBYE_SECONDS = 2.0

YieldSlot = Callable[[], contextlib.AbstractContextManager[object]]
"""Returns a context manager that is entered while a fill waits."""
_Found = TypeVar("_Found")


class _Wait(enum.Enum):
    NONE = "nobody fetches it, as far as is known"
    OVER = "the holder has ended"
    IN_VAIN = "it took too long"


class SingleFlight:
    """The turns of one process. Thread-safe; made in the process that uses it.

    Args:
        tier: the shared cache.
        wait_seconds: the longest wait for one shard; 0: no waiting, each node fetches for itself.
        stores: whether this process stores what it fetches; else it takes no turns, and only waits.
        lease_seconds: see LEASE_SECONDS.
        rng: spreads the polls of nodes that wait for the same shard.
        clock: monotonic.
    """

    def __init__(
        self,
        tier: SharedTier,
        *,
        wait_seconds: float,
        stores: Callable[[], bool],
        lease_seconds: float = LEASE_SECONDS,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tier = tier
        self._wait_seconds = wait_seconds
        self._stores = stores
        self._rng = rng or random.Random()
        self._clock = clock
        self._closing = threading.Event()
        self._leases = Leases(
            tier.objects,
            lease_seconds=lease_seconds,
            address=own_address(),
            has_gone=is_dead_or_stopped,
            settle_seconds=_SETTLE_SECONDS,
            clock=clock,
        )
        self._breaker = CircuitBreaker(clock=clock)
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._kept: set[str] = set()  # digests of fetched shards that wait to be stored
        self._vain_seconds = 0.0  # waited in vain, less refills, as of …
        self._vain_at = clock()
        self._warned_until = clock()

    def __repr__(self) -> str:
        return f"<SingleFlight {self._leases!r}>"

    def find(
        self,
        shard: Shard,
        look: Callable[[], _Found | None],
        stop: threading.Event,
        *,
        takes: bool = True,
        yield_slot: YieldSlot = contextlib.nullcontext,
    ) -> _Found | None:
        """For a shard that was missing a moment ago: wait for the node that fetches it, or take the turn.

        Args:
            shard: which one.
            look: looks it up in the shared cache, now.
            stop: ends the wait.
            takes: whether it would be stored if this process fetched it.
            yield_slot: entered during the wait.

        Returns:
            What `look` found; None: fetch it from the origin, then call `end`.

        Raises:
            OriginStopped: the wait was ended from this side.
        """
        if self._wait_seconds <= 0 or not self._tier.is_absent(shard):
            return None
        began = self._clock()
        deadline = began + self._budget(began)
        while True:
            may_take = takes and self._stores()
            is_mine = may_take and self._asked(shard, lambda: self._leases.take(shard.digest))
            if is_mine is None:
                return None
            if is_mine:
                found = look()  # another node may have stored it meanwhile
                if found is not None:
                    self.end(shard)
                return found
            since = self._clock()
            waited = self._wait(shard, deadline, stop, yield_slot)
            found = look() if waited is _Wait.OVER else None
            if found is None and waited is not _Wait.NONE:
                self._spend(shard, since, waited)
            if found is not None or not may_take or waited is not _Wait.OVER:
                return found

    def keep(self, shard: Shard) -> None:
        """Note that a fetched shard will be stored: its turn lasts until `stored`."""
        with self._lock:
            self._kept.add(shard.digest)

    def end(self, shard: Shard) -> None:
        """End the turn of a shard, unless it will be stored. Never raises."""
        with self._lock:
            is_kept = shard.digest in self._kept
        if not is_kept:
            self._leases.release(shard.digest)

    def stored(self, shard: Shard) -> None:
        """End the turn of a shard that was stored, or won't be. Never raises."""
        with self._lock:
            self._kept.discard(shard.digest)
        self._leases.release(shard.digest)

    def close(self) -> None:
        """End all waits and release all leases, as far as the shared cache answers soon. Idempotent."""
        self._closing.set()
        self._leases.close(_GOODBYE_SECONDS)

    def _asked(self, shard: Shard, ask: Callable[[], bool]) -> bool | None:
        """Ask the leases; None if they don't answer, or the breaker is open."""
        if self._breaker.is_open:
            return None
        try:
            answer = ask()
        except SharedTierError as exc:
            if not self._closing.is_set():
                self._tier.report(shard, exc)
            self._breaker.fail()
            return None
        self._breaker.succeed()
        return answer

    def _wait(self, shard: Shard, deadline: float, stop: threading.Event, yield_slot: YieldSlot) -> _Wait:
        """Wait while a live process holds the lease of a shard."""
        began, waited = self._clock(), _Wait.NONE
        with contextlib.ExitStack() as stack:
            while is_held := self._asked(shard, lambda: self._leases.is_held(shard.digest)):
                now = self._clock()
                if now >= deadline:
                    return _Wait.IN_VAIN
                if waited is _Wait.NONE:
                    waited = _Wait.OVER
                    self._tier.counts.add("shared_waits")
                    stack.enter_context(yield_slot())
                pause = min(max(_LEAST_PAUSE_SECONDS, _PAUSE_SHARE * (now - began)), _MOST_PAUSE_SECONDS)
                self._pause(shard, min(deadline - now, pause * self._rng.uniform(0.5, 1.0)), stop)
        return _Wait.NONE if is_held is None else waited

    def _pause(self, shard: Shard, seconds: float, stop: threading.Event) -> None:
        began = time.monotonic_ns()
        is_stopped = stop.wait(seconds) or self._closing.is_set()
        self._tier.counts.add("shared_wait_ns", time.monotonic_ns() - began)
        if is_stopped:
            raise OriginStopped(f"{shard.name}: the wait for another node was stopped")

    def _budget(self, now: float) -> float:
        """For how many seconds a shard may be waited for now."""
        with self._lock:
            left = self._wait_seconds - max(0.0, self._vain_seconds - (now - self._vain_at) / _REFILL_TIMES)
        return left if left >= _LEAST_SHARE * self._wait_seconds else 0.0

    def _spend(self, shard: Shard, since: float, waited: _Wait) -> None:
        """Charge a wait in vain to the budget; seconds of concurrent waits count once."""
        now = self._clock()
        with self._lock:
            gained = (now - self._vain_at) / _REFILL_TIMES
            spent = now - max(since, self._vain_at)
            self._vain_seconds, self._vain_at = max(0.0, self._vain_seconds - gained) + spent, now
            is_new = waited is _Wait.IN_VAIN and now >= self._warned_until
            if is_new:
                self._warned_until = now + _REFILL_TIMES * self._wait_seconds
        if is_new:
            logger.warning(
                "%s: another node has been fetching it for %g s (STREAMLOAD_SHARED_WAIT) without storing it "
                "in the shared cache: it is fetched here as well, and in the next %g s at most a tenth of "
                "the time is spent on such waits",
                *(shard.name, self._wait_seconds, _REFILL_TIMES * self._wait_seconds),
            )
