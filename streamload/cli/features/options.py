"""The options of the features commands, the rows that they select, and these for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.options import storage_options_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from streamload.derived.store.catalog import Catalog, FingerprintRows

Directory = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        "--path",
        help="The cache_path of cache_module, below which rows are; default: the cache directory.",
        show_default=False,
    ),
]
SharedCache = Annotated[
    str | None,
    typer.Option("--shared-cache", help="Also what this shared cache says of rows.", show_default=False),
]
Fingerprint = Annotated[str, typer.Argument(help="The first hexadecimal digits, as many as tell it apart.")]
Notes = dict[str, dict[str, Any]]
"""The parts of fingerprints."""
SHORT = 12
"""So many digits of a fingerprint are shown."""


def root_of(directory: str | None) -> Path:
    """The directory of the rows, which need not exist."""
    from streamload.derived.store.row_store import RowPlace

    return RowPlace(directory or "").root


def rows_at(directory: str | None, *, writable: bool = False) -> AbstractContextManager[Catalog]:
    """The rows that a command works on."""
    from streamload.derived.store.catalog import open_catalog

    return open_catalog(root_of(directory), writable=writable)


def notes_in(shared_cache: str | None, shared_cache_options: str | None, prefixes: Iterable[str]) -> Notes:
    """What a shared cache says of the fingerprints that begin with some digits, by fingerprint."""
    if shared_cache is None:
        return {}
    from streamload.cache.shared.objects import Objects, refuse_url
    from streamload.cache.shared.tier import SharedTier
    from streamload.features.sharing import noted_fingerprints, read_note
    from streamload.metrics import Counters

    refuse_url(shared_cache, "--shared-cache")
    storage = storage_options_of(shared_cache_options, "--shared-cache-options")
    tier = SharedTier(Objects(shared_cache, storage), Counters())
    chosen = [name for name in noted_fingerprints(tier) if name.startswith(tuple(prefixes))]
    notes = ((name, read_note(tier, bytes.fromhex(name))) for name in chosen)
    return {name: note["parts"] for name, note in notes if note is not None}


def rows_as_dict(rows: FingerprintRows) -> dict[str, Any]:
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
