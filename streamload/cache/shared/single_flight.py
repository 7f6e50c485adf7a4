"""Single-flight among nodes that share a cache: which node fetches a shard from its origin.

Of several nodes that want a shard at the same moment, the one that holds its lease (leases.py) fetches and
stores it; the others wait for it in the shared cache. A wait ends when the shard is there, when the holder
releases its lease or dies, and in any case after some time: then the origin is asked, as it is whenever the
shared cache fails. So this only saves traffic: a node that doesn't wait fetches the same bytes.

A holder on another node that is several times slower than this process is overtaken: one process fetches the
shard, too, under a second lease. Any process may do so for the shards that its groups share with other
groups, at most two a group and pass, and where several nodes read a group, for a few others.

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
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from streamload.cache.backing import YieldSlot
from streamload.cache.shard import Shard
from streamload.cache.shared.breaker import CircuitBreaker
from streamload.cache.shared.leases import Holder, Leases, second
from streamload.cache.shared.tier import SharedTier
from streamload.errors import OriginStopped, SharedTierError
from streamload.metrics.counters import format_bytes
from streamload.node import is_dead_or_stopped, own_address
from streamload.origins.origin import Stream
from streamload.topology import RunAttempt, Topology

logger = logging.getLogger("streamload")

LEASE_SECONDS = 30.0
"""A holder without a heartbeat for this long isn't waited for: half of what daemons allow, as a batch may be
waiting. A daemon sends two heartbeats in that time."""
_SETTLE_SECONDS = 0.5
"""When a holder dies, all that wait for it may notice at the same moment."""
_LEAST_PAUSE_SECONDS = 0.5
_MOST_PAUSE_SECONDS = 2.0
_PAUSE_SHARE = 0.1
"""Share by which a wait may be longer than necessary, so that long waits poll seldom."""
_REFILL_TIMES = 10
"""The budget for waits in vain refills within this multiple of the longest wait."""
_LEAST_SHARE = 0.1
"""No wait begins with less of the budget left."""

_FIRST_BEAT_SECONDS = 1.0
"""A holder tells of its progress after this long at first."""
_SLOWER = 4.0
"""A holder is overtaken if its remaining bytes take this multiple of the time for the whole shard here."""
_FASTEST_SECONDS = 2.0
"""No holder is overtaken that will be ready sooner."""
_SLOW_BYTES_PER_SECOND = 1e6
"""A holder below this is overtaken by a process that doesn't know yet how fast it is itself."""
_GIVES_WAY_SECONDS, _GIVES_WAY_FOR_SECONDS = 1.0, 60.0
"""How long an overtaken process lets others take a lease first, and for how long after that it does so."""
_SAID_AFTER_SECONDS, _SAID_EVERY_SECONDS = 5.0, 30.0
"""A wait is logged after the first; one of the process in the second."""

_GOODBYE_SECONDS = 2.0

_Found = TypeVar("_Found")
_Answer = TypeVar("_Answer")


class _WaitOutcome(enum.Enum):
    NONE = "nobody fetches it, as far as is known"
    OVER = "the holder has ended, or the shard is there"
    WAS_OVER = "the holder had ended before the wait"
    OVERTAKES = "the holder is much slower than this process"
    IN_VAIN = "it took too long"


class SingleFlight:
    """The turns of one process. Thread-safe; made in the process that uses it.

    Args:
        wait_seconds: the longest wait for one shard; 0: no waiting, each node fetches for itself.
        stores: whether this process stores what it fetches; else it takes no turns, and only waits.
        lease_seconds: see LEASE_SECONDS.
        attempt: of the run that this process belongs to; None: of none.
        borders: digests of shards that may be fetched although a slower node is fetching them.
        spare: the number of other shards that may.
        rng: spreads the polls of nodes that wait for the same shard.
    """

    def __init__(
        self,
        tier: SharedTier,
        *,
        wait_seconds: float,
        stores: Callable[[], bool],
        lease_seconds: float = LEASE_SECONDS,
        attempt: RunAttempt | None = None,
        borders: Collection[str] = (),
        spare: int = 0,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tier = tier
        self._wait_seconds = wait_seconds
        self._stores = stores
        self._borders = borders
        self._rng = rng or random.Random()
        self._clock = clock
        self._closing = threading.Event()
        self._leases = Leases(
            tier.objects,
            lease_seconds=lease_seconds,
            address=own_address(),
            has_gone=is_dead_or_stopped,
            attempt=attempt,
            first_beat_seconds=_FIRST_BEAT_SECONDS,
            tells_progress=True,
            settle_seconds=_SETTLE_SECONDS,
            clock=clock,
        )
        self._breaker = CircuitBreaker(clock=clock)
        self._pace = FetchPace(clock)
        self._machine = own_address().partition(".")[0]
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._kept: set[str] = set()  # digests of fetched shards that wait to be stored
        self._vain_seconds = 0.0  # waited in vain, less refills, as of …
        self._vain_at = clock()
        self._warned_until = self._silent_until = clock()
        self._spare = spare

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
            look: looks it up in the shared cache, now.
            takes: whether it would be stored if this process fetched it.
            yield_slot: entered during the wait.

        Returns:
            What `look` found; None: fetch it from the origin, then call `end`.

        Raises:
            OriginStopped: the wait was ended from this side.
        """
        if self._wait_seconds <= 0 or not self._tier.is_absent(shard):
            return None
        start = self._clock()
        deadline = start + self._budget(start)
        overtaken_at = self._leases.overtaken_at
        if overtaken_at is not None and start - overtaken_at < _GIVES_WAY_FOR_SECONDS:
            with yield_slot():
                self._pause(shard, _GIVES_WAY_SECONDS, stop)
        was_over = False
        while True:
            may_take = takes and self._stores()
            is_mine = may_take and self._asked(shard, lambda: self._leases.take(shard.digest))
            if is_mine is None:
                return None
            if is_mine:
                held = look()  # another node may have stored it meanwhile
                if held is not None:
                    self.end(shard)
                return held
            since = self._clock()
            waited = self._wait(shard, deadline, stop, yield_slot, look if may_take else None)
            is_over = waited is _WaitOutcome.OVER or (waited is _WaitOutcome.WAS_OVER and not was_over)
            was_over = waited is _WaitOutcome.WAS_OVER  # once: where leases can't be read it always is
            held = look() if is_over else None
            if held is None and waited in (_WaitOutcome.OVER, _WaitOutcome.IN_VAIN):
                self._spend(shard, since, waited)
            if held is not None or not may_take or not is_over:
                return held

    def keep(self, shard: Shard) -> None:
        """Note that a fetched shard will be stored: its turn lasts until `stored`."""
        with self._lock:
            self._kept.add(shard.digest)

    def end(self, shard: Shard) -> None:
        """End the turn of a shard, unless it will be stored. Never raises."""
        with self._lock:
            is_kept = shard.digest in self._kept
        if not is_kept:
            self._release(shard)

    def fetching(self, shard: Shard, stream: Stream, start: int) -> Stream:
        """A stream from the origin, of which the lease tells how far it is.

        Args:
            start: where in the shard it begins.
        """
        return _Paced(stream, self._pace, lambda arrived: self._progress(shard, start + arrived, stream))

    def stored(self, shard: Shard) -> None:
        """End the turn of a shard that was stored, or won't be. Never raises."""
        with self._lock:
            self._kept.discard(shard.digest)
        self._release(shard)

    def close(self) -> None:
        """End all waits and release all leases, as far as the shared cache answers soon. Idempotent."""
        self._closing.set()
        self._leases.close(_GOODBYE_SECONDS)

    def _release(self, shard: Shard) -> None:
        for task in (shard.digest, second(shard.digest)):
            self._leases.release(task)

    def _progress(self, shard: Shard, arrived: int, stream: Stream) -> None:
        self._leases.progress(shard.digest, arrived, stream.version.size)

    def _asked(self, shard: Shard, ask: Callable[[], _Answer]) -> _Answer | None:
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

    def _wait(
        self,
        shard: Shard,
        deadline: float,
        stop: threading.Event,
        yield_slot: YieldSlot,
        look: Callable[[], object] | None,
    ) -> _WaitOutcome:
        """Wait while a live process holds the lease of a shard.

        One that may take the lease comes here as another process held it a moment ago: that one may have
        stored the shard since then.

        Args:
            yield_slot: entered meanwhile.
            look: looks it up in the shared cache; None: this process overtakes nobody.
        """
        start = self._clock()
        waited = _WaitOutcome.NONE if look is None else _WaitOutcome.WAS_OVER
        with contextlib.ExitStack() as stack:
            while True:
                answer = self._asked(shard, lambda: (self._leases.holder_at(shard.digest),))
                if answer is None:
                    return _WaitOutcome.NONE
                (holder,) = answer
                if holder is None:
                    return waited
                looked_at = self._clock()
                if look is not None and self._is_much_slower(holder):
                    if self._overtakes(shard, holder):
                        return _WaitOutcome.OVERTAKES
                    if look() is not None:
                        return _WaitOutcome.OVER
                if looked_at - start >= _SAID_AFTER_SECONDS:
                    self._say(shard, holder, looked_at)
                if looked_at >= deadline:
                    return _WaitOutcome.IN_VAIN
                if waited is not _WaitOutcome.OVER:
                    waited = _WaitOutcome.OVER
                    self._tier.counts.add("shared_waits")
                    stack.enter_context(yield_slot())
                pause = min(
                    max(_LEAST_PAUSE_SECONDS, _PAUSE_SHARE * (looked_at - start)), _MOST_PAUSE_SECONDS
                )
                self._pause(shard, min(deadline - looked_at, pause * self._rng.uniform(0.5, 1.0)), stop)

    def _is_much_slower(self, holder: Holder) -> bool:
        """True if a holder on another node will need several times as long as this process would."""
        machine, rate = holder.address.partition(".")[0], self._pace.rate()
        if not machine or not self._machine or machine == self._machine:
            return False
        if not holder.arrived:  # its size isn't known yet, either
            return holder.progress_seconds > _FASTEST_SECONDS
        left = (holder.size - holder.arrived) * holder.progress_seconds / holder.arrived
        if not holder.size or left <= _FASTEST_SECONDS:
            return False
        if rate is None:
            return holder.arrived < _SLOW_BYTES_PER_SECOND * holder.progress_seconds
        return left > _SLOWER * holder.size / rate

    def _overtakes(self, shard: Shard, holder: Holder) -> bool:
        """Take the second lease of a shard, if this process may fetch it as well."""
        cost = 0 if shard.digest in self._borders else 1
        with self._lock:
            if self._spare < cost:
                return False
            self._spare -= cost
        if not self._asked(shard, lambda: self._leases.take(second(shard.digest))):
            with self._lock:
                self._spare += cost
            return False
        self._tier.counts.add("shared_overtakes")
        logger.info("%s: %s, so that it is fetched here as well", shard.name, _progress_of(holder))
        return True

    def _say(self, shard: Shard, holder: Holder, clock_seconds: float) -> None:
        """Log which shard is waited for, whose fill that is, and for how long that has been going on."""
        with self._lock:
            if clock_seconds < self._silent_until:
                return
            self._silent_until = clock_seconds + _SAID_EVERY_SECONDS
        logger.warning("waiting for %s in the shared cache: %s", shard.name, _progress_of(holder))

    def _pause(self, shard: Shard, seconds: float, stop: threading.Event) -> None:
        start_ns = time.monotonic_ns()
        is_stopped = stop.wait(seconds) or self._closing.is_set()
        self._tier.counts.add("shared_wait_ns", time.monotonic_ns() - start_ns)
        if is_stopped:
            raise OriginStopped(f"{shard.name}: the wait for another node was stopped")

    def _budget(self, clock_seconds: float) -> float:
        """Seconds for which a shard may be waited for now."""
        with self._lock:
            left = self._wait_seconds - max(
                0.0, self._vain_seconds - (clock_seconds - self._vain_at) / _REFILL_TIMES
            )
        return left if left >= _LEAST_SHARE * self._wait_seconds else 0.0

    def _spend(self, shard: Shard, since: float, waited: _WaitOutcome) -> None:
        """Charge a wait in vain to the budget; seconds of concurrent waits count once."""
        clock_seconds = self._clock()
        with self._lock:
            gained = (clock_seconds - self._vain_at) / _REFILL_TIMES
            spent = clock_seconds - max(since, self._vain_at)
            self._vain_seconds, self._vain_at = max(0.0, self._vain_seconds - gained) + spent, clock_seconds
            is_new = waited is _WaitOutcome.IN_VAIN and clock_seconds >= self._warned_until
            if is_new:
                self._warned_until = clock_seconds + _REFILL_TIMES * self._wait_seconds
        if is_new:
            logger.warning(
                "%s: another node has been fetching it for %g s (STREAMLOAD_SHARED_WAIT) without storing it "
                "in the shared cache: it is fetched here as well, and in the next %g s at most a tenth of "
                "the time is spent on such waits",
                *(shard.name, self._wait_seconds, _REFILL_TIMES * self._wait_seconds),
            )


class FetchPace:
    """Speed at which this process gets bytes from origins: of one stream, on average. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._arrived = 0
        self._seconds = 0.0  # of the streams that have ended
        self._streams = 0
        self._began = 0.0  # the sum of when the open ones did

    def began(self) -> float:
        """A stream is open; returns when."""
        start = self._clock()
        with self._lock:
            self._streams += 1
            self._began += start
        return start

    def add(self, count: int) -> None:
        """Bytes have arrived."""
        with self._lock:
            self._arrived += count

    def ended(self, start: float) -> None:
        """A stream has ended that had begun then."""
        end = self._clock()
        with self._lock:
            self._streams -= 1
            self._began -= start
            self._seconds += end - start

    def rate(self) -> float | None:
        """Bytes a second; None: nothing has arrived yet."""
        clock_seconds = self._clock()
        with self._lock:
            seconds = self._seconds + self._streams * clock_seconds - self._began
            return self._arrived / seconds if self._arrived and seconds > 0 else None


class _Paced:
    """A stream from an origin, whose bytes are counted as they arrive."""

    def __init__(self, stream: Stream, pace: FetchPace, progress: Callable[[int], None]):
        self.version = stream.version
        self._stream, self._pace, self._progress = stream, pace, progress
        self._began: float | None = pace.began()

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in order, once."""
        arrived = 0
        for chunk in self._stream.chunks():
            arrived += len(chunk)
            self.version = self._stream.version  # the origin may say more of it as it goes on
            self._pace.add(len(chunk))
            self._progress(arrived)
            yield chunk
        self.version = self._stream.version

    def close(self) -> None:
        """Close the stream. Idempotent."""
        if self._began is not None:
            self._pace.ended(self._began)
            self._began = None
        self._stream.close()


def spare_of(shards: int, groups: int, here: Topology, workers: int) -> int:
    """Number of shards, beside those of borders, that a process may fetch although a slower node does.

    0 where each group is read by one node: its border shards are all that it shares. Otherwise all processes
    together fetch at most one n-th of the shards twice, on n nodes, or one shard each if that is more.

    Args:
        groups: of the run.
        here: the position of its rank.
        workers: processes of the rank that fill; 0: the rank itself.
    """
    if groups % here.nodes == 0:
        return 0
    return max(1, shards // here.nodes // (here.world_size * max(1, workers)))


def _progress_of(holder: Holder) -> str:
    """Describe what a holder does, and since when."""
    host = f"the node {holder.host}" if holder.host else "another node"
    size = f" of {format_bytes(holder.size)}" if holder.size else ""
    return (
        f"{host} has been fetching it for {holder.seconds:.0f} s, {format_bytes(holder.arrived)}{size} so far"
    )
