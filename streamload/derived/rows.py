"""Rows under keys, bounded, in a database that all processes of a node share; on disk, or in a tmpfs.

diskcache keeps them, behind a `Disk` that stores bytes as they are and never unpickles. A batch is one
transaction: what a killed process was writing isn't there. Limits count the pages of the database and its log;
the rows that weren't read for longest go first. What fails its checksum is a miss.

    ROOT/cache.db, cache.db-wal, cache.db-shm      the database, by SQLite
    ROOT/lock                                      held while the database is made or replaced
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from streamload.cache.directory import refuse_what_is_not_ours
from streamload.cache.locks import exclusive
from streamload.derived.row_format import Row, seal, unseal
from streamload.errors import CacheCorrupt, CacheError, OptionError

logger = logging.getLogger("streamload")

KEY_BYTES = 32
DATABASE = "cache.db"
_FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
_WAIT_SECONDS = 20.0
_PAGE_BYTES, _SMALL_PAGE_BYTES = 16384, 4096
_SMALL_LIMIT_BYTES = 64 << 20
_LOG_SHARE = 16
"""A sixteenth of the limit is for the log."""
_MOST_LOG_BYTES = 8 << 20
_ASKED_AT_ONCE = 500
"""SQLite allows 999 values in a statement."""
_TOUCH_SECONDS = 10.0
_FULL_ENOUGH = 0.7
"""From this part of the limit on it is noted when rows are read."""
_RAW = 1  # diskcache's MODE_RAW
_SAID: set[str] = set()


@dataclass(slots=True)
class RowCounts:
    """What happened to rows, in this process.

    Attributes:
        hits: rows that were read.
        misses: rows that were not there.
        stored: rows that were written.
        corrupt: rows or databases that failed a check, and count as not there.
        evicted: rows that were deleted to make room.
        refused: rows that were not written: no room, a read-only or full disk.
        mismatches: rows that were found to be of another input.
        builds: modules that were built.
        rows_computed: by modules, for want of a row.
        bytes_read: of rows.
        bytes_written: of rows.
        read_seconds: reading, checks included.
        compute_seconds: computing what was missing.
        store_seconds: writing.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    corrupt: int = 0
    evicted: int = 0
    refused: int = 0
    mismatches: int = 0
    builds: int = 0
    rows_computed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    compute_seconds: float = 0.0
    store_seconds: float = 0.0

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@functools.cache
def _diskcache() -> Any:
    """The library, or the fork of it that is kept."""
    for name in ("diskcache", "diskcache_community"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise OptionError("rows are kept by diskcache, which isn't installed: pip install diskcache")


@functools.cache
def _bytes_disk() -> type:
    """A `Disk` of diskcache's for keys and values that are bytes: what isn't is refused, never unpickled."""
    library = _diskcache()

    class BytesDisk(library.Disk):  # type: ignore[misc, name-defined]
        def put(self, key: Any) -> tuple[Any, bool]:
            if type(key) is not bytes:
                raise TypeError(f"a key is bytes, got {type(key).__name__}")
            return sqlite3.Binary(key), True

        def get(self, key: Any, raw: Any) -> bytes:
            if not raw or type(key) is not bytes:
                raise CacheCorrupt("a key in the database isn't bytes")
            return key

        def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, None, Any]:
            if type(value) is not bytes or read:
                raise TypeError(f"a row is bytes, got {type(value).__name__}")
            return 0, _RAW, None, sqlite3.Binary(value)

        def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> bytes:
            if mode != _RAW or filename is not None or type(value) is not bytes or read:
                raise CacheCorrupt("a value in the database isn't bytes")
            return value

        def remove(self, file_path: str) -> None:
            """Nothing is kept in files of its own, so none is deleted."""

    return BytesDisk


class Rows:
    """The rows of one directory. Safe among threads and processes; a forked child opens its own connections.

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
        self._opened: tuple[int, _Opened] | None = None
        self._left: list[_Opened] = []  # of a parent process: neither used nor closed here
        self._touched: set[bytes] = set()
        self._touched_at = time.monotonic()
        self._fills_up = (0.0, False)
        self._lock = threading.RLock()
        try:
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
        return sum(_size(self.root / name) for name in _FILES)

    @property
    def limit_bytes(self) -> int:
        """What they may take."""
        return self._limit(self.used_bytes)

    def read(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows that are there and whole, of some keys of 32 bytes each."""
        return {key: row for key, (row, _) in self.read_sealed(keys).items()}

    def read_sealed(self, keys: Sequence[bytes]) -> dict[bytes, tuple[Row, bytes]]:
        """The same, each with its bytes as they are stored."""
        found: dict[bytes, tuple[Row, bytes]] = {}
        for at in range(0, len(keys), _ASKED_AT_ONCE):
            some = keys[at : at + _ASKED_AT_ONCE]
            for key, data in self._attempt(functools.partial(_select, keys=some), []):
                try:
                    found[key] = (unseal(key, data), data)
                except CacheCorrupt as exc:
                    self.counts.corrupt += 1
                    _say_once(f"{self.root}: {exc}; it is computed again")
        if found:
            self._touch(found)
        return found

    def write(self, rows: Sequence[tuple[bytes, bytes]], label: str) -> int:
        """Store sealed rows, as many as there is room for; older ones go.

        Args:
            rows: keys and rows (`row_format.seal`).
            label: what they can be listed and cleared by.

        Returns:
            how many are stored now.
        """
        stored = 0
        limit_bytes = self.limit_bytes
        for some in _in_portions(rows, _log_bytes(limit_bytes)):
            stored += self._attempt(
                lambda opened, some=some: self._store(opened, some, label, limit_bytes), 0
            )
        self.counts.refused += len(rows) - stored
        return stored

    def read_note(self, key: bytes) -> bytes | None:
        """A note under a key of its own length, checked; None: there is none."""
        found = self._attempt(functools.partial(_select, keys=[key]), [])
        with contextlib.suppress(CacheCorrupt):
            return next((bytes(unseal(key, data).body) for _, data in found), None)
        return None

    def write_note(self, key: bytes, text: bytes, label: str) -> None:
        """Store a note."""
        self.write([(key, seal(key, b"", text, 0))], label)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete rows."""
        self._attempt(lambda opened: opened.execute_many("DELETE FROM Cache WHERE key = ?", keys), None)

    def labels(self) -> dict[str, list[bytes]]:
        """The keys of all rows, by label."""
        found: dict[str, list[bytes]] = {}
        for label, key in self._attempt(_select_labels, []):
            found.setdefault(label, []).append(key)
        return found

    def bytes_of(self, label: str) -> int:
        """What the rows of a label take."""
        return int(self._attempt(functools.partial(_bytes_of, label=label), 0))

    def clear(self, label: str | None = None) -> int:
        """Delete the rows of a label, or all; what isn't of the database stays.

        Returns:
            how many there were.
        """
        return int(self._attempt(functools.partial(_clear, label=label), 0))

    def flush(self) -> None:
        """Note when the rows were read that were read since it was noted last."""
        with self._lock:
            keys, self._touched = list(self._touched), set()
            self._touched_at = time.monotonic()
        if keys:
            self._attempt(lambda opened: opened.touch(keys), None)

    def close(self) -> None:
        """Close the connections of this process; once is enough."""
        with self._lock:
            opened, self._opened = self._opened, None
            self._touched = set()
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()

    def _touch(self, keys: Any) -> None:
        now = time.monotonic()
        looked_at, fills_up = self._fills_up
        if now > looked_at + 1.0:
            fills_up = self.used_bytes > _FULL_ENOUGH * self.limit_bytes
            self._fills_up = (now, fills_up)
        if not fills_up:
            return
        with self._lock:
            self._touched.update(keys)
            is_due = time.monotonic() - self._touched_at > _TOUCH_SECONDS
        if is_due:
            self.flush()

    def _store(
        self, opened: _Opened, rows: Sequence[tuple[bytes, bytes]], label: str, limit_bytes: int
    ) -> int:
        self.flush()
        with opened.cache.transact():
            evicted = opened.make_room(sum(len(data) for _, data in rows), len(rows), limit_bytes)
            if evicted is None:
                _say_once(
                    f"{self.root}: a limit of {limit_bytes:,} bytes has no room for rows: none are stored"
                )
                return 0
            self.counts.evicted += evicted
            for key, data in rows:
                opened.cache.set(key, data, tag=label)
        return len(rows)

    def _attempt(self, action: Callable[[_Opened], Any], otherwise: Any) -> Any:
        """Do something with the database; if it can't be done say so once, and go on without.

        A database that is broken is replaced by an empty one.
        """
        for _ in range(2):
            opened = None
            try:
                opened = self._open()
                return action(opened)
            except (OSError, sqlite3.Error, _diskcache().Timeout) as exc:
                if not _is_broken(exc):
                    _say_once(f"{self.root}: rows can't be read or stored for now: {exc!r}")
                    self.close()  # a transaction that failed at its end would stand in the way
                    return otherwise
                self.counts.corrupt += 1
                _say_once(f"{self.root}: the database is broken ({exc}): it is replaced by an empty one")
                self._replace(opened)
        return otherwise

    def _open(self) -> _Opened:
        opened = self._opened
        if opened is not None and opened[0] == os.getpid():
            return opened[1]
        with self._lock:
            opened = self._opened
            if opened is not None and opened[0] == os.getpid():
                return opened[1]
            if opened is not None:
                self._left.append(opened[1])
                self._touched = set()
            refuse_what_is_not_ours(self.root)
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_what_is_not_ours(self.root)
            with exclusive(self.root / "lock"):
                fresh = self._make()
            self._opened = (os.getpid(), fresh)
            return fresh

    def _make(self) -> _Opened:
        if any((self.root / name).is_symlink() for name in _FILES):
            raise CacheError(f"{self.root} has a symbolic link in place of a database: it isn't followed")
        try:
            return _Opened(self.root, self.limit_bytes)
        except sqlite3.Error as exc:
            if not _is_broken(exc):
                raise
            self.counts.corrupt += 1
            _say_once(f"{self.root}: the database is broken ({exc}): it is replaced by an empty one")
            _unlink(self.root)
            return _Opened(self.root, self.limit_bytes)

    def _replace(self, opened: _Opened | None) -> None:
        with self._lock:
            self._opened = None
            with exclusive(self.root / "lock"):
                if opened is None or opened.is_current():
                    _unlink(self.root)
            if opened is not None:
                opened.close()


class _Opened:
    """The database as one process has it open: diskcache's connections, and one a thread for reading."""

    def __init__(self, root: Path, limit_bytes: int):
        self._path = root / DATABASE
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        page_bytes = _SMALL_PAGE_BYTES if limit_bytes < _SMALL_LIMIT_BYTES else _PAGE_BYTES
        if not self._path.exists():
            _create(self._path, page_bytes)
        self.cache = _diskcache().Cache(
            str(root),
            timeout=_WAIT_SECONDS,
            disk=_bytes_disk(),
            eviction_policy="least-recently-used",  # for its index: what goes is decided here
            cull_limit=0,
            statistics=0,
            tag_index=0,
            sqlite_auto_vacuum=0,
            sqlite_cache_size=-1024,
            sqlite_mmap_size=0,
            sqlite_journal_size_limit=0,
            sqlite_wal_autocheckpoint=max(1, _log_bytes(limit_bytes) // page_bytes),
        )
        self._status = self._path.stat()
        self.execute("SELECT count(*) FROM (SELECT key, raw, tag, mode, filename, value FROM Cache LIMIT 1)")

    def is_current(self) -> bool:
        """Whether the file is still the one that was opened."""
        with contextlib.suppress(OSError):
            return os.path.samestat(self._path.stat(), self._status)
        return False

    @property
    def connection(self) -> sqlite3.Connection:
        """This thread's."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(
                self._path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False
            )
            connection.execute("PRAGMA cache_size = -1024")
            connection.execute("PRAGMA synchronous = NORMAL")
            self._local.connection = connection
            self._connections.append(connection)
        return connection

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of an answer."""
        return self.connection.execute(statement, values).fetchall()

    def execute_many(self, statement: str, keys: Sequence[bytes], *before: Any) -> None:
        """A statement for each key, in one transaction."""
        with self._transaction() as connection:
            connection.executemany(statement, [(*before, key) for key in keys])

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that rows were read now."""
        self.execute_many("UPDATE Cache SET access_time = ? WHERE key = ?", keys, time.time())

    def make_room(self, new_bytes: int, count: int, limit_bytes: int) -> int | None:
        """Delete the rows that were not read for longest, within a transaction of `cache`.

        Returns:
            how many; None: there is no room for so much in an empty database.
        """
        (page_bytes,), (pages,), (free,) = (
            self.execute(f"PRAGMA {name}")[0] for name in ("page_size", "page_count", "freelist_count")
        )
        log_bytes = max(_log_bytes(limit_bytes), _size(self._path.with_name(_FILES[1])))
        fixed_bytes = log_bytes + _size(self._path.with_name(_FILES[2]))
        # Each row has its key in an index, too; a page may be half empty after rows went.
        needed = (new_bytes + 200 * count) * page_bytes // (page_bytes - 200) + 2 * page_bytes
        over = (pages - free) * page_bytes + needed + fixed_bytes - limit_bytes
        if over <= 0:
            return 0
        if needed + fixed_bytes + 10 * page_bytes > limit_bytes:
            return None
        evicted, freed = 0, 0
        victims = "SELECT key, length(value) FROM Cache ORDER BY access_time, rowid"
        for key, size in self.connection.execute(victims):
            if freed > over + over // 8:
                break
            self.cache.delete(key)
            evicted, freed = evicted + 1, freed + size
        return evicted

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
        with contextlib.suppress(sqlite3.Error):
            self.cache.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")


def _create(path: Path, page_bytes: int) -> None:
    """Make an empty database whose pages have a size, which can't be changed later."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, isolation_level=None)
    with contextlib.closing(connection):
        connection.execute(f"PRAGMA page_size = {page_bytes}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE IF NOT EXISTS Settings (key TEXT NOT NULL UNIQUE, value)")


def _select(opened: _Opened, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    marks = ",".join("?" * len(keys))
    rows = opened.execute(
        f"SELECT key, value FROM Cache WHERE key IN ({marks}) AND raw = 1 AND mode = {_RAW} "
        "AND filename IS NULL AND typeof(value) = 'blob'",
        keys,
    )
    return [(key, data) for key, data in rows if type(key) is bytes and type(data) is bytes]


def _select_labels(opened: _Opened) -> list[tuple[str, bytes]]:
    rows = opened.execute("SELECT tag, key FROM Cache WHERE length(key) = ? ORDER BY rowid", (KEY_BYTES,))
    return [(label, key) for label, key in rows if type(label) is str and type(key) is bytes]


def _bytes_of(opened: _Opened, label: str) -> int:
    ((size,),) = opened.execute("SELECT sum(length(value)) FROM Cache WHERE tag = ?", (label,))
    return size or 0


def _clear(opened: _Opened, label: str | None) -> int:
    condition, values = ("tag = ?", (label,)) if label is not None else ("1", ())
    ((count,),) = opened.execute(
        f"SELECT count(*) FROM Cache WHERE {condition} AND length(key) = {KEY_BYTES}", values
    )
    opened.execute(f"DELETE FROM Cache WHERE {condition}", values)
    with contextlib.suppress(sqlite3.OperationalError):  # somebody reads: the room is used again all the same
        opened.execute("VACUUM")
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return int(count)


def _in_portions(
    rows: Sequence[tuple[bytes, bytes]], most_bytes: int
) -> Iterator[Sequence[tuple[bytes, bytes]]]:
    """Rows in transactions that don't make the log longer than it should be."""
    some: list[tuple[bytes, bytes]] = []
    size = 0
    for row in rows:
        if some and size + len(row[1]) > most_bytes // 2:
            yield some
            some, size = [], 0
        some.append(row)
        size += len(row[1])
    if some:
        yield some


def _log_bytes(limit_bytes: int) -> int:
    return min(_MOST_LOG_BYTES, limit_bytes // _LOG_SHARE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_broken(error: Exception) -> bool:
    """Whether a file is no database of rows, and never will be."""
    text = str(error)
    return isinstance(error, sqlite3.IntegrityError) or (
        isinstance(error, sqlite3.DatabaseError)
        and any(words in text for words in ("malformed", "not a database", "no such table", "no such column"))
    )


def _unlink(root: Path) -> None:
    for name in _FILES:
        (root / name).unlink(missing_ok=True)


def _say_once(message: str) -> None:
    if message not in _SAID:
        _SAID.add(message)
        logger.warning("%s", message)
