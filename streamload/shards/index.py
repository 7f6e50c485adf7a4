"""The index of a shard, its reader and its writer (steps F and G). Many processes follow while one appends.

Two files in the shard's directory: `index` is a header and 64-byte records, each with a checksum; `names`
has the data of variable size. A record is written after its names and its sample's data, so whatever the
index lists exists. The last record is the end: complete, or why the shard was given up. Locks and data
files are not the index's concern.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from streamload.descriptors import Descriptor
from streamload.errors import CacheCorrupt
from streamload.shards.record import (
    COMPLETE,
    END,
    LINKED,
    NO_CHECKSUM,
    OWN_LAYOUT,
    RECORD,
    UNSUPPORTED,
    count_valid,
    create_file,
    fields_at,
    open_file,
    pack_frame,
    pack_header,
    pack_record,
    read_at,
    read_header,
    unpack_frame,
    write_at,
)
from streamload.shards.samples import Entry

_POLL_BYTES = 1 << 12
_READ_BYTES = 1 << 20
_LAYOUTS_LIMIT = 4096
_LAYOUT_LIMIT_CHARACTERS = 1024
_MAX_U4 = 0xFFFF_FFFF


class LocalVersion(NamedTuple):
    """The version of a local file: a copy may keep size and mtime, but not the rest."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: str | os.PathLike[str] | int) -> LocalVersion:
        """Return the current version of a file, given by path or descriptor."""
        return cls.of_status(os.stat(path))  # noqa: PTH116 - also for bytes paths and descriptors

    @classmethod
    def of_status(cls, status: os.stat_result) -> LocalVersion:
        """Return the version of a file with this status."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def is_of(self, meta: Mapping[str, object]) -> bool:
        """Return whether an index with this meta was built from this version."""
        return all(meta.get(name) == value for name, value in self._asdict().items())


class IndexReader:
    """Reads an index, finished or still growing; `refresh` reads what is new.

    Keeps `names` open, and `index` to its end, so the directory may be renamed or removed. Every record and
    every frame of names is verified; reading stops before the first invalid record. Not thread-safe, not
    picklable; a forked child opens its own.

    Args:
        names: its file of names if it is open already; closed with the reader.

    Attributes:
        ended: whether the end record was read; then nothing changes any more.
        status: after the end: "complete", or a word for why the shard was given up.
        cause, warnings: after the end; see `IndexWriter.pack_end`.
        size: after the end: bytes of the whole tar.
        damaged: whether an invalid record follows the last entry: corrupt, or just being written.

    Raises:
        FileNotFoundError: there is no index.
        CacheCorrupt: no complete header yet, damage, or the format of another version.
    """

    def __init__(self, directory: str | os.PathLike[str], names: Descriptor | None = None):
        self.count = 0
        self.ended = self.damaged = False
        self.status = self.cause = ""
        self.warnings: list[str] = []
        self.size: int | None = None
        self._buffer = np.empty(0, dtype=RECORD)
        self._verified = xxh3_64()
        self._layouts: dict[int, tuple[str, ...]] = {}
        self._layouts_seen = 0
        self._names_bytes = 0
        self._path = Path(directory)
        with contextlib.ExitStack() as unless_read:
            self._index = unless_read.enter_context(open_file(f"{self._path}/index"))
            self._names = names or unless_read.enter_context(open_file(f"{self._path}/names"))
            self.meta, self._header_bytes = self._read_header()
            self.refresh()
            unless_read.pop_all()

    def __repr__(self) -> str:
        state = self.status or ("damaged" if self.damaged else "growing")
        return f"<IndexReader {self._path.name}: {self.count} entries, {state}>"

    def __enter__(self) -> IndexReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_complete(self) -> bool:
        """True if the whole shard is indexed, and all records are verified."""
        return self.ended and self.status == COMPLETE

    @property
    def directory(self) -> Path:
        """Path of the files now: the directory may have been renamed since they were opened."""
        return Path(f"/proc/self/fd/{self._names.number}").readlink().parent

    @property
    def records(self) -> npt.NDArray[np.void]:
        """All entries so far as `RECORD`s, read-only."""
        view = self._buffer[: self.count]
        view.flags.writeable = False
        return view

    def refresh(self) -> bool:
        """Read new records. Return True if there is a new entry or the end.

        One `pread` if nothing is new.
        """
        if self.ended:
            return False
        before, read_bytes = self.count, _POLL_BYTES
        while not self.ended:
            offset = self._header_bytes + self.count * RECORD.itemsize
            data = read_at(self._index, read_bytes, offset)
            if len(data) == read_bytes == _POLL_BYTES:
                read_bytes = _READ_BYTES
            elif self._take(data) * RECORD.itemsize < _READ_BYTES:
                break
        return self.count > before or self.ended

    def entry(self, number: int) -> Entry:
        """Return entry `number`; see `entries`."""
        return self.entries((number,))[0]

    def entries(self, numbers: Sequence[int]) -> list[Entry]:
        """Return the entries with these numbers; about 6 µs each.

        Raises:
            IndexError: one of them doesn't exist (yet).
            CacheCorrupt: the names of one fail their checksum, or belong to another entry.
        """
        if not numbers:
            return []
        if self._names.number < 0:
            raise self._corrupt("it was closed")
        if min(numbers) < 0 or max(numbers) >= self.count:
            raise IndexError(f"entries {min(numbers)} to {max(numbers)} of {self.count}")
        entries = []
        for fields in fields_at(self._buffer, numbers):
            number, _, flags, start, stop, checksum, names, length, width, height, caption_bytes = fields
            try:
                key, named, *more = self._frame_at(names, length)
                has_prepared = bool(more) and (len(more) == 1 or more[0] is not None)
                prepared = (str(more[0][0]), int(more[0][1])) if has_prepared else None
                members = tuple(map(tuple, named))
                if flags & LINKED:
                    is_its_own = all(
                        first + size <= start or start <= first <= first + size <= stop
                        for _, first, size in members
                    )
                else:
                    is_its_own = members[0][1] == start and members[-1][1] + members[-1][2] == stop
            except (LookupError, TypeError, ValueError):
                is_its_own = False
            if not is_its_own:
                raise self._corrupt(f"the names at byte {names} are not those of entry {number}")
            known_checksum = None if flags & NO_CHECKSUM else checksum
            entry = Entry(number, key, members, width, height, caption_bytes, known_checksum, prepared)
            if flags & (LINKED | UNSUPPORTED):
                span = (start, stop) if flags & LINKED else None
                entry = entry._replace(span=span, has_unsupported=bool(flags & UNSUPPORTED))
            if len(more) > 1:
                entry = entry._replace(image_sizes=tuple(map(tuple, more[1])))
            entries.append(entry)
        return entries

    def layouts(self) -> dict[int, tuple[str, ...]]:
        """Return the extensions of each layout so far, except `OWN_LAYOUT`."""
        if self._layouts_seen < self.count:
            fresh = self.records["layout"][self._layouts_seen :]
            for layout in np.flatnonzero(np.bincount(fresh)).tolist():
                if layout != OWN_LAYOUT and layout not in self._layouts:
                    first = self._layouts_seen + int(np.argmax(fresh == layout))
                    members = self.entry(first).members
                    self._layouts[layout] = tuple(extension for extension, _, _ in members)
            self._layouts_seen = self.count
        return self._layouts

    def close(self) -> None:
        """Close the files. Records that were read remain available, names don't."""
        self._index.close()
        self._names.close()

    def _read_header(self) -> tuple[dict[str, object], int]:
        try:
            return read_header(functools.partial(read_at, self._index))
        except CacheCorrupt as exc:
            raise self._corrupt(str(exc)) from None

    def _take(self, data: bytes) -> int:
        """Verify and keep records. Return how many were valid."""
        found = len(data) // RECORD.itemsize
        if not found:
            self.damaged = False
            return 0
        records = np.frombuffer(data, dtype=RECORD, count=found)
        good = found if self._is_finished(data, records) else count_valid(data, self.count)
        self.damaged = good < found
        entries = good
        if good and records["flags"][good - 1] & END:
            entries -= 1
            if not self._end(records[entries], data[: entries * RECORD.itemsize]):
                self.damaged, good = True, entries
        if entries:
            self._verified.update(data[: entries * RECORD.itemsize])
            self._keep(records[:entries])
        return good

    def _is_finished(self, data: bytes, records: npt.NDArray[np.void]) -> bool:
        """Shortcut for a finished index read at once: the end record has a checksum of all records."""
        if not records[-1]["flags"] & END:
            return False
        before = len(data) // RECORD.itemsize * RECORD.itemsize - RECORD.itemsize
        last = self.count + len(records) - 1
        return count_valid(data[before:], last) == 1 and self._total(data[:before]) == records[-1]["checksum"]

    def _end(self, record: np.void, before: bytes) -> bool:
        """Read the end record. Return whether it matches the records before it."""
        if self._total(before) != record["checksum"]:
            return False
        try:
            verdict = self._frame_at(int(record["names_start"]), int(record["names_length"]))
            status, cause, warnings = str(verdict["status"]), str(verdict["cause"]), list(verdict["warnings"])
        except (CacheCorrupt, KeyError, TypeError):
            return False
        self.status, self.cause, self.warnings = status, cause, warnings
        self.size = int(record["stop"])
        self.ended, self.damaged = True, False
        self._index.close()  # nothing changes any more
        return True

    def _total(self, more: bytes) -> int:
        """Return the checksum of all records so far and `more`."""
        total = self._verified.copy()
        total.update(more)
        return int(total.intdigest())

    def _keep(self, records: npt.NDArray[np.void]) -> None:
        count = self.count + len(records)
        if count > len(self._buffer):
            grown = np.empty(max(count, 2 * len(self._buffer)), dtype=RECORD)
            grown[: self.count] = self._buffer[: self.count]
            self._buffer = grown
        self._buffer[self.count : count] = records
        self.count = count

    def _frame_at(self, start: int, length: int):  # type: ignore[no-untyped-def]
        if start + length > self._names_bytes:  # never read beyond the end of the file
            self._names_bytes = os.fstat(self._names.number).st_size
        frame = read_at(self._names, length, start) if start + length <= self._names_bytes else b""
        value = unpack_frame(frame) if len(frame) == length else None
        if value is None:
            raise self._corrupt(f"names at byte {start} fail their checksum")
        return value

    def _corrupt(self, cause: str) -> CacheCorrupt:
        return CacheCorrupt(f"the index in {self._path} can't be used: {cause}; fetch the shard again")


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

    Raises:
        FileExistsError: there is an index already.
    """

    def __init__(self, directory: str | os.PathLike[str], meta: Mapping[str, object]):
        self.count = 0
        self._layouts: dict[tuple[str, ...], int] = {}
        self._records = xxh3_64()
        self._names_bytes = 0
        self._is_finished = False
        place = os.fspath(directory)
        with contextlib.ExitStack() as unless_begun:
            self._names = unless_begun.enter_context(create_file(f"{place}/names"))
            self._index = unless_begun.enter_context(create_file(f"{place}/index"))
            header = pack_header(meta)
            write_at(self._index, header, 0)
            unless_begun.pop_all()
        self._index_bytes = len(header)

    @property
    def size_bytes(self) -> int:
        """Bytes written to both files."""
        return self._index_bytes + self._names_bytes

    def pack(self, entries: Iterable[Entry]) -> Packed:
        """Pack entries, numbered from `count` on; about 9 µs each. Their data is written before they are."""
        names, records = bytearray(), bytearray()
        number = self.count
        for entry in entries:
            if entry.number != number or self._is_finished:
                state = "finished" if self._is_finished else "unfinished"
                raise ValueError(f"entry {entry.number} after {number} entries of an index that is {state}")
            number += 1
            more = (entry.prepared, entry.image_sizes) if entry.image_sizes else (entry.prepared,)
            frame = pack_frame([entry.key, entry.members, *(more if any(more) else ())])
            records += pack_record(
                entry.number,
                self._layout(entry),
                (entry.checksum is None) * NO_CHECKSUM
                + (entry.span is not None) * LINKED
                + entry.has_unsupported * UNSUPPORTED,
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

    def pack_end(self, status: str, size: int, cause: str, warnings: Iterable[str]) -> Packed:
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
        """Write what was packed last, names first: a record that can be read has its names."""
        write_at(self._names, packed.names, self._names_bytes)
        write_at(self._index, packed.records, self._index_bytes)
        self._records.update(packed.records)
        self._names_bytes += len(packed.names)
        self._index_bytes += len(packed.records)
        self.count, self._is_finished = packed.entries, packed.is_end

    def close(self) -> None:
        """Close the files. Without an end record the index remains that of an incomplete shard."""
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
