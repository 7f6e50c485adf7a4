"""One copy of a shard in a tier, open for reading, and a sample read from it and verified.

A copy is published, partial, index-only, or a tombstone. A sample is read at once, or in pieces if it is
large.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import xxhash

from streamload import limits
from streamload.cache.locks import FileLock
from streamload.cache.shard import Shard, refuse_other, version_of
from streamload.descriptors import Descriptor
from streamload.errors import CacheCorrupt, DatasetChanged, ShardError, is_shortage
from streamload.shards.index import IndexReader
from streamload.shards.record import open_file
from streamload.shards.samples import Entry, ShardScanner

AT_ONCE_BYTES = 64 << 20
"""The largest sample that is read at once; of a larger one only the needed members are kept."""
_PIECE_BYTES = 1 << 20

Needed = Callable[[Collection[str]], Collection[str]]
"""Selects those of a sample's extensions whose bytes are needed."""
Members = dict[str, memoryview]
"""The bytes of a sample's members by extension."""


class ReadMemory:
    """Reusable memory for the bytes of a few samples at a time. For one thread.

    Fresh memory for each sample would cost page faults and cache misses.
    """

    def __init__(self, size_bytes: int):
        self._memory = memoryview(limits.anonymous_memory(size_bytes))
        self._taken_bytes, self._most_bytes = 0, size_bytes
        self.is_full = False
        """True if more than `most_bytes` was taken, or if something didn't fit and got memory of its own."""

    def reset(self, most_bytes: int | None = None) -> None:
        """Reuse all of it: what was taken is no longer read.

        Args:
            most_bytes: it is full with more than so many; None: any number that fits.
        """
        self._taken_bytes, self.is_full = 0, False
        self._most_bytes = len(self._memory) if most_bytes is None else most_bytes

    def take(self, size_bytes: int) -> memoryview:
        """Return memory of this size."""
        start, stop = self._taken_bytes, self._taken_bytes + size_bytes
        if stop > len(self._memory):
            self.is_full = True
            return memoryview(bytearray(size_bytes))
        self._taken_bytes = stop
        self.is_full = stop > self._most_bytes
        return self._memory[start:stop]


def read_sample(
    descriptor: int, entry: Entry, needed: Needed | None = None, memory: ReadMemory | None = None
) -> Members | None:
    """Read and verify the members of a sample; None if they fail.

    All of it is verified. A sample of more than AT_ONCE_BYTES is read in pieces: then only the needed members
    are returned.

    Args:
        needed: selects the needed members.
        memory: where to put the bytes, until `reset`; None: they get memory of their own.
    """
    start, stop = entry.extent
    size = stop - start if entry.span is None else sum(stop - first for first, stop in entry.ranges)
    try:
        if size > AT_ONCE_BYTES:
            return _read_pieces(descriptor, entry, entry.sizes if needed is None else needed(entry.sizes))
        if entry.span is not None:
            pieces = [os.pread(descriptor, stop - first, first) for first, stop in entry.ranges]
            data = memoryview(bytearray().join(pieces))
        elif memory is None:
            data = memoryview(os.pread(descriptor, size, start))
        else:
            data = memory.take(size)
            data = data[: os.preadv(descriptor, [data], start)]
    except OSError:
        return None
    return verified(entry, data) if len(data) == size else None


def verified(entry: Entry, data: memoryview) -> Members | None:
    """Return the members of a sample, given the bytes of `entry.ranges`; None if they fail the checksum."""
    members = entry.payloads(data)
    if entry.checksum is None:
        return members
    digest = xxhash.xxh3_64()
    for payload in members.values():
        digest.update(payload)
    return members if digest.intdigest() == entry.checksum else None


def checksum(descriptor: int, entry: Entry, take: Callable[[str, bytes], None]) -> int | None:
    """The checksum of a sample's bytes in a file, read a megabyte at a time; None if the file ends too early.

    Args:
        take: receives each piece, with the extension of its member.

    Raises:
        OSError: they can't be read.
    """
    digest = xxhash.xxh3_64()
    for extension, start, size in entry.members:
        stop = start + size
        while start < stop:
            piece = os.pread(descriptor, min(_PIECE_BYTES, stop - start), start)
            if not piece:
                return None
            take(extension, piece)
            digest.update(piece)
            start += len(piece)
    return digest.intdigest()


def _read_pieces(descriptor: int, entry: Entry, kept: Collection[str]) -> Members | None:
    wanted_entry = entry._replace(members=tuple(member for member in entry.members if member[0] in kept))
    members = {extension: bytearray() for extension, _, _ in wanted_entry.members}

    def take(extension: str, piece: bytes) -> None:
        if extension in members:
            members[extension].extend(piece)

    # Without a checksum there is no reason to read the other members.
    digest = checksum(descriptor, wanted_entry if entry.checksum is None else entry, take)
    if digest is None or entry.checksum not in (None, digest):
        return None
    return {extension: memoryview(data) for extension, data in members.items()}


_BROKEN = {errno.EIO, errno.ENXIO, errno.ESTALE, errno.EUCLEAN}


class ShardCopy:
    """The entries and bytes of a shard, or the entries alone; open for reading and pinned."""

    def __init__(self, path: Path, shard: Shard, pin: FileLock):
        self.pin = pin
        self.path = path
        try:
            self.reader = IndexReader(path, pin.file)
        except OSError as exc:
            if exc.errno not in _BROKEN:
                raise
            raise CacheCorrupt(f"{path} can't be read: {exc.strerror}") from exc
        self.version = version_of(self.reader)
        self.is_index_only = self.reader.meta.get("bare") is True
        self._local = shard.in_place
        self.is_in_place = shard.in_place is not None
        self._data: Descriptor | None = None
        self.identity: tuple[int, ...] = ()
        """Identity of the file of the data."""
        self.was_reopened = False
        """True if the data was opened again; cleared by whoever counts open files."""
        if self.is_index_only:
            return
        try:
            self._data = self._open_data(path)
            if self._data is not None:
                self.identity = _identity_of(self._data, is_pinned=not self.is_in_place)
        except BaseException:
            self.reader.close()
            raise

    @classmethod
    def open(cls, path: Path, shard: Shard) -> ShardCopy | None:
        """Open the copy at `path`; None while it is being removed.

        Raises:
            FileNotFoundError: there is none, or one of its files is missing (yet).
            CacheCorrupt: its index has no header (yet), or a damaged one, or its local file can't be opened.
        """
        pin = FileLock.acquire(f"{path}/names", shared=True)
        if pin is None:
            if (path / "names").exists():
                return None
            raise FileNotFoundError(f"there is no {path / 'names'}")
        try:
            return cls(path, shard, pin)
        except BaseException:
            pin.close()
            raise

    def _open_data(self, directory: Path) -> Descriptor | None:
        """Open the data; None for a tombstone. Refuses links and FIFOs."""
        local = self._local
        try:
            if local is None:
                return open_file(f"{directory}/data")
            file = Descriptor.open(local, os.O_RDONLY | os.O_NONBLOCK)
            if stat.S_ISREG(os.fstat(file.number).st_mode):
                return file
            file.close()
            raise FileNotFoundError(f"{local} is not a regular file")
        except OSError as exc:
            if self.reader.ended and not self.reader.is_complete and not self.reader.count:
                return None
            if local is None or is_shortage(exc):
                raise
            raise CacheCorrupt(f"{self.path} is unusable: {exc}") from exc

    def release(self) -> int:
        """Close the data, which is opened again when it is read: the pin keeps it. Returns how many files."""
        if self._data is None or self._data.number < 0:
            return 0
        self._data.close()
        return 1

    def descriptor(self) -> int:
        """The descriptor of the data; -1 if there is none, or if another file has taken its place.

        Raises:
            OSError: too many open files.
        """
        if self._data is None or self._data.number >= 0:
            return -1 if self._data is None else self._data.number
        if self.pin.file.number < 0:
            return -1
        try:
            data = self._open_data(self.reader.directory)
        except OSError as exc:
            if is_shortage(exc):
                raise
            return -1
        if data is None or _identity_of(data, is_pinned=not self.is_in_place) != self.identity:
            if data is not None:
                data.close()
            return -1
        self._data, self.was_reopened = data, True
        return data.number

    def refuse_other(self, other: ShardCopy, shard: Shard) -> None:
        """Raise DatasetChanged if another copy of a shard can't have the same bytes.

        Versions are compared, and the samples that both have: the output of a command has no version.
        """
        refuse_other(shard, self.version, other.version)
        before, after = self.reader, other.reader
        if before.meta.get("digest") != after.meta.get("digest"):
            return  # one is prepared, the other isn't
        count = min(before.count, after.count)
        for field in ("start", "stop", "checksum"):
            if (before.records[field][:count] != after.records[field][:count]).any():
                raise DatasetChanged(
                    f"{shard.name} came with other bytes when it was fetched again; this run has begun "
                    f"to read {before.count} samples of it"
                )

    @property
    def is_closed(self) -> bool:
        """True if it was closed: what was read of its index remains."""
        return self.pin.file.number < 0

    @property
    def open_files(self) -> int:
        """Number of its open files."""
        data = self._data is not None and self._data.number >= 0
        return 0 if self.is_closed else 1 + data + (not self.reader.ended)

    def close(self) -> None:
        """Close it: it may be removed from now on."""
        self.reader.close()
        self.pin.close()
        if self._data is not None:
            self._data.close()


def _identity_of(file: Descriptor, *, is_pinned: bool) -> tuple[int, ...]:
    """Identity of a file against another one in its place: if nothing pins it, its inode may be reused."""
    status = os.fstat(file.number)
    inode = (status.st_dev, status.st_ino)
    return inode if is_pinned else (*inode, status.st_size, status.st_mtime_ns)


def verified_chunks(copy: ShardCopy, piece_bytes: int, *, is_prepared: bool) -> Iterator[bytes]:
    """The bytes of a complete copy; a sample's last byte comes once the sample was compared with its entry.

    Args:
        copy: with all of its entries.
        is_prepared: whether it is a prepared shard.

    Raises:
        CacheCorrupt: the bytes don't match the index.
        OSError: they can't be read.
    """
    number, size = 0, 0
    try:
        with (copy.path / "data").open("rb", buffering=0) as data:
            file = data.fileno()
            scanner = ShardScanner(
                prepared=is_prepared, read_back=lambda start, count: os.pread(file, count, start)
            )
            for chunk in iter(functools.partial(data.read, piece_bytes), b""):
                number = _compare(scanner.feed(chunk), copy, number)
                size += len(chunk)
                yield chunk
        number = _compare(scanner.finish()[0], copy, number)
    except ShardError as exc:
        raise CacheCorrupt(f"{copy.path}: {exc}") from exc
    if (number, size) != (copy.reader.count, copy.reader.size):
        raise CacheCorrupt(f"{copy.path}: {number} samples in {size} bytes don't match its index")


def _compare(entries: list[Entry], copy: ShardCopy, number: int) -> int:
    """Compare entries with those of a copy's index from `number` on; returns the next number."""
    for entry in entries:
        if number >= copy.reader.count or entry != copy.reader.entry(number):
            raise CacheCorrupt(f"{copy.path}: sample {number} ({entry.key}) doesn't match its index")
        number += 1
    return number
