"""E: positions of the groups' sequences → steps and ranks.

Global position *p* is sample *p* div G of group *p* mod G, a step takes the next B of them, and a rank a part
of the step. So a global batch depends on neither the number of ranks nor that of workers. Arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from streamload.errors import OptionError


@dataclass(frozen=True, slots=True)
class Deal:
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

    def start(self, step: int, group: int) -> int:
        """How many positions of a group lie before a step."""
        return -((group - step * self.batch) // self.groups)

    def slices(self, step: int, rank: int) -> list[tuple[int, int, int]]:
        """What a rank computes of a step: positions (group, start, stop), ordered by group."""
        first, last = rank * self.batch // self.ranks, (rank + 1) * self.batch // self.ranks
        slices = []
        before = 0
        for group in range(self.groups):
            start, stop = self.start(step, group), self.start(step + 1, group)
            low = start + max(0, first - before)
            high = min(stop, start + last - before)
            if low < high:
                slices.append((group, low, high))
            before += stop - start
        return slices

    def groups_of(self, rank: int) -> list[int]:
        """The groups of which a rank computes something in one step or another, ascending."""
        period = self.groups // gcd(self.groups, self.batch)  # after so many steps it is as at the first
        return sorted({group for step in range(period) for group, _, _ in self.slices(step, rank)})


def default_lanes(batch_slice: int) -> int:
    """How many lanes a group reads with, by its slice of a global batch: a 32nd, 8 to 64."""
    return min(max(batch_slice // 32, 8), 64)


def default_window(batch_slice: int) -> int:
    """How wide a group's window is, by its slice of a global batch: 40 of them, 10,000 to 100,000."""
    return min(max(40 * batch_slice, 10_000), 100_000)
