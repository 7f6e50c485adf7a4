"""Where the steps of an epoch begin, and how large each is (step E). Arithmetic only.

Steps are alike until their size is set anew. Extensions have others: blocks of steps that are planned
together (streamload/buckets), and steps that a table lists (streamload/patches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from streamload.errors import OptionError
from streamload.order.events import Event
from streamload.order.split import Split


class Block(NamedTuple):
    """The global positions of steps that are planned together: from `begin` to before `end`."""

    begin: int
    end: int


class Blocks(Protocol):
    """Division of the steps of a sequence into blocks."""

    def is_planned(self, position: int) -> bool:
        """True if the step that begins at a global position is planned with its block."""
        ...

    def at(self, position: int) -> Block:
        """The block of the step that begins at a global position."""
        ...

    def resized(self, size: Event) -> Blocks:
        """The blocks from an event on that sets another size of steps."""
        ...


class StepStart(NamedTuple):
    """Start of the steps of an epoch.

    Attributes:
        sequence: the epoch in which the sequence began.
        position: global samples of the sequence before the first step.
        blocks_from: the position at which blocks begin.
        epoch: of the training loop.
        offset: samples of this epoch over all ranks before the first step.
    """

    sequence: int
    position: int
    blocks_from: int
    epoch: int
    offset: int


class MakeBlocks(Protocol):
    """Options of blocks. Picklable."""

    def blocks(self, batch: int, start: StepStart) -> Blocks:
        """The blocks of a sequence, of steps of so many samples."""
        ...


class SeqLengths(Protocol):
    """The most patches of an image of each step. Picklable."""

    def at(self, epoch: int, position: int) -> int:
        """Return that of the step that begins at a global position of a sequence, by its epoch."""
        ...


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of the steps of a run. Picklable.

    Attributes:
        split: of a step among ranks, or of the largest.
        seq_lens: the most patches of an image of each step; None: images aren't made into patches.
        blocks: by which steps are planned; None: they aren't.
    """

    split: Split
    seq_lens: SeqLengths | None = None
    blocks: MakeBlocks | None = None

    def steps(self, start: StepStart, resizes: Sequence[Event] = ()) -> Steps:
        """The steps of an epoch.

        Args:
            start: of them.
            resizes: events that set other sizes than that of `split`, in ascending order.
        """
        blocks = None if self.blocks is None else self.blocks.blocks(self.split.batch, start)
        return Steps(self.split, start.position, blocks, resizes, self.seq_lens, start.sequence)


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
        split: of a step.
        position: of the first step.
        blocks: by which steps are planned; None: they aren't.
        resizes: events that set other sizes than that of `split`, in ascending order.
        seq_lens: as of StepOptions.
        sequence: the epoch in which the sequence began, for `seq_lens`.

    Raises:
        OptionError: a size is to change within a step.
    """

    def __init__(
        self,
        split: Split,
        position: int,
        blocks: Blocks | None = None,
        resizes: Sequence[Event] = (),
        seq_lens: SeqLengths | None = None,
        sequence: int = 0,
    ) -> None:
        self._position = position
        self._seq_lens, self._sequence = seq_lens, sequence
        self._stretches = [_Stretch(0, position, split, blocks)]
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
            blocks = None if first.blocks is None else first.blocks.resized(resize)
            split = replace(first.split, batch=resize.value["batch"])
            self._stretches = [*before, _Stretch(number, position, split, blocks)]

    def __contains__(self, position: int) -> bool:
        """True if a step begins there, given a position from `begin`."""
        return True

    def begin(self, number: int) -> int:
        """Return the position of a step by its number."""
        stretch = next(earlier for earlier in reversed(self._stretches) if earlier.number <= number)
        return stretch.position + (number - stretch.number) * stretch.split.batch

    def number(self, position: int) -> int:
        """Return the number of the first step that begins at a position or later."""
        stretch = self._stretch(position)
        count = -(-(position - stretch.position) // stretch.split.batch)
        return stretch.number + max(0, count)

    def at(self, position: int) -> Split:
        """Return how the step that begins at a position is split."""
        return self._stretch(position).split

    def block(self, position: int) -> Block | None:
        """Return the block of the step that begins at a position; None: steps aren't planned by block."""
        blocks = self._stretch(position).blocks
        return None if blocks is None else blocks.at(position)

    def is_planned(self, position: int) -> bool:
        """True if the step that begins at a position is planned by block."""
        blocks = self._stretch(position).blocks
        return blocks is not None and blocks.is_planned(position)

    def count_within(self, samples: int) -> int:
        """Return how many of the steps an epoch has that ends after so many samples.

        It ends where the next step, of the size as it was until then, would not be full: a size that is set
        from there on is that of the next epoch.
        """
        end = self._position + samples
        for stretch, after in zip(self._stretches, [*self._stretches[1:], None], strict=True):
            full = max(0, end - stretch.position) // stretch.split.batch
            if after is None or full <= after.number - stretch.number:
                break
        return stretch.number + full

    def seq_len(self, position: int) -> int:
        """Return the most patches of an image in the step that begins at a position; 0: it has none."""
        return 0 if self._seq_lens is None else self._seq_lens.at(self._sequence, position)

    def _stretch(self, position: int) -> _Stretch:
        """The steps around a position; one before the first step is within its block."""
        before = (stretch for stretch in reversed(self._stretches) if stretch.position <= position)
        return next(before, self._stretches[0])
