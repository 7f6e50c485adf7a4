"""Shards → pieces of groups → their order in a pass (step B). Pure functions of options and shard count.

A group owns a stretch of the axis of all shards; a shard at a border is shared by sample number. Sizes of
shards are only hints: they decide how even the groups are, never whether a sample is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd

import numpy as np
from numpy.typing import NDArray

from streamload.errors import OptionError
from streamload.order.hashing import PASS_ORDER, PIECES, key, permutation, permutation_stretch

_GOLDEN = 0.6180339887498949
_WIDEST_HINT_BITS = 31
WIDEST_WINDOW = 2**31 - 1
WIDEST_LANES = 2**20


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """Inputs of the sample sequences of all groups, besides the shards themselves.

    Attributes:
        seed: of the run; any integer.
        groups: the number of sequences, at least 1.
        lanes: shards that a group reads side by side, at least 1.
        window: how many references late a sample may come, at least 0.
        shuffle_shards: False keeps the listed order of the shards in every pass.
        hints: int64[shards], the relative sizes of the shards (samples or bytes), the same on every rank;
            None: all shards count as equal.
        opens_slowly: the window opens slowly in a run's first pass (see shuffle.py), and in a short one all
            lanes read at one speed (see `EVEN_SHARDS`): for shards that arrive over a link, so that samples
            come about as their bytes do. False: the window is open from the beginning.
    """

    seed: int
    groups: int
    lanes: int
    window: int
    shuffle_shards: bool = True
    hints: NDArray[np.int64] | None = field(default=None, compare=False)
    opens_slowly: bool = False

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise OptionError(f"groups must be at least 1, not {self.groups}.")
        if not 1 <= self.lanes <= WIDEST_LANES:
            raise OptionError(f"lanes must be from 1 to {WIDEST_LANES}, not {self.lanes}.")
        if not 0 <= self.window <= WIDEST_WINDOW:
            raise OptionError(f"window must be from 0 to {WIDEST_WINDOW}, not {self.window}.")
        if self.hints is None:
            return
        if self.hints.ndim != 1 or self.hints.dtype.kind not in "iu":
            raise OptionError(
                f"hints must be one integer for each shard, not {self.hints.dtype}{list(self.hints.shape)}."
            )
        if self.hints.size and self.hints.min() < 0:
            raise OptionError(
                f"hints must not be negative; shard {self.hints.argmin()} has {self.hints.min()}."
            )


@dataclass(frozen=True, slots=True)
class ShardPart:
    """A group's samples of a shared shard: the entries *i* with ``start <= i * step % size < stop``.

    The step is coprime to the size and near its golden section. So the entries of a part are spread over
    the shard, and each entry, even beyond a wrong size, is in exactly one part.
    """

    start: int
    stop: int
    size: int

    @property
    def step(self) -> int:
        """The multiplier that spreads adjacent entries over the size."""
        step = max(1, round(self.size * _GOLDEN))
        while gcd(step, self.size) != 1:
            step += 1
        return step

    def owned(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the raw entry numbers that belong to the part."""
        place = entries * self.step % self.size
        return entries[(place >= self.start) & (place < self.stop)]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The shards of a group: whole ones, and at most two that it shares with its neighbours.

    Attributes:
        shards: int64[pieces], unique shard numbers.
        parts: of the shared ones, by shard number.
    """

    shards: NDArray[np.int64]
    parts: Mapping[int, ShardPart]


def shard_axis(options: OrderOptions, shard_count: int) -> NDArray[np.int64]:
    """Return all shards in the order in which groups cut them; for who needs the pieces of many groups."""
    if not options.shuffle_shards:
        return np.arange(shard_count)
    return permutation(key(options.seed, PIECES), shard_count)


def pieces(
    options: OrderOptions, shard_count: int, group: int, axis: NDArray[np.int64] | None = None
) -> Pieces:
    """Cut the axis of all shards into equal stretches and return that of `group`.

    It depends on neither epoch nor pass, so a node can reuse its cached shards. Takes O(shards) time;
    without hints about 20 ms for 10**6 shards, and the memory of the result.

    Args:
        axis: `shard_axis`, where it is at hand: without hints the time is then that of the result.
    """
    if not 0 <= group < options.groups:
        raise OptionError(f"group must be from 0 to {options.groups - 1}, not {group}.")
    if options.hints is not None and options.hints.size != shard_count:
        raise OptionError(
            f"hints must be one for each of {shard_count} shards; there are {options.hints.size}."
        )
    if options.groups == 1:
        return Pieces(np.arange(shard_count), {})
    if options.hints is None:
        return _equal_pieces(options, shard_count, group, axis)
    shards = shard_axis(options, shard_count) if axis is None else axis
    sizes = _sizes(options.hints)[shards]
    stops = np.cumsum(sizes)
    starts = stops - sizes
    total = int(stops[-1]) if shard_count else 0
    low = group * total // options.groups
    high = (group + 1) * total // options.groups
    # A shard of size 0 is a point and belongs to the group that begins there or contains it: its hint may
    # be wrong, so it needs an owner like any other.
    first = int(min(np.searchsorted(stops, low, "right"), np.searchsorted(starts, low, "left")))
    last = int(np.searchsorted(starts, high, "left")) if group < options.groups - 1 else shard_count
    parts = {}
    for place in {first, last - 1} if first < last else ():
        start, stop, size = int(starts[place]), int(stops[place]), int(sizes[place])
        if start < low or stop > high:
            parts[int(shards[place])] = ShardPart(max(low, start) - start, min(high, stop) - start, size)
    nothing = [shard for shard, part in parts.items() if part.start == part.stop]
    owned = shards[first:last]
    return Pieces(owned[~np.isin(owned, nothing)], {s: p for s, p in parts.items() if s not in nothing})


def _equal_pieces(
    options: OrderOptions, shard_count: int, group: int, axis: NDArray[np.int64] | None
) -> Pieces:
    """Return the pieces for shards of equal size: as if each had as many samples as there are groups."""
    size = options.groups
    low, high = group * shard_count, (group + 1) * shard_count
    first, last = low // size, -(-high // size)
    if axis is not None:
        owned = axis[first:last]
    elif options.shuffle_shards:
        owned = permutation_stretch(key(options.seed, PIECES), shard_count, first, last)
    else:
        owned = np.arange(first, last)
    parts = {}
    for place in {first, last - 1} if first < last else ():
        start, stop = place * size, (place + 1) * size
        if start < low or stop > high:
            part = ShardPart(max(low, start) - start, min(high, stop) - start, size)
            parts[int(owned[place - first])] = part
    return Pieces(owned, parts)


def pass_order(
    options: OrderOptions, shards: NDArray[np.int64], group: int, epoch: int, pass_: int
) -> NDArray[np.int64]:
    """Return the shards of a group in the order in which lanes take them in one pass."""
    if not options.shuffle_shards:
        return shards
    return shards[permutation(key(options.seed, PASS_ORDER, epoch, group, pass_), shards.size)]


def _sizes(raw_hints: NDArray[np.int64]) -> NDArray[np.int64]:
    hints = raw_hints.astype(np.int64)
    # Use larger units for huge shards: entry number times size must stay below 2**63.
    excess = int(hints.max(initial=0)).bit_length() - _WIDEST_HINT_BITS
    return hints >> excess if excess > 0 else hints
