"""The writer of a shard's index (step F); index.py describes the files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64

from streamload.shards.record import (
    COMPLETE,
    END,
    NO_CHECKSUM,
    OWN_LAYOUT,
    create_file,
    pack_frame,
    pack_header,
    pack_record,
    write_at,
)
from streamload.shards.samples import Entry

_LAYOUTS_LIMIT = 4096
_LAYOUT_LIMIT_CHARACTERS = 1024
_MAX_U4 = 0xFFFF_FFFF


class Packed(NamedTuple):
    """The next bytes for the two files of an index, which then has `entries` entries."""

    names: bytes | bytearray
    records: bytes | bytearray
    entries: int
    is_end: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes added to both files."""
        return len(self.names) + len(self.records)


class IndexWriter:
    """Appends to the index of one shard; the only writer of its two files.

    Packing comes before writing, so that space for the packed bytes can be reserved. A `write` that fails
    (full disk) can be repeated with the same value: the bytes written so far are invalid to readers and are
    overwritten. Not thread-safe.

    Args:
        directory: must exist; may contain an empty file `index` (used as a lock).
        meta: JSON values that identify the shard and its version.

    Attributes:
        count: entries appended so far.

    Raises:
        FileExistsError: there is an index already.
    """

    def __init__(self, directory: str | os.PathLike[str], meta: Mapping[str, object]):
        self.count = 0
        self._layouts: dict[tuple[str, ...], int] = {}
        self._records = xxh3_64()
        self._names_bytes = 0
        self._is_finished = False
        with contextlib.ExitStack() as unless_begun:
            self._names = unless_begun.enter_context(create_file(Path(directory) / "names"))
            self._index = unless_begun.enter_context(create_file(Path(directory) / "index"))
            header = pack_header(meta)
            write_at(self._index, header, 0)
            unless_begun.pop_all()
        self._index_bytes = len(header)

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size_bytes(self) -> int:
        """Bytes written to both files."""
        return self._index_bytes + self._names_bytes

    def fileno(self) -> int:
        """Return the descriptor of the file `index`, for a lock on it."""
        return self._index.number

    def append(self, entries: Iterable[Entry]) -> None:
        """Append entries, numbered from `count` on, whose data is written already. About 9 µs an entry."""
        self.write(self.pack(entries))

    def finish(
        self, status: str = COMPLETE, size: int = 0, cause: str = "", warnings: Iterable[str] = ()
    ) -> None:
        """Write the end record; see `pack_end`."""
        self.write(self.pack_end(status, size, cause, warnings))

    def pack(self, entries: Iterable[Entry]) -> Packed:
        """Pack entries, numbered from `count` on."""
        names, records = bytearray(), bytearray()
        number = self.count
        for entry in entries:
            if entry.number != number or self._is_finished:
                state = "finished" if self._is_finished else "unfinished"
                raise ValueError(f"entry {entry.number} after {number} entries of an index that is {state}")
            number += 1
            prepared = () if entry.prepared is None else (entry.prepared,)
            frame = pack_frame([entry.key, entry.members, *prepared])
            records += pack_record(
                entry.number,
                self._layout(entry),
                0 if entry.checksum is not None else NO_CHECKSUM,
                entry.start,
                entry.stop,
                entry.checksum or 0,
                self._names_bytes + len(names),
                len(frame),
                min(entry.width, _MAX_U4),
                min(entry.height, _MAX_U4),
                min(entry.caption_bytes, _MAX_U4),
            )
            names += frame
        return Packed(names, records, number)

    def pack_end(
        self, status: str = COMPLETE, size: int = 0, cause: str = "", warnings: Iterable[str] = ()
    ) -> Packed:
        """Pack the end record: of a complete shard, or of one that is given up after `count` entries.

        Args:
            status: "complete", or a word for what went wrong.
            size: bytes of the whole tar.
            cause: what went wrong, in a sentence.
            warnings: about a complete shard, for its readers.
        """
        if self._is_finished:
            raise ValueError("the index has its end already")
        frame = pack_frame({"status": status, "cause": cause, "warnings": list(warnings)})
        total = self._records.intdigest()
        record = pack_record(self.count, 0, END, 0, size, total, self._names_bytes, len(frame), 0, 0, 0)
        return Packed(frame, record, self.count, is_end=True)

    def write(self, packed: Packed) -> None:
        """Write what was packed last."""
        self._write(packed.names, packed.records)
        self.count, self._is_finished = packed.entries, packed.is_end

    def close(self) -> None:
        """Close the files. Without a `finish` before, the index remains that of an incomplete shard."""
        self._names.close()
        self._index.close()

    def _layout(self, entry: Entry) -> int:
        extensions = tuple([member[0] for member in entry.members])
        layout = self._layouts.get(extensions)
        if layout is not None:
            return layout
        if len(self._layouts) >= _LAYOUTS_LIMIT or sum(map(len, extensions)) > _LAYOUT_LIMIT_CHARACTERS:
            return OWN_LAYOUT
        return self._layouts.setdefault(extensions, len(self._layouts))

    def _write(self, names: bytes | bytearray, records: bytes | bytearray) -> None:
        """Write names first: a record that can be read has its names."""
        write_at(self._names, names, self._names_bytes)
        write_at(self._index, records, self._index_bytes)
        self._records.update(records)
        self._names_bytes += len(names)
        self._index_bytes += len(records)
