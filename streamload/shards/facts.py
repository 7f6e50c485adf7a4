"""The format of a column's file beside the index of a shard.

A file is a sequence of frames, appended in the order of the entries. A frame's checksum covers the column,
the values and the index records of their samples: values of another column, sample or index never pass.
facts/recipes.py makes the values, facts/shard_facts.py has the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from streamload.shards.columns import Column, FactSample, Values

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


@dataclass(frozen=True, slots=True)
class OneOfSeveral:
    """One of the numbers of a column that has several of each sample; these are made and stored together."""

    stored: Column
    place: int
    digest: str
    dtype: str = "<f8"
    from_members: bool = True
    check_name: str = ""

    @classmethod
    def of(cls, stored: Column, place: int) -> OneOfSeveral:
        """The number at a place."""
        return cls(stored, place, column_digest(["one of several", stored.digest, place]))

    def needs(self, extensions: Collection[str]) -> Collection[str]:
        """Select those of a sample's extensions whose bytes are needed; none of them an image's."""
        return self.stored.needs(extensions)

    def make(self, samples: Sequence[FactSample]) -> Values:
        """Return the value of each sample."""
        return self.stored.make(samples)[:, self.place]


def stored_columns(columns: Iterable[Column]) -> list[Column]:
    """The columns that have files: for one of several numbers that of all of them."""
    stored = (column.stored if isinstance(column, OneOfSeveral) else column for column in columns)
    return list({column.digest: column for column in stored}.values())


def pack_values(values: Values, dtype: str) -> bytes:
    """Pack values as they are stored; those of a whole-number type are clipped to its range."""
    if dtype.endswith("<f8"):
        return np.where(np.isfinite(values), values, np.nan).astype("<f8").tobytes()
    unknown = np.iinfo(dtype).max
    numbers = np.clip(np.nan_to_num(values, nan=0.0), 0, unknown - 1)
    return np.where(np.isfinite(values), numbers, unknown).astype(dtype).tobytes()


def unpack_values(data: bytes, dtype: str) -> Values:
    """Return packed values as float64[N], or float64[N, k] of k numbers each."""
    stored = np.frombuffer(data, dtype)
    values = stored.astype(np.float64)
    if not dtype.endswith("<f8"):
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
        is_sane = more and size_bytes and not size_bytes % (2 * more)
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
