"""`streamload features verify`: read all rows, and compare them with their checksums and layouts."""

from typing import TYPE_CHECKING, Annotated

import typer

from streamload.cli.features.options import SHORT, AsJson, Directory, SharedCache, root_of
from streamload.cli.features.shards import VerifiedShards, places_of, print_verified, verify_shards
from streamload.cli.logs import progress_bar
from streamload.cli.options import SharedCacheOptions
from streamload.cli.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from pathlib import Path

    from streamload.derived.store.catalog import VerifiedRows


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
        verified, deleted = _read(root, delete=delete)
    except CacheCorrupt as exc:
        from streamload.derived.store.catalog import VerifiedRows, replace_broken
        from streamload.derived.store.row_store import RowPlace

        verified, broken = VerifiedRows(), str(exc)
        if delete:
            replace_broken(RowPlace(directory or ""))
    shards = verify_shards(places, delete=delete)
    if as_json:
        _print_json(root, verified, deleted, broken, shards)
    else:
        _print_table(root, verified, deleted, broken)
        print_verified(shards)
    if ((verified.damages or broken) and not delete) or len(shards.damaged) > shards.deleted:
        raise typer.Exit(1)


def _read(root: "Path", *, delete: bool) -> "tuple[VerifiedRows, int]":
    """Verify all rows, with a progress line on a terminal."""
    from streamload.derived.store.catalog import VerifiedRows, delete_damaged, open_catalog
    from streamload.derived.store.catalog import verify as look_at_all
    from streamload.metrics import format_bytes

    verified = VerifiedRows()
    with (
        open_catalog(root, writable=delete) as catalog,
        progress_bar("{task.description}", is_counted=False) as bar,
    ):
        task = bar.add_task("0 rows", total=None)
        for verified in look_at_all(catalog):
            read = f"{verified.rows:,} rows, {format_bytes(verified.read_bytes)} read"
            bar.update(task, description=f"{read}, {len(verified.damages)} damaged")
        deleted = delete_damaged(catalog, verified.damages) if delete else 0
    return verified, deleted


def _print_json(
    root: "Path", verified: "VerifiedRows", deleted: int, broken: str, shards: VerifiedShards
) -> None:
    damaged = [
        {"label": damage.label, "name": damage.name, "cause": damage.cause} for damage in verified.damages
    ]
    report = {
        "path": str(root),
        "rows": verified.rows,
        "notes": verified.notes,
        "read_bytes": verified.read_bytes,
        "damaged": damaged,
        "deleted": deleted,
        "broken": broken,
        "derived": shards.as_dict(),
    }
    print_json(report)


def _print_table(root: "Path", verified: "VerifiedRows", deleted: int, broken: str) -> None:
    from streamload.metrics import format_bytes

    if verified.damages:
        cells = (
            (
                name if len(name) <= 2 * SHORT else f"{name[:SHORT]}…{name[-SHORT:]}",
                damage.label,
                damage.cause,
            )
            for damage in verified.damages
            for name in [damage.name]
        )
        print_table(("damaged", "label", "cause"), cells)
    if broken:
        say(broken)
    result = f"{len(verified.damages):,} damaged, {deleted:,} deleted" if verified.damages else "no damage"
    say(
        f"{verified.rows:,} rows and {verified.notes:,} notes "
        f"({format_bytes(verified.read_bytes)}) in {root}: "
        f"{'a broken database' if broken else result}"
    )
