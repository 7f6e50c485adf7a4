"""`streamload features verify`: read all rows, and compare them with their checksums and layouts."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from streamload.cli.features.options import SHORT, AsJson, Directory, SharedCache, root_of
from streamload.cli.features.shards import VerifiedShards, places_of, print_verified, verify_shards
from streamload.cli.logs import progress_console
from streamload.cli.options import SharedCacheOptions
from streamload.cli.terminal import print_table, say

if TYPE_CHECKING:
    from pathlib import Path

    from streamload.derived.store.catalog import Verified


def verify(
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete what is damaged: it is computed again.")
    ] = False,
    directory: Directory = None,
    shared_cache: SharedCache = None,
    shared_cache_options: SharedCacheOptions = None,
    as_json: AsJson = False,
) -> None:
    """Read all rows, notes and derived shards, and compare them with their checksums and layouts.

    The exit code is 1 if a row is damaged and not deleted. Which rows go first when room is needed stays as
    it is. With --delete a database that can't be read is replaced by an empty one, and a derived shard with a
    damaged row goes as a whole.
    """
    from streamload.errors import CacheCorrupt

    places = places_of(directory, shared_cache, shared_cache_options)
    root = root_of(directory)
    deleted, broken = 0, ""
    try:
        found, deleted = _read(root, delete=delete)
    except CacheCorrupt as exc:
        from streamload.derived.store.catalog import Verified, replace_broken
        from streamload.derived.store.row_store import Place

        found, broken = Verified(), str(exc)
        if delete:
            replace_broken(Place(directory or ""))
    shards = verify_shards(places, delete=delete)
    if as_json:
        _print_json(root, found, deleted, broken, shards)
    else:
        _print_table(root, found, deleted, broken)
        print_verified(shards)
    if ((found.damages or broken) and not delete) or len(shards.damaged) > shards.deleted:
        raise typer.Exit(1)


def _read(root: "Path", *, delete: bool) -> "tuple[Verified, int]":
    """Verify all rows, with a progress line on a terminal."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from streamload.derived.store.catalog import Verified, delete_damaged, open_catalog
    from streamload.derived.store.catalog import verify as look_at_all
    from streamload.metrics import format_bytes

    console = progress_console()
    found = Verified()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        open_catalog(root, writable=delete) as catalog,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("0 rows", total=None)
        for found in look_at_all(catalog):
            read = f"{found.rows:,} rows, {format_bytes(found.read_bytes)} read, {len(found.damages)} damaged"
            bar.update(task, description=read)
        deleted = delete_damaged(catalog, found.damages) if delete else 0
    return found, deleted


def _print_json(root: "Path", found: "Verified", deleted: int, broken: str, shards: VerifiedShards) -> None:
    damaged = [{"label": one.label, "name": one.name, "cause": one.cause} for one in found.damages]
    report = {
        "path": str(root),
        "rows": found.rows,
        "notes": found.notes,
        "read_bytes": found.read_bytes,
        "damaged": damaged,
        "deleted": deleted,
        "broken": broken,
        "derived": shards.as_dict(),
    }
    print(json.dumps(report, indent=2))


def _print_table(root: "Path", found: "Verified", deleted: int, broken: str) -> None:
    from streamload.metrics import format_bytes

    if found.damages:
        cells = (
            (
                name if len(name) <= 2 * SHORT else f"{name[:SHORT]}…{name[-SHORT:]}",
                damage.label,
                damage.cause,
            )
            for damage in found.damages
            for name in [damage.name]
        )
        print_table(("damaged", "label", "cause"), cells)
    if broken:
        say(broken)
    result = f"{len(found.damages):,} damaged, {deleted:,} deleted" if found.damages else "no damage"
    say(
        f"{found.rows:,} rows and {found.notes:,} notes ({format_bytes(found.read_bytes)}) in {root}: "
        f"{'a broken database' if broken else result}"
    )
