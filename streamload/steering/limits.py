"""Limits on how policies move shares: steps, floors, caps, and the shares that the user gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.errors import OptionError
from streamload.steering.policy import Decided
from streamload.steering.summary import Summary

Floats = NDArray[np.float64]

_INTERVAL = 0.05  # of the steps so far, from one change to the next
_MOST_MOVED = 0.05  # of all samples, by one decision
LEAST_MOVED = 0.02
"""A decision that would move less of all samples is left out."""
ROUNDING = 1e-6
"""Of shares in effect, which are whole numbers of units, to those decided."""


def interval(summary: Summary, every: int) -> int:
    """Return the steps from one change to the next: 5 % of those so far, as losses fall by powers of them."""
    return max(every, int(summary.step * _INTERVAL))


def towards(shares: Floats, target: Floats) -> Floats:
    """Return the shares that are wanted, or as far on the way to them as one decision goes."""
    moved = moved_by(shares, target)
    return target if moved <= _MOST_MOVED else shares + (target - shares) * (_MOST_MOVED / moved)


def moved_by(shares: Floats, target: Floats) -> float:
    """Return the part of all samples that come from another source then."""
    return float(np.abs(target - shares).sum()) / 2


def floors(summary: Summary, base: Floats, floor: float) -> Floats:
    """Return the least share of each source: the sources' own floors, and a policy's."""
    source_floors = np.array([source.floor for source in summary.sources])
    return np.asarray(np.maximum(source_floors, np.minimum(floor, base / 2)), np.float64)


def caps(summary: Summary, base: Floats, max_passes: float) -> Floats:
    """Return the largest share of each source: the given one if it will soon have `max_passes`."""
    most = np.ones(len(summary.sources))
    for place, source in enumerate(summary.sources):
        soon = source.total_samples + 2 * source.samples  # a decision counts some steps later
        if source.passes and source.passes * soon > max_passes * source.total_samples:
            most[place] = base[place]
    return most


def exceeds_caps(policy: Any, summary: Summary, kept: Mapping[str, Any]) -> bool:
    """Return whether a source has more than its cap, which can't wait until shares change anyway."""
    shares = np.array([source.share for source in summary.sources])
    base = np.array(kept["given"])
    least = floors(summary, base, policy.floor)
    return bool((shares > np.maximum(least, caps(summary, base, policy.max_passes)) + ROUNDING).any())


def bounded(target: Floats, least: Floats, most: Floats) -> Floats:
    """Return shares in proportion to those wanted, none below `least` or above `most`; their sum is 1.

    The bounds have to leave room: the sum of `least` is at most 1, and that of `most` at least 1.
    """
    low, high = 0.0, 1.0
    while np.clip(target * high, least, most).sum() < 1 and high < 1e12:
        low, high = high, high * 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(target * middle, least, most).sum() < 1 else (low, middle)
    shares = np.clip(target * high, least, most)
    return np.asarray(shares / shares.sum(), np.float64)


def given_shares(memory: Mapping[str, Any] | None, shares: Floats) -> dict[str, Any]:
    """Return what to remember of shares: those that the user gave, and the last two that were decided.

    Shares in effect that no decision made come from the user, who changed them during the run.
    """
    if memory is not None:
        earlier = [memory["given"], *memory["decided"]]
        if any(np.allclose(shares, earlier_shares, atol=1e-3) for earlier_shares in earlier):
            return {"given": memory["given"], "decided": memory["decided"]}
    return {"given": shares.tolist(), "decided": []}


def checked(policy: Any) -> None:
    """Check the options that Progress and Target have in common.

    Raises:
        OptionError: a value that isn't allowed.
    """
    name = type(policy).__name__
    if policy.signal not in ("loss", "eval"):
        raise OptionError(f'{name}(signal={policy.signal!r}); expected "loss" or "eval"')
    if not policy.max_passes > 0:
        raise OptionError(f"{name}(max_passes={policy.max_passes!r}); expected a number above 0")
    if not 0 <= policy.floor <= 1:
        raise OptionError(f"{name}(floor={policy.floor!r}); expected a number from 0 to 1")
    if not isinstance(policy.every, int) or isinstance(policy.every, bool) or policy.every < 1:
        raise OptionError(f"{name}(every={policy.every!r}); expected a number of steps from 1")


def step_towards(target: Floats, policy: Any, summary: Summary, kept: dict[str, Any], reason: str) -> Decided:
    """Return the decision for shares that are wanted: one step, within floors and caps.

    Args:
        target: shares: float[sources].
        policy: its `floor` and `max_passes` count.
        summary: of the decision.
        kept: the policy's memory, with that of `given_shares`; what is decided is added.
        reason: for the log.
    """
    shares = np.array([source.share for source in summary.sources])
    base = np.array(kept["given"])
    least = floors(summary, base, policy.floor)
    most = np.maximum(least, caps(summary, base, policy.max_passes))
    limited = bounded(towards(shares, target), least, most)
    if moved_by(shares, limited) < LEAST_MOVED and not exceeds_caps(policy, summary, kept):
        return Decided(None, kept, "too little to move")
    kept["decided"] = [*kept["decided"][-1:], limited.tolist()]
    names = [source.name for source in summary.sources]
    return Decided(dict(zip(names, limited.tolist(), strict=True)), kept, reason)
