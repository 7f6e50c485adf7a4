"""Read a shard that may still be arriving (step G): its entries by number, its samples by entry.

A view's place is a sample number, so between two samples it may go over to another source of the same bytes:
from a part whose filler died to the part of whoever took it up, or to the published shard. Where only the
index is kept, the bytes come from the origin by range. But for those it never waits: it says what is there,
and whoever asks decides how long to ask again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from streamload.cache.locks import PATIENCE_SECONDS, FileLock
from streamload.cache.sample_io import Needed, ReadMemory, is_whole
from streamload.cache.shard import Shard, is_of, is_outdated, refuse_other
from streamload.cache.shard_copy import ShardCopy
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt, CacheError, DatasetChanged, StreamloadError
from streamload.origins.origin import Version
from streamload.shards.index import IndexReader
from streamload.shards.samples import Entry

_STANDSTILL_SECONDS = 0.25
"""How long a source may stand still before the view looks for another one."""
_APPEAR_SECONDS = 0.01
"""How often a view that has no source looks for one."""
_FINISHED = frozenset({"shards", "bare", "gone"})
"""Rooms that only what has its end is moved to, by one rename."""


Found = tuple[ShardCopy, Entry]
"""An entry, and the source that it is of."""

Fetch = Callable[[Shard, Version, int, int], bytes]
"""Gives the bytes of a shard of that version from its origin, from a start to a stop.

Raises:
    OriginError, DatasetChanged: they can't be had.
"""


class Versions(Protocol):
    """By which version of each shard a run goes (cache/freshness.py)."""

    def is_current(self, shard: Shard) -> bool:
        """Whether a reader may begin with what there is."""
        ...

    def agree(self, shard: Shard, version: Version) -> None:
        """A reader begins with this version.

        Raises:
            DatasetChanged: the run has begun with another one.
        """
        ...


class ShardView:
    """One shard as one reader sees it, arriving or whole.

    Args:
        tiers: where it is kept: in the first of these, or, where that failed, in the next.
        shard: which one.
        fetch: gives its bytes where only its index is kept; without it such a source counts as none.
        versions: what a view may begin with; None: with whatever there is.
    """

    def __init__(
        self,
        tiers: Tier | Callable[[], Sequence[Tier]],
        shard: Shard,
        fetch: Fetch | None = None,
        versions: Versions | None = None,
    ):
        self.shard = shard
        self._pid = os.getpid()
        self._versions = versions if shard.local is None else None
        self._tiers = (lambda: (tiers,)) if isinstance(tiers, Tier) else tiers
        self._avoided: set[Path] = set()
        self._fetch = fetch
        self._index: ShardCopy | None = None  # where the entries come from: never fewer than before
        self._bytes: ShardCopy | None = None  # where samples are read: usually the same
        self._looked_at = 0.0
        self._trouble_since: float | None = None
        self.was_complete = False
        """Whether the whole shard was in the tier when the view first found it."""
        was_published = not self._is_settled() and any(tier.has_whole(shard) for tier in self._tiers())
        self.refresh()
        self.was_complete = was_published or (self.ended and not self.gave_up and not self.is_index_only)

    def __repr__(self) -> str:
        where = self._index.path.parent.name if self._index else "nowhere"
        state = "ended" if self.ended else "arriving"
        return f"<ShardView {self.shard.name}: {self.count} samples, {state}, in {where}>"

    @property
    def is_index_only(self) -> bool:
        """Whether its samples have to be read from the origin."""
        return self._bytes is not None and self._bytes.is_index_only

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
        """Whether the shard ended by a tombstone: it could not be had, or not to its end."""
        return self.ended and self._index is not None and not self._index.reader.is_complete

    def refresh(self) -> bool:
        """Look for new entries; True if there are any, or if the shard has ended."""
        before = (self.count, self.ended)
        if self._index is not None:
            if self.ended:
                return False
            try:
                self._index.reader.refresh()
            except CacheCorrupt:
                self.invalidate(self._index)
        if (self.count, self.ended) != before:
            self._looked_at = time.monotonic()
        elif self._may_look(_STANDSTILL_SECONDS if self._index else _APPEAR_SECONDS):
            self._look_elsewhere()
        return (self.count, self.ended) != before

    def find(self, numbers: Sequence[int]) -> list[Found | None]:
        """The entries of samples, and where they are read; None for each if one of them isn't there (yet)."""
        source, last = self._bytes, max(numbers)
        if source is None or source.reader.count <= last or source.is_index_only:
            source = self._find_bytes(last)
            if source is None:
                return [None] * len(numbers)
        try:
            return [(source, entry) for entry in source.reader.entries(numbers)]
        except CacheCorrupt:
            self.invalidate(source)
            return [None] * len(numbers)

    def ranges(self, numbers: Sequence[int]) -> list[tuple[Version, int, int]]:
        """Where samples lie at the origin, if that is where they are read; those that are there yet."""
        source = self._bytes
        if source is None or not source.is_index_only:
            return []
        known = [number for number in numbers if number < source.reader.count]
        try:
            return [(source.version, entry.start, entry.stop) for entry in source.reader.entries(known)]
        except CacheCorrupt:
            return []  # `find` deals with it

    def read(
        self,
        number: int,
        needed: Needed | None = None,
        memory: ReadMemory | None = None,
        found: Found | None = None,
    ) -> tuple[Entry, memoryview] | None:
        """Sample `number`: its entry and the bytes from `entry.start` on; None if they aren't there (yet).

        Bytes that fail their checksum are taken out of the tier, so that they are fetched again.

        Args:
            number: of the sample in its shard.
            needed: says which members of a sample of more than AT_ONCE_BYTES are needed: the entry has only
                those then. None: all of them, however large.
            memory: where the bytes may be put.
            found: what `find` gave for it; None: it wasn't asked.

        Raises:
            DatasetChanged: a local file, or the copy that was fetched again, isn't what the run began with.
            OriginError: only the index is kept, and the origin doesn't give the bytes.
        """
        if found is None or found[0] is not self._bytes:  # it may have been let go of since
            (found,) = self.find((number,))
            if found is None:
                return None
        source, entry = found
        if source.is_index_only:
            return entry, self._fetched(source, entry)
        sample = source.sample(entry, needed, memory)
        if sample is None:
            if source.is_in_place:
                raise DatasetChanged(f"{self.shard.name} was changed or cut while it was being read")
            self.invalidate(source)
        return sample

    def invalidate(self, source: ShardCopy | None = None) -> None:
        """What is read isn't what was written: take it away, so that it is fetched again.

        Args:
            source: of what was read; None: of the entries, as `reader` gives them.
        """
        source = source or self._index
        if source is not None:
            self._quarantine(source.path)
        self.close()

    @property
    def is_stuck(self) -> bool:
        """Whether there is a copy that can't be used and can't be taken away either."""
        return any(path.exists() for path in self._avoided)

    def keep_verdict(self) -> FileLock | None:
        """The lock that makes a tombstone stand as long as somebody lives who has acted on it."""
        for tier in self._tiers():
            lock = FileLock.acquire(tier.tombstone(self.shard.digest) / "names", shared=True)
            if lock is not None:
                return lock
        return None

    def close(self) -> None:
        """Let go of the shard; it may be evicted from now on."""
        for source in {self._index, self._bytes}:
            if source is not None:
                source.close()
        self._index = self._bytes = None

    def _fetched(self, source: ShardCopy, entry: Entry) -> memoryview:
        assert self._fetch is not None
        try:
            data = memoryview(self._fetch(self.shard, source.version, entry.start, entry.stop))
            if is_whole(entry, data):
                return data
            raise DatasetChanged(
                f"{self.shard.name} gives other bytes for sample {entry.key} than when it was indexed"
            )
        except DatasetChanged:  # nobody can read by this index any more, nor could the next run
            for tier in self._tiers():
                if source.path == tier.index_only(self.shard.digest):
                    tier.trash(source.path)
            raise

    def _look_elsewhere(self) -> None:
        """Go over to another source if it has more.

        Raises:
            DatasetChanged: the shard has ended with fewer samples than have been read of it.
        """
        for found in self._sources(self._index):
            better = self._index is None or found.reader.ended or found.reader.count > self.count
            if better and found.reader.count >= self.count:
                self._adopt(found)
                return
            reader = found.reader
            found.close()
            if reader.ended:
                why = ": ".join(filter(None, (reader.status, reader.cause)))
                raise DatasetChanged(
                    f"{self.shard.name} has ended ({why}) with {reader.count} samples; this run has begun to "
                    f"read {self.count}"
                )

    def _find_bytes(self, number: int) -> ShardCopy | None:
        """A source from which sample `number` can be read; an index-only one only where there is no other."""
        index_only = self._bytes if self._bytes is not None and self._bytes.reader.count > number else None
        if not self._may_look(_APPEAR_SECONDS if index_only is None else _STANDSTILL_SECONDS):
            return index_only
        for found in self._sources(index_only):
            if found.reader.count > number and (index_only is None or not found.is_index_only):
                old, self._bytes = self._bytes, found
                if old is not None and old is not self._index:
                    old.close()
                return found
            found.close()
        return index_only

    def _may_look(self, interval_seconds: float) -> bool:
        now = time.monotonic()
        if now - self._looked_at < interval_seconds:
            return False
        self._looked_at = now
        return True

    def _sources(self, known: ShardCopy | None) -> Iterator[ShardCopy]:
        """What can be opened of the shard but for what is known, the best first.

        Raises:
            CacheError: a tier has been in trouble for long, and nothing was found.
        """
        trouble = None
        for tier in self._tiers():
            try:
                for path in self._places(tier):
                    found = self._open(path) if known is None or path != known.path else None
                    if found is not None:
                        self._trouble_since = None
                        yield found
            except StreamloadError:
                raise
            except OSError as exc:  # too many open files, say: they may be fewer in a moment
                trouble = exc
        if trouble is None:
            self._trouble_since = None
        elif self._trouble_since is None:
            self._trouble_since = time.monotonic()
        elif time.monotonic() - self._trouble_since > PATIENCE_SECONDS:
            raise CacheError(f"{self.shard.name} can't be read from the cache: {trouble}") from trouble

    def _places(self, tier: Tier) -> list[Path]:
        digest = self.shard.digest
        places = [tier.tombstone(digest)]
        if self._is_settled():
            published = map(tier.published, self.shard.digests)
            parts = (part for name in self.shard.digests for part in tier.parts(name))
            places = [*published, tier.index_only(digest), *places, *parts]
        return [path for path in places if path not in self._avoided]

    def _is_settled(self) -> bool:
        """Whether it may be read; what has begun goes on as it is."""
        return self._index is not None or self._versions is None or self._versions.is_current(self.shard)

    def _open(self, path: Path) -> ShardCopy | None:
        """The source at `path`; None if there is none yet, or none of use: such a one is taken away."""
        is_finished = path.parent.name in _FINISHED
        before = _directory(path) if is_finished else None
        prepared = self.shard.prepared
        shard = prepared if prepared is not None and path.name.startswith(prepared.digest) else self.shard
        try:
            found = ShardCopy.open(path, shard)
        except (FileNotFoundError, CacheCorrupt):
            found = None
            if before is not None and before == _directory(path):  # else it was published just now
                self._quarantine(path)
        if found is None:
            return None
        with contextlib.ExitStack() as unless_used:
            unless_used.callback(found.close)
            if found.is_index_only and self._fetch is None:
                return None
            is_damaged = is_finished and not (found.reader.ended and is_of(found.reader, shard))
            if is_damaged or (self._index is None and is_outdated(found.reader.meta, self.shard)):
                unless_used.close()  # what is still read isn't deleted
                self._quarantine(path)
                return None
            if self._index is not None:
                refuse_other(self.shard, self._index.version, found.version)
                self._refuse_other_bytes(self._index.reader, found.reader)
            elif self._versions is not None and path.parent.name != "gone":
                self._versions.agree(self.shard, found.version)
            unless_used.pop_all()
        with contextlib.suppress(OSError):
            os.utime(path)
        return found

    def _refuse_other_bytes(self, known: IndexReader, found: IndexReader) -> None:
        """Compare what has been read with the same samples of another source, whatever names its version.

        Raises:
            DatasetChanged: they have other bytes, as those of a command that doesn't repeat itself.
        """
        if known.meta.get("digest") != found.meta.get("digest"):
            return  # the one is prepared, the other as it is
        count = min(known.count, found.count)
        for field in ("start", "stop", "checksum"):
            if (known.records[field][:count] != found.records[field][:count]).any():
                raise DatasetChanged(
                    f"{self.shard.name} came with other bytes when it was fetched again; this run has begun "
                    f"to read {known.count} samples of it"
                )

    def _quarantine(self, path: Path) -> None:
        """Take a copy away that can't be trusted, or, where the disk doesn't let go of it, pass it by.

        Raises:
            CacheError: nothing is wrong with it: this process was forked from the one that opened it.
        """
        if self._pid != os.getpid():
            raise CacheError(
                f"{self.shard.name} was opened by the process that this one was forked from; iterate the "
                f"loader anew here"
            )
        for tier in self._tiers():
            if path.is_relative_to(tier.root) and not tier.quarantine(path):
                self._avoided.add(path)

    def _adopt(self, found: ShardCopy) -> None:
        old, self._index = self._index, found
        if self._bytes is None or self._bytes is old:
            self._bytes = found
        if old is not None and old is not self._bytes:
            old.close()


def _directory(path: Path) -> tuple[int, int] | None:
    """Which directory is at `path` now; None if there is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None
