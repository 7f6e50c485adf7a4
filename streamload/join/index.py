"""The rows of a file by key, in two files that are mapped: hashes of keys, sorted, and rows.

`keys` has a half of a key's xxh3_128, and where its row is in `rows`, both <u8: 16 bytes a row, of which a
look-up reads a page or two. A row is `_HEAD`, and its columns as a JSON object.
"""

from __future__ import annotations

import json
import mmap
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128, xxh3_128_intdigest, xxh32_intdigest

from streamload.errors import CacheCorrupt, CacheError, OptionError
from streamload.join.rows import Row

_HEAD = Struct("<QII")
"""The other half of a key's xxh3_128, xxh32 of the JSON, and its bytes."""
_PARTS = 256
"""Hashes are sorted in so many parts, by their first byte: a billion rows take 60 MB of memory at a time."""
_ROWS_AT_ONCE = 1 << 18
_LOW = (1 << 64) - 1


class Written(NamedTuple):
    """An index that was written.

    Attributes:
        version: of keys and rows, in their order; the same wherever the same file is read.
        keys: digest of the keys alone, which decide on the samples of a run.
        rows: number of them.
        without_key: rows of the file that have no key, and are left out.
        columns: the names that rows have, but for that of the key.
        row_bytes: the size of all rows.
    """

    version: str
    keys: str
    rows: int
    without_key: int
    columns: list[str]
    row_bytes: int


def _hash(key: str) -> tuple[int, int]:
    """Both halves of a key's hash."""
    both = xxh3_128_intdigest(key.encode("utf-8", "surrogatepass"))
    return both & _LOW, both >> 64


def _as_text(cell: object) -> str:
    """What JSON can't express of a cell; see json.dumps."""
    if isinstance(cell, date | time | Decimal):
        return str(cell)
    raise OptionError(f"a column has {type(cell).__name__}: leave it out by columns=")


def write_index(folder: Path, rows: Iterable[tuple[str | None, Row]]) -> Written:
    """Write the index of rows into an empty folder, with the same memory for any number of them.

    Raises:
        OptionError: there are no rows, a key has two that differ, or one has what JSON can't express.
    """
    content, without_key, count, start = xxh3_128(), 0, 0, 0
    parts = [array("Q") for _ in range(_PARTS)]
    columns: set[str] = set()
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_as_text).encode
    with (folder / "rows").open("wb") as file:
        for key, row in rows:
            if key is None:
                without_key += 1
                continue
            columns.update(row)
            low, high = _hash(key)
            text = encode(row).encode("utf-8", "surrogatepass")
            record = _HEAD.pack(high, xxh32_intdigest(text), len(text)) + text
            parts[low >> 56].extend((low, start))
            content.update(low.to_bytes(8, "little") + record)
            file.write(record)
            start += len(record)
            count += 1
            if count % _ROWS_AT_ONCE == 0:
                _put_off(folder, parts)
    if not count:
        raise OptionError("the file has no row with a key")
    _put_off(folder, parts)
    return Written(content.hexdigest(), _sort(folder), count, without_key, sorted(columns), start)


def _put_off(folder: Path, parts: list[array[int]]) -> None:
    """Write down the hashes that are still to be sorted."""
    for number, part in enumerate(parts):
        with (folder / f"part-{number}").open("ab") as file:
            part.tofile(file)
        del part[:]


def _sort(folder: Path) -> str:
    """Write `keys` from its parts; returns the digest of the hashes.

    Raises:
        OptionError: a key has two rows that differ.
    """
    digest = xxh3_128()
    with (folder / "keys").open("wb") as keys, (folder / "rows").open("rb") as rows:

        def record_at(start: int) -> bytes:
            rows.seek(start)
            head = rows.read(_HEAD.size)
            return head + rows.read(_HEAD.unpack(head)[2])

        for number in range(_PARTS):
            part = folder / f"part-{number}"
            pairs = np.fromfile(part, "<u8").reshape(-1, 2)
            pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
            part.unlink()
            digest.update(pairs[:, 0].tobytes())
            for place in np.flatnonzero(pairs[1:, 0] == pairs[:-1, 0]).tolist():
                first, again = (record_at(int(start)) for start in pairs[place : place + 2, 1])
                if first != again:
                    shown = [record[_HEAD.size :].decode("utf-8", "replace") for record in (first, again)]
                    raise OptionError(f"two rows have one key: {shown[0]:.200} and {shown[1]:.200}")
            pairs.tofile(keys)
    return digest.hexdigest()


class MappedRows:
    """Rows by key, of an index that is mapped: its pages are shared by all processes of a node.

    Args:
        folder: where `write_index` has written it.
        rows, row_bytes: the number of rows and their size, as it said.

    Raises:
        CacheCorrupt: the files have other sizes.
    """

    def __init__(self, folder: Path, rows: int, row_bytes: int):
        self._folder = folder
        keys_view, self._rows = (_mapped(folder / name) for name in ("keys", "rows"))
        if (len(keys_view), len(self._rows)) != (16 * rows, row_bytes):
            raise CacheCorrupt(f"the index {folder} was cut")
        pairs = keys_view.cast("Q")
        self._hashes, self._starts = pairs[::2], pairs[1::2]
        self._near = 16 + 4 * int(len(self) ** 0.5)

    def __len__(self) -> int:
        return len(self._hashes)

    def keys_digest(self) -> str:
        """Digest of the keys, as `write_index` returned it."""
        digest = xxh3_128()
        for start in range(0, len(self), _ROWS_AT_ONCE):
            digest.update(self._hashes[start : start + _ROWS_AT_ONCE].tobytes())
        return digest.hexdigest()

    def row(self, key: str) -> memoryview | None:
        """The columns of a key's row, as a JSON object; None: it has no row.

        Raises:
            CacheError: the bytes fail their checksum. It is no CacheCorrupt, for which shards are read again.
        """
        low, high = _hash(key)
        hashes, count = self._hashes, len(self._hashes)
        guess = low * count >> 64  # hashes are spread evenly
        first, stop = max(0, guess - self._near), min(count, guess + self._near)
        place = bisect_left(hashes, low, first, stop)
        if place in (first, stop):
            place = bisect_left(hashes, low)
        if place == count or hashes[place] != low:
            return None
        start = self._starts[place]
        text_start = start + _HEAD.size
        if text_start <= len(self._rows):
            other, check, size = _HEAD.unpack_from(self._rows, start)
            text = self._rows[text_start : text_start + size]
            if len(text) == size and xxh32_intdigest(text) == check:
                return text if other == high else None
        raise CacheError(
            f"the row of {key!r} in {self._folder} is damaged: `streamload cache clear --kind joins`"
        )


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
