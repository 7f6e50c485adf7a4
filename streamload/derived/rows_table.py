"""The database of rows by SQLite alone: reading, listing, deleting. What writes is in rows_database.py.

key     32 bytes, a fingerprint and the digest of a key; or a note's, of another length (parts.py)
value   a sealed row (row_seal.py)
tag     the label; `store_time`, and `access_time`, which is noted while the database is nearly full
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from streamload.errors import CacheError

KEY_BYTES = 32
FINGERPRINT_BYTES = 16
DATABASE = "cache.db"
FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
WAIT_SECONDS = 20.0
RAW = 1
"""diskcache's MODE_RAW: the value is what it is, nothing that would be unpickled."""
_PAGE_BYTES = 4 << 20
_BROKEN = (
    *("malformed", "not a database", "no such table", "no such column"),
    *("unrecognized token", "syntax error"),  # of damaged names of settings, which diskcache puts into SQL
)
_EMPTY = """
    CREATE TABLE Cache
    (rowid INTEGER PRIMARY KEY, key, raw, store_time, access_time, tag, mode, filename, value)
"""


class Table:
    """The database as one process has it open, for one thread at a time.

    Args:
        path: of the database.
        connection: to it, in which every statement is a transaction.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection):
        self._path = path
        self.connection = connection

    @classmethod
    def open(cls, home: Path | None, *, writable: bool) -> Table:
        """Open a database as it is; it may be on a read-only disk, and others may write to it.

        Args:
            home: its directory; None: an empty database in memory.
            writable: to delete rows; else all that changes is refused.

        Raises:
            CacheError: it has to be written to for that, which isn't possible.
            sqlite3.Error: it is broken.
        """
        if home is None:
            connection = sqlite3.connect(":memory:", isolation_level=None)
            connection.execute(_EMPTY)
            return cls(Path(), connection)
        path = home / DATABASE
        is_fixed = not os.access(home, os.W_OK)
        if is_fixed and writable:
            raise CacheError(f"rows can't be deleted at {home}: the directory is read-only")
        # SQLite makes a log if there is none, unless the file is immutable; without a log nobody writes.
        how = "immutable=1" if is_fixed and not size_of(home / FILES[1]) else "mode=rw"
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{how}", uri=True, timeout=WAIT_SECONDS, isolation_level=None
        )
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        try:
            connection.execute(f"PRAGMA query_only = {int(not writable)}")
            connection.execute("SELECT key FROM Cache LIMIT 1").fetchall()
        except BaseException:
            connection.close()
            raise
        return cls(path, connection)

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of an answer."""
        return self.connection.execute(statement, values).fetchall()

    def execute_many(self, statement: str, values: Iterable[Sequence[Any]]) -> int:
        """A statement for each of some values, in one transaction; return how many rows it changed."""
        with self._transaction() as connection:
            return connection.executemany(statement, values).rowcount

    def pages(self, statement: str, after: Any, *values: Any) -> Iterator[list[tuple[Any, ...]]]:
        """An answer in parts of some MB, so that no long reading keeps others from emptying the log.

        Args:
            statement: selects rows after a place, in their order: the place first, the bytes last.
            after: the place.
            values: what else the statement needs.
        """
        while True:
            page: list[tuple[Any, ...]] = []
            size = 0
            with contextlib.closing(self.connection.execute(statement, (after, *values))) as cursor:
                for row in cursor:
                    page.append(row)
                    size += 100 + (len(row[-1]) if type(row[-1]) is bytes else 0)
                    if size > _PAGE_BYTES:
                        break
            if not page:
                return
            after = page[-1][0]
            yield page

    def shrink(self) -> None:
        """Give the room of deleted rows back to the disk."""
        with contextlib.suppress(sqlite3.OperationalError):  # somebody reads: the room is used again anyway
            self.execute("VACUUM")
            self.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close it; once is enough."""
        with contextlib.suppress(sqlite3.Error):
            self.connection.close()

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


def select_rows(opened: Table, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The keys and bytes of the rows that are there, unchecked; fewer than a thousand at once."""
    marks = ",".join("?" * len(keys))
    rows = opened.execute(
        f"SELECT key, value FROM Cache WHERE key IN ({marks}) AND raw = 1 AND mode = {RAW} "
        "AND filename IS NULL AND typeof(value) = 'blob'",
        keys,
    )
    return [(key, data) for key, data in rows if type(key) is bytes and type(data) is bytes]


def select_labels(opened: Table) -> list[tuple[str, bytes]]:
    """The labels and keys of all rows."""
    rows = opened.execute("SELECT tag, key FROM Cache WHERE length(key) = ? ORDER BY rowid", (KEY_BYTES,))
    return [(label, key) for label, key in rows if type(label) is str and type(key) is bytes]


def bytes_of(opened: Table, label: str) -> int:
    """The size of all that is stored under a label."""
    ((size,),) = opened.execute("SELECT sum(length(value)) FROM Cache WHERE tag = ?", (label,))
    return size or 0


def clear(opened: Table, label: str | None) -> int:
    """Delete what is stored under a label, or all; return how many rows that were."""
    condition, values = ("tag = ?", (label,)) if label is not None else ("1", ())
    ((count,),) = opened.execute(
        f"SELECT count(*) FROM Cache WHERE {condition} AND length(key) = {KEY_BYTES}", values
    )
    opened.execute(f"DELETE FROM Cache WHERE {condition}", values)
    opened.shrink()
    return int(count)


def numbers(root: Path) -> list[int]:
    """Of a directory's databases: the last is the one in use. Each has a directory of its own.

    A process that still has an old one open deletes its log by name when it closes it.
    """
    found = (entry.name for entry in os.scandir(root))
    return sorted(int(name) for name in found if name.isascii() and name.isdigit())


def refuse_links(home: Path) -> None:
    """Check that a database's directory and files are no links.

    Raises:
        CacheError: one is.
    """
    if any(path.is_symlink() for path in (home, *(home / name for name in FILES))):
        raise CacheError(f"{home} has a symbolic link in place of a database: it isn't followed")


def bytes_on_disk(home: Path) -> int:
    """What the files of a database take."""
    return sum(size_of(home / name) for name in FILES)


def size_of(path: Path) -> int:
    """The size of a file; 0 of one that isn't there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def is_broken(error: Exception) -> bool:
    """Whether a file is no database of rows, and never will be."""
    text = str(error)
    return isinstance(error, sqlite3.IntegrityError) or (
        isinstance(error, sqlite3.DatabaseError) and any(words in text for words in _BROKEN)
    )


def remove(home: Path) -> None:
    """Remove a database and its directory, if nothing else is in it; who has it open goes on with it."""
    for name in FILES:
        (home / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        home.rmdir()
