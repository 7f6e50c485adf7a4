"""Facts by sample key, from files of rows (join/rows.py) → hashes of keys, and a value for each.

16 bytes a row are kept, whatever the keys. Keys that a file has with different values are unknown.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from streamload.errors import OptionError
from streamload.join.options import Join
from streamload.join.rows import read_rows
from streamload.shards.columns import Values

_ROWS_AT_ONCE = 1 << 16


def read_table(path: Path, column: str) -> tuple[npt.NDArray[np.uint64], Values]:
    """Read a column of a table, by the keys of samples.

    Args:
        path: of a file as `Shards(join=…)` takes it, with a column of keys.
        column: with the values: numbers, or their decimals; others are unknown.

    Returns:
        uint64[N], xxh3_64 of each key, ascending, and float64[N], NaN where unknown.

    Raises:
        OptionError: the table can't be read, or has no such columns.
    """
    rows = read_rows(path, Join(path, columns=[column]))
    hashes, values = [np.empty(0, np.uint64)], [np.empty(0)]
    try:
        while chunk := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            keyed = [(_checked(key), row.get(column)) for key, row in chunk if key is not None]
            hashes.append(np.array([xxh3_64_intdigest(key) for key, _ in keyed], np.uint64))
            values.append(np.array([_number(value) for _, value in keyed], np.float64))
    except OptionError as exc:
        raise OptionError(f"the table {path}: {exc}") from exc
    return _unique(np.concatenate(hashes), np.concatenate(values))


def _checked(key: Any) -> bytes:
    if not isinstance(key, str):
        raise OptionError(f"has the key {key!r:.60}; expected strings, as in the shards")
    return key.encode("utf-8", "surrogateescape")


def _unique(keys: npt.NDArray[np.uint64], values: Values) -> tuple[npt.NDArray[np.uint64], Values]:
    """Sort by key; a key with different values is unknown."""
    if not len(keys):
        return keys, values
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    unique_keys, starts = np.unique(keys, return_index=True)
    least, most = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return unique_keys, np.where(least == most, least, np.nan)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan
