"""Positions of the groups' sequences → steps and ranks (step E). Arithmetic only.

Global position *p* is sample *p* div G of group *p* mod G. A step takes the next B positions, and a rank a
part of the step. So a global batch doesn't depend on the number of ranks or workers, and B may change at
any step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from streamload.errors import OptionError


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
        return [share for share in self._shares(position, rank) if share.size or share.group in groups]

    def sizes(self, position: int, group: int) -> list[int]:
        """Return how many samples of a group each rank computes in the step at a global position."""
        starts = [self.start(position, number) for number in range(group + 1)]
        ends = [self.start(position + self.batch, number) for number in range(group + 1)]
        before, count = sum(ends[:-1]) - sum(starts[:-1]), ends[-1] - starts[-1]
        edges = [rank * self.batch // self.ranks - before for rank in range(self.ranks + 1)]
        return [max(0, min(count, last) - max(0, first)) for first, last in itertools.pairwise(edges)]

    def _shares(self, position: int, rank: int) -> Iterator[Share]:
        first, last = rank * self.batch // self.ranks, (rank + 1) * self.batch // self.ranks
        before = 0
        for group in range(self.groups):
            begin, end = self.start(position, group), self.start(position + self.batch, group)
            low = min(end, begin + max(0, first - before))
            high = max(low, min(end, begin + last - before))
            yield Share(group, low, high, begin, end)
            before += end - begin


def default_lanes(batch_slice: int) -> int:
    """Return the default number of lanes for a group's slice of a global batch: 1/32, 8 to 64."""
    return min(max(batch_slice // 32, 8), 64)


def default_window(batch_slice: int) -> int:
    """Return the default window for a group's slice of a global batch: 40 slices, 10,000 to 100,000."""
    return min(max(40 * batch_slice, 10_000), 100_000)
