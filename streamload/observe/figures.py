"""Figures of an interval of one rank: the difference of two samples of its counters. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.metrics.registry import COUNTERS, STAGES
from streamload.node import SlowestRank

_PLACES = {name: place for place, name in enumerate(COUNTERS)}
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
        cores: that this process may use.
        is_local: the shards are local files.
        prepare: as given to make_loader; "": images aren't prepared.
        sources: their names.
        rank: of this process.
        is_on_host: nothing moves the batches to a device, and the process uses an accelerator.
        functions: the argument whose function has most of a stage's time, by stage.
        shard_name: names a shard by its index.
    """

    workers: int = 4
    cores: int = 8
    is_local: bool = False
    sources: tuple[str, ...] = ("0",)
    rank: int = 0
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
        waited_seconds: for which the training loop waited for data.
        blocked_seconds: of these, those for batches whose worker lacked bytes at that time.
        rank_hand_over_seconds: of these, those in which the training's process received batches.
        stages: seconds by stage, summed over workers.
        feature_seconds: for which the training's process computed features.
        batches, samples: that the training loop took.
        unprepared: samples whose images weren't prepared, though the training asks for it.
        origin_bytes, origin_requests, origin_retries, origin_outages: see the registry.
        shared_bytes: from the shared cache.
        shared_wait_seconds: for which fills waited for those of other nodes, added up.
        started, evicted: shards whose reading started in a pass, and that were evicted.
        range_reads: samples that were read from their origin, as the cache has no room.
        source_waits: seconds for which workers waited for bytes, by source.
        shard_waits: seconds of waited_seconds by shard, for those with the longest waits.
        waiting_seconds: how long the training loop has been waiting for its next batch, at the end.
        still_seconds: how long it has neither requested nor got one, at the end.
        memory_ratio: how much of the memory, or of the device's, is taken, at the end; 0: unknown.
        slowest: the rank that waits most for data, of the other ranks; None: unknown.
    """

    seconds: float
    machine: Machine = field(default_factory=Machine)
    waited_seconds: float = 0.0
    blocked_seconds: float = 0.0
    rank_hand_over_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    feature_seconds: float = 0.0
    batches: int = 0
    samples: int = 0
    unprepared: int = 0
    origin_bytes: int = 0
    origin_requests: int = 0
    origin_retries: int = 0
    origin_outages: int = 0
    shared_bytes: int = 0
    shared_wait_seconds: float = 0.0
    started: int = 0
    evicted: int = 0
    range_reads: int = 0
    source_waits: dict[str, float] = field(default_factory=dict)
    shard_waits: dict[int, float] = field(default_factory=dict)
    waiting_seconds: float = 0.0
    still_seconds: float = 0.0
    memory_ratio: float = 0.0
    slowest: SlowestRank | None = None

    @property
    def wait(self) -> float:
        """The share of the interval in which the training loop waited for data, 0 to 1."""
        return min(1.0, max(0.0, self.waited_seconds / self.seconds)) if self.seconds > 0 else 0.0

    def share(self, *stages: str) -> float:
        """The share of the workers' time that they spent in these stages; without workers, of the wait."""
        has_workers = self.machine.workers > 0
        time = self.machine.workers * self.seconds if has_workers else self.waited_seconds
        return min(1.0, sum(self.stages.get(stage, 0.0) for stage in stages) / time) if time > 0 else 0.0

    @classmethod
    def between(cls, first: CounterSample, last: CounterSample, machine: Machine) -> Figures:
        """The figures of the interval between two samples."""

        def count(name: str) -> int:
            return int(last.row[_PLACES[name]] - first.row[_PLACES[name]])

        def seconds(name: str) -> float:
            return count(name) / 1e9

        hand_over = _PLACES["hand_over_ns"]
        waits = (last.by_source - first.by_source)[:, 1].tolist()
        return cls(
            seconds=(last.at_ns - first.at_ns) / 1e9,
            machine=machine,
            waited_seconds=seconds("data_wait_ns"),
            blocked_seconds=seconds("blocked_wait_ns"),
            rank_hand_over_seconds=int(last.rank_row[hand_over] - first.rank_row[hand_over]) / 1e9,
            stages={row.labels[0]: seconds(row.name) for row in STAGES}
            | {"features": seconds("feature_read_ns")},
            feature_seconds=seconds("feature_compute_ns"),
            batches=count("batches_yielded"),
            samples=count("samples_yielded"),
            unprepared=count("samples_unprepared"),
            origin_bytes=count("origin_bytes"),
            origin_requests=count("origin_requests"),
            origin_retries=count("origin_retries"),
            origin_outages=count("origin_outages"),
            shared_bytes=count("shared_bytes"),
            shared_wait_seconds=seconds("shared_wait_ns"),
            started=count("tier_hits") + count("tier_misses"),
            evicted=count("shards_evicted"),
            range_reads=count("range_reads"),
            shard_waits={
                shard: max(0, ns - first.by_shard.get(shard, 0)) / 1e9 for shard, ns in last.by_shard.items()
            },
            source_waits={name: waited / 1e9 for name, waited in zip(machine.sources, waits, strict=False)},
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

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()

    @property
    def first(self) -> CounterSample | None:
        """The oldest sample."""
        return self._samples[0] if self._samples else None

    def last(self, seconds: float, until: CounterSample) -> CounterSample:
        """The latest sample that is at least so many seconds older than `until`, else the oldest one."""
        earlier = self._samples[0] if self._samples else until
        for sample in reversed(self._samples):
            earlier = sample
            if until.at_ns - sample.at_ns >= seconds * 1e9:
                break
        return earlier
