"""What an index is made of (steps F, G): header, records of 64 bytes, frames of names, files.

Layout and checks only; index.py says when what is written and read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from struct import Struct

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from streamload.descriptors import Descriptor
from streamload.errors import CacheCorrupt, printable
from streamload.urls import redact

RECORD = np.dtype(
    [
        ("number", "<u4"),
        ("layout", "<u2"),
        ("flags", "<u2"),
        ("start", "<u8"),
        ("stop", "<u8"),
        ("checksum", "<u8"),
        ("names_start", "<u8"),
        ("names_length", "<u4"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("caption_bytes", "<u4"),
        ("check", "<u8"),
    ]
)
"""One record. `start` and `stop` are the sample's range in the tar, `checksum` is over its payloads."""

NO_CHECKSUM = 1
"""Flag: the payloads were not read, `checksum` means nothing."""
END = 2
"""Flag: the end. `number` entries before it, whose records have the `checksum`; `stop` is the tar's size."""
OWN_LAYOUT = 0xFFFF
"""The layout of samples whose extensions are in no table, because there are too many kinds of them."""
HEADER_START = Struct("<8sIIQ")
"""Magic, bytes of the whole header, bytes of its JSON, and a check of these and the JSON, which follows."""

_FORMAT = 1
_MAGIC = b"SLINDEX1"
_HEADER_LIMIT_BYTES = 1 << 20
_FIELDS = Struct("<IHHQQQQIIII")
_CHECK = Struct("<Q")
_to_json = json.JSONEncoder(separators=(",", ":")).encode  # ASCII: names that aren't UTF-8 survive as \udcXX
_from_json = json.JSONDecoder().raw_decode


def pack_header(meta: Mapping[str, object]) -> bytes:
    """The header, filled up to whole records.

    Raises:
        ValueError: `meta` is too large.
    """
    text = _to_json({**meta, "format": _FORMAT}).encode()
    used = HEADER_START.size + len(text)
    header_bytes = used + -used % RECORD.itemsize
    if header_bytes > _HEADER_LIMIT_BYTES:
        raise ValueError(f"meta of {len(text)} bytes; at most {_HEADER_LIMIT_BYTES} fit")
    lengths = HEADER_START.pack(_MAGIC, header_bytes, len(text), 0)[:16]
    return (lengths + _CHECK.pack(xxh3_64_intdigest(lengths + text)) + text).ljust(header_bytes, b"\0")


def header_lengths(start: bytes) -> tuple[int, int]:
    """Bytes of the whole header and of its JSON, from its first `HEADER_START.size` bytes.

    Raises:
        CacheCorrupt: what is wrong with them.
    """
    if len(start) < HEADER_START.size:
        raise CacheCorrupt("it has no header yet, or was cut within it")
    magic, header_bytes, meta_bytes, _ = HEADER_START.unpack(start)
    if magic[:7] == _MAGIC[:7] and magic != _MAGIC:
        raise CacheCorrupt(f"another version of streamload wrote it ({magic!r}, not {_MAGIC!r})")
    is_sane = magic == _MAGIC and HEADER_START.size + meta_bytes <= header_bytes <= _HEADER_LIMIT_BYTES
    if not is_sane or header_bytes % RECORD.itemsize:
        raise CacheCorrupt(f"it begins with {start[:16]!r}, not with {_MAGIC!r} and sane lengths")
    return header_bytes, meta_bytes


def unpack_meta(start: bytes, meta: bytes) -> dict[str, object]:
    """The header's values, verified.

    Raises:
        CacheCorrupt: what is wrong with them.
    """
    if xxh3_64_intdigest(start[:16] + meta) != HEADER_START.unpack(start)[3]:
        raise CacheCorrupt("its header fails its checksum, or is not whole yet")
    try:
        values = _from_json(meta.decode())[0]
    except (ValueError, RecursionError) as exc:
        raise CacheCorrupt(f"its header is no JSON: {exc}") from None
    if not isinstance(values, dict):
        raise CacheCorrupt(f"its header is a JSON {type(values).__name__}, not an object")
    if values.get("format") != _FORMAT:
        raise CacheCorrupt(f"it has format {values.get('format')!r}; this version reads {_FORMAT}")
    if isinstance(values.get("url"), str):  # whoever wrote it, and whatever was shown then
        url, mark, recipe = values["url"].rpartition("#") if "prepared" in values else (values["url"], "", "")
        values["url"] = printable(redact(url) + mark + recipe)
    return values


def pack_record(*fields: int) -> bytes:
    """One record of the fields of `RECORD` but the last, which is their check."""
    packed = _FIELDS.pack(*fields)
    return packed + _CHECK.pack(xxh3_64_intdigest(packed))


def fields_at(records: npt.NDArray[np.void], number: int) -> tuple[int, ...]:
    """The fields of one of many `RECORD`s, contiguous in memory, but for their check."""
    return _FIELDS.unpack_from(records.data, number * RECORD.itemsize)


def count_valid(data: bytes, number: int) -> int:
    """How many whole records in `data` hold and go on from `number`: from the first on, up to an end."""
    records = np.frombuffer(data, dtype=RECORD, count=len(data) // RECORD.itemsize)
    view = memoryview(data)
    expected = zip(
        records["check"].tolist(), records["number"].tolist(), records["flags"].tolist(), strict=True
    )
    for at, (check, stated, flags) in enumerate(expected):
        start = at * RECORD.itemsize
        if stated != number + at or xxh3_64_intdigest(view[start : start + _FIELDS.size]) != check:
            return at
        if flags & END:
            return at + 1
    return len(records)


def pack_frame(value: object) -> bytes:
    """A frame of `names`: check and JSON."""
    text = _to_json(value).encode("ascii")
    return xxh3_64_digest(text) + text


# The shape of a frame's JSON is its writer's, and its check says that it is as written.
def unpack_frame(frame: bytes):  # type: ignore[no-untyped-def]
    """The value of a frame; None if its check fails, or if it is no JSON."""
    text = frame[8:]
    if xxh3_64_digest(text) != frame[:8]:
        return None
    try:
        return _from_json(text.decode("ascii"))[0]
    except (ValueError, RecursionError):
        return None


def create_file(path: Path) -> Descriptor:
    """Open a file for writing that is missing, or empty; a symbolic link isn't followed."""
    file = Descriptor.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(file.number)
    if not stat.S_ISREG(status.st_mode) or status.st_size:
        file.close()
        raise FileExistsError(f"{path} is there already; an index is never written twice")
    return file


def open_file(path: Path) -> Descriptor:
    """Open for reading; a symbolic link isn't followed, and a FIFO doesn't block."""
    file = Descriptor.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file.number).st_mode):
        file.close()
        raise CacheCorrupt(f"{path} is not a regular file; remove it")
    return file


def read_at(file: Descriptor, size: int, offset: int) -> bytes:
    """Read up to `size` bytes at `offset`; what the disk can't give is damage like any other.

    Raises:
        CacheCorrupt: the disk fails.
    """
    try:
        return os.pread(file.number, size, offset)
    except OSError as exc:
        raise CacheCorrupt(f"an index can't be read: {exc.strerror}") from exc


def write_at(file: Descriptor, data: bytes | bytearray, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file.number, view, offset)
        view = view[written:]
        offset += written
