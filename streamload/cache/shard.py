"""A shard as a run knows it: by its URL from the beginning, by its version once there is an index of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamload import urls
from streamload.errors import DatasetChanged
from streamload.origins.origin import Version
from streamload.shards.index import IndexReader
from streamload.shards.local import LocalVersion


@dataclass(frozen=True, slots=True)
class Shard:
    """What a run knows of a shard before it has read any of it."""

    url: str = field(repr=False)
    """As listed; it may hold secrets."""
    name: str
    """The URL without secrets: for messages, logs and `__url__`."""
    digest: str
    """Its name in the tier."""
    local: Path | None = None
    """The file itself where it is on this machine: then only its index is kept in the tier."""


def shard_of(url: str, storage_options: dict[str, Any] | None) -> Shard:
    """What is known of a shard from its URL alone."""
    return Shard(
        url=url,
        name=urls.redact(url),
        digest=urls.digest(url, storage_options),
        local=urls.local_path(url) if urls.is_local(url) else None,
    )


def version_of(reader: IndexReader) -> Version:
    """Which version of its shard an index is of."""
    meta: dict[str, Any] = reader.meta
    return Version(meta.get("size"), meta.get("etag"), meta.get("last_modified"))


def is_of(reader: IndexReader, shard: Shard) -> bool:
    """Whether an index is of the shard under whose name it lies: nobody has moved it there."""
    return reader.meta.get("digest", shard.digest) == shard.digest


def refuse_other(shard: Shard, begun_with: Version | None, found: Version) -> None:
    """Raise DatasetChanged where `found` can't be the version that a run began with."""
    difference = begun_with.difference(found) if begun_with is not None else None
    if difference is not None:
        raise DatasetChanged(
            f"{shard.name} is another version than the one that this run began to read: {difference}"
        )


def is_outdated(meta: dict[str, object], shard: Shard) -> bool:
    """Whether a local file was changed since its index was made; not known of one that couldn't be opened."""
    if shard.local is None or "mtime_ns" not in meta:
        return False
    return (meta.get("size"), meta.get("mtime_ns")) != LocalVersion.of(shard.local)
