"""The database of a directory of rows: SQLite, by a schema of our own, shared by all processes of a node.

rows          place, used, stored, fingerprint, key, value: one sealed row (sealed.py) under 32 bytes, a
              fingerprint and the digest of a key; times in milliseconds since the epoch
fingerprints  id, digest, label, rows, size, stored, used: how many rows each has, kept by whatever changes
              rows
notes         key, label, stored, value: sealed texts, such as the parts of a fingerprint (sealed.py)

Rows are appended in the order of their keys, so that a transaction writes few pages of the index. All that is
read is checked by its reader: a flipped bit anywhere costs rows, and never gives a wrong one.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamload.cache.directory import inode_of
from streamload.errors import CacheError

KEY_BYTES, FINGERPRINT_BYTES = 32, 16
DATABASE = "rows.db"
FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
WAIT_SECONDS = 20.0
_FORMAT = 2
_SCHEMA = """
CREATE TABLE rows (
    place INTEGER PRIMARY KEY, used INTEGER, stored INTEGER, fingerprint INTEGER, key BLOB, value BLOB
);
CREATE UNIQUE INDEX rows_by_key ON rows (key);
CREATE INDEX rows_by_use ON rows (used);
CREATE TABLE fingerprints (
    id INTEGER PRIMARY KEY, digest BLOB, label TEXT, rows INTEGER, size INTEGER, stored INTEGER, used INTEGER,
    UNIQUE (digest, label)
);
CREATE TABLE notes (key BLOB PRIMARY KEY, label TEXT, stored INTEGER, value BLOB) WITHOUT ROWID;
"""
_PAGE_BYTES, _SMALL_PAGE_BYTES = 16384, 4096
_SMALL_LIMIT_BYTES = 64 << 20
_LOG_SHARE, _LARGE_LOG_SHARE = 8, 64
"""An eighth of the limit is for the log, up to `_LOG_BYTES`; of a large limit a part of 64."""
_LOG_BYTES, _MOST_LOG_BYTES = 8 << 20, 128 << 20
_LOG_WAIT_MILLISECONDS = 200
_PAGES_PER_ROW = 8
"""So many a transaction may write for a row and one that goes for it: its own, and those of indexes."""
_READING_KIB, _LEAST_WRITING_KIB, _MOST_WRITING_KIB = 256, 2048, 8192
"""Pages that are held in memory by each connection. The inner pages of an index fit in the first; writing has
as much as the rows of the transaction take, within these."""
_VALUES = 500
"""SQLite allows 999 values in a statement."""
_AT_ONCE = 1000
"""Rows that a transaction deletes, as others store meanwhile."""
_PORTION_BYTES = 4 << 20
_FOR_NOW = (
    *("locked", "busy", "full", "disk I/O", "readonly", "read-only", "unable to open", "interrupted"),
    *("out of memory", "permission", "locking protocol"),
)
"""Words of errors that a database has which isn't broken."""


@dataclass(frozen=True, slots=True)
class FingerprintRows:
    """The rows of one fingerprint under one label."""

    number: int  # by which rows refer to it
    label: str
    fingerprint: bytes
    rows: int
    size_bytes: int  # of the rows, without what the database takes beside them
    stored_at: float  # when a row was last stored, in seconds since the epoch
    read_at: float | None  # when a row was last read after it was stored; None: none was, or it wasn't noted

    @property
    def used_at(self) -> float:
        """When a row was last stored, or read as far as that was noted."""
        return max(self.stored_at, self.read_at or 0.0)


class Database:
    """A database as one process has it open, for one thread at a time.

    A child must not inherit it from a fork: SQLite's locks are those of a process, and what it knows of them
    would be copied.
    """

    def __init__(self, path: Path, uri: str):
        self.path = path
        self.connection = sqlite3.connect(
            uri, uri=True, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False
        )
        self.connection.text_factory = bytes
        self._inode = inode_of(path) if path.name else None

    @classmethod
    def open(cls, home: Path, limit_bytes: int) -> Database:
        """Open the database of a directory to read and store rows; made if it is missing.

        Nobody may write while it is opened.

        Args:
            limit_bytes: of all that the database takes; decides the size of its pages and log.

        Raises:
            sqlite3.Error: it is broken, or can't be used.
        """
        path = home / DATABASE
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        with _closed_unless_used(cls(path, f"{path.absolute().as_uri()}?mode=rw")) as opened:
            if not path.stat().st_size:
                opened.execute(f"PRAGMA page_size = {page_bytes(limit_bytes)}")
                opened.execute("PRAGMA journal_mode = WAL")
                opened.connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_FORMAT}; COMMIT;")
            for pragma in (f"cache_size = -{_READING_KIB}", "synchronous = NORMAL", "wal_autocheckpoint = 0"):
                opened.execute(f"PRAGMA {pragma}")
            opened.shorten_log(limit_bytes)
            opened._check()
        return opened

    @classmethod
    def inspect(cls, home: Path | None, *, writable: bool = False) -> Database:
        """Open a database as it is; it may be on a read-only disk, and others may write to it.

        Args:
            home: its directory; None: an empty database in memory.
            writable: to delete rows; else all that changes is refused.

        Raises:
            CacheError: it has to be written to for that, which isn't possible.
            sqlite3.Error: it is broken.
        """
        if home is None:
            empty = cls(Path(), "file::memory:")
            empty.connection.executescript(_SCHEMA)
            return empty
        is_fixed = not os.access(home, os.W_OK)
        if is_fixed and writable:
            raise CacheError(f"rows can't be deleted at {home}: the directory is read-only")
        # SQLite makes a log if there is none, unless the file is immutable; without a log nobody writes.
        how = "immutable=1" if is_fixed and not size_of(home / FILES[1]) else "mode=rw"
        path = home / DATABASE
        with _closed_unless_used(cls(path, f"{path.absolute().as_uri()}?{how}")) as opened:
            opened.execute(f"PRAGMA query_only = {int(not writable)}")
            opened._check()
        return opened

    def _check(self) -> None:
        """Raise sqlite3.DatabaseError unless it has the tables of this version."""
        if self.execute("PRAGMA user_version") != [(_FORMAT,)]:
            raise sqlite3.DatabaseError("it is of another format")
        self.execute("SELECT place, used, stored, fingerprint, key, value FROM rows LIMIT 0")
        self.execute("SELECT id, digest, label, rows, size, stored, used FROM fingerprints LIMIT 0")
        self.execute("SELECT key, label, stored, value FROM notes LIMIT 0")

    def is_current(self) -> bool:
        """True if the file is still the one that was opened."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._inode

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of an answer."""
        return self.connection.execute(statement, values).fetchall()

    def close(self) -> None:
        """Close it; once is enough."""
        with contextlib.suppress(sqlite3.Error):
            self.connection.close()

    # Rows by their keys.

    def read(self, keys: Sequence[bytes]) -> list[tuple[Any, Any]]:
        """The keys and bytes of the rows that are there, unchecked."""
        if len(keys) == 1:
            return self.execute("SELECT key, value FROM rows WHERE key = ?", keys)
        pairs: list[tuple[Any, Any]] = []
        for part in _portions(keys):
            pairs += self.execute(f"SELECT key, value FROM rows WHERE key IN ({_marks(part)})", part)
        return pairs

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that rows were read now."""
        used = _milliseconds()
        with self._transaction():
            self.connection.executemany(
                "UPDATE rows SET used = ? WHERE key = ?", [(used, key) for key in sorted(keys)]
            )
            digests = {key[:FINGERPRINT_BYTES] for key in keys}
            self.connection.executemany(
                "UPDATE fingerprints SET used = ? WHERE digest = ?", [(used, digest) for digest in digests]
            )

    def store(self, rows: Iterable[tuple[bytes, Any]], label: str, limit_bytes: int) -> int | None:
        """Store rows in one transaction; those that were not read for longest go to make room.

        Args:
            limit_bytes: of all that the database takes.

        Returns:
            how many went; None: there is no room for so much in an empty database, and nothing is stored.
        """
        ordered = sorted(dict(rows).items())
        stored = _milliseconds()
        size_bytes = sum(len(data) for _, data in ordered)
        held_kib = min(_MOST_WRITING_KIB, max(_LEAST_WRITING_KIB, size_bytes >> 10))
        self.execute(f"PRAGMA cache_size = -{held_kib}")
        try:
            with self._transaction():
                evicted = self._make_room(size_bytes, len(ordered), limit_bytes)
                if evicted is None:
                    return None
                ids = {digest: self._id(digest, label) for digest in {key[:16] for key, _ in ordered}}
                ((last,),) = self.execute("SELECT max(place) FROM rows")
                self._insert(
                    [
                        (place, stored, stored, ids[key[:16]], key, data)
                        for place, (key, data) in enumerate(ordered, (last or 0) + 1)
                    ]
                )
                self._count([(ids[key[:16]], len(data)) for key, data in ordered], 1)
                self.connection.executemany(
                    "UPDATE fingerprints SET stored = ? WHERE id = ?",
                    [(stored, number) for number in ids.values()],
                )
        finally:
            self.execute(f"PRAGMA cache_size = -{_READING_KIB}")
        return evicted

    def delete_places(self, places: Sequence[tuple[int, Any]]) -> int:
        """Delete the rows at some places that were stored at some times; return how many there were."""
        chosen = []
        with self._transaction():
            for place, stored in places:
                chosen += self.execute(
                    f"SELECT {_OF_ROW} FROM rows WHERE place = ? AND stored IS ?", (place, stored)
                )
            self._delete_chosen(chosen)
        return len(chosen)

    def delete_fingerprint(self, rows: FingerprintRows) -> int:
        """Delete all rows of a fingerprint, some at a time, as others store meanwhile; return how many."""
        count = 0
        while True:
            with self._transaction():
                chosen = self.execute(
                    f"SELECT {_OF_ROW} FROM rows WHERE key > ? AND key <= ? AND fingerprint = ? LIMIT ?",
                    (rows.fingerprint, _end(rows.fingerprint), rows.number, _AT_ONCE),
                )
                self._delete_chosen(chosen)
                if not chosen:
                    self.execute("DELETE FROM fingerprints WHERE id = ?", (rows.number,))
                    return count
            count += len(chosen)

    def clear(self, label: str | None) -> int:
        """Delete the rows and notes of a label, or all; return how many rows that were."""
        if label is None:
            ((count,),) = self.execute("SELECT count(*) FROM rows")
            with self._transaction():
                for table in ("rows", "fingerprints", "notes"):
                    self.execute(f"DELETE FROM {table}")
        else:
            count = sum(self.delete_fingerprint(rows) for rows in self.fingerprints() if rows.label == label)
            self.execute("DELETE FROM notes WHERE label = ?", (label,))
        self.shrink()
        return int(count)

    # Fingerprints and notes.

    def fingerprints(self) -> list[FingerprintRows]:
        """The fingerprints that have rows."""
        listed = self.execute(
            "SELECT id, digest, label, rows, size, stored, used FROM fingerprints WHERE rows > 0 ORDER BY id"
        )
        return [
            FingerprintRows(
                number, _text(label), digest, rows, size, (stored or 0) / 1000, used and used / 1000
            )
            for number, digest, label, rows, size, stored, used in listed
            if type(digest) is bytes and len(digest) == FINGERPRINT_BYTES
        ]

    def read_note(self, key: bytes) -> bytes | None:
        """A note, unchecked."""
        values = self.execute("SELECT value FROM notes WHERE key = ?", (key,))
        return bytes(values[0][0]) if values and type(values[0][0]) is bytes else None

    def write_note(self, key: bytes, value: bytes, label: str) -> None:
        """Store a note."""
        self.execute("REPLACE INTO notes VALUES (?, ?, ?, ?)", (key, label, _milliseconds(), value))

    def notes(self) -> list[tuple[bytes, str, int, Any]]:
        """All notes: key, label, when they were stored, bytes."""
        notes = self.execute("SELECT key, label, stored, value FROM notes")
        return [
            (key, _text(label), stored or 0, value)
            for key, label, stored, value in notes
            if type(key) is bytes
        ]

    def delete_notes(self, keys: Iterable[bytes]) -> None:
        """Delete notes."""
        with self._transaction():
            self.connection.executemany("DELETE FROM notes WHERE key = ?", [(key,) for key in keys])

    # The whole table, by parts.

    def all_rows(self) -> Iterator[list[tuple[Any, ...]]]:
        """All rows by place: place, stored, fingerprint, key, value; some MB at a time."""
        yield from self._by_parts(
            "SELECT place, stored, fingerprint, key, value FROM rows WHERE place > ? ORDER BY place",
            -(1 << 63),
        )

    def rows_of(self, digest: bytes, number: int | None = None) -> Iterator[list[tuple[Any, ...]]]:
        """The keys and bytes of the rows of a fingerprint in the order of keys; some MB at a time.

        Args:
            number: of the fingerprint under one label; None: under all.
        """
        yield from self._by_parts(
            "SELECT key, value FROM rows WHERE key > ? AND key <= ? AND ifnull(?, fingerprint) = fingerprint "
            "ORDER BY key",
            digest,
            _end(digest),
            number,
        )

    def _by_parts(self, statement: str, after: Any, *values: Any) -> Iterator[list[tuple[Any, ...]]]:
        """An answer in parts, so that no long reading keeps others from emptying the log.

        The statement selects rows after a place, in their order: the place first, the bytes last.
        """
        while True:
            part: list[tuple[Any, ...]] = []
            size = 0
            with contextlib.closing(self.connection.execute(statement, (after, *values))) as cursor:
                for row in cursor:
                    part.append(row)
                    size += 100 + (len(row[-1]) if type(row[-1]) is bytes else 0)
                    if size > _PORTION_BYTES:
                        break
            if not part:
                return
            after = part[-1][0]
            yield part

    # Its size.

    def shorten_log(self, limit_bytes: int, *, at_rest: bool = False) -> bool:
        """Empty the log if it is longer than it should be, as somebody always reads; no other may write now.

        Args:
            limit_bytes: of all that the database takes.
            at_rest: no transaction follows at once.

        Returns:
            whether it is short now.
        """
        most_bytes = min(log_bytes(limit_bytes), _LOG_BYTES) if at_rest else log_bytes(limit_bytes)
        if size_of(self.path.with_name(FILES[1])) <= most_bytes // 2:
            return True
        self.execute(f"PRAGMA busy_timeout = {_LOG_WAIT_MILLISECONDS}")
        try:
            return bool(self.execute("PRAGMA wal_checkpoint(TRUNCATE)")[0][0] == 0)
        finally:
            self.execute(f"PRAGMA busy_timeout = {int(WAIT_SECONDS * 1000)}")

    def shrink(self) -> None:
        """Give the room of deleted rows back to the disk."""
        with contextlib.suppress(sqlite3.OperationalError):  # somebody reads: the room is used again anyway
            self.execute("VACUUM")
            self.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _make_room(self, new_bytes: int, count: int, limit_bytes: int) -> int | None:
        (page,), (pages,), (free,) = (
            self.execute(f"PRAGMA {name}")[0] for name in ("page_size", "page_count", "freelist_count")
        )
        fixed_bytes = log_bytes(limit_bytes) + size_of(self.path.with_name(FILES[2]))
        # Each row is in two indexes, too; a page may be half empty after rows went.
        needed = (new_bytes + 200 * count) * page // (page - 200) + 2 * page
        over = (pages - free) * page + needed + fixed_bytes - limit_bytes
        if over <= 0:
            return 0
        if needed + fixed_bytes + 10 * page > limit_bytes:
            return None
        victims: list[tuple[Any, ...]] = []
        freed = 0
        select = f"SELECT {_OF_ROW} FROM rows ORDER BY used, place"
        with contextlib.closing(self.connection.execute(select)) as oldest:
            for victim in oldest:
                if freed > over + over // 8:
                    break
                victims.append(victim)
                freed += victim[2] or 0
        self._delete_chosen(victims)
        return len(victims)

    def _id(self, digest: bytes, label: str) -> int:
        select, values = "SELECT id FROM fingerprints WHERE digest = ? AND label = ?", (digest, label)
        ids = self.execute(select, values)
        if not ids:
            self.execute("INSERT INTO fingerprints VALUES (NULL, ?, ?, 0, 0, 0, NULL)", values)
            ids = self.execute(select, values)
        if not ids or type(ids[0][0]) is not int:
            raise sqlite3.DatabaseError("a fingerprint has no number")
        return ids[0][0]

    def _insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows, by place; those of before go that have a key of these, which are few."""
        before = self.connection.total_changes
        self.connection.executemany("INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?, ?, ?)", rows)
        missing = len(rows) - (self.connection.total_changes - before)
        if not missing:
            return
        old: list[tuple[Any, ...]] = []
        for part in _portions([row[4] for row in rows]):
            of_keys = f"SELECT {_OF_ROW}, key FROM rows WHERE key IN ({_marks(part)}) AND place < ?"
            old += self.execute(of_keys, (*part, rows[0][0]))
        self._delete_chosen(old)
        keys = {key for *_, key in old}
        if len(keys) != missing:
            raise sqlite3.DatabaseError("the index of rows is broken")
        self.connection.executemany(
            "INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?)", [row for row in rows if row[4] in keys]
        )

    def _delete_chosen(self, chosen: Sequence[tuple[Any, ...]]) -> None:
        """Delete rows of which these are place, fingerprint and size, and count them."""
        if chosen:
            self.connection.executemany(
                "DELETE FROM rows WHERE place = ?", [(place,) for place, *_ in chosen]
            )
            self._count([(number, size or 0) for _, number, size, *_ in chosen], -1)

    def _count(self, rows: Iterable[tuple[int, int]], sign: int) -> None:
        counts: Counter[int] = Counter()
        sizes: Counter[int] = Counter()
        for number, size in rows:
            counts[number] += sign
            sizes[number] += sign * size
        self.connection.executemany(
            "UPDATE fingerprints SET rows = rows + ?, size = size + ? WHERE id = ?",
            [(count, sizes[number], number) for number, count in counts.items()],
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self.connection.in_transaction:  # after some errors, SQLite has rolled back itself
                self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")


@contextlib.contextmanager
def _closed_unless_used(database: Database) -> Iterator[Database]:
    """Close a database if the block fails in which it is made ready."""
    try:
        yield database
    except BaseException:
        database.close()
        raise


_OF_ROW = "place, fingerprint, length(value)"


def _portions(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (keys[start : start + _VALUES] for start in range(0, len(keys), _VALUES))


def _marks(keys: Sequence[bytes]) -> str:
    return ",".join("?" * len(keys))


def _end(digest: bytes) -> bytes:
    """The last key that a fingerprint may have."""
    return digest + b"\xff" * (KEY_BYTES - FINGERPRINT_BYTES)


def _text(label: Any) -> str:
    return label.decode("utf-8", "replace") if isinstance(label, bytes) else str(label)


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000


def page_bytes(limit_bytes: int) -> int:
    """The size of the pages of a database that is made under a limit."""
    return _SMALL_PAGE_BYTES if limit_bytes < _SMALL_LIMIT_BYTES else _PAGE_BYTES


def log_bytes(limit_bytes: int) -> int:
    """Share of a limit that is for the log."""
    return max(
        min(_LOG_BYTES, limit_bytes // _LOG_SHARE), min(_MOST_LOG_BYTES, limit_bytes // _LARGE_LOG_SHARE)
    )


def transactions(
    rows: Sequence[tuple[bytes, Any]], limit_bytes: int, *, is_full: bool
) -> Iterator[Sequence[tuple[bytes, Any]]]:
    """Rows in parts that the log has room for; a part may be larger if it is one row.

    Args:
        is_full: others have to go for them, which writes more pages.
    """
    log, page = log_bytes(limit_bytes), page_bytes(limit_bytes)
    most_rows = max(1, log // page // (_PAGES_PER_ROW if is_full else _PAGES_PER_ROW // 4))
    first = size = 0
    for number, (_, data) in enumerate(rows):
        if number > first and (size + len(data) > log // 2 or number - first == most_rows):
            yield rows[first:number]
            first, size = number, 0
        size += len(data)
    if first < len(rows):
        yield rows[first:]


def homes(root: Path) -> list[Path]:
    """The directories of databases, the last of which is in use: `r0`, or what has replaced it.

    Each database has a directory of its own: a process that still has an old one open deletes its log by name
    when it closes it.
    """
    try:
        names = [entry.name for entry in os.scandir(root)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbers = sorted(int(name[1:]) for name in names if name[:1] == "r" and name[1:].isdecimal())
    return [root / f"r{number}" for number in numbers]


def replaced_homes(root: Path) -> list[Path]:
    """The directories of databases that others have replaced."""
    return homes(root)[:-1]


def used_bytes(root: Path) -> int:
    """Bytes of the files of the database in use."""
    return sum(map(bytes_on_disk, homes(root)[-1:]))


def current_home(root: Path) -> Path | None:
    """The directory of the database in use; None: there is none.

    Raises:
        CacheError: it, or one of its files, is a link.
    """
    directories = homes(root)
    home = directories[-1] if directories else None
    if home is not None and any(path.is_symlink() for path in (home, *(home / name for name in FILES))):
        raise CacheError(f"{home} has a symbolic link in place of a database: it isn't followed")
    return home


def bytes_on_disk(home: Path) -> int:
    """Bytes of the files of a database."""
    return sum(size_of(home / name) for name in FILES)


def size_of(path: Path) -> int:
    """The size of a file; 0 of one that isn't there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


ERRORS = (OSError, sqlite3.Error, UnicodeDecodeError, OverflowError)
"""Errors of a database that is broken, or can't be used for now."""


def is_broken(error: Exception) -> bool:
    """True if a file is no database of rows, and never will be."""
    if isinstance(error, (UnicodeDecodeError, OverflowError)):
        return True
    if not isinstance(error, sqlite3.DatabaseError) or isinstance(
        error, (sqlite3.ProgrammingError, sqlite3.NotSupportedError)
    ):
        return False
    return not any(words in str(error) for words in _FOR_NOW)


def remove(home: Path) -> None:
    """Remove a database and its directory, if nothing else is in it; who has it open goes on with it."""
    for name in FILES:
        (home / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        home.rmdir()
