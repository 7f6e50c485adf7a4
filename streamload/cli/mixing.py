"""`streamload mixing`: what a run's policy decided, and what a policy would decide."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.options import AsJson
from streamload.errors import OptionError

if TYPE_CHECKING:
    from streamload.steering import Policy
    from streamload.steering.recorded import Point

mixing = typer.Typer(
    help="Weights that change during a run: what was decided, and what a policy would decide.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_LINES = 20
_Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw a picture into this file.")]
Course = dict[str, Any]


@mixing.command()
def show(
    record: Annotated[Path, typer.Argument(help="decisions.jsonl, or a CSV with step, source and loss.")],
    svg: _Svg = None,
    as_json: AsJson = False,
) -> None:
    """Show the shares of a run's sources and what was reported of them, by step."""
    from streamload.steering.recorded import read_points

    points = read_points(record)
    course = _course(points, [{s.name: s.share for s in point.sources} for point in points])
    course["reasons"] = [point.reason for point in points]
    _tell(course, f"{record.name}: what was decided", svg, as_json)


@mixing.command()
def simulate(
    record: Annotated[
        Path,
        typer.Argument(help="Reports to decide from: decisions.jsonl, or a CSV with step, source and loss."),
    ],
    policy: Annotated[
        str,
        typer.Option(help='"progress", "schedule=FILE", "target=FILE" (JSON), or "package.module:name".'),
    ] = "progress",
    svg: _Svg = None,
    as_json: AsJson = False,
) -> None:
    """Show what a policy would do with a run's reports; its losses stay as they were whatever it decides."""
    from streamload.steering.recorded import ask, read_points

    points = read_points(record)
    answers = ask(policy_of(policy), points)
    course = _course(points, [shares for shares, _ in answers])
    course["reasons"] = [reason for _, reason in answers]
    _tell(course, f"{policy} with the reports of {record.name}", svg, as_json)


def policy_of(name: str) -> Policy:
    """Return the policy that a text names.

    Raises:
        OptionError: it names none, or its file can't be read.
    """
    from streamload.steering import as_policy
    from streamload.steering.progress import Progress
    from streamload.steering.schedule import Schedule
    from streamload.steering.target import Target

    kind, _, path = name.partition("=")
    if name == "progress":
        return Progress()
    if kind == "schedule" and path:
        return Schedule.read(path)
    if kind == "target" and path:
        try:
            return Target(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, AttributeError) as exc:
            raise OptionError(f'{path} holds no target: {exc}; expected JSON: {{"name": loss}}') from exc
    if ":" not in name:
        raise OptionError(
            f'--policy={name!r}; expected "progress", "schedule=FILE", "target=FILE" or "package.module:name"'
        )
    from streamload.features.named import named

    return as_policy(named(name))


def _course(points: list[Point], shares: list[dict[str, float]]) -> Course:
    names = [source.name for source in points[0].sources]

    def reported(value: Any) -> dict[str, list[float | None]]:
        rows = [{source.name: value(source) for source in point.sources} for point in points]
        return {name: [_number(row.get(name)) for row in rows] for name in names}

    return {
        "steps": [point.step for point in points],
        "shares": {name: [_number(row.get(name)) for row in shares] for name in names},
        "losses": reported(lambda source: source.loss.mean),
        "alignment": reported(lambda source: source.alignment.mean),
        "evaluation": reported(lambda source: source.evaluation),
    }


def _number(value: float | None) -> float | None:
    """A number; None, as JSON has no NaN, where it isn't known."""
    return float(value) if value is not None and math.isfinite(value) else None


def _tell(course: Course, title: str, svg: Path | None, as_json: bool) -> None:
    from streamload.steering.picture import drawing

    headings = {"shares": "share", "losses": "loss", "alignment": "alignment", "evaluation": "held-out loss"}
    if svg is not None:
        panels = {
            heading: {
                name: [
                    (step, value)
                    for step, value in zip(course["steps"], values, strict=True)
                    if value is not None
                ]
                for name, values in course[key].items()
            }
            for key, heading in headings.items()
        }
        svg.write_text(drawing(title, panels), encoding="utf-8")
    if as_json:
        print(json.dumps(course))
        return
    print(title)
    width = max(7, *(len(name) for name in course["shares"]))
    print(f"{'step':>9}  " + "  ".join(f"{name:>{width}}" for name in course["shares"]))
    kept = sorted({round(i * (len(course["steps"]) - 1) / (_LINES - 1)) for i in range(_LINES)})
    for place in kept:
        texts = ("–" if row[place] is None else f"{row[place]:.1%}" for row in course["shares"].values())
        shares = "  ".join(f"{text:>{width}}" for text in texts)
        print(f"{course['steps'][place]:>9,}  {shares}  {course['reasons'][place]}")
    if svg is not None:
        print(f"picture: {svg}")
