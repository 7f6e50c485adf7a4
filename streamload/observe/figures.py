"""Figures of an interval of one rank: the difference of two samples of its counters. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.metrics.counters import Snapshot
from streamload.metrics.findings import SlowestRank
from streamload.metrics.registry import COUNTERS

_HAND_OVER = list(COUNTERS).index("hand_over_ns")
_MANY = 1.5
"""A history keeps samples of this many times the longest interval that is asked for."""


class CounterSample(NamedTuple):
    """A rank's counters at one moment.

    Attributes:
        at_ns: of a monotonic clock.
        row: int64[WIDTH], the sum over processes; the current wait of the training loop is counted up to now.
        rank_row: int64[WIDTH], of the training's process alone.
        by_source: int64[sources, 2]: samples taken, and nanoseconds waited for bytes.
        by_shard: nanoseconds of data wait by shard, for those with the longest waits.
    """

    at_ns: int
    row: NDArray[np.int64]
    rank_row: NDArray[np.int64]
    by_source: NDArray[np.int64]
    by_shard: Mapping[int, int] = MappingProxyType({})


class Machine(NamedTuple):
    """Context in which figures are judged, beside counters.

    Attributes:
        workers: of the rank; 0: the training's process makes batches.
        cores: that this rank may use.
        is_local: the shards are files that are read in place.
        prepare: as given to make_loader; "": images aren't prepared.
        sources: their names.
        is_on_host: nothing moves the batches to a device, and the process uses an accelerator.
        functions: the argument whose function has most of a stage's time, by stage.
        shard_name: names a shard by its index.
    """

    workers: int = 4
    cores: int = 8
    is_local: bool = False
    sources: tuple[str, ...] = ("0",)
    prepare: str = ""
    is_on_host: bool = False
    functions: Mapping[str, str] = MappingProxyType({})
    shard_name: Callable[[int], str] = "shard {}".format


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of an interval.

    Attributes:
        seconds: its length.
        machine: of the rank.
        counted: what was counted in it; the registry describes the counters.
        rank_hand_over_seconds: of counted.data_wait_seconds, those in which the training's process received
            batches.
        shard_waits: seconds of counted.data_wait_seconds by shard, for those with the longest waits.
        waiting_seconds: how long the training loop has been waiting for its next batch, at the end.
        still_seconds: how long it has neither requested nor got one, at the end.
        memory_ratio: how much of the memory, or of the device's, is taken, at the end; 0: unknown.
        slowest: the rank that waits most for data, of the other ranks; None: unknown.
    """

    seconds: float
    machine: Machine = field(default_factory=Machine)
    counted: Snapshot = field(default_factory=Snapshot)
    rank_hand_over_seconds: float = 0.0
    shard_waits: dict[int, float] = field(default_factory=dict)
    waiting_seconds: float = 0.0
    still_seconds: float = 0.0
    memory_ratio: float = 0.0
    slowest: SlowestRank | None = None

    @property
    def wait(self) -> float:
        """The share of the interval in which the training loop waited for data, 0 to 1."""
        waited_seconds = self.counted.data_wait_seconds
        return min(1.0, max(0.0, waited_seconds / self.seconds)) if self.seconds > 0 else 0.0

    def share(self, *stages: str) -> float:
        """The share of the workers' time that they spent in these stages; without workers, of the wait."""
        workers, seconds_by_stage = self.machine.workers, self.counted.stages
        seconds_by_stage["features"] = self.counted.feature_read_seconds
        time = workers * self.seconds if workers > 0 else self.counted.data_wait_seconds
        return min(1.0, sum(seconds_by_stage[stage] for stage in stages) / time) if time > 0 else 0.0

    @classmethod
    def between(cls, first: CounterSample, last: CounterSample, machine: Machine) -> Figures:
        """The figures of the interval between two samples."""
        by_source = dict(zip(machine.sources, (last.by_source - first.by_source).tolist(), strict=False))
        return cls(
            seconds=(last.at_ns - first.at_ns) / 1e9,
            machine=machine,
            counted=Snapshot.of((last.row - first.row)[None], by_source),
            rank_hand_over_seconds=int(last.rank_row[_HAND_OVER] - first.rank_row[_HAND_OVER]) / 1e9,
            shard_waits={
                shard: max(0, ns - first.by_shard.get(shard, 0)) / 1e9 for shard, ns in last.by_shard.items()
            },
        )


class History:
    """The samples of the last minutes, at most one a second.

    Args:
        longest_seconds: the longest interval that is asked for.
    """

    def __init__(self, longest_seconds: float):
        self._longest_ns = int(longest_seconds * _MANY * 1e9)
        self._samples: deque[CounterSample] = deque()

    def add(self, sample: CounterSample) -> None:
        """Add a sample, later than all others; those that are too old go."""
        self._samples.append(sample)
        while sample.at_ns - self._samples[0].at_ns > self._longest_ns:
            self._samples.popleft()

    def last(self, seconds: float, until: CounterSample) -> CounterSample:
        """The latest sample that is at least so many seconds older than `until`, else the oldest one."""
        earlier = self._samples[0] if self._samples else until
        for sample in reversed(self._samples):
            earlier = sample
            if until.at_ns - sample.at_ns >= seconds * 1e9:
                break
        return earlier
