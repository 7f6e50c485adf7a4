"""A column's file: row n belongs to sample n, and passes only under the checksum of that sample.

    head      4 KB: magic, bytes of a row, bytes of the layout, a check of all this, the layout
    groups    a page of 512 checksums (0: no row), then 512 rows

A row's checksum is xxh3_64 of the row, seeded by the sample's own. So any process may write any row at any
time, without a lock: a row that is cut, mixed from two writers, or of another version of its sample doesn't
pass, and is computed again.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from streamload.cache.directory import BLOCK_BYTES, WITHOUT_TEMPORARY
from streamload.errors import CacheCorrupt

HEAD_BYTES = 4096
GROUP_ROWS = 512
_HEAD = struct.Struct("<8sIIQ")
_MAGIC = b"SLCOL001"
_CHECKSUM = struct.Struct("<Q")
_PAGE_BYTES = _CHECKSUM.size * GROUP_ROWS
_MOST_AT_ONCE = 512
"""Neighbours that are written by one call; the system allows 1,024."""
_PAGE_FROM = 12
"""From this many rows on, a read takes whole pages of checksums instead of single checksums."""
MOST_LAYOUT_BYTES = HEAD_BYTES - _HEAD.size


def checksum_of(row: Any, seed: int) -> int:
    """The checksum of a row's bytes; never 0."""
    return xxh3_64_intdigest(row, seed) or 1


class ColumnFile:
    """One open file. It may be used by several threads, and in a forked child.

    Attributes:
        row_bytes: of each row.
        layout: of each row, as it was given.
    """

    def __init__(self, file: int, row_bytes: int, layout: bytes):
        self._file, self.row_bytes, self.layout = file, row_bytes, layout

    @classmethod
    def open(cls, path: str, *, writable: bool = False) -> ColumnFile | None:
        """Open the column at a path; None: there is none.

        Raises:
            CacheCorrupt: the file is no column of this name.
            OSError: it can't be opened.
        """
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = os.open(path, flags)
        except FileNotFoundError:
            return None
        try:
            head = os.pread(file, 512, 0)
            if len(head) < _HEAD.size:
                raise CacheCorrupt(f"{path} is no column")
            magic, row_bytes, layout_bytes, check = _HEAD.unpack_from(head)
            if _HEAD.size + layout_bytes > len(head):
                head = os.pread(file, HEAD_BYTES, 0)
            layout = head[_HEAD.size : _HEAD.size + layout_bytes]
            if magic != _MAGIC or check != _head_check(path, row_bytes, layout):
                raise CacheCorrupt(f"{path} is no column")
        except BaseException:
            os.close(file)
            raise
        return cls(file, row_bytes, layout)

    @classmethod
    def make(cls, path: str, row_bytes: int, layout: bytes) -> None:
        """Make an empty column, whole, unless there is one.

        Raises:
            OSError: it can't be made.
        """
        head = _HEAD.pack(_MAGIC, row_bytes, len(layout), _head_check(path, row_bytes, layout)) + layout
        folder, flags = Path(path).parent, os.O_RDWR | os.O_CLOEXEC
        folder.mkdir(mode=0o700, exist_ok=True)
        temporary = ""
        try:  # nothing is left of it if this process is killed
            file = os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as exc:
            if exc.errno not in WITHOUT_TEMPORARY:
                raise
            temporary = f"{path}.{secrets.token_hex(4)}.new"
            file = os.open(temporary, flags | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if os.pwrite(file, head.ljust(HEAD_BYTES, b"\0"), 0) < HEAD_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            with contextlib.suppress(FileExistsError):
                os.link(temporary or f"/proc/self/fd/{file}", path, src_dir_fd=None if temporary else 0)
        finally:
            os.close(file)
            if temporary:
                Path(temporary).unlink()

    @property
    def disk_bytes(self) -> int:
        """The blocks that it takes."""
        return os.fstat(self._file).st_blocks * 512

    def most_bytes(self, places: Sequence[int]) -> int:
        """An upper bound of the disk space of rows at some ascending places: neighbours share blocks."""
        runs = 1 + sum(place != before + 1 for before, place in itertools.pairwise(places))
        groups = len({place // GROUP_ROWS for place in places})
        return len(places) * self.row_bytes + 2 * (runs + groups) * BLOCK_BYTES

    def read(self, places: Sequence[int], seeds: Sequence[int]) -> list[bytes | None]:
        """The rows at some places that pass under the checksums of their samples; None for the others."""
        rows: list[bytes | None] = []
        pages: dict[int, bytes] = {}
        file, size, pread = self._file, self.row_bytes, os.pread
        with_pages = len(places) >= _PAGE_FROM
        for place, seed in zip(places, seeds, strict=True):
            group, number = self._group(place), place % GROUP_ROWS
            if with_pages:
                page = pages.get(group)
                if page is None:
                    page = pages[group] = pread(file, _PAGE_BYTES, group).ljust(_PAGE_BYTES, b"\0")
                (check,) = _CHECKSUM.unpack_from(page, 8 * number)
            else:
                check = int.from_bytes(pread(file, 8, group + 8 * number), "little")
            row = pread(file, size, group + _PAGE_BYTES + number * size) if check else None
            is_whole = row is not None and len(row) == size and checksum_of(row, seed) == check
            rows.append(row if is_whole else None)
        return rows

    def write(self, places: Sequence[int], rows: Sequence[Any], checksums: Sequence[int]) -> int:
        """Store rows; returns how many, fewer on a full disk.

        Args:
            places: ascending.
            rows: buffers of `row_bytes` each.
            checksums: by `checksum_of`.
        """
        start, count, size = 0, len(places), self.row_bytes
        with contextlib.suppress(OSError):
            while start < count:  # neighbours in a group by one call
                stop, first = start + 1, places[start]
                most = start + min(_MOST_AT_ONCE, GROUP_ROWS - first % GROUP_ROWS)
                while stop < count and stop < most and places[stop] == first + stop - start:
                    stop += 1
                group, number = self._group(first), first % GROUP_ROWS
                offset = group + _PAGE_BYTES + number * size
                if stop == start + 1:
                    written = os.pwrite(self._file, rows[start], offset)
                else:
                    written = os.pwritev(self._file, rows[start:stop], offset)
                whole = written // size  # a full disk may have cut it
                checks = struct.pack(f"<{whole}Q", *checksums[start : start + whole])
                noted = os.pwrite(self._file, checks, group + 8 * number) // 8 if whole else 0
                if noted < stop - start:
                    return start + noted
                start = stop
        return start

    def checksums(self) -> npt.NDArray[np.uint64]:
        """uint64[N]: the checksums of all places, 0 where there is no row; as long as the file goes."""
        group_bytes = _PAGE_BYTES + GROUP_ROWS * self.row_bytes
        groups = -(-max(0, os.fstat(self._file).st_size - HEAD_BYTES) // group_bytes)
        pages = [
            os.pread(self._file, _PAGE_BYTES, HEAD_BYTES + group * group_bytes).ljust(_PAGE_BYTES, b"\0")
            for group in range(groups)
        ]
        return np.frombuffer(b"".join(pages), "<u8")

    def row(self, place: int) -> bytes:
        """The bytes at a place, unchecked."""
        start = self._group(place) + _PAGE_BYTES + place % GROUP_ROWS * self.row_bytes
        return os.pread(self._file, self.row_bytes, start)

    def close(self) -> None:
        """Close it. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _group(self, place: int) -> int:
        return HEAD_BYTES + place // GROUP_ROWS * (_PAGE_BYTES + GROUP_ROWS * self.row_bytes)


def _head_check(path: str, row_bytes: int, layout: bytes) -> int:
    """Covers the file's name, so that a column of another fingerprint isn't read."""
    name = path[path.rfind("/") + 1 :].encode()
    return xxh3_64_intdigest(b"%b %d " % (name, row_bytes) + layout)
