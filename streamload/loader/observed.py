"""A loader's view of its run: counters, a verdict, alerts, a trace; a port for Prometheus, a recording.

By default there is neither port nor recording: other processes read the page that each rank publishes
(meter.py). A port that is taken and a disk that is full are logged, and the training goes on.
"""

from __future__ import annotations

import logging
import platform
import weakref
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from streamload.cache.placement import memory_root
from streamload.daemon.metrics_server import DEFAULT_LISTEN, MetricsServer
from streamload.errors import OptionError
from streamload.ipc import ControlBlock
from streamload.loader.checks import ShardWaits
from streamload.loader.fork_safety import in_this_process
from streamload.loader.meter import LONGEST_SECONDS, Meter, OnAlert
from streamload.loader.options import LoaderOptions
from streamload.loader.schedule import Schedule
from streamload.loader.trace import Trace
from streamload.metrics import Snapshot
from streamload.metrics.live import live_rank
from streamload.metrics.page import RunPage
from streamload.metrics.recording import Recording
from streamload.metrics.verdict import Verdict
from streamload.options import Settings, options
from streamload.options.values import at_least

logger = logging.getLogger("streamload")

_serving: set[str] = set()
"""Addresses at which this process serves: of several loaders one does, with all runs of the node."""


class Observed:
    """The part of a loader that shows how its run goes.

    Attributes:
        options: of the loader.
        meter: of what the training loop does.
    """

    options: LoaderOptions
    meter: Meter
    _schedule: Schedule
    _control: ControlBlock
    _waits: ShardWaits
    _trace: Trace | None
    _on_alert: list[OnAlert]
    _record_in: Path | None = None
    _shown: RunPage | None  # at the last call of `metrics`
    _recording: Recording | None
    _server: MetricsServer | None
    _are_open: bool

    def stats(self) -> Snapshot:
        """The counters of all processes of this rank so far. Cheap; at any time."""
        names = [source.name for source in self.options.sources]
        by_source = dict(zip(names, self._control.by_source.sum(axis=0), strict=True))
        return Snapshot.of(self._control.counters, by_source, self._waits.worst())

    def verdict(self, seconds: float = 60.0) -> Verdict:
        """Verdict on what has limited the training over the last seconds: data, or the training itself.

        `print` it for a sentence. Cheap; at any time. The log has the same every five minutes, and after each
        epoch, if the training has waited more than 5 % of that time for data.

        Args:
            seconds: at most 600; less if the first batch came later.

        Raises:
            OptionError: another number of seconds.
        """
        if not 0 < seconds <= LONGEST_SECONDS:
            raise OptionError(f"seconds={seconds}; expected a number up to {LONGEST_SECONDS:g}")
        return self.meter.verdict(seconds)

    def on_alert(self, call: OnAlert) -> None:
        """Call a function with each Alert that is raised or cleared, from now on (docs/guides/metrics.md).

        The training waits for data, its origin is slow or fails, the cache thrashes, a source starves, memory
        is tight, another rank is late, or nothing moves. An alert is raised after half a minute, and cleared
        after half a minute below half of its limit.

        Args:
            call: called by `next`, or in a thread of this process where the training stands still. What it
                raises is logged once, and changes nothing.

        Raises:
            OptionError: it can't be called.
        """
        if not callable(call):
            raise OptionError(
                f"on_alert() was given a {type(call).__name__}; expected a function of one Alert"
            )
        self._on_alert.append(call)

    def trace(self, steps: int = 20) -> Trace:
        """Record what the workers and the fills of this rank do, from now on for a number of steps.

        `Trace.merge` adds it to the trace that torch.profiler's `export_chrome_trace` wrote, as rows of their
        own: batches, waits for bytes and fills of each worker, and the data waits of the training.

        Args:
            steps: batches that the training loop takes until the recording ends.
        """
        at_least(1, steps=steps)
        if self._trace is not None:
            self._trace.stop()
        self._trace = Trace(self._control, steps)
        return self._trace

    def metrics(self) -> dict[str, float]:
        """The numbers of this rank since the last call, as one flat dict for a tracker; {} before `iter()`.

        Rates, shares and levels: samples per second, the share of waiting for data, that of each stage in the
        workers' time, cache hits, and by source its share, weight and loss. Cheap; one caller at a time.
        """
        page = self.meter.page()
        if page is None:
            return {}
        before, self._shown = self._shown, page
        return live_rank(page, before).flat()

    def record(self, folder: str | Path) -> None:
        """Record this rank's numbers for `streamload report`, from the next second on.

        The file stays below a megabyte. STREAMLOAD_RECORD does this for every loader.

        Args:
            folder: is made if it is missing; ranks and runs have files of their own in it.
        """
        self._record_in = Path(folder)
        self._are_open = False
        if self.meter.page() is not None:
            self._open_exports()

    def serve_metrics(self, listen: str = DEFAULT_LISTEN) -> str | None:
        """Serve the metrics of this node's runs to Prometheus, from this process, until the loader is closed.

        STREAMLOAD_METRICS does this on the first rank of a node. `streamload metrics serve` needs no port in
        the training.

        Args:
            listen: address and port; port 0: any.

        Returns:
            Its URL; None if it is taken, which is logged, or if this process serves there already.

        Raises:
            OptionError: it isn't an address and port.
        """
        if self._server is not None or listen in _serving:
            return None
        settings = self.options.settings()
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

    def _reset_exports(self) -> None:
        """Start without any: those of the process that this one was forked from aren't its own."""
        self._shown = self._recording = self._server = None
        self._are_open = False

    def _open_exports(self) -> None:
        """Do what was asked for, by variables too, once the workers run, which must not inherit a socket."""
        if self._are_open:
            return
        self._are_open = True
        settings, publisher = self.options.settings(), self.meter.publisher
        folder = self._record_in or settings.record
        if folder is not None and self._recording is None:
            self._recording = Recording(folder, described(self.options))
            publisher.readers.append(self._recording.add)
        if settings.metrics is not None and self._schedule.topology.local_rank == 0:
            self.serve_metrics(settings.metrics)

    def _close_exports(self) -> None:
        """End a recording, as the next workers are another run, and the server. Idempotent."""
        if self._recording is not None:
            self._recording.finish()
            self.meter.publisher.readers.remove(self._recording.add)
        if self._server is not None:
            self._stop_serving()
        self._reset_exports()


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
