"""Progress: samples go to the sources whose loss still falls, by the trend of each source's loss.

The trend is that of trend.py; here it becomes shares, within floors and caps, in small steps, and only where
it isn't noise. The mean of the sources' losses is least when one more sample gains as much in each source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, exp, isfinite
from typing import Any, Literal

import numpy as np

from streamload.steering.limits import Floats, checked, exceeds_caps, given_shares, interval, step_towards
from streamload.steering.policy import Decided
from streamload.steering.summary import SourceSummary, Summary
from streamload.steering.trend import Bin, Gain, gain_at, joined, no_less_than_nothing, parts_of

_WARM_UP = 10  # decisions before the first change
_CERTAIN = 4.5  # standard errors from which on a difference isn't noise: many are looked at in a run
_EXCESS = 2.0  # then what exceeds this many counts, of every source
_BACK = 1.0  # takes the place of both on the way back to the given shares
_RATIO = e  # a share changes by this factor at most
AHEAD = 0.75
"""Of the samples so far: shares move slowly, so what counts is the gain by then."""
_REPEATS_WORTH = 15.0  # passes after which repeats teach 1/e of what new samples do (arXiv 2305.16264)


@dataclass(frozen=True, slots=True)
class Progress:
    """Weights that follow the trend of each source's loss; for `Order(mixing=…)`.

    A source gets more samples if one more of them takes more off its loss than one of the others does, beyond
    what noise explains; getting back to its given share takes less evidence. Shares change from the tenth
    decision step on, then whenever the run has become 5 % longer, by 5 % of all samples at most. A source of
    which too little is reported keeps its share.

    Attributes:
        signal: "loss": what `loader.report(loss=…)` got during a source's first pass, since samples that were
            seen before no longer show what is learned. "eval": the held-out losses of `loader.report_eval`,
            of which it takes eight at least; for contrastive losses, which depend on their negatives.
        max_passes: a source that was repeated so often gets no more than its given share.
        floor: each source's smallest share, or half its given share if that is less.
        every: the steps from one decision to the next; give less for runs of a few thousand steps.

    Raises:
        OptionError: a value that isn't allowed.
    """

    signal: Literal["loss", "eval"] = "loss"
    max_passes: float = 4.0
    floor: float = 0.02
    every: int = 200

    def __post_init__(self) -> None:
        checked(self)

    def decide(self, summary: Summary, memory: Any) -> Decided:
        """Return new weights where the gains differ by more than noise."""
        shares = np.array([source.share for source in summary.sources])
        old = memory or {"bins": [[] for _ in shares], "next": 0}
        kept = given_shares(memory, shares) | {"next": old["next"]}
        kept["bins"] = [
            joined(bins, self._reported(source))
            for source, bins in zip(summary.sources, old["bins"], strict=True)
        ]
        if exceeds_caps(self, summary, kept):
            return step_towards(shares, self, summary, kept, "enough passes over a source")
        if summary.step < max(kept["next"], _WARM_UP * self.every):
            return Decided(None, kept, "not yet")
        kept["next"] = summary.step + interval(summary, self.every)
        ahead = AHEAD * sum(source.total_samples for source in summary.sources)
        gains = [
            self._gain(source, bins, source.share * ahead)
            for source, bins in zip(summary.sources, kept["bins"], strict=True)
        ]
        target, reason = wanted_shares(shares, np.array(kept["given"]), gains)
        if target is None:
            return Decided(None, kept, reason)
        return step_towards(target, self, summary, kept, reason)

    def _reported(self, source: SourceSummary) -> list[Bin]:
        if self.signal == "loss":
            return parts_of(source, first_pass_only=True)
        held_out = source.evaluation
        return [] if held_out is None or not isfinite(held_out) else [[source.total_samples, held_out, 1.0]]

    def _gain(self, source: SourceSummary, bins: Sequence[Bin], ahead: float) -> Gain | None:
        """The gain after some more samples of a source, less where its samples are repeated."""
        gain = gain_at(bins, source.total_samples + ahead) if bins else None
        if gain is None or self.signal == "eval" or source.passes is None or source.passes <= 1:
            return gain
        worth = exp((1 - source.passes) / _REPEATS_WORTH)
        return Gain(gain.value * worth, gain.error * worth)


def wanted_shares(shares: Floats, base: Floats, gains: Sequence[Gain | None]) -> tuple[Floats | None, str]:
    """Return the shares that follow from the gains, and the reason; None where it is all noise.

    Moving away from the given shares takes more evidence than moving back. Otherwise a source that was right
    to lose its share couldn't get it back once the others are learned: with few samples its error is large.

    Args:
        shares: in effect: float[sources].
        base: by the user: float[sources].
        gains: of each source; None: unknown, it keeps its share.
    """
    are_known = np.array([gain is not None for gain in gains]) & (shares > 0)
    if are_known.sum() < 2:
        return None, "too few reports"
    if not any(gain.value > 0 for gain in gains if gain):
        return None, "no loss falls"
    values, errors = np.array([no_less_than_nothing(gain) if gain else (0.0, 0.0) for gain in gains]).T
    part = np.where(are_known, shares, 0.0)
    part /= part.sum()
    mean = float(part @ values)
    spread = np.sqrt(errors**2 + float(part**2 @ errors**2))
    apart = np.where(are_known, np.abs(values - mean), 0.0)
    back = (values - mean) * (base - shares) > 0
    if not (apart > np.where(back, _BACK, _CERTAIN) * spread).any():
        return None, "no difference beyond noise"
    enough = np.where(back, _BACK, _EXCESS)
    excess = np.sign(values - mean) * np.maximum(0.0, apart - enough * spread)
    target = shares * np.clip(1 + excess / mean, 1 / _RATIO, _RATIO)
    target[are_known] *= shares[are_known].sum() / target[are_known].sum()
    relative = ", ".join(f"{gain.value / mean:.2f}" if gain else "?" for gain in gains)
    return target, f"gains in relation to their mean: {relative}"
