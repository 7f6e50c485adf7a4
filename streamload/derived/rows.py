"""Rows under keys, bounded, in a database that all processes of a node share; on disk, or in a tmpfs.

diskcache keeps them, behind a `Disk` that stores bytes as they are and never unpickles. A batch is one
transaction: what a killed process was writing isn't there. Limits count the pages of the database and its
log; the rows that weren't read for longest go first. What fails its checksum is a miss.

    ROOT/NUMBER/cache.db, cache.db-wal, …          the database, by SQLite; if it breaks, the next one
    ROOT/lock, ROOT/writing                        held while the database is made or replaced; while rows
                                                   are written
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from streamload.cache.directory import check_owner
from streamload.cache.locks import exclusive
from streamload.derived.log_once import log_once
from streamload.derived.row_counts import RowCounts
from streamload.derived.row_seal import Row, seal, unseal
from streamload.derived.rows_database import Database, diskcache, log_bytes, rows_at_once
from streamload.derived.rows_table import (
    bytes_of,
    bytes_on_disk,
    clear,
    is_broken,
    numbers,
    refuse_links,
    remove,
    select_labels,
    select_rows,
)
from streamload.errors import CacheCorrupt, CacheError

SealedRow = tuple[bytes, "bytes | memoryview"]
"""A key, and what `row_seal.seal` gives."""
_ASKED_AT_ONCE = 500
"""SQLite allows 999 values in a statement."""
_TOUCH_SECONDS = 10.0
_FULL_ENOUGH = 0.7
"""From this part of the limit on it is noted when rows are read."""


class Rows:
    """The rows of one directory. Safe among threads and processes; it may be used across a fork.

    It holds `_use` while it uses its database: threads that shouldn't wait for each other have one each.

    Args:
        root: of the directory, which is made with mode 0700.
        limit: what it may take, in bytes, given what it takes now.
        counts: where corrupt, evicted and refused rows are counted.

    Raises:
        CacheError: the directory can't be used, or isn't this user's alone.
    """

    def __init__(self, root: Path, limit: Callable[[int], int], counts: RowCounts):
        self.root = root
        self.counts = counts
        self._limit = limit
        self._database: Database | None = None
        self._number = 0
        self._use = threading.RLock()
        self._touched: set[bytes] = set()
        self._touched_at = time.monotonic()
        self._fills_up = (0.0, False)
        _all_rows.add(self)
        try:
            with self._use:
                try:
                    self._open()
                except sqlite3.Error as exc:
                    if not is_broken(exc):
                        raise
                    self._replace(exc)
                    self._open()
        except (OSError, sqlite3.Error) as exc:
            if isinstance(exc, CacheError):
                raise
            raise CacheError(f"rows can't be kept at {root}: {exc}") from exc

    def __repr__(self) -> str:
        return f"<Rows {self.root}>"

    @property
    def used_bytes(self) -> int:
        """What the files take on disk."""
        return bytes_on_disk(self.root / str(self._number))

    @property
    def limit_bytes(self) -> int:
        """What they may take."""
        return self._limit(self.used_bytes)

    def read(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows that are there and whole, of some keys of 32 bytes each."""
        found: dict[bytes, Row] = {}
        for at in range(0, len(keys), _ASKED_AT_ONCE):
            some = keys[at : at + _ASKED_AT_ONCE]
            for key, data in self._attempt(functools.partial(select_rows, keys=some), []):
                try:
                    found[key] = unseal(key, data)
                except CacheCorrupt as exc:
                    self.counts.corrupt += 1
                    log_once(f"{self.root}: {exc}; it is computed again")
        if found:
            self._touch(found)
        return found

    def write(self, rows: Sequence[SealedRow], label: str) -> int:
        """Store sealed rows, as many as there is room for; older ones go.

        Args:
            rows: keys and rows (`row_format.seal`).
            label: what they can be listed and cleared by.

        Returns:
            how many are stored now.
        """
        stored = 0
        limit_bytes = self.limit_bytes
        portions = list(_in_portions(rows, rows_at_once(limit_bytes), log_bytes(limit_bytes) // 2))
        for some in portions:
            is_last = some is portions[-1]
            store = functools.partial(
                self._store, rows=some, label=label, limit_bytes=limit_bytes, is_last=is_last
            )
            stored += self._attempt(store, 0)
        self.counts.refused += len(rows) - stored
        return stored

    def read_note(self, key: bytes) -> bytes | None:
        """A note under a key of its own length, checked; None: there is none."""
        found = self._attempt(functools.partial(select_rows, keys=[key]), [])
        with contextlib.suppress(CacheCorrupt):
            return next((bytes(unseal(key, data).body) for _, data in found), None)
        return None

    def write_note(self, key: bytes, text: bytes, label: str) -> None:
        """Store a note."""
        self.write([(key, seal(key, b"", text, 0))], label)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete rows."""
        values = [(key,) for key in keys]
        self._attempt(lambda opened: opened.execute_many("DELETE FROM Cache WHERE key = ?", values), None)

    def labels(self) -> dict[str, list[bytes]]:
        """The keys of all rows, by label."""
        found: dict[str, list[bytes]] = {}
        for label, key in self._attempt(select_labels, []):
            found.setdefault(label, []).append(key)
        return found

    def bytes_of(self, label: str) -> int:
        """What the rows of a label take."""
        return int(self._attempt(functools.partial(bytes_of, label=label), 0))

    def clear(self, label: str | None = None) -> int:
        """Delete the rows of a label, or all; what isn't of the database stays.

        Returns:
            how many there were.
        """
        return int(self._attempt(functools.partial(clear, label=label), 0))

    def flush(self) -> None:
        """Note when the rows were read that were read since it was noted last."""
        with self._use:
            keys, self._touched = list(self._touched), set()
            self._touched_at = time.monotonic()
        if keys:
            self._attempt(lambda opened: opened.touch(keys), None)

    def close(self) -> None:
        """Close the connections of this process; once is enough."""
        with self._use:
            self._touched = set()
            self._close()

    def _touch(self, keys: Any) -> None:
        now = time.monotonic()
        looked_at, fills_up = self._fills_up
        if now > looked_at + 1.0:
            fills_up = self.used_bytes > _FULL_ENOUGH * self.limit_bytes
            self._fills_up = (now, fills_up)
        if not fills_up:
            return
        with self._use:
            self._touched.update(keys)
            is_due = time.monotonic() - self._touched_at > _TOUCH_SECONDS
        if is_due:
            self.flush()

    def _store(
        self, opened: Database, rows: Sequence[SealedRow], label: str, limit_bytes: int, *, is_last: bool
    ) -> int:
        self.flush()
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

    def _attempt(self, action: Callable[[Database], Any], otherwise: Any) -> Any:
        """Do something with the database; if it can't be done say so once, and go on without.

        A database that is broken is replaced by an empty one.
        """
        with self._use:
            for _ in range(2):
                try:
                    return action(self._open())
                except (OSError, sqlite3.Error, diskcache().Timeout) as exc:
                    if not is_broken(exc):
                        log_once(f"{self.root}: rows can't be read or stored for now: {exc!r}")
                        self._close()  # a transaction that failed at its end would stand in the way
                        return otherwise
                    self._replace(exc)
            return otherwise

    def _open(self) -> Database:
        if self._database is not None and self._database.is_current():
            return self._database
        self._close()
        check_owner(self.root)
        for directory in (self.root.parent, self.root):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(self.root)
        with exclusive(self.root / "lock"):
            for number in numbers(self.root)[:-1]:  # one that was being replaced
                remove(self.root / str(number))
            self._number = max(numbers(self.root), default=0)
            home = self.root / str(self._number)
            home.mkdir(mode=0o700, exist_ok=True)
            refuse_links(home)
            limit_bytes = self.limit_bytes
            with exclusive(self.root / "writing"):
                self._database = Database(home, limit_bytes)
        return self._database

    def _replace(self, error: Exception) -> None:
        """Begin an empty database in place of one that is broken, unless another process has."""
        self.counts.corrupt += 1
        log_once(f"{self.root}: the database is broken ({error}): it is replaced by an empty one")
        self._close()
        with exclusive(self.root / "lock"):
            if self._number == max(numbers(self.root), default=0):
                (self.root / str(self._number + 1)).mkdir(mode=0o700)
                remove(self.root / str(self._number))

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()


_all_rows: weakref.WeakSet[Rows] = weakref.WeakSet()
_held: list[Rows] = []


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


def _in_portions(rows: Sequence[SealedRow], most: int, most_bytes: int) -> Iterator[Sequence[SealedRow]]:
    """Rows in transactions of at most so many, and of so many bytes but for one row."""
    some: list[SealedRow] = []
    size = 0
    for row in rows:
        if some and (size + len(row[1]) > most_bytes or len(some) == most):
            yield some
            some, size = [], 0
        some.append(row)
        size += len(row[1])
    if some:
        yield some
