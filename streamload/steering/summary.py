"""Input of a policy: for each source, sums of what was reported since the last decision.

Values only; a loader makes them from the reports of all ranks, a simulation from its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PARTS = 8
"""The parts of an interval between two decisions whose losses are summed separately."""


class Signal(NamedTuple):
    """Reports of a source in a part of an interval, over all ranks.

    Attributes:
        count: rows that were reported; values that aren't finite are left out.
        total: the sum of their values.
        squares: the sum of the squares of their values.
    """

    count: float = 0.0  # type: ignore[assignment]  # it hides tuple.count, which nobody needs here
    total: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float | None:
        """The mean value; None if nothing was reported."""
        return self.total / self.count if self.count else None

    def plus(self, other: Signal) -> Signal:
        """Return the sums of both."""
        return Signal(self.count + other.count, self.total + other.total, self.squares + other.squares)


NOTHING = Signal()


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """One source at a decision step.

    Attributes:
        name: of the source.
        weight: as it was given, or as it was decided last; in any scale.
        share: of all samples, 0 to 1, as in effect now.
        floor: the smallest share, as it was given.
        samples: of this source that were handed out since the last decision, over all ranks.
        total_samples: the same since the run began.
        passes: `total_samples` in relation to the source's size; None if that isn't known.
        losses: reported in each of `PARTS` consecutive parts of the interval, equal in steps.
        alignment: reported in the whole interval.
        tokens: the same.
        evaluation: the last value of `report_eval` since the last decision; None if there was none.
        bad: reported values that were NaN or infinite.
        loss_weight: of its rows, as it was decided last.
        modality: of its rows: "image-text", "text" or "image".
    """

    name: str
    weight: float
    share: float
    floor: float = 0.0
    samples: int = 0
    total_samples: int = 0
    passes: float | None = None
    losses: tuple[Signal, ...] = (NOTHING,) * PARTS
    alignment: Signal = NOTHING
    evaluation: float | None = None
    bad: int = 0
    tokens: Signal = NOTHING
    loss_weight: float = 1.0
    modality: str = "image-text"

    @property
    def loss(self) -> Signal:
        """Reports of the loss in the whole interval."""
        whole = NOTHING
        for part in self.losses:
            whole = whole.plus(part)
        return whole


@dataclass(frozen=True, slots=True)
class Summary:
    """All sources at a decision step.

    Attributes:
        step: of the run: steps taken so far.
        steps: of the whole run; None if that isn't known.
        sources: in the order in which they were given.
    """

    step: int
    steps: int | None
    sources: tuple[SourceSummary, ...]
