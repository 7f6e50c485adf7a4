"""Rows of a block put into cells, each of one image size (step E). Arithmetic only.

A block has whole cells of each size, by its share of the rows (largest remainders). The rows of a size that
are more than fill its cells go to the nearest size that has room, those that lose least by it. So no row
waits for another block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamload.order.hashing import stream


def sized_cells(
    lost: NDArray[np.float64], is_unknown: NDArray[np.bool_], rows: int, key: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put a block's rows into cells.

    Args:
        lost: float64[N, sizes], the share of each row's image that each size loses.
        is_unknown: bool[N]; such rows count as of the commonest size.
        rows: of a cell; divides N.
        key: of the block: decides which cell comes when.

    Returns:
        int64[cells, rows]: the rows of each cell, in the order of the block. And int64[N]: the number of the
        size of each row.
    """
    best = lost.argmin(axis=1)
    best[is_unknown] = np.bincount(best[~is_unknown], minlength=1).argmax()
    counts = np.bincount(best, minlength=lost.shape[1])
    cells, remainders = np.divmod(counts, rows)
    missing = len(best) // rows - int(cells.sum())
    cells[np.argsort(-remainders, kind="stable")[:missing]] += 1
    room, sizes = cells * rows, best + 0
    free = np.maximum(room - counts, 0)
    # How much more the second best size loses: rows that would lose most have the first choice.
    gains = np.partition(lost, 1, axis=1)[:, 1] - lost.min(axis=1) if lost.shape[1] > 1 else lost[:, 0]
    turns = np.argsort(-gains, kind="stable")
    is_over = np.zeros(len(best), np.bool_)
    for number in np.flatnonzero(counts > room).tolist():
        is_over[turns[best[turns] == number][room[number] :]] = True
    for row in turns[is_over[turns]].tolist():
        nearest = np.argsort(lost[row], kind="stable")
        sizes[row] = nearest[free[nearest] > 0][0]
        free[sizes[row]] -= 1
    by_size = np.argsort(sizes, kind="stable").reshape(-1, rows)
    return by_size[np.argsort(stream(key, np.arange(len(by_size))), kind="stable")], sizes
