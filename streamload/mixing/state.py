"""A state's part on decisions on weights: counts, the policy's memory, what was reported since the last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from streamload.errors import StateMismatch
from streamload.mixing.reports import Reported, merged, numbers_of
from streamload.order.events import UNIT
from streamload.steering.decisions import LogPlace

STEERING, REPORTS = "steering", "reports"
"""The keys of a state: what all ranks have alike, and what each of them was reported."""


class LogState(NamedTuple):
    """The place of a run in its log, and the sequence that the log is in."""

    place: LogPlace
    sequence: int


@dataclass(frozen=True, slots=True)
class SteeringState:
    """The state of decisions after a step.

    Attributes:
        steps: of the run, so far.
        decided: the step of the last decision.
        handed: by source, what was handed out since then, over all ranks: samples × UNIT, by the shares.
        total: the same since the run began, up to that decision.
        policy: the name of its class.
        memory: what it remembers.
        log: None: there is none.
        ranks: how many there were, since the last decision, from each resume on.
        reports: what was reported since then, by who got it: "resume.rank", or "resume.all".
        sizes: of the sources, by their indexes, as far as their passes tell.
        loss_weights: of the sources, as decided last; None: 1.
    """

    steps: int
    decided: int
    handed: tuple[int, ...]
    total: tuple[int, ...]
    policy: str = ""
    memory: Any = None
    log: LogState | None = None
    ranks: tuple[int, ...] = ()
    reports: Mapping[str, Reported] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    loss_weights: tuple[float, ...] | None = None

    @classmethod
    def at_start(cls, sources: int) -> SteeringState:
        """The state before the first step."""
        return cls(0, 0, (0,) * sources, (0,) * sources)

    def to_json(self) -> dict[str, Any]:
        """The parts of a loader's state."""
        return {
            STEERING: {
                "steps": self.steps,
                "decided": self.decided,
                "handed": [list(divmod(units, UNIT)) for units in self.handed],
                "total": [list(divmod(units, UNIT)) for units in self.total],
                "policy": self.policy,
                "memory": self.memory,
                "log": None if self.log is None else [*self.log.place, self.log.sequence],
                "ranks": list(self.ranks),
                "sizes": dict(sorted(self.sizes.items())),
                **({} if self.loss_weights is None else {"loss_weights": list(self.loss_weights)}),
            },
            REPORTS: {name: reported.to_json() for name, reported in sorted(self.reports.items())},
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any], sources: int) -> SteeringState | None:
        """Read steering from a loader's state; None if it has none.

        Raises:
            StateMismatch: they are damaged, or of another number of sources.
        """
        if STEERING not in state:
            return None
        try:
            value = state[STEERING]
            log = value["log"]
            steering_state = cls(
                _count(value["steps"]),
                _count(value["decided"]),
                tuple(_units(units) for units in value["handed"]),
                tuple(_units(units) for units in value["total"]),
                str(value["policy"]),
                json.loads(json.dumps(value["memory"])),
                None if log is None else LogState(LogPlace(_count(log[0]), str(log[1])), _count(log[2])),
                tuple(_count(ranks) for ranks in value["ranks"]),
                {
                    str(rank): Reported.from_json(reported, sources)
                    for rank, reported in state[REPORTS].items()
                },
                numbers_of(value["sizes"], sources),
                _loss_weights(value.get("loss_weights"), sources),
            )
            if (
                not len(steering_state.handed) == len(steering_state.total) == sources
                or steering_state.decided > steering_state.steps
            ):
                raise ValueError("counts that don't fit")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as exc:
            raise StateMismatch(f"not a valid state of a loader's decisions: {exc!r:.200}") from None
        return steering_state

    @property
    def lacking(self) -> int:
        """Of how many ranks the reports are missing."""
        lacking = 0
        for resume, ranks in enumerate(self.ranks):
            if f"{resume}.all" not in self.reports:
                lacking += ranks - sum(rank.startswith(f"{resume}.") for rank in self.reports)
        return max(0, lacking)

    def collapsed(self) -> SteeringState:
        """The same with the reports of all ranks in one, if none is missing."""
        if self.lacking or len(self.reports) < 2:
            return self
        together = merged(list(self.reports.values()), len(self.handed))
        last = len(self.ranks) - 1
        nothing = {f"{resume}.all": merged([], len(self.handed)) for resume in range(last)}
        return replace(self, reports={**nothing, f"{last}.all": together})


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a {type(value).__name__} that is not a whole number from 0")
    return value


def _loss_weights(value: Any, sources: int) -> tuple[float, ...] | None:
    if value is None:
        return None
    weights = tuple(float(weight) for weight in value)
    if len(weights) != sources or not all(0 <= weight < float("inf") for weight in weights):
        raise ValueError(f"loss weights of other sources than {sources}")
    return weights


def _units(value: Any) -> int:
    whole, part = value
    if not _count(part) < UNIT:
        raise ValueError("a part of a sample")
    return _count(whole) * UNIT + int(part)
