"""A policy on a simulated training: what it decides, and how far it gets from equal shares to the best."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.worlds.world import World
from streamload.order.events import UNIT, shares_of
from streamload.steering.policy import Policy, loss_weights_of, weights_of
from streamload.steering.summary import NOTHING, PARTS, Signal, SourceSummary, Summary

Floats = NDArray[np.float64]
IN_FLIGHT_STEPS = 32
"""Steps between a decision and the first one that no worker can have begun."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated run.

    Attributes:
        world: in which it ran.
        steps: of the decisions.
        shares: in effect at each: float[len(steps), sources].
        losses: as reported in the interval before, NaN where nothing was: float[len(steps), sources].
        reasons: the policy's.
        moves: decisions that changed weights.
        samples: of each source, times their weights in the loss, in the end: float[sources].
        loss_weights: in the end: float[sources].
    """

    world: World
    steps: list[int]
    shares: Floats
    losses: Floats
    reasons: list[str]
    moves: int
    samples: Floats
    loss_weights: Floats

    @property
    def score(self) -> float:
        """0: as good as equal shares; 1: as good as the best constant shares; by the held-out loss."""
        equal, best = self.world.loss(self.world.equal()), self.world.loss(self.world.best())
        return (equal - self.world.loss(self.samples)) / (equal - best) if equal > best else 0.0


class _Training:
    """A simulated training: the samples of each source so far, the shares in effect, and what is reported.

    A row teaches as much as its weight in the loss says, and its alignment falls by a tenth of its loss.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.step = 0
        self.shares = self._later = world.equal() / world.total
        self.samples, self.learned = np.zeros(len(world.floor)), np.zeros(len(world.floor))
        self.loss_weights = np.ones(len(world.floor))
        self._changes_at = 0.0
        self._rng = np.random.default_rng([world.seed, 1])
        silent = [NOTHING] * len(world.floor)
        self._reports = deque([silent] * world.late)

    def change(self, weights: tuple[float, ...]) -> None:
        """Take other weights once the steps in flight are over."""
        self._later = np.array(shares_of(weights, (0.0,) * len(weights))) / UNIT
        self._changes_at = self.step + IN_FLIGHT_STEPS

    def run(self, stop: int) -> Iterator[list[Signal]]:
        """Train up to a step, and yield what is reported in each part of the interval."""
        edges = np.linspace(self.step, stop, PARTS + 1)
        for first, last in itertools.pairwise(edges.tolist()):
            if first >= self._changes_at:
                self.shares = self._later
            rows = self.shares * (last - first) * self.world.rows
            self.samples = self.samples + rows
            weighted = rows * self.loss_weights
            self.learned = self.learned + weighted
            time = (first + last) / 2 / self.world.steps
            means = self.world.reported(self.learned - weighted / 2, self.shares, time, self._rng, rows)
            absent = self._rng.random(len(rows)) < self.world.missing
            squares = rows * (means**2 + self.world.noise**2)
            sums = zip(rows.tolist(), (rows * means).tolist(), squares.tolist(), absent.tolist(), strict=True)
            self._reports.append([NOTHING if gone else Signal(*numbers) for *numbers, gone in sums])
            yield self._reports.popleft()
        self.step = stop


def run(world: World, policy: Policy) -> Simulated:
    """Let a policy decide the weights of a simulated training that begins with equal shares.

    Raises:
        OptionError: the policy returns weights that can't be used.
    """
    training, memory, moves = _Training(world), None, 0
    weights = tuple(training.shares.tolist())
    steps, shares, losses, reasons = [], [], [], []
    while training.step < world.steps:
        before = training.samples
        parts = list(training.run(min(training.step + policy.every, world.steps)))
        sources = tuple(
            SourceSummary(
                name,
                weights[place],
                float(training.shares[place]),
                samples=int(training.samples[place] - before[place]),
                total_samples=int(training.samples[place]),
                passes=float(training.samples[place] / size) if np.isfinite(size) else None,
                losses=tuple(part[place] for part in parts),
                alignment=_alignment([part[place] for part in parts]),
                loss_weight=float(training.loss_weights[place]),
            )
            for place, (name, size) in enumerate(zip(world.names, world.sizes, strict=True))
        )
        summary = Summary(training.step, world.steps, sources)
        decided = policy.decide(summary, memory)
        memory = json.loads(json.dumps(decided.memory))  # as a state would hold it
        changed = weights_of(decided, summary)
        if changed is not None:
            training.change(changed)
            weights, moves = changed, moves + 1
        in_loss = loss_weights_of(decided, summary)
        if in_loss is not None:
            training.loss_weights, moves = np.array(in_loss), moves + 1
        steps.append(training.step)
        shares.append(training.shares)
        losses.append([np.nan if source.loss.mean is None else source.loss.mean for source in sources])
        reasons.append(decided.reason)
    taken = training.learned, training.loss_weights
    return Simulated(world, steps, np.array(shares), np.array(losses), reasons, moves, *taken)


def _alignment(losses: list[Signal]) -> Signal:
    """The alignment that is reported beside losses: 0.5 − loss / 10."""
    count, total, squares = (sum(numbers) for numbers in zip(*losses, strict=True))
    return Signal(count, 0.5 * count - 0.1 * total, 0.25 * count - 0.1 * total + 0.01 * squares)
