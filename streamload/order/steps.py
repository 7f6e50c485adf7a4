"""Where the steps of an epoch begin, and how large each is (step E). Arithmetic only.

Steps are alike until their size is set anew, or come from a table of how many patches an image has at most
and how many rows a rank has.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import xxhash

from streamload.errors import OptionError
from streamload.order.buckets import Block, Blocks
from streamload.order.events import Event
from streamload.order.split import Split


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
    def rows(self) -> int:
        """All rows of a rank in an epoch, by the order of the table."""
        return sum(self.steps[number % len(self.steps)][1] for number in range(self.count))


class _Stretch(NamedTuple):
    """Steps of one size, each where the one before ends.

    Attributes:
        number: of the first one.
        position: where that begins.
        split: of each.
        blocks: by which they are planned; None: they aren't.
    """

    number: int
    position: int
    split: Split
    blocks: Blocks | None


class Steps:
    """The steps of an epoch from a position on.

    Args:
        split: of a step; with a table, of its largest.
        position: of the first step.
        table: of each step, the most patches of an image and the rows of a rank; None: all are as `split`
            says.
        blocks: by which steps are planned; None: they aren't.
        resizes: events that set other sizes than that of `split`, in ascending order; not with a table.

    Raises:
        OptionError: a size is to change within a step.
    """

    def __init__(
        self,
        split: Split,
        position: int,
        table: Sequence[tuple[int, int]] | None = None,
        blocks: Blocks | None = None,
        resizes: Sequence[Event] = (),
    ) -> None:
        self._split, self._position = split, position
        self._stretches = [_Stretch(0, position, split, blocks)]
        self._begins: list[int] | None = None
        if table is not None:
            sizes = (rows * split.ranks for _, rows in table)
            self._begins = list(itertools.accumulate(sizes, initial=position))
            self._by_position = dict(zip(self._begins, table, strict=False))
            self._splits = {rows: replace(split, batch=rows * split.ranks) for _, rows in table}
        self.resize(resizes)

    def resize(self, resizes: Sequence[Event]) -> None:
        """Replace the sizes from the first of `resizes` on; nobody may have begun a step after it.

        Raises:
            OptionError: a size is to change within a step.
        """
        for resize in resizes:
            before = [stretch for stretch in self._stretches if stretch.position < resize.position]
            first = self._stretches[0]
            number, position = 0, first.position
            if before:
                last, position = before[-1], resize.position
                steps, remainder = divmod(position - last.position, last.split.batch)
                number = last.number + steps
                if remainder:
                    raise OptionError(f"steps change in size at {position}, where no step begins")
            blocks, batch = first.blocks, resize.value["batch"]
            if blocks is not None:
                grows = blocks.are_growing and resize.position == 0
                blocks = Blocks(batch, resize.value["block"], resize.position, grows)
            split = replace(first.split, batch=batch)
            self._stretches = [*before, _Stretch(number, position, split, blocks)]

    def __contains__(self, position: int) -> bool:
        """True if a step begins there, given a position from `begin`."""
        return self._begins is None or position in self._by_position

    def begin(self, number: int) -> int:
        """Return the position of a step by its number; after the last one of a table, where that ends."""
        if self._begins is not None:
            return self._begins[min(number, len(self._begins) - 1)]
        stretch = next(earlier for earlier in reversed(self._stretches) if earlier.number <= number)
        return stretch.position + (number - stretch.number) * stretch.split.batch

    def number(self, position: int) -> int:
        """Return the number of the first step that begins at a position or later; not with a table."""
        stretch = self._stretch(position)
        count = -(-(position - stretch.position) // stretch.split.batch)
        return stretch.number + max(0, count)

    def at(self, position: int) -> Split:
        """Return how the step that begins at a position is split."""
        if self._begins is None:
            return self._stretch(position).split
        return self._splits[self._by_position[position][1]]

    def block(self, position: int) -> Block | None:
        """Return the block of the step that begins at a position; None: steps aren't planned by block."""
        blocks = self._stretch(position).blocks
        return None if blocks is None else blocks.at(position)

    def is_planned(self, position: int) -> bool:
        """True if the step that begins at a position is planned by block."""
        blocks = self._stretch(position).blocks
        return blocks is not None and blocks.is_planned(position)

    def count_within(self, samples: int) -> int:
        """Return how many of the steps an epoch has that ends after so many samples; not with a table.

        It ends where the next step, of the size as it was until then, would not be full: a size that is set
        from there on is that of the next epoch.
        """
        end = self._position + samples
        for stretch, after in zip(self._stretches, [*self._stretches[1:], None], strict=True):
            full = max(0, end - stretch.position) // stretch.split.batch
            if after is None or full <= after.number - stretch.number:
                break
        return stretch.number + full

    def seq_len(self, position: int) -> int | None:
        """Return the most patches of an image in the step that begins at a position; None without a table."""
        return None if self._begins is None else self._by_position[position][0]

    def _stretch(self, position: int) -> _Stretch:
        """The steps around a position; one before the first step is within its block."""
        before = (stretch for stretch in reversed(self._stretches) if stretch.position <= position)
        return next(before, self._stretches[0])


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
