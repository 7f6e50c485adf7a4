"""The format of a column's file beside the index of a shard.

A file is a sequence of frames, appended in the order of the entries. A frame's checksum covers the column,
the values and the index records of their samples: values of another column, sample or index never pass.
facts/recipes.py makes the values, facts/shard_facts.py has the files.
"""

from __future__ import annotations

import hashlib
import json
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from streamload.shards.columns import Values

_FORMAT = 1
"""Version of the file format, and of how built-in columns are made."""
_HEAD = Struct("<IIQ")
"""The number of a frame's first entry, how many there are, and the bytes of their values."""
_CHECK = Struct("<Q")


def column_digest(definition: Any) -> str:
    """The digest of a column from its definition, in JSON values."""
    return hashlib.blake2b(
        json.dumps([_FORMAT, definition], sort_keys=True).encode(), digest_size=16
    ).hexdigest()


def pack_values(values: Values, dtype: str) -> bytes:
    """Pack values as they are stored; those of a whole-number type are clipped to its range."""
    if dtype == "<f8":
        return np.where(np.isfinite(values), values, np.nan).astype(dtype).tobytes()
    unknown = np.iinfo(dtype).max
    numbers = np.clip(np.nan_to_num(values, nan=0.0), 0, unknown - 1)
    return np.where(np.isfinite(values), numbers, unknown).astype(dtype).tobytes()


def unpack_values(data: bytes, dtype: str) -> Values:
    """Return packed values as float64."""
    stored = np.frombuffer(data, dtype)
    values = stored.astype(np.float64)
    if dtype != "<f8":
        values[stored == np.iinfo(dtype).max] = np.nan
    return values


def pack_frame(column: str, first: int, values: bytes, records: npt.NDArray[np.void]) -> bytes:
    """Pack the values of the samples from number `first` on.

    Args:
        column: its digest.
        first: the number of the first sample.
        values: packed.
        records: the index records of all samples, at least up to the last of these.
    """
    count = len(records) - first
    head = _HEAD.pack(first, count, len(values))
    return head + _CHECK.pack(_checksum(column, head, values, records[first:])) + values


def pack_each(column: str, values: Values, dtype: str, records: npt.NDArray[np.void]) -> bytes:
    """Pack the values of a shard's samples with a frame for each, as the shared cache has them.

    Args:
        column: its digest.
        records: the index records of all samples.
    """
    packed, size_bytes = pack_values(values, dtype), np.dtype(dtype).itemsize
    return b"".join(
        pack_frame(column, number, packed[number * size_bytes :][:size_bytes], records[: number + 1])
        for number in range(len(values))
    )


class Frames(NamedTuple):
    """The valid frames at the start of some bytes of a file.

    Attributes:
        values: packed.
        stop: the number of the sample after the last of theirs.
        size_bytes: of the frames.
        is_behind: whether the next frame is of samples that aren't among the given records.
    """

    values: bytes
    stop: int
    size_bytes: int
    is_behind: bool


def valid_frames(column: str, data: bytes, records: npt.NDArray[np.void], first: int = 0) -> Frames:
    """Read frames up to the first that is cut, fails its check, or is of more samples than there are records.

    Args:
        column: its digest.
        data: of a file, from a frame on.
        records: the index records of the shard's samples so far.
        first: the number of the first sample of that frame.
    """
    frames, count, offset = bytearray(), first, 0
    while offset + _HEAD.size + _CHECK.size <= len(data):
        head = data[offset : offset + _HEAD.size]
        number, more, size_bytes = _HEAD.unpack(head)
        begin = offset + _HEAD.size + _CHECK.size
        is_sane = more and size_bytes in (2 * more, 4 * more, 8 * more)
        if number != count or not is_sane or begin + size_bytes > len(data):
            break
        if count + more > len(records):
            return Frames(bytes(frames), count, offset, is_behind=True)
        values = data[begin : begin + size_bytes]
        (check,) = _CHECK.unpack_from(data, offset + _HEAD.size)
        if _checksum(column, head, values, records[count : count + more]) != check:
            break
        frames += values
        count, offset = count + more, begin + size_bytes
    return Frames(bytes(frames), count, offset, is_behind=False)


def _checksum(column: str, head: bytes, values: bytes, records: npt.NDArray[np.void]) -> int:
    digest = xxh3_64(column.encode())
    digest.update(head)
    digest.update(records.tobytes())
    digest.update(values)
    return digest.intdigest()
