"""The daemon: a reconciliation loop that compares demand with what the target holds, and fetches the rest.

There is no queue and no state to lose: each look computes the tasks, one shard each, from scratch. An
executor runs them (executor.py): threads of this process, or a Ray cluster. Several daemons share the work
by leases. Tasks are idempotent: a second or late delivery is harmless.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from streamload.cache.demand import DemandFile
from streamload.cache.shard import Shard
from streamload.cache.shared.leases import Leases
from streamload.daemon.demand import GUESSED_BYTES, Demand
from streamload.daemon.executor import NO_ROOM_SECONDS, Executor, ExecutorFactory
from streamload.daemon.failures import Failures
from streamload.daemon.preemption import Notice
from streamload.daemon.status import Status
from streamload.daemon.targets import Target
from streamload.errors import SharedTierDenied, SharedTierError
from streamload.metrics import Counters
from streamload.origins.origin import OriginOptions
from streamload.prefetch.prefetcher import STOPPED_SECONDS

logger = logging.getLogger("streamload")

_TICK_SECONDS = 0.05
_MOST_MARGIN_SECONDS = 5.0
_MARGIN_SHARE = 0.2
"""So much of a notice is kept for the end: to hand back what isn't done, and to go."""
_SIZES_KEPT = 100_000
_TIDIED = 16
"""Leases of others that are looked at in one round, on which this daemon has nothing to do."""
_CROWD = 4
"""Among so many tasks for each hand a daemon chooses by chance where others work on the same list."""


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """How a daemon works.

    Attributes:
        concurrency: tasks that are worked on at once.
        bytes_per_second: the most that is taken from origins; None: there is no cap.
        once: end when all that is wanted is held, or can't be had.
        look_seconds: between two looks at what is wanted, at most.
        retry_seconds: after which a task that failed is tried again; each further time after twice as long.
        no_room_seconds: after which a task that finds no room in the tier of this node has failed.
        stopped_seconds: how long a filler of the same tier may show no life before it is taken over from.
        trouble_seconds: for which it waits with `once` while what is wanted, or who works on what, can't be
            known; without, it waits for as long as it takes.
        origin: how patient transfers are.
    """

    concurrency: int = 8
    bytes_per_second: float | None = None
    once: bool = False
    look_seconds: float = 5.0
    retry_seconds: float = 15.0
    no_room_seconds: float = NO_ROOM_SECONDS
    stopped_seconds: float = STOPPED_SECONDS
    trouble_seconds: float = 60.0
    origin: OriginOptions = field(default_factory=OriginOptions)


class Daemon:
    """Keeps the demanded shards at the target, in the thread that calls `run`.

    Args:
        demand: the shards to hold.
        target: where to hold them.
        make_executor: makes the executor that runs the tasks.
        leases: among the daemons with the same target; None where the executor shares the work out itself.
        options: see there.
        demand_file: where `run` announces what it will fill, so that none of it is evicted for a later shard.
        counts: where arriving bytes are counted.
        rng: chooses among tasks that several daemons could start.
        clock: monotonic.
    """

    def __init__(
        self,
        demand: Demand,
        target: Target,
        make_executor: ExecutorFactory,
        *,
        leases: Leases | None = None,
        options: DaemonOptions | None = None,
        demand_file: DemandFile | None = None,
        counts: Counters | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._demand, self._target, self._make_executor, self._leases = demand, target, make_executor, leases
        self._options = options or DaemonOptions()
        self._demand_file = demand_file
        self._rng = rng or random.Random()
        self._clock = clock
        self._counts = Counters() if counts is None else counts
        self._notice = Notice()
        self._change = threading.Condition()
        self._look_at = clock()
        self._has_looked = self._has_leased = False
        self._trouble_since: float | None = None
        # Guarded by _change:
        self._missing: dict[str, Shard] = {}  # by digest, in order of need
        self._mine: dict[str, Shard] = {}  # those that are worked on here
        self._fresh: set[str] = set()  # brought since the look that is under way, or was last, began
        self._places: dict[str, int] = {}  # of all that is wanted
        self._failures = Failures(self._options.retry_seconds, clock)
        self._sizes: dict[str, int] = {}
        self._sizes_bytes = 0
        self._looked_at = clock()
        self._status = Status(trouble="not looked yet")
        self._done = 0
        self._has_news = False

    def run(self, notice: Notice) -> Status:
        """Work until a notice, or with `once` until all is held or has failed.

        Returns:
            How far it came.

        Raises:
            SharedTierDenied: the shared cache refuses to be read, or written, from the beginning.
            StreamloadError: those who bring tasks can't go on.
        """
        self._notice = notice
        with contextlib.closing(
            self._make_executor(self._completed, self._failed, self._next_use_of)
        ) as executor:
            while not notice.is_given:
                if self._clock() >= self._look_at:
                    self._look(executor)
                self._assign(executor)
                if not self._status.trouble:
                    self._trouble_since = None
                executor.check()
                if self._options.once and (self._is_through() or self._has_waited_long()):
                    break
                self._wait(executor, notice)
            self._wind_down(executor, notice)
        return self.status()

    def status(self) -> Status:
        """How far it is; at any time, from any thread."""
        with self._change:
            left = self._notice.seconds_left()
            return replace(
                self._status,
                held=self._status.wanted - len(self._missing),
                working=tuple(sorted(shard.name for shard in self._mine.values())),
                failed=self._failures.reasons(),
                done=self._done,
                bytes_arrived=self._counts.snapshot().origin_bytes,
                taken_over=0 if self._leases is None else self._leases.taken_over,
                notice=f"{self._notice.by}, {left:.0f} s" if self._notice.is_given else "",
                seconds_since_look=self._clock() - self._looked_at,
            )

    def _look(self, executor: Executor) -> None:
        """See what is wanted, and what of it is held."""
        self._look_at = self._clock() + self._options.look_seconds
        with self._change:
            self._fresh = set()
        try:
            wanted = self._demand.look(self._size_of)
            missing = self._target.missing(wanted)
        except SharedTierError as exc:
            self._note_trouble("what is wanted can't be known now", exc, has_worked=self._has_looked)
            return
        self._has_looked = True
        if self._leases is not None:
            self._tidy(self._leases, {self._target.task_name(shard) for shard in missing})
        digests = {shard.digest for shard in missing}
        for shard in self._working():  # what isn't missing any more needs no work
            if shard.digest not in digests and not executor.has_begun(shard):
                self._let_go(shard)
        with self._change:
            self._places = {shard.digest: place for place, shard in enumerate(wanted)}
            self._missing = {s.digest: s for s in missing if s.digest not in self._fresh}
            self._failures.keep(digests)
            self._looked_at = self._clock()
            self._status = replace(
                self._status, following=self._demand.describe(), wanted=len(wanted), trouble=""
            )

    def _tidy(self, leases: Leases, tasks: set[str]) -> None:
        """See to it that leases of dead daemons don't stay where nothing is missing."""
        with contextlib.suppress(SharedTierError):
            leases.tidy(sorted(leases.busy() - tasks)[:_TIDIED])

    def _assign(self, executor: Executor) -> None:
        """Start tasks for missing shards, in order of need, up to the executor's capacity."""
        with self._change:
            skip = self._failures.waiting() | self._mine.keys()
            due = [shard for digest, shard in self._missing.items() if digest not in skip]
            busy = len(self._mine)
        free = executor.capacity(due) - busy
        if free > 0 and due:
            due = due if self._leases is None else self._leased(self._leases, due, free)
        with self._change:
            for shard in due[: max(0, free)]:
                self._mine[shard.digest] = shard
            tasks = [shard for digest, shard in self._missing.items() if digest in self._mine]
            # What was delivered elsewhere may be evicted here; what this tier is to hold stays announced.
            needed = list(self._places) if self._leases is None else [shard.digest for shard in tasks]
        if self._demand_file is not None:
            self._demand_file.announce(needed)
        executor.want(tasks)

    def _next_use_of(self, shard: Shard) -> float:
        """How soon a shard is needed, by what is announced."""
        with self._change:
            return (
                0.0 if self._leases is not None else float(self._places.get(shard.digest, len(self._places)))
            )

    def _leased(self, leases: Leases, due: Sequence[Shard], count: int) -> list[Shard]:
        """Of what is due, so many tasks that this daemon now has the leases of."""
        task_name = self._target.task_name
        found: list[Shard] = []
        try:
            busy = leases.busy()
            free = [shard for shard in due if task_name(shard) not in busy]
            if busy:  # others choose from the same list: not all of them should try the same first
                block = free[: _CROWD * self._options.concurrency]
                self._rng.shuffle(block)
                free[: len(block)] = block
            # What is busy has to be looked at now and then, to see whether its holder lives.
            watched = [shard for shard in due if task_name(shard) in busy][: self._options.concurrency]
            for shard in (*watched, *free):
                if len(found) == count:
                    break
                if leases.take(task_name(shard)):
                    self._has_leased = True
                    if self._target.holds(shard):
                        leases.release(task_name(shard))  # somebody was through in between
                        with self._change:
                            self._missing.pop(shard.digest, None)
                    else:
                        found.append(shard)
            with self._change:
                self._status = replace(self._status, elsewhere=len(due) - len(free))
        except SharedTierError as exc:
            self._note_trouble("no lease can be had now", exc, has_worked=self._has_leased)
        return found

    def _note_trouble(self, what: str, exc: SharedTierError, *, has_worked: bool) -> None:
        """Log once and continue; raise if access is denied on first use."""
        if isinstance(exc, SharedTierDenied) and not has_worked:
            raise exc
        if self._trouble_since is None:
            self._trouble_since = self._clock()
            logger.warning("%s: %s", what, exc)
        with self._change:
            self._status = replace(self._status, following=self._demand.describe(), trouble=str(exc))

    def _has_waited_long(self) -> bool:
        """Whether there has been trouble for as long as `once` waits."""
        since = self._trouble_since
        return since is not None and self._clock() - since > self._options.trouble_seconds

    def _is_through(self) -> bool:
        """Whether all that was wanted is held, or has failed once."""
        with self._change:
            return not self._status.trouble and all(d in self._failures for d in self._missing)

    def _wait(self, executor: Executor, notice: Notice) -> None:
        """Until something was done, or it is time to look again."""
        while self._clock() < self._look_at and not notice.wait(0):
            with self._change:
                if self._has_news or self._change.wait(min(_TICK_SECONDS, self._options.look_seconds)):
                    self._has_news = False
                    return
            executor.check()

    def _wind_down(self, executor: Executor, notice: Notice) -> None:
        """Take nothing more; finish what fits into the notice, and hand the rest back."""
        if notice.is_given:
            begun = [shard for shard in self._working() if executor.has_begun(shard)]
            executor.want(begun)
            for shard in self._working():
                if shard not in begun:
                    self._let_go(shard)
            left = notice.seconds_left()
            margin = min(_MOST_MARGIN_SECONDS, _MARGIN_SHARE * left)
            logger.warning(
                "%s: %d tasks are worked on to their end, if they come to it in %.0f s",
                notice.by,
                len(begun),
                left,
            )
            while self._working() and notice.seconds_left() > margin:
                with self._change:
                    self._change.wait(_TICK_SECONDS)
        handed_back = self._working()
        for shard in handed_back:  # first: what takes long to stop must not hold others up
            self._let_go(shard)
        if handed_back:
            logger.warning("%d tasks were handed back", len(handed_back))

    def _completed(self, shard: Shard, size: int) -> None:
        """A task is where it is wanted."""
        with self._change:
            if shard.digest not in self._mine:
                return
            self._done += 1
            self._failures.forget(shard.digest)
            self._missing.pop(shard.digest, None)
            self._fresh.add(shard.digest)
            if len(self._sizes) < _SIZES_KEPT:
                self._sizes_bytes += size - self._sizes.get(shard.digest, 0)
                self._sizes[shard.digest] = size
        self._let_go(shard)

    def _failed(self, shard: Shard, why: str) -> float:
        """A task can't be had now; the seconds after which it is tried again."""
        with self._change:
            if shard.digest not in self._mine:
                return self._options.retry_seconds
            times, pause = self._failures.note(shard.digest, shard.name, why)
        if times == 1:
            logger.warning("%s can't be brought, and is tried again in %.0f s: %s", shard.name, pause, why)
        self._let_go(shard)
        return pause

    def _let_go(self, shard: Shard) -> None:
        """A task is done, has failed, or isn't wanted any more."""
        if self._leases is not None:
            self._leases.release(self._target.task_name(shard))
        with self._change:
            self._mine.pop(shard.digest, None)
            self._has_news = True
            self._change.notify_all()

    def _working(self) -> list[Shard]:
        with self._change:
            return list(self._mine.values())

    def _size_of(self, shard: Shard) -> float:
        """The bytes of a shard: its own if it was seen, else the mean of those that were."""
        with self._change:
            if not self._sizes:
                return float(GUESSED_BYTES)
            return self._sizes.get(shard.digest, self._sizes_bytes / len(self._sizes))
