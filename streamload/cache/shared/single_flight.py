"""Whose turn it is to fetch a shard from its origin, among nodes that share a cache (step F).

What several nodes want at the same moment one of them fetches, who has the lease of it (leases.py), and
stores; the others wait for it in the shared cache. A wait ends when the shard is there, when the holder gave
its lease back or stands still, and in any case after some time: then the origin is asked, as it is whenever
the shared cache is in trouble. So this only saves traffic: who goes on without a turn fetches the same bytes.

All waits that were in vain come out of one budget of the process, whoever held the leases: it holds the
longest wait for one shard, and fills again in ten times as long.
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
from streamload.cache.shared.leases import Leases
from streamload.cache.shared.liveness import own_address, stands_still
from streamload.cache.shared.tier import SharedTier
from streamload.errors import OriginStopped, SharedTierError

logger = logging.getLogger("streamload")

LEASE_SECONDS = 30.0
"""After so long without a sign of life a holder isn't waited for: half of what daemons give each other, as a
batch may be waiting; a daemon shows life twice in that time."""
_SETTLE_SECONDS = 0.5
"""When a holder has gone all who waited for it may see that at the same moment."""
_LEAST_PAUSE_SECONDS = 0.5
_MOST_PAUSE_SECONDS = 2.0
_PAUSE_SHARE = 0.1
"""A wait is at most so much longer than it has to be, and a long one asks seldom."""
_REFILL_TIMES = 10
"""The budget for waits in vain, which holds the longest wait, fills again in so many times that long."""
_LEAST_SHARE = 0.1
"""With less of it left no wait is begun."""
"""After so many in a row no lease is asked for …"""
_GOODBYE_SECONDS = 2.0

Aside = Callable[[], contextlib.AbstractContextManager[object]]
"""Gives what is entered while a fill waits."""
_Found = TypeVar("_Found")


class _Wait(enum.Enum):
    NONE = "nobody has it in hand, as far as can be known"
    OVER = "whoever had it has ended"
    IN_VAIN = "it took too long"


class SingleFlight:
    """The turns of one process. Thread-safe; made in the process that uses it.

    Args:
        tier: the shared cache.
        wait_seconds: the longest wait for one shard; 0: there are no turns, each node fetches for itself.
        stores: whether this process stores what it fetches now; else it takes no turns, and only waits.
        lease_seconds: see LEASE_SECONDS.
        rng: spreads the nodes that wait for the same.
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
            has_gone=stands_still,
            settle_seconds=_SETTLE_SECONDS,
            clock=clock,
        )
        self._breaker = CircuitBreaker(clock=clock)
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._kept: set[str] = set()  # digests of fetched shards that wait to be stored
        self._vain_seconds = 0.0  # waited in vain, less what the budget has got back, at the time …
        self._vain_at = clock()
        self._said_until = clock()

    def __repr__(self) -> str:
        return f"<SingleFlight {self._leases!r}>"

    def find(
        self,
        shard: Shard,
        look: Callable[[], _Found | None],
        stop: threading.Event,
        *,
        takes: bool = True,
        yield_slot: Aside = contextlib.nullcontext,
    ) -> _Found | None:
        """A shard that the shared cache hadn't a moment ago: wait for whoever fetches it, or take the turn.

        Args:
            shard: which one.
            look: asks the shared cache for it, now.
            stop: ends the wait.
            takes: whether it would be stored if this process fetched it.
            yield_slot: entered while it waits.

        Returns:
            What `look` found; None: the origin is to be asked. Then `end` has to follow.

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
                found = look()  # somebody may have been through in between
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
        """A shard was fetched and is to be stored: the turn lasts until `stored`."""
        with self._lock:
            self._kept.add(shard.digest)

    def end(self, shard: Shard) -> None:
        """The fill of a shard is over; without `keep` nothing comes of it for others. Never raises."""
        with self._lock:
            is_kept = shard.digest in self._kept
        if not is_kept:
            self._leases.release(shard.digest)

    def stored(self, shard: Shard) -> None:
        """A shard that was kept is stored, or won't be. Never raises."""
        with self._lock:
            self._kept.discard(shard.digest)
        self._leases.release(shard.digest)

    def close(self) -> None:
        """End all waits and give all turns back, as far as the shared cache answers soon; once is enough."""
        self._closing.set()
        self._leases.close(_GOODBYE_SECONDS)

    def _asked(self, shard: Shard, ask: Callable[[], bool]) -> bool | None:
        """What the leases say; None where they can't be had, for a while after some failures unasked."""
        if self._breaker.is_open:
            return None
        try:
            answer = ask()
        except SharedTierError as exc:
            if not self._closing.is_set():
                self._tier.complain(shard, exc)
            self._breaker.fail()
            return None
        self._breaker.succeed()
        return answer

    def _wait(self, shard: Shard, deadline: float, stop: threading.Event, yield_slot: Aside) -> _Wait:
        """Wait while somebody at work has the lease of a shard."""
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
            raise OriginStopped(f"{shard.name}: the wait for another node was ended")

    def _budget(self, now: float) -> float:
        """For how many seconds a shard may be waited for now."""
        with self._lock:
            left = self._wait_seconds - max(0.0, self._vain_seconds - (now - self._vain_at) / _REFILL_TIMES)
        return left if left >= _LEAST_SHARE * self._wait_seconds else 0.0

    def _spend(self, shard: Shard, since: float, waited: _Wait) -> None:
        """A wait since a moment was in vain; of those side by side each second counts once."""
        now = self._clock()
        with self._lock:
            gained = (now - self._vain_at) / _REFILL_TIMES
            spent = now - max(since, self._vain_at)
            self._vain_seconds, self._vain_at = max(0.0, self._vain_seconds - gained) + spent, now
            is_news = waited is _Wait.IN_VAIN and now >= self._said_until
            if is_news:
                self._said_until = now + _REFILL_TIMES * self._wait_seconds
        if is_news:
            logger.warning(
                "%s is being fetched by another node, which hasn't stored it in the shared cache in %g s "
                "(STREAMLOAD_SHARED_WAIT): it is fetched here as well, and in the next %g s no other node is "
                "waited for in vain for more than a tenth of the time",
                *(shard.name, self._wait_seconds, _REFILL_TIMES * self._wait_seconds),
            )
