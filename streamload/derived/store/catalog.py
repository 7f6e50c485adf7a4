"""Inventory of a directory of rows, by fingerprint: to list, verify and delete rows, and what is left over.

It covers the table of rows of calls, and the columns of samples beside it.

Reading changes neither rows nor the order in which they will go, and works on a read-only disk. A directory
that is missing or has no table is one without rows. A row that is deleted is computed again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from streamload.cache.directory import bytes_below, check_owner, inode_of
from streamload.cache.tier import Tier
from streamload.columns.catalog import FingerprintColumns, rows_of, seeds_of
from streamload.columns.catalog import fingerprints as columns_by_fingerprint
from streamload.columns.catalog import remove as remove_columns
from streamload.derived.store.database import (
    BROKEN,
    DATABASE,
    ERRORS,
    Connection,
    is_broken,
    set_aside,
    size_of,
    used_bytes,
)
from streamload.derived.store.sealed import (
    FINGERPRINT_BYTES,
    KEY_BYTES,
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
_BY_FINGERPRINT = f"""
SELECT label, substr(key, 1, {FINGERPRINT_BYTES}), count(*), sum(length(value)), max(stored + 0),
    max(CASE WHEN used > stored THEN used + 0 END)
FROM rows WHERE length(key) = {KEY_BYTES} GROUP BY 1, 2
"""
_OF_FINGERPRINT = "WHERE key > ? AND key <= ? AND label = ?"


@dataclass(frozen=True, slots=True)
class FingerprintRows:
    """The rows of one fingerprint under one label, in the table or in columns."""

    label: str
    fingerprint: bytes
    rows: int
    size_bytes: int  # of the rows, without what the table takes beside them
    stored_at: float  # when a row was last stored, in seconds since the epoch
    read_at: float | None = None  # when a row was last read after it was stored; None: none was, or unnoted
    columns: FingerprintColumns | None = None  # None: they are in the table

    @property
    def used_at(self) -> float:
        """When a row was last stored, or read as far as that was noted."""
        return max(self.stored_at, self.read_at or 0.0)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The rows of a directory."""

    root: Path
    connection: Connection

    @property
    def used_bytes(self) -> int:
        """Bytes of the files on disk, those of columns, too."""
        columns = columns_by_fingerprint(self.root.parent)
        return used_bytes(self.root) + sum(held.size_bytes for held in columns)

    def fingerprints(self) -> list[FingerprintRows]:
        """All rows, by label and then by the last use."""
        rows = [
            FingerprintRows(_text(label), key, count, size or 0, (stored or 0) / 1000, read and read / 1000)
            for label, key, count, size, stored, read in self.connection.execute(_BY_FINGERPRINT)
            if type(key) is bytes
        ]
        if held := columns_by_fingerprint(self.root.parent):
            labels = {fingerprint: label for fingerprint, (label, _) in self.notes().items()}
            rows += [
                FingerprintRows(
                    labels.get(columns.fingerprint, ""),
                    columns.fingerprint,
                    *(columns.rows, columns.size_bytes, columns.stored_at),
                    columns=columns,
                )
                for columns in held
            ]
        return sorted(rows, key=lambda row: (row.label, row.used_at, row.fingerprint))

    def notes(self) -> dict[bytes, tuple[str, float]]:
        """The fingerprints that have a note: its label, and when it was stored."""
        notes = self.connection.execute(
            "SELECT key, label, stored FROM rows WHERE key > ? AND key < ?", (NOTE, NOTE + b"\xff" * 17)
        )
        size = len(NOTE) + FINGERPRINT_BYTES
        return {
            key[len(NOTE) :]: (_text(label), (stored or 0) / 1000)
            for key, label, stored in notes
            if len(key) == size
        }

    def parts(self, fingerprint: bytes) -> dict[str, Any] | None:
        """The readable parts of a fingerprint; None: it has no note, or a damaged one."""
        key = NOTE + fingerprint
        for (data,) in self.connection.execute("SELECT value FROM rows WHERE key = ?", (key,)):
            with contextlib.suppress(CacheCorrupt, TypeError):
                return read_parts(key, data)
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

    def rows(self, entry: FingerprintRows) -> Iterator[tuple[bytes, Row | None]]:
        """The names and rows of a fingerprint in the order of names; None in place of a damaged row.

        The name of a sample's row is the fingerprint, the name of its shard's columns and its place there. It
        isn't checked: its checksum tells only together with the sample.
        """
        if entry.columns is not None:
            for column_row in rows_of(self.root.parent, entry.fingerprint):
                layout, body = column_row.row
                name = entry.fingerprint + column_row.name + column_row.place.to_bytes(4, "big")
                yield name, Row(layout, body, 0)
            return
        select = f"SELECT key, value FROM rows {_OF_FINGERPRINT} ORDER BY key"
        for part in self.connection.parts(select, *_values(entry)):
            for key, data in part:
                row = None
                with contextlib.suppress(CacheCorrupt, TypeError, AttributeError):
                    row = read_row(key, data)
                yield key, row

    def delete(self, entry: FingerprintRows) -> int:
        """Delete all rows of a fingerprint in one place; return how many."""
        if entry.columns is None:
            return self.change(f"DELETE FROM rows {_OF_FINGERPRINT}", [_values(entry)])
        remove_columns(entry.columns)
        if (self.root.parent / "tier.json").is_file():
            Tier.open(self.root.parent).budget.count()  # else shards go for what is there no longer
        return entry.rows

    def change(self, statement: str, values: Iterable[Sequence[Any]]) -> int:
        """Change the table by a statement with several values; return how many rows changed."""
        if not (self.root / DATABASE).exists():
            return 0
        with self.connection.transaction():
            return self.connection.change(statement, values)

    def clear(self, label: str | None) -> int:
        """Delete the rows and notes of a label, or all; return how many rows that were."""
        count = sum(self.delete(entry) for entry in self.fingerprints() if label in (None, entry.label))
        self.change("DELETE FROM rows WHERE ifnull(?, label) IS label", [(label,)])
        self.connection.shrink()
        return count


def _values(entry: FingerprintRows) -> tuple[bytes, bytes, str]:
    """Values of `_OF_FINGERPRINT`."""
    last = entry.fingerprint + b"\xff" * (KEY_BYTES - FINGERPRINT_BYTES)
    return entry.fingerprint, last, entry.label


def _text(label: Any) -> str:
    return label.decode("utf-8", "replace") if isinstance(label, bytes) else str(label)


@contextlib.contextmanager
def open_catalog(root: Path, *, writable: bool = False) -> Iterator[Catalog]:
    """Open the rows of a directory, to read them or also to delete them.

    Raises:
        CacheCorrupt: the file of the table is broken.
        CacheError: it can't be read, or not written to, or isn't this user's alone.
    """
    check_owner(root)
    exists = (root / DATABASE).exists()
    if writable and exists and not os.access(root, os.W_OK):
        raise CacheError(f"rows can't be deleted in {root}: the directory is read-only")
    connection = Connection(root, writable=writable and exists)
    try:
        with connection.turn, contextlib.closing(connection):  # no fork meanwhile
            if not connection.open():
                connection.open_empty()
            yield Catalog(root, connection)
    except ERRORS as exc:
        if isinstance(exc, OSError):
            raise
        if is_broken(exc):
            raise CacheCorrupt(
                f"the file of rows in {root} is broken ({exc}): modules will set it aside and begin anew"
            ) from exc
        raise CacheError(f"the rows in {root} can't be used: {exc}") from exc


@dataclass(frozen=True, slots=True)
class DamagedRow:
    """A row or note that can't be used: it counts as not there."""

    place: int  # in the table
    stored: Any  # when it was stored: after that it may be another row
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


def verify(catalog: Catalog) -> Iterator[VerifiedRows]:
    """Compare all rows and notes with their checksums and layouts; yields the counts after every few MB."""
    verified = VerifiedRows()
    select = "SELECT place, stored, used, label, key, value FROM rows WHERE place > ? ORDER BY place"
    for part in catalog.connection.parts(select, -(1 << 63)):
        for place, stored, used, label, key, data in part:
            verified.rows += used is not None
            verified.notes += used is None
            verified.read_bytes += len(data) if type(data) is bytes else 0
            if cause := _cause(key, data):
                verified.damages.append(DamagedRow(place, stored, key, _text(label), cause))
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
    places = [(damage.place, damage.stored) for damage in damages]
    return catalog.change("DELETE FROM rows WHERE place = ? AND stored IS ?", places)


def replace_broken(root: Path) -> None:
    """Set a file aside that can't be read, as a module would that meets it."""
    set_aside(root, inode_of(root / DATABASE))


@dataclass(slots=True)
class Garbage:
    """Garbage that `collect_garbage` deleted, or would delete."""

    stale: list[FingerprintRows] = field(default_factory=list)
    """Rows of fingerprints that aren't the newest of their kind."""
    notes: list[bytes] = field(default_factory=list)  # fingerprints of which only the note was left
    databases: list[str] = field(default_factory=list)  # the names of broken and of old ones
    size_bytes: int = 0  # of all that


def collect_garbage(root: Path, *, stale: bool, dry_run: bool) -> Garbage:
    """Delete what no module will read.

    Args:
        stale: delete the rows of old fingerprints, too (`_stale`).

    Raises:
        CacheError: the rows can't be read or deleted.
    """
    check_owner(root)
    old = sorted(path for path in root.glob("r*") if path.name == BROKEN or re.fullmatch(r"r\d+", path.name))
    garbage = Garbage(databases=[path.name for path in old])
    for path in old:
        garbage.size_bytes += bytes_below(path) if path.is_dir() else size_of(path)
        if not dry_run:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with open_catalog(root, writable=not dry_run) as catalog:
        rows = catalog.fingerprints()
        garbage.stale = _stale(catalog, rows) if stale else []
        garbage.size_bytes += sum(item.size_bytes for item in garbage.stale)
        left = {item.fingerprint for item in rows if item not in garbage.stale}
        gone = {item.fingerprint for item in garbage.stale}
        before = time.time() - _YOUNG_SECONDS
        notes = catalog.notes()
        garbage.notes = sorted(
            item for item in notes if item not in left and (item in gone or notes[item][1] < before)
        )
        if not dry_run:
            for item in garbage.stale:
                catalog.delete(item)
            catalog.change("DELETE FROM rows WHERE key = ?", [(NOTE + item,) for item in garbage.notes])
            if garbage.stale:
                catalog.connection.shrink()
    return garbage


def _stale(catalog: Catalog, rows: Sequence[FingerprintRows]) -> list[FingerprintRows]:
    """All but the newest of each label, arguments and what makes the inputs (a transform)."""
    by_use = sorted(rows, key=lambda entry: (entry.used_at, entry.fingerprint))
    newest = {(entry.label, kind_of(catalog.parts(entry.fingerprint))): id(entry) for entry in by_use}
    kept = {*newest.values()}
    return [entry for entry in rows if id(entry) not in kept]


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
        entries = [entry for entry in catalog.fingerprints() if entry.fingerprint == fingerprint]
        for name, row in itertools.chain.from_iterable(map(catalog.rows, entries)):
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
