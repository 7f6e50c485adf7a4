"""Reports of a run, read from its log of decisions, to show what was decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from streamload.errors import OptionError
from streamload.order.events import WEIGHTS
from streamload.steering.decisions import read_lines
from streamload.steering.summary import NOTHING, PARTS, Signal, SourceSummary


class Point(NamedTuple):
    """A decision step.

    Attributes:
        step: of the run.
        reason: the policy's.
        sources: as they were then; what was reported is in the middle part of the interval.
    """

    step: int
    reason: str
    sources: tuple[SourceSummary, ...]


def read_points(path: Path) -> list[Point]:
    """Return the decision steps of `decisions.jsonl`.

    Raises:
        OptionError: nothing can be read from the file.
        DecisionsError: a log was altered, or is cut.
    """
    points = list(_of_log(path))
    if not points:
        raise OptionError(f"{path} has no decision of a policy, and no reports: there is nothing to show")
    return points


def _of_log(path: Path) -> Iterator[Point]:
    totals: dict[str, int] = {}
    for line, _ in read_lines(path):
        if line["kind"] != WEIGHTS or not line.get("sources"):
            continue
        for source in line["sources"]:
            totals[source["name"]] = totals.get(source["name"], 0) + source["samples"]
        sources = tuple(_source(source, totals[source["name"]]) for source in line["sources"])
        yield Point(line["step"], line.get("reason", ""), sources)


def _source(values: Mapping[str, Any], total: int) -> SourceSummary:
    losses = [NOTHING] * PARTS
    losses[PARTS // 2] = _signal(values.get("loss"), values.get("reported") or 1)
    return SourceSummary(
        values["name"],
        values["share"],
        values["share"],
        samples=values["samples"],
        total_samples=total,
        passes=values.get("passes"),
        losses=tuple(losses),
        alignment=_signal(values.get("alignment"), 1),
        evaluation=values.get("evaluation"),
        bad=values.get("bad") or 0,
        tokens=_signal(values.get("tokens"), 1),
        loss_weight=values.get("loss_weight", 1.0),
    )


def _signal(mean: float | None, count: float) -> Signal:
    return NOTHING if mean is None else Signal(count, count * mean, count * mean * mean)
