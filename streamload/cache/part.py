"""A part: a shard that this process fills, its reservation and its files, and the part of a dead filler."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from streamload.cache.budget import LAST_BLOCKS_BYTES, Budget, is_no_space
from streamload.cache.directory import Directory
from streamload.cache.locks import FileLock
from streamload.cache.shard import Shard
from streamload.descriptors import Descriptor
from streamload.errors import CacheError, OriginStopped
from streamload.shards.index import IndexWriter, Packed
from streamload.shards.record import pack_header
from streamload.shards.samples import Entry

_Result = TypeVar("_Result")
_INDEX_SHARE = 64
"""A 64th of the data is reserved for the index in advance; more as it grows."""
_GROWTH = 8
"""A reservation for a shard of unknown size grows by an eighth."""
_SPARE_BYTES = 64 << 10
_SPARE_INDEX_BYTES = 8 << 10
_NO_ROOM_SECONDS = 0.05
_REFUSALS_LIMIT = 100
"""Number of times that a growing fill asks for more space before it gives up its own."""
_FIRST_INDEX_BYTES = 4 << 10
"""The first reservation of an index without data: little, so that many fit into a tiny tier."""


def reserved_bytes(data_bytes: int) -> int:
    """The first reservation for a shard of a known size."""
    return data_bytes + index_bytes(data_bytes) + _SPARE_BYTES


def index_bytes(data_bytes: int) -> int:
    """The approximate size of a shard's index."""
    return data_bytes // _INDEX_SHARE


def next_reservation(reserved: int, data_bytes: int, own_index_bytes: int, *, index_only: bool) -> int:
    """The reservation that a part needs to hold this much data and index; 0 if it has enough.

    Args:
        reserved: its reservation so far.
        data_bytes: the data so far, or all of it if its size is known.
        own_index_bytes: the index, with what is about to be added.
        index_only: whether the index alone is kept.
    """
    needed = own_index_bytes + data_bytes
    if index_only:  # an index that ran out of space half-way would have to start over
        needed = max(own_index_bytes, index_bytes(data_bytes))
    is_first = not reserved and (index_only or not data_bytes)
    # An index-only copy reserves nothing else before it starts.
    if needed <= reserved and not (is_first and index_only):
        return 0
    growth = needed // _GROWTH if reserved else index_bytes(needed)
    spare = _SPARE_INDEX_BYTES if index_only else _SPARE_BYTES
    return needed + growth + (_FIRST_INDEX_BYTES if is_first else spare)


class Part:
    """A shard that this process fills: a directory, live while its index is locked."""

    def __init__(
        self,
        tier: Directory,
        budget: Budget,
        digest: str,
        path: Path,
        alive: FileLock,
        orphan: Orphan | None,
    ):
        self.tier = tier
        self.budget = budget
        self.digest = digest
        self.path = path
        self.orphan = orphan
        self.reserved_bytes = 0
        self._alive = alive

    def reserve(self, size_bytes: int, next_use: float, *, grows: bool = False) -> bool:
        """Reserve `size_bytes` in all; see `Budget.reserve`."""
        granted = self.budget.reserve(self.path, size_bytes, next_use, grows=grows)
        if not granted and self.orphan is not None:
            self.forget_orphan()  # no space for both: start over
            granted = self.budget.reserve(self.path, size_bytes, next_use, grows=grows)
        if granted:
            self.reserved_bytes = size_bytes
        return granted

    def touch(self) -> None:
        """Send a heartbeat: this process isn't stopped."""
        with contextlib.suppress(OSError):  # published, removed, or a disk that may work next time
            os.utime(self.path / "index")

    def evict(self, next_use: float) -> bool:
        """Evict for a write that found the disk full although it was reserved: see `Budget.evict`."""
        return self.budget.evict(max(self.reserved_bytes, LAST_BLOCKS_BYTES), next_use)

    def publish(self) -> None:
        """Publish the complete part, by one rename."""
        self._move("shards")
        if self.tier.has("bare", self.digest):
            self.tier.trash(self.tier.index_only(self.digest))

    def publish_index_only(self) -> None:
        """Publish a complete index without data."""
        self._move("bare")

    def give_up(self) -> FileLock | None:
        """Leave a tombstone in place of the shard; it stands while the returned lock is held."""
        tombstone = FileLock.acquire(self.path / "names", shared=True, create=True)
        try:
            self._move("gone")
        except BaseException:
            if tombstone is not None:
                tombstone.close()
            raise
        return tombstone

    def leave(self) -> None:
        """Stop, and leave the data for a takeover unless the shard is published."""
        if self.tier.published(self.digest).exists():
            self.tier.trash(self.path)
        self._let_go()

    def discard(self) -> None:
        """Stop, and remove the data."""
        self.tier.trash(self.path)
        self._let_go()

    def forget_orphan(self) -> None:
        """Remove the part of a dead filler, not of a stopped one; what was of use has been copied."""
        if self.orphan is not None:
            self.orphan.remove(self.tier)
            self.orphan = None

    def _move(self, kind: str) -> None:
        target = self.tier.root / kind / self.digest
        try:
            with self.budget.settling(self.path, target):
                (self.path / "reserved").unlink(missing_ok=True)
                self.path.rename(target)
        except OSError as exc:
            if not target.exists() and not self.was_taken_away:
                raise CacheError(f"could not publish a shard as {target}: {exc}") from exc
            self.tier.trash(self.path)  # another process was first, with the same bytes
        self._let_go()

    def _let_go(self) -> None:
        self.forget_orphan()
        self._alive.close()

    @property
    def was_taken_away(self) -> bool:
        """True if somebody cleared the tier during the fill."""
        return self.tier.root.is_dir() and not self.path.exists()


class NoRoom(Exception):
    """The tier has no space for this shard now; its argument is the size."""


class PartWriter:
    """Writes the data and index of a part, within its reservation.

    Args:
        next_use, stop, refused: see `fill.fill`.
    """

    def __init__(
        self,
        part: Part,
        shard: Shard,
        next_use: Callable[[], float],
        stop: threading.Event,
        refused: Callable[[bool], bool],
        *,
        index_only: bool,
    ):
        self.part = part
        self.written_bytes = 0
        self.has_samples = False
        """True if there are samples for a takeover."""
        self.size_bytes: int | None = None
        """Bytes of all data; None: unknown, so the reservation grows."""
        self._shard = shard
        self._next_use = next_use
        self._stop = stop
        self._refused = refused
        self._index_only = index_only
        self._index: IndexWriter | None = None
        self._index_bytes = 0
        self._data: Descriptor | None = None

    @property
    def count(self) -> int:
        """The number of entries so far."""
        return self._index.count if self._index is not None else 0

    def begin(self, facts: dict[str, object]) -> None:
        """Create the files; the header of the index names the shard, its version and local facts."""
        if self._shard.in_place is None and not self._index_only and self._data is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._data = Descriptor.open(self.part.path / "data", flags)
        kind: dict[str, object] = {"bare": True} if self._index_only else {}
        if self._shard.recipe:
            kind["prepared"] = self._shard.recipe
        meta = {"url": self._shard.name, "digest": self._shard.digest, **kind, **facts}
        self.reserve(0, len(pack_header(meta)), patient=False)
        self._index = IndexWriter(self.part.path, meta)
        self._index_bytes = self._index.size_bytes

    def write(self, chunk: bytes | memoryview) -> None:
        """Append data."""
        self.reserve(self.written_bytes + len(chunk), patient=True)
        view = memoryview(chunk)
        while view and self._data is not None:
            view = view[self._stored(functools.partial(os.write, self._data.number, view)) :]
        self.written_bytes += len(chunk)
        self.part.budget.enforce_limits()

    def append(self, entries: list[Entry]) -> None:
        """Append entries; their data has been written."""
        if entries:
            assert self._index is not None
            self._write_index(self._index, self._index.pack(entries))
            self.has_samples = True

    def end(self, status: str, cause: str = "", warnings: list[str] | None = None, size: int = 0) -> None:
        """Write the end of the index: complete, or a tombstone with its cause."""
        if self._index is None:
            self.begin({})
        assert self._index is not None
        self._write_index(self._index, self._index.pack_end(status, size, cause, warnings or []))
        self.close()

    def close(self) -> None:
        """Close the files; their contents stay."""
        if self._index is not None:
            self._index.close()
            self._index = None
        if self._data is not None:
            self._data.close()

    def reserve(self, data_bytes: int, more_index_bytes: int = 0, *, patient: bool) -> None:
        """Enlarge the reservation as needed; see `next_reservation`.

        Args:
            data_bytes: the data so far, or all of it if its size is known.
            more_index_bytes: what is about to be added to the index.
            patient: retry for some seconds (else fail at once if there is no space).
        """
        size_bytes = next_reservation(
            self.part.reserved_bytes,
            data_bytes,
            self._index_bytes + more_index_bytes,
            index_only=self._index_only,
        )
        if not size_bytes:
            return
        refusals = 0
        grows = self._data is not None and self.size_bytes is None
        while not self.part.reserve(size_bytes, self._next_use(), grows=grows):
            refusals += 1
            if not patient or self._refused(True) or refusals > _REFUSALS_LIMIT:
                # If two fills wait for each other's space, one has to give up its own.
                raise NoRoom(data_bytes)
            if self._stop.wait(_NO_ROOM_SECONDS):
                raise OriginStopped(f"{self._shard.name}: the fill was stopped while it waited for space")
        if patient:
            self._refused(False)

    def _write_index(self, index: IndexWriter, packed: Packed) -> None:
        """Reserve space, then write: the size of a tar's names is up to its author."""
        self.reserve(self.written_bytes, packed.size_bytes, patient=True)
        self._stored(functools.partial(index.write, packed))
        self._index_bytes = index.size_bytes

    def _stored(self, write: Callable[[], _Result]) -> _Result:
        """Write something; if the disk is full, evict and retry once."""
        try:
            return write()
        except OSError as exc:
            if not is_no_space(exc) or not self.part.evict(self._next_use()):
                raise
        return write()


class Orphan(NamedTuple):
    """A part that nobody fills any more: its filler is dead, or stopped."""

    path: Path
    lock: FileLock | None
    """The lock of a dead filler, held by this process; a stopped one still holds it itself."""

    @property
    def index_bytes(self) -> int:
        """The size of its index, which tells how far it is."""
        with contextlib.suppress(FileNotFoundError):
            return (self.path / "index").stat().st_size
        return 0

    def remove(self, tier: Directory) -> None:
        """Remove it, unless it belongs to a stopped filler, who may continue."""
        if self.lock is not None:
            tier.trash(self.path)
        self.let_go()

    def let_go(self) -> None:
        """Leave it as it is, for others."""
        if self.lock is not None:
            self.lock.close()
