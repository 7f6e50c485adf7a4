"""`streamload runs spikes`: steps whose loss stands out, and the rows that may have to do with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.options import AsJson
from streamload.cli.runs.options import (
    Journal,
    LoaderName,
    SegmentName,
    finite,
    options_of,
    row_values,
    steps_of,
)
from streamload.cli.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from streamload.journal.history import RunHistory
    from streamload.journal.spikes import Spike

_SAID = (
    "Suspects, not culprits: the same batch often does no harm from another checkpoint, and a contrastive "
    "loss depends on the whole batch."
)


def spikes(
    journal: Journal,
    most: Annotated[int, typer.Option("--steps", min=1, help="The most steps to show.")] = 8,
    no_rows: Annotated[
        bool, typer.Option("--no-rows", help="Don't make the steps again, which tells their keys.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the suspects' images.")] = None,
    segment: SegmentName = None,
    loader: LoaderName = None,
    as_json: AsJson = False,
) -> None:
    """Show the steps of a run whose loss stands out, and their rows with the highest losses.

    The training has to have reported the loss of each row (loader.report). A step stands out by its mean, or
    by a row that is far worse than the worst rows of the steps around. Rows are suspects, not culprits.
    """
    from streamload.journal.history import RunHistory
    from streamload.journal.spikes import find_spikes
    from streamload.observe.pictures import page

    history = RunHistory(journal)
    standing_out = find_spikes(history, segment)[:most]
    named = [
        (spike, [] if no_rows else list(_named(history, spike, segment, loader))) for spike in standing_out
    ]
    if html is not None:
        sections = [(_heading(spike), rows) for spike, rows in named]
        html.write_text(page(f"Spikes of {journal.resolve().name}", _SAID, sections))
    if as_json:
        print_json(finite([_values(spike, [values for values, _ in rows]) for spike, rows in named]))
        return
    for part, _, _ in history.branch(segment):
        if lacking := sorted(set(range(part.world_size)) - set(part.ranks)):
            say(f"segment {part.name} lacks the files of ranks {lacking[:8]} of {part.world_size}")
    if not named:
        say("no step stands out, or no losses by row were reported")
        return
    for spike, rows in named:
        say(_heading(spike))
        if no_rows:
            cells = [
                (str(row.rank), str(row.row), f"{row.loss:.4g}", f"{row.deviations:.1f}")
                for row in spike.suspects
            ]
            print_table(("rank", "row", "loss", "deviations"), cells)
        else:
            shown = ("rank", "row", "loss", "usual", "key", "url", "passes_before", "caption")
            print_table(shown, ([_text(values[name]) for name in shown] for values, _ in rows))
    say(_SAID)


def _named(
    history: RunHistory, spike: Spike, segment: str | None, loader: str | None
) -> Iterator[tuple[dict[str, Any], Any]]:
    """The suspects of a step with their keys and captions, and their pictures."""
    from streamload.observe.pictures import pictures
    from streamload.observe.shown import statistics_of

    by_rank: dict[int, Any] = {}
    for suspect in spike.suspects:
        options = options_of(history, suspect.segment, loader)
        if suspect.rank not in by_rank:
            step = next(iter(steps_of(history, spike.step, options, suspect.rank, segment)))
            by_rank[suspect.rank] = step, pictures(step.images, statistics_of(options.preprocess))
        step, shown = by_rank[suspect.rank]
        sources = [source.name for source in options.sources]
        values = row_values(step.rows[suspect.row], suspect.row, sources, suspect.loss)
        usual = suspect.segment.usual_loss(spike.step, values["source"])
        more = {"rank": suspect.rank, "usual": usual, "deviations": suspect.deviations}
        yield {**values, **more}, shown[suspect.row] if suspect.row < len(shown) else None


def _heading(spike: Spike) -> str:
    return (
        f"step {spike.step:,}: loss {spike.loss:.4g}, around it {spike.usual:.4g}; "
        f"{spike.deviations:.1f} deviations above"
    )


def _values(spike: Spike, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    plain = [
        {"rank": row.rank, "row": row.row, "loss": row.loss, "deviations": row.deviations}
        for row in spike.suspects
    ]
    return {
        "step": spike.step,
        "loss": spike.loss,
        "usual": spike.usual,
        "deviations": spike.deviations,
        "suspects": rows or plain,
    }


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())[:80]
