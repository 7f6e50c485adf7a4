"""What is in a directory of rows, by fingerprint: for commands that list, check, export and delete them.

Reading changes neither rows nor the order in which they will go, and works on a read-only disk. A directory
that is missing or has no database is one without rows.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamload.cache.directory import check_owner
from streamload.derived.parts import NOTE, read_parts
from streamload.derived.rows_table import (
    DATABASE,
    FINGERPRINT_BYTES,
    KEY_BYTES,
    Table,
    bytes_on_disk,
    is_broken,
    numbers,
    refuse_links,
    select_rows,
)
from streamload.errors import CacheCorrupt, CacheError, OptionError

_ROWS = f"typeof(key) = 'blob' AND length(key) = {KEY_BYTES}"
_OF_FINGERPRINT = f"substr(key, 1, {FINGERPRINT_BYTES})"


@dataclass(frozen=True, slots=True)
class FingerprintRows:
    """The rows of one fingerprint under one label.

    Attributes:
        size_bytes: of the rows, without what the database takes beside them.
        stored_at: when a row was last stored, in seconds since the epoch.
        read_at: when a row was last read after it was stored; None: none was, or it wasn't noted.
    """

    label: str
    fingerprint: bytes
    rows: int
    size_bytes: int
    stored_at: float
    read_at: float | None

    @property
    def used_at(self) -> float:
        """When a row was last stored, or read as far as that was noted."""
        return max(self.stored_at, self.read_at or 0.0)


class Catalog:
    """The rows of a directory.

    Attributes:
        root: the directory.
        home: of the database in use; None: there is none.
        table: the database.
    """

    def __init__(self, root: Path, home: Path | None, table: Table):
        self.root = root
        self.home = home
        self.table = table

    @property
    def used_bytes(self) -> int:
        """What the files take on disk."""
        return 0 if self.home is None else bytes_on_disk(self.home)

    def fingerprints(self) -> list[FingerprintRows]:
        """All rows, by label and then by the last use; reads the whole table."""
        found = self.table.execute(
            f"SELECT tag, {_OF_FINGERPRINT}, count(*), sum(length(value)), max(store_time), "
            "max(CASE WHEN access_time > store_time THEN access_time END) "
            f"FROM Cache WHERE {_ROWS} GROUP BY 1, 2"
        )
        rows = [
            FingerprintRows(str(label), bytes(of), count, size or 0, stored_at or 0.0, read_at)
            for label, of, count, size, stored_at, read_at in found
        ]
        return sorted(rows, key=lambda one: (one.label, one.used_at, one.fingerprint))

    def notes(self) -> dict[bytes, float]:
        """The fingerprints that have a note, and when it was stored."""
        found = self.table.execute(
            "SELECT key, store_time FROM Cache WHERE key > ? AND key < ? AND length(key) = ?",
            (NOTE, NOTE + b"\xff" * (FINGERPRINT_BYTES + 1), len(NOTE) + FINGERPRINT_BYTES),
        )
        return {bytes(key[len(NOTE) :]): stored_at or 0.0 for key, stored_at in found}

    def parts(self, fingerprint: bytes) -> dict[str, Any] | None:
        """The readable parts of a fingerprint; None: it has no note, or a damaged one."""
        key = NOTE + fingerprint
        with contextlib.suppress(CacheCorrupt):
            return next((read_parts(key, data) for _, data in select_rows(self.table, [key])), None)
        return None

    def find(self, prefix: str, others: Iterable[str] = ()) -> bytes:
        """The fingerprint that begins with some hexadecimal digits.

        Args:
            prefix: these digits.
            others: fingerprints that are known from elsewhere.

        Raises:
            OptionError: none does, or several do.
        """
        found = self.table.execute(f"SELECT DISTINCT {_OF_FINGERPRINT} FROM Cache WHERE {_ROWS}")
        known = sorted({bytes(of).hex() for (of,) in found} | {of.hex() for of in self.notes()} | {*others})
        if not known:
            raise OptionError(f"there are no rows in {self.root}")
        begin = [one for one in known if one.startswith(prefix.lower())]
        if len(begin) == 1 and re.fullmatch(r"[0-9a-f]+", prefix.lower()):
            return bytes.fromhex(begin[0])
        which = f"{len(begin)} fingerprints begin" if begin else "no fingerprint begins"
        listed = ", ".join(one[:12] for one in (begin or known)[:8])
        raise OptionError(f"{which} with {prefix!r} in {self.root}; there are {listed}")

    def rows(self, fingerprint: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The names and bytes of a fingerprint's rows in the order of names, unchecked."""
        statement = (
            "SELECT key, value FROM Cache WHERE key > ? AND key <= ? AND length(key) = ? "
            "AND typeof(value) = 'blob' ORDER BY key"
        )
        end = fingerprint + b"\xff" * (KEY_BYTES - FINGERPRINT_BYTES)
        for page in self.table.pages(statement, fingerprint, end, KEY_BYTES):
            yield from page


@contextlib.contextmanager
def open_catalog(root: Path, *, writable: bool = False) -> Iterator[Catalog]:
    """Open the rows of a directory, to read them or also to delete them.

    Raises:
        CacheCorrupt: the database is broken.
        CacheError: it can't be read, or not written to, or isn't this user's alone.
    """
    check_owner(root)
    home = _home(root)
    try:
        with contextlib.closing(Table.open(home, writable=writable)) as table:
            yield Catalog(root, home, table)
    except sqlite3.Error as exc:
        if is_broken(exc):
            raise CacheCorrupt(
                f"the database of rows at {home} is broken ({exc}): modules will begin an empty one"
            ) from exc
        raise CacheError(f"the rows in {root} can't be used: {exc}") from exc


def _home(root: Path) -> Path | None:
    """Of the database in use; None: there is none."""
    try:
        found = numbers(root)
    except (FileNotFoundError, NotADirectoryError):
        return None
    home = root / str(found[-1]) if found else None
    if home is None or not (home / DATABASE).exists():
        return None
    refuse_links(home)
    return home
