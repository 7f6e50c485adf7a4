"""`streamload replay`: a step of a run made again, as its ranks had it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

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
from streamload.errors import OptionError

_SHOWN = 60


def replay(
    journal: Journal,
    step: Annotated[int, typer.Option(min=0, help="Of the run, as loader.info.run_step has it.")],
    rank: Annotated[
        int | None, typer.Option(help="Whose batch to make. None: one batch of all ranks' rows.")
    ] = None,
    rows: Annotated[str | None, typer.Option(help='Only these rows of the batch: "3,17,40-43".')] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the images as trained on.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write images as PNG and rows.json there.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only tell whether the step can be made again as it was.")
    ] = False,
    segment: SegmentName = None,
    loader: LoaderName = None,
    as_json: AsJson = False,
) -> None:
    """Make a batch of a run again, to the bit, and show its rows.

    Shards come from the cache, or from where they are, and have to be the same as then: what differs is an
    error that names it.
    """
    from streamload.journal.history import RunHistory
    from streamload.observe.pictures import page, pictures
    from streamload.observe.pictures import save as save_pictures
    from streamload.observe.shown import statistics_of

    history = RunHistory(journal)
    recorded = history.at(step, segment)
    options = options_of(history, recorded, loader)
    digests = recorded.digests(step, range(recorded.world_size) if rank is None else [rank])
    step_again = next(steps_of(history, step, options, rank, segment))
    sources = [source.name for source in options.sources]
    losses = {}
    if rank is not None or recorded.world_size == 1:
        reported = recorded.losses(step, rank or 0)
        losses = {} if reported is None else dict(zip(reported.rows, reported.worst, strict=True))
    chosen = _chosen(rows, len(step_again.rows))
    values = [row_values(step_again.rows[number], number, sources, losses.get(number)) for number in chosen]
    summary = f"{len(step_again.rows)} rows of {'all ranks' if rank is None else f'rank {rank}'}"
    checked = "made again; no rank recorded its digest"
    if digests.samples is not None:
        checked = "as recorded"
        if digests.content is None:
            checked += "; the bytes of its samples weren't"
    if verify:
        verdict = {
            "step": step,
            "segment": recorded.name,
            "rows": len(step_again.rows),
            "verified": digests.samples is not None,
            "bytes_verified": digests.content is not None,
        }
        print_json(verdict) if as_json else say(f"step {step:,}: {summary}, {checked}")
        return
    if html is not None or save is not None:
        shown = pictures(step_again.images, statistics_of(options.preprocess))
        shown = [shown[number] if number < len(shown) else None for number in chosen]
        pairs: list[tuple[Any, Any]] = list(zip(values, shown, strict=True))
        if html is not None:
            title = f"Step {step:,} of {journal.resolve().name}"
            html.write_text(page(title, f"{summary}; {checked}", [("Rows", pairs)]))
        if save is not None:
            save_pictures(save, pairs)
            (save / "rows.json").write_text(json.dumps(finite(values), indent=1))
    if as_json:
        print_json(finite(values))
        return
    say(f"step {step:,}: {summary}; {checked}")
    names = ("row", "key", "shard", "source", "passes", "loss", "caption")
    print_table(names, (_cells(row) for row in values))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    key = row["key"] if row["instead_of"] is None else f"{row['key']} (instead of {row['instead_of']})"
    loss = "" if row["loss"] is None else f"{row['loss']:.4g}"
    shard, caption = row["url"].rpartition("/")[2], " ".join((row["caption"] or "").split())
    return str(row["row"]), key, shard, row["source"], str(row["passes_before"]), loss, caption[:_SHOWN]


def _chosen(rows: str | None, count: int) -> list[int]:
    """The numbers of rows that a text names."""
    if rows is None:
        return list(range(count))
    chosen: list[int] = []
    try:
        for part in rows.split(","):
            first, _, last = part.partition("-")
            chosen += range(int(first), int(last or first) + 1)
    except ValueError:
        chosen = [-1]
    if not chosen or not all(0 <= number < count for number in chosen):
        raise OptionError(f'--rows {rows}; expected numbers below {count}, such as "3,17,40-43"')
    return chosen
