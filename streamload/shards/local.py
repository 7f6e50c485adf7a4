"""Indexing of a local tar (step F): headers are read, payloads are skipped, nothing is copied."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator

from streamload.descriptors import Descriptor
from streamload.errors import (
    DatasetChanged,
    OriginDenied,
    OriginError,
    OriginNotFound,
    ShardError,
    is_shortage,
)
from streamload.shards.index import LocalVersion
from streamload.shards.samples import Entry, ShardScanner
from streamload.shards.tar import BLOCK_BYTES

_READ_BYTES = 8 << 10  # a header and the start of an image; more would read useless payload
_ENTRIES_AT_ONCE = 64
_TAIL_BYTES = 1 << 20
"""Distance after the end marker in which to look for anything other than zeros."""


def index_local(
    path: str | os.PathLike[str],
    warnings: list[str] | None = None,
    opened: Callable[[LocalVersion], None] = lambda version: None,
) -> Iterator[list[Entry]]:
    """Scan a local tar.

    Only the start of each image is read of the payloads, so the entries have no checksum.

    Args:
        path: an uncompressed tar, a regular file.
        warnings: warnings about the tar are appended to it at the end of the scan.
        opened: called before the first entries with the version of the file.

    Yields:
        Entries, in batches. Before an error is raised, those of all complete samples.

    Raises:
        OriginNotFound, OriginDenied, OriginError: it can't be opened or read.
        OSError: too many open files, or out of memory, which says nothing about this file.
        ShardFormatError, ShardCut: it is malformed, or cut.
        DatasetChanged: it was written to during the scan.
    """
    name = os.fspath(path)
    try:
        file = Descriptor.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as exc:
        raise OriginNotFound(f"{name}: no such file") from exc
    except PermissionError as exc:
        raise OriginDenied(f"{name}: permission denied") from exc
    except OSError as exc:
        if is_shortage(exc):
            raise
        raise OriginError(f"{name} can't be opened: {exc.strerror}") from exc
    try:
        yield from _scan(file.number, name, warnings, opened)
    except ShardError as exc:
        raise type(exc)(f"{name}: {exc}") from exc
    finally:
        file.close()


def _scan(
    descriptor: int, name: str, warnings: list[str] | None, opened: Callable[[LocalVersion], None]
) -> Iterator[list[Entry]]:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OriginError(f"{name} is not a regular file; read a stream by `pipe:cat …`")
    before = LocalVersion.of(descriptor)
    opened(before)

    def read_back(start: int, count: int) -> bytes:
        return _read(descriptor, name, count, start)

    scanner = ShardScanner(checksums=False, read_back=read_back)
    entries: list[Entry] = []
    count, known_stop = 0, 0
    try:
        for chunk in _entries(descriptor, name, scanner, before.size, _READ_BYTES):
            entries += chunk
            count, known_stop = count + len(chunk), scanner.whole_stop
            if len(entries) >= _ENTRIES_AT_ONCE:
                yield entries
                entries = []
        if scanner.ended:
            scanner.feed(_read(descriptor, name, _TAIL_BYTES, scanner.position))
        last, trailing = scanner.finish()
    except ShardError:
        # Get the entries before the damage. A chunk that contains it gives none, so scan block by block.
        again = ShardScanner(known_stop, count, checksums=False, read_back=read_back)
        with contextlib.suppress(ShardError):
            for chunk in _entries(descriptor, name, again, before.size, BLOCK_BYTES):
                entries += chunk
        yield entries
        raise
    if scanner.position < before.size and not trailing:
        trailing.append(f"{before.size - scanner.position:,} bytes after the end marker were not read")
    after = LocalVersion.of(descriptor)
    # Without ctime, which changes when a name of the file is removed.
    if (after.size, after.mtime_ns) != (before.size, before.mtime_ns):
        raise DatasetChanged("it was written to while it was indexed; start again when it is complete")
    yield entries + last
    if warnings is not None:
        warnings += trailing


def _entries(
    descriptor: int, name: str, scanner: ShardScanner, size: int, read_bytes: int
) -> Iterator[list[Entry]]:
    """Yield the entries from the scanner's position on."""
    while scanner.position < size and not scanner.ended:
        scanner.skip(min(scanner.skippable(), size - scanner.position))
        block = _read(descriptor, name, read_bytes, scanner.position)
        yield scanner.feed(block)
        if not block:
            return


def _read(descriptor: int, name: str, count: int, position: int) -> bytes:
    try:
        return os.pread(descriptor, count, position)
    except OSError as exc:
        raise OriginError(f"{name} can't be read at byte {position}: {exc.strerror}") from exc
