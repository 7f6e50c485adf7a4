"""Steps that a table lists: how many patches an image has at most, and how many rows a rank has (step E).

`Patches(steps=…)`. Arithmetic only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from streamload.errors import OptionError
from streamload.order.events import Event
from streamload.order.steps import Split, StepOptions, Steps, StepStart, StepTable


@dataclass(frozen=True, slots=True)
class TableOptions(StepOptions):
    """Options of steps that a table lists; `split` is that of the largest."""

    table: StepTable | None = None

    def __post_init__(self) -> None:
        refuse_uneven(self.split.groups, self.split.ranks)

    def steps(self, start: StepStart, resizes: Sequence[Event] = ()) -> TableSteps:
        """The steps of an epoch, as the table has them; none is of another size."""
        assert self.table is not None
        remaining = self.table.remaining(start.epoch, start.offset, self.split.ranks)
        return TableSteps(self.split, start.position, remaining)

    def kinds(self, rows: int) -> Sequence[tuple[int, int]]:
        """Patches of each image and rows of a rank, of each kind of steps."""
        assert self.table is not None
        return list(dict.fromkeys(self.table.steps))


class TableSteps(Steps):
    """The steps of an epoch from a position on.

    Args:
        split: of the largest.
        position: of the first step.
        table: of each step, the most patches of an image and the rows of a rank.
    """

    def __init__(self, split: Split, position: int, table: Sequence[tuple[int, int]]) -> None:
        super().__init__(split, position)
        sizes = (rows * split.ranks for _, rows in table)
        self._begins = list(itertools.accumulate(sizes, initial=position))
        self._by_position = dict(zip(self._begins, table, strict=False))
        self._splits = {rows: replace(split, batch=rows * split.ranks) for _, rows in table}

    def __contains__(self, position: int) -> bool:
        """True if a step begins there, given a position from `begin`."""
        return position in self._by_position

    def begin(self, number: int) -> int:
        """Return the position of a step by its number; after the last one, where that ends."""
        return self._begins[min(number, len(self._begins) - 1)]

    def at(self, position: int) -> Split:
        """Return how the step that begins at a position is split."""
        return self._splits[self._by_position[position][1]]

    def seq_len(self, position: int) -> int:
        """Return the most patches of an image in the step that begins at a position; 0: it has none."""
        return self._by_position[position][0]


def refuse_uneven(groups: int, ranks: int) -> None:
    """Refuse a table of steps where ranks don't share groups evenly: each step would read other groups.

    Raises:
        OptionError: `groups` doesn't divide `ranks`.
    """
    if ranks % groups:
        raise OptionError(
            f"steps of several sizes need groups that divide the ranks, and {groups} don't divide {ranks}: "
            f"give Order(groups=…)"
        )
