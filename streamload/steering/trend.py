"""Trend of a source's loss: power laws fitted to its loss by its own samples.

The level of a loss doesn't tell what more samples would gain, and its fall over time depends on the shares,
too; so all is by the source's own samples. Bins are lists of numbers, which a state can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import erfc, exp, isfinite, log, pi, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.steering.summary import PARTS, SourceSummary

Bin = list[float]
"""The source's samples in the middle of the bin, the mean loss, and the rows that reported it."""

BINS = 32
"""Bins that are kept of a source: fine where the curve bends, and where it is now."""
LEAST_BINS = 8
CLIP_MADS = 4.0
_CURVES = [
    *(
        (a, start)
        for a in (0.1, 0.2, 0.3, 0.45, 0.65, 1.0)
        for start in (0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4)
    ),
    *((a, start) for a in (0.1, 0.2, 0.3, 0.45, 0.65, 1.0) for start in (0.8, 2.0, 10.0)),
    *((20.0, start) for start in (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0)),  # nearly exponentials
]
_EXPONENTS, _STARTS = np.array(_CURVES).T  # start: in relation to the samples at which the slope is asked for
_GRID_ERROR = 0.05  # of a gain: between two neighbouring curves


class Gain(NamedTuple):
    """Gain of one more sample in the loss.

    Attributes:
        value: loss by sample; negative where the loss rises.
        error: its standard error, of noise and of the choice among the power laws.
    """

    value: float
    error: float


def parts_of(source: SourceSummary, first_pass_only: bool) -> list[Bin]:
    """Return what was reported in the parts of an interval, without spikes.

    Args:
        source: with the sums of its losses.
        first_pass_only: leave out what was reported of samples that the model had seen before.
    """
    before, step = source.total_samples - source.samples, source.samples / PARTS
    size = source.total_samples / source.passes if source.passes else None
    bins = [
        [before + step * (place + 0.5), part.total / part.count, part.count]
        for place, part in enumerate(source.losses)
        if part.count > 0 and isfinite(part.total)
        if not first_pass_only or size is None or before + step * (place + 1) <= size
    ]
    if len(bins) >= 4:
        means = np.array([mean for _, mean, _ in bins])
        line = _line_through(means)
        for bin_, mean in zip(bins, line + _clipped(means - line), strict=True):
            bin_[1] = float(mean)
    return bins


def joined(bins: Sequence[Bin], more: Sequence[Bin]) -> list[Bin]:
    """Return earlier bins and new ones, at most BINS: those that lie closest on the curve become one."""
    joined = [list(bin_) for bin_ in (*bins, *more)]
    while len(joined) > BINS:
        offset = 0.05 * joined[-1][0]
        places = [log(bin_[0] + offset) for bin_ in joined]
        first = min(range(len(joined) - 1), key=lambda i: places[i + 1] - places[i])
        (x1, y1, n1), (x2, y2, n2) = joined[first : first + 2]
        rows = n1 + n2
        joined[first : first + 2] = [[(x1 * n1 + x2 * n2) / rows, (y1 * n1 + y2 * n2) / rows, rows]]
    return [[round(x), float(f"{y:.7g}"), round(n, 1)] for x, y, n in joined]


def gain_at(bins: Sequence[Bin], samples: float) -> Gain | None:
    """Return the slope at a number of samples, averaged over the power laws by how well each fits.

    Args:
        bins: of one source.
        samples: where; a little ahead of the bins, as a rule.

    Returns:
        None if the bins are too few, or lie too close together.
    """
    used = [bin_ for bin_ in bins if bin_[0] >= 0.02 * bins[-1][0]]  # without the first steps of a run
    if len(used) < LEAST_BINS or used[-1][0] <= used[0][0] * 1.05:
        return None
    x, y, rows = np.array(used).T
    starts = _STARTS * samples
    curves = (1 + x / starts[:, None]) ** -_EXPONENTS[:, None]
    slopes = _EXPONENTS / starts * (1 + samples / starts) ** (-_EXPONENTS - 1)
    weights = rows / rows.mean()
    curves = curves - ((curves * weights).sum(1) / weights.sum())[:, None]
    spreads = (weights * curves**2).sum(1)
    clipped = y
    for _ in range(3):
        middle = (weights * clipped).sum() / weights.sum()
        scales = (weights * curves * (clipped - middle)).sum(1) / spreads
        squares = ((clipped - middle - scales[:, None] * curves) ** 2 * weights).sum(1)
        best = int(np.argmin(squares))
        fitted = middle + scales[best] * curves[best]
        clipped = fitted + _clipped((y - fitted) * np.sqrt(weights)) / np.sqrt(weights)
    residuals = (clipped - fitted) * np.sqrt(weights)
    together = float((residuals[1:] * residuals[:-1]).sum() / max(float((residuals**2).sum()), 1e-300))
    alike = min(max(together, 0.0), 0.95)  # neighbours that err alike count for fewer
    variance = max(float(squares[best]) / (len(x) - 3), 1e-18) * (1 + alike) / (1 - alike)
    likely = np.exp(-(squares - squares[best]) / (2 * variance))
    likely /= likely.sum()
    gains = scales * slopes
    value = float(likely @ gains)
    spread = float(likely @ (variance / spreads * slopes**2 + (gains - value) ** 2))
    error = sqrt(spread + (_GRID_ERROR * value) ** 2)
    return Gain(value, error) if isfinite(value) and isfinite(error) else None


def no_less_than_nothing(gain: Gain) -> Gain:
    """Return mean and deviation of max(0, the gain), taken as normal: a rising loss gains nothing, not less.

    Otherwise one source whose loss rises steeply, and with it the error, would hide what the others gain.
    """
    value, error = gain
    if error <= 0:
        return Gain(max(0.0, value), 0.0)
    distance = value / error
    density = exp(-distance * distance / 2) / sqrt(2 * pi)
    above = erfc(-distance / sqrt(2)) / 2
    mean = max(0.0, value * above + error * density)
    square = (value * value + error * error) * above + value * error * density
    return Gain(mean, sqrt(max(0.0, square - mean * mean)))


def _clipped(errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return errors, none further than some median deviations from their median."""
    middle = np.median(errors)
    limit = CLIP_MADS * 1.4826 * np.median(np.abs(errors - middle))
    clipped: NDArray[np.float64] = middle + np.clip(errors - middle, -limit, limit)
    return clipped


def _line_through(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the line through values at equal distances by the median of all slopes (Theil and Sen)."""
    places = np.arange(len(values))
    first, second = np.triu_indices(len(values), 1)
    line = np.median((values[second] - values[first]) / (second - first)) * places
    smoothed: NDArray[np.float64] = line + np.median(values - line)
    return smoothed
