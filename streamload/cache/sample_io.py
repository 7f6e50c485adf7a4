"""Read a sample from a file by its entry, and verify it (step H): at once, or by pieces where it is large."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection

import xxhash

from streamload.shards.samples import Entry

AT_ONCE_BYTES = 64 << 20
"""The most of a sample that is read at once; of a larger one only the members that are needed are kept."""
_PIECE_BYTES = 1 << 20

Needed = Callable[[Collection[str]], Collection[str]]
"""Extensions of a sample → those whose bytes are needed."""


class ReadMemory:
    """Memory for the bytes of some samples at a time, used again and again.

    Fresh memory for each costs its pages' faults, and what is read there was in no cache of the processor.
    For one thread.
    """

    def __init__(self, size_bytes: int):
        # Of this process alone, and only what samples need is ever touched.
        self._memory = memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._taken_bytes = 0
        self.is_full = False
        """Whether something hadn't room in it any more, and got memory of its own."""

    def begin_anew(self) -> None:
        """What was taken isn't read any more."""
        self._taken_bytes, self.is_full = 0, False

    def take(self, size_bytes: int) -> memoryview:
        """Memory for so many bytes."""
        start, stop = self._taken_bytes, self._taken_bytes + size_bytes
        if stop > len(self._memory):
            self.is_full = True
            return memoryview(bytearray(size_bytes))
        self._taken_bytes = stop
        return self._memory[start:stop]


def read_sample(
    descriptor: int, entry: Entry, needed: Needed | None = None, memory: ReadMemory | None = None
) -> tuple[Entry, memoryview] | None:
    """A sample and its bytes from `entry.start` on; None if they aren't what was written.

    All of it is verified. Of a sample of more than AT_ONCE_BYTES that goes by pieces, and an entry of the
    members that are needed is returned, with the bytes of these alone.

    Args:
        descriptor: of the file.
        entry: of the sample.
        needed: the members that are.
        memory: where to put the bytes, until it is begun anew; None: they have memory of their own.
    """
    start = entry.start
    size = entry.stop - start
    try:
        if size > AT_ONCE_BYTES:
            return _read_pieces(descriptor, entry, entry.sizes if needed is None else needed(entry.sizes))
        if memory is None:
            data = memoryview(os.pread(descriptor, size, start))
        else:
            data = memory.take(size)
            data = data[: os.preadv(descriptor, [data], start)]
    except OSError:
        return None
    return (entry, data) if len(data) == size and is_whole(entry, data) else None


def is_whole(entry: Entry, data: memoryview) -> bool:
    """Whether the bytes are those that were written."""
    if entry.checksum is None:
        return True
    digest, first = xxhash.xxh3_64(), entry.start
    for _, start, size in entry.members:
        digest.update(data[start - first : start - first + size])
    return digest.intdigest() == entry.checksum


def checksum(descriptor: int, entry: Entry, take: Callable[[str, bytes], None]) -> int | None:
    """The checksum of a sample's bytes as they are now, by pieces of a megabyte; None if they end too early.

    Args:
        descriptor: of the file.
        entry: of the sample.
        take: gets each piece, with the extension of its member.

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


def _read_pieces(descriptor: int, entry: Entry, kept: Collection[str]) -> tuple[Entry, memoryview] | None:
    asked = entry._replace(members=tuple(member for member in entry.members if member[0] in kept))
    data = bytearray()

    def take(extension: str, piece: bytes) -> None:
        if extension in kept:
            data.extend(piece)

    # Without a checksum there is nothing that the other members have to be read for.
    found = checksum(descriptor, asked if entry.checksum is None else entry, take)
    if found is None or entry.checksum not in (None, found):
        return None
    members, at = [], entry.start
    for extension, _, size in asked.members:
        members.append((extension, at, size))
        at += size
    return entry._replace(members=tuple(members)), memoryview(data)
