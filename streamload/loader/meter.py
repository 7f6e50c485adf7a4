"""The numbers of one rank: waits and steps as they are counted, and once a second what follows from them.

That is its published page (publishing.py), its alerts, and now and then a line in the log. No thread and no
port: the training loop's own `next` calls `tick`, also while it waits for a batch. Where it stands still in
its own step, RankMonitor's thread does, if there are other ranks; otherwise only the page's age tells.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from streamload.ipc import ControlBlock, spent_ns
from streamload.loader.checks import ShardWaits
from streamload.loader.destination import is_accelerator_used
from streamload.loader.options import LoaderOptions
from streamload.loader.publishing import Publisher
from streamload.loader.schedule import Schedule
from streamload.metrics import COUNTERS, Counters
from streamload.metrics.alerts import WINDOW_SECONDS, Alert, Alerts
from streamload.metrics.figures import Figures, History, Machine, Sample
from streamload.metrics.page import RunPage, names_of_sources
from streamload.metrics.verdict import LITTLE, ON_HOST, Verdict, judge
from streamload.node import SlowestRank
from streamload.urls import is_local
from streamload.worker import Batch, bytes_by_modality

logger = logging.getLogger("streamload")

TICK_SECONDS = 1.0
LINE_SECONDS = 300.0
"""The training's waits are logged this often, if they are worth it, and at the end of an epoch."""
_SHORTEST_EPOCH_SECONDS = 10.0
"""An epoch that is shorter has no line in the log."""
LONGEST_SECONDS = 600.0
"""The longest interval of a verdict."""
_MINUTE = 60.0
OnAlert = Callable[[Alert], object]
_DATA_WAIT = list(COUNTERS).index("data_wait_ns")


class Meter:
    """Counts what the training loop does, and tells about it.

    Args:
        options: of the loader.
        schedule: of its epochs.
        control: shared with the workers.
        counts: of this process.
        listeners: called with each alert; may grow.
        waits: of the training, by shard.

    Attributes:
        functions: the argument whose function has most of a stage's time, by stage.
        publisher: of the rank's page and gauges.
        slowest: the other rank that waits most for data; set by RankMonitor.
    """

    def __init__(
        self,
        options: LoaderOptions,
        schedule: Schedule,
        control: ControlBlock,
        counts: Counters,
        listeners: Sequence[OnAlert],
        waits: ShardWaits,
    ) -> None:
        self.functions: Mapping[str, str] = {}
        self._waits = waits
        self.slowest: SlowestRank | None = None
        self._options, self._schedule = options, schedule
        self._control, self._counts, self._listeners = control, counts, listeners
        self._names = names_of_sources(source.name for source in options.sources)
        self.publisher = Publisher(options, schedule, self._names)
        self._returned_ns = 0  # when the training loop got its last batch; 0: it has asked since
        self._wait_began_ns = 0  # of the current wait; 0: none
        self._counted_until_ns = 0  # up to here the time in `next` is counted
        self._waited_ns = 0  # of the batch that is asked for
        self._features_ns = 0  # for which features had been computed when it was asked for
        self._is_in_epoch: Callable[[], bool] = bool
        self._spent_ns = 0
        self._next_tick = 0.0
        self._machine: Machine | None = None
        self._lock = threading.Lock()  # of tick, which another thread may call, too
        # Guarded by it:
        self._history = History(LONGEST_SECONDS)
        self._line_from: Sample | None = None  # the last line in the log is about the time up to here
        self._epoch_from: Sample | None = None  # the first batch of the epoch was taken here
        self._run_from: Sample | None = None  # and that of the run
        self._alerts = Alerts()
        self._is_failure_logged = False
        self._is_host_logged = False

    # What the training loop does.

    def start_epoch(self, is_running: Callable[[], bool]) -> None:
        """An epoch begins.

        Args:
            is_running: whether it still goes on.
        """
        self._is_in_epoch = is_running
        self._returned_ns, self._spent_ns = 0, spent_ns()

    def end_epoch(self, epoch: int) -> None:
        """The last batch of an epoch was taken."""
        self.tick(is_due=True)
        with self._lock:
            self._line_from = self._epoch_from
            self._log_line(f"epoch {epoch}: ", _SHORTEST_EPOCH_SECONDS)
            self._line_from = self._epoch_from = None

    def asked(self) -> None:
        """The training loop asks for its next batch: from here on it waits."""
        self._counted_until_ns, self._waited_ns = time.monotonic_ns(), 0
        self._features_ns = self._counts.value("feature_compute_ns")
        if self._returned_ns:
            self._counts.add("step_ns", self._counted_until_ns - self._returned_ns)
            self._returned_ns = 0
        if time.monotonic() >= self._next_tick:
            self.tick()

    def wait_began(self, since: float) -> None:
        """The training loop waits for its workers, since then by the monotonic clock."""
        self._count_own_work()
        self._control.want(True)
        self._wait_began_ns = int(since * 1e9)

    def wait_ended(self, since: float) -> int:
        """It waits no longer; returns for how many nanoseconds it did."""
        self._control.want(False)
        self._wait_began_ns, waited_ns = 0, int((time.monotonic() - since) * 1e9)
        self._counted_until_ns, self._waited_ns = time.monotonic_ns(), self._waited_ns + waited_ns
        self._counts.add("data_wait_ns", waited_ns)
        if not self._counts.value("batches_yielded"):
            self._counts.add("first_batch_ns", waited_ns)
        return waited_ns

    def copying(self) -> AbstractContextManager[None]:
        """Count a block as a wait for a batch's copy to the device."""
        return self._counts.timed("device_ns")

    def took(self, batch: Batch, waited_ns: int) -> None:
        """The training loop gets a batch.

        Args:
            batch: as its worker made it.
            waited_ns: the data wait for it.
        """
        counts = self._counts
        counts.add("ready_batches", -1)
        for name, size in bytes_by_modality(batch.values).items():
            counts.add(name, -size)
        if batch.passes:
            self.publisher.passes = list(map(max, batch.passes, self.publisher.passes or batch.passes))
        if batch.blocked:
            counts.add("blocked_wait_ns", min(waited_ns, sum(ns for _, ns in batch.blocked)))
        before, self._spent_ns = self._spent_ns, spent_ns()
        if self._options.num_workers:
            counts.add("hand_over_ns", self._spent_ns - before)
        if self._line_from is None:  # in the wait for the first batch workers start, too
            with self._lock:
                self._line_from = self._epoch_from = self._sample()
                self._run_from = self._run_from or self._epoch_from
                self._history.add(self._line_from)

    def returned(self) -> None:
        """The training loop has its batch, and does its own work from here on."""
        self._count_own_work()
        self._counts.observe_wait(self._waited_ns)
        self._returned_ns = self._counted_until_ns

    def _count_own_work(self) -> None:
        """Count the time since the last wait, in which `next` passed a batch on, as data wait, too."""
        before, self._counted_until_ns = self._counted_until_ns, time.monotonic_ns()
        own_ns = self._counted_until_ns - before
        computed_ns, self._features_ns = self._features_ns, self._counts.value("feature_compute_ns")
        self._counts.add("data_wait_ns", own_ns)
        self._counts.add("hand_over_ns", max(0, own_ns - (self._features_ns - computed_ns)))
        self._waited_ns += own_ns

    # What follows.

    def tick(self, is_due: bool = False) -> None:
        """Publish, look at the alerts, and log a line, unless that was done in the last second.

        Thread-safe; does nothing while another thread is at it.
        """
        if not (is_due or time.monotonic() >= self._next_tick) or not self._lock.acquire(blocking=False):
            return
        try:
            self._next_tick = time.monotonic() + TICK_SECONDS
            sample = self._sample()
            if self._line_from is not None:
                self._history.add(sample)
            minute = self._figures(sample, _MINUTE)
            self.publisher.look(sample, minute)
            recent = self._figures(sample, WINDOW_SECONDS)
            changed = self._alerts.look(recent, time.monotonic(), time.time())
            self.publisher.publish(sample, minute, self._run_figures(sample), self._alerts.raised())
            if self._line_from is not None and sample.at_ns - self._line_from.at_ns >= LINE_SECONDS * 1e9:
                self._log_line("", LINE_SECONDS)
        finally:
            self._lock.release()
        for alert in changed:
            self._report(alert)

    def page(self) -> RunPage | None:
        """The page as it would be published now; None before the first epoch."""
        if not self.publisher.is_open:
            return None
        with self._lock:
            sample = self._sample()
            minute = self._figures(sample, _MINUTE)
            self.publisher.look(sample, minute)
            return self.publisher.page(sample, minute, self._run_figures(sample), self._alerts.raised())

    def verdict(self, seconds: float) -> Verdict:
        """Verdict on what has limited the training over the last seconds."""
        return judge(self._figures(self._sample(), seconds))

    def wait_ratio(self) -> float:
        """The share of the last minute in which the training loop waited for data."""
        return self._figures(self._sample(), _MINUTE).wait

    def _sample(self) -> Sample:
        """The counters now; the current wait counts up to now."""
        at_ns, rows = time.monotonic_ns(), self._control.counters
        row, wait_began_ns = rows.sum(axis=0), self._wait_began_ns
        if wait_began_ns:
            row[_DATA_WAIT] += max(0, at_ns - wait_began_ns)
        by_source = self._control.by_source.sum(axis=0)
        return Sample(at_ns, row, rows[0].copy(), by_source, self._waits.by_shard())

    def _figures(self, sample: Sample, seconds: float) -> Figures:
        """The figures of the last seconds."""
        waiting, still = self._control.wanted_seconds(), self._control.still_seconds()
        if not self._is_in_epoch():
            waiting = still = 0.0
        return dataclasses.replace(
            Figures.between(self._history.last(seconds, sample), sample, self._about()),
            waiting_seconds=waiting,
            still_seconds=0.0 if waiting else still,
            memory_ratio=self.publisher.memory_ratio,
            slowest=self.slowest,
        )

    def _run_figures(self, sample: Sample) -> Figures:
        """The figures since the run's first batch."""
        return Figures.between(self._run_from or sample, sample, self._about())

    def _about(self) -> Machine:
        if self._machine is None:
            options, rank = self._options, self._schedule.topology.rank
            is_near = all(map(is_local, options.urls.kinds()))
            cores = len(os.sched_getaffinity(0))
            prepare = options.images.prepare or ""
            self._machine = Machine(options.num_workers, cores, is_near, self._names, rank, prepare)
        is_on_host = self.publisher.device is None and is_accelerator_used()
        return self._machine._replace(
            is_on_host=is_on_host, functions=self.functions, shard_name=self._waits.file_name
        )

    def _log_line(self, what: str, shortest_seconds: float) -> None:
        """Log what the training has waited for since the last line; under the lock."""
        first, last = self._line_from, self._sample()
        self._line_from = last
        if first is None or last.at_ns - first.at_ns < shortest_seconds * 1e9:
            return
        verdict = judge(Figures.between(first, last, self._about()))
        if verdict.wait >= LITTLE:
            logger.warning("%sthe training %s", what, verdict)
        elif ON_HOST in verdict.advice and not self._is_host_logged:
            self._is_host_logged = True
            logger.warning("%sbatches are ready when they are asked for. %s", what, ON_HOST)

    def _report(self, alert: Alert) -> None:
        """Call the user's functions; what they raise doesn't end the training."""
        for listener in tuple(self._listeners):
            try:
                listener(alert)
            except Exception:
                if not self._is_failure_logged:
                    self._is_failure_logged = True
                    logger.exception("a function given to on_alert() failed, which is logged once")
