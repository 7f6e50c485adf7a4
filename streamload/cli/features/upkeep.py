"""`streamload features ls`, `verify`, `gc` and `clear`: rows of this node, and derived shards anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.features.options import (
    SHORT,
    Directory,
    SharedCache,
    fingerprints_in,
    places_of,
    root_of,
    rows_as_dict,
    rows_at,
    shards_as_dict,
)
from streamload.cli.logs import progress
from streamload.cli.options import AsJson, DryRun, SharedCacheOptions, Yes
from streamload.cli.terminal import confirm, format_bytes, print_json, print_table, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from streamload.derived.store.catalog import Catalog
    from streamload.derived.store.shard_catalog import FingerprintShards, Removed, RowShards


def ls(
    directory: Directory = None,
    shared_cache: SharedCache = None,
    shared_cache_options: SharedCacheOptions = None,
    as_json: AsJson = False,
) -> None:
    """List the fingerprints that have rows, by label: how many rows, and when they were last used.

    Derived shards follow, by fingerprint: in this node's cache, and in the shared cache if one is given.
    When rows are read is noted only while the rows take more than 70 % of their limit. The dtype is that of
    autocast, else torch's default.
    """
    shards = fingerprints_in(places_of(directory, shared_cache, shared_cache_options))
    with rows_at(directory) as catalog:
        rows = [_described(catalog, entry) for entry in catalog.fingerprints()]
        if as_json:
            about = {"path": str(catalog.root), "used_bytes": catalog.used_bytes}
            print_json({**about, "fingerprints": rows, "derived": [shards_as_dict(held) for held in shards]})
        else:
            _print_rows(catalog, rows)
            _print_shards(shards)


def _described(catalog: Catalog, entry: Any) -> dict[str, Any]:
    """A fingerprint's line; the device and dtype come from its note, if it has one."""
    from streamload.derived.store.sealed import flat

    parts = catalog.parts(entry.fingerprint)
    values = flat(parts or {})
    return {
        **rows_as_dict(entry),
        "has_note": parts is not None,
        "device": values.get("device"),
        "dtype": values.get("settings.autocast") or values.get("settings.default_dtype"),
    }


def _print_rows(catalog: Catalog, rows: list[dict[str, Any]]) -> None:
    if not rows:
        say(f"there are no rows in {catalog.root}")
        return
    cells = [
        {
            "label": row["label"],
            "fingerprint": row["fingerprint"][:SHORT],
            ">rows": f"{row['rows']:,}",
            ">size": format_bytes(row["size_bytes"]),
            "last stored": _minute(row["last_stored"]),
            "last read": _minute(row["last_read"]),
            "device": (row["device"] or "") if row["has_note"] else "no note",
            "dtype": (row["dtype"] or "").removeprefix("torch."),
        }
        for row in rows
    ]
    shown = [name for name in cells[0] if name != "last read" or any(cell[name] for cell in cells)]
    print_table(shown, ([cell[name] for name in shown] for cell in cells))
    total = sum(row["rows"] for row in rows)
    say(
        f"{total:,} rows of {len({row['fingerprint'] for row in rows}):,} fingerprints in {catalog.root}: "
        f"{format_bytes(catalog.used_bytes)} on disk"
    )


def _print_shards(shards: Sequence[FingerprintShards], title: str = "derived shards of") -> None:
    """Print a table of derived shards; nothing if there are none."""
    from streamload.cache.inventory import as_time

    if shards:
        cells = (
            (held.label or "(unreadable)", held.fingerprint[:SHORT], f"{len(held.shards):,}",
             f"{held.rows:,}", format_bytes(held.size_bytes), _minute(as_time(held.used_at)), held.where)
            for held in shards
        )  # fmt: skip
        print_table((title, "fingerprint", ">shards", ">rows", ">size", "last used", "in"), cells)


def _minute(time: str | None) -> str:
    """An ISO time without seconds: "2026-01-31 12:00Z"."""
    return "" if time is None else f"{time[:10]} {time[11:16]}Z"


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
    places = places_of(directory, shared_cache, shared_cache_options)
    with progress("{task.description}", is_counted=False) as show:
        rows = _verify_rows(directory, show, delete=delete)
        derived = _verify_shards(places, show, delete=delete)
    if as_json:
        print_json({"path": str(root_of(directory)), **rows, "derived": derived})
    else:
        _print_verified_rows(root_of(directory), rows)
        _print_verified_shards(derived)
    is_left = (rows["damaged"] or rows["broken"]) and not delete
    if is_left or len(_causes(derived)) > derived["deleted"]:
        raise typer.Exit(1)


def _verify_rows(directory: str | None, show: Callable[..., None], *, delete: bool) -> dict[str, Any]:
    """Verify all rows, and delete damaged ones; for JSON."""
    from streamload.derived.store.catalog import VerifiedRows, delete_damaged, replace_broken
    from streamload.derived.store.catalog import verify as look_at_all
    from streamload.derived.store.row_store import RowPlace
    from streamload.errors import CacheCorrupt

    verified, deleted, broken = VerifiedRows(), 0, ""
    try:
        with rows_at(directory, writable=delete) as catalog:
            show(description="0 rows")
            for verified in look_at_all(catalog):
                read = f"{verified.rows:,} rows, {format_bytes(verified.read_bytes)} read"
                show(description=f"{read}, {len(verified.damages)} damaged")
            deleted = delete_damaged(catalog, verified.damages) if delete else 0
    except CacheCorrupt as exc:
        verified, broken = VerifiedRows(), str(exc)
        if delete:
            replace_broken(RowPlace(directory or ""))
    return {
        "rows": verified.rows,
        "notes": verified.notes,
        "read_bytes": verified.read_bytes,
        "damaged": [
            {"label": damage.label, "name": damage.name, "cause": damage.cause} for damage in verified.damages
        ],
        "deleted": deleted,
        "broken": broken,
    }


def _verify_shards(places: Iterable[RowShards], show: Callable[..., None], *, delete: bool) -> dict[str, Any]:
    """Read all derived shards in these places, and delete damaged ones; for JSON."""
    report: dict[str, Any] = {"shards": 0, "rows": 0, "read_bytes": 0, "deleted": 0, "damaged": []}
    damaged = 0
    for place in places:
        for held in place.held():
            checked = place.check(held)
            if checked is None:
                continue
            rows, causes = checked
            report["shards"] += 1
            report["rows"] += rows
            report["read_bytes"] += held.size_bytes
            about = {
                "where": place.where,
                "fingerprint": held.fingerprint,
                "url": held.url or held.digest,
            }
            report["damaged"] += [{**about, "cause": cause} for cause in causes]
            report["deleted"] += len(place.remove([held], "damaged").shards) if causes and delete else 0
            damaged += bool(causes)
            show(description=f"{report['shards']:,} derived shards, {damaged:,} damaged")
    return report


def _causes(derived: dict[str, Any]) -> dict[tuple[str, str, str], list[str]]:
    """The causes of damage by derived shard: its URL, fingerprint and place."""
    causes: dict[tuple[str, str, str], list[str]] = {}
    for damage in derived["damaged"]:
        shard = damage["url"], damage["fingerprint"], damage["where"]
        causes.setdefault(shard, []).append(damage["cause"])
    return causes


def _print_verified_rows(root: Path, report: dict[str, Any]) -> None:
    damaged = report["damaged"]
    if damaged:
        names = [damage["name"] for damage in damaged]
        short = [name if len(name) <= 2 * SHORT else f"{name[:SHORT]}…{name[-SHORT:]}" for name in names]
        cells = (
            (name, damage["label"], damage["cause"]) for name, damage in zip(short, damaged, strict=True)
        )
        print_table(("damaged", "label", "cause"), cells)
    if report["broken"]:
        say(report["broken"])
    result = "a broken database" if report["broken"] else _result(len(damaged), report["deleted"])
    size = format_bytes(report["read_bytes"])
    say(f"{report['rows']:,} rows and {report['notes']:,} notes ({size}) in {root}: {result}")


def _print_verified_shards(report: dict[str, Any]) -> None:
    """Print what is damaged; nothing if there are no derived shards."""
    if not report["shards"]:
        return
    damaged = _causes(report)
    if damaged:
        cells = (
            (url, fingerprint[:SHORT],
             causes[0] + (f", and {len(causes) - 1} more" if len(causes) > 1 else ""), where)
            for (url, fingerprint, where), causes in damaged.items()
        )  # fmt: skip
        print_table(("damaged rows of", "fingerprint", "cause", "in"), cells)
    result = _result(len(damaged), report["deleted"])
    size = format_bytes(report["read_bytes"])
    say(f"{report['shards']:,} derived shards with {report['rows']:,} rows ({size}): {result}")


def _result(damaged: int, deleted: int) -> str:
    return f"{damaged:,} damaged, {deleted:,} deleted" if damaged else "no damage"


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
    from streamload.cache.inventory import as_time
    from streamload.derived.store.catalog import collect_garbage

    root = root_of(directory)
    places = places_of(directory, shared_cache, shared_cache_options) if stale else []
    old_shards = [held for place in places for held in place.stale()]
    garbage = collect_garbage(root, stale=stale, dry_run=dry_run)
    removed = _remove(places, old_shards, "stale", dry_run=dry_run)
    if as_json:
        print_json(
            {
                "path": str(root),
                "dry_run": dry_run,
                "stale": [rows_as_dict(entry) for entry in garbage.stale],
                "notes": [name.hex() for name in garbage.notes],
                "databases": garbage.databases,
                "size_bytes": garbage.size_bytes,
                "derived": _removed_as_dict(removed),
            }
        )
        return
    deleted = "would delete" if dry_run else "deleted"
    if garbage.stale:
        cells = (
            (entry.label, entry.fingerprint.hex()[:SHORT], f"{entry.rows:,}", format_bytes(entry.size_bytes),
             as_time(entry.used_at))
            for entry in garbage.stale
        )  # fmt: skip
        print_table((deleted, "fingerprint", ">rows", ">size", "last used"), cells)
    say(
        f"{deleted} {sum(entry.rows for entry in garbage.stale):,} rows, {len(garbage.notes):,} notes and "
        f"{len(garbage.databases):,} replaced databases in {root}: {format_bytes(garbage.size_bytes)}"
    )
    _print_shards(old_shards, "stale derived shards of")
    _print_removed(removed, deleted)


def clear(
    label: Annotated[str | None, typer.Argument(help="Only the rows of this label; default: all.")] = None,
    yes: Yes = False,
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
    places = places_of(directory, shared_cache, shared_cache_options)
    shards = [held for held in fingerprints_in(places) if label in (None, held.label)]
    with rows_at(directory) as catalog:
        rows = [entry for entry in catalog.fingerprints() if label in (None, entry.label)]
        root = catalog.root
    count, size_bytes = sum(entry.rows for entry in rows), sum(entry.size_bytes for entry in rows)
    owner = "" if label is None else f" of {label!r}"
    if not (yes or dry_run):
        summary = f"{count:,} rows{owner} ({format_bytes(size_bytes)}) from {root}"
        if shards:
            size = format_bytes(sum(held.size_bytes for held in shards))
            in_ = ", ".join(dict.fromkeys(held.where for held in shards))
            summary += f" and {sum(len(held.shards) for held in shards):,} derived shards ({size}) from {in_}"
        confirm(f"delete {summary}")
    if not dry_run:
        with rows_at(directory, writable=True) as catalog:
            count = catalog.database.clear(label)
    removed = _remove(places, shards, "cleared", dry_run=dry_run)
    if as_json:
        about = {"path": str(root), "label": label, "dry_run": dry_run}
        derived = _removed_as_dict(removed)
        print_json({**about, "rows": count, "size_bytes": size_bytes, "derived": derived})
    else:
        deleted = "would delete" if dry_run else "deleted"
        say(f"{deleted} {count:,} rows{owner} in {root}")
        _print_removed(removed, deleted)


def _remove(
    places: Sequence[RowShards], chosen: Sequence[FingerprintShards], why: str, *, dry_run: bool
) -> list[Removed]:
    """Delete the derived shards of these fingerprints, each in its place."""
    shards = {
        place: [shard for held in chosen if held.where == place.where for shard in held.shards]
        for place in places
    }
    return [place.remove(going, why, dry_run=dry_run) for place, going in shards.items() if going]


def _removed_as_dict(removed: Sequence[Removed]) -> dict[str, Any]:
    shards = [shard for part in removed for shard in part.shards]
    return {
        "shards": len(shards),
        "rows": sum(shard.rows for shard in shards),
        "size_bytes": sum(shard.size_bytes for shard in shards),
        "kept": [
            {"url": shard.url or shard.digest, "why": why} for part in removed for shard, why in part.kept
        ],
    }


def _print_removed(removed: Sequence[Removed], deleted: str) -> None:
    """Print which derived shards were deleted and kept; nothing if there was nothing to delete."""
    counts = _removed_as_dict(removed)
    for kept in counts["kept"]:
        say(f"kept the rows of {kept['url']}: {kept['why']}")
    if counts["shards"]:
        size = format_bytes(counts["size_bytes"])
        say(f"{deleted} {counts['shards']:,} derived shards with {counts['rows']:,} rows: {size}")
