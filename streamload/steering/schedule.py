"""Schedule: weights by step, as they are given beforehand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd, isfinite
from pathlib import Path
from typing import Any

from streamload.errors import OptionError
from streamload.steering.policy import Decided
from streamload.steering.summary import Summary

LEAST_EVERY = 10


@dataclass(frozen=True, slots=True)
class Schedule:
    """Weights that change at given steps of the run; for `Order(mixing=…)`.

    A run begins with the sources' own weights. Each change counts from the first step after its own that no
    worker has begun.

    Attributes:
        changes: weights by name, by the steps taken before; a source that isn't named keeps its weight.
        every: the steps from one look at the schedule to the next, to which changes are rounded up; None: so
            that no change is late, but at least 10.

    Raises:
        OptionError: a step that isn't a whole number from 1, or a weight that isn't a number from 0.
    """

    changes: Mapping[int, Mapping[str, float]]
    every: int = field(default=0)

    def __post_init__(self) -> None:
        if not self.changes:
            raise OptionError("Schedule({}) has no change; expected {step: {name: weight}}")
        for step, weights in self.changes.items():
            if not isinstance(step, int) or step < 1:
                raise OptionError(
                    f"Schedule: {step!r} is not a step from 1; a run begins with the weights of its Sources"
                )
            if not isinstance(weights, Mapping) or not all(_is_weight(weight) for weight in weights.values()):
                raise OptionError(f"Schedule, step {step}: {weights!r}; expected {{name: number from 0}}")
        if not isinstance(self.every, int) or self.every < 0:
            raise OptionError(f"Schedule(every={self.every!r}); expected a number of steps from 1")
        object.__setattr__(self, "every", self.every or max(LEAST_EVERY, gcd(*self.changes)))

    @property
    def names(self) -> frozenset[str]:
        """The sources that it names."""
        return frozenset(name for weights in self.changes.values() for name in weights)

    def decide(self, summary: Summary, memory: Any) -> Decided:
        """Return the weights of the changes that are due, once."""
        done = 0 if memory is None else int(memory)
        due = [step for step in sorted(self.changes) if done < step <= summary.step]
        if not due:
            return Decided(None, done, "no change is due")
        weights = {name: weight for step in due for name, weight in self.changes[step].items()}
        return Decided(weights, due[-1], f"scheduled for step {due[-1]}")

    @classmethod
    def read(cls, path: str | Path) -> Schedule:
        """Return the schedule of a JSON file: `{"1000": {"a": 1, "b": 2}, …}`.

        Raises:
            OptionError: the file isn't there, or holds something else.
        """
        try:
            by_step = json.loads(Path(path).read_text(encoding="utf-8"))
            changes = {int(step): weights for step, weights in by_step.items()}
        except (OSError, ValueError, AttributeError) as exc:
            raise OptionError(
                f'{path} holds no schedule: {exc}; expected JSON: {{"1000": {{"name": weight}}}}'
            ) from exc
        return cls(changes)


def _is_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value >= 0
