"""The rows of modules in `streamload cache`: columns of samples, and rows of calls (`--kind columns`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamload.cli.features.options import SHORT, root_of, rows_as_dict, rows_at
from streamload.cli.logs import progress
from streamload.cli.terminal import confirm, format_bytes, print_table, say

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from streamload.derived.store.catalog import Catalog


def has_rows(directory: str | None) -> bool:
    """True if there are rows, or were some."""
    root = root_of(directory)
    return root.is_dir() or any((root.parent / "columns").glob("*"))


def list_rows(directory: str | None, *, as_json: bool) -> dict[str, Any]:
    """List the fingerprints that have rows; returns them for JSON, or prints them."""
    with rows_at(directory) as catalog:
        rows = [_described(catalog, entry) for entry in catalog.fingerprints()]
        if not as_json:
            _print_rows(catalog, rows)
        return {"path": str(catalog.root), "used_bytes": catalog.used_bytes, "fingerprints": rows}


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
    total, different = sum(row["rows"] for row in rows), {row["fingerprint"] for row in rows}
    say(
        f"{total:,} rows of {len(different):,} fingerprints in {catalog.root.parent}: "
        f"{format_bytes(catalog.used_bytes)} on disk"
    )


def _minute(time: str | None) -> str:
    """An ISO time without seconds: "2026-01-31 12:00Z"."""
    return "" if time is None else f"{time[:10]} {time[11:16]}Z"


def verify_rows(directory: str | None, *, delete: bool, as_json: bool) -> tuple[dict[str, Any], bool]:
    """Verify all rows and notes; returns the result for JSON, or prints it, and whether damage is left."""
    with progress("{task.description}", is_counted=False) as show:
        rows = _verify_rows(directory, show, delete=delete)
    if not as_json:
        _print_verified_rows(root_of(directory), rows)
    return {"path": str(root_of(directory)), **rows}, bool(rows["damaged"] or rows["broken"]) and not delete


def _verify_rows(directory: str | None, show: Callable[..., None], *, delete: bool) -> dict[str, Any]:
    """Verify all rows, and delete damaged ones; for JSON."""
    from streamload.derived.store.catalog import VerifiedRows, delete_damaged, replace_broken
    from streamload.derived.store.catalog import verify as look_at_all
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
            replace_broken(root_of(directory))
    return {
        "rows": verified.rows,
        "notes": verified.notes,
        "unproved": verified.unproved,
        "read_bytes": verified.read_bytes,
        "damaged": [
            {"label": damage.label, "name": damage.name, "cause": damage.cause} for damage in verified.damages
        ],
        "deleted": deleted,
        "broken": broken,
    }


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
    result = "a broken file" if report["broken"] else _result(len(damaged), report["deleted"])
    size = format_bytes(report["read_bytes"])
    say(f"{report['rows']:,} rows and {report['notes']:,} notes ({size}) in {root}: {result}")
    if report["unproved"]:
        say(f"{report['unproved']:,} rows pass for no sample of a shard that is cached now")


def _result(damaged: int, deleted: int) -> str:
    return f"{damaged:,} damaged, {deleted:,} deleted" if damaged else "no damage"


def collect_rows(directory: str | None, *, stale: bool, dry_run: bool, as_json: bool) -> dict[str, Any]:
    """Delete notes without rows, and stale rows; returns what went for JSON, or prints it."""
    from streamload.cache.inventory import as_time
    from streamload.derived.store.catalog import collect_garbage

    root = root_of(directory)
    garbage = collect_garbage(root, stale=stale, dry_run=dry_run)
    report = {
        "path": str(root),
        "dry_run": dry_run,
        "stale": [rows_as_dict(entry) for entry in garbage.stale],
        "notes": [name.hex() for name in garbage.notes],
        "databases": garbage.databases,
        "size_bytes": garbage.size_bytes,
    }
    if as_json:
        return report
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
        f"{len(garbage.databases):,} broken or old files in {root}: {format_bytes(garbage.size_bytes)}"
    )
    return report


def clear_rows(
    directory: str | None, label: str | None, *, yes: bool, dry_run: bool, as_json: bool
) -> dict[str, Any]:
    """Delete the rows of a label, or all; returns how many for JSON, or prints it."""
    with rows_at(directory) as catalog:
        rows = [entry for entry in catalog.fingerprints() if label in (None, entry.label)]
        root = catalog.root
    count, size_bytes = sum(entry.rows for entry in rows), sum(entry.size_bytes for entry in rows)
    owner = "" if label is None else f" of {label!r}"
    if not (yes or dry_run):
        confirm(f"delete {count:,} rows{owner} ({format_bytes(size_bytes)}) from {root}")
    if not dry_run:
        with rows_at(directory, writable=True) as catalog:
            count = catalog.clear(label)
    if not as_json:
        say(f"{'would delete' if dry_run else 'deleted'} {count:,} rows{owner} in {root}")
    about = {"path": str(root), "label": label, "dry_run": dry_run}
    return {**about, "rows": count, "size_bytes": size_bytes}
