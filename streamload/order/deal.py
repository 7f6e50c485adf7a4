"""E: positions of the groups' sequences → steps, ranks and workers, and shares of an evaluation.

Global position *p* is sample *p* div G of group *p* mod G, a step takes the next B of them, and a rank a part
of the step. So a global batch depends on neither the number of ranks nor that of workers. Arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.errors import OptionError
from streamload.order.plan import OrderOptions


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

    @staticmethod
    def worker(step: int, workers: int) -> int:
        """Which of a rank's workers makes its batch; `step` counts from where this run began."""
        return step % workers


def steps(samples: int, batch: int, *, drop_last: bool) -> int:
    """How many batches an epoch of so many samples has, the incomplete one dropped, or filled up."""
    return samples // batch if drop_last else -(-samples // batch)


def default_lanes(batch_slice: int) -> int:
    """How many lanes a group reads with, by its slice of a global batch: a 32nd, 8 to 64."""
    return min(max(batch_slice // 32, 8), 64)


def default_window(batch_slice: int) -> int:
    """How wide a group's window is, by its slice of a global batch: 40 of them, 10,000 to 100,000."""
    return min(max(40 * batch_slice, 10_000), 100_000)


def evaluation_options(ranks: int, hints: NDArray[np.int64] | None = None) -> OrderOptions:
    """The options by which each rank, as a group of its own, evaluates its part in one pass.

    Every sample is in one part, whatever the shards turn out to hold; the parts are as even as the hints.
    Shards and samples come as listed.
    """
    return OrderOptions(0, ranks, lanes=1, window=0, shuffle_shards=False, hints=hints)


def share(counts: NDArray[np.int64], ranks: int, rank: int) -> list[tuple[int, int, int]]:
    """Cut the listed samples into consecutive shares that differ by at most one sample.

    Args:
        counts: usable samples of each shard, int64[shards].
        ranks: how many shares there are.
        rank: which one is wanted.

    Returns:
        For each shard with samples in the share: its number, and which of its usable samples (start, stop).
    """
    stops = np.cumsum(counts)
    total = int(stops[-1]) if stops.size else 0
    low, high = rank * total // ranks, (rank + 1) * total // ranks
    starts = np.clip(low - (stops - counts), 0, counts)
    ends = np.clip(high - (stops - counts), 0, counts)
    shards = np.flatnonzero(starts < ends)
    return [(int(shard), int(starts[shard]), int(ends[shard])) for shard in shards]
