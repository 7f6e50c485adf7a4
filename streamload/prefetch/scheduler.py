"""Threads that take the shards to fill, the most needed first (step F).

There is no queue: the list of shards is compared with what the tier holds, again and again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from streamload.cache.shard import Shard

_IDLE_SECONDS = 0.25  # the longest that nobody looks at all
_MOST_YIELDING = 32
"""The most threads that yield their slot while they wait for another node; any more keep it."""


class FillScheduler:
    """Threads that look at the listed shards, at each again when it is due.

    Args:
        threads: how many look at once, not counting those that have yielded their slot.
        look: looks at a shard, in one of the threads, and says in how many seconds it is due again.
        enforce_limits: called in a thread before it takes a shard, and whenever it has slept.
        is_refused: whether there was no room for a shard.
        stop: once it is set, no thread takes another shard.
    """

    def __init__(
        self,
        threads: int,
        look: Callable[[Shard], float],
        *,
        enforce_limits: Callable[[], object],
        is_refused: Callable[[Shard], bool],
        stop: threading.Event,
    ):
        self._at_once = threads
        self._look = look
        self._enforce_limits = enforce_limits
        self._is_refused = is_refused
        self._stop = stop
        self._change = threading.Condition()
        # Guarded by _change:
        self._wanted: tuple[Shard, ...] = ()
        self._needed = 0  # how many of them, from the first, a reader waits for
        self._busy: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._yielding = 0  # of those that are busy, how many have yielded their slot
        self._is_watched = False  # whether an idle thread watches the clock
        self._threads = [self._thread(i) for i in range(threads)]

    def __repr__(self) -> str:
        with self._change:
            return f"<Scheduler {len(self._wanted)} wanted, {self._needed} needed, busy={sorted(self._busy)}>"

    def start(self) -> None:
        """Begin to look; once."""
        for thread in list(self._threads):
            thread.start()

    def want(self, needed: Sequence[Shard], later: Sequence[Shard] = ()) -> None:
        """Say what is to be looked at, in order of need; it replaces what was said before."""
        wanted = (*needed, *later)
        with self._change:
            if wanted != self._wanted or len(needed) != self._needed:
                self._wanted, self._needed = wanted, len(needed)
                self._change.notify()  # who takes one of them calls another for the next

    def look_again(self, shard: Shard | None = None) -> None:
        """Look at a shard, or at all, anew, now: what was settled doesn't hold any more."""
        with self._change:
            if shard is None:
                self._not_before.clear()
            else:
                self._not_before.pop(shard.digest, None)
            self._change.notify_all()

    def is_busy_with(self, shard: Shard) -> bool:
        """Whether a thread is looking at it."""
        with self._change:
            return shard.digest in self._busy

    def is_needed(self, shard: Shard) -> bool:
        """Whether a reader waits for it."""
        with self._change:
            return shard in self._wanted[: self._needed]

    def place_of(self, shard: Shard) -> float:
        """How soon a shard is needed, in shard visits; those that readers have open are needed alike."""
        with self._change:
            try:
                return float(max(self._wanted.index(shard), self._needed - 1))
            except ValueError:
                return float("inf")

    @contextlib.contextmanager
    def yield_slot(self) -> Iterator[None]:
        """The thread that looks waits for another node: others take its place, if need be one more."""
        with self._change:
            counts = self._yielding < _MOST_YIELDING
            self._yielding += counts
            if counts and len(self._threads) < self._at_once + self._yielding and not self._stop.is_set():
                self._threads.append(self._thread(len(self._threads)))
                self._threads[-1].start()
            self._change.notify_all()
        try:
            yield
        finally:
            with self._change:
                self._yielding -= counts
                self._change.notify_all()

    def close(self) -> None:
        """Stop, and wait until no thread looks any more."""
        self._stop.set()
        with self._change:
            self._change.notify_all()
            threads = list(self._threads)  # with the event set there won't be more
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while not self._stop.is_set() and not self._is_surplus():
            self._enforce_limits()
            shard = self._take()
            if shard is None:
                continue
            pause = self._look(shard)
            with self._change:
                self._busy.discard(shard.digest)
                self._not_before[shard.digest] = time.monotonic() + pause
                if pause < _IDLE_SECONDS:  # else whoever watches the clock looks again before it is due
                    self._change.notify_all()

    def _take(self) -> Shard | None:
        """The next shard that nobody here looks at; None after a while in which there was none.

        One of the idle threads watches the clock, the others sleep until they are called: each time that one
        wakes up takes the processor from those who decode. Who takes a shard calls one other, where there is
        more to take or nobody watches any more.
        """
        with self._change:
            now = time.monotonic()
            taken, is_more, until = self._due(now)
            if taken is not None:
                self._busy.add(taken.digest)
                if is_more or not self._is_watched:
                    self._change.notify()
                return taken
            if self._stop.is_set():  # set before all are called for the last time
                return None
            if self._is_watched:
                self._change.wait()
                return None
            self._is_watched = True
            try:
                self._change.wait(timeout=until - now)
            finally:
                self._is_watched = False
            return None

    def _due(self, now: float) -> tuple[Shard | None, bool, float]:
        """The first free shard that is due; whether there is another; when to look again if there is none."""
        taken, until = None, now + _IDLE_SECONDS
        if len(self._busy) - self._yielding >= self._at_once:
            return None, False, until
        for place, shard in enumerate(self._wanted):
            if shard.digest in self._busy:
                continue
            due = self._not_before.get(shard.digest, 0.0)
            if due <= now:
                if taken is not None:
                    return taken, True, until
                taken = shard
            elif place >= self._needed and self._is_refused(shard):
                break  # what is needed later still won't find room either
            else:
                until = min(until, due)
        return taken, False, until

    def _is_surplus(self) -> bool:
        """Whether the thread that asks stood in for one that has gone on; then it is over."""
        with self._change:
            if len(self._threads) <= self._at_once + self._yielding:
                return False
            self._threads.remove(threading.current_thread())
            self._change.notify()  # another, in its stead
            return True

    def _thread(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._work, name=f"streamload-fill-{number}", daemon=True)
