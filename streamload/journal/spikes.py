"""Steps of a run whose loss stands out, and the rows that may have to do with it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamload.journal.history import RunHistory, Segment
from streamload.journal.recorder import WORST

_AROUND = 50
"""A step is compared with so many before it, and as many after it."""
_DEVIATIONS, _ROW_DEVIATIONS = 6.0, 12.0
"""A step stands out from so many on, by its mean and by its worst row: high losses have a long tail."""
_LEAST_SHARE = 0.02
"""The least deviation, as a share of the usual loss: some losses hardly vary."""
_ROWS = 8
_MIDDLE, _LOW = (0.25, 0.75, 0.5), (0.05, 0.25, 0.25)
"""Quantiles by which means are compared, and worst rows, as bad ones may be in most of the steps around."""


class Suspect(NamedTuple):
    """A row of a step.

    Attributes:
        step, segment, rank, row: where it is.
        loss: of it.
        deviations: how far it is above the worst rows of the steps around.
    """

    step: int
    segment: Segment
    rank: int
    row: int
    loss: float
    deviations: float


class Spike(NamedTuple):
    """A step that stands out.

    Attributes:
        step: of the run.
        loss, usual: the mean of its rows, and that of the steps around.
        deviations: how far its mean or its worst row is above those of the steps around.
        suspects: its rows with the highest losses, highest first.
    """

    step: int
    loss: float
    usual: float
    deviations: float
    suspects: list[Suspect]


def find_spikes(history: RunHistory, segment: str | None = None) -> list[Spike]:
    """The steps that stand out among those that led to a segment, the furthest first."""
    of_run = []
    for part, first, stop in history.branch(segment):
        of_run += list(_of_segment(part, first, stop))
    return sorted(of_run, key=lambda spike: -spike.deviations)


def _of_segment(segment: Segment, first: int, stop: int) -> Iterator[Spike]:
    ranks = {rank: _losses(segment, rank, first, stop) for rank in segment.ranks}
    if not ranks or stop <= first:
        return
    of_ranks = np.stack([means for means, _, _ in ranks.values()])
    is_known = ~np.isnan(of_ranks)
    means = np.full(stop - first, np.nan, np.float32)
    np.divide(np.where(is_known, of_ranks, 0).sum(0), is_known.sum(0), out=means, where=is_known.any(0))
    worst = np.stack([losses for _, losses, _ in ranks.values()])  # float32[ranks, steps, rows]
    highest = worst.max(axis=(0, 2))
    if np.isnan(means).all():
        return
    by_mean, usual, _ = _deviations(means, _MIDDLE)
    by_row, row_usual, row_scale = _deviations(highest, _LOW)
    score = np.fmax(by_mean, by_row)
    stands_out = (by_mean > _DEVIATIONS) | (by_row > _ROW_DEVIATIONS)
    for place in np.flatnonzero(stands_out).tolist():
        rows = worst[:, place]
        order = np.argsort(-rows, axis=None)[:_ROWS]
        suspects = []
        for number in order.tolist():
            rank, column = divmod(number, rows.shape[1])
            loss = float(rows[rank, column])
            if loss != -np.inf:
                name = list(ranks)[rank]
                above = (loss - row_usual[place]) / row_scale[place]
                row = int(ranks[name][2][place, column])
                suspects.append(Suspect(first + place, segment, name, row, loss, float(above)))
        yield Spike(first + place, float(means[place]), float(usual[place]), float(score[place]), suspects)


def _losses(
    segment: Segment, rank: int, first: int, stop: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """The mean loss of each step (NaN: none), those of its worst rows, and these rows (-inf, -1: none)."""
    count = stop - first
    means = np.full(count, np.nan, np.float32)
    worst, rows = np.full((count, WORST), -np.inf, np.float32), np.full((count, WORST), -1, np.int64)
    for chunk in segment.rank(rank).chunks:
        if "loss" not in chunk.arrays:
            continue
        begin = int(chunk.values["step"])
        low, high = max(begin, first), min(begin + len(chunk.arrays["loss"]), stop)
        if low >= high:
            continue
        of_chunk, of_run = slice(low - begin, high - begin), slice(low - first, high - first)
        means[of_run] = chunk.arrays["loss"][of_chunk]
        has = np.arange(WORST) < chunk.arrays["count"][of_chunk][:, None]
        losses = np.nan_to_num(chunk.arrays["worst"][of_chunk].astype(np.float32), nan=np.inf, posinf=np.inf)
        worst[of_run] = np.where(has, losses, -np.inf)
        rows[of_run] = chunk.arrays["rows"][of_chunk]
    return means, worst, rows


def _deviations(
    values: npt.NDArray[np.float32], quantiles: tuple[float, float, float]
) -> tuple[npt.NDArray[np.float32], ...]:
    """How far values are above those around, in robust standard deviations.

    Args:
        values: of consecutive steps.
        quantiles: of those around, between which the deviation is measured, and the one from which.

    Returns:
        The deviations (infinite where a value is; NaN where it is unknown), what they are from, and their
        unit.
    """
    finite = np.where(np.isfinite(values), values, np.nan)
    padded = np.pad(finite, _AROUND, constant_values=np.nan)
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * _AROUND + 1)
    is_known = ~np.isnan(around).all(axis=1)
    usual, scale = np.full(len(values), np.nan, np.float32), np.ones(len(values), np.float32)
    if is_known.any():  # numpy refuses none
        low, high, usual[is_known] = np.nanquantile(around[is_known], quantiles, axis=1)
        normal = NormalDist()
        scale[is_known] = (high - low) / (normal.inv_cdf(quantiles[1]) - normal.inv_cdf(quantiles[0]))
    scale = np.maximum(scale, np.maximum(_LEAST_SHARE * np.abs(np.nan_to_num(usual)), 1e-9))
    result = (values - usual) / scale
    result[np.isposinf(values)] = np.inf
    return result, usual, scale
