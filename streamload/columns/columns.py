"""The columns of a directory as a process uses them: rows by their addresses, within the tier's limit.

    <cache_dir>/columns/<name>/rows.<fingerprint>    the rows of a shard's samples by one definition

<name> is the digest of the checksums of the shard's first samples: known while the shard arrives, and the
same for a renamed, a published and a fetched copy. Two shards that begin alike share a file: where they
differ, the rows of one don't pass for the other's, and are made again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from streamload.cache.directory import BLOCK_BYTES, check_owner
from streamload.cache.locks import usage_of
from streamload.cache.tier import Tier
from streamload.columns.blocks import RowBlock
from streamload.columns.column import MOST_LAYOUT_BYTES, ColumnFile, checksum_of
from streamload.columns.unlike import StoredRow, UnlikeColumn
from streamload.descriptors import Descriptor
from streamload.errors import CacheCorrupt, CacheError
from streamload.options.directories import nearest
from streamload.options.settings import Settings

FIRST = 16
"""Number of samples whose checksums name a shard's columns. A shard with fewer has no columns: files would
cost more than they save."""
_ADDRESS, _SLOT_SEED = struct.Struct(">16s16sIQ"), struct.Struct(">Q")
_PLACE = struct.Struct(">IQ")
_FILE_BYTES = 32
"""An address begins with fingerprint and name, which tell the file."""
_STEP_BYTES, _STEPS = 1 << 20, 64
"""Room is reserved in steps of a megabyte; a small limit is divided into this many steps instead."""
_REFUSED_SECONDS = 5.0
"""After a refusal no room is asked for in this time."""
_TOUCH_SECONDS = 30.0
"""A column that is read has the time of its last use, as exact as this."""
_MOST_TOUCHED = 100_000


class Address(NamedTuple):
    """The address of a row. Packed addresses of one column are in the order of their places."""

    fingerprint: bytes  # 16 bytes: of the definition
    name: bytes  # 16 bytes: of the shard's columns
    place: int  # in the column: that of its sample, or with variants several for each
    seed: int  # the checksum of the sample's bytes
    slot_seed: int | None = None
    """The seed of a place with several rows, such as one for each text of a sample, where `seed` is of one of
    them; None: the place has one row."""

    def pack(self) -> bytes:
        """Return it as bytes."""
        packed = _ADDRESS.pack(*self[:4])
        return packed if self.slot_seed is None else packed + _SLOT_SEED.pack(self.slot_seed)


def is_address(name: bytes) -> bool:
    """True if the name of a row is its packed address; others are shorter."""
    return len(name) >= _ADDRESS.size


def open_home(home: Path, settings: Settings) -> Tier:
    """Open or create the tier of a cache directory that has columns: shards and columns share its limit.

    Raises:
        CacheError: it can't be used.
    """
    if (home / "tier.json").is_file():
        return Tier.open(home, free_disk=settings.free_disk)
    limit_bytes = settings.cache_size.limit_bytes(shutil.disk_usage(nearest(home)).free, 0)
    return Tier(home, limit_bytes, free_disk=settings.free_disk)


def recorded_bytes(home: Path) -> int:
    """The bytes that the columns in a cache directory take at most, by its record; 0: there is none."""
    with contextlib.suppress(OSError), Descriptor.open(home / "lock", os.O_RDONLY | os.O_NOFOLLOW) as lock:
        used = usage_of(lock)
        return 0 if used is None else used.columns
    return 0


def name_of(checksums: Sequence[int] | npt.NDArray[np.uint64]) -> bytes:
    """The name of a shard's columns, by the checksums of its first samples."""
    return xxh3_128_digest(np.array(checksums[:FIRST], "<u8").tobytes())


class RowRoom:
    """Room for rows in a tier, reserved in steps ahead of what is written.

    Args:
        tier: opened when room is first needed.
        most_bytes: the most that all columns may take; None: by the tier's limit alone.
    """

    def __init__(self, tier: Callable[[], Tier], most_bytes: int | None = None):
        self._open, self._most_bytes = tier, most_bytes
        self._tier: Tier | None = None
        self._reserved_bytes = 0
        self._refused_until = 0.0

    def has(self, size_bytes: int) -> bool:
        """Reserve room for so many bytes more, if there isn't enough."""
        if self._reserved_bytes >= size_bytes:
            return True
        if time.monotonic() < self._refused_until:
            return False
        try:
            if self._tier is None:
                self._tier = self._open()
            budget = self._tier.budget
            step_bytes = min(_STEP_BYTES, budget.limit.size_bytes // _STEPS)
            step_bytes = max(step_bytes, size_bytes - min(0, self._reserved_bytes))
            step_bytes += -step_bytes % BLOCK_BYTES
            is_granted = budget.reserve_columns(step_bytes, self._most_bytes)
        except (OSError, CacheError):
            is_granted = False
        if not is_granted:
            self._refused_until = time.monotonic() + _REFUSED_SECONDS
            return False
        self._reserved_bytes += step_bytes
        return True

    def take(self, size_bytes: int) -> None:
        """Note that so many bytes were written; what is more than was reserved is reserved with the next."""
        self._reserved_bytes -= size_bytes


class Columns:
    """The columns in a cache directory. Each file is open for one call; a forked child may go on with it.

    Args:
        home: the cache directory.
        room: for rows that are written; None: columns are only read.

    Raises:
        CacheError: the directory isn't this user's alone.
    """

    def __init__(self, home: Path, room: RowRoom | None):
        check_owner(home)
        self._root = str(home / "columns")
        self._room = room
        self._touched: dict[bytes, float] = {}

    def read(self, addresses: Sequence[bytes]) -> dict[bytes, StoredRow]:
        """The rows that are there and whole: layout and bytes by their packed address."""
        rows: dict[bytes, StoredRow] = {}
        for file in _by_file(addresses):
            path = self._path(file)
            try:
                of_file = _read(path, file)
            except CacheCorrupt:
                self._remove(path)
                continue
            except OSError:
                continue
            places = zip(file.addresses, of_file, strict=True)
            rows.update((address, row) for address, row in places if row is not None)
            self._touch(file.name)
        return rows

    def write(self, rows: Sequence[tuple[bytes, bytes, bytes | memoryview]]) -> int:
        """Store rows, each an address, a layout and bytes; returns how many are there now."""
        by_address = {address: (layout, body) for address, layout, body in rows}
        stored = 0
        for file in _by_file(sorted(by_address)):
            path = self._path(file)
            try:
                with contextlib.suppress(OSError):  # full, failing or evicted just now: they are made again
                    stored += self._write(path, file, [by_address[address] for address in file.addresses])
            except CacheCorrupt:
                self._remove(path)
        return stored

    def _write(self, path: str, file: _FileRows, rows: list[StoredRow]) -> int:
        """Store rows of one layout in the column, and others beside it."""
        layout, body = rows[0]
        fits = file.slot_seeds is None and len(body) > 0 and len(layout) <= MOST_LAYOUT_BYTES
        column = ColumnFile.open(path, writable=True) if fits else None
        if column is None and fits and self._has_room(BLOCK_BYTES):
            ColumnFile.make(path, len(body), layout)
            self._take(BLOCK_BYTES)
            column = ColumnFile.open(path, writable=True)
        if column is None:
            return 0 if fits else self._write_unlike(path, file, rows)
        alike = column.layout, column.row_bytes
        numbers = [number for number, (layout, body) in enumerate(rows) if (layout, len(body)) == alike]
        stored = 0
        with contextlib.closing(column):
            alike_rows = file.at(numbers)
            if self._has_room(column.most_bytes(alike_rows.places)):
                before_bytes = column.disk_bytes
                bodies = [rows[number][1] for number in numbers]
                checksums = list(map(checksum_of, bodies, alike_rows.seeds))
                stored = column.write(alike_rows.places, bodies, checksums)
                self._take(column.disk_bytes - before_bytes)
        if len(numbers) < len(rows):
            unlike = sorted({*range(len(rows))}.difference(numbers))
            stored += self._write_unlike(path, file.at(unlike), [rows[number] for number in unlike])
        return stored

    def fill(self, fingerprint: bytes, name: bytes, start: int, block: RowBlock) -> int:
        """Store the rows of another node that aren't here; returns how many.

        They aren't checked: one that is of another version of its sample isn't read, like any such row.

        Args:
            start: the place of the block's first row.
        """
        path, stored = self._path_of(fingerprint, name), 0
        with contextlib.suppress(OSError, CacheCorrupt):
            column = ColumnFile.open(path, writable=True)
            if column is None and len(block.layout) <= MOST_LAYOUT_BYTES and self._has_room(BLOCK_BYTES):
                ColumnFile.make(path, block.row_bytes, block.layout)
                self._take(BLOCK_BYTES)
                column = ColumnFile.open(path, writable=True)
            if column is None:
                return 0
            with contextlib.closing(column):
                if (column.layout, column.row_bytes) != (block.layout, block.row_bytes):
                    return 0
                here = {start + int(place) for place in np.flatnonzero(column.checksums()[start:])}
                rows = [(start + place, *row) for place, *row in block.items() if start + place not in here]
                if rows and self._has_room(column.most_bytes([place for place, *_ in rows])):
                    places, checksums, bodies = zip(*rows, strict=True)
                    before_bytes = column.disk_bytes
                    stored = column.write(places, bodies, checksums)
                    self._take(column.disk_bytes - before_bytes)
        return stored

    def asked(self, fingerprint: bytes, name: bytes) -> str:
        """The path of a file that is locked while a process asks other nodes for rows, and says when it did.

        Returns:
            "" if there is no room for it.
        """
        path = Path(f"{self._path_of(fingerprint, name)}.asked")
        if not path.exists():
            if not self._has_room(BLOCK_BYTES):
                return ""
            self._take(BLOCK_BYTES)
            path.parent.mkdir(mode=0o700, exist_ok=True)
        return str(path)

    def _write_unlike(self, path: str, file: _FileRows, rows: list[StoredRow]) -> int:
        if not self._has_room(UnlikeColumn.most_bytes(file.places, rows)):
            return 0
        column = UnlikeColumn.open(path, writable=True)
        if column is None:
            UnlikeColumn.make(path)
            self._take(BLOCK_BYTES)
            column = UnlikeColumn.open(path, writable=True)
        if column is None:
            return 0
        with contextlib.closing(column):
            before_bytes = column.disk_bytes
            stored = column.write(file.places, rows, file.slot_seeds or file.seeds, file.seeds)
            self._take(column.disk_bytes - before_bytes)
        return stored

    def _has_room(self, size_bytes: int) -> bool:
        return self._room is not None and self._room.has(size_bytes)

    def _take(self, size_bytes: int) -> None:
        assert self._room is not None
        self._room.take(size_bytes)

    def _path(self, file: _FileRows) -> str:
        return self._path_of(file.fingerprint, file.name)

    def _path_of(self, fingerprint: bytes, name: bytes) -> str:
        return f"{self._root}/{name.hex()}/rows.{fingerprint.hex()}"

    def _remove(self, path: str) -> None:
        """Remove a file that is no column, if it may be written to; a row of it is made again."""
        if self._room is not None:
            for name in (path, f"{path}.slots", f"{path}.data"):
                with contextlib.suppress(OSError):
                    Path(name).unlink()

    def _touch(self, name: bytes) -> None:
        """Note that a shard's columns are used: those that weren't for longest go first."""
        clock = time.monotonic()
        if self._room is None or clock - self._touched.get(name, -_TOUCH_SECONDS) < _TOUCH_SECONDS:
            return
        if len(self._touched) > _MOST_TOUCHED:
            self._touched.clear()
        self._touched[name] = clock
        with contextlib.suppress(OSError):
            os.utime(f"{self._root}/{name.hex()}")


class _FileRows(NamedTuple):
    """Rows of one column."""

    fingerprint: bytes
    name: bytes
    addresses: list[bytes]
    places: list[int]
    seeds: list[int]
    slot_seeds: list[int] | None

    def at(self, numbers: Sequence[int]) -> _FileRows:
        """Some of the rows."""
        if len(numbers) == len(self.places):
            return self
        return _FileRows(
            self.fingerprint,
            self.name,
            [self.addresses[number] for number in numbers],
            [self.places[number] for number in numbers],
            [self.seeds[number] for number in numbers],
            None if self.slot_seeds is None else [self.slot_seeds[number] for number in numbers],
        )


def _by_file(addresses: Sequence[bytes]) -> Iterator[_FileRows]:
    """The rows of each file, in the order of the addresses."""
    by_file: dict[tuple[bytes, int], list[bytes]] = {}
    for address in addresses:
        by_file.setdefault((address[:_FILE_BYTES], len(address)), []).append(address)
    for (file, size), members in by_file.items():
        places, seeds = zip(*[_PLACE.unpack_from(address, _FILE_BYTES) for address in members], strict=True)
        slot_seeds = None
        if size > _ADDRESS.size:
            slot_seeds = [_SLOT_SEED.unpack_from(address, _ADDRESS.size)[0] for address in members]
        yield _FileRows(file[:16], file[16:], members, list(places), list(seeds), slot_seeds)


def _read(path: str, file: _FileRows) -> list[StoredRow | None]:
    """The rows of a file that pass; None in place of others."""
    rows: list[StoredRow | None] = [None] * len(file.places)
    if file.slot_seeds is None and (column := ColumnFile.open(path)) is not None:
        with contextlib.closing(column):
            layout = column.layout
            bodies = column.read(file.places, file.seeds)
        rows = [None if body is None else (layout, body) for body in bodies]
    missing = [number for number, row in enumerate(rows) if row is None]
    if missing and (unlike := UnlikeColumn.open(path)) is not None:
        file = file.at(missing)
        with contextlib.closing(unlike):
            unlike_rows = unlike.read(file.places, file.slot_seeds or file.seeds, file.seeds)
        for number, row in zip(missing, unlike_rows, strict=True):
            rows[number] = row
    return rows
