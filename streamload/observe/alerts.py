"""Alerts of one rank: what is wrong long enough to tell somebody. Pure: figures and a clock in, alerts out.

An alert is raised once its value has been at its limit or above for HOLD_SECONDS, and cleared once it has
been below half of the limit for as long. The loader looks about once a second (observe/observer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streamload.metrics.findings import Alert, SlowestRank
from streamload.observe.figures import Figures
from streamload.observe.verdict import judge

HOLD_SECONDS = 30.0
WINDOW_SECONDS = 10.0
"""Time span of the figures."""
_STALLED_SECONDS, _IDLE_SECONDS = 30.0, 600.0
"""A wait for one batch of the first length is a stall, and so is a step of the second."""
_FULL = 0.9
"""Memory counts as tight from here on: 0 there, 1 when it is full."""
_FEWEST_RETRIES = 3
_FEWEST_EVICTIONS = 4


@dataclass(frozen=True, slots=True)
class Rule:
    """When an alert is raised.

    Attributes:
        name: of the alert.
        limit: the value from which it is.
        value: from figures.
        message: from figures.
        hold_seconds: how long it has to last.
    """

    name: str
    limit: float
    value: Callable[[Figures], float]
    message: Callable[[Figures], str]
    hold_seconds: float = HOLD_SECONDS


def _origin_slow(figures: Figures) -> float:
    return 0.0 if figures.machine.is_local else _of_wait(figures, figures.counted.blocked_wait_seconds)


def _of_wait(figures: Figures, seconds: float) -> float:
    return min(figures.wait, seconds / figures.seconds) if figures.seconds > 0 else 0.0


def _origin_failing(figures: Figures) -> float:
    counted = figures.counted
    if counted.origin_outages:
        return 1.0
    if counted.origin_retries < _FEWEST_RETRIES:
        return 0.0
    return counted.origin_retries / max(counted.origin_retries, counted.origin_requests)


def _thrashing(figures: Figures) -> float:
    """The share of samples that had no room; or how many shards too many were evicted for each that began."""
    counted = figures.counted
    by_ranges = min(1.0, counted.range_reads / counted.samples_yielded) if counted.samples_yielded else 0.0
    if counted.shards_evicted < _FEWEST_EVICTIONS:
        return by_ranges
    return max(by_ranges, min(1.0, (counted.shards_evicted - _begun(figures)) / counted.shards_evicted))


def _begun(figures: Figures) -> int:
    return figures.counted.tier_hits + figures.counted.tier_misses


def _starved(figures: Figures) -> tuple[str, float]:
    """The source whose bytes are waited for most, and the share of time that the training waits for it."""
    waits = figures.counted.source_wait_seconds
    if len(waits) < 2 or not any(waits.values()):
        return "", 0.0
    source = max(waits, key=lambda name: waits[name])
    share = waits[source] / sum(waits.values())
    return source, _of_wait(figures, figures.counted.blocked_wait_seconds) if share >= 0.8 else 0.0


def _straggler(figures: Figures) -> float:
    slowest = figures.slowest
    return 0.0 if slowest is None or slowest.wait < 2 * figures.wait else slowest.wait


def _stalled(figures: Figures) -> float:
    return max(figures.waiting_seconds, figures.still_seconds * _STALLED_SECONDS / _IDLE_SECONDS)


def _stall_message(figures: Figures) -> str:
    if figures.waiting_seconds:
        return f"the training has waited {figures.waiting_seconds:.0f} s for its next batch"
    return f"the training loop hasn't asked for a batch for {figures.still_seconds:.0f} s"


RULES = (
    Rule("data wait", 0.2, lambda figures: figures.wait, lambda figures: str(judge(figures))),
    Rule(
        "origin slow",
        0.2,
        _origin_slow,
        lambda figures: f"the training waits {_origin_slow(figures):.0%} of the time for bytes of its shards",
    ),
    Rule(
        "origin failing",
        0.25,
        _origin_failing,
        lambda figures: (
            f"{figures.counted.origin_retries:,} of {figures.counted.origin_requests:,} requests to the "
            f"origin had to be repeated, and {figures.counted.origin_outages:,} outages began"
        ),
    ),
    Rule(
        "cache thrashing",
        0.25,
        _thrashing,
        lambda figures: (
            f"the cache has no room: {figures.counted.range_reads:,} of "
            f"{figures.counted.samples_yielded:,} samples were read from their origin one by one, and "
            f"{figures.counted.shards_evicted:,} shards were evicted while {_begun(figures):,} began; "
            f"raise cache_size"
        ),
    ),
    Rule(
        "source starved",
        0.2,
        lambda figures: _starved(figures)[1],
        lambda figures: (
            f"the training waits {_starved(figures)[1]:.0%} of the time for source "
            f"{_starved(figures)[0]!r} alone"
        ),
    ),
    Rule(
        "memory tight",
        0.8,
        lambda figures: max(0.0, (figures.memory_ratio - _FULL) / (1 - _FULL)),
        lambda figures: f"{figures.memory_ratio:.0%} of the memory is taken",
    ),
    Rule(
        "straggler rank",
        0.2,
        _straggler,
        lambda figures: (
            f"{figures.slowest or SlowestRank(0, 0.0)} waits {_straggler(figures):.0%} of the time for data, "
            f"and all ranks wait for it"
        ),
    ),
    Rule("stalled", _STALLED_SECONDS, _stalled, _stall_message, hold_seconds=0.0),
)


@dataclass(slots=True)
class _Standing:
    """One rule's alert.

    Attributes:
        is_raised: whether it is.
        turned: since when its value has been beyond the limit that changes it, by the clock; None: it isn't.
        since: when it was raised last, in seconds since 1970.
        message: of its last figures at the limit or above.
    """

    is_raised: bool = False
    turned: float | None = None
    since: float = 0.0
    message: str = ""


class Alerts:
    """The alerts of one rank. Not thread-safe."""

    def __init__(self) -> None:
        self._standing = {rule.name: _Standing() for rule in RULES}

    def look(self, figures: Figures, now_seconds: float, unix: float) -> list[Alert]:
        """The alerts that are raised or cleared now.

        Args:
            figures: of the last WINDOW_SECONDS.
            now_seconds: seconds of a monotonic clock.
            unix: the same moment, in seconds since 1970.
        """
        alerts = (self._judge(rule, figures, now_seconds, unix) for rule in RULES)
        return [alert for alert in alerts if alert is not None]

    def raised(self) -> dict[str, str]:
        """The messages of the alerts that are raised, by name."""
        return {name: standing.message for name, standing in self._standing.items() if standing.is_raised}

    def _judge(self, rule: Rule, figures: Figures, now_seconds: float, unix: float) -> Alert | None:
        standing, value = self._standing[rule.name], rule.value(figures)
        is_turned = value < rule.limit / 2 if standing.is_raised else value >= rule.limit
        if not is_turned:
            standing.turned = None
            if standing.is_raised and value >= rule.limit:
                standing.message = rule.message(figures)
            return None
        if standing.turned is None:
            standing.turned = now_seconds
        held = HOLD_SECONDS if standing.is_raised else rule.hold_seconds
        if now_seconds - standing.turned < held:
            return None
        if not standing.is_raised:
            standing.since = unix - (now_seconds - standing.turned)
            standing.message = rule.message(figures)
        standing.is_raised, standing.turned = not standing.is_raised, None
        return Alert(rule.name, standing.message, standing.since, value, standing.is_raised)
