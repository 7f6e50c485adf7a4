"""Files of rows → key and columns of each row, in the order of the file: Parquet, npz, CSV, JSON lines."""

from __future__ import annotations

import csv
import json
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamload.errors import OptionError
from streamload.join.options import Join

Row = dict[str, Any]
_ROWS_AT_ONCE = 1 << 14
_UNREADABLE = (
    OSError, EOFError, ValueError, KeyError, RuntimeError, csv.Error, zipfile.BadZipFile, zlib.error
)  # fmt: skip
"""Errors of the libraries that read files."""


def read_rows(path: Path, join: Join) -> Iterator[tuple[Any, Row]]:
    """Read the rows of a file: the key of each, as it is there, and its columns.

    Args:
        path: of a local copy of the file.
        join: has its format, and says which columns.

    Raises:
        OptionError: the file can't be read, or lacks a column.
    """
    readers = {".parquet": _parquet, ".npz": _npz, ".csv": _csv, ".jsonl": _json_lines}
    try:
        for row in readers[join.suffix](path, join):
            key = next(name for name in join.key_columns if name in row)
            yield row.pop(key), row
    except OptionError:
        raise
    except _UNREADABLE as exc:
        raise OptionError(f"the file can't be read: {type(exc).__name__}: {exc}") from exc


def as_key(key: Any) -> str | None:
    """A key of a row, or of a sample's JSON, as text: whole numbers in decimal; None: empty, or no key."""
    if isinstance(key, float) and key.is_integer():
        key = int(key)
    return str(key) or None if isinstance(key, str | int) and not isinstance(key, bool) else None


def _chosen(names: Collection[str], join: Join) -> list[str]:
    """The columns of keys, and of what is used.

    Raises:
        OptionError: the file lacks one.
    """
    key = next((name for name in join.key_columns if name in names), None)
    columns = names if join.columns is None else join.columns
    if key is None or not set(columns) <= set(names):
        lacking = [" or ".join(join.key_columns)] if key is None else sorted(set(columns) - set(names))
        raise OptionError(f"the file has no column {', '.join(lacking)}; it has {', '.join(names)!a:.300}")
    return list(dict.fromkeys([key, *columns]))


def _parquet(path: Path, join: Join) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError as exc:
        raise OptionError("Parquet needs pyarrow: pip install 'streamload[parquet]'") from exc
    with parquet.ParquetFile(path) as file:
        columns = _chosen(file.schema_arrow.names, join)
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
            yield from batch.to_pylist()


def _npz(path: Path, join: Join) -> Iterator[Row]:
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        raise OptionError("the file is one array; expected several with names, as np.savez writes them")
    with loaded as file:
        arrays = {name: np.atleast_1d(file[name]) for name in _chosen(file.files, join)}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len({*lengths.values()}) > 1:
        raise OptionError(f"its arrays have different lengths: {lengths!r:.300}")
    for start in range(0, max(lengths.values()), _ROWS_AT_ONCE):
        columns: list[Sequence[Any]] = []
        for array in arrays.values():
            part = array[start : start + _ROWS_AT_ONCE]
            columns.append((np.char.decode(part, "utf-8") if part.dtype.kind == "S" else part).tolist())
        yield from (dict(zip(arrays, row, strict=True)) for row in zip(*columns, strict=True))


def _csv(path: Path, join: Join) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        reader = csv.reader(file)
        names = next(reader, [])
        places = [(name, names.index(name)) for name in _chosen(names, join)]
        for row in filter(None, reader):
            if len(row) != len(names):
                raise OptionError(f"line {reader.line_num} has {len(row)} fields; expected {len(names)}")
            yield {name: row[place] for name, place in places}


def _json_lines(path: Path, join: Join) -> Iterator[Row]:
    seen_names: set[str] = set()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except ValueError as exc:
                raise OptionError(f"line {number} can't be read: {exc}") from exc
            is_object = isinstance(row, dict)
            key = next((name for name in join.key_columns if is_object and name in row), None)
            if key is None:
                names = " or ".join(join.key_columns)
                raise OptionError(f"line {number} is {row!a:.200}; expected an object with {names}")
            seen_names.update(row)
            yield row if join.columns is None else {name: row.get(name) for name in (key, *join.columns)}
    if seen_names:
        _chosen(sorted(seen_names), join)
