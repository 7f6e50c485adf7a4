"""The file of a table of rows: SQLite in write-ahead mode, shared by all processes of a node.

    ROOT/rows.db, rows.db-wal, rows.db-shm   one table, of rows and notes
    ROOT/rows.db.broken                      a corrupt file that was set aside
    ROOT/lock                                held while the file is made, written to or set aside

Rows are appended in the order of their keys, so that a transaction writes few pages of the index. Readers
check what they read: a flipped bit costs rows but never yields a wrong one.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from streamload.cache.directory import check_owner, inode_of
from streamload.cache.locks import exclusive
from streamload.errors import CacheError

DATABASE = "rows.db"
FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
BROKEN = f"{DATABASE}.broken"
PAGE_BYTES = 16384
LOG_HEAD_BYTES, LOGGED_PAGE_BYTES = 32, PAGE_BYTES + 24
"""Bytes of the log's header and of a page in the log: https://www.sqlite.org/fileformat.html#the_write_ahead_log."""
_FORMAT = 3
_SCHEMA = """
CREATE TABLE rows (
    place INTEGER PRIMARY KEY, key BLOB UNIQUE, label TEXT, used INTEGER, stored INTEGER, value BLOB
);
CREATE INDEX rows_by_use ON rows (used) WHERE used IS NOT NULL;
"""
"""Times in milliseconds since the epoch; `used` is NULL for notes, which are never evicted."""
_WAIT_SECONDS = 20.0
_LOG_WAIT_MILLISECONDS = 200
_MOST_LOG_BYTES = 4 << 20
_PORTION_BYTES = 4 << 20
_FOR_NOW = (
    *("locked", "busy", "full", "disk I/O", "readonly", "read-only", "unable to open", "interrupted"),
    *("out of memory", "permission", "locking protocol"),
)
"""Error texts of a database that isn't corrupt, only unavailable for now."""
ERRORS = (OSError, sqlite3.Error, UnicodeDecodeError, OverflowError)
"""Errors of a corrupt or temporarily unavailable database."""


class Connection:
    """A connection of this process to the file in a directory. Threads take turns by `turn`.

    Opened on demand and closed before each fork: SQLite's locks belong to a process, and a child would
    inherit its parent's idea of them.

    Args:
        root: of the directory.
        writable: rows may be stored and deleted, and the file is made if it is missing.
    """

    def __init__(self, root: Path, *, writable: bool):
        self.root, self.turn = root, threading.RLock()
        self.inode: tuple[int, int] | None = None
        self._writable = writable
        self._sqlite: sqlite3.Connection | None = None
        _connections.add(self)

    def open(self) -> bool:
        """Open the current file; False: it doesn't exist, and this connection is read-only.

        Raises:
            CacheError: the directory isn't this user's alone, or the file is a link.
            sqlite3.Error: it is broken, or can't be used.
        """
        path = self.root / DATABASE
        if self._sqlite is not None and inode_of(path) == self.inode:
            return True
        self.close()
        check_owner(self.root)
        if any((self.root / name).is_symlink() for name in FILES):
            raise CacheError(f"{path} or its log is a symbolic link: it isn't followed")
        if self._writable:
            for directory in (self.root.parent, self.root):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_owner(self.root)
            with exclusive(self.root / "lock"):
                if not path.exists():
                    for name in FILES[
                        1:
                    ]:  # left by a file that was set aside: SQLite would take them for this one's
                        (self.root / name).unlink(missing_ok=True)
                    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
                self._connect(path)
        elif path.exists():
            self._connect(path)
        return self._sqlite is not None

    def _connect(self, path: Path) -> None:
        # SQLite creates a missing log unless the file is opened as immutable; without a log nobody writes.
        is_fixed = not os.access(self.root, os.W_OK) and not size_of(self.root / FILES[1])
        self.inode = inode_of(path)
        self._sqlite = sqlite3.connect(
            f"{path.absolute().as_uri()}?{'immutable=1' if is_fixed else 'mode=rw'}",
            uri=True,
            timeout=_WAIT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        self._sqlite.text_factory = bytes
        try:
            self._prepare()
            if inode_of(path) != self.inode:  # the log is opened by name, so it may belong to the next file
                raise sqlite3.OperationalError("busy: it was set aside just now")
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        assert self._sqlite is not None
        if not self.execute("SELECT 1 FROM sqlite_master LIMIT 1"):
            if not self._writable:  # it is being made
                self.close()
                return
            self.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            self.execute("PRAGMA journal_mode = WAL")
            self._sqlite.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_FORMAT}; COMMIT;")
        held_kib = 2048 if self._writable else 256  # the inner pages of an index fit in the latter
        self.execute(f"PRAGMA cache_size = -{held_kib}")
        self.execute(f"PRAGMA query_only = {not self._writable}")
        self.execute("PRAGMA synchronous = NORMAL")
        self.execute("PRAGMA wal_autocheckpoint = 0")
        if self.execute("PRAGMA user_version") != [(_FORMAT,)]:
            raise sqlite3.DatabaseError("it is of another format")
        self.execute("SELECT place, key, label, used, stored, value FROM rows LIMIT 0")

    def open_empty(self) -> None:
        """Connect to an empty table in memory in place of a missing file."""
        self._sqlite = sqlite3.connect(":memory:")
        self._sqlite.executescript(_SCHEMA)

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query and return all its rows."""
        assert self._sqlite is not None
        return self._sqlite.execute(statement, values).fetchall()

    def change(self, statement: str, values: Iterable[Sequence[Any]]) -> int:
        """Run a statement once per tuple of parameters; returns the number of changed rows."""
        assert self._sqlite is not None
        before = self._sqlite.total_changes
        self._sqlite.executemany(statement, values)
        return self._sqlite.total_changes - before

    def parts(self, statement: str, after: Any, *values: Any) -> Iterator[list[tuple[Any, ...]]]:
        """Run a query in parts of a few MB, so that a long read doesn't keep others from emptying the log.

        The statement selects rows after a place in ascending order, the place first and the bytes last.
        """
        assert self._sqlite is not None
        while True:
            part: list[tuple[Any, ...]] = []
            size = 0
            with contextlib.closing(self._sqlite.execute(statement, (after, *values))) as cursor:
                for row in cursor:
                    part.append(row)
                    size += 100 + (len(row[-1]) if type(row[-1]) is bytes else 0)
                    if size > _PORTION_BYTES:
                        break
            if not part:
                return
            after = part[-1][0]
            yield part

    @contextlib.contextmanager
    def transaction(self, most_log_bytes: int = _MOST_LOG_BYTES) -> Iterator[None]:
        """Change rows in the block as the only writer.

        Args:
            most_log_bytes: a longer log is emptied first.

        Raises:
            sqlite3.OperationalError: the log can't be emptied for now because others read it.
        """
        with exclusive(self.root / "lock"):
            if size_of(self.root / FILES[1]) > most_log_bytes:
                self._empty_log()
            self.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # after some errors, SQLite has rolled back itself
                    self.execute("ROLLBACK")
                raise
            self.execute("COMMIT")

    def _empty_log(self) -> None:
        self.execute(f"PRAGMA busy_timeout = {_LOG_WAIT_MILLISECONDS}")
        try:
            if self.execute("PRAGMA wal_checkpoint(TRUNCATE)")[0][0]:
                raise sqlite3.OperationalError("the log is busy: others read")
        finally:
            self.execute(f"PRAGMA busy_timeout = {int(_WAIT_SECONDS * 1000)}")

    def shrink(self) -> None:
        """Return the space of deleted rows to the disk."""
        with contextlib.suppress(sqlite3.OperationalError):  # others read: later rows reuse the space anyway
            self.execute("VACUUM")
            self.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connection; `open` opens it again. Idempotent."""
        connection, self._sqlite = self._sqlite, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


def set_aside(root: Path, inode: tuple[int, int] | None) -> None:
    """Rename a corrupt file unless another process already has; the next `open` creates an empty one.

    Processes that have the file open keep using it until their next read. SQLite knows the log by name, and
    leaves it alone when it closes a renamed file.

    Args:
        inode: of the corrupt file.
    """
    with exclusive(root / "lock"):
        if inode is not None and inode_of(root / DATABASE) == inode:
            (root / DATABASE).rename(root / BROKEN)
            for name in FILES[1:]:
                (root / name).unlink(missing_ok=True)


def is_broken(error: Exception) -> bool:
    """True if an error means that the file is corrupt rather than unavailable for now."""
    if isinstance(error, (UnicodeDecodeError, OverflowError)):
        return True
    if not isinstance(error, sqlite3.DatabaseError) or isinstance(
        error, (sqlite3.ProgrammingError, sqlite3.NotSupportedError)
    ):
        return False
    return not any(words in str(error) for words in _FOR_NOW)


def used_bytes(root: Path) -> int:
    """Bytes of the files of a directory."""
    return sum(size_of(root / name) for name in (*FILES, BROKEN))


def size_of(path: Path) -> int:
    """Size of a file; 0 if it doesn't exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_held: list[Connection] = []


def _before_fork() -> None:
    """Close all connections of this process before it forks, and block their use until it has."""
    _held[:] = _connections
    for connection in _held:
        connection.turn.acquire()
        connection.close()


def _after_fork() -> None:
    for connection in _held:
        connection.turn.release()
    _held.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
