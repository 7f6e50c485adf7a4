"""Portions: which source fills each position of a group (step E). Shares may change during a run.

A step takes exactly the share of each source; rounding is carried over as credit. Integers only, so that all
processes agree. Each source has its own sequence (group.py), which continues where the last step stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from streamload.errors import OptionError
from streamload.order.events import UNIT, Event, shares_at
from streamload.order.steps import Steps

WIDEST_MULTIPLE = 1 << 20


def shares_of(weights: Sequence[float], floors: Sequence[float]) -> tuple[int, ...]:
    """Return weights as shares of UNIT, exactly proportional except for floors and the last unit.

    Args:
        weights: of each source, in any scale; 0 removes a source, if it has no floor.
        floors: the minimum share of all samples, 0 to 1, of each source.

    Raises:
        OptionError: a weight that is negative or not a number, only zero weights, or floors that add up to
            more than 1.
    """
    for kind, values in (("weights", weights), ("floors", floors)):
        if any(not isfinite(value) or value < 0 for value in values):
            raise OptionError(f"{kind} must be numbers from 0, not {list(values)}.")
    if not any(weights):
        raise OptionError(f"weights must not all be 0: {list(weights)} leaves nothing to read.")
    parts, least = [Fraction(weight) for weight in weights], [Fraction(floor) for floor in floors]
    if sum(least) > 1:
        raise OptionError(f"floors must not add up to more than 1, and {list(floors)} do.")
    raised: set[int] = set()
    while True:
        free, total = 1 - sum(least[i] for i in raised), sum(parts) - sum(parts[i] for i in raised)
        shares = [
            least[i] if i in raised else part * free / total if total else Fraction(0)
            for i, part in enumerate(parts)
        ]
        below = {i for i in range(len(parts)) if shares[i] < least[i]}
        if not below:
            break
        raised |= below
    if sum(shares) < 1:  # all sources with weight are at their floors
        shares = [share / sum(shares) for share in shares]
    whole = [int(share * UNIT) for share in shares]
    rests = sorted(range(len(whole)), key=lambda i: (whole[i] - shares[i] * UNIT, i))
    for i in rests[: UNIT - sum(whole)]:
        whole[i] += 1
    return tuple(whole)


@dataclass(frozen=True, slots=True)
class Portion:
    """Part of a step that is of one group: from each source `take` samples, beginning at `first`.

    Attributes:
        first: for each source, the position in its sequence.
        take: for each source, the number of samples.
        owed: for each source, its credit after the step, in UNITs; the sum is 0.
        owed_before: the same before the step.
    """

    first: tuple[int, ...]
    take: tuple[int, ...]
    owed: tuple[int, ...]
    owed_before: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        """The position in each source's sequence after the step."""
        return tuple(first + take for first, take in zip(self.first, self.take, strict=True))

    def seats(self) -> NDArray[np.int64]:
        """Return the source of each of the group's samples in the step, spread evenly: int64[sum(take)]."""
        if len(self.take) == 1:
            return np.zeros(self.take[0], np.int64)
        times = [(np.arange(take) + 0.5) / take for take in self.take if take]
        sources = np.repeat(np.arange(len(self.take)), self.take)
        return sources[np.argsort(np.concatenate(times), kind="stable")]


class Portions:
    """The portions of one group, step by step.

    Args:
        steps: of the epoch; if they are planned by block, portions are those of whole blocks.
        group: its number.
        position: the global position of the first step or block.
        events: of the run; the first new shares are in effect at `position`. May be replaced by a list that
            is the same up to the last step that was asked for.
        given: the position of each source in its own sequence.
        owed: the credit of each source at that point, in UNITs.
        multiple: of what a step takes of each source, where that divides the group's samples of the step.
    """

    def __init__(
        self,
        steps: Steps,
        group: int,
        position: int,
        events: Sequence[Event],
        given: Sequence[int],
        owed: Sequence[int],
        multiple: int = 1,
    ) -> None:
        self.events = events
        self._steps, self._group = steps, group
        self._position, self._multiple = position, multiple
        self._given, self._owed = tuple(given), tuple(owed)

    def at(self, position: int) -> Portion:
        """Return the portion of the step or block that begins at a position; earlier ones are gone then.

        Raises:
            ValueError: no step begins there, or it is gone.
        """
        while self._position <= position:
            begins, step = self._position, self._next()
            if begins == position:
                return step
        raise ValueError(f"no step begins at {position}, or it is gone: the next is at {self._position}")

    def _next(self) -> Portion:
        position, split = self._position, self._steps.at(self._position)
        block = self._steps.block(position)
        self._position = position + split.batch if block is None else block.end
        size = split.start(self._position, self._group) - split.start(position, self._group)
        shares = shares_at(self.events, position)
        share = portion(self._given, self._owed, shares, size, self._multiple)
        self._given, self._owed = share.stop, share.owed
        return share


def portion(
    given: tuple[int, ...], owed: tuple[int, ...], shares: tuple[int, ...], size: int, multiple: int = 1
) -> Portion:
    """Return what the next `size` samples take of each source, within a sample or two of its share so far.

    Where a multiple divides the size, it takes multiples, and is within one or two of these.
    """
    if len(shares) == 1:
        return Portion(given, (size,), owed, owed)
    due = [before + share * size for before, share in zip(owed, shares, strict=True)]
    rows = multiple if size % multiple == 0 else 1
    unit, size = rows * UNIT, size // rows
    take = [max(0, units // unit) if share else 0 for units, share in zip(due, shares, strict=True)]

    def rest(source: int) -> tuple[int, int]:
        return due[source] - take[source] * unit, -source

    while (missing := size - sum(take)) > 0:
        most_due = sorted((s for s, share in enumerate(shares) if share), key=rest, reverse=True)
        for source in most_due[:missing]:
            take[source] += 1
    while (excess := sum(take) - size) > 0:
        least_due = sorted((s for s, many in enumerate(take) if many), key=rest)
        for source in least_due[:excess]:
            take[source] -= 1
    left = tuple(units - many * unit for units, many in zip(due, take, strict=True))
    return Portion(given, tuple(rows * many for many in take), left, owed)
