"""What runs a daemon's tasks: threads of this process (LocalExecutor), or a Ray cluster (ray_executor.py)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from streamload.cache.fill import Filled
from streamload.cache.shard import Shard
from streamload.cache.shard_cache import tombstone_cause
from streamload.cache.tier import Tier
from streamload.daemon.targets import Target
from streamload.errors import StreamloadError
from streamload.metrics import Counters
from streamload.prefetch.prefetcher import (
    STOPPED_SECONDS,
    FillResult,
    OpenOrigin,
    Prefetcher,
    PrefetchOptions,
)
from streamload.prefetch.scheduler import FillRequest

Completed = Callable[[Shard, int], None]
"""Called from any thread when a task is done: the shard, and its size in bytes."""
Failed = Callable[[Shard, str], float]
"""Called from any thread when a task has failed, with the reason; returns the seconds until it is retried."""
NextUseOf = Callable[[Shard], float]
"""Returns the next use of a task's shard, in shard visits."""

NO_ROOM_SECONDS = 30.0


class Executor(Protocol):
    """What runs the tasks of one daemon. Thread-safe; `close()` is idempotent."""

    def want(self, tasks: Sequence[Shard]) -> None:
        """Set the tasks to run, in order of need; replaces those set before."""
        ...

    def capacity(self, due: Sequence[Shard]) -> int:
        """How many tasks can run at once now, given the tasks that are due."""
        ...

    def has_begun(self, task: Shard) -> bool:
        """Whether a task is running, and better finished than left."""
        ...

    def check(self) -> None:
        """Raise what has gone wrong; called again and again.

        Raises:
            StreamloadError: no task can be run any more.
        """
        ...

    def close(self) -> None:
        """Stop running tasks where they are; partial fills stay, to be taken over."""
        ...


ExecutorFactory = Callable[[Completed, Failed, NextUseOf], Executor]
"""Makes the executor of a daemon, from the callbacks that report how tasks end."""


class LocalExecutor:
    """Threads of this process; see Executor. Shards go through the tier of this node.

    Args:
        completed, failed, next_use_of: see there.
        tier: of this node.
        target: where tasks are delivered.
        open_origin: gives the origin of a task; the event ends its waits.
        threads: tasks that run at once.
        preparing: tasks that prepare images and run at once, as each takes a CPU; None: as `threads`.
        no_room_seconds: after which a task that finds no room in the tier has failed.
        stopped_seconds: after how long without a heartbeat another filler of the tier is taken over from.
        counts: of what arrives.
    """

    def __init__(
        self,
        completed: Completed,
        failed: Failed,
        next_use_of: NextUseOf,
        *,
        tier: Tier,
        target: Target,
        open_origin: OpenOrigin,
        threads: int,
        preparing: int | None = None,
        no_room_seconds: float = NO_ROOM_SECONDS,
        stopped_seconds: float = STOPPED_SECONDS,
        counts: Counters,
    ):
        self._tell_completed, self._tell_failed = completed, failed
        self._next_use_of = next_use_of
        self._tier, self._target, self._threads = tier, target, threads
        self._preparing = threads if preparing is None else min(preparing, threads)
        self._no_room_seconds = no_room_seconds
        self._lock = threading.Lock()
        self._tasks: dict[str, Shard] = {}  # that are wanted, by digest; guarded by _lock
        self._prefetcher = Prefetcher(
            tier,
            open_origin,
            PrefetchOptions(threads, tombstones=False, stopped_seconds=stopped_seconds),
            counts=counts,
            sink=self._report,
        )

    def want(self, tasks: Sequence[Shard]) -> None:
        """See Executor."""
        with self._lock:
            self._tasks = {shard.digest: shard for shard in tasks}
        self._prefetcher.want([FillRequest(shard, self._next_use_of(shard)) for shard in tasks])

    def capacity(self, due: Sequence[Shard]) -> int:
        """See Executor."""
        return self._preparing if due and due[0].recipe else self._threads

    def has_begun(self, task: Shard) -> bool:
        """See Executor."""
        return self._prefetcher.filling(task)

    def check(self) -> None:
        """See Executor.

        Raises:
            CacheError: the tier of this node can't be used any more.
        """
        self._prefetcher.check()
        with self._lock:
            tasks = list(self._tasks.values())
        for shard in tasks:
            if self._prefetcher.refused_seconds(shard) > self._no_room_seconds:
                limit = self._tier.limit_bytes
                self._failed(shard, f"no room in {self._tier.root}, whose limit is {limit:,} bytes")

    def close(self) -> None:
        """See Executor."""
        self._prefetcher.close()

    def _report(self, result: FillResult) -> None:
        """Deliver a shard once it is published; called from a filling thread."""
        shard = result.shard
        with self._lock:
            is_wanted = shard.digest in self._tasks
        if not is_wanted:
            return
        if result.error is not None:
            self._failed(shard, str(result.error))
        elif result.outcome is Filled.GAVE_UP:
            why = "given up by another process of this node"
            with contextlib.suppress(OSError, StreamloadError):
                why = tombstone_cause(self._tier.tombstone(shard.digest))
            self._failed(shard, why)
        if result.outcome is not Filled.PUBLISHED:
            return
        directory = self._tier.published(shard.digest)
        try:
            self._target.deliver(shard, directory)
            size = (directory / "data").stat().st_size if shard.in_place is None else 0
        except (StreamloadError, OSError) as exc:
            self._failed(shard, str(exc))
            return
        self._ended(shard)
        self._tell_completed(shard, size)

    def _failed(self, shard: Shard, why: str) -> float:
        self._ended(shard)
        return self._tell_failed(shard, why)

    def _ended(self, shard: Shard) -> None:
        """Report a task once, until it is set again."""
        with self._lock:
            self._tasks.pop(shard.digest, None)
