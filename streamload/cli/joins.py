"""The indexes of joined files in `streamload cache` (`--kind joins`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamload.cli.terminal import confirm, format_bytes, print_table

if TYPE_CHECKING:
    from streamload.join.table import HeldJoin


def held(cache_dir: str | None) -> list[HeldJoin]:
    """The indexes that a command works on."""
    from streamload.join.table import held_joins
    from streamload.options import read_settings

    return list(held_joins(read_settings(cache_dir=cache_dir).cache_dir))


def show_joins(entries: list[HeldJoin], title: str, *, as_json: bool) -> list[dict[str, Any]]:
    """Return indexes for JSON, or print them."""
    from streamload.cache.inventory import as_time

    rows: list[dict[str, Any]] = [
        {
            "file": entry.source or "(not finished)",
            "rows": entry.rows,
            "disk_bytes": entry.size_bytes,
            "last_used": as_time(entry.used_at),
            "is_open": entry.is_open,
        }
        for entry in entries
    ]
    if rows and not as_json:
        cells = (
            (row["file"], f"{row['rows']:,}", format_bytes(row["disk_bytes"]), row["last_used"])
            for row in rows
        )
        print_table((title, ">rows", ">disk", "last used"), cells)
    return rows


def remove_joins(entries: list[HeldJoin], *, yes: bool, dry_run: bool, as_json: bool) -> list[dict[str, Any]]:
    """Remove the indexes that no process uses."""
    going = [entry for entry in entries if not entry.is_open]
    if going and not (yes or dry_run):
        confirm(f"remove the indexes of {len(going)} joined files")
    removed = going if dry_run else [entry for entry in going if entry.remove()]
    return show_joins(removed, "would remove" if dry_run else "removed", as_json=as_json)
