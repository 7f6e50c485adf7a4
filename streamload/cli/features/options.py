"""The options of the features commands, the rows and derived shards that they select, and these for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.options import roots_of, storage_options_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from streamload.derived.store.catalog import Catalog
    from streamload.derived.store.database import FingerprintRows
    from streamload.derived.store.shard_catalog import FingerprintShards, RowShards

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
    typer.Option("--shared-cache", help="Also the derived shards in this shared cache.", show_default=False),
]
Fingerprint = Annotated[str, typer.Argument(help="The first hexadecimal digits, as many as tell it apart.")]
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


def places_of(
    directory: str | None, shared_cache: str | None, shared_cache_options: str | None
) -> list[RowShards]:
    """Places where derived shards are looked up: this node's caches that exist, and the shared cache."""
    from streamload.cache.shared.objects import Objects, refuse_url
    from streamload.cache.tier import Tier
    from streamload.derived.store.shard_catalog import NodeRowShards, SharedRowShards
    from streamload.options import read_settings

    free_disk = read_settings().free_disk
    roots = dict.fromkeys(roots_of(None if directory is None else [directory]))
    tiers = [Tier.open(root, free_disk=free_disk) for root in roots if (root / "tier.json").is_file()]
    places: list[RowShards] = [NodeRowShards(tier) for tier in tiers]
    if shared_cache is not None:
        refuse_url(shared_cache, "--shared-cache")
        storage = storage_options_of(shared_cache_options, "--shared-cache-options")
        places.append(SharedRowShards(Objects(shared_cache, storage)))
    return places


def fingerprints_in(places: Iterable[RowShards]) -> list[FingerprintShards]:
    """The derived shards in these places, by fingerprint."""
    return [entry for place in places for entry in place.fingerprints()]


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


def shards_as_dict(held: FingerprintShards) -> dict[str, Any]:
    """The derived shards of a fingerprint for JSON."""
    from streamload.cache.inventory import as_time

    return {
        "where": held.where,
        "label": held.label,
        "fingerprint": held.fingerprint,
        "shards": len(held.shards),
        "rows": held.rows,
        "size_bytes": held.size_bytes,
        "last_used": as_time(held.used_at),
        "unreadable": sum(bool(shard.cause) for shard in held.shards),
    }
