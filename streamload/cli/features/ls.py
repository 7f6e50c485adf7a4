"""`streamload features ls`: the fingerprints in a directory of rows. Read-only."""

import json
from typing import TYPE_CHECKING, Any

from streamload.cli.features.options import SHORT, AsJson, Directory, SharedCache, as_dict, rows_at
from streamload.cli.features.shards import as_dict_of_shards, fingerprints_in, places_of, print_shards
from streamload.cli.options import SharedCacheOptions

if TYPE_CHECKING:
    from streamload.derived.row_catalog import Catalog

_COLUMNS = ("fingerprint", "rows", "size", "last stored", "last read", "device", "dtype")


def list_fingerprints(
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
        rows = [_described(catalog, one) for one in catalog.fingerprints()]
        if as_json:
            about = {"path": str(catalog.root), "used_bytes": catalog.used_bytes}
            listed = [as_dict_of_shards(one) for one in shards]
            print(json.dumps({**about, "fingerprints": rows, "derived": listed}, indent=2))
        else:
            _print_table(catalog, rows)
            print_shards(shards)


def _described(catalog: "Catalog", one: Any) -> dict[str, Any]:
    """A fingerprint's line; the device and dtype come from its note, if it has one."""
    from streamload.derived.parts import flat

    parts = catalog.parts(one.fingerprint)
    known = flat(parts or {})
    return {
        **as_dict(one),
        "has_note": parts is not None,
        "device": known.get("device"),
        "dtype": known.get("settings.autocast") or known.get("settings.default_dtype"),
    }


def _print_table(catalog: "Catalog", rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from streamload.metrics import format_bytes

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("label", overflow="fold")
    shown = [name for name in _COLUMNS if name != "last read" or any(row["last_read"] for row in rows)]
    for name in shown:
        table.add_column(name, justify="right" if name in ("rows", "size") else "left", no_wrap=True)
    for row in rows:
        cells = {
            "fingerprint": row["fingerprint"][:SHORT],
            "rows": f"{row['rows']:,}",
            "size": format_bytes(row["size_bytes"]),
            "last stored": _minute(row["last_stored"]),
            "last read": _minute(row["last_read"]),
            "device": (row["device"] or "") if row["has_note"] else "no note",
            "dtype": (row["dtype"] or "").removeprefix("torch."),
        }
        table.add_row(escape(row["label"]), *(cells[name] for name in shown))
    if not rows:
        console.print(f"there are no rows in {catalog.root}", markup=False, soft_wrap=True)
        return
    console.print(table)
    total = sum(row["rows"] for row in rows)
    console.print(
        f"{total:,} rows of {len({row['fingerprint'] for row in rows}):,} fingerprints in {catalog.root}: "
        f"{format_bytes(catalog.used_bytes)} on disk",
        markup=False,
        soft_wrap=True,
    )


def _minute(time: str | None) -> str:
    """An ISO time without seconds: "2026-01-31 12:00Z"."""
    return "" if time is None else f"{time[:10]} {time[11:16]}Z"
