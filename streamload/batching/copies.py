"""Rows of one sample in a block of steps, which a small source has: they go to different steps (step E).

They are equally long, so sorting alone would put them into one step, where a contrastive loss takes them for
negatives of each other. Arithmetic only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Origins(NamedTuple):
    """Origins of rows.

    Attributes:
        sources: int64[rows], the number of each row's source.
        samples: int64[rows], a number from 0 for each row's sample.
    """

    sources: NDArray[np.int64]
    samples: NDArray[np.int64]


def apart(order: NDArray[np.int64], steps: int, origins: Origins) -> NDArray[np.int64]:
    """Cut sorted rows into steps without two rows of one sample.

    Each step takes the next rows. A second row of a sample waits for the next step; a sample with as many
    rows left as there are steps comes first. Each step has between half and one and a half times the share of
    a source whose samples repeat: within these bounds there is always a way to fill the remaining steps.

    Args:
        order: int64[rows], the sorted rows.
        steps: divides the rows; the rows of a sample that has more than this are spread evenly.
        origins: of the rows.

    Returns:
        int64[steps, rows ÷ steps]: the rows of each step; where no sample repeats, as sorted.
    """
    size, samples = len(order) // steps, origins.samples[order]
    by_sample = np.argsort(samples, kind="stable")
    begins = np.flatnonzero(np.diff(samples[by_sample], prepend=-1))
    if len(begins) == len(order):
        return order.reshape(steps, size)
    repeats = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    first = np.flatnonzero(repeats % steps == 0)
    bundles = np.stack([by_sample[first], first, np.diff(first, append=len(order))])
    bundles = bundles[:, np.argsort(bundles[0])]
    pool_of = _pools(origins.sources[order][by_sample], repeats)[bundles[1]]
    pools = [_Pool(bundles[:, pool_of == pool], steps, pool > 0) for pool in range(pool_of.max() + 1)]
    cut = np.empty((steps, size), np.int64)
    for step, later in enumerate(reversed(range(steps))):
        counts = _counts(pools, size, later)
        numbers = [pool.take(count) for pool, count in zip(pools, counts.tolist(), strict=True)]
        cut[step] = order[by_sample[np.concatenate(numbers)]]
    return cut


class _Pool:
    """The rows left of a source whose samples repeat, or of all other sources.

    Args:
        bundles: int64[3, n]: the place of a bundle's first row among the sorted rows, by which bundles are
            sorted; the number of its next row; how many rows it has. They are of one sample.
        steps: of the block.
        is_bounded: whether its rows of a step are near its share.
    """

    def __init__(self, bundles: NDArray[np.int64], steps: int, is_bounded: bool) -> None:
        self._bundles = bundles
        self._rows = int(bundles[2].sum())
        self._least = self._rows // (2 * steps) if is_bounded else 0
        self._most = -(-3 * self._rows // (2 * steps)) if is_bounded else self._rows
        self._front = np.empty(0, np.int64)

    def begin(self, size: int, later: int) -> tuple[NDArray[np.int64], int, int]:
        """Begin a step of some rows, with some steps after it.

        Returns:
            The places of the bundles that it may take, those first that have a row for each step; and the
            fewest and the most rows that it has to take.
        """
        is_due = self._bundles[2] > later
        due = np.flatnonzero(is_due)
        self._front = np.concatenate([due, np.flatnonzero(~is_due[: size + len(due)])[:size]])
        fewest = max(self._least, len(due), self._rows - self._most * later)
        most = min(self._most, len(self._front), self._rows - self._least * later)
        places = self._bundles[0, self._front]
        places[: len(due)] = -1
        return places, fewest, most

    def take(self, count: int) -> NDArray[np.int64]:
        """Take the next row of each of the first bundles: the numbers of the rows."""
        bundles = self._front[:count]
        rows: NDArray[np.int64] = self._bundles[1, bundles]
        self._bundles[1, bundles] += 1
        self._bundles[2, bundles] -= 1
        is_left = self._bundles[2, : bundles.max(initial=-1) + 1] > 0
        head, tail = self._bundles[:, : len(is_left)], self._bundles[:, len(is_left) :]
        self._bundles = np.concatenate([head[:, is_left], tail], axis=1) if is_left.any() else tail
        self._rows -= count
        return rows


def _counts(pools: list[_Pool], size: int, later: int) -> NDArray[np.int64]:
    """Return how many rows of each pool a step takes: of the next rows, as near as bounds allow."""
    places, low, high = zip(*(pool.begin(size, later) for pool in pools), strict=True)
    pool_of = np.repeat(np.arange(len(pools)), [len(front) for front in places])
    next_ = pool_of[np.argsort(np.concatenate(places), kind="stable")][:size]
    counts = np.clip(np.bincount(next_, minlength=len(pools)), low, high)
    for pool in range(len(pools)):
        counts[pool] = np.clip(counts[pool] + size - counts.sum(), low[pool], high[pool])
    return counts


def _pools(sources: NDArray[np.int64], repeats: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pool of each row: one for each source whose samples repeat, from 1; 0 for all others."""
    has_repeats = np.bincount(sources, weights=repeats) > 0
    pools: NDArray[np.int64] = np.where(has_repeats, np.cumsum(has_repeats), 0)[sources]
    return pools
