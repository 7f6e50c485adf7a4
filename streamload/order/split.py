"""E: positions of the groups' sequences → steps and ranks.

Global position *p* is sample *p* div G of group *p* mod G, a step takes the next B of them, and a rank a part
of the step. So a global batch depends on neither the number of ranks nor that of workers, and B may change at
any step. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from streamload.errors import OptionError


class Share(NamedTuple):
    """What a rank computes of a step out of one group's sequence.

    Attributes:
        group: its number.
        first, stop: the positions in the group's sequence that the rank computes.
        begin, end: those that the whole step takes of the group.
    """

    group: int
    first: int
    stop: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        """How many samples the rank computes."""
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class Split:
    """How the sequences of the groups are dealt out.

    Attributes:
        batch: the global batch, of all ranks together, at least 1.
        groups: at least 1; it needs to divide neither `batch` nor `ranks`.
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
        """How many positions of a group lie before a global position."""
        return -((group - position) // self.groups)

    def groups_of(self, rank: int) -> list[int]:
        """The groups that a rank reads, at whatever position; one, where they divide the ranks."""
        positions = range(1 if self.batch % self.groups == 0 else self.groups)
        return sorted({share.group for at in positions for share in self._shares(at, rank) if share.size})

    def groups_told_by(self, rank: int) -> list[int]:
        """Those of the groups that a rank reads which no rank before it does: each is told of by one rank."""
        before = {group for other in range(rank) for group in self.groups_of(other)} if rank else set()
        return [group for group in self.groups_of(rank) if group not in before]

    def shares(self, position: int, rank: int, groups: Collection[int]) -> list[Share]:
        """What a rank computes of the step that begins at a global position.

        Args:
            position: of all samples.
            rank: which one.
            groups: those that it reads, at least; those of which it has nothing in this step have a share
                without samples.

        Returns:
            One for each of the groups, in their order.
        """
        return [share for share in self._shares(position, rank) if share.size or share.group in groups]

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
    """How many lanes a group reads with, by its slice of a global batch: a 32nd, 8 to 64."""
    return min(max(batch_slice // 32, 8), 64)


def default_window(batch_slice: int) -> int:
    """How wide a group's window is, by its slice of a global batch: 40 of them, 10,000 to 100,000."""
    return min(max(40 * batch_slice, 10_000), 100_000)
