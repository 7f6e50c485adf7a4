"""A model of a training and its loader: when each batch is made, arrives and is taken, and what is counted.

Figures for tests of verdicts and alerts come from it, so that the time that a stage takes, and not the figure
that a rule looks at, is what a test plants. Workers make batches in turn, as torch's DataLoader does.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from streamload.metrics import COUNTERS, WIDTH
from streamload.metrics.registry import STAGES
from streamload.observe.figures import CounterSample, Figures

PLACES = {name: place for place, name in enumerate(COUNTERS)}
STAGE_SECONDS = {row.labels[0]: row.name.replace("_ns", "_seconds") for row in STAGES}


def changed(figures: Figures, stages: Mapping[str, float] | None = None, **values: Any) -> Figures:
    """Figures with other values: of fields of Figures, and of what was counted; and seconds by stage."""
    own = {name: values.pop(name) for name in list(values) if name in Figures.__dataclass_fields__}
    seconds = {STAGE_SECONDS[stage]: spent for stage, spent in (stages or {}).items()}
    return replace(figures, counted=replace(figures.counted, **values, **seconds), **own)


def figures_of(**values: Any) -> Figures:
    """Figures of a minute with these values."""
    return changed(Figures(seconds=60.0), **values)


@dataclass
class Speeds:
    """Seconds per batch.

    Attributes:
        origin: of the link, for the bytes of a batch; its bytes are `batch_bytes`.
        read, decode, pass_on: of one worker.
        receive, copy: of the training's process.
        step: of the training.
        jitter: each time is multiplied by e to a normal number of this deviation.
    """

    origin: float = 0.01
    read: float = 0.002
    decode: float = 0.02
    pass_on: float = 0.001
    receive: float = 0.0005
    copy: float = 0.0002
    step: float = 0.1
    jitter: float = 0.1
    batch_bytes: int = 25_000_000
    ahead: int = 32
    """Batches whose bytes are fetched ahead."""


@dataclass
class Rank:
    """One rank of the model.

    Args:
        speeds: of it; may be changed between two batches.
        workers: of the loader.
        cores: of the machine: more workers than these share them.
    """

    speeds: Speeds
    seed: int
    workers: int = 4
    cores: int = 16
    prefetch: int = 2
    now: float = 0.0
    row: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._free = [0.0] * self.workers
        self._taken: list[float] = []
        self._arrived = 0.0
        self._waits: list[tuple[float, float]] = []
        self._received_ns = 0

    def take(self) -> float:
        """The training loop asks for a batch now; returns when it has it."""
        number, speeds, asked = len(self._taken), self.speeds, self.now
        worker = number % self.workers
        first_without_room = number - self.prefetch * self.workers
        began = max(self._free[worker], self._taken[first_without_room] if first_without_room >= 0 else 0.0)
        fetched_from = self._taken[number - speeds.ahead] if number >= speeds.ahead else 0.0
        self._arrived = max(self._arrived, fetched_from) + self._time(speeds.origin)
        has_bytes = max(began, self._arrived)
        crowd = max(1.0, self.workers / self.cores)
        read, decode, pass_on = (
            self._time(seconds) for seconds in (speeds.read, crowd * speeds.decode, speeds.pass_on)
        )
        made = has_bytes + read + decode + pass_on
        receive, copy = self._time(speeds.receive), self._time(speeds.copy)
        got = max(asked, made) + receive + copy
        self._free[worker] = made
        self._taken.append(got)
        self._waits = [*self._waits[-50:], (asked, got)]
        blocked = sum(max(0.0, min(has_bytes, end) - max(began, start)) for start, end in self._waits)
        self._count(
            origin_bytes=speeds.batch_bytes,
            origin_requests=1,
            data_wait_ns=(got - asked) * 1e9,
            blocked_wait_ns=min(blocked, got - asked) * 1e9,
            bytes_wait_ns=(has_bytes - began) * 1e9,
            read_ns=read * 1e9,
            decode_ns=0.6 * decode * 1e9,
            resize_ns=0.3 * decode * 1e9,
            tokenize_ns=0.1 * decode * 1e9,
            hand_over_ns=(pass_on + receive) * 1e9,
            device_ns=copy * 1e9,
            batches_yielded=1,
            samples_yielded=256,
            tier_hits=1,
        )
        self._received_ns += int(receive * 1e9)
        return got

    def step(self, since: float) -> None:
        """The training takes a step from then on."""
        self.now = since + self._time(self.speeds.step)
        self._count(step_ns=(self.now - since) * 1e9)

    def sample(self) -> CounterSample:
        """The counters now."""
        row = np.zeros(WIDTH, np.int64)
        row[: len(COUNTERS)] = list(self.row.values())
        rank_row = np.zeros(WIDTH, np.int64)
        rank_row[PLACES["hand_over_ns"]] = self._received_ns
        by_source = np.array([[self.row["samples_yielded"], self.row["bytes_wait_ns"]]], np.int64)
        return CounterSample(int(self.now * 1e9), row, rank_row, by_source)

    def count(self, **more: float) -> None:
        """Count something else."""
        self._count(**more)

    def _count(self, **more: float) -> None:
        for name, n in more.items():
            self.row[name] += int(n)

    def _time(self, seconds: float) -> float:
        return seconds * self._random.lognormvariate(0.0, self.speeds.jitter)


def run(ranks: list[Rank], seconds: float) -> None:
    """Let ranks that train together take steps for so long; each waits for the slowest in every step."""
    until = max(rank.now for rank in ranks) + seconds
    while max(rank.now for rank in ranks) < until:
        got = max(rank.take() for rank in ranks)
        for rank in ranks:
            rank.step(got)
