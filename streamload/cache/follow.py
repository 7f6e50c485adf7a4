"""Read a shard that may still be arriving (step G): its entries by number, its samples by entry.

A view's place is a sample number, so between two samples it may go over to another source of the same bytes:
from a part whose filler died to the part of whoever took it up, or to the published shard. It never waits: it
says what is there, and whoever asks decides how long to ask again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from streamload import urls
from streamload.cache.locks import FileLock
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt, DatasetChanged
from streamload.origins.origin import Version
from streamload.shards.index import IndexReader
from streamload.shards.local import LocalVersion
from streamload.shards.samples import Entry

_STANDSTILL_SECONDS = 0.25
"""How long a source may stand still before the view looks for another one."""
_APPEAR_SECONDS = 0.01
"""How often a view that has no source looks for one."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What a run knows of a shard before it has read any of it."""

    url: str
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


class _Source:
    """One directory that holds entries and bytes of a shard, open for reading and pinned."""

    def __init__(self, path: Path, shard: Shard, pin: FileLock):
        self.pin = pin
        self.reader = IndexReader(path)
        try:
            data = shard.local if shard.local is not None else path / "data"
            self._data = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.reader.close()
            raise
        self.path = path
        self.version = version_of(self.reader)

    @classmethod
    def open(cls, path: Path, shard: Shard) -> _Source | None:
        """The source at `path`; None while it is being taken away.

        Raises:
            FileNotFoundError: there is none, or one of its files is missing (yet).
            CacheCorrupt: its index has no header (yet), or a damaged one.
        """
        pin = FileLock.acquire(path / "names", shared=True)
        if pin is None:
            if (path / "names").exists():
                return None
            raise FileNotFoundError(f"there is no {path / 'names'}")
        try:
            return cls(path, shard, pin)
        except BaseException:
            pin.close()
            raise

    def bytes_of(self, entry: Entry) -> memoryview | None:
        """The bytes from the entry's start to its stop; None if they aren't what was written."""
        with contextlib.suppress(OSError):
            data = os.pread(self._data, entry.stop - entry.start, entry.start)
            if len(data) == entry.stop - entry.start and is_whole(entry, memoryview(data)):
                return memoryview(data)
        return None

    def close(self) -> None:
        self.reader.close()
        self.pin.close()
        if self._data >= 0:
            os.close(self._data)
            self._data = -1


class ShardView:
    """One shard as one reader sees it, arriving or whole."""

    def __init__(self, tier: Tier, shard: Shard):
        self.shard = shard
        self._tier = tier
        self._index: _Source | None = None  # where the entries come from: never fewer than before
        self._bytes: _Source | None = None  # where samples are read: usually the same
        self._looked_at = 0.0
        self.was_complete = False
        """Whether the whole shard was in the tier when the view first found it."""
        self.refresh()
        self.was_complete = self.ended and not self.gave_up

    def __repr__(self) -> str:
        where = self._index.path.parent.name if self._index else "nowhere"
        state = "ended" if self.ended else "arriving"
        return f"<ShardView {self.shard.name}: {self.count} samples, {state}, in {where}>"

    @property
    def reader(self) -> IndexReader | None:
        """The entries that are there."""
        return self._index.reader if self._index else None

    @property
    def count(self) -> int:
        """How many samples are whole."""
        return self._index.reader.count if self._index else 0

    @property
    def ended(self) -> bool:
        """Whether no more samples will come."""
        return self._index is not None and self._index.reader.ended

    @property
    def gave_up(self) -> bool:
        """Whether the shard ended by a verdict: it could not be had, or not to its end."""
        return self.ended and self._index is not None and not self._index.reader.is_complete

    def refresh(self) -> bool:
        """Look for new entries; True if there are any, or if the shard has ended."""
        before = (self.count, self.ended)
        if self._index is not None:
            if self.ended:
                return False
            self._index.reader.refresh()
        if (self.count, self.ended) != before:
            self._looked_at = time.monotonic()
        elif self._may_look(_STANDSTILL_SECONDS if self._index else _APPEAR_SECONDS):
            self._look_elsewhere()
        return (self.count, self.ended) != before

    def read(self, number: int) -> tuple[Entry, memoryview] | None:
        """Sample `number`: its entry and the bytes from `entry.start` on; None if they aren't there (yet).

        Bytes that fail their checksum are taken out of the tier, so that they are fetched again.

        Raises:
            DatasetChanged: a local file, or the copy that was fetched again, isn't what the run began with.
        """
        source = self._bytes
        if source is None or source.reader.count <= number:
            source = self._find_bytes(number)
            if source is None:
                return None
        with contextlib.suppress(CacheCorrupt):
            entry = source.reader.entry(number)
            data = source.bytes_of(entry)
            if data is not None:
                return entry, data
            if self.shard.local is not None:
                raise DatasetChanged(f"{self.shard.name} was changed or cut while it was being read")
        self.distrust()
        return None

    def distrust(self) -> None:
        """What is read isn't what was written: take the shard away, so that it is fetched again."""
        self._tier.condemn(self.shard.digest)
        self.close()

    def keep_verdict(self) -> FileLock | None:
        """The lock that makes a verdict stand as long as somebody lives who has acted on it."""
        return FileLock.acquire(self._tier.verdict(self.shard.digest) / "names", shared=True)

    def close(self) -> None:
        """Let go of the shard; it may be evicted from now on."""
        for source in {self._index, self._bytes}:
            if source is not None:
                source.close()
        self._index = self._bytes = None

    def _look_elsewhere(self) -> None:
        """Go over to another source if it has more."""
        for path in self._places():
            if self._index is not None and path == self._index.path:
                continue
            found = self._open(path)
            if found is None:
                continue
            better = self._index is None or found.reader.ended or found.reader.count > self.count
            if better and found.reader.count >= self.count:
                self._adopt(found)
                return
            found.close()

    def _find_bytes(self, number: int) -> _Source | None:
        """A source from which sample `number` can be read."""
        if not self._may_look(_APPEAR_SECONDS):
            return None
        for path in self._places():
            found = self._open(path)
            if found is not None and found.reader.count > number:
                self._bytes = found
                return found
            if found is not None:
                found.close()
        return None

    def _may_look(self, interval_seconds: float) -> bool:
        now = time.monotonic()
        if now - self._looked_at < interval_seconds:
            return False
        self._looked_at = now
        return True

    def _places(self) -> Iterator[Path]:
        yield self._tier.published(self.shard.digest)
        yield self._tier.verdict(self.shard.digest)
        yield from self._tier.parts(self.shard.digest)

    def _open(self, path: Path) -> _Source | None:
        is_published = path == self._tier.published(self.shard.digest)
        try:
            found = _Source.open(path, self.shard)
        except (FileNotFoundError, CacheCorrupt):
            found = None
            if is_published and path.exists():
                self._tier.condemn(self.shard.digest)
        if found is None:
            return None
        found.reader.refresh()
        is_damaged = is_published and not found.reader.ended
        if is_damaged or (self._index is None and _is_outdated(found.reader.meta, self.shard)):
            found.close()
            self._tier.condemn(self.shard.digest)
            return None
        changed = self._index.version.difference(found.version) if self._index is not None else None
        if changed is not None:
            found.close()
            raise DatasetChanged(
                f"{self.shard.name} is another version than the one that this run began to read: {changed}"
            )
        with contextlib.suppress(OSError):
            os.utime(path)
        return found

    def _adopt(self, found: _Source) -> None:
        old, self._index = self._index, found
        if self._bytes is None or self._bytes is old:
            self._bytes = found
        if old is not None and old is not self._bytes:
            old.close()


def version_of(reader: IndexReader) -> Version:
    """Which version of its shard an index is of."""
    meta: dict[str, Any] = reader.meta
    return Version(meta.get("size"), meta.get("etag"), meta.get("last_modified"))


def is_whole(entry: Entry, data: memoryview) -> bool:
    """Whether the bytes are those that were written."""
    if entry.checksum is None:
        return True
    digest = xxhash.xxh3_64()
    for _, start, size in entry.members:
        digest.update(data[start - entry.start : start - entry.start + size])
    return digest.intdigest() == entry.checksum


def _is_outdated(meta: dict[str, object], shard: Shard) -> bool:
    """Whether a local file was changed since its index was made."""
    if shard.local is None:
        return False
    return (meta.get("size"), meta.get("mtime_ns")) != LocalVersion.of(shard.local)
