"""Which shard a filling thread takes next: the most needed of those that are due (step F).

There is no queue: the requested shards are compared with what the tier holds, again and again. This module
decides and keeps the threads; what they do with a shard is the prefetcher's.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from streamload import limits
from streamload.cache.shard import Shard
from streamload.errors import LimitReached

logger = logging.getLogger("streamload")

_IDLE_SECONDS = 0.25  # the longest that no thread looks at all
HELD_SECONDS, _MOST_HELD_SECONDS = 1.0, 30.0
"""Between two looks at a shard that is there; the shorter where a reader waits for it."""
_LOOKS_PER_SECOND = 100
"""About the most looks at such shards, so that many requests cost no more than a hundred."""
_MOST_YIELDING = 32
"""The most threads that yield their slot while they wait for another node; any more keep it."""


@dataclass(frozen=True, slots=True)
class FillRequest:
    """A shard that a prefetcher is to fill.

    Attributes:
        shard: the shard.
        next_use: shard visits until it is used, as announced; only shards used later are evicted for it.
        is_needed: whether a reader has it open. Then it is stored in another mode if the tier can't take it.
    """

    shard: Shard
    next_use: float
    is_needed: bool = False


class FillScheduler:
    """The requests of a prefetcher and the threads that take them.

    Args:
        threads: how many work at once, not counting those that have yielded their slot.
        work: what each thread does: `take` and `settle` as long as `keeps_thread`.
        stop: once it is set, no thread takes another shard.
    """

    def __init__(self, threads: int, work: Callable[[], None], stop: threading.Event):
        self._at_once = threads
        self._work = work
        self._stop = stop
        self._change = threading.Condition()
        # Guarded by _change; shards by their digests:
        self._requests: dict[str, FillRequest] = {}  # the most urgent first
        self._busy: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._refused: set[str] = set()  # there was no room for them at the last look
        self._order: list[FillRequest] = []  # the requests
        self._places: dict[str, int] = {}  # in the order
        # Heaps of places; an entry is dropped if its shard was taken or put off since.
        self._free: list[int] = []
        self._held: list[tuple[float, int]] = []  # each with the time when it is due
        self._yielding = 0  # threads that have yielded their slot
        self._is_watched = False  # whether an idle thread watches the clock
        self._threads = [self._thread(i) for i in range(threads)]

    def __repr__(self) -> str:
        with self._change:
            needed = sum(request.is_needed for request in self._requests.values())
            return (
                f"<FillScheduler {len(self._requests)} requests, {needed} needed, "
                f"{len(self._not_before)} looked at, busy={sorted(self._busy)}>"
            )

    def start(self) -> None:
        """Start the threads, or as many as the system allows; call it once.

        Raises:
            LimitReached: it allows none.
        """
        for place, thread in enumerate(list(self._threads)):
            try:
                limits.start(thread)
            except LimitReached as exc:
                if not place:
                    raise
                logger.warning("only %d of %d shards are fetched at once: %s", place, len(self._threads), exc)
                with self._change:
                    del self._threads[place:]
                return

    def want(self, requests: Sequence[FillRequest]) -> None:
        """Set the requests, the most urgent first; replaces those set before."""
        by_digest: dict[str, FillRequest] = {}
        for request in requests:  # of several for one shard the most urgent counts
            by_digest.setdefault(request.shard.digest, request)
        with self._change:
            if list(by_digest.values()) != list(self._requests.values()):
                self._requests, self._order = by_digest, list(by_digest.values())
                self._places = {digest: place for place, digest in enumerate(by_digest)}
                self._refused &= by_digest.keys()
                self._not_before = {
                    digest: self._not_before[digest] for digest in self._not_before.keys() & by_digest.keys()
                }
                self._sort()
                self._change.notify()  # a thread that takes a shard wakes another for the next one

    def look_again(self, shard: Shard | None = None) -> None:
        """Make a shard, or all of them, due now: what the last look found is outdated."""
        with self._change:
            if shard is None:
                self._not_before.clear()
            else:
                self._not_before.pop(shard.digest, None)
            self._sort()
            self._change.notify_all()

    def look_soon(self, shards: Iterable[Shard]) -> None:
        """Look at shards within HELD_SECONDS: a reader waits for them."""
        with self._change:
            latest = time.monotonic() + HELD_SECONDS
            for shard in shards:
                if self._not_before.get(shard.digest, 0.0) > latest:
                    self._hold(shard.digest, latest)

    def held_seconds(self) -> float:
        """Time until the next look at a shard that is there."""
        with self._change:
            seconds = min(_MOST_HELD_SECONDS, len(self._order) / _LOOKS_PER_SECOND)
            return max(HELD_SECONDS, seconds)

    def is_busy_with(self, shard: Shard) -> bool:
        """True if a thread has taken it."""
        with self._change:
            return shard.digest in self._busy

    def is_needed(self, shard: Shard) -> bool:
        """True if a reader waits for it."""
        with self._change:
            request = self._requests.get(shard.digest)
            return request is not None and request.is_needed

    def next_use(self, shard: Shard) -> float:
        """Its next use by the latest request; never, if it isn't requested any more."""
        with self._change:
            request = self._requests.get(shard.digest)
            return math.inf if request is None else request.next_use

    def keeps_thread(self) -> bool:
        """True if the calling thread goes on; False after `close`, or when it replaced one that is back."""
        if self._stop.is_set():
            return False
        with self._change:
            if len(self._threads) <= self._at_once + self._yielding:
                return True
            self._threads.remove(threading.current_thread())
            self._change.notify()  # another, in its stead
            return False

    def take(self) -> Shard | None:
        """The next shard that no thread here has; None after a while without one.

        One idle thread watches the clock, the others sleep until they are notified: each wake-up takes the
        processor from decoding. A thread that takes a shard wakes one other if there is more to take, or if
        no thread watches any more.
        """
        with self._change:
            now_seconds = time.monotonic()
            shard, has_more, until = self._due(now_seconds)
            if shard is not None:
                self._busy.add(shard.digest)
                if has_more or not self._is_watched:
                    self._change.notify()
                return shard
            if self._stop.is_set():  # it is set before the last notification
                return None
            if self._is_watched:
                self._change.wait()
                return None
            self._is_watched = True
            try:
                self._change.wait(timeout=until - now_seconds)
            finally:
                self._is_watched = False
            return None

    def settle(self, shard: Shard, pause_seconds: float, *, is_refused: bool) -> None:
        """Give a taken shard back.

        Args:
            pause_seconds: until it is due again.
            is_refused: whether there was no room for it.
        """
        with self._change:
            self._busy.discard(shard.digest)
            self._hold(shard.digest, time.monotonic() + pause_seconds)
            if is_refused:
                self._refused.add(shard.digest)
            else:
                self._refused.discard(shard.digest)
            if pause_seconds < _IDLE_SECONDS:  # else the watching thread looks again before it is due
                self._change.notify_all()

    @contextlib.contextmanager
    def yield_slot(self) -> Iterator[None]:
        """Let another thread work while the calling one waits for another node; starts one if necessary."""
        with self._change:
            counts = self._yielding < _MOST_YIELDING
            self._yielding += counts
            if counts and len(self._threads) < self._at_once + self._yielding and not self._stop.is_set():
                self._threads.append(self._thread(len(self._threads)))
                try:
                    limits.start(self._threads[-1])
                except LimitReached:  # one works less for a while
                    del self._threads[-1]
            self._change.notify_all()
        try:
            yield
        finally:
            with self._change:
                self._yielding -= counts
                self._change.notify_all()

    def close(self) -> None:
        """Stop the threads and join them. Idempotent."""
        self._stop.set()
        with self._change:
            self._change.notify_all()
            threads = list(self._threads)  # once the event is set no more are started
        for thread in threads:
            thread.join()

    def _due(self, now_seconds: float) -> tuple[Shard | None, bool, float]:
        """The first free shard that is due; whether there is another; else when to look again."""
        latest = now_seconds + _IDLE_SECONDS
        if len(self._busy) - self._yielding >= self._at_once:
            return None, False, latest
        while self._held and self._held[0][0] <= now_seconds:
            heapq.heappush(self._free, heapq.heappop(self._held)[1])
        stop = self._stop_place(now_seconds)
        place = self._first_free(now_seconds, stop)
        if place is None:
            return None, False, min(latest, self._held[0][0]) if self._held else latest
        heapq.heappop(self._free)
        return self._order[place].shard, self._first_free(now_seconds, stop) is not None, latest

    def _first_free(self, now_seconds: float, stop: int) -> int | None:
        """The first place before `stop` whose shard is free and due."""
        while self._free and self._free[0] < stop:
            digest = self._order[self._free[0]].shard.digest
            if digest not in self._busy and self._not_before.get(digest, 0.0) <= now_seconds:
                return self._free[0]
            heapq.heappop(self._free)
        return None

    def _stop_place(self, now_seconds: float) -> int:
        """The first place of a shard that lacked room lately: later ones won't find room either."""
        if not self._refused:
            return len(self._order)
        refused = (self._refused & self._places.keys()) - self._busy
        places = (
            self._places[digest]
            for digest in refused
            if self._not_before.get(digest, 0.0) > now_seconds and not self._requests[digest].is_needed
        )
        return min(places, default=len(self._order))

    def _hold(self, digest: str, due: float) -> None:
        """Put a shard off until it is due."""
        self._not_before[digest] = due
        if digest in self._places:
            heapq.heappush(self._held, (due, self._places[digest]))

    def _sort(self) -> None:
        """Sort the places of requests that no thread has by what is known of them."""
        self._free, self._held = [], []
        for digest, place in self._places.items():
            if digest in self._not_before:
                self._held.append((self._not_before[digest], place))
            elif digest not in self._busy:
                self._free.append(place)  # in ascending order, which is a heap
        heapq.heapify(self._held)

    def _thread(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._work, name=f"streamload-fill-{number}", daemon=True)
