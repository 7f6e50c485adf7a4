"""Write-back: store in the shared cache what came from origins, beside a training and without delaying it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from streamload import limits
from streamload.cache.shard import Shard, by_name
from streamload.cache.shared.breaker import CircuitBreaker
from streamload.cache.shared.tier import SharedTier

logger = logging.getLogger("streamload")

_WAITING = 1000
_WAITING_BESIDE = 32
"""How many of these may be objects beside shards, whose contents wait in memory."""
_KEPT = 1000
"""The most failures that are remembered."""
_DOUBLINGS = 6
"""After repeated failures (no permission, no space) it pauses: for a minute at first, up to an hour."""


class _Beside(NamedTuple):
    """An object to be stored beside a shard's index."""

    name: str
    pack: Callable[[], bytes]


class WriteBack:
    """Threads that store published shards, one at a time each.

    A shard that is evicted before its turn isn't stored, nor one that is offered while a thousand wait: that
    is counted, and the node that fetches it next may store it.

    Args:
        threads: how many shards are stored at once.
        ended: called, from any thread, with each shard that was accepted and is stored, or won't be.
    """

    def __init__(
        self,
        tier: SharedTier,
        threads: int = 1,
        ended: Callable[[Shard], None] = lambda shard: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tier = tier
        self._ended = ended
        self._breaker = CircuitBreaker(doublings=_DOUBLINGS, clock=clock)
        self._change = threading.Condition()
        # Guarded by _change:
        self._waiting: deque[tuple[Shard, Path | _Beside]] = deque()
        self._busy = 0
        self._is_closed = False
        self._failures: dict[str, tuple[str, str]] = {}  # by digest: name, and why
        self._threads = [
            threading.Thread(target=self._work, name="streamload-write-back", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            limits.start(thread)

    def __repr__(self) -> str:
        with self._change:
            return f"<WriteBack waiting={len(self._waiting)} busy={self._busy}>"

    @property
    def failures(self) -> Mapping[str, str]:
        """Why shards weren't stored, by their names; the first thousand."""
        with self._change:
            return by_name(self._failures.values())

    @property
    def takes(self) -> bool:
        """True if shards are accepted now."""
        with self._change:
            return self._takes()

    def offer(self, shard: Shard, directory: Path) -> None:
        """Queue a published shard if the shared cache lacked it."""
        if self._tier.is_lacking(shard):
            self.add(shard, directory)
        else:
            self._ended(shard)

    def add(self, shard: Shard, directory: Path) -> None:
        """Queue a shard of a tier; it is stored if it is missing."""
        with self._change:
            is_taken = self._takes() and len(self._waiting) < _WAITING
            if is_taken:
                self._waiting.append((shard, directory))
                self._change.notify_all()
            else:
                self._note(shard, "the queue is full, or writing was paused after failures")
        if not is_taken:
            self._ended(shard)

    def add_beside(self, shard: Shard, name: str, pack: Callable[[], bytes]) -> None:
        """Queue an object beside a shard's index, before all shards: it is small.

        Args:
            pack: returns its content; called in a thread. Nothing is stored if that is empty.
        """
        with self._change:
            waiting = sum(isinstance(content, _Beside) for _, content in self._waiting)
            if self._takes() and waiting < _WAITING_BESIDE:
                self._waiting.appendleft((shard, _Beside(name, pack)))
                self._change.notify_all()
            else:
                self._remember(shard, "its facts: the queue is full, or writing was paused after failures")

    def has_room(self) -> bool:
        """True if another would be accepted."""
        with self._change:
            return len(self._waiting) < _WAITING

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until everything queued is stored or has failed; False after a timeout."""
        with self._change:
            return self._change.wait_for(lambda: not self._waiting and not self._busy, seconds)

    def close(self) -> None:
        """Drop the queue, interrupt what is being stored, and close the tier. Idempotent."""
        self._tier.close()
        with self._change:
            self._is_closed = True
            self._drop("the run ended before its turn")
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                shard, content = self._waiting.popleft()
                self._busy += 1
            trouble = self._store(shard, content)
            ended = [shard] if isinstance(content, Path) else []
            with self._change:
                if trouble is None:
                    self._breaker.succeed()
                else:
                    note = self._note if isinstance(content, Path) else self._remember
                    note(shard, str(trouble))
                    ended += self._rest(self._breaker.fail())
            for ended_shard in ended:
                self._ended(ended_shard)
            with self._change:
                self._busy -= 1
                self._change.notify_all()

    def _store(self, shard: Shard, entry: Path | _Beside) -> Exception | None:
        """Store a shard, or what is beside it; returns an error that may affect others, too."""
        try:
            if isinstance(entry, Path):
                self._tier.store(shard, entry)
            elif content := entry.pack():
                self._tier.store_beside(shard, entry.name, content)
        except FileNotFoundError:
            with self._change:
                self._note(shard, "it was evicted before its turn")
        except OSError as exc:  # of the shared cache or the tier: CacheCorrupt, SharedTierError
            if not self._is_closed:
                self._tier.report(shard, exc)
            return exc
        return None

    def _takes(self) -> bool:
        return not self._is_closed and not self._breaker.is_open

    def _rest(self, seconds: float) -> list[Shard]:
        """Drop the queue when the breaker opens; returns what was in it."""
        if not seconds:
            return []
        logger.warning(
            "nothing is stored in the shared cache for the next %d s: %d shards in a row failed",
            *(seconds, self._breaker.in_a_row),
        )
        return self._drop("writing was paused after failures")

    def _drop(self, why: str) -> list[Shard]:
        """Drop the queue; returns the shards in it."""
        left = [shard for shard, content in self._waiting if isinstance(content, Path)]
        for shard in left:
            self._note(shard, why)
        self._waiting.clear()
        return left

    def _note(self, shard: Shard, why: str) -> None:
        """A shard wasn't stored."""
        self._remember(shard, why)
        self._tier.counts.add("shared_not_stored", 1)

    def _remember(self, shard: Shard, why: str) -> None:
        if len(self._failures) < _KEPT:
            self._failures[shard.digest] = shard.name, why
