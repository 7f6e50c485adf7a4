"""Rows of equal number and like cost for all ranks, `Batches(cost=…)` (step E). Sums are of whole numbers.

A block's rows go into cells of equal size in rounds: the costliest rows first, a round gives one row to each
cell, and the cells with the most so far get those that cost least. Cells sorted by cost make steps, so that
the cells of a step are alike although a few rows cost more than all others of their cell; the steps come in a
random order. How many cells a step has follows from its size alone: a run that goes on with another number
of ranks finds the same steps. A step's rows go to its ranks in rounds, too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from streamload.batching.copies import Origins
from streamload.order.hashing import stream

Shares = NDArray[np.int64]
"""int64[rows, 2]: costs on one scale for both, on which 2^42 is the mean, if that isn't 0."""
_ONE = 1 << 42
_FINEST = 2.0**30
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 ÷ the golden ratio: multiples of it spread evenly, whichever part of them is looked at."""
_NEAR = 8
"""Rounds on either side in which a row of about the same cost is looked for."""
_MOST_CELLS, _LEAST_ROWS = 64, 8
"""Cells of a step, and rows of a cell: more and smaller ones differ more, fewer leave ranks less alike."""


def alike(costs: NDArray[np.float64], steps: int, key: int, origins: Origins) -> NDArray[np.int64]:
    """Divide a block's rows among its steps.

    Args:
        costs: float64[rows, 2], finite, from 0.
        steps: of the block; divides the rows.
        key: of the block: decides which steps come when.
        origins: of the rows. Cells have as many rows of each source, but for one or two; second rows of a
            sample are in other steps, as far as rows of about their cost can be exchanged.

    Returns:
        int64[steps, rows ÷ steps]: for each step its rows; any part of them has rows of all costs.
    """
    size = len(costs) // steps
    count = _cells(size)
    shares = _shares(costs)
    rounds = _in_rounds(shares, origins.sources, steps * count)
    loads = shares[rounds].sum(axis=(0, 2))
    by_load = np.argsort(loads, kind="stable").reshape(steps, count)
    planned = rounds[:, by_load].transpose(1, 0, 2)  # steps, rows of a cell, cells
    _part(planned, origins.samples)
    planned = planned[:, _spread(planned.shape[1])]
    turns = np.argsort(stream(key, np.arange(steps)), kind="stable")
    return np.ascontiguousarray(planned[turns]).reshape(steps, size)


def dealt_alike(costs: NDArray[np.float64], sizes: NDArray[np.int64], taker: int) -> NDArray[np.int64]:
    """Deal the rows of a step to those that compute parts of it.

    Args:
        costs: float64[rows, 2], of the rows in their order (`alike`).
        sizes: int64[n], how many rows each gets; they add up to all.
        taker: one of these n.

    Returns:
        int64[m]: the places of its rows; any part of them has rows of all costs.
    """
    takers = np.flatnonzero(sizes)
    if not sizes[taker]:
        return np.empty(0, np.int64)
    shares, place = _shares(costs), int(np.searchsorted(takers, taker))
    if len(set(sizes[takers].tolist())) == 1:
        if len(takers) == _cells(len(costs)):
            return np.arange(place, len(costs), len(takers))  # a cell of the plan
        rows = _in_rounds(shares, None, len(takers))[:, place]
    else:
        times = [(np.arange(size) + 0.5) / size for size in sizes[takers].tolist()]
        in_order = np.repeat(takers, sizes[takers])[np.argsort(np.concatenate(times), kind="stable")]
        rows = _costliest_first(shares, None)[in_order == taker]
    spread: NDArray[np.int64] = rows[_spread(len(rows))]
    return spread


def _spread(count: int) -> NDArray[np.int64]:
    """An order of the first numbers in which any part has small and large ones."""
    return np.argsort(np.arange(count, dtype=np.uint64) * _GOLDEN, kind="stable")


def _in_rounds(shares: Shares, sources: NDArray[np.int64] | None, cells: int) -> NDArray[np.int64]:
    """Give rows to cells in rounds.

    Args:
        shares: of the rows.
        sources: of the rows: those of one come after those of the one before. None: it doesn't matter.
        cells: divides them.

    Returns:
        int64[rounds, cells]: the row that each cell gets in each round.
    """
    rounds = _costliest_first(shares, sources).reshape(-1, cells)
    loads, strips = np.zeros((cells, 2), np.int64), max(min(2, cells // 4), isqrt(cells) // 2, 1)
    for given in rounds:
        costs = shares[given]
        given[matched(loads, strips)] = given[matched(-costs, strips)]
        loads += shares[given]
    return rounds


def _costliest_first(shares: Shares, sources: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The rows by source, if these matter, and then by the larger of their two shares."""
    by_share = -shares.max(axis=1)
    return np.lexsort((by_share,) if sources is None else (by_share, sources))


def matched(values: Shares, strips: int) -> NDArray[np.int64]:
    """Sort by the first column, cut that into strips, and sort these by the second."""
    order = np.argsort(values[:, 0], kind="stable")
    if strips == 1:
        return order
    strip = np.arange(len(order)) * strips // len(order)
    return order[np.lexsort((values[order, 1], strip))]


def _cells(size: int) -> int:
    """How many cells a step of some rows has."""
    most = max(1, min(_MOST_CELLS, size // _LEAST_ROWS))
    return next(count for count in range(most, 0, -1) if size % count == 0)


def _shares(costs: NDArray[np.float64]) -> Shares:
    """Costs on one scale for both columns, in whole numbers: their sums are the same on all processors."""
    most = costs.max(axis=0, initial=0.0)
    fine = np.floor(costs / np.where(most > 0, most, 1.0) * _FINEST).astype(np.int64)
    means = np.maximum(1, fine.sum(axis=0) // max(1, len(fine)))
    shares: Shares = fine * (_ONE // means)
    return shares


def _part(planned: NDArray[np.int64], samples: NDArray[np.int64]) -> None:
    """Exchange second rows of one sample in a step for rows of about their cost in other steps, in place.

    Args:
        planned: int64[steps, rounds, cells].
        samples: int64[rows], the number of each row's sample.
    """
    if len(np.unique(samples)) == len(samples):
        return
    held = [Counter(samples[rows].ravel().tolist()) for rows in planned]
    for step, counts in enumerate(held):
        for sample in [sample for sample, count in counts.items() if count > 1]:
            for place in np.argwhere(samples[planned[step]] == sample)[1:].tolist():
                others = [other for other, there in enumerate(held) if not there[sample]]
                if not others:
                    break
                near = sorted(
                    range(max(0, place[0] - _NEAR), min(planned.shape[1], place[0] + _NEAR + 1)),
                    key=lambda other: abs(other - place[0]),
                )
                for other, round_ in itertools.product(others, near):
                    there = samples[planned[other, round_]].tolist()
                    cell = next((cell for cell, resident in enumerate(there) if not counts[resident]), None)
                    if cell is not None:
                        places = [step, other], [place[0], round_], [place[1], cell]
                        planned[places] = planned[places][::-1]
                        counts.update({sample: -1, there[cell]: 1})
                        held[other].update({sample: 1, there[cell]: -1})
                        break
