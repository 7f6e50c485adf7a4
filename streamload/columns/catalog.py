"""The columns of a cache directory by fingerprint: to list, verify, export and delete them.

Reading changes nothing, not even which columns go first. A row that is deleted is computed again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamload.cache.directory import BLOCK_BYTES
from streamload.cache.tier import Tier
from streamload.columns.column import ColumnFile, checksum_of
from streamload.columns.columns import name_of
from streamload.columns.unlike import StoredRow, UnlikeColumn
from streamload.errors import CacheCorrupt, StreamloadError
from streamload.shards.index import IndexReader
from streamload.shards.record import NO_CHECKSUM

_FILE = re.compile(r"rows\.([0-9a-f]{32})(\.slots|\.data)?")
Seeds = Mapping[bytes, list[npt.NDArray[np.uint64]]]
"""The checksums of samples by the name of their columns; several shards may begin alike."""


@dataclass(slots=True)
class FingerprintColumns:
    """The columns of one fingerprint."""

    fingerprint: bytes
    files: list[Path] = field(default_factory=list)
    rows: int = 0
    size_bytes: int = 0  # on the disk
    stored_at: float = 0.0  # when a row was last stored, in seconds since the epoch


@dataclass(frozen=True, slots=True)
class ColumnRow:
    """A row of a column, unchecked."""

    name: bytes  # of the columns of its shard
    place: int
    checksum: int
    row: StoredRow
    covered: bytes | memoryview  # by the checksum

    def is_whole(self, seed: int) -> bool:
        """True if it passes under the checksum of a sample."""
        return checksum_of(self.covered, seed) == self.checksum


def fingerprints(home: Path) -> list[FingerprintColumns]:
    """All columns below a cache directory; reads a page of 4 KB for 512 rows."""
    by_fingerprint: dict[bytes, FingerprintColumns] = {}
    for path, fingerprint in _files(home):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            columns = by_fingerprint.setdefault(fingerprint, FingerprintColumns(fingerprint))
            columns.files.append(path)
            columns.size_bytes += max(BLOCK_BYTES, status.st_blocks * 512)
            columns.stored_at = max(columns.stored_at, status.st_mtime)
            if path.suffix != ".data":
                columns.rows += _count(path)
    return [by_fingerprint[fingerprint] for fingerprint in sorted(by_fingerprint)]


def rows_of(home: Path, fingerprint: bytes) -> Iterator[ColumnRow]:
    """The rows of a fingerprint, by shard and place."""
    for path in sorted(path for path, of_file in _files(home) if of_file == fingerprint):
        if path.suffix != ".data":
            with contextlib.suppress(CacheCorrupt, OSError):
                yield from _rows_in(path)


def seeds_of(tier: Tier) -> Seeds:
    """The checksums of the samples whose shards a tier holds; of local files none are known."""
    seeds: dict[bytes, list[npt.NDArray[np.uint64]]] = {}
    for shard in tier.shards():
        with contextlib.suppress(OSError, StreamloadError):
            with contextlib.closing(IndexReader(shard.path)) as index:
                index.refresh()
                records = index.records.copy()
            if len(records) and not (records["flags"] & NO_CHECKSUM).any():
                seeds.setdefault(name_of(records["checksum"]), []).append(records["checksum"])
    return seeds


def remove(columns: FingerprintColumns) -> None:
    """Delete the columns of a fingerprint; a process that has one open goes on with a file without a name."""
    for path in columns.files:
        for name in (path.name, f"rows.{columns.fingerprint.hex()}.asked"):
            with contextlib.suppress(OSError):
                path.with_name(name).unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _files(home: Path) -> Iterator[tuple[Path, bytes]]:
    with contextlib.suppress(OSError):
        for path in sorted((home / "columns").glob("*/rows.*")):
            if match := _FILE.fullmatch(path.name):
                yield path, bytes.fromhex(match[1])


def _count(path: Path) -> int:
    with contextlib.suppress(CacheCorrupt, OSError):
        column = ColumnFile.open(str(path))
        if column is not None:
            with contextlib.closing(column):
                return int(np.count_nonzero(column.checksums()))
    return 0


def _rows_in(path: Path) -> Iterator[ColumnRow]:
    name = bytes.fromhex(path.parent.name)
    column = ColumnFile.open(str(path))
    if column is None:
        return
    with contextlib.closing(column):
        checksums = column.checksums()
        places = np.flatnonzero(checksums).tolist()
        if path.suffix != ".slots":
            for place in places:
                body = column.row(place)
                yield ColumnRow(name, place, int(checksums[place]), (column.layout, body), body)
            return
        unlike = UnlikeColumn(column, str(path.with_suffix(".data")))
        for place in places:
            for checksum, row, covered in unlike.all_rows(column.row(place)):
                yield ColumnRow(name, place, checksum, row, covered)
