"""Fill the shards that a run needs, in order of need, by some threads of a process (step F).

Every worker of a node runs one of these with the same list: whoever claims a shard first fills it, the others
pass on to the next. There is no queue: what is wanted is compared with what is there again and again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from streamload.cache.fill import Filled, fill
from streamload.cache.follow import Shard
from streamload.cache.locks import FileLock
from streamload.cache.tier import Tier
from streamload.metrics import Counts
from streamload.origins.origin import Origin

logger = logging.getLogger("streamload")

_HELD_SECONDS = 1.0  # how long a shard that is here is taken to stay
_ELSEWHERE_SECONDS = 0.1  # until a shard that another process fills is looked at again
_NO_ROOM_SECONDS = 0.2

OpenOrigin = Callable[[Shard, threading.Event], Origin]


class Ahead:
    """Threads that fill what is wanted.

    Args:
        tier: where to.
        open_origin: gives the origin of a shard; the event ends its waits.
        threads: how many shards this process fills at once.
        counts: where fills are counted.
        report: told, from a filling thread, how each look at a shard ended; PUBLISHED if it was there.
    """

    def __init__(
        self,
        tier: Tier,
        open_origin: OpenOrigin,
        *,
        threads: int,
        counts: Counts,
        report: Callable[[Shard, Filled], None] = lambda shard, result: None,
    ):
        self.tier = tier
        self._open_origin = open_origin
        self._counts = counts
        self._report = report
        self._stop = threading.Event()
        self._change = threading.Condition()
        # Guarded by _change:
        self._wanted: tuple[Shard, ...] = ()
        self._needed = 0  # how many of them, from the first, a reader waits for
        self._busy: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._refused_since: dict[str, float] = {}
        self._sizes: dict[str, int] = {}  # of shards that were refused: their origin needn't be asked again
        self._error: BaseException | None = None
        self._verdicts: list[FileLock] = []
        self._threads = [
            threading.Thread(target=self._work, name=f"streamload-fill-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        with self._change:
            return f"<Ahead wanted={len(self._wanted)} needed={self._needed} busy={sorted(self._busy)}>"

    def want(self, needed: Sequence[Shard], later: Sequence[Shard] = ()) -> None:
        """Say what is to be filled, in order of need; it replaces what was said before.

        Args:
            needed: shards that readers have open: anything that isn't open may go for them.
            later: shards to fill while there is room that is needed less.
        """
        wanted = (*needed, *later)
        with self._change:
            if wanted != self._wanted or len(needed) != self._needed:
                self._wanted, self._needed = wanted, len(needed)
                self._change.notify_all()

    def check(self) -> None:
        """Raise what a filling thread could not deal with: a cache that can't be used.

        Raises:
            CacheError: the tier can't be written, or a shard is larger than its limit.
        """
        if self._error is not None:
            raise self._error

    def refused_seconds(self, shard: Shard) -> float:
        """How long this process has been refused the room for a shard (0: it hasn't)."""
        with self._change:
            since = self._refused_since.get(shard.digest)
        return 0.0 if since is None else time.monotonic() - since

    def filling(self, shard: Shard) -> bool:
        """Whether a thread of this process is filling it."""
        with self._change:
            return shard.digest in self._busy

    def close(self) -> None:
        """Stop all fills where they are; what they have filled stays for whoever takes it up."""
        self._stop.set()
        with self._change:
            self._change.notify_all()
        for thread in self._threads:
            thread.join()
        for verdict in self._verdicts:
            verdict.close()
        self._verdicts.clear()

    def _work(self) -> None:
        while not self._stop.is_set():
            job = self._take()
            if job is None:
                continue
            try:
                pause = self._fill(job)
            except BaseException as exc:
                pause = _NO_ROOM_SECONDS
                self._error = exc
                self._stop.set()
            with self._change:
                self._busy.discard(job.digest)
                self._not_before[job.digest] = time.monotonic() + pause
                self._change.notify_all()

    def _take(self) -> Shard | None:
        """The next shard that nobody here fills; waits a little when there is none."""
        with self._change:
            now = time.monotonic()
            for place, shard in enumerate(self._wanted):
                if shard.digest in self._busy:
                    continue
                if self._not_before.get(shard.digest, 0.0) <= now:
                    self._busy.add(shard.digest)
                    return shard
                if place >= self._needed and shard.digest in self._refused_since:
                    break  # what is needed later still won't find room either
            self._change.wait(timeout=0.05)
            return None

    def _wait_of(self, shard: Shard) -> float:
        """How soon a shard is needed, in shard visits; those that readers have open are needed alike."""
        with self._change:
            try:
                return float(max(self._wanted.index(shard), self._needed - 1))
            except ValueError:
                return float("inf")

    def _fill(self, shard: Shard) -> float:
        """Fill a shard if it has to be done and can be; returns the seconds until it is looked at again."""
        if self.tier.published(shard.digest).exists():
            self._report(shard, Filled.PUBLISHED)
            return _HELD_SECONDS
        part = self.tier.claim(shard.digest)
        if part is None:
            with self._change:
                self._refused_since.pop(shard.digest, None)
            if self.tier.verdict(shard.digest).exists():
                self._report(shard, Filled.GAVE_UP)
            return _ELSEWHERE_SECONDS
        outcome = fill(
            part,
            shard,
            lambda: self._open_origin(shard, self._stop),
            size_bytes=self._sizes.get(shard.digest, 0),
            wait=lambda: self._wait_of(shard),
            stop=self._stop,
        )
        if outcome.verdict is not None:
            self._verdicts.append(outcome.verdict)
        refused = outcome.result is Filled.NO_ROOM
        with self._change:
            if refused:
                self._refused_since.setdefault(shard.digest, time.monotonic())
                self._sizes[shard.digest] = outcome.size_bytes
            else:
                self._refused_since.pop(shard.digest, None)
        if outcome.result is Filled.PUBLISHED:
            self._counts.add("shards_published")
        self._report(shard, outcome.result)
        return _NO_ROOM_SECONDS if refused else _HELD_SECONDS
