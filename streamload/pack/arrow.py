"""Parquet files, and Arrow files as the `datasets` library saves them → rows, group by group."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streamload.errors import OptionError
from streamload.pack.rows import CONVERSATIONS, PackColumns, PackSample, sample_of

_ROWS_AT_ONCE = 256
_BUFFER_BYTES = 8 << 20


@dataclass(frozen=True)
class ArrowFile:
    """A Parquet file on a file system of fsspec, or a local stream of Arrow record batches (`.arrow`)."""

    path: str
    size_bytes: int
    files: Any = field(repr=False)

    def groups(self) -> tuple[list[int], Any]:
        """Number of rows of each row group or record batch, and the schema."""
        if self.path.endswith(".arrow"):
            stream = self._stream()
            return [batch.num_rows for batch in stream], stream.schema
        with self._parquet() as file:
            groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            return groups, file.schema_arrow

    def batches(self, group: int, columns: Sequence[str] | None) -> Iterator[Any]:
        """Yield a group's record batches, with some columns or all."""
        if self.path.endswith(".arrow"):
            batch = next(itertools.islice(self._stream(), group, None))
            yield batch if columns is None else batch.select(columns)
            return
        with self._parquet() as file:
            yield from file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns)

    def _stream(self) -> Any:
        """Map the file into memory: a batch that isn't used isn't read."""
        from pyarrow import ipc, memory_map

        return ipc.open_stream(memory_map(self.path))

    @contextlib.contextmanager
    def _parquet(self) -> Iterator[Any]:
        from pyarrow import parquet

        with (
            self.files.open(self.path, "rb") as source,
            parquet.ParquetFile(source, buffer_size=_BUFFER_BYTES) as file,
        ):
            yield file


@dataclass(frozen=True)
class Rows:
    """Rows of one group of a file, which are read at once.

    Attributes:
        first: number of the group's first row in the source.
        chosen: the rows, counted in the group.
        names: the columns to read; None: all.
    """

    file: ArrowFile
    group: int
    first: int
    chosen: range
    columns: PackColumns
    names: tuple[str, ...] | None

    def parts(self, most: int, spread: bool) -> list[Rows]:
        """Cut the rows into parts of at most so many, each spread over the group or from one place."""
        count = math.ceil(len(self.chosen) / most)
        cuts = [
            slice(part, None, count) if spread else slice(part * most, (part + 1) * most)
            for part in range(count)
        ]
        return [replace(self, chosen=self.chosen[cut]) for cut in cuts]

    def samples(self) -> Iterator[PackSample | str]:
        """Yield the rows' samples; a string says why a row is left out."""
        start = 0
        for batch in self.file.batches(self.group, self.names):
            chosen = [row for row in range(start, start + batch.num_rows) if row in self.chosen]
            cells = batch.take([row - start for row in chosen]).to_pylist() if chosen else []
            start += batch.num_rows
            for row, values in zip(chosen, cells, strict=True):
                number = self.first + row
                yield sample_of(values, self.columns, f"{number:09d}", f"{self.file.path}, row {number + 1}")


def rows_of(files: Sequence[ArrowFile], columns: PackColumns) -> tuple[list[Rows], list[str] | None]:
    """All groups of the files, and the names of the labels if the `datasets` library has stored them.

    Raises:
        OptionError: pyarrow isn't installed, or a file can't be read.
    """
    try:
        import pyarrow
    except ImportError as exc:
        raise OptionError("Parquet and Arrow need pyarrow: pip install 'streamload[parquet]'") from exc
    pieces: list[Rows] = []
    classes, first = None, 0
    label = columns.label or "label"
    for file in files:
        try:
            counts, schema = file.groups()
        except pyarrow.ArrowInvalid as exc:
            raise OptionError(
                f"{file.path} is neither Parquet nor a stream of Arrow record batches: {exc}"
            ) from exc
        with contextlib.suppress(ValueError, TypeError, KeyError):  # no such label, or another one's metadata
            about = json.loads((schema.metadata or {})[b"huggingface"])
            classes = about["info"]["features"][label]["names"]
        needed = {columns.image, columns.caption, label, columns.key, *columns.kept}
        is_special = columns.image not in schema.names  # a conversation, or an error that names all columns
        takes_all = is_special or columns.kept == ("*",) or {*CONVERSATIONS} & {*schema.names}
        names = None if takes_all else tuple(name for name in schema.names if name in needed)
        for group, count in enumerate(counts):
            pieces.append(Rows(file, group, first, range(count), columns, names))
            first += count
    return pieces, classes
