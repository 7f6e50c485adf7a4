"""TokenShares: the sources' weights as shares of tokens, by the tokens that their rows turn out to have."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from streamload.errors import OptionError
from streamload.steering.limits import bounded, floors, given_shares, moved_by
from streamload.steering.policy import Decided
from streamload.steering.summary import Signal, SourceSummary, Summary

_LEAST_MOVED = 0.005  # of all samples; less is noise in the mean tokens of a row
_KEPT = 0.5  # of what was reported before a decision, at the next one: what rows have may drift


@dataclass(frozen=True, slots=True)
class TokenShares:
    """Weights that count tokens instead of rows; for `Order(mixing=…)`.

    Each source gets rows in proportion to its weight ÷ the mean tokens of its rows, as reported by
    `loader.report(tokens=…)`. Until the first decision weights count rows. A source of which nothing is
    reported keeps its share of the rows. Floors are of rows.

    Attributes:
        every: the steps from one decision to the next.

    Raises:
        OptionError: a value that isn't allowed.
    """

    every: int = 200

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise OptionError(f"TokenShares(every={self.every!r}); expected a number of steps from 1")

    def decide(self, summary: Summary, memory: Any) -> Decided:
        """Return the weights of rows by which tokens have the given shares, where they are others now."""
        shares = np.array([source.share for source in summary.sources])
        old = memory["tokens"] if memory else [[0.0, 0.0] for _ in shares]
        tokens = [_joined(source, *saved) for source, saved in zip(summary.sources, old, strict=True)]
        kept = given_shares(memory, shares) | {"tokens": tokens}
        means = np.array([total / count if count else 0.0 for count, total in tokens])
        base = np.array(kept["given"])
        are_known = (means > 0) & (base > 0)
        if are_known.sum() < 2:
            return Decided(None, kept, "too few reports")
        target = base.copy()
        target[are_known] = base[are_known] / means[are_known]
        target[are_known] *= base[are_known].sum() / target[are_known].sum()
        target = bounded(target, floors(summary, base, 0.0), np.ones(len(base)))
        listed = ", ".join(
            f"{mean:.4g}" if is_known else "?" for mean, is_known in zip(means, are_known, strict=True)
        )
        if moved_by(shares, target) < _LEAST_MOVED:
            return Decided(None, kept, f"as wanted; tokens of a row: {listed}")
        kept["decided"] = [*kept["decided"][-1:], target.tolist()]
        names = [source.name for source in summary.sources]
        return Decided(dict(zip(names, target.tolist(), strict=True)), kept, f"tokens of a row: {listed}")


def _joined(source: SourceSummary, count: float, total: float) -> list[float]:
    """The rows that reported tokens and their sum; earlier ones count less and less."""
    reported: Signal = source.tokens
    if not isfinite(reported.total):
        return [count, total]
    return [_KEPT * count + reported.count, _KEPT * total + reported.total]
