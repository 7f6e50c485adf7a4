"""Executors of tasks: threads of this process (LocalExecutor), or a Ray cluster (ray_executor.py)."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streamload.cache.fill import Filled
from streamload.cache.freshness import Freshness
from streamload.cache.shard import Shard
from streamload.cache.shard_cache import tombstone_cause
from streamload.cache.tier import Tier
from streamload.daemon.targets import WarmTarget
from streamload.errors import StreamloadError
from streamload.metrics import Counters
from streamload.options import file_system
from streamload.prefetch.prefetcher import (
    STOPPED_SECONDS,
    FillResult,
    OpenOrigin,
    Prefetcher,
    PrefetchOptions,
)
from streamload.prefetch.scheduler import FillRequest

NO_ROOM_SECONDS = 30.0
_REFUSALS = 2
"""A task that was refused room so often, with nothing under way that could make some, will find none."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """End of a task.

    Attributes:
        shard: the task.
        size_bytes: of what was delivered.
        error: why it failed; "" if it was delivered.
        is_refused: whether it failed for want of room in the tier of this node.
    """

    shard: Shard
    size_bytes: int = 0
    error: str = ""
    is_refused: bool = False


class Results:
    """The results of an executor, from any thread to its daemon.

    A queue.SimpleQueue won't do: its `get(timeout)` may wait for ever after a signal (CPython 3.11).
    """

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._results: list[TaskResult] = []  # guarded by _change

    def put(self, result: TaskResult) -> None:
        """Add a result."""
        with self._change:
            self._results.append(result)
            self._change.notify_all()

    def drain(self, timeout_seconds: float) -> list[TaskResult]:
        """Take all results; waits until the timeout for the first."""
        with self._change:
            if not self._results:
                self._change.wait(timeout_seconds)
            results, self._results = self._results, []
            return results


class Executor(Protocol):
    """Executor of the tasks of one daemon. Thread-safe; `close()` is idempotent.

    Attributes:
        results: each task that was set ends in one, unless it is taken back before.
        counts: where arriving bytes are counted.
    """

    results: Results
    counts: Counters

    def want(self, tasks: Sequence[FillRequest]) -> None:
        """Set the tasks to run, in order of need; replaces those set before."""
        ...

    def capacity(self, due: Shard | None) -> int:
        """Number of tasks that can run at once now, given the next task that is due."""
        ...

    def has_begun(self, task: Shard) -> bool:
        """True if a task is running, and better finished than left."""
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


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options of a LocalExecutor.

    Attributes:
        threads: tasks that run at once.
        preparing: tasks that prepare images and run at once, as each takes a CPU; None: as `threads`.
        queued: tasks that are taken at once, for each thread.
        no_room_seconds: how long a task waits for room in the tier; None: as long as something is under way
            that may make some.
        tombstones, stopped_seconds: see PrefetchOptions.
    """

    threads: int
    preparing: int | None = None
    queued: int = 1
    no_room_seconds: float | None = NO_ROOM_SECONDS
    tombstones: bool = False
    stopped_seconds: float = STOPPED_SECONDS


class LocalExecutor:
    """Threads of this process; see Executor. Shards go through the tier of this node.

    Args:
        tier: of this node.
        target: where tasks are delivered.
        open_origin: opens the origin of a task.
        options: see there.
        counts: see Executor.
        freshness: the versions that shards have to have; None takes what is published as it is.
    """

    def __init__(
        self,
        tier: Tier,
        target: WarmTarget,
        open_origin: OpenOrigin,
        options: LocalOptions,
        *,
        counts: Counters,
        freshness: Freshness | None = None,
    ):
        self.results = Results()
        self.counts = counts
        self._tier, self._target, self._options = tier, target, options
        self._lock = threading.Lock()
        # Guarded by _lock, by digest:
        self._tasks: dict[str, FillRequest] = {}
        self._refusals: Counter[str] = Counter()
        self._prefetcher = Prefetcher(
            tier,
            open_origin,
            PrefetchOptions(
                options.threads,
                tombstones=options.tombstones,
                retry_seconds=0.0,  # a failed task isn't requested any more
                stopped_seconds=options.stopped_seconds,
            ),
            counts=counts,
            sink=self._settle,
            freshness=freshness,
        )

    def want(self, tasks: Sequence[FillRequest]) -> None:
        """Set the tasks to run, in order of need; replaces those set before."""
        with self._lock:
            self._tasks = {task.shard.digest: task for task in tasks}
            self._prefetcher.want(tasks)

    def capacity(self, due: Shard | None) -> int:
        """Number of tasks that can run at once now, given the next task that is due."""
        threads, preparing = self._options.threads, self._options.preparing
        if due is not None and due.recipe and preparing is not None:
            threads = min(preparing, threads)
        return threads * self._options.queued

    def has_begun(self, task: Shard) -> bool:
        """True if a task is running, and better finished than left."""
        return self._prefetcher.filling(task)

    def check(self) -> None:
        """Raise what has gone wrong; called again and again.

        Raises:
            CacheError: the tier of this node can't be used any more.
        """
        self._prefetcher.check()
        for shard in self._without_room():
            self._end(TaskResult(shard, error=_no_room(self._tier), is_refused=True))

    def close(self) -> None:
        """Stop running tasks where they are; partial fills stay, to be taken over."""
        self._prefetcher.close()

    def _without_room(self) -> list[Shard]:
        """The tasks that will find no room."""
        with self._lock:
            shards = [task.shard for task in self._tasks.values()]
            patience_seconds = self._options.no_room_seconds
            if patience_seconds is None:
                if self._prefetcher.holds_room() or self._target.is_busy():
                    self._refusals.clear()
                refused = [shard for shard in shards if self._refusals[shard.digest] >= _REFUSALS]
                if refused:
                    self._refusals.clear()  # their daemon may make room for the others
                return refused
        return [shard for shard in shards if self._prefetcher.refused_seconds(shard) > patience_seconds]

    def _settle(self, result: FillResult) -> None:
        """Deliver a shard once it is published; called from a filling thread."""
        shard = result.shard
        with self._lock:
            if shard.digest not in self._tasks:
                return
            if result.outcome is Filled.NO_ROOM:
                self._refusals[shard.digest] += 1
        if result.outcome is Filled.PUBLISHED:
            self._end(self._delivered(shard))
        elif result.outcome is Filled.GAVE_UP:
            self._end(TaskResult(shard, error=self._cause(result)))

    def _delivered(self, shard: Shard) -> TaskResult:
        directory = self._tier.published(shard.digest)
        try:
            self._target.deliver(shard, directory)
            size_bytes = (directory / "data").stat().st_size if shard.in_place is None else 0
        except (StreamloadError, OSError) as exc:
            return TaskResult(shard, error=str(exc))
        with self._lock:
            self._refusals.clear()  # it may make way for others
        return TaskResult(shard, size_bytes)

    def _cause(self, result: FillResult) -> str:
        """Why a shard was given up."""
        if result.error is not None:
            return str(result.error)
        with contextlib.suppress(OSError, StreamloadError):
            return tombstone_cause(self._tier.tombstone(result.shard.digest))
        return "given up by another process of this node"

    def _end(self, result: TaskResult) -> None:
        """Report a task once, until it is set again."""
        with self._lock:
            if self._tasks.pop(result.shard.digest, None) is None:
                return
            self._refusals.pop(result.shard.digest, None)
            self._prefetcher.want(list(self._tasks.values()))
        self.results.put(result)


def _no_room(tier: Tier) -> str:
    option = "memory_size" if file_system(tier.root).is_memory else "cache_size"
    return f"no room: the cache can't take more than {tier.budget.bound}; raise {option}"
