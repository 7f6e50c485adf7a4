"""Damaged and forged indexes, read by IndexReader.

What must hold of any bytes: an index is refused with CacheCorrupt, or it gives a true prefix of the entries
that were written; no other error, and no more memory than the files take. A forged one, whose checks hold,
may lie about entries, but only so.
"""

from __future__ import annotations

import contextlib
import functools
import random
import struct
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from streamload.errors import CacheCorrupt
from streamload.shards.index import IndexReader
from streamload.shards.record import COMPLETE, HEADER_START, RECORD, pack_frame
from streamload.shards.samples import Entry
from tests.support.indexes import WrittenIndex

_RECORD_BYTES = RECORD.itemsize
_ODD_INTEGERS = (
    0,
    1,
    2,
    3,
    63,
    255,
    0x7FFF_FFFF,
    0xFFFF_FFFF,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
_FIELDS = ((0, "<I"), (4, "<H"), (6, "<H"), (8, "<Q"), (16, "<Q"), (24, "<Q"), (32, "<Q"), (40, "<I"))
_ODD_VALUES = (
    None, 7, "text", [], {}, ["key"], ["key", 3], ["key", [["jpg"]]], ["key", [["jpg", "a", {}]]], [3,
    [["j", 1, 1]]],
    ["key", []], ["key", None], {"status": "complete"}, {"status": 3, "cause": [], "warnings": 5},
    {"status": "complete", "cause": "", "warnings": None},
)  # fmt: skip
_ODD_METAS = (
    b"",
    b"[]",
    b"7",
    b'"x"',
    b"{}",
    b'{"format": 2}',
    b'{"format": 1',
    b"\xff",
    b"[" * 20_000,
    b"null",
)


class Original(NamedTuple):
    """An index as it was written."""

    index: bytes
    names: bytes
    entries: list[Entry]
    end: tuple[str, str, list[str], int] | None
    """Status, cause, warnings and size, where it is finished."""


class Case(NamedTuple):
    """The files of an index, and which original they were made of."""

    original: int
    is_forged: bool
    index: bytes
    names: bytes


def make(rng: random.Random) -> Case:
    """The files of an original, damaged or forged."""
    number = rng.randrange(len(_originals()))
    original = _originals()[number]
    index, names = bytearray(original.index), bytearray(original.names)
    is_forged = rng.random() < 0.35
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if is_forged:
            _forge(index, names, rng)
        else:
            _damage(index if rng.random() < 0.7 else names, rng)
    return Case(number, is_forged, bytes(index), bytes(names))


def check(case: Case, rng: random.Random) -> str:
    """Raise where the reader lies or fails otherwise than it may; else how it ended."""
    original = _originals()[case.original]
    directory = _directory(tempfile.gettempdir())
    (directory / "index").write_bytes(case.index)
    (directory / "names").write_bytes(case.names)
    try:
        with IndexReader(directory) as reader:
            found = _read_all(reader)
            if not case.is_forged:
                _check_truth(reader, found, original)
                if rng.random() < 0.25 and not reader.ended:
                    _check_recovery(reader, directory, case, original)
            if case.is_forged:
                return "forged"
            return "whole" if reader.ended else "damaged" if reader.damaged else "prefix"
    except CacheCorrupt:
        return "refused"


def _read_all(reader: IndexReader) -> list[Entry | None]:
    """All entries; None for those whose names fail their check."""
    with contextlib.suppress(CacheCorrupt):
        reader.layouts()
    found: list[Entry | None] = []
    for number in range(reader.count):
        try:
            found.append(reader.entry(number))
        except CacheCorrupt:
            found.append(None)
    reader.refresh()
    return found


def _check_truth(reader: IndexReader, found: list[Entry | None], original: Original) -> None:
    assert len(found) <= len(original.entries), f"{len(found)} entries of {len(original.entries)}"
    for entry, written in zip(found, original.entries, strict=False):
        assert entry in (None, written), f"{entry} was written as {written}"
    if reader.ended:
        end = (reader.status, reader.cause, reader.warnings, reader.size)
        assert (len(found), end) == (len(original.entries), original.end), f"it ends with {end}"


def _check_recovery(reader: IndexReader, directory: Path, case: Case, original: Original) -> None:
    """What is damaged may be a write that is under way: once it is right, the rest is read."""
    header_bytes = int.from_bytes(original.index[8:12], "little")
    if case.index[:header_bytes] != original.index[:header_bytes]:
        return
    (directory / "index").write_bytes(original.index)
    (directory / "names").write_bytes(original.names)
    reader.refresh()
    found = _read_all(reader)
    _check_truth(reader, found, original)
    assert (found, reader.ended) == (original.entries, original.end is not None), "it stays damaged"


def _damage(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    block = at // _RECORD_BYTES * _RECORD_BYTES
    kind = rng.randrange(8)
    if kind <= 1 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        data[at : at + 200] = bytes(min(200, len(data) - at))
    elif kind == 4:
        data[at:] = bytes(len(data) - at)  # what a file system may leave after a power failure
    elif kind == 5:
        del data[block : block + _RECORD_BYTES * rng.choice((1, 1, 3))]
    elif kind == 6:
        data[block:block] = data[: _RECORD_BYTES * rng.choice((1, 2))]
    else:
        data[at:at] = rng.randbytes(rng.choice((1, 8, 64, 100)))


def _forge(index: bytearray, names: bytearray, rng: random.Random) -> None:
    """Another value with a check that holds: of a record, of a frame that a record names, of the header."""
    header_bytes = int.from_bytes(index[8:12], "little")
    count = (len(index) - header_bytes) // _RECORD_BYTES
    draw = rng.random()
    if draw < 0.2:
        meta = rng.choice(_ODD_METAS)
        used = HEADER_START.size + len(meta)
        stated = used + -used % _RECORD_BYTES if rng.random() < 0.8 else rng.choice(_ODD_INTEGERS[:8])
        start = index[:8] + struct.pack("<II", stated, len(meta))
        fresh = start + struct.pack("<Q", xxh3_64_intdigest(bytes(start) + meta)) + meta
        index[:header_bytes] = fresh.ljust(used + -used % _RECORD_BYTES, b"\0")
    elif count > 0:
        at = header_bytes + rng.randrange(count) * _RECORD_BYTES
        record = index[at : at + _RECORD_BYTES]
        if draw < 0.6:
            place, kind = rng.choice(_FIELDS)
            value = rng.choice(_ODD_INTEGERS) & ((1 << 8 * struct.calcsize(kind)) - 1)
            struct.pack_into(kind, record, place, value)
        else:
            frame = pack_frame(rng.choice(_ODD_VALUES))
            struct.pack_into("<QI", record, 32, len(names), len(frame))
            names += frame
        record[56:] = struct.pack("<Q", xxh3_64_intdigest(bytes(record[:56])))
        index[at : at + _RECORD_BYTES] = record


@functools.cache
def _directory(place: str) -> Path:
    """Where this process writes its cases, in a place that whoever set `tempfile.tempdir` to it removes."""
    return Path(tempfile.mkdtemp(prefix="index-", dir=place))


@functools.cache
def _originals() -> tuple[Original, ...]:
    return (
        _write(5, COMPLETE, warnings=["no end marker"]),
        _write(90, None),
        _write(70, COMPLETE),
        _write(3, "ShardCut", cause="cut at byte 4,096"),
        _write(0, COMPLETE),
        _write(2, None, key="k\udcff\n" * 200),
    )


def _write(
    count: int, status: str | None, cause: str = "", warnings: list[str] | None = None, key: str = "k"
) -> Original:
    entries = [_entry(number, key) for number in range(count)]
    with tempfile.TemporaryDirectory() as directory:
        with WrittenIndex(directory, {"url": "https://host/a.tar", "size": 99_000}) as writer:
            writer.append(entries)
            if status is not None:
                writer.finish(status, 99_000, cause=cause, warnings=warnings or [])
        end: Any = None if status is None else (status, cause, warnings or [], 99_000)
        index, names = (Path(directory, name).read_bytes() for name in ("index", "names"))
    return Original(index, names, entries, end)


def _entry(number: int, key: str) -> Entry:
    start = number * 4096 + 512
    members = (("jpg", start, 700), ("txt" if number % 3 else "json", start + 1536, number % 7))
    is_several = number % 5 == 1
    if is_several:
        members = (*members, ("1.png", start + 3072, 9))
    return Entry(
        number,
        f"{key}{number}",
        members,
        10 + number,
        20,
        number % 7,
        number * 0x9E3779B97F4A7C15 % (1 << 64),
        image_sizes=((10 + number, 20), (0, 0)) if is_several else (),
    )
