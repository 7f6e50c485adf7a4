"""A timeline: the recordings of a run's ranks on one grid of time, as rates, shares and levels. Pure.

Counters are interpolated at the edges of the grid, so recordings of any pace go together. What is drawn of
it, and how, is report.py's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.errors import OptionError
from streamload.metrics.registry import BUCKET_NS, BUCKETS, STAGES
from streamload.observe.recording import Recorded

Numbers = NDArray[np.float64]
STEPS = 180
"""Of the grid, at most."""


@dataclass(frozen=True)
class Timeline:
    """The ranks of one run.

    Args:
        ranks: their recordings; not empty.

    Raises:
        OptionError: nothing is recorded yet.
    """

    ranks: tuple[Recorded, ...]

    def __post_init__(self) -> None:
        if all(len(rank.moments) < 2 for rank in self.ranks):
            raise OptionError(
                f"run {self.ranks[0].about['run']} has no two moments on record: a rank records one a second"
            )

    @functools.cached_property
    def seconds(self) -> float:
        """From the making of the first loader to the last moment."""
        ends = [self._start(rank) + rank.moments[-1].run_seconds for rank in self.ranks if rank.moments]
        return float(max(ends))

    @functools.cached_property
    def edges(self) -> Numbers:
        """float64[steps + 1]: the grid in seconds; its steps have two moments or more on average."""
        most = max(len(rank.moments) for rank in self.ranks)
        return np.linspace(0.0, self.seconds, max(2, min(STEPS, most // 2)) + 1)

    @functools.cached_property
    def middles(self) -> Numbers:
        """float64[steps]: the middle of each step, in seconds."""
        edges = self.edges
        middles: Numbers = (edges[1:] + edges[:-1]) / 2
        return middles

    def counted(self, *names: str) -> Numbers:
        """float64[ranks, steps]: the growth of counters in each step; NaN after a rank's last moment."""
        edges = self.edges
        return np.array([self._counted(rank, names, edges) for rank in self.ranks])

    def rate(self, *names: str) -> Numbers:
        """float64[ranks, steps]: the growth of counters in a second; of times, seconds per second."""
        rates: Numbers = self.counted(*names) / np.diff(self.edges)
        return rates / 1e9 if names[0].endswith("_ns") else rates

    def gauge(self, name: str, label: str = "") -> Numbers:
        """float64[ranks, steps]: a gauge's value in the middle of each step; NaN where it is unknown."""
        return np.array([self._gauge(rank, name, label) for rank in self.ranks])

    def level(self, row: str) -> Numbers:
        """float64[ranks, steps]: the value of a gauge that is in rows, in the middle of each step."""
        by_rank = []
        for rank in self.ranks:
            points = [(m.run_seconds, float(max(0, m.counters.get(row, 0)))) for m in rank.moments]
            by_rank.append(self._interpolated(rank, points, self.middles))
        return np.array(by_rank)

    def labels(self, name: str) -> list[str]:
        """The labels under which a gauge has values."""
        labels = (
            ",".join(labels)
            for rank in self.ranks
            for moment in rank.moments
            for labels in moment.gauges.get(name, {})
        )
        return list(dict.fromkeys(labels))

    def grown(self, name: str, label: str) -> Numbers:
        """float64[steps]: the growth of a counter that is given by labels, over all ranks."""
        edges = self.edges
        sums = np.zeros(len(edges) - 1)
        for rank in self.ranks:
            points = [(m.run_seconds, m.gauge(name, label) or 0.0) for m in rank.moments]
            sums += np.nan_to_num(np.clip(np.diff(self._interpolated(rank, points, edges)), 0, None))
        return sums

    def total(self, name: str) -> int:
        """A counter at the end, over all ranks."""
        return sum(rank.moments[-1].counters.get(name, 0) for rank in self.ranks if rank.moments)

    def stages(self) -> dict[str, Numbers]:
        """The stages of workers with their seconds per second, over all ranks: float64[steps] each."""
        of_workers = [row for row in STAGES if row.labels[0] not in ("training", "device")]
        return {row.labels[0]: np.nansum(self.rate(row.name), axis=0) for row in of_workers}

    def wait_quantile(self, share: float) -> float:
        """The bound in seconds below which this share of all data waits lay; 0 without any."""
        buckets = self.wait_buckets()
        if not sum(buckets):
            return 0.0
        place = int(np.searchsorted(np.cumsum(buckets), share * sum(buckets)))
        return float(BUCKET_NS << min(place, BUCKETS - 1)) / 1e9

    def wait_buckets(self) -> list[int]:
        """The histogram of data waits at the end, over all ranks."""
        ends = [rank.moments[-1].wait_buckets for rank in self.ranks if rank.moments]
        return [sum(bucket) for bucket in zip(*ends, strict=True)]

    def _start(self, rank: Recorded) -> float:
        """When a rank's loader was made, in seconds after the first one's, by the machines' clocks."""
        first = min(float(recorded.about["began"]) for recorded in self.ranks)
        return float(rank.about["began"]) - first

    def _counted(self, rank: Recorded, names: Sequence[str], edges: Numbers) -> Numbers:
        points = [
            (m.run_seconds, float(sum(m.counters.get(name, 0) for name in names))) for m in rank.moments
        ]
        grown: Numbers = np.clip(np.diff(self._interpolated(rank, points, edges)), 0, None)
        return grown

    def _interpolated(self, rank: Recorded, points: list[tuple[float, float]], times: Numbers) -> Numbers:
        """Values of a rank at times of the run; NaN after its last moment."""
        if not points:
            return np.full(len(times), np.nan)
        seconds, values = map(np.array, zip((0.0, 0.0), *points, strict=True))
        values_at: Numbers = np.interp(times, seconds + self._start(rank), values, right=np.nan)
        return values_at

    def _gauge(self, rank: Recorded, name: str, label: str) -> Numbers:
        labels = (label,) if label else ()
        values_by_time = ((m.run_seconds, m.gauge(name, *labels)) for m in rank.moments)
        points = [(second, value) for second, value in values_by_time if value is not None]
        if not points:
            return np.full(len(self.middles), np.nan)
        seconds, values = map(np.array, zip(*points, strict=True))
        values_at: Numbers = np.interp(self.middles, seconds + self._start(rank), values, left=np.nan)
        return values_at


def flow(rate: Numbers) -> float:
    """The coefficient of variation of a rate over time: 0 is perfectly steady. NaNs don't count."""
    finite = rate[np.isfinite(rate)]
    return float(finite.std() / finite.mean()) if len(finite) and finite.mean() > 0 else 0.0
