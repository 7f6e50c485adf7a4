"""AlignmentBalanced: the loss weighs more where the alignment of image and text still rises.

The trend is that of trend.py, of 1 − alignment, by the source's own samples times their weights. For the
expected gradient a weight in the loss is what a share of the samples is, so it is bounded and moved like one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import numpy as np

from streamload.errors import OptionError
from streamload.options.values import at_least
from streamload.steering.limits import LEAST_MOVED, ROUNDING, Floats, bounded, interval, moved_by, towards
from streamload.steering.policy import Decided
from streamload.steering.progress import AHEAD, wanted_shares
from streamload.steering.summary import SourceSummary, Summary
from streamload.steering.trend import Bin, gain_at, joined

_WARM_UP = 20
"""Decisions before the first change: each has one value of a source, and fewer don't tell their noise."""


@dataclass(frozen=True, slots=True)
class AlignmentBalanced:
    """Weights in the loss that follow how well each source's modalities align; for `Order(mixing=…)`.

    Samples stay as they are. A source's rows weigh more if one more sample adds more to its alignment than
    one of the others does, beyond what noise explains, and less if it adds less; getting back to 1 takes less
    evidence. The mean weight of all rows stays 1; where shares are set anew, from the next decision step on.
    Weights change from the twentieth decision step on, then whenever the run has become 5 % longer, by 5 % of
    the whole loss at most. A source of which too little is reported keeps its part of the loss.

    Attributes:
        signal: "alignment": what `loader.report(alignment=…)` got in a source's first pass. "eval": what
            `loader.report_eval` got, of which less is better: held-out losses, or 1 − held-out alignments.
        least, most: weights of a source's rows.
        every: the steps from one decision to the next; give less for runs of a few thousand steps.

    Raises:
        OptionError: a value that isn't allowed.
    """

    signal: Literal["alignment", "eval"] = "alignment"
    least: float = 0.25
    most: float = 4.0
    every: int = 200

    def __post_init__(self) -> None:
        at_least(1, every=self.every)
        if self.signal not in ("alignment", "eval"):
            raise OptionError(f'AlignmentBalanced(signal={self.signal!r}); expected "alignment" or "eval"')
        if not 0 <= self.least <= 1 <= self.most < float("inf"):
            raise OptionError(
                f"AlignmentBalanced(least={self.least!r}, most={self.most!r}); expected 0 ≤ least ≤ 1 ≤ most"
            )

    def decide(self, summary: Summary, memory: Any) -> Decided:
        """Return new weights in the loss where the alignments' gains differ by more than noise."""
        sources = summary.sources
        shares = np.array([source.share for source in sources])
        old = memory or {"bins": [[] for _ in sources], "weighted": [0.0] * len(sources), "next": 0}
        reported = [
            self._reported(source, before) for source, before in zip(sources, old["weighted"], strict=True)
        ]
        kept = {
            "bins": [joined(bins, more) for bins, more in zip(old["bins"], reported, strict=True)],
            "weighted": [
                before + source.samples * source.loss_weight
                for source, before in zip(sources, old["weighted"], strict=True)
            ],
            "next": old["next"],
        }
        parts = shares * [source.loss_weight for source in sources]
        mean_weight = parts.sum()
        parts = parts / mean_weight if mean_weight > 0 else shares
        if abs(mean_weight - 1) > ROUNDING:
            again = bounded(parts, self.least * shares, self.most * shares)
            return Decided(None, kept, "the shares were set anew", _weights(again, summary))
        if summary.step < max(kept["next"], _WARM_UP * self.every):
            return Decided(None, kept, "not yet")
        kept["next"] = summary.step + interval(summary, self.every)
        ahead = AHEAD * sum(kept["weighted"])
        gains = [
            gain_at(bins, weighted + part * ahead) if bins else None
            for bins, weighted, part in zip(kept["bins"], kept["weighted"], parts.tolist(), strict=True)
        ]
        target, reason = wanted_shares(parts, shares, gains)
        if target is None:
            return Decided(None, kept, reason)
        limited = bounded(towards(parts, target), self.least * shares, self.most * shares)
        if moved_by(parts, limited) < LEAST_MOVED:
            return Decided(None, kept, "too little to move")
        return Decided(None, kept, reason, _weights(limited, summary))

    def _reported(self, source: SourceSummary, before: float) -> list[Bin]:
        """What was reported in the interval, at the weighted samples in its middle."""
        middle = before + source.samples * source.loss_weight / 2
        if self.signal == "eval":
            held_out = source.evaluation
            return (
                [] if held_out is None or not isfinite(held_out) else [[2 * middle - before, held_out, 1.0]]
            )
        mean = source.alignment.mean
        if mean is None or not isfinite(mean) or (source.passes or 0.0) > 1:
            return []
        return [[middle, 1.0 - mean, source.alignment.count]]


def _weights(parts: Floats, summary: Summary) -> dict[str, float]:
    """The weights of rows, by source, where sources have these parts of the loss."""
    shares = np.array([source.share for source in summary.sources])
    weights = np.divide(parts, shares, out=np.ones(len(shares)), where=shares > 0)
    return dict(zip((source.name for source in summary.sources), weights.tolist(), strict=True))
