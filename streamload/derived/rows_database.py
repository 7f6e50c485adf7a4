"""The database of rows as one process has it open: made by diskcache, read and written by SQLite.

diskcache's own reading and writing is several statements a row, and unpickles what it finds; here a batch is
one statement, and what isn't bytes is refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamload.derived.rows_table import DATABASE, FILES, RAW, WAIT_SECONDS, Table, size_of
from streamload.errors import CacheCorrupt, OptionError

_LOG_WAIT_MILLISECONDS = 200
_PAGE_BYTES, _SMALL_PAGE_BYTES = 16384, 4096
_SMALL_LIMIT_BYTES = 64 << 20
_LOG_SHARE, _LARGE_LOG_SHARE = 8, 64
"""An eighth of the limit is for the log, up to `_LOG_BYTES`; of a large limit a part of 64."""
_PAGES_PER_ROW = 8
"""So many a transaction may write for a row and one that goes for it: its own, and those of indexes."""
_LOG_BYTES, _MOST_LOG_BYTES = 8 << 20, 64 << 20
_ROWS_A_STATEMENT, _BYTES_A_STATEMENT = 64, 256 << 10
"""A statement holds a copy of all of its rows."""
_READING_KIB, _WRITING_KIB = 256, 2048
"""Pages that are held in memory, by each connection of each worker. The inner pages of an index fit in the
first, and 1 MiB saves no time, as the system has the others. A transaction that changes more than the second
writes some of them more than once."""


@functools.cache
def diskcache() -> Any:
    """The library, or the fork of it that is kept."""
    for name in ("diskcache", "diskcache_community"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise OptionError("rows are kept by diskcache, which isn't installed: pip install diskcache")


@functools.cache
def _bytes_disk() -> type:
    """A `Disk` of diskcache's for keys and values that are bytes: what isn't is refused, never unpickled."""
    library = diskcache()

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
            return 0, RAW, None, sqlite3.Binary(value)

        def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> bytes:
            if mode != RAW or filename is not None or type(value) is not bytes or read:
                raise CacheCorrupt("a value in the database isn't bytes")
            return value

        def remove(self, file_path: str) -> None:
            """Nothing is kept in files of its own, so none is deleted."""

    return BytesDisk


class Database(Table):
    """The database as one process has it open, for one thread at a time.

    A child must not inherit it from a fork: SQLite's locks are those of a process, and what it knows of them
    would be copied. Nobody may write while it is opened.

    Args:
        home: the directory of the database.
        limit_bytes: by which the size of pages and of the log is chosen.
    """

    def __init__(self, home: Path, limit_bytes: int):
        path = home / DATABASE
        page_bytes = _page_bytes(limit_bytes)
        if not path.exists():
            _create(path, page_bytes)
        connection = sqlite3.connect(
            path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False
        )
        super().__init__(path, connection)
        try:
            self.execute(f"PRAGMA cache_size = -{_READING_KIB}")
            self.execute("PRAGMA synchronous = NORMAL")
            self.execute("PRAGMA wal_autocheckpoint = 0")  # by `shorten_log`
            self.shorten_log(limit_bytes)
            _lay_out(home, page_bytes, limit_bytes)  # its connections are of a thread, and closed
            self.shorten_log(limit_bytes)  # diskcache has written its settings
            self.execute("SELECT * FROM (SELECT key, raw, tag, mode, filename, value FROM Cache LIMIT 0)")
        except BaseException:
            self.connection.close()
            raise
        self._status = path.stat()

    def is_current(self) -> bool:
        """Whether the file is still the one that was opened."""
        with contextlib.suppress(OSError):
            return os.path.samestat(self._path.stat(), self._status)
        return False

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that rows were read now."""
        now = time.time()
        self.execute_many("UPDATE Cache SET access_time = ? WHERE key = ?", [(now, key) for key in keys])

    def store(self, rows: Sequence[tuple[bytes, Any]], label: str, limit_bytes: int) -> int | None:
        """Store rows in one transaction; those that were not read for longest go to make room.

        Args:
            rows: keys and bytes, or other buffers.
            label: of the rows.
            limit_bytes: of all that the database takes.

        Returns:
            how many went; None: there is no room for so much in an empty database, and nothing is stored.
        """
        now = time.time()
        self.execute(f"PRAGMA cache_size = -{_WRITING_KIB}")
        try:
            with self._transaction():
                evicted = self._make_room(sum(len(data) for _, data in rows), len(rows), limit_bytes)
                if evicted is None:
                    return None
                longest = max(len(data) for _, data in rows)
                count = min(_ROWS_A_STATEMENT, max(1, _BYTES_A_STATEMENT // longest))
                for at in range(0, len(rows), count):
                    some = rows[at : at + count]
                    values = [each for key, value in some for each in (key, now, now, label, value)]
                    self.connection.execute(_insert(len(some)), values)
        finally:
            self.execute(f"PRAGMA cache_size = -{_READING_KIB}")
        return evicted

    def _make_room(self, new_bytes: int, count: int, limit_bytes: int) -> int | None:
        (page_bytes,), (pages,), (free,) = (
            self.execute(f"PRAGMA {name}")[0] for name in ("page_size", "page_count", "freelist_count")
        )
        fixed_bytes = log_bytes(limit_bytes) + size_of(self._path.with_name(FILES[2]))
        # Each row has its key in an index, too; a page may be half empty after rows went.
        needed = (new_bytes + 200 * count) * page_bytes // (page_bytes - 200) + 2 * page_bytes
        over = (pages - free) * page_bytes + needed + fixed_bytes - limit_bytes
        if over <= 0:
            return 0
        if needed + fixed_bytes + 10 * page_bytes > limit_bytes:
            return None
        victims, freed = [], 0
        select = "SELECT rowid, length(value) FROM Cache ORDER BY access_time, rowid"
        with contextlib.closing(self.connection.execute(select)) as oldest:
            for rowid, size in oldest:
                if freed > over + over // 8:
                    break
                victims.append((rowid,))
                freed += size
        self.connection.executemany("DELETE FROM Cache WHERE rowid = ?", victims)
        return len(victims)

    def shorten_log(self, limit_bytes: int, *, at_rest: bool = False) -> bool:
        """Empty the log if it is longer than it should be, as somebody always reads; no other may write now.

        Args:
            limit_bytes: of all that the database takes.
            at_rest: no transaction follows at once.

        Returns:
            whether it is short now.
        """
        most_bytes = min(log_bytes(limit_bytes), _LOG_BYTES) if at_rest else log_bytes(limit_bytes)
        if size_of(self._path.with_name(FILES[1])) <= most_bytes // 2:
            return True
        self.execute(f"PRAGMA busy_timeout = {_LOG_WAIT_MILLISECONDS}")
        try:
            return bool(self.execute("PRAGMA wal_checkpoint(TRUNCATE)")[0][0] == 0)
        finally:
            self.execute(f"PRAGMA busy_timeout = {int(WAIT_SECONDS * 1000)}")


@functools.cache
def _insert(rows: int) -> str:
    """A statement for so many rows. An update, as by diskcache, keeps what triggers count right."""
    values = ", ".join([f"(?, 1, ?, ?, ?, {RAW}, ?)"] * rows)  # Python 3.12.3 warns of numbered ones
    columns = ("store_time", "access_time", "tag", "mode", "value")
    update = ", ".join(f"{name} = excluded.{name}" for name in columns)
    return (
        f"INSERT INTO Cache (key, raw, store_time, access_time, tag, mode, value) VALUES {values} "
        f"ON CONFLICT (key, raw) DO UPDATE SET {update}, filename = NULL"
    )


def _lay_out(home: Path, page_bytes: int, limit_bytes: int) -> Any:
    """Make diskcache's tables, if they aren't there; return its view of them, without an open connection.

    Raises:
        sqlite3.Error: they can't be made, or its settings are damaged.
    """
    try:
        cache = diskcache().Cache(
            str(home),
            timeout=WAIT_SECONDS,
            disk=_bytes_disk(),
            eviction_policy="least-recently-used",  # for its index: what goes is decided here
            cull_limit=0,
            statistics=0,
            tag_index=0,
            sqlite_auto_vacuum=0,
            sqlite_cache_size=-1024,
            sqlite_mmap_size=0,
            sqlite_journal_size_limit=0,
            sqlite_wal_autocheckpoint=max(1, log_bytes(limit_bytes) // page_bytes),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        raise sqlite3.DatabaseError(f"malformed settings: {exc!r}") from exc
    cache.close()
    return cache


def _create(path: Path, page_bytes: int) -> None:
    """Make an empty database whose pages have a size, which can't be changed later."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, isolation_level=None)
    with contextlib.closing(connection):
        connection.execute(f"PRAGMA page_size = {page_bytes}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE IF NOT EXISTS Settings (key TEXT NOT NULL UNIQUE, value)")


def _page_bytes(limit_bytes: int) -> int:
    return _SMALL_PAGE_BYTES if limit_bytes < _SMALL_LIMIT_BYTES else _PAGE_BYTES


def rows_at_once(limit_bytes: int) -> int:
    """How many rows a transaction may have so that the log stays as long as it should be."""
    return max(1, log_bytes(limit_bytes) // _page_bytes(limit_bytes) // _PAGES_PER_ROW)


def log_bytes(limit_bytes: int) -> int:
    """What of a limit is for the log."""
    return max(
        min(_LOG_BYTES, limit_bytes // _LOG_SHARE), min(_MOST_LOG_BYTES, limit_bytes // _LARGE_LOG_SHARE)
    )
