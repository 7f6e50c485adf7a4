"""Samples packed into cells by budgets, `Batches(cost=…, max_tokens=…)` (step E). Whole numbers only.

A cell is what goes through a device at once: samples whose costs add up to at most the budgets. A block is a
fixed number of steps of a fixed number of cells, and takes as many samples of the sequence, in order, as fit:
so all ranks and groups have equally many steps without a word, and nothing is held back for the next block.

Samples are placed in rounds, the costliest first. A round gives one sample to each cell that is open: that it
doesn't lift over the level. Where none is open the level rises, to the budget at most. In a round the cells
that have the most get what costs least. Cells sorted by cost make steps, so that those of a step are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.batching.rounds import matched
from streamload.order.events import UNIT
from streamload.order.hashing import stream
from streamload.order.steps import Portion

Whole = NDArray[np.int64]
_FULL, _LEAST_FULL = 995, 500
"""Per mille of the budgets that a block's samples may add up to: tried first, and at least."""
_MEAN = 1 << 32
"""The mean load of a cell, as loads are counted."""
_RISE_BITS = 7
"""The level rises by this mean, shifted by so many bits."""
_ALIKE = 8
"""So many of the next samples decide which cells are open."""
_FINEST = 2.0**30
_FINE = 12
"""Bits of the time at which a sample of a source comes, behind the point."""


class PackedSamples(NamedTuple):
    """The cells of a block.

    Attributes:
        taken: how many samples of the sequence it takes; some are in no cell only where the sequence ends.
        steps: how many it has.
        cell: int64[N], of the first N samples: the number of the step × cells of a step + that of the cell.
    """

    taken: int
    steps: int
    cell: Whole


def enough(costs: Whole, cells: int, budgets: Whole) -> bool:
    """True if a block of so many cells needs no more samples than these, whose costs are int64[N, 2]."""
    return len(costs) >= cells and bool((costs.sum(axis=0) > budgets * cells).any())


def pack(
    costs: Whole,
    times: NDArray[np.float64],
    steps: int,
    cells: int,
    budgets: Whole,
    key: int,
    *,
    is_end: bool,
) -> PackedSamples:
    """Pack the next samples of a sequence into the cells of a block.

    Args:
        costs: int64[N, 2], of text, from 1, and image, each within its budget; as many as are `enough`, or up
            to the end.
        times: float64[N], what each takes: by it the cells of a step are alike.
        steps: of the block.
        cells: of a step.
        budgets: int64[2], of a cell.
        key: of the block: decides which steps and cells come when.
        is_end: whether the sequence ends with these samples. Then the block has as few steps as hold them
            all, if it holds them; fewer than `cells` samples are left over where cells would be empty.
    """
    if is_end:
        packed = _pack_rest(costs, times, steps, cells, budgets, key)
        if packed is not None:
            return packed
    every, sums = steps * cells, np.cumsum(costs, axis=0)
    large = np.cumsum(2 * costs > budgets, axis=0, dtype=np.int64)  # no two of them share a cell
    most = min(len(costs), _prefix(large, np.full(2, every)))
    full, tried = _FULL, -1
    while full >= _LEAST_FULL:
        room = [budget * every * full // 1000 for budget in budgets.tolist()]  # whole numbers of any size
        count = min(most, max(every, _prefix(sums, np.minimum(room, sums[-1]).astype(np.int64))))
        if count != tried:
            placed, left = _placed(costs[:count], every, budgets)
            if placed is not None:
                return PackedSamples(count, steps, _arranged(times[:count], placed, steps, cells, key))
            full = min(full - 5, int(full * max(0.96, 1 - 1.25 * left)))
        else:
            full -= 5
        tried = count
    return PackedSamples(every, steps, _arranged(times[:every], np.arange(every), steps, cells, key))


def interleaved(
    positions: tuple[int, ...], owed: tuple[int, ...], shares: Sequence[int], count: int
) -> Portion:
    """The next samples of several sources, in an order that doesn't depend on where it is cut.

    A source's sample *i*, from 0, comes at the time (i + ½ − what it is owed) ÷ its share.

    Args:
        positions: the position of each source in its own sequence.
        owed: the credit of each, in UNITs.
        shares: of each, in UNITs.
        count: how many samples.
    """
    if len(positions) == 1:
        return Portion(positions, (count,), owed, owed)
    times, sources = [], []
    for source, (share, credit) in enumerate(zip(shares, owed, strict=True)):
        if share:
            most = max(0, (count * share + credit) // UNIT + 2)
            due = [(((2 * i + 1) * UNIT - 2 * credit) << _FINE) // (2 * share) for i in range(most)]
            times.append(np.array(due, np.int64))
            sources.append(np.full(most, source))
    drawn = np.concatenate(sources)[np.argsort(np.concatenate(times), kind="stable")][:count]
    take = tuple(np.bincount(drawn, minlength=len(positions)).tolist())
    after = (
        credit + share * count - many * UNIT for credit, share, many in zip(owed, shares, take, strict=True)
    )
    return Portion(positions, take, tuple(after), owed, drawn)


def _pack_rest(
    costs: Whole, times: NDArray[np.float64], steps: int, cells: int, budgets: Whole, key: int
) -> PackedSamples | None:
    """Pack all that is left of a sequence; None: a block doesn't hold it."""
    count, large = len(costs), int(np.count_nonzero(2 * costs > budgets, axis=0).max())
    least = max(1, -(-large // cells), int((-(-costs.sum(axis=0) // (budgets * cells))).max()))
    for needed in range(least, steps + 1):
        if count < needed * cells:  # cells would be empty: one step less, a sample in each
            used = (needed - 1) * cells
            placed: Whole | None = np.arange(used)
            needed -= 1
        else:
            used = count
            placed, _ = _placed(costs, needed * cells, budgets)
        if placed is not None:
            return PackedSamples(count, needed, _arranged(times[:used], placed, needed, cells, key))
    return None


def _prefix(sums: Whole, room: Whole) -> int:
    """How many of the first samples have no more than there is room for: sums are cumulated."""
    return min(int(np.searchsorted(sums[:, column], room[column], side="right")) for column in range(2))


def _placed(costs: Whole, cells: int, budgets: Whole) -> tuple[Whole | None, float]:
    """The cell of each sample, none of them over its budget; None, and the share that found no room."""
    means = costs.sum(axis=0) // cells + 1
    units = np.maximum(1, _MEAN // means)
    rise = means * units >> _RISE_BITS
    loads_of = costs * units
    larger = loads_of.max(axis=1)
    order = np.argsort(-larger, kind="stable")
    loads_of, fewer = loads_of[order], -larger[order]
    has_two = bool(loads_of[:, 1].any() and loads_of[:, 0].any())
    room = np.minimum(budgets, costs.sum(axis=0)) * units
    level = np.minimum(room, means * units + rise)
    loads, cell = np.zeros((cells, 2), np.int64), np.empty(len(costs), np.int64)
    begin = 0
    while begin < len(costs):
        most = loads_of[begin : begin + _ALIKE].max(axis=0)
        open_ = np.flatnonzero((loads <= level - most).all(axis=1))
        if not len(open_):
            can = np.flatnonzero((loads <= room - most).all(axis=1))
            if not len(can):
                most = loads_of[begin]
                can = np.flatnonzero((loads <= room - most).all(axis=1))
            if not len(can):
                return None, float((loads_of[begin:].sum(axis=0) / np.maximum(1, loads_of.sum(axis=0))).max())
            missing = loads[can] + (most - level)
            least = missing[int(missing.max(axis=1).argmin())]
            level = np.minimum(room, level + np.maximum(0, least) + rise)
            open_ = np.flatnonzero((loads <= level - most).all(axis=1))
        round_ = loads_of[begin : begin + len(open_)]
        like = int(np.searchsorted(fewer[begin : begin + len(open_)], fewer[begin] * 3 >> 2, side="right"))
        round_ = round_[: max(1, like)]
        while len(round_) > 1 and (round_.max(axis=0) > most).any():
            most = np.maximum(most, round_.max(axis=0))  # all of the round fit into each open cell
            fitting = open_[(loads[open_] <= level - most).all(axis=1)]
            if not len(fitting):
                round_, most = round_[:1], round_[0]
                break
            open_, round_ = fitting, round_[: len(fitting)]
        if len(round_) < len(open_):
            fullest = loads[open_].max(axis=1)
            open_ = open_[np.argsort(fullest, kind="stable")[: len(round_)]]
        strips = max(1, isqrt(len(round_)) // 2) if has_two else 1
        takers, samples = open_[matched(loads[open_], strips)], matched(-round_, strips)
        cell[begin + samples] = takers
        loads[takers] += round_[samples]
        begin += len(round_)
    placed = np.empty(len(costs), np.int64)
    placed[order] = cell
    return placed, 0.0


def _arranged(times: NDArray[np.float64], placed: Whole, steps: int, cells: int, key: int) -> Whole:
    """Make steps of cells: those of a step cost about the same; steps and their cells come in any order."""
    every = steps * cells
    fine = np.floor(times / max(times.max(initial=0.0), 1e-300) * _FINEST).astype(np.int64)
    loads = np.zeros(every, np.int64)
    np.add.at(loads, placed, fine)
    order = np.argsort(loads, kind="stable")
    turns = np.argsort(np.argsort(stream(key, np.arange(steps)), kind="stable"), kind="stable")
    drawn = stream(key ^ _MEAN, np.arange(every)).reshape(steps, cells)
    seats = np.argsort(drawn, axis=1, kind="stable")
    number = np.empty(every, np.int64)
    number[order] = (turns[:, None] * cells + seats).ravel()
    return number[placed]
