"""`streamload features ls`: the fingerprints in a directory of rows. Read-only."""

from typing import TYPE_CHECKING, Any

from streamload.cli.features.options import SHORT, AsJson, Directory, SharedCache, as_dict, minute, rows_at
from streamload.cli.features.shards import as_dict_of_shards, fingerprints_in, places_of, print_shards
from streamload.cli.options import SharedCacheOptions
from streamload.cli.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from streamload.derived.store.catalog import Catalog


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
        rows = [_described(catalog, entry) for entry in catalog.fingerprints()]
        if as_json:
            about = {"path": str(catalog.root), "used_bytes": catalog.used_bytes}
            listed = [as_dict_of_shards(entry) for entry in shards]
            print_json({**about, "fingerprints": rows, "derived": listed})
        else:
            _print_table(catalog, rows)
            print_shards(shards)


def _described(catalog: "Catalog", entry: Any) -> dict[str, Any]:
    """A fingerprint's line; the device and dtype come from its note, if it has one."""
    from streamload.derived.store.parts import flat

    parts = catalog.parts(entry.fingerprint)
    values = flat(parts or {})
    return {
        **as_dict(entry),
        "has_note": parts is not None,
        "device": values.get("device"),
        "dtype": values.get("settings.autocast") or values.get("settings.default_dtype"),
    }


def _print_table(catalog: "Catalog", rows: list[dict[str, Any]]) -> None:
    from streamload.metrics import format_bytes

    if not rows:
        say(f"there are no rows in {catalog.root}")
        return
    cells = [
        {
            "label": row["label"],
            "fingerprint": row["fingerprint"][:SHORT],
            "rows": f"{row['rows']:,}",
            "size": format_bytes(row["size_bytes"]),
            "last stored": minute(row["last_stored"]),
            "last read": minute(row["last_read"]),
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
