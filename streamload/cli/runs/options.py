"""Options that the commands on journals share, and the loader by which a run is followed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.errors import OptionError

if TYPE_CHECKING:
    from streamload.journal.history import RunHistory, Segment
    from streamload.loader.options import LoaderOptions
    from streamload.loader.past import MakeLoaders, PastStep

Journal = Annotated[Path, typer.Argument(help="The folder of Order(journal=folder).")]
SegmentName = Annotated[
    str | None,
    typer.Option(
        "--segment",
        help="Of a run that was restarted from an older state: the segment whose steps are meant, by its "
        "name in `streamload runs show`. None: those that led to the last one.",
        show_default=False,
    ),
]
LoaderName = Annotated[
    str | None,
    typer.Option(
        "--loader",
        help="package.module:name of a loader made as the run's was, or of a function that returns one. "
        "None: it is made of the options that the run kept beside its journal, which runs code they name.",
        show_default=False,
    ),
]


def options_of(history: RunHistory, segment: Segment, loader: str | None) -> LoaderOptions:
    """The options of a run's loader.

    Raises:
        OptionError: the name isn't of a loader.
        JournalError: they couldn't be kept, or can't be read here.
    """
    from streamload.loader import Loader
    from streamload.loader.past import stored_options

    if loader is None:
        return stored_options(history, segment)
    from streamload.features.named import named

    value = named(loader)
    if not isinstance(value, Loader) and callable(value):
        value = value()
    if not isinstance(value, Loader):
        raise OptionError(f"--loader {loader} is a {type(value).__name__}; expected a streamload.Loader")
    return value.options


def make_loaders() -> MakeLoaders:
    """How loaders are made."""
    from streamload.loader.loader import Loader
    from streamload.loader.past import MakeLoaders
    from streamload.loader.registered import by_rank, extensions_of

    return MakeLoaders(Loader, extensions_of, by_rank())


def steps_of(
    history: RunHistory,
    step: int,
    options: LoaderOptions,
    rank: int | None,
    segment: str | None,
) -> Iterator[PastStep]:
    """A step of a run and those after it: of one rank, or of all as one batch; see past.steps_from.

    Raises:
        OptionError: there was no such rank.
    """
    from streamload.loader.past import steps_from

    recorded, layout = history.at(step, segment), None
    if rank is not None:
        if not 0 <= rank < recorded.world_size:
            raise OptionError(f"step {step} was made by {recorded.world_size} ranks: there is no rank {rank}")
        layout = rank, recorded.world_size, recorded.rows
    return steps_from(history, step, options, make_loaders(), layout, segment)


def finite(value: Any) -> Any:
    """JSON-able values with None for numbers that JSON doesn't have: infinite ones, and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list) else value


def row_values(row: Any, number: int, sources: list[str], loss: float | None) -> dict[str, Any]:
    """A row of a step as JSON-able values; its URL without secrets."""
    from streamload.urls import redact

    return {
        "row": number,
        "key": row.key,
        "url": redact(row.url),
        "source": sources[row.source],
        "number": row.number,
        "passes_before": row.passes,
        "caption": row.caption,
        "instead_of": row.instead_of,
        "loss": loss,
    }
