"""The facts of a shard as a process needs them: read from files beside the index, or made and stored there.

The rule: a value depends on the sample's bytes, or its key, and the column's definition; never on a file, nor
on time. A file only saves making the values again. So a fact is there as soon as its sample has arrived, the
same in all processes, and unknown (NaN) only where the sample itself doesn't have it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamload.cache.directory import BLOCK_BYTES, blocks_bytes
from streamload.cache.locks import PATIENCE_SECONDS, FileLock
from streamload.cache.shard_copy import ReadMemory, ShardCopy
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt, CacheError
from streamload.shards.facts import (
    Column,
    FactSample,
    Values,
    pack_frame,
    pack_values,
    unpack_values,
    valid_frames,
)
from streamload.shards.record import open_file, write_at
from streamload.shards.samples import Entry

_AT_ONCE = 256
"""Samples whose values are made and stored together."""
_AT_ONCE_BYTES = 4 << 20
"""Fewer, if their members have more bytes than this."""
_RANGE_BYTES = 8 << 20
"""The most that is requested at once of an index-only shard."""
_MEMORY_BYTES = 1 << 20
_POLL_SECONDS = 0.005
_NONE = np.empty(0, np.float64)


class ShardFacts:
    """The values of a shard's samples, by column; kept while the shard is open. Not thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, Values] = {}
        self._files: dict[str, _File] = {}

    def values(self, column: Column) -> Values:
        """The values so far: float64[N], NaN where unknown."""
        return self._values.get(column.digest, _NONE)

    def extend(self, view: ShardView, columns: Sequence[Column], count: int) -> bool:
        """Have the values of the first `count` samples, which have arrived; False while they can't be read.

        Values that no file has are made by one process and stored; the others wait for it. What can't be
        stored (a full disk, no room) is made by each process.

        Raises:
            DatasetChanged, OriginError: see `ShardView.read`.
        """
        lacking = self._lacking(columns, count)
        if not lacking:
            return True
        (found,) = view.find((count - 1,))
        if found is None:
            return False
        copy = found[0]
        with ExitStack() as locks:
            for column in lacking:
                file = self._files.setdefault(column.digest, _File(column))
                locks.callback(file.unlock)
                file.open(view, copy)
                self._take(file, column, copy)
                if len(self.values(column)) < count and not file.is_behind:
                    self._lock(file, column, copy, count)
            if any(self._files[one.digest].is_behind for one in self._lacking(columns, count)):
                return False  # another process has them, by an index that has grown since
            return self._make(view, copy, self._lacking(columns, count))

    def _lacking(self, columns: Sequence[Column], count: int) -> list[Column]:
        """The columns with too few values, in one order for all processes, which lock their files in turn."""
        lacking = {one.digest: one for one in columns if len(self.values(one)) < count}
        return [lacking[digest] for digest in sorted(lacking)]

    def _take(self, file: _File, column: Column, copy: ShardCopy) -> None:
        """Take the values that a file has."""
        first, packed = file.read(copy)
        values = np.concatenate([self.values(column)[:first], unpack_values(packed, column.dtype)])
        if len(values) > len(self.values(column)):
            self._values[column.digest] = values

    def _lock(self, file: _File, column: Column, copy: ShardCopy, count: int) -> None:
        """Lock a file to extend it, unless another process does that in time or makes no progress."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not file.lock():
            known = len(self.values(column))
            time.sleep(_POLL_SECONDS)
            self._take(file, column, copy)
            if len(self.values(column)) >= count or time.monotonic() > deadline:
                return
            if len(self.values(column)) > known:
                deadline = time.monotonic() + PATIENCE_SECONDS
        self._take(file, column, copy)

    def _make(self, view: ShardView, copy: ShardCopy, columns: Sequence[Column]) -> bool:
        """Make the values of all samples that have arrived; False if they can't be read."""
        if not columns:
            return True
        try:
            for samples in _samples(view, copy, columns, min(len(self.values(one)) for one in columns)):
                for column in columns:
                    self._append(column, samples, copy)
        except _Unreadable:
            return False
        except CacheCorrupt:
            view.invalidate(copy)
            return False
        return True

    def _append(self, column: Column, samples: Sequence[FactSample], copy: ShardCopy) -> None:
        known, stop = self.values(column), samples[-1].entry.number + 1
        if len(known) >= stop:
            return
        made = pack_values(column.make(samples[len(known) - stop :]), column.dtype)
        values = np.concatenate([known, unpack_values(made, column.dtype)])
        self._values[column.digest] = values
        self._files[column.digest].append(values, copy.reader.records[:stop])


class _Unreadable(Exception):
    """The bytes of a sample aren't in the tier any more."""


class _File:
    """The file of one column beside a shard's index; open only while it is read or extended.

    Args:
        column: whose values it has.

    Attributes:
        is_behind: whether it goes on with samples that the index didn't have when it was read.
    """

    def __init__(self, column: Column):
        self._name = f"facts.{column.digest}"
        self._dtype = column.dtype
        self.is_behind = False
        self._path = Path()
        self._copy: ShardCopy | None = None
        self._tier: Tier | None = None  # None: nothing is stored
        self._lock: FileLock | None = None
        self._identity = (0, 0)
        self._count = 0  # the samples whose values have been read or written
        self._size_bytes = 0  # of their frames; what follows is of others, or invalid

    def open(self, view: ShardView, copy: ShardCopy) -> None:
        """Find the file beside an open index."""
        self._copy, self._tier = copy, view.tier_of(copy)
        self._path = copy.path / self._name
        self._follow()

    def read(self, copy: ShardCopy) -> tuple[int, bytes]:
        """The first sample whose value wasn't read before, and the packed values from there on."""
        with contextlib.suppress(OSError), open_file(self._path) as file:
            status = os.fstat(file.number)
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._size_bytes:
                self._identity, self._count, self._size_bytes = identity, 0, 0
            first = self._count
            data = os.pread(file.number, status.st_size - self._size_bytes, self._size_bytes)
            found = valid_frames(data, copy.reader.records, first)
            if len(found.values) != (found.stop - first) * np.dtype(self._dtype).itemsize:
                return first, b""  # no writer of ours
            self._count, self._size_bytes = found.stop, self._size_bytes + found.size_bytes
            self.is_behind = found.is_behind and not copy.reader.ended
            return first, found.values
        self._identity, self._count, self._size_bytes, self.is_behind = (0, 0), 0, 0, False
        return 0, b""

    def lock(self) -> bool:
        """Lock the file, which is created if it is missing; False: try again.

        Another process has it locked, or has published the shard just now: the directory was renamed.
        """
        if self._tier is None:
            return True
        try:
            if self._path.exists() or self._tier.budget.reserve_beside(BLOCK_BYTES):
                self._lock = FileLock.acquire(self._path, create=True)
                if self._lock is not None or self._path.exists():
                    return self._lock is not None
            if self._follow():
                return False
        except (OSError, CacheError):
            pass
        self._tier = None
        return True

    def _follow(self) -> bool:
        """Whether the open index is in another directory by now: then the file is there, too."""
        before = self._path
        with contextlib.suppress(OSError):
            if self._copy is not None:
                self._path = self._copy.reader.directory / self._name
        return self._path != before

    def unlock(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def append(self, values: Values, records: npt.NDArray[np.void]) -> None:
        """Append the values that the locked file lacks; what can't be written isn't stored.

        Args:
            values: of all samples so far.
            records: the index records of these samples.
        """
        if self._lock is None or self._tier is None:
            return
        frame = pack_frame(self._count, pack_values(values[self._count :], self._dtype), records)
        size_bytes = self._size_bytes + len(frame)
        more_bytes = blocks_bytes(size_bytes) - max(BLOCK_BYTES, blocks_bytes(self._size_bytes))
        try:
            if more_bytes <= 0 or self._tier.budget.reserve_beside(more_bytes):
                os.ftruncate(self._lock.file.number, self._size_bytes)
                write_at(self._lock.file, frame, self._size_bytes)
                self._count, self._size_bytes = len(values), size_bytes
                with contextlib.suppress(FileNotFoundError):  # it was published just now
                    os.utime(self._path.parent)  # so that its size is measured again
                return
        except (OSError, CacheError):
            pass
        self._tier = None


def _samples(
    view: ShardView, copy: ShardCopy, columns: Sequence[Column], start: int
) -> Iterator[list[FactSample]]:
    """The samples from number `start` on, some at a time, with the members that the columns need.

    Raises:
        _Unreadable: the bytes are not in the tier any more.
        CacheCorrupt: the index is damaged.
    """
    memory = ReadMemory(_MEMORY_BYTES)
    count = copy.reader.count if columns else start
    for first in range(start, count, _AT_ONCE):
        entries = copy.reader.entries(range(first, min(first + _AT_ONCE, count)))
        needed = [{name for one in columns for name in one.needs(entry.sizes)} for entry in entries]
        samples: list[FactSample] = []
        held_bytes = 0
        for entry, members in zip(entries, _members(view, copy, entries, needed, memory), strict=True):
            samples.append(FactSample(entry, members))
            held_bytes += sum(map(len, members.values()))
            if held_bytes > _AT_ONCE_BYTES:
                yield samples
                samples, held_bytes = [], 0
        if samples:
            yield samples


def _members(
    view: ShardView,
    copy: ShardCopy,
    entries: Sequence[Entry],
    needed: Sequence[set[str]],
    memory: ReadMemory,
) -> Iterator[dict[str, bytes]]:
    """The needed members of samples, whose checksums are verified."""
    if copy.is_index_only and any(needed):
        for some in _joined(entries):
            for entry, data in zip(some, view.fetched(copy, some), strict=True):
                yield _chosen(entry, data, needed[entry.number - entries[0].number])
        return
    for entry, own in zip(entries, needed, strict=True):
        if not own:
            yield {}
            continue
        if entry.checksum is None:  # nothing to verify: the other members needn't be read
            entry = entry._replace(members=tuple(member for member in entry.members if member[0] in own))
        memory.reset()
        read = view.read(entry.number, lambda _, own=own: own, memory, (copy, entry))  # type: ignore[misc]
        if read is None:
            raise _Unreadable
        yield _chosen(*read, own)


def _chosen(entry: Entry, data: memoryview, needed: set[str]) -> dict[str, bytes]:
    return {
        name: bytes(data[at - entry.start : at - entry.start + size])
        for name, at, size in entry.members
        if name in needed
    }


def _joined(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Neighbouring samples, grouped into requests."""
    some: list[Entry] = []
    for entry in entries:
        if some and entry.stop - some[0].start > _RANGE_BYTES:
            yield some
            some = []
        some.append(entry)
    yield some
