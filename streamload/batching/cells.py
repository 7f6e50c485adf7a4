"""Buckets: the rows of a block of steps, put together by what they cost (step E). Arithmetic only.

A block is some consecutive steps of a sequence. Its rows are sorted into cells, one for each step, in which
texts and images are about equally long; the cells come in a random order. So each row comes once, in the
block in which it would have come anyway, and whoever knows the costs of a block's rows finds the same steps.
With several sources, rows of one sample come in different cells (copies.py).
"""

from __future__ import annotations

import itertools
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from streamload.batching.copies import Origins, apart
from streamload.order.hashing import stream

_CELLS_OF_A_STEP = 32
"""Within a step rows are sorted as into so many cells."""


def cells(
    costs: NDArray[np.float64], steps: int, key: int, origins: Origins | None = None
) -> NDArray[np.int64]:
    """Divide a block's rows among its steps.

    Args:
        costs: float64[rows, 2], the length of each row's text and the size of its image, in tokens.
        steps: of the block; divides the rows.
        key: of the block: decides which cell comes when.
        origins: of rows in which samples may repeat; None: it doesn't matter if they do.

    Returns:
        int64[steps, rows ÷ steps]: for each step its rows, in the order of `ordered`.
    """
    if steps == 1:
        return ordered(costs)[None]
    size = len(costs) // steps
    order = _strips(costs, steps, size)
    turns = np.argsort(stream(key, np.arange(steps)), kind="stable")
    buckets = order.reshape(steps, size) if origins is None else apart(order, steps, origins)
    return np.stack([rows[ordered(costs[rows])] for rows in buckets[turns]])


def cells_of_parts(
    costs: NDArray[np.float64], steps: int, key: int, origins: Origins, parts: int
) -> NDArray[np.int64]:
    """Divide a block's rows among its steps, each of parts that are of one source.

    At a step the parts are of the same place in their sources' order by length: about alike if sources are.

    Args:
        costs: as of `cells`; so are `steps` and `key`.
        origins: of the rows, those of each part after those of the one before.
        parts: of a step.

    Returns:
        int64[steps, rows ÷ steps]: for each step its rows, dealt by `dealt` so that each rank has its part.
    """
    sources = origins.sources.reshape(steps * parts, -1)
    lengths = np.repeat(np.argsort(stream(key, np.arange(steps)), kind="stable"), parts)
    planned = np.empty(sources.shape, np.int64)
    for source in np.flatnonzero(np.bincount(sources[:, 0])):
        rows = np.flatnonzero(origins.sources == source)
        places = np.flatnonzero(sources[:, 0] == source)
        places = places[np.argsort(lengths[places], kind="stable")]
        order = _strips(costs[rows], len(places), sources.shape[1])
        of_source = Origins(*(numbers[rows] for numbers in origins))
        planned[places] = rows[apart(order, len(places), of_source)]
    for rows in planned:
        rows[:] = rows[ordered(costs[rows])]
    dealt_rows: NDArray[np.int64] = planned.reshape(steps, parts, -1).transpose(0, 2, 1).reshape(steps, -1)
    return dealt_rows


def ordered(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Put the rows of one step in an order in which neighbours cost about the same: their indexes."""
    return _strips(costs, _CELLS_OF_A_STEP, len(costs) // _CELLS_OF_A_STEP)


def _strips(costs: NDArray[np.float64], count: int, size: int) -> NDArray[np.int64]:
    """Sort rows by text, cut that into strips of whole cells, and sort these by image, up and down in turn.

    Args:
        costs: float64[rows, 2].
        count: of the cells. The number of strips follows from it alone, so that the groups of a run find like
            cells: the root of its half has the least padding for texts and images as they are on the web.
        size: of a cell.
    """
    texts, images = costs.T
    order = np.argsort(texts, kind="stable")
    strips = max(1, isqrt(count // 2)) if len(order) and texts[order[0]] < texts[order[-1]] else 1
    borders = [count * strip // strips * size for strip in range(strips)] + [len(order)]
    for strip, (begin, end) in enumerate(itertools.pairwise(borders)):
        rows = order[begin:end]
        by_image = images[rows] if strip % 2 == 0 else -images[rows]
        order[begin:end] = rows[np.argsort(by_image, kind="stable")]
    return order


def dealt(
    costs: NDArray[np.float64], sizes: NDArray[np.int64], own: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Deal the rows of a step to those that compute parts of it: each gets some from everywhere.

    Args:
        costs: float64[rows, 2], of the rows in their order (`ordered`).
        sizes: int64[n], how many rows each gets; they add up to all.
        own: one of the n.

    Returns:
        The places of its rows, int64[m], ascending; and float64[m, 2], the most that the i-th row of anyone
        costs, for each i: alike for all if all get equally many.
    """
    takers = np.flatnonzero(sizes)
    times = [(np.arange(size) + 0.5) / size for size in sizes[takers].tolist()]
    takers_in_order = np.repeat(takers, sizes[takers])[np.argsort(np.concatenate(times), kind="stable")]
    places = np.flatnonzero(takers_in_order == own)
    if len(set(sizes[takers].tolist())) == 1:
        most = costs.reshape(-1, len(takers), 2).max(axis=1)
        return places, most if sizes[own] else most[:0]
    return places, np.repeat(costs.max(axis=0, keepdims=True), len(places), axis=0)
