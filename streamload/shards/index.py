"""The index of a shard (steps F, G): fixed-width records and their names, appended by one, followed by many.

Two files in the shard's directory. `index` is a header and records of 64 bytes, each with its own check;
`names` holds what is of variable size. A record is written after its names and after its sample's data, so
whatever the index says is there. The last record is the end: complete, or why the shard was given up after so
many samples. It knows nothing of locks, and nothing of where the data is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from streamload.errors import CacheCorrupt
from streamload.shards.record import (
    END,
    HEADER_START,
    NO_CHECKSUM,
    OWN_LAYOUT,
    RECORD,
    count_valid,
    create_file,
    fields_at,
    header_lengths,
    open_file,
    pack_frame,
    pack_header,
    pack_record,
    read_at,
    unpack_frame,
    unpack_meta,
    write_at,
)
from streamload.shards.samples import Entry

COMPLETE = "complete"
"""The status of a shard that is all there; any other says why it was given up."""

_LAYOUTS_LIMIT = 4096
_LAYOUT_LIMIT_CHARACTERS = 1024
_MAX_U4 = 0xFFFF_FFFF
_POLL_BYTES = 1 << 12
_READ_BYTES = 1 << 20


class Packed(NamedTuple):
    """What is to be written next to the two files of an index."""

    names: bytes | bytearray
    records: bytes | bytearray
    entries: int
    """How many the index has then."""
    is_end: bool = False

    @property
    def size_bytes(self) -> int:
        """What it adds to both files."""
        return len(self.names) + len(self.records)


class IndexWriter:
    """Appends the index of one shard; the only writer of its two files.

    What is packed has its size known before it is written, for whoever has to make room for it. A `write`
    that fails (a full disk) may be called again with the same: what it wrote in part isn't valid to any
    reader and is written over. Not thread-safe.

    Args:
        directory: an existing one; `index` may be there already if it is empty (as a lock, say).
        meta: JSON values that say which version of which shard this is.

    Raises:
        FileExistsError: there is an index already.
    """

    def __init__(self, directory: str | os.PathLike[str], meta: Mapping[str, object]):
        self.count = 0
        """Entries appended so far."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def size_bytes(self) -> int:
        """Bytes written to both files."""
        return self._index_bytes + self._names_bytes

    def fileno(self) -> int:
        """The descriptor of the file `index`, for a lock on it."""
        return self._index.number

    def append(self, entries: Iterable[Entry]) -> None:
        """Add entries, whose numbers go on from `count` and whose data is written. About 9 µs an entry."""
        self.write(self.pack(entries))

    def finish(
        self, status: str = COMPLETE, size: int = 0, cause: str = "", warnings: Iterable[str] = ()
    ) -> None:
        """Write the end; see `pack_end`."""
        self.write(self.pack_end(status, size, cause, warnings))

    def pack(self, entries: Iterable[Entry]) -> Packed:
        """Entries as they are to be written, whose numbers go on from `count`."""
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
        """The end: "complete", or another status for a shard that is given up after `count` entries.

        Args:
            status: "complete", or a word for what went wrong.
            size: bytes of the whole tar.
            cause: what went wrong, in a sentence.
            warnings: what a reader of a complete shard should be told.
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
        """Close the files; without a `finish` before it, the index stays one of a shard on its way."""
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
        """Names first: a record that can be read has its names."""
        write_at(self._names, names, self._names_bytes)
        write_at(self._index, records, self._index_bytes)
        self._records.update(records)
        self._names_bytes += len(names)
        self._index_bytes += len(records)


class IndexReader:
    """Reads an index, finished or still growing; `refresh` looks for what is new.

    Keeps its descriptors, so the directory may be renamed or removed meanwhile. Every record and every frame
    of names is verified: reading stops in front of the first record that fails. Not thread-safe, not
    picklable; a forked child makes its own.

    Raises:
        FileNotFoundError: no index there.
        CacheCorrupt: no (whole) header yet, damage, or another version's format.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.ended = False
        """Whether the end was read; nothing changes any more."""
        self.status = ""
        """After the end: "complete", or a word for why the shard was given up."""
        self.cause = ""
        self.warnings: list[str] = []
        self.size: int | None = None
        """After the end: bytes of the whole tar."""
        self.damaged = False
        """Whether a record behind the last entry is there but fails: flipped, or just being written."""
        self.count = 0
        """Entries so far."""
        self._buffer = np.empty(0, dtype=RECORD)
        self._verified = xxh3_64()
        self._layouts: dict[int, tuple[str, ...]] = {}
        self._layouts_seen = 0
        self._names_bytes = 0
        self._path = Path(directory)
        with contextlib.ExitStack() as unless_read:
            self._index = unless_read.enter_context(open_file(self._path / "index"))
            self._names = unless_read.enter_context(open_file(self._path / "names"))
            self.meta, self._header_bytes = self._read_header()
            self.refresh()
            unless_read.pop_all()

    def __repr__(self) -> str:
        state = self.status or ("damaged" if self.damaged else "growing")
        return f"<IndexReader {self._path.name}: {self.count} entries, {state}>"

    def __enter__(self) -> IndexReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_complete(self) -> bool:
        """Whether the whole shard is recorded, and all of its records verified."""
        return self.ended and self.status == COMPLETE

    @property
    def records(self) -> npt.NDArray[np.void]:
        """All entries as `RECORD`s, read-only; what a later `refresh` finds isn't in it."""
        view = self._buffer[: self.count]
        view.flags.writeable = False
        return view

    def refresh(self) -> bool:
        """Look for new records; True if there are entries or an end that weren't there before.

        One `pread` when nothing is new.
        """
        if self.ended:
            return False
        before, wanted = self.count, _POLL_BYTES
        while not self.ended:
            offset = self._header_bytes + self.count * RECORD.itemsize
            data = read_at(self._index, wanted, offset)
            if len(data) == wanted == _POLL_BYTES:
                wanted = _READ_BYTES
            elif self._take(data) * RECORD.itemsize < _READ_BYTES:
                break
        return self.count > before or self.ended

    def entry(self, number: int) -> Entry:
        """Entry `number`; see `entries`."""
        return self.entries((number,))[0]

    def entries(self, numbers: Sequence[int]) -> list[Entry]:
        """The entries of these numbers; about 6 µs each.

        Raises:
            IndexError: one of them isn't there (yet).
            CacheCorrupt: the names of one fail their checksum, or are another entry's.
        """
        if not numbers:
            return []
        if min(numbers) < 0 or max(numbers) >= self.count:
            raise IndexError(f"entries {min(numbers)} to {max(numbers)} of {self.count}")
        found = []
        for place in numbers:
            fields = fields_at(self._buffer, place)
            number, _, flags, start, stop, checksum, names, length, width, height, caption_bytes = fields
            try:
                key, named, *more = self._frame_at(names, length)
                prepared = (str(more[0][0]), int(more[0][1])) if more else None
                members = tuple([(extension, first, size) for extension, first, size in named])
                is_its_own = members[0][1] == start and members[-1][1] + members[-1][2] == stop
            except (LookupError, TypeError, ValueError):
                is_its_own = False
            if not is_its_own:
                raise self._corrupt(f"the names at byte {names} are not those of entry {number}")
            known = None if flags & NO_CHECKSUM else checksum
            found.append(Entry(number, key, members, width, height, caption_bytes, known, prepared))
        return found

    def layouts(self) -> dict[int, tuple[str, ...]]:
        """The extensions of each layout that the entries have so far, `OWN_LAYOUT` excepted."""
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
        """Close the files; what was read so far can still be asked for, but no names."""
        self._index.close()
        self._names.close()

    def _read_header(self) -> tuple[dict[str, object], int]:
        start = read_at(self._index, HEADER_START.size, 0)
        try:
            header_bytes, meta_bytes = header_lengths(start)
            return unpack_meta(start, read_at(self._index, meta_bytes, HEADER_START.size)), header_bytes
        except CacheCorrupt as exc:
            raise self._corrupt(str(exc)) from None

    def _take(self, data: bytes) -> int:
        """Take in records; returns how many were valid and are kept."""
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
        """The short way for a finished index that is read at once: its end vouches for all of its records."""
        if not records[-1]["flags"] & END:
            return False
        before = len(data) // RECORD.itemsize * RECORD.itemsize - RECORD.itemsize
        last = self.count + len(records) - 1
        return count_valid(data[before:], last) == 1 and self._total(data[:before]) == records[-1]["checksum"]

    def _end(self, record: np.void, before: bytes) -> bool:
        """Take in the end if it fits to the records before it."""
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
        return True

    def _total(self, more: bytes) -> int:
        """The checksum over all records so far and `more`."""
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
        if start + length > self._names_bytes:  # asked once; what is beyond the file isn't asked for at all
            self._names_bytes = os.fstat(self._names.number).st_size
        frame = read_at(self._names, length, start) if start + length <= self._names_bytes else b""
        value = unpack_frame(frame) if len(frame) == length else None
        if value is None:
            raise self._corrupt(f"names at byte {start} fail their checksum")
        return value

    def _corrupt(self, what: str) -> CacheCorrupt:
        return CacheCorrupt(f"the index in {self._path} can't be used: {what}; fetch the shard again")
