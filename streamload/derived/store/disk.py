"""Rows under keys, bounded, in a database on disk that all processes of a node share.

A batch is one transaction: what a killed process was writing isn't there. Limits count the pages of the
database and its log; the rows that weren't read for longest go first. What fails its checksum is a miss.

    ROOT/rNUMBER/rows.db, rows.db-wal, …           the database, by SQLite; if it breaks, the next one
    ROOT/lock, ROOT/writing                        held while the database is made or replaced; while rows
                                                   are written
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from streamload.cache.directory import check_owner
from streamload.cache.locks import exclusive
from streamload.derived import log_once
from streamload.derived.store.database import (
    DATABASE,
    ERRORS,
    Database,
    current_home,
    homes,
    is_broken,
    remove,
    transactions,
    used_bytes,
)
from streamload.derived.store.sealed import Row, read_row, seal, unseal
from streamload.errors import CacheCorrupt, CacheError

_T = TypeVar("_T")
SealedRow = tuple[bytes, "bytes | memoryview"]
"""A key, and what `sealed.seal` gives."""
_TOUCH_SECONDS = 10.0
_LOOK_SECONDS = 1.0
"""Between two looks for a database that is only read, and isn't there."""
_FULL_ENOUGH = 0.7
"""From this part of the limit on it is noted when rows are read."""


@dataclass(slots=True)
class RowCounts:
    """Counts of rows, in this process."""

    hits: int = 0  # rows that were read
    misses: int = 0  # rows that were not there
    stored: int = 0  # rows that were written
    corrupt: int = 0  # rows or databases that failed a check, and count as not there
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
    """What computing the rows that were read would have taken, by what a row of the module has taken here."""

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __sub__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))


def checked(where: object, pairs: Iterable[tuple[Any, Any]], counts: RowCounts) -> dict[bytes, Row]:
    """Rows of pairs of a key and its value that are what was written; others are counted as corrupt."""
    rows: dict[bytes, Row] = {}
    for key, data in pairs:
        try:
            rows[key] = read_row(key, data)
        except (CacheCorrupt, TypeError, AttributeError) as exc:
            counts.corrupt += 1
            log_once(f"{where}: {exc}; it is computed again")
    return rows


def note_in(key: bytes, data: bytes | None) -> bytes | None:
    """The text of a sealed note; None: there is none, or it isn't what was written."""
    with contextlib.suppress(CacheCorrupt):
        return None if data is None else bytes(unseal(key, data).body)
    return None


class DiskRows:
    """The rows of one directory. Safe among threads and processes; it may be used across a fork.

    It holds `_use` while it uses its database: threads that shouldn't wait for each other have one each.

    Args:
        root: of the directory, which is made with mode 0700.
        limit: what it may take, in bytes, given what it takes now and what is to be written; None: it is only
            read, and isn't made.
        counts: where corrupt, evicted and refused rows are counted.

    Raises:
        CacheError: the directory can't be used, or isn't this user's alone.
    """

    def __init__(self, root: Path, limit: Callable[[int, int], int] | None, counts: RowCounts):
        self.root = root
        self.counts = counts
        self._limit = limit
        self._database: Database | None = None
        self._home = root / "r0"
        self._use = threading.RLock()
        self._touched: set[bytes] = set()
        self._touched_at = time.monotonic()
        self._fills_up = (0.0, False)
        self._look_at = 0.0
        _all_rows.add(self)
        if limit is None:
            return
        try:
            with self._use:
                self._do(lambda opened: None, None)
        except ERRORS as exc:
            if isinstance(exc, CacheError):
                raise
            raise CacheError(f"rows can't be kept at {root}: {exc}") from exc

    def __repr__(self) -> str:
        return f"<DiskRows {self.root}>"

    @property
    def used_bytes(self) -> int:
        """Bytes of the files on disk."""
        return used_bytes(self.root)

    def read(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows that are there and whole, of some keys of 32 bytes each."""
        rows = checked(self.root, self._attempt(lambda opened: opened.read(keys), []), self.counts)
        if rows and self._limit is not None:
            self._touch(rows)
        return rows

    def write(self, rows: Sequence[SealedRow], label: str) -> int:
        """Store sealed rows, as many as there is room for; older ones go. Returns how many are stored now."""
        stored = 0
        limit_bytes = self._limit_bytes(sum(len(data) for _, data in rows) + 200 * len(rows))
        is_full = self.used_bytes > limit_bytes * _FULL_ENOUGH
        parts = list(transactions(rows, limit_bytes, is_full=is_full))
        for part in parts:
            store = functools.partial(
                self._store, rows=part, label=label, limit_bytes=limit_bytes, is_last=part is parts[-1]
            )
            stored += self._attempt(store, 0)
        self.counts.refused += len(rows) - stored
        return stored

    def read_note(self, key: bytes) -> bytes | None:
        """A note, checked; None: there is none."""
        return note_in(key, self._attempt(lambda opened: opened.read_note(key), None))

    def write_note(self, key: bytes, text: bytes, label: str) -> None:
        """Store a note."""
        self._attempt(lambda opened: opened.write_note(key, seal(key, b"", text, 0), label), None)

    def clear(self, label: str | None = None) -> int:
        """Delete the rows of a label, or all; return how many there were."""
        return self._attempt(lambda opened: opened.clear(label), 0)

    def close(self) -> None:
        """Close the connections of this process; once is enough."""
        with self._use:
            self._touched = set()
            self._close()

    def _touch(self, keys: Iterable[bytes]) -> None:
        """Note when rows were read, every some seconds and only as long as some may have to go soon."""
        clock = time.monotonic()
        looked_at, fills_up = self._fills_up
        if clock > looked_at + 1.0:
            fills_up = self.used_bytes > _FULL_ENOUGH * self._limit_bytes()
            self._fills_up = (clock, fills_up)
        if not fills_up:
            return
        with self._use:
            self._touched.update(keys)
            is_due = clock - self._touched_at > _TOUCH_SECONDS
        if is_due:
            self._write_touched()

    def _write_touched(self) -> None:
        with self._use:
            keys, self._touched = list(self._touched), set()
            self._touched_at = time.monotonic()
        if keys:
            self._attempt(lambda opened: opened.touch(keys), None)

    def _limit_bytes(self, new_bytes: int = 0) -> int:
        return 0 if self._limit is None else self._limit(self.used_bytes, new_bytes)

    def _store(
        self, opened: Database, rows: Sequence[SealedRow], label: str, limit_bytes: int, *, is_last: bool
    ) -> int:
        self._write_touched()
        with exclusive(self.root / "writing"):
            if not opened.shorten_log(limit_bytes):
                return 0
            evicted = opened.store(rows, label, limit_bytes)
            if evicted is None:
                log_once(
                    f"{self.root}: a limit of {limit_bytes:,} bytes has no room for rows: none are stored"
                )
                return 0
            self.counts.evicted += evicted
            opened.shorten_log(limit_bytes, at_rest=is_last)
        return len(rows)

    def _attempt(self, action: Callable[[Database], _T], otherwise: _T) -> _T:
        """Do something with the database; if it can't be done say so once, and go on without."""
        with self._use:
            try:
                return self._do(action, otherwise)
            except ERRORS as exc:
                log_once(f"{self.root}: rows can't be read or stored for now: {exc!r}")
                self._close()  # a transaction that failed at its end would stand in the way
                return otherwise

    def _do(self, action: Callable[[Database], _T], otherwise: _T) -> _T:
        """Do something with the database, if there is one; one that is broken is replaced by an empty one."""
        try:
            opened = self._open()
            return otherwise if opened is None else action(opened)
        except ERRORS as exc:
            if self._limit is None or not self._is_broken(exc):
                raise
            self._replace(exc)
        opened = self._open()
        return otherwise if opened is None else action(opened)

    def _is_broken(self, error: Exception) -> bool:
        says_read_only = "readonly" in str(error)  # by its own head, or another has removed it
        is_writable = all(os.access(path, os.W_OK) for path in (self._home, self.root))
        return is_broken(error) or (says_read_only and is_writable)

    def _open(self) -> Database | None:
        """The database; None: it is only read, and there is none."""
        if self._database is not None and self._database.is_current():
            return self._database
        self._close()
        if self._limit is None:
            return self._open_to_read()
        check_owner(self.root)
        for directory in (self.root.parent, self.root):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(self.root)
        with exclusive(self.root / "lock"):
            for replaced in homes(self.root)[:-1]:
                remove(replaced)
            self._home = current_home(self.root) or self.root / "r0"
            self._home.mkdir(mode=0o700, exist_ok=True)
            limit_bytes = self._limit_bytes()
            with exclusive(self.root / "writing"):
                self._database = Database.open(self._home, limit_bytes)
        return self._database

    def _open_to_read(self) -> Database | None:
        if time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + _LOOK_SECONDS
        check_owner(self.root)
        home = current_home(self.root)
        if home is not None and (home / DATABASE).exists():
            self._home = home
            self._database = Database.inspect(home)
        return self._database

    def _replace(self, error: Exception) -> None:
        """Begin an empty database in place of one that is broken, unless another process has."""
        self.counts.corrupt += 1
        log_once(f"{self.root}: the database is broken ({error}): it is replaced by an empty one")
        self._close()
        with exclusive(self.root / "lock"):
            latest = (homes(self.root) or [self._home])[-1]
            if self._home == latest:
                (self.root / f"r{int(latest.name[1:]) + 1}").mkdir(mode=0o700)
                remove(self._home)

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()


_all_rows: weakref.WeakSet[DiskRows] = weakref.WeakSet()
_held: list[DiskRows] = []


def _before_fork() -> None:
    """Hold all databases of this process while it forks: a child inherits none that is open."""
    _held[:] = _all_rows
    for rows in _held:
        rows._use.acquire()
        rows._close()


def _after_fork() -> None:
    for rows in _held:
        rows._use.release()
    _held.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
