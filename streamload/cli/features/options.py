"""Options that the features commands share, and the rows they select."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from streamload.derived.store.catalog import Catalog
    from streamload.derived.store.database import FingerprintRows

Directory = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        "--path",
        help="The cache_path of cache_module, below which rows are; default: the cache directory.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
SharedCache = Annotated[
    str | None,
    typer.Option("--shared-cache", help="Also the derived shards in this shared cache.", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")]
Fingerprint = Annotated[str, typer.Argument(help="The first hexadecimal digits, as many as tell it apart.")]
SHORT = 12
"""So many digits of a fingerprint are shown."""


def root_of(directory: str | None) -> Path:
    """The directory of the rows, which need not exist."""
    from streamload.derived.store.row_store import RowPlace

    return RowPlace(directory or "").root


def rows_at(directory: str | None, *, writable: bool = False) -> "AbstractContextManager[Catalog]":
    """The rows that a command works on."""
    from streamload.derived.store.catalog import open_catalog

    return open_catalog(root_of(directory), writable=writable)


def as_dict(rows: "FingerprintRows") -> dict[str, Any]:
    """The rows of a fingerprint for JSON."""
    from streamload.cache.inventory import as_time

    return {
        "label": rows.label,
        "fingerprint": rows.fingerprint.hex(),
        "rows": rows.rows,
        "size_bytes": rows.size_bytes,
        "last_stored": as_time(rows.stored_at),
        "last_read": None if rows.read_at is None else as_time(rows.read_at),
    }


def minute(time: str | None) -> str:
    """An ISO time without seconds: "2026-01-31 12:00Z"."""
    return "" if time is None else f"{time[:10]} {time[11:16]}Z"
