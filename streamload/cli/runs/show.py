"""`streamload runs ls` and `runs show`: which runs there are, and the tree of one's segments."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.options import AsJson
from streamload.cli.runs.options import Journal
from streamload.cli.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from streamload.journal.history import RunHistory

_FIRST_FILE = "rank-00000.journal"


def ls(
    folder: Annotated[Path, typer.Argument(help="Journals are looked for in it, and in folders below.")],
    as_json: AsJson = False,
) -> None:
    """List the runs of which a folder has a journal."""
    from streamload.journal.history import RunHistory

    summaries = {
        str(path.parent): _summary(RunHistory(path.parent)) for path in sorted(folder.rglob(_FIRST_FILE))
    }
    if as_json:
        print_json(summaries)
        return
    rows = (
        (name, str(run["segments"]), f"{run['steps']:,}", str(run["ranks"]), run["began"])
        for name, run in summaries.items()
    )
    print_table(("run", "segments", "steps", "ranks", "began"), rows)


def _summary(history: RunHistory) -> dict[str, Any]:
    first, *_, (last, _, stop) = [history.branch()[0], *history.branch()]
    return {
        "segments": len(history.segments),
        "steps": stop - first[1],
        "ranks": last.world_size,
        "began": _time(history.segments[0].begin),
    }


def _time(begin: Any) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(int(begin["seconds"])))


def show(journal: Journal, as_json: AsJson = False) -> None:
    """Show a run's segments, one for each start or restart, and what was set in the course of it.

    A segment that goes on from another, before its end, abandons the steps that the other had after that.
    """
    from streamload.journal.history import RunHistory

    history = RunHistory(journal)
    branch = {segment.name: stop for segment, _, stop in history.branch()}
    segments: list[dict[str, Any]] = [
        {
            "segment": segment.name,
            "from": list(segment.parent) if segment.parent else None,
            "first": segment.first,
            "stop": segment.stop,
            "used_until": branch.get(segment.name),
            "ranks": segment.world_size,
            "rows": segment.rows,
            "began": _time(segment.begin),
            "events": [
                {"step": step, "position": event.position, "kind": event.kind, "value": event.value}
                for step, _, event in segment.rank(0).events
            ],
        }
        for segment in history.segments
    ]
    if as_json:
        print_json(segments)
        return
    cells = (
        (
            segment["segment"],
            "–" if segment["from"] is None else f"{segment['from'][0]} at {segment['from'][1]:,}",
            f"{segment['first']:,} to {segment['stop'] - 1:,}",
            "abandoned" if segment["used_until"] is None else f"to {segment['used_until'] - 1:,}",
            f"{segment['ranks']} × {segment['rows']}",
            segment["began"],
        )
        for segment in segments
    )
    print_table(("segment", "from", "steps", "led on", "ranks × rows", "began (UTC)"), cells)
    for segment in segments:
        for event in segment["events"]:
            say(f"step {event['step']:,}: {event['kind']} {json.dumps(event['value'])}")
