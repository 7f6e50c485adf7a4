"""The file of a table of rows: SQLite in write-ahead mode, shared by all processes of a node.

    ROOT/rows.db, rows.db-wal, rows.db-shm   one table, of rows and notes
    ROOT/rows.db.broken                      a file that wasn't a table of rows any more, set aside
    ROOT/lock                                held while the file is made, written to or set aside

Rows are appended in the order of their keys, so that a transaction writes few pages of the index. All that is
read is checked by its reader: a flipped bit anywhere costs rows, and never gives a wrong one.
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
"""The head of the log, and what a page takes in it: https://www.sqlite.org/fileformat.html#the_write_ahead_log."""
_FORMAT = 3
_SCHEMA = """
CREATE TABLE rows (
    place INTEGER PRIMARY KEY, key BLOB UNIQUE, label TEXT, used INTEGER, stored INTEGER, value BLOB
);
CREATE INDEX rows_by_use ON rows (used) WHERE used IS NOT NULL;
"""
"""Times in milliseconds since the epoch; of a note, which is never evicted, `used` is NULL."""
_WAIT_SECONDS = 20.0
_LOG_WAIT_MILLISECONDS = 200
_MOST_LOG_BYTES = 4 << 20
_PORTION_BYTES = 4 << 20
_FOR_NOW = (
    *("locked", "busy", "full", "disk I/O", "readonly", "read-only", "unable to open", "interrupted"),
    *("out of memory", "permission", "locking protocol"),
)
"""Words of errors that a database has which isn't broken."""
ERRORS = (OSError, sqlite3.Error, UnicodeDecodeError, OverflowError)
"""Errors of a database that is broken, or can't be used for now."""


class Connection:
    """A connection of this process to the file in a directory. Threads take turns by `turn`.

    It is opened when it is needed and closed before each fork: SQLite's locks are those of a process, and a
    child would copy what its parent knows of them.

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
        """Open the file that is there now; False: there is none, and it is only read.

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
                    for name in FILES[1:]:  # of one that was set aside: they would be taken for its own
                        (self.root / name).unlink(missing_ok=True)
                    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
                self._connect(path)
        elif path.exists():
            self._connect(path)
        return self._sqlite is not None

    def _connect(self, path: Path) -> None:
        # SQLite makes a log if there is none, unless the file is immutable; without a log nobody writes.
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
            if inode_of(path) != self.inode:  # its log, which is opened by name, may be of the next file
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
        """Be connected to an empty table in memory, in place of a file that isn't there."""
        self._sqlite = sqlite3.connect(":memory:")
        self._sqlite.executescript(_SCHEMA)

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of an answer."""
        assert self._sqlite is not None
        return self._sqlite.execute(statement, values).fetchall()

    def change(self, statement: str, values: Iterable[Sequence[Any]]) -> int:
        """Execute a statement with several values; returns how many rows it changed."""
        assert self._sqlite is not None
        before = self._sqlite.total_changes
        self._sqlite.executemany(statement, values)
        return self._sqlite.total_changes - before

    def parts(self, statement: str, after: Any, *values: Any) -> Iterator[list[tuple[Any, ...]]]:
        """An answer in parts of some MB, so that no long reading keeps others from emptying the log.

        The statement selects rows after a place, in their order: the place first, the bytes last.
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
        """Change rows within the block, as the only one who does.

        Args:
            most_log_bytes: the log is emptied before if it is longer.

        Raises:
            sqlite3.OperationalError: it can't be emptied for now, as others read.
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
        """Give the room of deleted rows back to the disk."""
        with contextlib.suppress(sqlite3.OperationalError):  # somebody reads: the room is used again anyway
            self.execute("VACUUM")
            self.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close it; it may be opened again. Idempotent."""
        connection, self._sqlite = self._sqlite, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


def set_aside(root: Path, inode: tuple[int, int] | None) -> None:
    """Rename a file that is broken, unless another process has; the next one that is opened is empty.

    Whoever has it open goes on with it until it looks for rows again. SQLite leaves the log alone, which it
    knows by name, when it closes a file that was renamed.

    Args:
        inode: of the file that was found to be broken.
    """
    with exclusive(root / "lock"):
        if inode is not None and inode_of(root / DATABASE) == inode:
            (root / DATABASE).rename(root / BROKEN)
            for name in FILES[1:]:
                (root / name).unlink(missing_ok=True)


def is_broken(error: Exception) -> bool:
    """True if a file is no database of rows, and never will be."""
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
    """The size of a file; 0 of one that isn't there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_held: list[Connection] = []


def _before_fork() -> None:
    """Hold all connections of this process while it forks: a child inherits none that is open."""
    _held[:] = _connections
    for connection in _held:
        connection.turn.acquire()
        connection.close()


def _after_fork() -> None:
    for connection in _held:
        connection.turn.release()
    _held.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
