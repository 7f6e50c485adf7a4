"""Findings about a run, as a loader returns them: a verdict, and alerts. observe/ makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from streamload.metrics.counters import Snapshot

Limit = Literal[
    "origin",
    "shuffle",
    "disk",
    "CPU",
    "features",
    "hand-over",
    "device copy",
    "training",
    "another rank",
    "unclear",
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on what limits a training over an interval.

    Attributes:
        limit: "training": it doesn't wait for data; "another rank": the steps do; "unclear": the figures
            don't say.
        seconds: of the interval.
        wait: the share of it in which the training loop waited for data.
        evidence: the figures that decided.
        advice: what to change.
        gain: how many times as fast the training would be if data were free: 1 / (1 - wait).
        counted: what was counted in it.
    """

    limit: Limit
    seconds: float
    wait: float
    evidence: str
    advice: str
    gain: float
    counted: Snapshot = field(default_factory=Snapshot, repr=False)

    def __str__(self) -> str:
        waited = f"waited {self.wait:.0%} of the last {_duration(self.seconds)} for data: "
        return f"{waited if self.seconds else ''}{self.evidence}. {self.advice}"

    def _repr_html_(self) -> str:
        from streamload.metrics.display import card_of_verdict

        return card_of_verdict(self)


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert that was raised or cleared, as `on_alert` gets it.

    Attributes:
        name: "data wait", "origin slow", "origin failing", "cache thrashing", "source starved",
            "memory tight", "straggler rank" or "stalled".
        message: what is wrong, in a sentence; of a cleared alert, what was.
        since: when it began, in seconds since 1970.
        value: of the figure that decided, when it was raised or cleared.
        is_raised: False: it was cleared.
    """

    name: str
    message: str
    since: float
    value: float
    is_raised: bool


class SlowestRank(NamedTuple):
    """The rank of a run that waits most for data, its share of waiting, and its host if there are several."""

    rank: int
    wait: float
    host: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else "")


OnAlert = Callable[[Alert], object]


@dataclass(slots=True)
class Requests:
    """Requests to show something of a loader; a copy of it shows the same.

    Attributes:
        listeners: called with each alert.
        record_in: the folder of recordings; None: that of the settings.
    """

    listeners: list[OnAlert] = field(default_factory=list)
    record_in: Path | None = None


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min"
