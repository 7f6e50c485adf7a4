"""Rows of a fingerprint as plain numpy files, for programs that don't know streamload.

    OUT/fingerprint.json          the fingerprint and its readable parts
    OUT/layout-0/layout.json      what the results look like, and of each leaf its file, dtype and shape
    OUT/layout-0/names.npy        S64[rows]: the rows' names, hexadecimal digits
    OUT/layout-0/keys.txt         their keys, one a line, where keys were given; an empty line: not among them
    OUT/layout-0/leaf-0.npy       [rows, …]: a tensor or array of the results, in the order of the names

One pass: each row is appended, and the number of rows is put into the headers at the end.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from streamload.derived.store.catalog import Catalog
from streamload.derived.store.database import KEY_BYTES
from streamload.derived.store.sealed import StoredLeaf, described, npy_head, read_row
from streamload.errors import CacheCorrupt, OptionError

_MOST_LAYOUTS = 64


@dataclass
class Exported:
    """Result of writing.

    Attributes:
        layouts: rows by layout, in the order of their folders.
        named: rows whose keys were among those given.
        damaged: rows that were left out, as they fail a check.
    """

    layouts: list[int]
    named: int
    damaged: int


def export(
    catalog: Catalog, fingerprint: bytes, out: Path, keys: Mapping[bytes, str] | None = None
) -> Exported:
    """Write the rows of a fingerprint into a new folder, which appears once it is whole.

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
    named = damaged = 0
    layouts: dict[bytes, _Folder] = {}
    with contextlib.ExitStack() as stack:
        for name, data in catalog.rows(fingerprint):
            try:
                row, leaves = read_row(name, data)
            except CacheCorrupt:
                damaged += 1
                continue
            if row.layout not in layouts:
                if len(layouts) == _MOST_LAYOUTS:
                    raise OptionError(
                        f"the rows of {fingerprint.hex()} have more than {_MOST_LAYOUTS} layouts (numbers "
                        f"and texts in a result are in its layout): read them by the module instead"
                    )
                folder_of_layout = _Folder(folder / f"layout-{len(layouts)}", row.layout, leaves, keys)
                layouts[row.layout] = stack.enter_context(folder_of_layout)
            layouts[row.layout].add(name, row.body)
            named += keys is not None and name in keys
        for written in layouts.values():
            written.finish()
    if not layouts:
        raise OptionError(f"{fingerprint.hex()} has no rows in {catalog.root} that are whole")
    return Exported([written.rows for written in layouts.values()], named, damaged)


class _Folder(contextlib.ExitStack):
    """The files of one layout."""

    def __init__(
        self,
        path: Path,
        layout: bytes,
        leaves: tuple[StoredLeaf, ...],
        keys: Mapping[bytes, str] | None,
    ):
        super().__init__()
        path.mkdir()
        self._path = path
        self._layout = layout
        self._leaves = leaves
        self._keys = keys
        self._lines = None if keys is None else self._opened("keys.txt")
        self.rows = 0
        self._names = _Column(self._opened("names.npy"), np.dtype(f"S{2 * KEY_BYTES}"), ())
        self._columns = [
            _Column(self._opened(f"leaf-{number}.npy"), leaf.stored, leaf.shape)
            for number, leaf in enumerate(leaves)
        ]

    def _opened(self, name: str) -> IO[bytes]:
        return self.enter_context((self._path / name).open("wb"))

    def add(self, name: bytes, body: bytes | memoryview) -> None:
        """Append a row."""
        self._names.file.write(name.hex().encode())
        if self._keys is not None and self._lines is not None:
            self._lines.write(f"{self._keys.get(name, '')}\n".encode())
        for leaf, column in zip(self._leaves, self._columns, strict=True):
            column.file.write(body[leaf.start : leaf.stop])
        self.rows += 1

    def finish(self) -> None:
        """Say in each file how many rows it has, and what they are."""
        for column in (self._names, *self._columns):
            column.write_header(self.rows)
        about = {"rows": self.rows, "leaves": described(self._leaves), "layout": json.loads(self._layout)}
        (self._path / "layout.json").write_text(json.dumps(about, indent=1))


class _Column:
    """A .npy file that grows by rows: its header is written again at the end."""

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]):
        self.file, self._dtype, self._shape = file, dtype, shape
        self.write_header(0)

    def write_header(self, rows: int) -> None:
        self.file.seek(0)
        self.file.write(npy_head(self._dtype, (rows, *self._shape)))
