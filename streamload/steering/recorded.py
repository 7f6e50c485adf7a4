"""Reports of a run, read from its log of decisions or from a CSV: to draw it, or to ask other policies."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from streamload.errors import OptionError
from streamload.order.events import WEIGHTS
from streamload.steering.decisions import read_lines
from streamload.steering.policy import Policy, weights_of
from streamload.steering.summary import NOTHING, PARTS, Signal, SourceSummary, Summary


class Point(NamedTuple):
    """A decision step.

    Attributes:
        step: of the run.
        reason: the policy's; "" in a CSV.
        sources: as they were then; what was reported is in the middle part of the interval.
    """

    step: int
    reason: str
    sources: tuple[SourceSummary, ...]


def read_points(path: Path) -> list[Point]:
    """Return the decision steps of `decisions.jsonl`, or of a CSV with the columns step, source and loss.

    A CSV may also have the columns samples, share and alignment; without samples, sources count alike.

    Raises:
        OptionError: nothing can be read from the file.
        DecisionsError: a log was altered, or is cut.
    """
    points = list(_of_csv(path) if path.suffix in (".csv", ".tsv") else _of_log(path))
    if not points:
        raise OptionError(f"{path} has no decision of a policy, and no reports: there is nothing to show")
    return points


def ask(policy: Policy, points: list[Point]) -> list[tuple[dict[str, float], str]]:
    """Return the shares that a policy would have had at each point, and its reason.

    It is asked with the losses as they were reported, under the shares that the run had.

    Raises:
        OptionError: its weights can't be used.
    """
    memory, decisions = None, []
    shares = {source.name: source.share for source in points[0].sources}
    for point in points:
        sources = tuple(
            replace(source, weight=share, share=share)
            for source in point.sources
            for share in (shares.get(source.name, source.share),)
        )
        summary = Summary(point.step, None, sources)
        decided = policy.decide(summary, memory)
        memory, weights = decided.memory, weights_of(decided, summary)
        if weights is not None:
            total = sum(weights)
            shares = {s.name: weight / total for s, weight in zip(sources, weights, strict=True)}
        decisions.append((dict(shares), decided.reason))
    return decisions


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
    )


def _signal(mean: float | None, count: float) -> Signal:
    return NOTHING if mean is None else Signal(count, count * mean, count * mean * mean)


def _of_csv(path: Path) -> Iterator[Point]:
    by_step: dict[int, dict[str, dict[str, float]]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","):
                numbers = {name: float(text) for name, text in row.items() if name != "source" and text}
                if not math.isfinite(sum(numbers.values())):
                    continue
                by_step.setdefault(int(numbers["step"]), {})[row["source"]] = numbers
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise OptionError(f"{path}: {exc}; expected a CSV with the columns step, source, loss") from exc
    names = list(dict.fromkeys(name for rows in by_step.values() for name in rows))
    totals, before = dict.fromkeys(names, 0), 0
    for step, rows in sorted(by_step.items()):
        if step <= before:
            raise OptionError(f"{path}: step {step}; expected a number from 1")
        sources = []
        for name in names:
            reported = rows.get(name, {})
            samples = int(reported.get("samples", step - before))
            totals[name] += samples
            values = {"name": name, "share": reported.get("share", 1 / len(names)), "samples": samples}
            sources.append(_source({**values, "reported": samples, **_reported(reported)}, totals[name]))
        yield Point(step, "", tuple(sources))
        before = step


def _reported(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: values.get(name) for name in ("loss", "alignment", "evaluation", "passes")}
