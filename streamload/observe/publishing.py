"""Page that a rank publishes, with its values that aren't counted in rows: tier, sources, memory."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from streamload.cache.locks import usage_of
from streamload.cache.memory import taken_ratio
from streamload.descriptors import Descriptor
from streamload.device import memory_of
from streamload.metrics import COUNTERS
from streamload.metrics.registry import BY_NAME
from streamload.observe.figures import CounterSample, Figures
from streamload.observe.page import Labels, PageFile, RunPage, names_of_sources, now
from streamload.observe.verdict import LITTLE, judge
from streamload.options import file_system
from streamload.order.events import UNIT, Event
from streamload.topology import Topology

if TYPE_CHECKING:
    from streamload.cache.tier import Tier

_YIELDED = list(COUNTERS).index("batches_yielded")
_SELDOM_SECONDS = 10.0
"""Interval of measurements that take more than some microseconds."""


class Gauges:
    """The latest values of metrics, by name and labels. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {}

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a value; one that isn't a number takes the value away.

        Args:
            name: of a metric whose values the loader gives (registry.py).
            value: in the metric's unit.
            labels: the values of its labels.

        Raises:
            KeyError: no metric has this name.
            ValueError: the metric has other labels.
        """
        metric = BY_NAME[name]
        if len(labels) != len(metric.labels) or metric.rows:
            raise ValueError(f"{name} is given with {len(metric.labels)} labels, not {len(labels)}")
        values = self._values.setdefault(name, {})
        if math.isfinite(value):
            values[labels] = float(value)
        else:
            values.pop(labels, None)

    def values(self) -> dict[str, dict[Labels, float]]:
        """A copy of all of them, by name and labels."""
        return {name: dict(values) for name, values in list(self._values.items())}


class RankProgress(NamedTuple):
    """Progress of a rank.

    Attributes:
        epoch: of the training loop.
        passes: the pass of the first source, by its cursor, which is up to a window behind; empty before.
        weights: of the sources, as set last; None: not settled yet.
        left_out: samples left out so far, by what left them out.
    """

    epoch: int
    passes: Sequence[int]
    weights: Event | None
    left_out: Mapping[str, int]


class Publisher:
    """The page of one rank.

    Args:
        topology: returns that of the run.
        progress: returns that of the rank.
        workers: its worker processes.
        sources: names of its sources.
        names: the same, as they are shown.
        extension_metrics: returns the numbers of extensions by name.

    Attributes:
        gauges: the values that aren't counted in rows; anyone in this process may set more.
        memory_ratio: how much of the machine's memory is taken, or of the container's, or of the device's if
            that is more.
        readers: called with each page that is published.
        passes: of each source, the pass of the samples that were taken last; none: there is one source.
    """

    def __init__(
        self,
        topology: Callable[[], Topology],
        progress: Callable[[], RankProgress],
        workers: int,
        sources: Sequence[str],
        names: tuple[str, ...],
        extension_metrics: Callable[[], Mapping[str, float]],
    ):
        self.gauges = Gauges()
        self.memory_ratio = 0.0
        self.readers: list[Callable[[RunPage], None]] = []
        self.passes: Sequence[int] = ()
        self._topology, self._progress = topology, progress
        self._workers, self._sources, self._names = workers, sources, names
        self._extension_metrics = extension_metrics
        self._file: PageFile | None = None
        self._tier: Tier | None = None
        self._next_seldom = self._next_memory = 0.0
        self._fixed: dict[str, Any] = {}

    def open(self, file: PageFile, tier: Tier, run: str) -> None:
        """Publish in this file from now on.

        Args:
            file: of the page; its owner closes it.
            tier: that the rank reads.
            run: its name.
        """
        topology = self._topology()
        self._file, self._tier = file, tier
        self._fixed = {
            "run": run,
            "rank": topology.rank,
            "world_size": topology.world_size,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "began": now(),
            "workers": self._workers,
            "sources": self._names,
        }

    def look(
        self,
        sample: CounterSample,
        figures: Figures,
        reported: Sequence[Mapping[str, Any]],
    ) -> None:
        """Set the gauges.

        Args:
            sample: the counters now.
            figures: of the last minute.
            reported: means by source of what the training reports.
        """
        put, progress = self.gauges.set, self._progress()
        put("data_wait_ratio", figures.wait)
        put("waiting_seconds", figures.waiting_seconds)
        put("still_seconds", figures.waiting_seconds or figures.still_seconds)
        put("workers", self._workers)
        put("epoch", progress.epoch)
        for name, (samples, waited_ns) in zip(self._names, sample.by_source.tolist(), strict=False):
            put("samples", samples, name)
            put("source_wait_seconds", waited_ns / 1e9, name)
        if progress.weights is not None:
            weights, shares = progress.weights.value["weights"], progress.weights.value["shares"]
            for name, weight, share in zip(self._names, weights, shares, strict=False):
                put("source_weight", weight, name)
                put("source_share", share / UNIT, name)
        shown_names = dict(zip(self._sources, self._names, strict=False))
        for means in reported:
            for kind in ("loss", "alignment", "loss_weight"):
                if means.get(kind) is not None and means["name"] in shown_names:
                    put(f"source_{kind}", means[kind], shown_names[means["name"]])
        left_out = progress.left_out
        for name, count in zip(names_of_sources(left_out), left_out.values(), strict=False):
            put("samples_left_out", count, name)
        numbers = self._extension_metrics()
        for name, value in zip(names_of_sources(numbers), numbers.values(), strict=False):
            put("extension_value", value, name)
        if time.monotonic() >= self._next_seldom:
            self._next_seldom = time.monotonic() + _SELDOM_SECONDS
            self._look_at_tier()
            for name, number in zip(self._names, self.passes or progress.passes, strict=False):
                put("source_passes", number, name)

    def look_at_memory(self, sample: CounterSample, device: torch.device | None) -> None:
        """Set `memory_ratio`; in the next ten seconds it stays.

        Args:
            sample: the counters now.
            device: of the batches; None: nothing says that they leave host memory.
        """
        if time.monotonic() < self._next_memory:
            return
        self._next_memory = time.monotonic() + _SELDOM_SECONDS
        self.memory_ratio = taken_ratio()
        memory = memory_of(device)
        if memory is not None and sample.row[_YIELDED] > 0:  # this must not be what starts the device
            ratio = memory.peak_bytes() / max(1, memory.limit_bytes())
            self.gauges.set("device_memory_ratio", ratio)
            self.memory_ratio = max(self.memory_ratio, ratio)

    def publish(
        self, sample: CounterSample, figures: Figures, run: Figures, alerts: Mapping[str, str]
    ) -> None:
        """Write the page, if there is a file for it; as for `page`."""
        if self._file is None:
            return
        page = self.page(sample, figures, run, alerts)
        self._file.write(page)
        for read in self.readers:
            read(page)

    @property
    def is_open(self) -> bool:
        """True if there is a run to publish."""
        return bool(self._fixed)

    def page(
        self, sample: CounterSample, figures: Figures, run: Figures, alerts: Mapping[str, str]
    ) -> RunPage:
        """The page of this moment, once it is open.

        Args:
            sample: the counters now.
            figures: of the last minute.
            run: of the whole run.
            alerts: those that are raised.
        """
        sums = sample.row.tolist()
        return RunPage(
            **self._fixed,
            written=now(),
            counters=dict(zip(COUNTERS, sums, strict=False)),
            wait_buckets=tuple(sums[len(COUNTERS) :]),
            gauges=self.gauges.values(),
            verdict=_verdict_on(figures),
            run_verdict=_verdict_on(run),
            alerts=alerts,
        )

    def _look_at_tier(self) -> None:
        tier = self._tier
        if tier is None:
            return
        kind = "memory" if file_system(tier.root).is_memory else "disk"
        self.gauges.set("tier_limit_bytes", tier.limit_bytes, kind)
        with contextlib.suppress(OSError), Descriptor.open(tier.root / "lock", os.O_RDONLY) as lock:
            used = usage_of(lock)
            if used is not None:
                self.gauges.set("tier_bytes", used.total, kind)


def _verdict_on(figures: Figures) -> str:
    """A verdict in words; "" if the training doesn't wait."""
    return str(judge(figures)) if figures.wait >= LITTLE else ""
