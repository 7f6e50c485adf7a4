"""Steps of an epoch: where each begins, and how it is split among ranks and sources (step E): arithmetic.

Global position *p* is sample *p* div G of group *p* mod G. A step takes the next B positions, and a rank a
part of the step. So a global batch doesn't depend on the number of ranks or workers, and B may change at any
step: steps are alike until their size is set anew. Extensions have others: blocks of steps that are planned
together (streamload/batching), and steps that a table lists (streamload/patches).

A step takes exactly the share of each source; rounding is carried over as credit. Integers only, so that all
processes agree. Each source has its own sequence (group.py), which continues where the last step stopped.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from streamload.errors import OptionError
from streamload.order.events import UNIT, Event, shares_at
from streamload.order.hashing import SEQ_LEN, key

WIDEST_MULTIPLE = 1 << 20
SourcesName = Literal["mixed", "step", "rank"]


class Share(NamedTuple):
    """The part of a step that a rank computes from one group's sequence.

    Attributes:
        group: its number.
        first, stop: the positions in the group's sequence that the rank computes.
        begin, end: the positions that the whole step takes of the group.
    """

    group: int
    first: int
    stop: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of samples that the rank computes."""
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class Split:
    """Split of the sequences of the groups among steps and ranks.

    Attributes:
        batch: the global batch size, at least 1.
        groups: at least 1; needn't divide `batch` or `ranks`.
        ranks: at least 1.
    """

    batch: int
    groups: int
    ranks: int

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("groups", self.groups), ("ranks", self.ranks)):
            if value < 1:
                raise OptionError(f"{name} must be at least 1, not {value}.")

    @property
    def has_one_plan(self) -> bool:
        """True if all ranks plan steps of the same samples: those of one group, or there is one rank."""
        return self.groups == 1 or self.ranks == 1

    def start(self, position: int, group: int) -> int:
        """Return the number of a group's positions before a global position."""
        return -((group - position) // self.groups)

    def groups_of(self, rank: int) -> list[int]:
        """Return the groups that a rank reads at any position; one, if groups divide ranks."""
        positions = range(1 if self.batch % self.groups == 0 else self.groups)
        return sorted(
            {share.group for position in positions for share in self._shares(position, rank) if share.size}
        )

    def groups_told_by(self, rank: int) -> list[int]:
        """Return the groups that a rank reads and no lower rank does: one rank reports on each group."""
        before = {group for other in range(rank) for group in self.groups_of(other)} if rank else set()
        return [group for group in self.groups_of(rank) if group not in before]

    def shares(self, position: int, rank: int, groups: Collection[int]) -> list[Share]:
        """Return what a rank computes of the step that begins at a global position.

        Args:
            position: global.
            rank: its number.
            groups: at least those that it reads; without samples in this step, a group has an empty share.

        Returns:
            One share for each of the groups, in their order.
        """
        return [share for share in self._shares(position, rank) if share.group in groups or share.size]

    def sizes(self, position: int, group: int) -> list[int]:
        """Return how many samples of a group each rank computes in the step at a global position."""
        begin, end = self.of_group(position, group)
        edges = [rank * self.batch // self.ranks for rank in range(self.ranks + 1)]
        return [max(0, min(end, last) - max(begin, first)) for first, last in itertools.pairwise(edges)]

    def of_group(self, position: int, group: int) -> tuple[int, int]:
        """Return where a group's samples begin and end in the step at a global position."""
        starts = [self.start(position, number) for number in range(group + 1)]
        ends = [self.start(position + self.batch, number) for number in range(group + 1)]
        before = sum(ends[:-1]) - sum(starts[:-1])
        return before, before + ends[-1] - starts[-1]

    def _shares(self, position: int, rank: int) -> Iterator[Share]:
        first, last = rank * self.batch // self.ranks, (rank + 1) * self.batch // self.ranks
        before = 0
        for group in range(self.groups):
            begin, end = self.start(position, group), self.start(position + self.batch, group)
            low = min(end, begin + max(0, first - before))
            high = max(low, min(end, begin + last - before))
            yield Share(group, low, high, begin, end)
            before += end - begin


class Block(NamedTuple):
    """The global positions of steps that are planned together: from `begin` to before `end`."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Division of the steps of a sequence into blocks.

    Attributes:
        batch: the positions of a step.
        steps: of a block, at least 1.
        origin: the position at which the first block begins.
        are_growing: whether the first blocks are shorter, of 1, 1, 2, 4, … steps, and the first step isn't
            planned: so the first batch of a run is computed while its samples arrive.
    """

    batch: int
    steps: int
    origin: int = 0
    are_growing: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or self.steps < 1 or self.origin < 0:
            raise OptionError(f"blocks of {self.steps} steps of {self.batch} samples from {self.origin}")

    def resized(self, size: Event) -> Blocks:
        """Return the blocks from an event on that sets another size of steps."""
        grow = self.are_growing and size.position == 0
        return Blocks(size.value["batch"], size.value["block"], size.position, grow)

    def is_planned(self, position: int) -> bool:
        """True if the step that begins at a global position is planned: all but the first of a run."""
        return not (self.are_growing and position == self.origin)

    def at(self, position: int) -> Block:
        """Return the block of the step that begins at a global position."""
        number = (position - self.origin) // self.batch
        grown = 1 << (self.steps - 1).bit_length() if self.are_growing else 0
        if number >= grown:
            first = grown + (number - grown) // self.steps * self.steps
            count = self.steps
        else:
            first = 1 << number.bit_length() >> 1
            count = max(1, first)
        begin = self.origin + first * self.batch
        return Block(begin, begin + count * self.batch)


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


@dataclass(frozen=True, slots=True)
class SeqLens:
    """The most patches of an image of each step: a hash of where the step begins, alike on all ranks.

    Attributes:
        lengths: at least one, in patches.
        weights: how often each is drawn, in relation to the others; not all 0.
        seed: of the run.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    def at(self, epoch: int, position: int) -> int:
        """Return the length of the step that begins at a global position of a sequence, by its epoch."""
        stops = list(itertools.accumulate(self.weights))
        drawn = (key(self.seed, SEQ_LEN, epoch, position) >> 11) * 2.0**-53 * stops[-1]
        return self.lengths[bisect.bisect_right(stops, drawn)]


@dataclass(frozen=True, slots=True)
class StepTable:
    """Steps of several sizes that an option lists, in an order that the seed and the epoch draw.

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
class StepOptions:
    """Options of the steps of a run. Picklable.

    Attributes:
        split: of a step among ranks, or of the largest.
        seq_lens: the most patches of an image of each step; None: images aren't made into patches.
        block_steps: the steps of a block that are planned together; None: steps aren't planned.
    """

    split: Split
    seq_lens: SeqLens | None = None
    block_steps: int | None = None

    def steps(self, start: StepStart, resizes: Sequence[Event] = ()) -> Steps:
        """The steps of an epoch. The first blocks of a run grow.

        Args:
            start: of them.
            resizes: events that set other sizes than that of `split`, in ascending order.
        """
        blocks = None
        if self.block_steps is not None:
            origin = start.blocks_from
            blocks = Blocks(self.split.batch, self.block_steps, origin, start.sequence == 0 and origin == 0)
        return Steps(self.split, start.position, blocks, resizes, self.seq_lens, start.sequence)

    def kinds(self, rows: int) -> Sequence[tuple[int, int]]:
        """Patches of each image and rows of a rank, of each kind of steps; the longest come first.

        Args:
            rows: of a rank, where steps have one size.
        """
        lengths = [0] if self.seq_lens is None else sorted(set(self.seq_lens.lengths), reverse=True)
        return [(length, rows) for length in lengths]


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
        seq_lens: SeqLens | None = None,
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
        for stretch in reversed(self._stretches):
            if stretch.number <= number:
                break
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
        for stretch in reversed(self._stretches):
            if stretch.position <= position:
                break
        return stretch


@dataclass(frozen=True, slots=True)
class Portion:
    """Part of a step that is of one group: from each source `take` samples, beginning at `first`.

    Attributes:
        first: for each source, the position in its sequence.
        take: for each source, the number of samples.
        owed: for each source, its credit after the step, in UNITs; the sum is 0.
        owed_before: the same before the step.
        drawn: the source of each sample, where it isn't spread evenly: int64[sum(take)].
    """

    first: tuple[int, ...]
    take: tuple[int, ...]
    owed: tuple[int, ...]
    owed_before: tuple[int, ...]
    drawn: NDArray[np.int64] | None = field(default=None, compare=False)

    @property
    def stop(self) -> tuple[int, ...]:
        """The position in each source's sequence after the step."""
        return tuple(map(operator.add, self.first, self.take))

    def seats(self) -> NDArray[np.int64]:
        """Return the source of each of the group's samples in the step: int64[sum(take)]."""
        if self.drawn is not None:
            return self.drawn
        if len(self.take) == 1:
            return np.zeros(self.take[0], np.int64)
        times = [(np.arange(take) + 0.5) / take for take in self.take if take]
        sources = np.repeat(np.arange(len(self.take)), self.take)
        return sources[np.argsort(np.concatenate(times), kind="stable")]


class SourceDraws(NamedTuple):
    """Rows that are drawn from one source at once.

    Attributes:
        sources: "mixed": rows of all sources make a step. "step": each step is of one source; "rank": what a
            rank has of it is.
        multiple: of what a mixed step takes of each source, where that divides the group's samples of it.
    """

    sources: SourcesName = "mixed"
    multiple: int = 1

    def of_step(self, split: Split) -> int:
        """Return how many parts of one source a step has; 0: rows are mixed."""
        return {"mixed": 0, "step": 1, "rank": split.ranks}[self.sources]


MIXED = SourceDraws()


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
        draws: the rows that are drawn from one source at once.
    """

    def __init__(
        self,
        steps: Steps,
        group: int,
        position: int,
        events: Sequence[Event],
        given: Sequence[int],
        owed: Sequence[int],
        draws: SourceDraws = MIXED,
    ) -> None:
        self.events = events
        self._steps, self._group = steps, group
        self._position, self._draws = position, draws
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
        shares = shares_at(self.events, position) if len(self._given) > 1 else (UNIT,)
        share = portion(self._given, self._owed, shares, size, self._draws.multiple)
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
