"""Follows streamload's order with all shards arrived, as a worker does, and deals it out in batches."""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.order_measures import Epoch
from streamload.order.group import GroupOrder, References
from streamload.order.plan import OrderOptions
from streamload.order.steps import Split

Slices = list[list[tuple[int, int, int]]]


class Arrived:
    """The `Arrivals` of shards that are all there."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._entries = {size: np.arange(size) for size in set(sizes)}
        self._sizes = sizes

    def arrived(self, shard: int) -> tuple[NDArray[np.int64], bool]:
        return self._entries[self._sizes[shard]], True


def epoch_of(options: OrderOptions, sizes: Sequence[int], epoch: int, batch: int) -> tuple[Epoch, int]:
    """The global batches of an epoch, and the most shards that a group had open at once."""
    slices = slices_of(batch, options.groups, sum(sizes) // batch)
    arrived = Arrived(sizes)
    sequences, most_open = [], 0
    for group in range(options.groups):
        wanted = max(stop for step in slices for which, _, stop in step if which == group)
        order = GroupOrder(options, len(sizes), group, epoch)
        parts = []
        while order.position < wanted:
            parts.append(order.advance(arrived))
            most_open = max(most_open, len(order.open_shards()))
        sequences.append(joined(parts))
    return batches(slices, sequences), most_open


def seconds_of(options: OrderOptions, sizes: Sequence[int], batch: int) -> float:
    """CPU time for following one pass of a single group, not the run's first, and dealing it out."""
    arrived = Arrived(sizes)
    began = time.process_time()
    order = GroupOrder(options, len(sizes), 0, 1, passes=1)
    parts = []
    while not order.finished:
        parts.append(order.advance(arrived))
    batches(slices_of(batch, 1, order.position // batch), [joined(parts)])
    return time.process_time() - began


def slices_of(batch: int, groups: int, steps: int) -> Slices:
    """Which (group, start, stop) make up the global batch of each step."""
    split = Split(batch, groups, ranks=1)
    dealt = (split.shares(step * batch, 0, ()) for step in range(steps))
    return [[(share.group, share.first, share.stop) for share in shares] for shares in dealt]


def batches(slices: Slices, sequences: Sequence[References]) -> Epoch:
    """The sequences of the groups, dealt out."""
    columns = (
        np.stack([np.concatenate([getattr(sequences[g], name)[a:b] for g, a, b in step]) for step in slices])
        for name in ("shards", "samples")
    )
    return Epoch(*columns)


def joined(parts: Sequence[References]) -> References:
    return References(*(np.concatenate(column) for column in zip(*parts, strict=True)))
