"""Steps whose parts are of one source each: all of a step, or the rows of each rank (step E): arithmetic.

As where rows are mixed (steps.py), what a source has too little of is carried over as credit. All groups use
the same credits, of whole steps, so they choose the same source for each part without communication. Parts
are turned at each step: a source that comes once in a step, or in every other one, would else always be read
from the same group, and the samples of the others would never come.
"""

from __future__ import annotations

import numpy as np

from streamload.order.events import UNIT, shares_at
from streamload.order.hashing import PARTS, key
from streamload.order.steps import Portion, Portions


class PortionsInParts(Portions):
    """The portions of one group, of several sources, where parts of a step are of one source each."""

    def _next(self) -> Portion:
        first, split = self._position, self._steps.at(self._position)
        block = self._steps.block(first)
        self._position = first + split.batch if block is None else block.end
        shares, parts = shares_at(self.events, first), self._draws.of_step(split)
        owed, seats, rows = self._owed, [], split.batch // parts
        for position in range(first, self._position, split.batch):
            sources, owed = sources_of_parts(owed, shares, rows, parts)
            turn = key(PARTS, position) % parts if split.groups > 1 else 0
            turned = np.repeat(sources[turn:] + sources[:turn], rows)
            seats.append(turned[slice(*split.of_group(position, self._group))])
        drawn = np.concatenate(seats)
        take = tuple(np.bincount(drawn, minlength=len(shares)).tolist())
        share = Portion(self._given, take, owed, self._owed, drawn)
        self._given, self._owed = share.stop, share.owed
        return share


def sources_of_parts(
    owed: tuple[int, ...], shares: tuple[int, ...], rows: int, parts: int
) -> tuple[list[int], tuple[int, ...]]:
    """Return the source of each of some parts of a step, and the credits after them.

    Of the sources that are owed rows, the one comes next that would otherwise be a whole part behind first.
    So while shares stay, each is less than a part from its share (earliest deadline first in the windows of
    P-fairness: Baruah et al., Proportionate progress, 1996).

    Args:
        owed: the credits before them, in UNITs; the sum is 0.
        shares: of the sources.
        rows: of a part.
        parts: how many.
    """
    due, sources = list(owed), []
    present = [source for source, share in enumerate(shares) if share]
    for _ in range(parts):
        for source in present:
            due[source] += shares[source] * rows
        behind = [source for source in present if due[source] > 0] or [max(present, key=due.__getitem__)]
        source = min(behind, key=lambda s: -((due[s] - rows * UNIT) // (shares[s] * rows)))
        due[source] -= rows * UNIT
        sources.append(source)
    return sources, tuple(due)
