"""Checking and cleaning up a directory of rows. A row that is deleted is computed again when it is needed.

Verifying reads all rows in the order in which they are stored; it changes nothing, and a running process may
store and delete meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamload.cache.locks import exclusive
from streamload.derived.parts import NOTE, kind_of, read_parts
from streamload.derived.row_catalog import Catalog, FingerprintRows, open_catalog
from streamload.derived.row_layout import read_row
from streamload.derived.row_seal import unseal
from streamload.derived.row_store import Place, RowStore
from streamload.derived.rows_table import FINGERPRINT_BYTES, KEY_BYTES, RAW, bytes_on_disk, numbers, remove
from streamload.errors import CacheCorrupt

_YOUNG_SECONDS = 600.0
"""A note is written right before its first rows."""
_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Damage:
    """A row or note that can't be used: it counts as not there.

    Attributes:
        place: in the database, and when it was stored: after that it may be another row.
        name: hexadecimal digits.
    """

    place: tuple[int, float | None]
    name: str
    label: str
    cause: str


@dataclass(slots=True)
class Verified:
    """What was verified so far."""

    rows: int = 0
    notes: int = 0
    read_bytes: int = 0
    damages: list[Damage] = field(default_factory=list)


def verify(catalog: Catalog) -> Iterator[Verified]:
    """Compare all rows and notes with their checksums and layouts; yields the counts after every few MB."""
    found = Verified()
    statement = (
        "SELECT rowid, key, tag, store_time, raw, mode, filename, value FROM Cache "
        "WHERE rowid > ? ORDER BY rowid"
    )
    for page in catalog.table.pages(statement, -(1 << 63)):
        for number, key, label, stored_at, *kept, data in page:
            is_row = type(key) is bytes and len(key) == KEY_BYTES
            found.rows += is_row
            found.notes += not is_row
            found.read_bytes += len(data) if type(data) is bytes else 0
            cause = _cause(key, kept, data)
            if cause:
                name = key.hex() if type(key) is bytes else repr(key)
                found.damages.append(Damage((number, stored_at), name, str(label), cause))
        yield found


def _cause(key: Any, kept: Sequence[Any], data: Any) -> str:
    """Why a row or note can't be used; "": it can."""
    if type(key) is not bytes or type(data) is not bytes or list(kept) != [1, RAW, None]:
        return "it isn't stored as bytes"
    try:
        if key.startswith(NOTE) and len(key) == len(NOTE) + FINGERPRINT_BYTES:
            read_parts(key, data)
        elif len(key) == KEY_BYTES:
            read_row(key, data)
        else:
            unseal(key, data)
    except CacheCorrupt as exc:
        return str(exc)
    return ""


def delete_damaged(catalog: Catalog, damages: Sequence[Damage]) -> int:
    """Delete what is damaged, unless it was stored anew since it was looked at; return how many went."""
    places = [damage.place for damage in damages]
    return catalog.table.execute_many("DELETE FROM Cache WHERE rowid = ? AND store_time IS ?", places)


def replace_broken(place: Place) -> None:
    """Begin an empty database in place of one that can't be read, as a module would that meets it."""
    store = RowStore(place)
    store.clear()
    store.close()


@dataclass(slots=True)
class Garbage:
    """What `collect_garbage` deleted, or would delete.

    Attributes:
        stale: rows of fingerprints that aren't the newest of their kind.
        notes: fingerprints of which only the note was left.
        databases: the numbers of those that were replaced.
        size_bytes: of all that.
    """

    stale: list[FingerprintRows] = field(default_factory=list)
    notes: list[bytes] = field(default_factory=list)
    databases: list[int] = field(default_factory=list)
    size_bytes: int = 0


def collect_garbage(root: Path, *, stale: bool, dry_run: bool) -> Garbage:
    """Delete what no module will read.

    Args:
        root: of the rows.
        stale: delete the rows of old fingerprints (`stale_of`).
        dry_run: delete nothing.

    Raises:
        CacheError: the rows can't be read or deleted.
    """
    found = Garbage()
    with open_catalog(root, writable=not dry_run) as catalog:
        if catalog.home is not None:
            _replaced_databases(root, found, dry_run=dry_run)
        rows = catalog.fingerprints()
        found.stale = stale_of(catalog, rows) if stale else []
        found.size_bytes += sum(one.size_bytes for one in found.stale)
        left = {one.fingerprint for one in rows if one not in found.stale}
        gone = {one.fingerprint for one in found.stale}
        before = time.time() - _YOUNG_SECONDS
        notes = catalog.notes()
        found.notes = sorted(of for of in notes if of not in left and (of in gone or notes[of] < before))
        if not dry_run:
            for one in found.stale:
                delete_rows(catalog, one.fingerprint, one.label)
            catalog.table.execute_many(
                "DELETE FROM Cache WHERE key = ?", [(NOTE + of,) for of in found.notes]
            )
            if found.stale:
                catalog.table.shrink()
    return found


def stale_of(catalog: Catalog, rows: Sequence[FingerprintRows]) -> list[FingerprintRows]:
    """All but the newest of each label, arguments and what makes the inputs, such as a transform.

    The newest is the one of which a row was last stored, or last read as far as that was noted.
    """
    kinds = {one.fingerprint: kind_of(catalog.parts(one.fingerprint)) for one in rows}
    in_order = sorted(rows, key=lambda one: (one.used_at, one.fingerprint))
    newest = {(one.label, kinds[one.fingerprint]): one for one in in_order}
    return [one for one in rows if newest[one.label, kinds[one.fingerprint]] is not one]


def delete_rows(catalog: Catalog, fingerprint: bytes, label: str) -> None:
    """Delete the rows of a fingerprint under a label, some at a time: others store meanwhile."""
    end = fingerprint + b"\xff" * (KEY_BYTES - FINGERPRINT_BYTES)
    chosen = (
        f"SELECT rowid FROM Cache WHERE key > ? AND key <= ? AND length(key) = ? AND tag = ? LIMIT {_AT_ONCE}"
    )
    values = [(fingerprint, end, KEY_BYTES, label)]
    while catalog.table.execute_many(f"DELETE FROM Cache WHERE rowid IN ({chosen})", values):
        pass


def _replaced_databases(root: Path, found: Garbage, *, dry_run: bool) -> None:
    found.databases = numbers(root)[:-1]
    for number in found.databases:
        found.size_bytes += bytes_on_disk(root / str(number))
    if found.databases and not dry_run:
        with exclusive(root / "lock"):
            for number in numbers(root)[:-1]:
                remove(root / str(number))
