"""B: shards → pieces of groups → their order in a pass. Pure functions of the options and of the shard count.

A group owns a stretch of the axis of all shards; a shard at a border is shared by sample number. What lies in
a shard is not known here: hints only decide how even the groups are, never whether a sample is lost.
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
    """What the sample sequences of all groups depend on, besides the shards themselves.

    Attributes:
        seed: of the run; any integer.
        groups: into how many sequences the shards are split, at least 1.
        lanes: how many shards a group reads side by side, at least 1.
        window: how many references later than its turn a sample may come, at least 0.
        shuffle_shards: False takes the shards as listed, in every pass.
        hints: int64[shards], the relative size of each shard (samples, or bytes), the same on every rank;
            None where nothing is known: then every shard counts alike.
        opens_after: after how many references of a run's first pass its window opens; 0: it is open. None: it
            opens slowly, as in all states of format 2 (see shuffle.py).
    """

    seed: int
    groups: int
    lanes: int
    window: int
    shuffle_shards: bool = True
    hints: NDArray[np.int64] | None = field(default=None, compare=False)
    opens_after: int | None = 0

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise OptionError(f"groups must be at least 1, not {self.groups}.")
        if not 1 <= self.lanes <= WIDEST_LANES:
            raise OptionError(f"lanes must be from 1 to {WIDEST_LANES}, not {self.lanes}.")
        if not 0 <= self.window <= WIDEST_WINDOW:
            raise OptionError(f"window must be from 0 to {WIDEST_WINDOW}, not {self.window}.")
        if self.opens_after is not None and self.opens_after < 0:
            raise OptionError(f"opens_after must be at least 0, or None, not {self.opens_after}.")
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
class Part:
    """Which samples of a shared shard a group owns: the entries *i* with ``start <= i * step % size < stop``.

    The step is coprime to the size and near its golden section, so that the entries of a part are spread over
    the shard, and each entry, even one beyond a size that was only a guess, is in exactly one part.
    """

    start: int
    stop: int
    size: int

    @property
    def step(self) -> int:
        """The multiplier that spreads neighbouring entries over the size."""
        step = max(1, round(self.size * _GOLDEN))
        while gcd(step, self.size) != 1:
            step += 1
        return step

    def owned(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the raw entry numbers which the part owns."""
        place = entries * self.step % self.size
        return entries[(place >= self.start) & (place < self.stop)]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The shards of a group: whole ones, and at most two that it shares with its neighbours.

    Attributes:
        shards: int64[pieces], shard numbers, each once.
        parts: for the shared ones, by shard number, what the group owns of them.
    """

    shards: NDArray[np.int64]
    parts: Mapping[int, Part]


def pieces(options: OrderOptions, shard_count: int, group: int) -> Pieces:
    """Cut the axis of all shards into equal stretches and return the one of `group`.

    It depends on neither epoch nor pass, so that what a node holds is of use again. Takes time in O(shards),
    without hints about 20 ms for 10**6 of them and the memory of what it returns.
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
        return _equal_pieces(options, shard_count, group)
    shards = np.arange(shard_count)
    if options.shuffle_shards:
        shards = permutation(key(options.seed, PIECES), shard_count)
    sizes = _sizes(options.hints)[shards]
    stops = np.cumsum(sizes)
    starts = stops - sizes
    total = int(stops[-1]) if shard_count else 0
    low = group * total // options.groups
    high = (group + 1) * total // options.groups
    # A shard of size 0 lies in a point and goes to the group that this point begins or that it lies in: its
    # hint may be wrong, so it has an owner like any other.
    first = int(min(np.searchsorted(stops, low, "right"), np.searchsorted(starts, low, "left")))
    last = int(np.searchsorted(starts, high, "left")) if group < options.groups - 1 else shard_count
    parts = {}
    for place in {first, last - 1} if first < last else ():
        start, stop, size = int(starts[place]), int(stops[place]), int(sizes[place])
        if start < low or stop > high:
            parts[int(shards[place])] = Part(max(low, start) - start, min(high, stop) - start, size)
    nothing = [shard for shard, part in parts.items() if part.start == part.stop]
    owned = shards[first:last]
    return Pieces(owned[~np.isin(owned, nothing)], {s: p for s, p in parts.items() if s not in nothing})


def _equal_pieces(options: OrderOptions, shard_count: int, group: int) -> Pieces:
    """The pieces where every shard counts alike: as if each had as many samples as there are groups."""
    size = options.groups
    low, high = group * shard_count, (group + 1) * shard_count
    first, last = low // size, -(-high // size)
    if options.shuffle_shards:
        owned = permutation_stretch(key(options.seed, PIECES), shard_count, first, last)
    else:
        owned = np.arange(first, last)
    parts = {}
    for place in {first, last - 1} if first < last else ():
        start, stop = place * size, (place + 1) * size
        if start < low or stop > high:
            parts[int(owned[place - first])] = Part(max(low, start) - start, min(high, stop) - start, size)
    return Pieces(owned, parts)


def pass_order(
    options: OrderOptions, shards: NDArray[np.int64], group: int, epoch: int, pass_: int
) -> NDArray[np.int64]:
    """The shards of a group's pieces in the order in which lanes take them in one pass."""
    if not options.shuffle_shards:
        return shards
    return shards[permutation(key(options.seed, PASS_ORDER, epoch, group, pass_), shards.size)]


def _sizes(given: NDArray[np.int64]) -> NDArray[np.int64]:
    hints = given.astype(np.int64)
    # Bytes of huge shards in larger units: entry number times size must stay below 2**63.
    excess = int(hints.max(initial=0)).bit_length() - _WIDEST_HINT_BITS
    return hints >> excess if excess > 0 else hints
