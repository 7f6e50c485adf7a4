"""Blocks: the rows of a column that are there, as objects of at most 16 MB that nodes share.

    columns/<name>/rows.<fingerprint>.<k>   head: magic, bytes of a row and of the layout, places, a check;
                                            layout; a checksum for each place, 0: no row; the rows

Block k has the places from k times its number of places on; none before the last is missing, though one may
have no rows. A block is merged, never "finished": with a filter no column has all rows. Rows are checked
where they are read, each under its sample.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from streamload.columns.column import checksum_of
from streamload.errors import CacheCorrupt

_MOST_BYTES = 16 << 20
_HEAD = struct.Struct("<8sIIIQ")
_MAGIC = b"SLBLK001"


def block_rows(row_bytes: int) -> int:
    """The places of a block with rows of this size."""
    return max(1, _MOST_BYTES // (row_bytes + 8))


def object_name(name: bytes, fingerprint: bytes, block: int) -> str:
    """The name of a block in a shared cache."""
    return f"columns/{name.hex()}/rows.{fingerprint.hex()}.{block}"


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows of a column, by their places in the block."""

    layout: bytes
    row_bytes: int
    checksums: npt.NDArray[np.uint64]  # of all places of the block; 0: there is no row
    rows: Sequence[Any]  # those that there are, in the order of their places

    @classmethod
    def of(cls, layout: bytes, row_bytes: int, rows: dict[int, tuple[int, Any]]) -> RowBlock:
        """A block of rows: checksum and bytes by place in the block."""
        checksums = np.zeros(block_rows(row_bytes), "<u8")
        for place, (checksum, _) in rows.items():
            checksums[place] = checksum
        return cls(layout, row_bytes, checksums, [rows[place][1] for place in sorted(rows)])

    @classmethod
    def unpack(cls, data: bytes) -> RowBlock:
        """Read what `pack` gave.

        Raises:
            CacheCorrupt: it isn't a block, or was cut.
        """
        if len(data) < _HEAD.size:
            raise CacheCorrupt("a block of rows has no head")
        magic, row_bytes, layout_bytes, places, check = _HEAD.unpack_from(data)
        start = _HEAD.size + layout_bytes + 8 * places
        is_sane = magic == _MAGIC and row_bytes and places == block_rows(row_bytes) and start <= len(data)
        if not is_sane or check != xxh3_64_intdigest(memoryview(data)[_HEAD.size : start], row_bytes):
            raise CacheCorrupt("a block of rows has a damaged head")
        checksums = np.frombuffer(data, "<u8", places, _HEAD.size + layout_bytes)
        if len(data) != start + row_bytes * np.count_nonzero(checksums):
            raise CacheCorrupt("a block of rows was cut")
        view = memoryview(data)
        rows = [view[offset : offset + row_bytes] for offset in range(start, len(data), row_bytes)]
        return cls(data[_HEAD.size : start - 8 * places], row_bytes, checksums, rows)

    def pack(self) -> bytes:
        """Return it as the bytes of an object."""
        content = self.layout + self.checksums.astype("<u8").tobytes()
        check = xxh3_64_intdigest(content, self.row_bytes)
        head = _HEAD.pack(_MAGIC, self.row_bytes, len(self.layout), len(self.checksums), check)
        return b"".join((head, content, *self.rows))

    def items(self) -> Iterator[tuple[int, int, Any]]:
        """Place in the block, checksum and bytes of each row."""
        places = np.flatnonzero(self.checksums)
        yield from zip(places.tolist(), self.checksums[places].tolist(), self.rows, strict=True)


def merged(
    stored: RowBlock | None, layout: bytes, row_bytes: int, rows: Mapping[int, tuple[int, Any]]
) -> RowBlock | None:
    """What is stored with rows of some samples; None if that has all of them already.

    A stored row stays, unless it doesn't pass for the sample that is there now.

    Args:
        rows: the checksum of the sample and the bytes of the row, by place in the block.
    """
    is_alike = stored is not None and (stored.layout, stored.row_bytes) == (layout, row_bytes)
    there: dict[int, tuple[int, Any]] = {}
    if stored is not None and is_alike:
        there = {place: (checksum, row) for place, checksum, row in stored.items()}
    lacking = {
        place: (checksum_of(row, seed), row)
        for place, (seed, row) in rows.items()
        if place not in there or checksum_of(there[place][1], seed) != there[place][0]
    }
    return RowBlock.of(layout, row_bytes, {**there, **lacking}) if lacking or not is_alike else None
