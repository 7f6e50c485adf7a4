"""`streamload features gc` and `features clear`: delete the rows of old fingerprints, of a label, or all."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from streamload.cli.features.options import (
    SHORT,
    AsJson,
    Directory,
    DryRun,
    SharedCache,
    as_dict,
    root_of,
    rows_at,
)
from streamload.cli.features.shards import (
    as_dict_of_removed,
    fingerprints_in,
    places_of,
    print_removed,
    print_shards,
    remove_shards,
)
from streamload.cli.options import SharedCacheOptions
from streamload.cli.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from pathlib import Path

    from streamload.derived.store.catalog import Garbage


def gc(
    stale: Annotated[
        bool,
        typer.Option("--stale", help="Delete the rows of fingerprints that a newer one has replaced."),
    ] = False,
    dry_run: DryRun = False,
    directory: Directory = None,
    shared_cache: SharedCache = None,
    shared_cache_options: SharedCacheOptions = None,
    as_json: AsJson = False,
) -> None:
    """Delete notes without rows and databases that were replaced; with --stale the rows of old fingerprints.

    Old is a fingerprint if another of the same label, arguments and transform is newer: a row of that was
    stored later, or read later as far as that was noted (from 70 % of the limit on). So of two checkpoints in
    one module the rows of one go: look with --dry-run. A row that is deleted is computed again.

    Derived shards likewise, each place by itself: by when they were last opened on this node, and by when
    they were stored in the shared cache. What is open on this node or being made stays.
    """
    from streamload.derived.store.catalog import collect_garbage
    from streamload.derived.store.shard_catalog import stale_of

    root = root_of(directory)
    places = places_of(directory, shared_cache, shared_cache_options) if stale else []
    old = stale_of(fingerprints_in(places))
    garbage = collect_garbage(root, stale=stale, dry_run=dry_run)
    removed = remove_shards(places, old, "stale", dry_run=dry_run)
    if as_json:
        report = {
            "path": str(root),
            "dry_run": dry_run,
            "stale": [as_dict(entry) for entry in garbage.stale],
            "notes": [name.hex() for name in garbage.notes],
            "databases": garbage.databases,
            "size_bytes": garbage.size_bytes,
            "derived": as_dict_of_removed(removed),
        }
        print_json(report)
    else:
        _print(root, garbage, dry_run=dry_run)
        print_shards(old, "stale derived shards of")
        print_removed(removed, dry_run=dry_run)


def _print(root: "Path", garbage: "Garbage", *, dry_run: bool) -> None:
    from streamload.cache.inventory import as_time
    from streamload.metrics import format_bytes

    deleted = "would delete" if dry_run else "deleted"
    if garbage.stale:
        cells = (
            (
                entry.label,
                entry.fingerprint.hex()[:SHORT],
                f"{entry.rows:,}",
                format_bytes(entry.size_bytes),
                as_time(entry.used_at),
            )
            for entry in garbage.stale
        )
        print_table((deleted, "fingerprint", "rows", "size", "last used"), cells)
    say(
        f"{deleted} {sum(entry.rows for entry in garbage.stale):,} rows, {len(garbage.notes):,} notes and "
        f"{len(garbage.databases):,} replaced databases in {root}: {format_bytes(garbage.size_bytes)}"
    )


def clear(
    label: Annotated[str | None, typer.Argument(help="Only the rows of this label; default: all.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False,
    dry_run: DryRun = False,
    directory: Directory = None,
    shared_cache: SharedCache = None,
    shared_cache_options: SharedCacheOptions = None,
    as_json: AsJson = False,
) -> None:
    """Delete the rows of a label, or all, with their notes and derived shards; other files stay.

    Derived shards that a process of this node has open or is making stay. A label is the cache_name of
    cache_module, by default the name of the class. A running process may still read what it has in memory.
    """
    from streamload.errors import OptionError
    from streamload.metrics import format_bytes

    places = places_of(directory, shared_cache, shared_cache_options)
    shards = [entry for entry in fingerprints_in(places) if label in (None, entry.label)]
    with rows_at(directory) as catalog:
        rows = [entry for entry in catalog.fingerprints() if label in (None, entry.label)]
        root = catalog.root
    count, size_bytes = sum(entry.rows for entry in rows), sum(entry.size_bytes for entry in rows)
    owner = "" if label is None else f" of {label!r}"
    summary = f"{count:,} rows{owner} ({format_bytes(size_bytes)}) from {root}"
    if shards:
        size = format_bytes(sum(entry.size_bytes for entry in shards))
        in_ = ", ".join(dict.fromkeys(entry.where for entry in shards))
        summary += f" and {sum(len(entry.shards) for entry in shards):,} derived shards ({size}) from {in_}"
    if not (yes or dry_run):
        if not sys.stdin.isatty():
            raise OptionError(f"this deletes {summary}: say --yes, or --dry-run to see them")
        typer.confirm(f"Delete {summary}?", abort=True, err=True)
    if not dry_run:
        with rows_at(directory, writable=True) as catalog:
            count = catalog.database.clear(label)
    removed = remove_shards(places, shards, "cleared", dry_run=dry_run)
    if as_json:
        about = {"path": str(root), "label": label, "dry_run": dry_run}
        derived = as_dict_of_removed(removed)
        print_json({**about, "rows": count, "size_bytes": size_bytes, "derived": derived})
    else:
        print(f"{'would delete' if dry_run else 'deleted'} {count:,} rows{owner} in {root}")
        print_removed(removed, dry_run=dry_run)
