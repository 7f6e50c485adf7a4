"""`streamload mixing`: what a run's policy decided."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.options import AsJson

if TYPE_CHECKING:
    from streamload.steering.recorded import Point
    from streamload.steering.summary import SourceSummary

mixing = typer.Typer(
    help="Weights that change during a run: what was decided.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_LINES = 20
Course = dict[str, Any]


@mixing.command()
def show(
    record: Annotated[Path, typer.Argument(help="decisions.jsonl, as Order(decisions=…) writes it.")],
    as_json: AsJson = False,
) -> None:
    """Show the shares of a run's sources by step; --json also has what was reported of each."""
    from streamload.steering.recorded import read_points

    points = read_points(record)
    course = _course(points)
    if as_json:
        print(json.dumps(course))
        return
    _print(course)


def _course(points: list[Point]) -> Course:
    names = [source.name for source in points[0].sources]

    def by_source(value: Callable[[SourceSummary], float | None]) -> dict[str, list[float | None]]:
        rows = [{source.name: value(source) for source in point.sources} for point in points]
        return {name: [_number(row.get(name)) for row in rows] for name in names}

    return {
        "steps": [point.step for point in points],
        "shares": by_source(lambda source: source.share),
        "losses": by_source(lambda source: source.loss.mean),
        "alignment": by_source(lambda source: source.alignment.mean),
        "loss_weights": by_source(lambda source: source.loss_weight),
        "evaluation": by_source(lambda source: source.evaluation),
        "reasons": [point.reason for point in points],
    }


def _number(value: float | None) -> float | None:
    """A number; None, as JSON has no NaN, where it isn't known."""
    return float(value) if value is not None and math.isfinite(value) else None


def _print(course: Course) -> None:
    width = max(7, *map(len, course["shares"]))
    print(f"{'step':>9}  " + "  ".join(f"{name:>{width}}" for name in course["shares"]))
    kept = sorted({round(i * (len(course["steps"]) - 1) / (_LINES - 1)) for i in range(_LINES)})
    for place in kept:
        texts = ("–" if row[place] is None else f"{row[place]:.1%}" for row in course["shares"].values())
        shares = "  ".join(f"{text:>{width}}" for text in texts)
        weights = ", ".join(f"{row[place]:.2f}" for row in course["loss_weights"].values())
        in_loss = "" if set(weights.split(", ")) == {"1.00"} else f"  in the loss × {weights}"
        print(f"{course['steps'][place]:>9,}  {shares}{in_loss}  {course['reasons'][place]}")
