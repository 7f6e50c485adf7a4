"""`streamload report`: what a recorded run did, as one HTML file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamload.cli.options import AsJson, CacheDir
from streamload.cli.terminal import say
from streamload.errors import CacheError, OptionError

if TYPE_CHECKING:
    from streamload.observe.pictures import Row
    from streamload.observe.recording import Recorded, Skipped


def report(
    place: Annotated[Path, typer.Argument(help="The folder of STREAMLOAD_RECORD, or one recording in it.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The HTML file; default: the run's name, here.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Which run of the folder; default: the one with the most samples.")
    ] = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Draw a run: throughput, waits, stages, cache, sources, alerts and settings over time.

    Samples that could not be used are shown with their pictures, as far as the cache has their bytes. The
    file needs no network and has its numbers inside, which --json prints instead. It can be made while the
    run goes on, too.
    """
    from streamload.observe.recording import Recorded, read_recording, recordings
    from streamload.observe.report import numbers
    from streamload.observe.report import report as drawn
    from streamload.observe.timeline import Timeline

    ranks_by_run: dict[str, list[Recorded]] = {}
    for path in recordings(place):
        recording = read_recording(path)
        ranks_by_run.setdefault(str(recording.about["run"]), []).append(recording)
    ranks_by_run = {name: [rank for rank in ranks if rank.moments] for name, ranks in ranks_by_run.items()}
    ranks_by_run = {name: ranks for name, ranks in ranks_by_run.items() if ranks}
    if not ranks_by_run:
        raise OptionError(f"{place} has no recording of a run: set STREAMLOAD_RECORD={place} for one")
    if run is not None and run not in ranks_by_run:
        raise OptionError(f"{place} has no run {run!r}, only {', '.join(sorted(ranks_by_run))}")
    chosen = run or max(ranks_by_run, key=lambda name: sum(_samples(rank) for rank in ranks_by_run[name]))
    timeline = Timeline(tuple(sorted(ranks_by_run[chosen], key=lambda rank: int(rank.about["rank"]))))
    if as_json:
        print(json.dumps(numbers(timeline)))
        return
    target = Path(f"{chosen}.html") if out is None else out
    target.write_text(drawn(timeline, _skipped_rows(timeline.skipped(), cache_dir)))
    other_runs = sorted(ranks_by_run.keys() - {chosen})
    also = f"; other runs there: {', '.join(other_runs)} (--run)" if other_runs else ""
    ranks = f"{len(timeline.ranks)} ranks" if len(timeline.ranks) > 1 else "one rank"
    print(f"{target}: run {chosen}, {ranks}{also}")


def _skipped_rows(samples: "list[Skipped]", cache_dir: str | None) -> "list[Row]":
    """The samples of a run that could not be used, with pictures where the cache is there."""
    if not samples:
        return []
    from streamload.cli.cache import tier_at
    from streamload.observe.skipped import rows_of

    try:
        tier = tier_at(cache_dir)
    except CacheError as exc:
        say(f"unusable samples come without pictures: {exc}")
        return rows_of(samples, None)
    return rows_of(samples, tier)


def _samples(rank: "Recorded") -> int:
    return rank.moments[-1].counters.get("samples_yielded", 0)
