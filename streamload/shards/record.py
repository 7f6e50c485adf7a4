"""The binary format of an index (steps F and G): header, 64-byte records, frames of names.

Layout and checksums only; index.py writes and reads them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
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
"""One record. `start` and `stop` are the sample's own range in the tar, `checksum` is of its payloads."""

COMPLETE = "complete"
"""The status of a complete shard; any other says why it was given up."""
NO_CHECKSUM = 1
"""Flag: the payloads were not read, so `checksum` is meaningless."""
LINKED = 4
"""Flag: the sample has links, whose payloads lie before `start`."""
UNSUPPORTED = 8
"""Flag: members of the sample are left out, as links without a payload in the tar, or as sparse files."""
END = 2
"""Flag: end record. `number` counts the entries, `checksum` is of their records, `stop` the tar's size."""
OWN_LAYOUT = 0xFFFF
"""The layout of samples whose extensions are in no table, because there are too many combinations."""
HEADER_START = Struct("<8sIIQ")
"""Magic, sizes of the whole header and of its JSON, and a checksum of these and of the JSON after it."""

_FORMAT = 1
_MAGIC = b"SLINDEX1"
_HEADER_LIMIT_BYTES = 1 << 20
_FIELDS = Struct("<IHHQQQQIIII")
_CHECK = Struct("<Q")
_to_json = json.JSONEncoder(separators=(",", ":")).encode  # ASCII: names that aren't UTF-8 survive as \udcXX
_from_json = json.JSONDecoder().raw_decode


def pack_header(meta: Mapping[str, object]) -> bytes:
    """Return the header, padded to whole records.

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


def read_header(read: Callable[[int, int], bytes]) -> tuple[dict[str, object], int]:
    """Verify the header of an index; return its values, and its size in bytes.

    Args:
        read: returns so many bytes of the index from an offset on, or fewer.

    Raises:
        CacheCorrupt: it is invalid; says why.
    """
    start = read(HEADER_START.size, 0)
    if len(start) < HEADER_START.size:
        raise CacheCorrupt("it has no header yet, or a cut one")
    magic, header_bytes, meta_bytes, check = HEADER_START.unpack(start)
    if magic[:7] == _MAGIC[:7] and magic != _MAGIC:
        raise CacheCorrupt(f"another version of streamload wrote it ({magic!r}, not {_MAGIC!r})")
    is_sane = magic == _MAGIC and HEADER_START.size + meta_bytes <= header_bytes <= _HEADER_LIMIT_BYTES
    if not is_sane or header_bytes % RECORD.itemsize:
        raise CacheCorrupt(f"it begins with {start[:16]!r}, not with {_MAGIC!r} and valid lengths")
    meta = read(meta_bytes, HEADER_START.size)
    if xxh3_64_intdigest(start[:16] + meta) != check:
        raise CacheCorrupt("its header fails its checksum, or is incomplete")
    try:
        values = _from_json(meta.decode())[0]
    except (ValueError, RecursionError) as exc:
        raise CacheCorrupt(f"its header is no JSON: {exc}") from None
    if not isinstance(values, dict):
        raise CacheCorrupt(f"its header is a JSON {type(values).__name__}, not an object")
    if values.get("format") != _FORMAT:
        raise CacheCorrupt(f"it has format {values.get('format')!r}; this version reads {_FORMAT}")
    return values, header_bytes


def shown_url(meta: Mapping[str, object]) -> str:
    """The URL in a header as it may be shown: any process may have written it; "": there is none."""
    url, mark, recipe = str(meta.get("url", "")), "", ""
    if "prepared" in meta:
        url, mark, recipe = url.rpartition("#")
    return printable(redact(url) + mark + recipe)


def pack_record(*fields: int) -> bytes:
    """Pack the fields of a `RECORD` and append their checksum."""
    packed = _FIELDS.pack(*fields)
    return packed + _CHECK.pack(xxh3_64_intdigest(packed))


def fields_at(records: npt.NDArray[np.void], numbers: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the fields of some of contiguous `RECORD`s, without their checksums."""
    data = records.data
    return [_FIELDS.unpack_from(data, number * RECORD.itemsize) for number in numbers]


def count_valid(data: bytes, number: int) -> int:
    """Return how many leading records are valid and numbered from `number` on, up to an end record."""
    records = np.frombuffer(data, dtype=RECORD, count=len(data) // RECORD.itemsize)
    view = memoryview(data)
    expected = zip(
        records["check"].tolist(), records["number"].tolist(), records["flags"].tolist(), strict=True
    )
    for row, (check, stated, flags) in enumerate(expected):
        start = row * RECORD.itemsize
        if stated != number + row or xxh3_64_intdigest(view[start : start + _FIELDS.size]) != check:
            return row
        if flags & END:
            return row + 1
    return len(records)


def pack_frame(value: object) -> bytes:
    """Return a frame of `names`: checksum and JSON."""
    text = _to_json(value).encode("ascii")
    return xxh3_64_digest(text) + text


# Untyped: the checksum shows that the JSON is what its writer wrote.
def unpack_frame(frame: bytes):  # type: ignore[no-untyped-def]
    """Return the value of a frame; None if its checksum fails or it isn't JSON."""
    text = frame[8:]
    if xxh3_64_digest(text) != frame[:8]:
        return None
    try:
        return _from_json(text.decode("ascii"))[0]
    except (ValueError, RecursionError):
        return None


def create_file(path: str | Path) -> Descriptor:
    """Open a missing or empty file for writing. Doesn't follow symbolic links."""
    file = Descriptor.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(file.number)
    if not stat.S_ISREG(status.st_mode) or status.st_size:
        file.close()
        raise FileExistsError(f"{path} exists already; an index is never written twice")
    return file


def open_file(path: str | Path) -> Descriptor:
    """Open a regular file for reading. Doesn't follow symbolic links, and doesn't block on a FIFO."""
    file = Descriptor.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file.number).st_mode):
        file.close()
        raise CacheCorrupt(f"{path} is not a regular file; remove it")
    return file


def read_at(file: Descriptor, size: int, offset: int) -> bytes:
    """Read up to `size` bytes at `offset`.

    Raises:
        CacheCorrupt: the disk fails, which is damage like any other.
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
