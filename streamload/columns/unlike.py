"""Rows of several sizes or layouts: a column of slots, and a file that is only appended to.

    rows.<fingerprint>.slots   a column whose rows are places and sizes (column.py)
    rows.<fingerprint>.data    rows: checksum, the slot of the row before of this place, layout, body

A sample may have several rows, such as one for each text that is drawn from it: each names the one before,
and a row passes only under its own seed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamload.cache.directory import BLOCK_BYTES
from streamload.columns.column import GROUP_ROWS, ColumnFile, checksum_of

StoredRow = tuple[bytes, "bytes | memoryview"]
"""The layout and the bytes of a row."""
_SLOT = struct.Struct("<QII")
"""Offset and size of a row, and how many there are before it of the same place."""
_HEAD = struct.Struct("<Q16sI")
"""Checksum of all after it; the slot of the row before; bytes of the layout."""
_MOST_LINKS = 128
"""Most rows of a sample: with more texts than this they are probably new in each pass, and the file would
grow for ever. They are searched from the latest on."""
_NO_SLOT = bytes(_SLOT.size)


class UnlikeColumn:
    """One open column of rows of several sizes. A forked child must not write to it.

    Args:
        slots: open.
        data: the path of the rows.
    """

    def __init__(self, slots: ColumnFile, data: str):
        self._slots, self._path = slots, data
        self._file = -1

    @classmethod
    def open(cls, path: str, *, writable: bool = False) -> UnlikeColumn | None:
        """Open the column at a path, without the endings; None: there is none.

        Raises:
            CacheCorrupt, OSError: as `ColumnFile.open`.
        """
        slots = ColumnFile.open(f"{path}.slots", writable=writable)
        return None if slots is None else cls(slots, f"{path}.data")

    @staticmethod
    def make(path: str) -> None:
        """Make an empty one, unless there is one."""
        ColumnFile.make(f"{path}.slots", _SLOT.size, b"")

    @staticmethod
    def most_bytes(places: Sequence[int], rows: Sequence[StoredRow]) -> int:
        """An upper bound of the disk space of rows at some places, with that of a new column."""
        groups = len(
            {place // GROUP_ROWS for place in places}
        )  # each of five blocks, if it begins within one
        row_bytes = sum(_HEAD.size + len(layout) + len(body) for layout, body in rows)
        return row_bytes + (5 * groups + 4) * BLOCK_BYTES

    @property
    def disk_bytes(self) -> int:
        """The blocks that both files take."""
        try:
            return self._slots.disk_bytes + Path(self._path).stat().st_blocks * 512
        except FileNotFoundError:
            return self._slots.disk_bytes

    def read(
        self, places: Sequence[int], slot_seeds: Sequence[int], seeds: Sequence[int]
    ) -> list[StoredRow | None]:
        """The rows at some places that pass under their seeds.

        Args:
            slot_seeds: of the sample alone.
            seeds: of all that the row was made of.
        """
        rows: list[StoredRow | None] = []
        for slot, seed in zip(self._slots.read(places, slot_seeds), seeds, strict=True):
            rows.append(None if slot is None else self._find(slot, seed))
        return rows

    def write(
        self,
        places: Sequence[int],
        rows: Sequence[StoredRow],
        slot_seeds: Sequence[int],
        seeds: Sequence[int],
    ) -> int:
        """Store rows; returns how many, fewer on a full disk, and where places have as many as they may.

        Args:
            places: ascending.
        """
        stored: list[tuple[int, int]] = []  # place and slot seed of each
        links: list[int] = []
        records: list[bytes] = []
        befores = self._slots.read(places, slot_seeds)
        for number, (before, seed) in enumerate(zip(befores, seeds, strict=True)):
            is_only_row = before is None or seed == slot_seeds[number]
            links_before = 0 if is_only_row else _SLOT.unpack(before or _NO_SLOT)[2] + 1
            if links_before < _MOST_LINKS:
                layout, body = rows[number]
                head = _HEAD.pack(0, _NO_SLOT if is_only_row else before, len(layout))
                content = b"".join((memoryview(head)[8:], layout, body))
                records.append(checksum_of(content, seed).to_bytes(8, "little") + content)
                stored.append((places[number], slot_seeds[number]))
                links.append(links_before)
        # a descriptor of its own: a fork would share the position
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        end = os.open(self._path, flags, 0o600)
        try:
            written = os.write(end, b"".join(records))
            start = os.lseek(end, 0, os.SEEK_CUR) - written
        except OSError:
            return 0
        finally:
            os.close(end)
        slots: list[bytes] = []
        stop = start + written
        for record, count in zip(records, links, strict=True):
            if start + len(record) > stop:
                break  # cut by a full disk
            slots.append(_SLOT.pack(start, len(record), count))
            start += len(record)
        written_places = [place for place, _ in stored[: len(slots)]]
        checksums = [checksum_of(slot, seed) for slot, (_, seed) in zip(slots, stored, strict=False)]
        return self._slots.write(written_places, slots, checksums)

    def all_rows(self, slot: bytes) -> list[tuple[int, StoredRow, memoryview]]:
        """The rows of a slot, unchecked, the latest first: checksum, row, the bytes that it covers."""
        rows: list[tuple[int, StoredRow, memoryview]] = []
        while len(rows) < _MOST_LINKS and (record := self._record(slot)) is not None:
            check, slot, layout_bytes = _HEAD.unpack_from(record)
            content = memoryview(record)[_HEAD.size :]
            row = bytes(content[:layout_bytes]), content[layout_bytes:]
            rows.append((check, row, memoryview(record)[8:]))
        return rows

    def close(self) -> None:
        """Close both files. Idempotent."""
        self._slots.close()
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _find(self, slot: bytes, seed: int) -> StoredRow | None:
        for _ in range(_MOST_LINKS):
            record = self._record(slot)
            if record is None:
                break
            check, slot, layout_bytes = _HEAD.unpack_from(record)
            if checksum_of(memoryview(record)[8:], seed) == check:
                content = memoryview(record)[_HEAD.size :]
                return bytes(content[:layout_bytes]), content[layout_bytes:]
        return None

    def _record(self, slot: bytes) -> bytes | None:
        start, size, _ = _SLOT.unpack(slot)
        if size < _HEAD.size:
            return None
        if self._file < 0:
            try:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return None
        record: Any = os.pread(self._file, size, start)
        return record if len(record) == size else None
