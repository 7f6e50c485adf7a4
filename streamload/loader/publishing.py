"""Page that a rank publishes, with its values that aren't counted in rows: tier, sources, memory."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from streamload.cache.locks import usage_of
from streamload.cache.memory import taken_ratio
from streamload.cache.runs import PageFile, now
from streamload.cache.tier import Tier
from streamload.descriptors import Descriptor
from streamload.device import memory_of
from streamload.loader.options import LoaderOptions
from streamload.loader.schedule import Schedule
from streamload.metrics import COUNTERS
from streamload.metrics.figures import Figures, Sample
from streamload.metrics.gauges import Gauges
from streamload.metrics.page import RunPage
from streamload.metrics.verdict import LITTLE, Verdict, judge
from streamload.options import file_system
from streamload.order.events import UNIT, WEIGHTS

_YIELDED = list(COUNTERS).index("batches_yielded")
_SELDOM_SECONDS = 10.0
"""Interval of measurements that take more than some microseconds."""


class Publisher:
    """The page of one rank.

    Args:
        options: of the loader.
        schedule: of its epochs.
        names: of its sources, as they are shown.

    Attributes:
        gauges: the values that aren't counted in rows; anyone in this process may set more.
        memory_ratio: how much of the machine's memory is taken, or of the container's, or of the device's if
            that is more.
        device: of the batches; None: nothing says that they leave host memory.
        readers: called with each page that is published.
        passes: of each source, the pass of the samples that were taken last; none: there is one source.
    """

    def __init__(self, options: LoaderOptions, schedule: Schedule, names: tuple[str, ...]):
        self.gauges = Gauges()
        self.memory_ratio = 0.0
        self.device: torch.device | None = None
        self.readers: list[Callable[[RunPage], None]] = []
        self.reported: Sequence[Mapping[str, Any]] = ()
        self.passes: Sequence[int] = ()
        self._options, self._schedule, self._names = options, schedule, names
        self._file: PageFile | None = None
        self._tier: Tier | None = None
        self._next_seldom = 0.0
        self._fixed: dict[str, Any] = {}

    def open(self, file: PageFile, tier: Tier, run: str) -> None:
        """Publish in this file from now on.

        Args:
            file: of the page; its owner closes it.
            tier: that the rank reads.
            run: its name.
        """
        topology = self._schedule.topology
        self._file, self._tier = file, tier
        self._fixed = {
            "run": run,
            "rank": topology.rank,
            "world_size": topology.world_size,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "began": now(),
            "workers": self._options.num_workers,
            "sources": self._names,
        }

    def put_by_source(self, metric: str, values: Mapping[str, float]) -> None:
        """Set a metric of sources.

        Args:
            metric: such as "source_loss"; see the registry.
            values: by the sources' names as they were given; a NaN takes the value away.
        """
        for source, name in zip(self._options.sources, self._names, strict=False):
            if source.name in values:
                self.gauges.set(metric, values[source.name], name)

    def look(self, sample: Sample, figures: Figures) -> None:
        """Set the gauges.

        Args:
            sample: the counters now.
            figures: of the last minute.
        """
        put, tracker = self.gauges.set, self._schedule.tracker
        put("data_wait_ratio", figures.wait)
        put("waiting_seconds", figures.waiting_seconds)
        put("still_seconds", figures.waiting_seconds or figures.still_seconds)
        put("workers", self._options.num_workers)
        put("epoch", tracker.now().epoch)
        for name, (samples, waited_ns) in zip(self._names, sample.by_source.tolist(), strict=False):
            put("samples", samples, name)
            put("source_wait_seconds", waited_ns / 1e9, name)
        latest = tracker.latest.get(WEIGHTS)
        if latest is not None:
            weights, shares = latest.value["weights"], latest.value["shares"]
            for name, weight, share in zip(self._names, weights, shares, strict=False):
                put("source_weight", weight, name)
                put("source_share", share / UNIT, name)
        for metric, name in (("source_loss", "loss"), ("source_alignment", "alignment")):
            by_source = {means["name"]: means[name] for means in self.reported if means.get(name) is not None}
            self.put_by_source(metric, by_source)
        if time.monotonic() >= self._next_seldom:
            self._next_seldom = time.monotonic() + _SELDOM_SECONDS
            self._look_at_tier()
            self._look_at_passes()
            self._look_at_memory(has_batches=sample.row[_YIELDED] > 0)

    def publish(self, sample: Sample, figures: Figures, run: Figures, alerts: Mapping[str, str]) -> None:
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

    def page(self, sample: Sample, figures: Figures, run: Figures, alerts: Mapping[str, str]) -> RunPage:
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
            verdict=_said(judge(figures)),
            run_verdict=_said(judge(run)),
            alerts=alerts,
        )

    def _look_at_tier(self) -> None:
        tier = self._tier
        if tier is None:
            return
        kind = "memory" if file_system(tier.root).is_memory else "disk"
        self.gauges.set("tier_limit_bytes", tier.limit_bytes, kind)
        with contextlib.suppress(OSError), Descriptor.open(tier.root / "lock", os.O_RDONLY) as lock:
            used_bytes = usage_of(lock)
            if used_bytes is not None:
                self.gauges.set("tier_bytes", used_bytes, kind)

    def _look_at_passes(self) -> None:
        passes = self.passes
        if not passes:  # a cursor is up to a window behind
            groups = self._schedule.tracker.now().groups.values()
            passes = [group.sources[0].cursor.pass_ for group in groups][:1]
        for name, number in zip(self._names, passes, strict=False):
            self.gauges.set("source_passes", number, name)

    def _look_at_memory(self, has_batches: bool) -> None:
        self.memory_ratio = taken_ratio()
        memory = memory_of(self.device)
        if memory is not None and has_batches:  # this must not be what starts the device
            ratio = memory.peak_bytes() / max(1, memory.limit_bytes())
            self.gauges.set("device_memory_ratio", ratio)
            self.memory_ratio = max(self.memory_ratio, ratio)


def _said(verdict: Verdict) -> str:
    """A verdict in words; "" if the training doesn't wait."""
    return str(verdict) if verdict.wait >= LITTLE else ""
