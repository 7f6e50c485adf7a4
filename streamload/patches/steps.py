"""Steps that a table lists: how many patches an image has at most, and how many rows a rank has (step E).

`Patches(steps=…)`. Arithmetic only.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

from streamload.errors import OptionError
from streamload.order.events import Event
from streamload.order.steps import Split, StepOptions, Steps, StepStart


@dataclass(frozen=True, slots=True)
class StepTable:
    """The steps of each epoch, in an order that the seed and the epoch draw.

    Attributes:
        steps: of each, the most patches of an image and the rows of a rank.
        count: steps of an epoch; after all of `steps` the first ones come again.
        seed: of the run.
    """

    steps: tuple[tuple[int, int], ...]
    count: int
    seed: int

    def of_epoch(self, epoch: int) -> list[tuple[int, int]]:
        """Return the steps of an epoch: in the order of OpenCLIP's main branch for the same seed."""
        steps = list(self.steps)
        random.Random(self.seed + epoch).shuffle(steps)
        return [steps[number % len(steps)] for number in range(self.count)]

    def remaining(self, epoch: int, offset: int, ranks: int) -> list[tuple[int, int]]:
        """Return the steps of an epoch that begin at an offset or later.

        Args:
            epoch: its number.
            offset: samples of the epoch over all ranks before it; within a step if it was saved with another
                number of ranks.
            ranks: that share the steps.
        """
        steps = self.of_epoch(epoch)
        begins = [0, *itertools.accumulate(rows * ranks for _, rows in steps)]
        return steps[bisect.bisect_left(begins, offset) :]

    @property
    def digest(self) -> str:
        """Two tables with one digest have the same steps in each epoch of as many."""
        return xxhash.xxh3_64_hexdigest(repr([(int(most), int(rows)) for most, rows in self.steps]).encode())

    @property
    def most_rows(self) -> int:
        """The most rows of a rank in a step."""
        return max(rows for _, rows in self.steps)

    @property
    def rows(self) -> int:
        """All rows of a rank in an epoch, by the order of the table."""
        return sum(self.steps[number % len(self.steps)][1] for number in range(self.count))


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
