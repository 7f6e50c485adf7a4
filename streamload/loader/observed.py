"""A loader's view of its run: counters, a verdict, alerts, a trace; a port for Prometheus, a recording.

By default there is neither port nor recording: other processes read the page that each rank publishes
(meter.py). A port that is taken and a disk that is full are logged, and the training goes on.
"""

from __future__ import annotations

import logging
import platform
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from streamload.cache.placement import memory_root
from streamload.cache.runs import PageFile
from streamload.cache.tier import Tier
from streamload.daemon.metrics_server import DEFAULT_LISTEN, MetricsServer
from streamload.errors import OptionError
from streamload.loader.fork_safety import in_this_process
from streamload.loader.meter import LONGEST_SECONDS, Meter, OnAlert
from streamload.loader.options import LoaderOptions
from streamload.loader.rank_process import RankProcess
from streamload.loader.schedule import Schedule
from streamload.loader.trace import Trace
from streamload.metrics.live import live_rank
from streamload.metrics.page import RunPage
from streamload.metrics.recording import Recording
from streamload.metrics.verdict import Verdict
from streamload.options import Settings, options
from streamload.options.values import at_least
from streamload.worker import Batch

logger = logging.getLogger("streamload")

_serving: set[str] = set()
"""Addresses at which this process serves: of several loaders one does, with all runs of the node."""


class RunObserver:
    """What shows how a loader's run goes.

    Args:
        options: of the loader.
        schedule: of its epochs.
        process: counts.

    Attributes:
        meter: of what the training loop does.
        listeners: called with each alert.
        record_in: the folder of recordings that was asked for; None: none was.
    """

    meter: Meter
    _shown: RunPage | None  # at the last call of `metrics`
    _recording: Recording | None
    _server: MetricsServer | None
    _withdraw: Callable[[], object] | None  # the page
    _are_open: bool

    def __init__(self, options: LoaderOptions, schedule: Schedule, process: RankProcess):
        self._options, self._schedule, self._process = options, schedule, process
        self.listeners: list[OnAlert] = []
        self.record_in: Path | None = None
        self._trace: Trace | None = None  # while one runs
        self.reset()

    def reset(self) -> None:
        """Begin anew in this process; what the process has that it was forked from isn't its own."""
        process = self._process
        self.meter = Meter(
            self._options, self._schedule, process.control, process.counts, self.listeners, process.waits
        )
        if not self._options.num_workers:  # the worker's waits for bytes are in this process
            process.control.while_waiting = self.meter.tick
        self._forget_exports()

    def open(self, tier: Tier, run: str, functions: Mapping[str, str]) -> None:
        """Publish a run from now on.

        Args:
            tier: that its workers read.
            run: its name on this node.
            functions: the argument whose function has most of a stage's time, by stage.
        """
        page = PageFile(tier.root)
        self._withdraw = weakref.finalize(self, in_this_process(page.close))
        self.meter.publisher.open(page, tier, run)
        self.meter.functions = functions

    def start_epoch(self, is_running: Callable[[], bool]) -> None:
        """An epoch begins.

        Args:
            is_running: whether it still goes on.
        """
        self.meter.start_epoch(is_running)
        self._open_exports()

    def wait_ended(self, since: float) -> int:
        """The training loop waits no longer; returns for how many nanoseconds it did."""
        waited_ns = self.meter.wait_ended(since)
        if self._trace is not None:
            self._trace.waited(waited_ns)
        return waited_ns

    def took(self, batch: Batch, waited_ns: int) -> None:
        """The training loop gets a batch, for which it has waited so long."""
        self.meter.took(batch, waited_ns)
        if self._trace is not None and self._trace.took():
            self._trace = None

    def verdict(self, seconds: float) -> Verdict:
        """Verdict on what has limited the training over the last seconds."""
        if not 0 < seconds <= LONGEST_SECONDS:
            raise OptionError(f"seconds={seconds}; expected a number up to {LONGEST_SECONDS:g}")
        return self.meter.verdict(seconds)

    def on_alert(self, call: OnAlert) -> None:
        """Call a function with each alert that is raised or cleared, from now on."""
        if not callable(call):
            raise OptionError(
                f"on_alert() was given a {type(call).__name__}; expected a function of one Alert"
            )
        self.listeners.append(call)

    def trace(self, steps: int) -> Trace:
        """Record what the workers and the fills do, from now on for a number of steps."""
        at_least(1, steps=steps)
        if self._trace is not None:
            self._trace.stop()
        self._trace = Trace(self._process.control, steps)
        return self._trace

    def metrics(self) -> dict[str, float]:
        """The numbers of this rank since the last call; {} before the first epoch."""
        page = self.meter.page()
        if page is None:
            return {}
        before, self._shown = self._shown, page
        return live_rank(page, before).flat()

    def record(self, folder: str | Path) -> None:
        """Record this rank's numbers in a folder, from the next second on."""
        self.record_in = Path(folder)
        self._are_open = False
        if self.meter.page() is not None:
            self._open_exports()

    def serve_metrics(self, listen: str = DEFAULT_LISTEN) -> str | None:
        """Serve the metrics of this node's runs; return the URL, or None if that can't be."""
        if self._server is not None or listen in _serving:
            return None
        settings = self._options.settings()
        try:
            server = MetricsServer([settings.cache_dir, memory_root(settings)], listen)
        except OptionError as exc:
            if not isinstance(exc.__cause__, OSError):
                raise
            logger.warning("metrics aren't served by this process: %s; the training goes on", exc)
            return None
        _serving.add(listen)
        self._server = server
        self._stop_serving = weakref.finalize(self, in_this_process(_stop), server, listen)
        logger.info("/metrics is at %s", server.url)
        return server.url

    def _forget_exports(self) -> None:
        self._shown = self._recording = self._server = self._withdraw = None
        self._are_open = False

    def _open_exports(self) -> None:
        """Do what was asked for, by variables too, once the workers run, which must not inherit a socket."""
        if self._are_open:
            return
        self._are_open = True
        settings, publisher = self._options.settings(), self.meter.publisher
        folder = self.record_in or settings.record
        if folder is not None and self._recording is None:
            self._recording = Recording(folder, described(replace(self._options, device=publisher.device)))
            publisher.readers.append(self._recording.add)
        if settings.metrics is not None and self._schedule.topology.local_rank == 0:
            self.serve_metrics(settings.metrics)

    def close(self) -> None:
        """Take back the page, and end a recording, as the next workers are another run. Idempotent."""
        if self._recording is not None:
            self._recording.finish()
            self.meter.publisher.readers.remove(self._recording.add)
        if self._server is not None:
            self._stop_serving()
        if self._withdraw is not None:
            self._withdraw()
        self._forget_exports()


def described(given: LoaderOptions) -> Mapping[str, Any]:
    """The options of a loader, for people; without secrets, URLs and paths of the data."""
    settings: Settings = given.settings()
    sources = ", ".join(f"{source.name}: {len(source.urls):,} shards" for source in given.sources)
    shown: dict[str, Any] = {
        "sources": sources,
        "batch_size": given.batch_size,
        "num_workers": given.num_workers,
        "train": given.train,
        "output": given.output,
        "device": str(given.device),
        "seed": given.seed,
    }
    for option in options():
        if not option.is_secret and option.name not in ("metrics", "record"):
            shown[option.name] = str(getattr(settings, option.name))
    return shown | {
        "streamload": version("streamload"),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def _stop(server: MetricsServer, listen: str) -> None:
    server.close()
    _serving.discard(listen)
