"""Read a sample from a file by its entry, and verify it (step H): at once, or by pieces where it is large."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace

import xxhash

from streamload.shards.samples import Entry

AT_ONCE_BYTES = 64 << 20
"""The most of a sample that is read at once; of a larger one only the members that are needed are kept."""
_PIECE_BYTES = 1 << 20

Needed = Callable[[Collection[str]], Collection[str]]
"""Extensions of a sample → those whose bytes are needed."""


def read_sample(
    descriptor: int, entry: Entry, needed: Needed | None = None
) -> tuple[Entry, memoryview] | None:
    """A sample and its bytes from `entry.start` on; None if they aren't what was written.

    All of it is verified. Of a sample of more than AT_ONCE_BYTES that goes by pieces, and an entry of the
    members that are needed is returned, with the bytes of these alone.
    """
    size = entry.stop - entry.start
    try:
        if size > AT_ONCE_BYTES:
            return _read_pieces(descriptor, entry, entry.sizes if needed is None else needed(entry.sizes))
        data = os.pread(descriptor, size, entry.start)
    except OSError:
        return None
    return (entry, memoryview(data)) if len(data) == size and is_whole(entry, memoryview(data)) else None


def is_whole(entry: Entry, data: memoryview) -> bool:
    """Whether the bytes are those that were written."""
    if entry.checksum is None:
        return True
    digest = xxhash.xxh3_64()
    for _, start, size in entry.members:
        digest.update(data[start - entry.start : start - entry.start + size])
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
    asked = replace(entry, members=tuple(member for member in entry.members if member[0] in kept))
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
    return replace(entry, members=tuple(members)), memoryview(data)
