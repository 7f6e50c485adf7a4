"""Tables of facts by sample key: CSV and Parquet files → hashes of keys, and a value for each.

16 bytes a row are kept, whatever the keys. Keys that a table has with different values are unknown.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from streamload.errors import OptionError
from streamload.shards.columns import Values

_KEY_COLUMNS = ("key", "__key__", "sample_key")
_ROWS_AT_ONCE = 1 << 16


def read_table(path: Path, column: str) -> tuple[npt.NDArray[np.uint64], Values]:
    """Read a column of a table; its keys are in the column "key", "__key__" or "sample_key".

    Args:
        path: of a .csv file in UTF-8 with a header line, or a .parquet file, for which pyarrow is needed.
        column: with the values: numbers, or their decimals; others are unknown.

    Returns:
        uint64[N], xxh3_64 of each key, ascending, and float64[N], NaN where unknown.

    Raises:
        OptionError: the table can't be read, or has no such columns.
    """
    rows = _parquet_rows(path, column) if path.suffix.lower() == ".parquet" else _csv_rows(path, column)
    hashes, values = [np.empty(0, np.uint64)], [np.empty(0)]
    while chunk := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        keys = [xxh3_64_intdigest(key.encode("utf-8", "surrogateescape")) for key, _ in chunk]
        hashes.append(np.array(keys, np.uint64))
        values.append(np.array([_number(value) for _, value in chunk], np.float64))
    return _unique(np.concatenate(hashes), np.concatenate(values))


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


def _csv_rows(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            rows = csv.reader(file)
            key, value = _places(path, next(rows, []), column)
            for row in rows:
                if len(row) > key:
                    yield row[key], row[value] if len(row) > value else None
    except (OSError, csv.Error) as exc:
        raise OptionError(f"the table {path} can't be read: {exc}") from exc


def _parquet_rows(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as exc:
        raise OptionError(f"the table {path} needs pyarrow: install it, or give a .csv file") from exc
    try:
        with parquet.ParquetFile(path) as file:
            names = list(file.schema_arrow.names)
            key, value = (names[place] for place in _places(path, names, column))
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[key, value]):
                keys = batch.column(key).to_pylist()
                _check_keys(path, keys)
                rows = zip(keys, batch.column(value).to_pylist(), strict=True)
                yield from (row for row in rows if row[0] is not None)
    except (OSError, ArrowException) as exc:
        raise OptionError(f"the table {path} can't be read: {exc}") from exc


def _check_keys(path: Path, keys: Iterable[Any]) -> None:
    other = next((key for key in keys if not isinstance(key, str | None)), None)
    if other is not None:
        raise OptionError(f"the table {path} has the key {other!r:.60}; expected strings, as in the shards")


def _places(path: Path, names: Sequence[str], column: str) -> tuple[int, int]:
    """The positions of the column of keys and of values."""
    key = next((name for name in _KEY_COLUMNS if name in names), None)
    if key is None or column not in names:
        raise OptionError(
            f"the table {path} has the columns {list(names)!r:.200}; expected {column!r}, and the sample "
            f"keys in one of {', '.join(_KEY_COLUMNS)}"
        )
    return names.index(key), names.index(column)
