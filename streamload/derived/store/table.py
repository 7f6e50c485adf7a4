"""Rows and notes under keys in the file of a directory: bounded, and shared by all processes of a node.

A batch is one transaction, so a killed process leaves no partial write. The limit counts the pages of the
file and its log; the least recently read rows are evicted. A corrupt file is set aside and replaced by an
empty one. Readers check what they read.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from streamload.derived import log_once
from streamload.derived.store.database import (
    BROKEN,
    ERRORS,
    FILES,
    LOG_HEAD_BYTES,
    LOGGED_PAGE_BYTES,
    PAGE_BYTES,
    Connection,
    is_broken,
    set_aside,
    size_of,
    used_bytes,
)
from streamload.derived.store.sealed import KEY_BYTES
from streamload.errors import CacheError

_T = TypeVar("_T")
SealedRow = tuple[bytes, "bytes | memoryview"]
"""A key and the bytes of `sealed.seal`. Notes have keys of another length than rows."""
_VALUES = 500
"""SQLite allows 999 values in a statement."""
_LOG_SHARE, _LEAST_LOG_BYTES, _MOST_LOG_BYTES = 8, LOG_HEAD_BYTES + 9 * LOGGED_PAGE_BYTES, 32 << 20
"""The log gets an eighth of the limit, within these bounds: a transaction of one row writes several pages."""
_INDEX_PAGES = 3
"""Index pages that a transaction may write for each row, evicting another row included."""
_TOUCH_SECONDS = 10.0
_FULL_ENOUGH = 0.7
"""Reads are noted once this share of the limit is used."""


@dataclass(slots=True)
class RowCounts:
    """Counts of rows, in this process."""

    hits: int = 0  # rows that were read
    misses: int = 0  # rows that were not there
    stored: int = 0  # rows that were written
    corrupt: int = 0  # rows or files that failed a check, and count as not there
    evicted: int = 0  # rows that were deleted to make room
    refused: int = 0  # rows that were not written: no room, a read-only or full disk
    mismatches: int = 0  # rows that were found to be of another input
    builds: int = 0  # modules that were built
    rows_computed: int = 0  # by modules, for want of a row
    bytes_read: int = 0  # of rows
    bytes_written: int = 0  # of rows
    read_seconds: float = 0.0  # reading, checks included
    compute_seconds: float = 0.0  # computing what was missing
    store_seconds: float = 0.0  # writing, by a thread that does so while others compute
    saved_seconds: float = 0.0
    """Estimated time to compute the rows that were read, from this process's time per computed row."""

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __sub__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))


class RowTable:
    """The rows of one directory. Safe among threads and processes; it may be used across a fork.

    Args:
        root: the directory, created with mode 0700.
        limit: returns the limit in bytes, given the bytes used and the bytes to write; None: read-only, and
            the directory isn't created. One that can't be written to is read-only too, which is logged once.
        counts: where corrupt, evicted and refused rows are counted.

    Raises:
        CacheError: the directory can't be used, or isn't this user's alone.
    """

    def __init__(self, root: Path, limit: Callable[[int, int], int] | None, counts: RowCounts):
        self.root = root
        self.counts = counts
        self._limit = limit
        self._reader = Connection(root, writable=False)
        self._writer: Connection | None = None  # readers don't wait for a disk to write
        self._touched: set[bytes] = set()
        self._touch_at = 0.0
        self._fills_up = False
        if limit is None:
            return
        if root.is_dir() and not os.access(root, os.W_OK):
            log_once(f"{root}: rows are read, but none are stored: the directory can't be written to")
            return
        self._writer = Connection(root, writable=True)
        try:
            self._do(self._writer, lambda opened: None, None)
        except ERRORS as exc:
            if isinstance(exc, CacheError):
                raise
            raise CacheError(f"rows can't be kept at {root}: {exc}") from exc

    def __repr__(self) -> str:
        return f"<RowTable {self.root}>"

    @property
    def used_bytes(self) -> int:
        """Bytes of the files on disk."""
        return used_bytes(self.root)

    def read(self, keys: Sequence[bytes]) -> list[tuple[bytes, Any]]:
        """The keys and bytes of the rows that are there, unchecked."""
        pairs: list[tuple[bytes, Any]] = []
        pairs = self._attempt(self._reader, functools.partial(_read, keys), pairs)
        if pairs and self._writer is not None:
            self._touch(pairs)
        return pairs

    def write(self, rows: Sequence[SealedRow], label: str) -> int:
        """Store as many sealed rows as there is room for, evicting older ones; returns their number."""
        if self._writer is None:
            return 0
        new_bytes = sum(len(data) for _, data in rows) + 200 * len(rows)
        limit_bytes = self._attempt(self._writer, lambda opened: self._limit_bytes(new_bytes), 0)
        if not limit_bytes:
            return 0
        self._write_touched()
        stored = 0
        for part in _transactions(sorted(dict(rows).items()), log_bytes(limit_bytes)):
            stored += self._attempt(self._writer, functools.partial(self._store, part, label, limit_bytes), 0)
        return stored

    def close(self) -> None:
        """Close the connections of this process. Idempotent."""
        for connection in (self._reader, self._writer):
            if connection is not None:
                with connection.turn:
                    connection.close()

    def _store(self, rows: Sequence[SealedRow], label: str, limit_bytes: int, opened: Connection) -> int:
        """Store rows, and evict others for them, in one transaction; returns how many were stored."""
        time_ms, pages = _milliseconds(), sum(map(_pages, rows))
        written_pages = pages + (len(rows) + 1) * _INDEX_PAGES
        with opened.transaction(log_bytes(limit_bytes) - written_pages * LOGGED_PAGE_BYTES):
            evicted = self._make_room(pages, limit_bytes, opened)
            if evicted is not None:
                opened.change(
                    "REPLACE INTO rows (key, label, used, stored, value) VALUES (?, ?, ?, ?, ?)",
                    [
                        (key, label, time_ms if len(key) == KEY_BYTES else None, time_ms, data)
                        for key, data in rows
                    ],
                )
        if evicted is None:
            log_once(f"{self.root}: a limit of {limit_bytes:,} bytes has no room for rows: none are stored")
            return 0
        self.counts.evicted += evicted
        return len(rows)

    def _make_room(self, new_pages: int, limit_bytes: int, opened: Connection) -> int | None:
        """Evict rows until the new pages fit the limit; returns how many, or None if they can never fit."""
        broken = self.root / BROKEN
        most_bytes = limit_bytes - log_bytes(limit_bytes) - size_of(self.root / FILES[2])
        if (new_pages + 10) * PAGE_BYTES > most_bytes:
            return None
        evicted = 0
        while True:
            ((pages,),) = opened.execute("PRAGMA page_count")
            ((free,),) = opened.execute("PRAGMA freelist_count")
            over_bytes = (pages - free + new_pages) * PAGE_BYTES + size_of(broken) - most_bytes
            if over_bytes <= 0:
                return evicted
            if broken.exists():
                broken.unlink(missing_ok=True)
                continue
            victims: list[tuple[int]] = []
            for place, size in opened.execute(_OLDEST):
                victims.append((place,))
                over_bytes -= size or 0
                if over_bytes <= 0:
                    break
            if not victims:
                return None
            evicted += opened.change("DELETE FROM rows WHERE place = ?", victims)

    def _touch(self, pairs: Sequence[tuple[bytes, Any]]) -> None:
        """Record when rows were read: every few seconds, and only while the table is nearly full."""
        if (clock := time.monotonic()) > self._touch_at:
            self._touch_at = clock + _TOUCH_SECONDS
            self._write_touched()
            self._fills_up = self.used_bytes > _FULL_ENOUGH * self._limit_bytes(0)
        if self._fills_up:
            self._touched.update(key for key, _ in pairs)

    def _write_touched(self) -> None:
        """Store when rows were read, in transactions that fit in the log."""
        keys, self._touched = sorted(self._touched), set()
        if not keys or self._writer is None:
            return
        most_log_bytes = log_bytes(self._limit_bytes(0))
        key_bytes = (1 + _INDEX_PAGES) * LOGGED_PAGE_BYTES
        count = max(1, most_log_bytes // key_bytes)
        for start in range(0, len(keys), count):
            part = keys[start : start + count]
            note = functools.partial(_note_use, part, most_log_bytes - len(part) * key_bytes)
            self._attempt(self._writer, note, None)

    def _limit_bytes(self, new_bytes: int) -> int:
        return 0 if self._limit is None else self._limit(self.used_bytes, new_bytes)

    def _attempt(self, connection: Connection, action: Callable[[Connection], _T], otherwise: _T) -> _T:
        """Run an action on the file; on failure log once and return `otherwise`."""
        with connection.turn:
            try:
                return self._do(connection, action, otherwise)
            except ERRORS as exc:
                log_once(f"{self.root}: rows can't be read or stored for now: {exc!r}")
                connection.close()  # a transaction that failed at its end would stand in the way
                return otherwise

    def _do(self, connection: Connection, action: Callable[[Connection], _T], otherwise: _T) -> _T:
        """Run an action on the file if it exists; set a corrupt file aside and try again."""
        try:
            return action(connection) if connection.open() else otherwise
        except ERRORS as exc:
            # A writable directory whose database claims to be read-only has a corrupt header.
            says_read_only = "readonly" in str(exc) and os.access(self.root, os.W_OK)
            if self._writer is None or not (is_broken(exc) or says_read_only):
                raise
            self.counts.corrupt += 1
            log_once(
                f"{self.root}: the file of rows is broken ({exc}): it is set aside, and an empty one made"
            )
            connection.close()
            set_aside(self.root, connection.inode)
        return action(connection) if connection.open() else otherwise


_OLDEST = "SELECT place, length(value) FROM rows WHERE used IS NOT NULL ORDER BY used LIMIT 1000"


def _note_use(keys: Sequence[bytes], most_log_bytes: int, opened: Connection) -> None:
    values = [(_milliseconds(), key) for key in keys]
    with opened.transaction(most_log_bytes):
        opened.change("UPDATE rows SET used = ? WHERE key = ? AND used IS NOT NULL", values)


def _read(keys: Sequence[bytes], opened: Connection) -> list[tuple[bytes, Any]]:
    if len(keys) == 1:
        return opened.execute("SELECT key, value FROM rows WHERE key = ?", keys)
    pairs: list[tuple[bytes, Any]] = []
    for start in range(0, len(keys), _VALUES):
        part = keys[start : start + _VALUES]
        marks = ",".join("?" * len(part))
        pairs += opened.execute(f"SELECT key, value FROM rows WHERE key IN ({marks})", part)
    return pairs


def log_bytes(limit_bytes: int) -> int:
    """Bytes of a limit that are reserved for the log."""
    return max(_LEAST_LOG_BYTES, min(_MOST_LOG_BYTES, limit_bytes // _LOG_SHARE))


def _transactions(rows: Sequence[SealedRow], most_log_bytes: int) -> Iterator[Sequence[SealedRow]]:
    """Split rows into transactions of at most half the log; a larger row is a transaction of its own."""
    first = pages = 0
    for number, row in enumerate(rows):
        row_pages = _pages(row) + _INDEX_PAGES
        if number > first and (pages + row_pages) * LOGGED_PAGE_BYTES > most_log_bytes // 2:
            yield rows[first:number]
            first, pages = number, 0
        pages += row_pages
    if first < len(rows):
        yield rows[first:]


def _pages(row: SealedRow) -> int:
    """Most pages that a row can take."""
    return 1 + len(row[1]) // PAGE_BYTES


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000
