"""The daemon: a reconciliation loop that compares demand with what the target holds, and fetches the rest.

There is no queue and no state to lose: each look computes the tasks, one shard each, from scratch. An
executor runs them (executor.py): threads of this process, or a Ray cluster. Several daemons share the work
by leases. Tasks are idempotent: a second or late delivery is harmless.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from streamload.cache import demand as demand_files
from streamload.cache.shard import Shard
from streamload.cache.shared.leases import Leases
from streamload.daemon.demand import Demand, Sizes
from streamload.daemon.executor import Executor, TaskResult
from streamload.daemon.options import DaemonOptions
from streamload.daemon.preemption import Notice
from streamload.daemon.status import Failures, Status
from streamload.daemon.targets import WarmTarget
from streamload.errors import SharedTierDenied, SharedTierError
from streamload.origins.endpoints import outages
from streamload.prefetch.scheduler import FillRequest

logger = logging.getLogger("streamload")

_TICK_SECONDS = 0.05
_LAST_TICKS = 20
"""With `once`, how many ticks to wait for the results of tasks whose shards an earlier look found held."""
_MOST_MARGIN_SECONDS = 5.0
_MARGIN_SHARE = 0.2
"""This share of a notice is kept for the end: to hand back unfinished tasks and exit."""
_TIDIED = 16
"""Leases of others, on shards that are no longer missing, that are looked at in one round."""
_CROWD = 4
"""A daemon that shares its list with others picks at random among this many tasks for each thread."""


class Daemon:
    """Keeps the demanded shards at the target, in the thread that calls `run`.

    Args:
        demand: the shards to hold.
        target: where to hold them.
        executor: runs the tasks; closed when `run` ends.
        leases: among the daemons with the same target; None where the executor shares the work out itself.
        options: see there.
        announce: announces shards in the tier of this node, in order of need, instead of those before, so
            that none is evicted for a later one.
        clock: monotonic.

    Attributes:
        failures: the tasks that have failed and weren't done since.
    """

    def __init__(
        self,
        demand: Demand,
        target: WarmTarget,
        executor: Executor,
        *,
        leases: Leases | None = None,
        options: DaemonOptions | None = None,
        announce: Callable[[Sequence[str]], None] = lambda digests: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._demand, self._target, self._executor, self._leases = demand, target, executor, leases
        self._options = options or DaemonOptions()
        self._announce_in_tier = announce
        self._rng = random.Random()  # chooses among tasks that several daemons could start
        self._clock = clock
        self._notice = Notice()
        self._look_at = clock()
        self._has_looked = self._has_leased = False
        self._trouble_since: float | None = None
        self._announced = 0  # how many shards
        self._refused_in_a_row = 0
        self._fresh: set[str] = set()  # delivered since the last look began, by digest
        self._sizes = Sizes()
        self._lock = threading.Lock()
        # Changed by the thread of `run` alone, and guarded by _lock for `status`; shards by their digests:
        self._missing: dict[str, Shard] = {}  # in order of need
        self._mine: dict[str, Shard] = {}  # missing shards whose tasks this daemon has
        self._places: dict[str, int] = {}  # of all that is demanded
        self.failures = Failures(self._options.retry_seconds, clock)
        self._looked_at = clock()
        self._status = Status(trouble="not looked yet")
        self._done = 0

    def run(self, notice: Notice) -> Status:
        """Work until a notice, or with `once` until each shard is held or has failed.

        Returns:
            The last status.

        Raises:
            SharedTierDenied: the shared cache refuses access on first use.
            StreamloadError: the executor can't run tasks any more.
        """
        for _ in self.rounds(notice):
            pass
        return self.status()

    def rounds(self, notice: Notice) -> Generator[None, None, None]:
        """Work as `run` does; yields several times a second."""
        self._notice = notice
        with contextlib.closing(self._executor):
            has_news = True
            while not notice.is_given:
                if self._clock() >= self._look_at:
                    self._look()
                    has_news = True
                if has_news:
                    self._assign()
                if not self._status.trouble:
                    self._trouble_since = None
                self._executor.check()
                if self._options.once and (self._is_through() or self._has_waited_long()):
                    break
                has_news = self._settle(min(_TICK_SECONDS, self._options.look_seconds))
                yield
            self._wind_down(notice)

    def status(self) -> Status:
        """The current status; callable from any thread."""
        with self._lock:
            left = self._notice.seconds_left()
            return replace(
                self._status,
                held=self._status.wanted - len(self._missing),
                working=tuple(sorted(shard.name for shard in self._mine.values())),
                failed=self.failures.reasons(),
                waiting_for={name: outage.cause for name, outage in outages().items()},
                done=self._done,
                bytes_arrived=self._executor.counts.snapshot().origin_bytes,
                taken_over=0 if self._leases is None else self._leases.taken_over,
                notice=f"{self._notice.by}, {left:.0f} s" if self._notice.is_given else "",
                seconds_since_look=self._clock() - self._looked_at,
            )

    def _look(self) -> None:
        """Compare the demand with what the target holds."""
        self._look_at = self._clock() + self._options.look_seconds
        self._fresh.clear()
        try:
            demanded = self._demand.look(self._sizes.of)
            missing = {shard.digest: shard for shard in self._target.missing(demanded)}
        except SharedTierError as exc:
            self._note_trouble("the demand can't be read now", exc, has_worked=self._has_looked)
            return
        self._has_looked = True
        if self._leases is None:
            self._announce([shard.digest for shard in demanded])
        else:
            with contextlib.suppress(SharedTierError):  # leases that dead daemons have left
                self._leases.tidy(sorted(self._leases.busy() - missing.keys())[:_TIDIED])
        self._release_idle([shard for digest, shard in self._mine.items() if digest not in missing])
        with self._lock:
            self._places = {shard.digest: place for place, shard in enumerate(demanded)}
            self._missing = {digest: shard for digest, shard in missing.items() if digest not in self._fresh}
            self.failures.keep(missing.keys())
            self._looked_at = self._clock()
            self._status = replace(
                self._status, following=self._demand.describe(), wanted=len(demanded), trouble=""
            )

    def _release_idle(self, shards: Sequence[Shard]) -> None:
        """Release those of these tasks that haven't begun; those that have just ended are settled."""
        idle = [shard for shard in shards if not self._executor.has_begun(shard)]
        self._settle(0)
        for shard in idle:
            if shard.digest in self._mine:
                self._release(shard)

    def _assign(self) -> None:
        """Start tasks for missing shards, in order of need, up to the executor's capacity."""
        waiting = self.failures.waiting()
        due = (
            shard
            for digest, shard in self._missing.items()
            if digest not in self._mine and digest not in waiting
        )
        first = next(due, None)
        free = self._executor.capacity(first) - len(self._mine)
        if first is not None and free > 0:
            due_shards = itertools.chain([first], due)
            started = self._leased(self._leases, list(due_shards), free) if self._leases else due_shards
            with self._lock:
                self._mine.update((shard.digest, shard) for shard in itertools.islice(started, free))
        tasks = [self._mine[digest] for digest in sorted(self._mine, key=self._place)]
        if self._leases is not None:  # what was delivered may be evicted here
            self._announce([shard.digest for shard in tasks])
        self._executor.want([FillRequest(shard, self._next_use(shard)) for shard in tasks])

    def _announce(self, digests: Sequence[str]) -> None:
        """Announce what has to stay in the tier of this node."""
        self._announced = len(digests)
        self._announce_in_tier(digests)

    def _next_use(self, shard: Shard) -> float:
        """The next use of a task's shard, by what is announced."""
        if not self._options.evicts_announced:
            return float(demand_files.VISITS_KEPT)
        return 0.0 if self._leases is not None else float(self._place(shard.digest))

    def _place(self, digest: str) -> int:
        return self._places.get(digest, len(self._places))

    def _leased(self, leases: Leases, due: Sequence[Shard], count: int) -> list[Shard]:
        """Of the tasks that are due, up to `count` that this daemon now has the leases of."""
        leased: list[Shard] = []
        try:
            busy = leases.busy()
            free = [shard for shard in due if shard.digest not in busy]
            if busy:  # others choose from the same list: not all of them should try the same first
                block = free[: _CROWD * self._options.concurrency]
                self._rng.shuffle(block)
                free[: len(block)] = block
            # Busy tasks are looked at now and then, to see whether their holders are alive.
            watched = [shard for shard in due if shard.digest in busy][: self._options.concurrency]
            for shard in (*watched, *free):
                if len(leased) == count:
                    break
                if leases.take(shard.digest):
                    self._has_leased = True
                    if self._target.holds(shard):
                        leases.release(shard.digest)  # another daemon has just delivered it
                        with self._lock:
                            self._missing.pop(shard.digest, None)
                    else:
                        leased.append(shard)
            with self._lock:
                self._status = replace(self._status, elsewhere=len(due) - len(free))
        except SharedTierError as exc:
            self._note_trouble("leases can't be taken now", exc, has_worked=self._has_leased)
        return leased

    def _note_trouble(self, action: str, exc: SharedTierError, *, has_worked: bool) -> None:
        """Log once and continue; raise if access is denied on first use."""
        if isinstance(exc, SharedTierDenied) and not has_worked:
            raise exc
        if self._trouble_since is None:
            self._trouble_since = self._clock()
            logger.warning("%s: %s", action, exc)
        with self._lock:
            self._status = replace(self._status, following=self._demand.describe(), trouble=str(exc))

    def _has_waited_long(self) -> bool:
        """True if there has been trouble for as long as `once` waits."""
        since = self._trouble_since
        return since is not None and self._clock() - since > self._options.trouble_seconds

    def _is_through(self) -> bool:
        """True if each demanded shard is held, or has failed once."""
        return not self._status.trouble and all(digest in self.failures for digest in self._missing)

    def _settle(self, timeout_seconds: float) -> bool:
        """Take the results of tasks, waiting for the first; False if there are none."""
        results = self._executor.results.drain(timeout_seconds)
        finds_room = any(result.is_refused for result in results) and self._stop_keeping_delivered()
        for result in results:
            if result.shard.digest in self._mine:  # else it was handed back before
                if not result.error:
                    self._note_completed(result)
                elif result.shard.digest in self._missing and not (result.is_refused and finds_room):
                    self._note_failed(result)
                self._release(result.shard)
        return bool(results)

    def _note_completed(self, result: TaskResult) -> None:
        digest = result.shard.digest
        self._refused_in_a_row = 0
        self._fresh.add(digest)
        with self._lock:
            self._done += 1
            self.failures.forget(digest)
            self._missing.pop(digest, None)
        self._sizes.note(digest, result.size_bytes)

    def _note_failed(self, result: TaskResult) -> None:
        shard, options = result.shard, self._options
        with self._lock:
            times, pause_seconds = self.failures.note(
                shard.digest, shard.name, result.error, is_refused=result.is_refused
            )
        if times == 1 and pause_seconds < math.inf:
            logger.warning(
                "%s can't be fetched, and is retried in %.0f s: %s",
                *(shard.name, pause_seconds, result.error),
            )
        self._refused_in_a_row += result.is_refused
        if options.once and options.refusals is not None and self._refused_in_a_row >= options.refusals:
            self._give_up_the_rest(result.error)

    def _give_up_the_rest(self, error: str) -> None:
        """Fail all shards that the target lacks: the tier is full, and smaller ones aren't looked for."""
        for digest, shard in self._missing.items():
            if digest not in self.failures and not self._target.holds(shard):
                with self._lock:
                    self.failures.note(digest, shard.name, error, is_refused=True)
                self._release(shard)

    def _stop_keeping_delivered(self) -> bool:
        """Let delivered shards be evicted for the others; False if they have to stay, or none is left."""
        if not self._target.has_copies or self._announced <= len(self._missing):
            return False
        self._announce(list(self._missing))
        return True

    def _wind_down(self, notice: Notice) -> None:
        """Take no more tasks; finish what the notice leaves time for, and hand the rest back."""
        if notice.is_given:
            self._release_idle(list(self._mine.values()))
            shards = list(self._mine.values())
            self._executor.want([FillRequest(shard, self._next_use(shard)) for shard in shards])
            left = notice.seconds_left()
            margin = min(_MOST_MARGIN_SECONDS, _MARGIN_SHARE * left)
            logger.warning(
                "%s: finishing %d running tasks, if that takes less than %.0f s",
                *(notice.by, len(shards), left),
            )
            while self._mine and notice.seconds_left() > margin:
                self._settle(_TICK_SECONDS)
        else:
            for _ in range(_LAST_TICKS):
                if not self._mine.keys() - self._missing.keys():
                    break
                self._settle(_TICK_SECONDS)
        handed_back = list(self._mine.values())
        for shard in handed_back:  # before the executor is closed: its end must not hold others up
            self._release(shard)
        if handed_back:
            logger.warning("%d tasks were handed back", len(handed_back))

    def _release(self, shard: Shard) -> None:
        """Hand a task back: it is done, has failed, or isn't demanded any more."""
        if self._leases is not None:
            self._leases.release(shard.digest)
        with self._lock:
            self._mine.pop(shard.digest, None)
