"""Target: samples go to the sources whose loss is furthest above a reference loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, Literal

import numpy as np

from streamload.errors import OptionError
from streamload.steering.limits import checked, exceeds_caps, given_shares, interval, step_towards
from streamload.steering.policy import Decided
from streamload.steering.summary import Signal, SourceSummary, Summary

_RATIO = 4.0  # of a share to the given one, at most, either way
_SIGMAS = 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """Weights by how far each source's loss is above a reference loss; for `Order(mixing=…)`.

    The reference says which loss can be reached: that of a finished training of a small model, say (as in
    DoReMi). A source that has reached it goes to its floor, one that isn't named keeps its share. Shares
    change whenever the run has become 5 % longer, by 5 % of all samples at most.

    Attributes:
        reference: the loss by the sources' names.
        signal: "loss": of `loader.report(loss=…)`. "eval": of `loader.report_eval`.
        max_passes: a source that was repeated so often gets no more than its given share.
        floor: each source's smallest share, or half its given share if that is less.
        every: the steps from one decision to the next.

    Raises:
        OptionError: a value that isn't allowed.
    """

    reference: Mapping[str, float]
    signal: Literal["loss", "eval"] = "loss"
    max_passes: float = 4.0
    floor: float = 0.02
    every: int = 200

    def __post_init__(self) -> None:
        if not self.reference:
            raise OptionError("Target({}) has no reference; expected {name: loss}")
        for name, loss in self.reference.items():
            if not isinstance(loss, (int, float)) or not isfinite(loss):
                raise OptionError(f"Target: the reference of {name!r} is {loss!r}; expected a loss")
        checked(self)

    @property
    def names(self) -> frozenset[str]:
        """The sources that it names."""
        return frozenset(self.reference)

    def decide(self, summary: Summary, memory: Any) -> Decided:
        """Return shares in proportion to the excess losses since the last change."""
        shares = np.array([source.share for source in summary.sources])
        old = memory or {"sums": [[0.0, 0.0, 0.0] for _ in shares], "next": 0}
        sums = [
            self._sum(s, Signal(*saved_sum))
            for s, saved_sum in zip(summary.sources, old["sums"], strict=True)
        ]
        kept = given_shares(memory, shares) | {
            "sums": [list(loss_sum) for loss_sum in sums],
            "next": old["next"],
        }
        if exceeds_caps(self, summary, kept):
            return step_towards(shares, self, summary, kept, "enough passes over a source")
        if summary.step < old["next"]:
            return Decided(None, kept, "not yet")
        kept["next"] = summary.step + interval(summary, self.every)
        kept["sums"] = [[0.0, 0.0, 0.0] for _ in shares]
        base = np.array(kept["given"])
        excess = np.array(
            [self._excess(s.name, loss_sum) for s, loss_sum in zip(summary.sources, sums, strict=True)]
        )
        are_known = np.isfinite(excess)
        if not are_known.any():
            return Decided(None, kept, "no source with a reference has reports")
        mean = float(base[are_known] @ excess[are_known]) / max(float(base[are_known].sum()), 1e-12)
        if mean <= 0:
            return Decided(None, kept, "every reference is reached")
        target = shares.copy()
        target[are_known] = base[are_known] * np.clip(excess[are_known] / mean, 1 / _RATIO, _RATIO)
        target[are_known] *= shares[are_known].sum() / max(float(target[are_known].sum()), 1e-12)
        listed = ", ".join(f"{value:.3g}" if np.isfinite(value) else "?" for value in excess)
        return step_towards(target, self, summary, kept, f"losses above their references: {listed}")

    def _sum(self, source: SourceSummary, before: Signal) -> Signal:
        if self.signal == "loss":
            loss = source.loss
            return before.plus(loss) if isfinite(loss.total) and isfinite(loss.squares) else before
        held_out = source.evaluation
        if held_out is None or not isfinite(held_out):
            return before
        return before.plus(Signal(1.0, held_out, held_out * held_out))

    def _excess(self, name: str, reported: Signal) -> float:
        """Excess of the loss over the reference beyond noise, 0 where it is reached, NaN if unknown."""
        if name not in self.reference or reported.mean is None:
            return np.nan
        variance = max(0.0, reported.squares / reported.count - reported.mean**2)
        return max(
            0.0, reported.mean - self.reference[name] - _SIGMAS * sqrt(variance / max(1.0, reported.count))
        )
