"""A timeline: the recordings of a run's ranks on one grid of time, as rates, shares and levels. Pure.

Counters are interpolated at the edges of the grid, so recordings of any pace go together. What is drawn of
it, and how, is report.py's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.errors import OptionError
from streamload.metrics.registry import BUCKET_NS, BUCKETS, STAGES
from streamload.observe.page import RunPage
from streamload.observe.recording import Recorded, Skipped

Numbers = NDArray[np.float64]
STEPS = 180
"""Most steps of the grid."""


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
        return self._grown(lambda moment: sum(moment.counters.get(name, 0) for name in names))

    def rate(self, *names: str) -> Numbers:
        """float64[ranks, steps]: the growth of counters in a second; of times, seconds per second."""
        rates: Numbers = self.counted(*names) / np.diff(self.edges)
        return rates / 1e9 if names[0].endswith("_ns") else rates

    def gauge(self, name: str, label: str = "") -> Numbers:
        """float64[ranks, steps]: a gauge's value in the middle of each step; NaN where it is unknown."""
        labels = (label,) if label else ()
        return self._values(lambda moment: moment.gauge(name, *labels), self.middles, is_from_zero=False)

    def level(self, row: str) -> Numbers:
        """float64[ranks, steps]: the value of a gauge that is in rows, in the middle of each step."""
        return self._values(lambda moment: max(0, moment.counters.get(row, 0)), self.middles)

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
        sums: Numbers = np.nansum(self._grown(lambda moment: moment.gauge(name, label) or 0), axis=0)
        return sums

    def total(self, name: str) -> int:
        """A counter at the end, over all ranks."""
        return sum(rank.moments[-1].counters.get(name, 0) for rank in self.ranks if rank.moments)

    def stages(self) -> dict[str, Numbers]:
        """The stages of workers with their seconds per second, over all ranks: float64[steps] each."""
        of_workers = [row for row in STAGES if row.labels[0] not in ("training", "device")]
        return {row.labels[0]: np.nansum(self.rate(row.name), axis=0) for row in of_workers}

    def epochs(self) -> list[tuple[float, int]]:
        """When each epoch but the first began, in seconds of the run, by the first rank."""
        rank = next(rank for rank in self.ranks if rank.moments)
        starts: dict[int, tuple[float, int]] = {}
        for moment in rank.moments:
            samples = moment.counters.get("samples_yielded", 0)
            second = self._start(rank) + moment.run_seconds
            starts.setdefault(int(moment.gauge("epoch") or 0), (second, samples))
        first, last = min(starts), rank.moments[-1].counters.get("samples_yielded", 0)
        return [(second, epoch) for epoch, (second, n) in starts.items() if epoch != first and n < last]

    def skipped(self) -> list[Skipped]:
        """The first samples that the ranks could not use, as recorded."""
        return [sample for rank in self.ranks for sample in rank.skipped]

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

    def _grown(self, value: Callable[[RunPage], float]) -> Numbers:
        """float64[ranks, steps]: the growth of a value in each step."""
        grown: Numbers = np.clip(np.diff(self._values(value, self.edges)), 0, None)
        return grown

    def _values(
        self, value: Callable[[RunPage], float | None], times: Numbers, *, is_from_zero: bool = True
    ) -> Numbers:
        """float64[ranks, times]: the values at times of the run.

        Args:
            value: of a moment; None: unknown.
            times: in seconds.
            is_from_zero: it is 0 at first, and NaN after a rank's last moment; else NaN before its first one,
                and what it was last after that.
        """
        by_rank = []
        outside = {"right": np.nan} if is_from_zero else {"left": np.nan}
        for rank in self.ranks:
            points = [(m.run_seconds, float(v)) for m in rank.moments if (v := value(m)) is not None]
            if not points:
                by_rank.append(np.full(len(times), np.nan))
                continue
            seconds, values = map(
                np.array, zip(*([(0.0, 0.0)] if is_from_zero else []), *points, strict=True)
            )
            by_rank.append(np.interp(times, seconds + self._start(rank), values, **outside))
        return np.array(by_rank)


def flow(rate: Numbers) -> float:
    """The coefficient of variation of a rate over time: 0 is perfectly steady. NaNs don't count."""
    finite = rate[np.isfinite(rate)]
    return float(finite.std() / finite.mean()) if len(finite) and finite.mean() > 0 else 0.0
