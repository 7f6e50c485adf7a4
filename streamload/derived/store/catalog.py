"""Inventory of a directory of rows, by fingerprint: to list, verify and delete rows, and what is left over.

It covers the database of rows of calls, and the columns of samples beside it.

Reading changes neither rows nor the order in which they will go, and works on a read-only disk. A directory
that is missing or has no database is one without rows. A row that is deleted is computed again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from streamload.cache.directory import check_owner
from streamload.cache.locks import exclusive
from streamload.cache.tier import Tier
from streamload.columns.catalog import fingerprints as columns_by_fingerprint
from streamload.columns.catalog import remove as remove_columns
from streamload.columns.catalog import rows_of, seeds_of
from streamload.derived.store.database import (
    DATABASE,
    ERRORS,
    FINGERPRINT_BYTES,
    KEY_BYTES,
    Database,
    FingerprintRows,
    bytes_on_disk,
    current_home,
    is_broken,
    remove,
    replaced_homes,
    used_bytes,
)
from streamload.derived.store.disk import DiskRows
from streamload.derived.store.row_store import RowPlace, RowStore
from streamload.derived.store.sealed import (
    NOTE,
    LeafFiles,
    Row,
    kind_of,
    leaf_name,
    read_parts,
    read_row,
    unseal,
)
from streamload.errors import CacheCorrupt, CacheError, OptionError

_YOUNG_SECONDS = 600.0
"""A note is written right before its first rows."""
_MOST_LAYOUTS = 64
COLUMNS = -1
"""The number of rows that are in columns (`FingerprintRows.number`)."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """The rows of a directory."""

    root: Path
    database: Database

    @property
    def used_bytes(self) -> int:
        """Bytes of the files on disk, those of columns, too."""
        columns = columns_by_fingerprint(self.root.parent)
        return used_bytes(self.root) + sum(held.size_bytes for held in columns)

    def fingerprints(self) -> list[FingerprintRows]:
        """All rows, by label and then by the last use."""
        rows = self.database.fingerprints()
        if held := columns_by_fingerprint(self.root.parent):
            labels = {key[len(NOTE) :]: label for key, label, *_ in self.database.notes()}
            rows += [
                FingerprintRows(
                    *(COLUMNS, labels.get(columns.fingerprint, ""), columns.fingerprint, columns.rows),
                    *(columns.size_bytes, columns.stored_at, None),
                )
                for columns in held
            ]
        return sorted(rows, key=lambda row: (row.label, row.used_at, row.fingerprint))

    def notes(self) -> dict[bytes, float]:
        """The fingerprints that have a note, and when it was stored."""
        size = len(NOTE) + FINGERPRINT_BYTES
        return {
            key[len(NOTE) :]: stored / 1000
            for key, _, stored, _ in self.database.notes()
            if key.startswith(NOTE) and len(key) == size
        }

    def parts(self, fingerprint: bytes) -> dict[str, Any] | None:
        """The readable parts of a fingerprint; None: it has no note, or a damaged one."""
        key = NOTE + fingerprint
        data = self.database.read_note(key)
        with contextlib.suppress(CacheCorrupt):
            return None if data is None else read_parts(key, data)
        return None

    def find(self, prefix: str, others: Iterable[str] = ()) -> bytes:
        """The fingerprint, stored here or among others, that begins with some hexadecimal digits.

        Raises:
            OptionError: none does, or several do.
        """
        stored = {fingerprint.fingerprint.hex() for fingerprint in self.fingerprints()}
        all_of_them = sorted(stored | {fingerprint.hex() for fingerprint in self.notes()} | {*others})
        if not all_of_them:
            raise OptionError(f"there are no rows in {self.root}")
        begin = [digits for digits in all_of_them if digits.startswith(prefix.lower())]
        if len(begin) == 1 and re.fullmatch(r"[0-9a-f]+", prefix.lower()):
            return bytes.fromhex(begin[0])
        which = f"{len(begin)} fingerprints begin" if begin else "no fingerprint begins"
        listed = ", ".join(digits[:12] for digits in (begin or all_of_them)[:8])
        raise OptionError(f"{which} with {prefix!r} in {self.root}; there are {listed}")

    def rows(self, fingerprint: bytes, number: int | None = None) -> Iterator[tuple[bytes, Row | None]]:
        """The names and rows of a fingerprint in the order of names; None in place of a damaged row.

        The name of a sample's row is the fingerprint, the name of its shard's columns and its place there. It
        isn't checked: its checksum tells only together with the sample.

        Args:
            number: of the rows, as `FingerprintRows` has it; None: all of them.
        """
        for part in () if number == COLUMNS else self.database.rows_of(fingerprint, number):
            for key, data in part:
                if type(key) is bytes and len(key) == KEY_BYTES and type(data) is bytes:
                    row = None
                    with contextlib.suppress(CacheCorrupt):
                        row = read_row(key, data)
                    yield key, row
        for column_row in rows_of(self.root.parent, fingerprint) if number in (None, COLUMNS) else ():
            layout, body = column_row.row
            name = fingerprint + column_row.name + column_row.place.to_bytes(4, "big")
            yield name, Row(layout, body, 0)

    def delete(self, rows: FingerprintRows) -> int:
        """Delete all rows of a fingerprint in one place; return how many."""
        if rows.number != COLUMNS:
            return self.database.delete_fingerprint(rows)
        for columns in columns_by_fingerprint(self.root.parent):
            if columns.fingerprint == rows.fingerprint:
                remove_columns(columns)
                if (self.root.parent / "tier.json").is_file():
                    Tier.open(self.root.parent).budget.count()  # else shards go for what is there no longer
                return columns.rows
        return 0

    def clear(self, label: str | None) -> int:
        """Delete the rows and notes of a label, or all; return how many rows that were."""
        return self.clear_columns(label) + self.database.clear(label)

    def clear_columns(self, label: str | None) -> int:
        """Delete the columns of a label, or all; return how many rows that were."""
        of_columns = [rows for rows in self.fingerprints() if rows.number == COLUMNS]
        return sum(self.delete(rows) for rows in of_columns if label in (None, rows.label))


@contextlib.contextmanager
def open_catalog(root: Path, *, writable: bool = False) -> Iterator[Catalog]:
    """Open the rows of a directory, to read them or also to delete them.

    Raises:
        CacheCorrupt: the database is broken.
        CacheError: it can't be read, or not written to, or isn't this user's alone.
    """
    check_owner(root)
    home = current_home(root)
    if home is not None and not (home / DATABASE).exists():
        home = None
    try:
        with contextlib.closing(Database.inspect(home, writable=writable)) as database:
            yield Catalog(root, database)
    except ERRORS as exc:
        if isinstance(exc, OSError):
            raise
        if is_broken(exc):
            raise CacheCorrupt(
                f"the database of rows at {home} is broken ({exc}): modules will begin an empty one"
            ) from exc
        raise CacheError(f"the rows in {root} can't be used: {exc}") from exc


@dataclass(frozen=True, slots=True)
class DamagedRow:
    """A row or note that can't be used: it counts as not there."""

    place: tuple[int, Any] | None
    """Of a row in the database, and when it was stored: after that it may be another row. None: it is a
    note."""
    key: Any  # as it is stored
    label: str
    cause: str

    @property
    def name(self) -> str:
        """The key as hexadecimal digits."""
        return self.key.hex() if type(self.key) is bytes else repr(self.key)


@dataclass(slots=True)
class VerifiedRows:
    """Progress of the verification."""

    rows: int = 0
    notes: int = 0
    unproved: int = 0  # rows of columns that pass for no sample in the cache: others can't be told
    read_bytes: int = 0
    damages: list[DamagedRow] = field(default_factory=list)

    def add(self, place: tuple[int, Any] | None, key: Any, label: str, data: Any) -> None:
        """Check a row or note."""
        self.read_bytes += len(data) if type(data) is bytes else 0
        if cause := _cause(key, data):
            self.damages.append(DamagedRow(place, key, label, cause))


def verify(catalog: Catalog) -> Iterator[VerifiedRows]:
    """Compare all rows and notes with their checksums and layouts; yields the counts after every few MB."""
    verified = VerifiedRows()
    labels = {rows.number: rows.label for rows in catalog.fingerprints()}
    for key, label, _, data in catalog.database.notes():
        verified.notes += 1
        verified.add(None, key, label, data)
    for part in catalog.database.all_rows():
        for place, stored, number, key, data in part:
            verified.rows += 1
            verified.add((place, stored), key, labels.get(number, ""), data)
        yield verified
    yield from _verify_columns(catalog, verified)
    yield verified


def _verify_columns(catalog: Catalog, verified: VerifiedRows) -> Iterator[VerifiedRows]:
    """Compare the rows of columns with their checksums, where the shards of their samples are here.

    A row that doesn't pass is no damage: it is one that isn't there, as after a change of its sample.
    """
    home = catalog.root.parent
    seeds = seeds_of(Tier.open(home)) if (home / "tier.json").is_file() else {}
    for columns in columns_by_fingerprint(home):
        for column_row in rows_of(home, columns.fingerprint):
            verified.rows += 1
            verified.read_bytes += len(column_row.row[1])
            place, shards = column_row.place, seeds.get(column_row.name, ())
            samples = [int(checksums[place]) for checksums in shards if place < len(checksums)]
            is_whole = any(map(column_row.is_whole, samples))
            verified.unproved += not is_whole
            if not verified.rows % 1000:
                yield verified


def _cause(key: Any, data: Any) -> str:
    """Why a row or note can't be used; "": it can."""
    if type(key) is not bytes or type(data) is not bytes:
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


def delete_damaged(catalog: Catalog, damages: Sequence[DamagedRow]) -> int:
    """Delete what is damaged, unless it was stored anew since it was looked at; return how many went."""
    notes = [damage.key for damage in damages if damage.place is None]
    catalog.database.delete_notes(notes)
    places = [damage.place for damage in damages if damage.place is not None]
    return catalog.database.delete_places(places) + len(notes)


def replace_broken(place: RowPlace) -> None:
    """Begin an empty database in place of one that can't be read, as a module would that meets it."""
    store = RowStore(place)
    if isinstance(store.disk, DiskRows):
        store.disk.clear()
    store.close()


@dataclass(slots=True)
class Garbage:
    """Garbage that `collect_garbage` deleted, or would delete."""

    stale: list[FingerprintRows] = field(default_factory=list)
    """Rows of fingerprints that aren't the newest of their kind."""
    notes: list[bytes] = field(default_factory=list)  # fingerprints of which only the note was left
    databases: list[str] = field(default_factory=list)
    """The names of those that were replaced."""
    size_bytes: int = 0  # of all that


def collect_garbage(root: Path, *, stale: bool, dry_run: bool) -> Garbage:
    """Delete what no module will read.

    Args:
        stale: delete the rows of old fingerprints, too (`stale_of`).

    Raises:
        CacheError: the rows can't be read or deleted.
    """
    check_owner(root)
    replaced = replaced_homes(root)
    garbage = Garbage(
        databases=[home.name for home in replaced], size_bytes=sum(map(bytes_on_disk, replaced))
    )
    if replaced and not dry_run:
        with exclusive(root / "lock"):
            for home in replaced_homes(root):
                remove(home)
    with open_catalog(root, writable=not dry_run) as catalog:
        rows = catalog.fingerprints()
        garbage.stale = stale_of(rows, lambda item: catalog.parts(item.fingerprint)) if stale else []
        garbage.size_bytes += sum(item.size_bytes for item in garbage.stale)
        left = {item.fingerprint for item in rows if item not in garbage.stale}
        gone = {item.fingerprint for item in garbage.stale}
        before = time.time() - _YOUNG_SECONDS
        notes = catalog.notes()
        garbage.notes = sorted(
            item for item in notes if item not in left and (item in gone or notes[item] < before)
        )
        if not dry_run:
            for item in garbage.stale:
                catalog.delete(item)
            catalog.database.delete_notes(NOTE + item for item in garbage.notes)
            if garbage.stale:
                catalog.database.shrink()
    return garbage


_Held = TypeVar("_Held", bound=Any)
"""FingerprintRows, or FingerprintShards."""


def stale_of(held: Sequence[_Held], parts: Callable[[_Held], Mapping[str, Any] | None]) -> list[_Held]:
    """All in one place but the newest of each label, arguments and what makes the inputs (a transform)."""
    by_use = sorted(held, key=lambda item: (item.used_at, item.fingerprint))
    newest = {(item.label, kind_of(parts(item))): id(item) for item in by_use}
    kept = {*newest.values()}
    return [item for item in held if id(item) not in kept]


@dataclass
class Exported:
    """Counts of rows that were written."""

    layouts: list[int] = field(default_factory=list)  # rows by layout, in the order of their folders
    named: int = 0  # rows whose keys were among those given
    damaged: int = 0  # rows that were left out, as they fail a check


def export(
    catalog: Catalog, fingerprint: bytes, out: Path, keys: Mapping[bytes, str] | None = None
) -> Exported:
    """Write the rows of a fingerprint as numpy files into a new folder, which appears once it is whole.

        OUT/fingerprint.json          the fingerprint and its readable parts
        OUT/layout-0/layout.json      what the results look like, and of each leaf its file, dtype and shape
        OUT/layout-0/names.npy        S64[rows] or S72[rows]: the rows' names, hexadecimal digits
        OUT/layout-0/keys.txt         their keys, one a line; an empty line: it isn't among those given
        OUT/layout-0/leaf-0.npy       [rows, …]: a tensor or array of the results, in the order of the names

    Args:
        keys: a line of keys.txt by the name of its row; None: there is no keys.txt.

    Raises:
        OptionError: there is something at `out`, there are no rows, or rows of too many layouts.
        OSError: it can't be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OptionError(f"{out} exists already: name a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=out.parent, ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / out.name
        folder.mkdir()
        exported = _write(catalog, fingerprint, folder, keys)
        about = {"fingerprint": fingerprint.hex(), "parts": catalog.parts(fingerprint)}
        (folder / "fingerprint.json").write_text(json.dumps(about, indent=1))
        folder.rename(out)
    return exported


def _write(catalog: Catalog, fingerprint: bytes, folder: Path, keys: Mapping[bytes, str] | None) -> Exported:
    """Write a folder for each layout."""
    exported = Exported()
    layouts: dict[bytes, tuple[Path, LeafFiles, list[bytes]]] = {}
    with contextlib.ExitStack() as stack:
        for name, row in catalog.rows(fingerprint):
            if row is None:
                exported.damaged += 1
                continue
            if row.layout not in layouts:
                if len(layouts) == _MOST_LAYOUTS:
                    raise OptionError(
                        f"the rows of {fingerprint.hex()} have more than {_MOST_LAYOUTS} layouts (numbers "
                        f"and texts in a result are in its layout): read them by the module instead"
                    )
                place = folder / f"layout-{len(layouts)}"
                place.mkdir()
                files = LeafFiles(row.layout, functools.partial(_create, place))
                layouts[row.layout] = place, stack.enter_context(files), []
            _, files, names = layouts[row.layout]
            files.add(row.body)
            names.append(name)
        for place, files, names in layouts.values():
            (place / "layout.json").write_text(json.dumps(files.finish(), indent=1))
            np.save(place / "names.npy", np.array([name.hex().encode() for name in names]))
            if keys is not None:
                lines = [f"{keys.get(name, '')}\n" for name in names]
                (place / "keys.txt").write_text("".join(lines), encoding="utf-8")
                exported.named += sum(name in keys for name in names)
            exported.layouts.append(files.rows)
    if not layouts:
        raise OptionError(f"{fingerprint.hex()} has no rows in {catalog.root} that are whole")
    return exported


def _create(folder: Path, number: int) -> IO[bytes]:
    return (folder / leaf_name(number)).open("wb")
