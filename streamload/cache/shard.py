"""A shard as a run knows it: by its URL at first, by its version once there is an index of it."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, overload

from streamload import urls
from streamload.errors import DatasetChanged
from streamload.origins.origin import Version
from streamload.shards.index import IndexReader, LocalVersion
from streamload.urls import UrlList

LOOKED_THROUGH = 10_000
"""A run that starts examines only a sample of a longer list; this many shards take about 0.1 s."""
_KEPT = 1024
"""More than a process has open or fills at a time."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as a run knows it before it has read any of it."""

    url: str = field(repr=False)
    """As listed; may contain secrets."""
    name: str
    """The URL without secrets: for messages, logs and `__url__`."""
    digest: str
    """Its name in the tier."""
    local: Path | None = None
    """The file, unless it is copied. The tier has only its index, if it is read in place."""
    is_copied: bool = False
    """True for a file that is copied into the tier, as remote shards are."""
    recipe: str = ""
    """Recipe of a prepared shard, whose bytes are made from the origin's; "": the origin's own bytes."""
    prepared: Shard | None = None
    """The prepared shard that is read instead, if it exists; None: none is looked for."""
    storage_options: dict[str, Any] | None = field(default=None, repr=False, compare=False)
    """Storage options of fsspec for its origin."""

    @property
    def digests(self) -> tuple[str, ...]:
        """The names under which a tier may have it."""
        return (self.digest,) if self.prepared is None else (self.prepared.digest, self.digest)

    @property
    def in_place(self) -> Path | None:
        """The file whose bytes are read in place; None: the tier has to have them."""
        is_made = self.recipe or (self.local is not None and urls.compression(self.url) is not None)
        return None if is_made else self.local


def shard_of(
    url: str,
    storage_options: dict[str, Any] | None,
    recipe: str = "",
    spelling: str | None = None,
    *,
    is_copied: bool = False,
) -> Shard:
    """A shard as its URL alone describes it.

    Args:
        recipe: read it as prepared by this recipe.
        spelling: the URL as the user gave it; None: the same.
        is_copied: it is a file that is copied. Its copy and the index of one that is read in place have
            different names, as two runs may read it in both ways.
    """
    digest = urls.digest(url, storage_options)
    shard = Shard(
        url=url,
        name=urls.redact(url if spelling is None else spelling),
        digest=_second_name(digest, "copy") if is_copied else digest,
        local=urls.local_path(url) if urls.is_local(url) and not is_copied else None,
        is_copied=is_copied,
        storage_options=storage_options,
    )
    return replace(shard, prepared=prepared_form(shard, recipe)) if recipe else shard


def prepared_form(shard: Shard, recipe: str) -> Shard:
    """The shard that a recipe makes of another (derived/prepare/preparation.py), under a name of its own.

    Both have the same short name (demand.py): a run needs them equally soon.
    """
    digest = _second_name(shard.digest, recipe)
    return replace(shard, name=f"{shard.name}#{recipe}", digest=digest, recipe=recipe, prepared=None)


def _second_name(digest: str, form: str) -> str:
    """The name of another form of a shard, with the same short name."""
    return digest[:16] + hashlib.blake2b(f"{digest} {form}".encode(), digest_size=8).hexdigest()


def by_name(findings: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Findings about shards by their names, numbered if only a hidden query distinguishes them."""
    by_unique_name, counts = dict[str, str](), Counter[str]()
    for name, finding in findings:
        counts[name] += 1
        by_unique_name[name if counts[name] == 1 else f"{name} ({counts[name]})"] = finding
    return by_unique_name


class ShardList(Sequence[Shard]):
    """The shards of a run, each made on demand: small in every process, whatever the length.

    Immutable and thread-safe; pickles as the list of URLs. A shard is named by its URL and by the environment
    and configuration of commands at the time it is made (see `urls.identity`).

    Args:
        recipe: of the prepared shards to read if they exist; empty: none.
        copied: folders whose files are copied, as remote shards are (cache/copying.py decides).
    """

    def __init__(
        self,
        listed: UrlList,
        storage_options: dict[str, Any] | None,
        recipe: str = "",
        copied: tuple[str, ...] = (),
    ) -> None:
        self.urls = listed
        self.storage_options = storage_options
        self.copied = copied
        self._recipe = recipe
        self._shard = functools.lru_cache(_KEPT)(self._made)

    def __len__(self) -> int:
        return len(self.urls)

    @overload
    def __getitem__(self, place: int) -> Shard: ...
    @overload
    def __getitem__(self, place: slice) -> ShardList: ...
    def __getitem__(self, place: int | slice) -> Shard | ShardList:
        if isinstance(place, slice):
            return ShardList(self.urls[place], self.storage_options, self._recipe, self.copied)
        return self._shard(place)

    def __iter__(self) -> Iterator[Shard]:
        return map(self._made, range(len(self)))

    def __repr__(self) -> str:
        return f"<ShardList of {len(self):,}>"

    def __reduce__(self) -> tuple[type[ShardList], tuple[object, ...]]:
        return ShardList, (self.urls, self.storage_options, self._recipe, self.copied)

    def prepared_by(self, recipe: str) -> ShardList:
        """The same shards, read as prepared by a recipe where such shards exist; "": as they are."""
        return ShardList(self.urls, self.storage_options, recipe, self.copied)

    def copied_below(self, folders: tuple[str, ...]) -> ShardList:
        """The same shards, of which those below some folders are copied."""
        return ShardList(self.urls, self.storage_options, self._recipe, folders)

    def are_local(self) -> Iterator[bool]:
        """For URLs that represent all others, whether they are files that aren't copied."""
        kinds = self.urls.kinds()
        return (urls.is_local(url) and urls.folder_of(url, self.copied) is None for url in kinds)

    def digest(self, place: int) -> str:
        """The name of a shard's origin; all names of the shard in a tier begin with its first half."""
        return urls.digest(self.urls[place], self.storage_options)

    def _made(self, place: int) -> Shard:
        url = self.urls[place]
        is_copied = urls.folder_of(url, self.copied) is not None
        return shard_of(url, self.storage_options, self._recipe, self.urls.given(place), is_copied=is_copied)


def spread(shards: Sequence[Shard]) -> Sequence[Shard]:
    """The shards themselves if they are few; else a sample spread over the list."""
    return shards[:: -(-len(shards) // LOOKED_THROUGH) or 1]


def fingerprint(shards: Sequence[Shard]) -> str:
    """32 hex characters, equal for equal sets of shards.

    For a short list, order, patterns and signatures of URLs don't matter. A longer list is identified by its
    patterns, if it was made of some.
    """
    if isinstance(shards, ShardList) and len(shards) > LOOKED_THROUGH:
        return shards.urls.fingerprint()
    names = sorted({shard.digest for shard in shards})
    return hashlib.blake2b("".join(names).encode(), digest_size=16).hexdigest()


def version_of(reader: IndexReader) -> Version:
    """The version of a shard that an index describes; of a prepared one, that of what it was made of."""
    meta: dict[str, Any] = reader.meta
    return Version(meta.get("size"), meta.get("etag"), meta.get("last_modified"))


def is_of(reader: IndexReader, shard: Shard) -> bool:
    """True if an index describes the shard whose name it has: nobody has moved it there."""
    return reader.meta.get("digest") == shard.digest


def refuse_other(shard: Shard, begun_with: Version | None, version: Version) -> None:
    """Raise DatasetChanged if `version` can't be the one that a run began with."""
    difference = begun_with.difference(version) if begun_with is not None else None
    if difference is not None:
        raise DatasetChanged(f"{shard.name} is not the version that this run began to read: {difference}")


def is_outdated(meta: dict[str, object], shard: Shard) -> bool:
    """True if a local file was changed or removed since its index was made (False: unreadable then)."""
    is_indexed = "mtime_ns" in meta
    if shard.local is None or not (is_indexed or "prepared" in meta or "last_modified" in meta):
        return False
    try:
        status = shard.local.stat()
    except OSError:
        return True
    if not is_indexed:  # by way of origins/local.py, which doesn't know the size of what it unpacks
        is_other = meta.get("last_modified") != str(status.st_mtime_ns)
        return is_other or meta.get("size") not in (None, status.st_size)
    return not LocalVersion.of_status(status).is_of(meta)


class ShardRange(NamedTuple):
    """The bytes `start` to `stop` of a shard in one version."""

    shard: Shard
    version: Version
    start: int
    stop: int
