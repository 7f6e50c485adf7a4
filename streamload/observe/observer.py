"""The observer of one rank: once a second what follows from its counters.

That is its published page (publishing.py), its alerts, and now and then a line in the log. No thread and no
port by default: the training loop's own `next` calls `tick`, also while it waits for a batch. Where it stands
still in its own step, RankMonitor's thread does, if there are other ranks.
A port that is taken and a disk that is full are logged, and the training goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from streamload.descriptors import in_this_process
from streamload.device import is_accelerator_used
from streamload.errors import OptionError
from streamload.ipc import ControlBlock
from streamload.limits import own_processors
from streamload.metrics import COUNTERS
from streamload.metrics.findings import Alert, OnAlert, Requests, SlowestRank, Verdict
from streamload.observe.alerts import WINDOW_SECONDS, Alerts
from streamload.observe.figures import CounterSample, Figures, History, Machine
from streamload.observe.page import PageFile, RunPage, names_of_sources
from streamload.observe.publishing import Publisher, RankProgress
from streamload.observe.verdict import LITTLE, ON_HOST, judge
from streamload.options import Settings
from streamload.topology import Topology
from streamload.worker.messages import Batch, SkippedSample

if TYPE_CHECKING:
    from streamload.cache.tier import Tier
    from streamload.observe.metrics_server import MetricsServer
    from streamload.observe.recording import Recording
    from streamload.observe.trace import Trace

logger = logging.getLogger("streamload")

TICK_SECONDS = 1.0
LINE_SECONDS = 300.0
"""The training's waits are logged this often, if they are worth it, and at the end of an epoch."""
_SHORTEST_EPOCH_SECONDS = 10.0
"""An epoch that is shorter has no line in the log."""
LONGEST_SECONDS = 600.0
"""The longest interval of a verdict."""
_MINUTE = 60.0
_DATA_WAIT = list(COUNTERS).index("data_wait_ns")
_serving: set[str] = set()
"""Addresses at which this process serves: of several loaders one does, with all runs of the node."""


@dataclasses.dataclass(frozen=True, slots=True)
class ObservedRun:
    """A rank's run, as its observer needs it.

    Attributes:
        workers: processes of the rank; 0: the training's process makes batches.
        sources: their names.
        prepare: as given to make_loader; "": images aren't prepared.
        settings: returns those of the loader.
        described: returns its options for people, without secrets, URLs and paths of the data.
        topology: returns that of the run.
        progress: returns that of the rank.
        extension_metrics: returns the numbers of extensions by name.
        wait_began_ns: returns when the training's current wait began, by the monotonic clock; 0: none.
        wait_by_shard: returns the training's data wait in nanoseconds, by the shards' index in the run.
        shard_name: returns the name of a shard's file, as others may read it.
        skipped: returns the first samples that could not be used.
    """

    workers: int
    sources: tuple[str, ...]
    prepare: str
    settings: Callable[[], Settings]
    described: Callable[[], Mapping[str, Any]]
    topology: Callable[[], Topology]
    progress: Callable[[], RankProgress]
    extension_metrics: Callable[[], Mapping[str, float]]
    wait_began_ns: Callable[[], int]
    wait_by_shard: Callable[[], dict[int, int]]
    shard_name: Callable[[int], str]
    skipped: Callable[[], Sequence[SkippedSample]]


class RunObserver:
    """Observes one rank, in the process that made it.

    Args:
        owner: the loader; what was opened for it ends with it.
        run: of the rank.
        control: shared with the workers.
        requests: what it is asked to show.

    Attributes:
        requests: the same.
        slowest: the other rank that waits most for data; set by RankMonitor.
        device: of the batches; None: nothing says that they leave host memory. Set by the loader.
        reported: means by source of what the training reports. Set by the loader.
    """

    def __init__(
        self,
        owner: object,
        run: ObservedRun,
        control: ControlBlock,
        requests: Requests,
    ) -> None:
        self.requests = requests
        self._owner = weakref.ref(owner)
        self.slowest: SlowestRank | None = None
        self.device: torch.device | None = None
        self.reported: Sequence[Mapping[str, Any]] = ()
        self._run, self._control = run, control
        self._functions: Mapping[str, str] = {}
        self._are_local, self._ranks_of_node = False, 1
        self._names = names_of_sources(run.sources)
        self._publisher = Publisher(
            run.topology, run.progress, run.workers, run.sources, self._names, run.extension_metrics
        )
        self._is_in_epoch: Callable[[], bool] = bool
        self._next_tick = 0.0
        self._is_published = False  # this run
        self._machine: Machine | None = None
        self._trace: Trace | None = None  # while one runs
        self._shown: RunPage | None = None  # at the last call of `metrics`
        self._close_page: Callable[[], object] = bool
        self._recording: Recording | None = None
        self._close_server: Callable[[], object] | None = None
        self._are_exports_open = False
        self._lock = threading.Lock()  # of tick, which another thread may call, too
        # Guarded by it:
        self._history = History(LONGEST_SECONDS)
        self._line_from: CounterSample | None = None  # the last line in the log is about the time up to here
        self._epoch_from: CounterSample | None = None  # the first batch of the epoch was taken here
        self._run_from: CounterSample | None = None  # and that of the run
        self._alerts = Alerts()
        self._is_failure_logged = False
        self._is_host_logged = False

    # What the loader does.

    def open(self, tier: Tier, run: str, functions: Mapping[str, str], *, are_local: bool) -> None:
        """A run begins: it is published with its first epoch.

        Args:
            tier: that the rank reads.
            run: its name.
            functions: the argument whose function has most of a stage's time, by stage.
            are_local: the shards are files that are read in place.
        """
        self._functions, self._are_local, self._machine = functions, are_local, None
        self._ranks_of_node = self._run.topology().local_world_size
        file = PageFile(tier.root)
        self._close_page = self._at_end(file.close)
        self._publisher.open(file, tier, run)
        self._is_published = False

    def start_epoch(self, is_running: Callable[[], bool]) -> None:
        """An epoch begins; its workers run. Alerts need an interval: they are judged a second later.

        Args:
            is_running: whether it still goes on.
        """
        self._is_in_epoch = is_running
        self._open_exports()
        if not self._is_published:
            self._is_published = True
            with self._lock:
                self._next_tick = time.monotonic() + TICK_SECONDS
                self._publish(self._sample(), self._alerts.raised() if self._run_from else {})

    def waited(self, waited_ns: int) -> None:
        """The training loop has just waited for so long."""
        if self._trace is not None:
            self._trace.waited(waited_ns)

    def took(self, batch: Batch) -> None:
        """The training loop gets a batch, as its worker made it."""
        publisher = self._publisher
        if batch.rows.passes:
            publisher.passes = list(map(max, batch.rows.passes, publisher.passes or batch.rows.passes))
        if self._line_from is None:  # in the wait for the first batch workers start, too
            with self._lock:
                self._line_from = self._epoch_from = self._sample()
                self._run_from = self._run_from or self._epoch_from
                self._history.add(self._line_from)
        if self._trace is not None and self._trace.took():
            self._trace = None

    def end_epoch(self, epoch: int) -> None:
        """The last batch of an epoch was taken."""
        self.tick(is_due=True)
        with self._lock:
            self._line_from = self._epoch_from
            self._log_line(f"epoch {epoch}: ", _SHORTEST_EPOCH_SECONDS)
            self._line_from = self._epoch_from = None

    def close(self) -> None:
        """End this run's page and recording; the next workers are another run."""
        if self._recording is not None:
            self._recording.finish()
            self._publisher.readers.remove(self._recording.add)
        if self._close_server is not None:
            self._close_server()
        self._shown = self._recording = self._close_server = None
        self._are_exports_open = False
        self._close_page()

    # What the training asks for. Live numbers, recordings, the server and traces are imported when asked for.

    def verdict(self, seconds: float) -> Verdict:
        """Verdict on what has limited the training over the last seconds: data, or the training itself."""
        if not 0 < seconds <= LONGEST_SECONDS:
            raise OptionError(f"seconds={seconds}; expected a number up to {LONGEST_SECONDS:g}")
        return judge(self._figures(self._sample(), seconds))

    def on_alert(self, call: OnAlert) -> None:
        """Call a function with each Alert that is raised or cleared, from now on (docs/guides/metrics.md)."""
        if not callable(call):
            raise OptionError(
                f"on_alert() was given a {type(call).__name__}; expected a function of one Alert"
            )
        self.requests.listeners.append(call)

    def trace(self, steps: int) -> Trace:
        """Record what the workers and the fills of this rank do, from now on for a number of steps."""
        from streamload.observe.trace import Trace

        if self._trace is not None:
            self._trace.stop()
        self._trace = Trace(self._control, steps)
        return self._trace

    def metrics(self) -> dict[str, float]:
        """The numbers of this rank since the last call, as one flat dict for a tracker."""
        page = self.page()
        if page is None:
            return {}
        from streamload.observe.live import live_rank

        before, self._shown = self._shown, page
        return live_rank(page, before).flat()

    def record(self, folder: Path) -> None:
        """Record this rank's numbers for `streamload report`, from the next second on."""
        self.requests.record_in = folder
        self._are_exports_open = False
        if self._publisher.is_open:
            self._open_exports()

    def serve_metrics(self, listen: str) -> str | None:
        """Serve the metrics of this node's runs; return the URL, None where somebody serves already."""
        if self._close_server is not None or listen in _serving:
            return None
        from streamload.cache.tier import memory_root
        from streamload.observe.metrics_server import MetricsServer

        settings = self._run.settings()
        try:
            server = MetricsServer([settings.cache_dir, memory_root(settings)], listen)
        except OptionError as exc:
            if not isinstance(exc.__cause__, OSError):
                raise
            logger.warning("metrics aren't served by this process: %s; the training goes on", exc)
            return None
        _serving.add(listen)
        self._close_server = self._at_end(functools.partial(_stop, server, listen))
        logger.info("/metrics is at %s", server.url)
        return server.url

    def _open_exports(self) -> None:
        """Do what was asked for, by variables too, once the workers run, which must not inherit a socket."""
        if self._are_exports_open:
            return
        self._are_exports_open = True
        settings = self._run.settings()
        folder = self.requests.record_in or settings.record
        if folder is not None and self._recording is None:
            from streamload.observe.recording import Recording

            settings_shown = {**self._run.described(), "device": str(self.device)}
            self._recording = Recording(folder, settings_shown, self._run.skipped())
            self._publisher.readers.append(self._recording.add)
        if settings.metrics is not None and self._run.topology().local_rank == 0:
            self.serve_metrics(settings.metrics)

    def _at_end(self, act: Callable[[], object]) -> Callable[[], object]:
        """Act once: when the returned function is called, or when the owner ends in this process."""
        return weakref.finalize(self._owner(), in_this_process(act))

    # What follows from the counters.

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
            self._publisher.look_at_memory(sample, self.device)
            recent = self._figures(sample, WINDOW_SECONDS)
            changed = self._alerts.look(recent, time.monotonic(), time.time())
            self._publish(sample, self._alerts.raised())
            if self._line_from is not None and sample.at_ns - self._line_from.at_ns >= LINE_SECONDS * 1e9:
                self._log_line("", LINE_SECONDS)
        finally:
            self._lock.release()
        for alert in changed:
            self._report(alert)

    def page(self) -> RunPage | None:
        """The page as it would be published now; None before the first epoch."""
        if not self._publisher.is_open:
            return None
        with self._lock:
            sample = self._sample()
            self._publisher.look_at_memory(sample, self.device)
            minute = self._look(sample)
            return self._publisher.page(sample, minute, self._run_figures(sample), self._alerts.raised())

    def _look(self, sample: CounterSample) -> Figures:
        """Set the gauges of the page; return the figures of the last minute."""
        minute = self._figures(sample, _MINUTE)
        self._publisher.look(sample, minute, self.reported)
        return minute

    def _publish(self, sample: CounterSample, alerts: Mapping[str, str]) -> None:
        """Write the page, with the alerts that are raised; under the lock."""
        self._publisher.publish(sample, self._look(sample), self._run_figures(sample), alerts)

    def compare_waits(self, compare: Callable[[float], SlowestRank | None]) -> None:
        """Compare the rank's data wait with the others'.

        Args:
            compare: takes the share of the last minute in which this rank waited; returns the slowest other.
        """
        self.slowest = compare(self._figures(self._sample(), _MINUTE).wait)

    def _sample(self) -> CounterSample:
        """The counters now; the current wait counts up to now."""
        at_ns, rows = time.monotonic_ns(), self._control.counters
        row, wait_began_ns = rows.sum(axis=0), self._run.wait_began_ns()
        if wait_began_ns:
            row[_DATA_WAIT] += max(0, at_ns - wait_began_ns)
        by_source = self._control.by_source.sum(axis=0)
        return CounterSample(at_ns, row, rows[0].copy(), by_source, self._run.wait_by_shard())

    def _figures(self, sample: CounterSample, seconds: float) -> Figures:
        """The figures of the last seconds."""
        waiting, still = self._control.wanted_seconds(), self._control.still_seconds()
        if not self._is_in_epoch():
            waiting = still = 0.0
        return dataclasses.replace(
            Figures.between(self._history.last(seconds, sample), sample, self._about()),
            waiting_seconds=waiting,
            still_seconds=0.0 if waiting else still,
            memory_ratio=self._publisher.memory_ratio,
            slowest=self.slowest,
        )

    def _run_figures(self, sample: CounterSample) -> Figures:
        """The figures since the run's first batch."""
        return Figures.between(self._run_from or sample, sample, self._about())

    def _about(self) -> Machine:
        run = self._run
        if self._machine is None:
            cores = own_processors(self._ranks_of_node)
            self._machine = Machine(run.workers, cores, self._are_local, self._names, run.prepare)
        is_on_host = self.device is None and is_accelerator_used()
        return self._machine._replace(
            is_on_host=is_on_host, functions=self._functions, shard_name=run.shard_name
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
        for listener in tuple(self.requests.listeners):
            try:
                listener(alert)
            except Exception:
                if not self._is_failure_logged:
                    self._is_failure_logged = True
                    logger.exception("a function given to on_alert() failed, which is logged once")


def _stop(server: MetricsServer, listen: str) -> None:
    server.close()
    _serving.discard(listen)
