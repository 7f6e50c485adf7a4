"""One rank's file of a journal: records that are only appended, each with a checksum over all before it.

A record is a JSON object and arrays of numbers, compressed. One that a kill has cut is dropped when the file
is opened again; one that was altered is an error.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from streamload.errors import JournalError

logger = logging.getLogger("streamload")

_MAGIC = b"streamload journal 1\n"
_HEAD = Struct("<IIQ")
"""The bytes of a record, their complement, and the checksum of it and of the checksum before it."""
_COMPLEMENT = (1 << 32) - 1


class Record(NamedTuple):
    """One record of a file.

    Attributes:
        kind: what it is; see `recorder`.
        values: JSON-able.
        arrays: by name.
    """

    kind: str
    values: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]


def path_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """The file of a rank."""
    return Path(folder) / f"rank-{rank:05d}.journal"


class RecordWriter:
    """Appends to the file of a rank, once it was opened.

    Args:
        path: of the file; made if it is missing, and its folder.

    Attributes:
        segments: the names of attempts that the file had when it was opened.
    """

    def __init__(self, path: Path):
        self.segments = set[str]()
        self._path, self._total, self._size_bytes = path, 0, 0
        self._unwritten: list[bytes] = []
        self._is_failing = self._is_others = False

    def open(self) -> None:
        """Read the file to its last whole record, and cut off what follows.

        Raises:
            OSError: it can't be read or written.
            JournalError: it isn't a journal, or was altered.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._path.is_file() or self._path.stat().st_size < len(_MAGIC):
            self._path.write_bytes(_MAGIC)
        self._size_bytes = len(_MAGIC)
        for payload, total in _payloads(self._path):
            record = _unpacked(payload)
            if record.kind == "segment":
                self.segments.add(str(record.values["segment"]))
            self._total, self._size_bytes = total, self._size_bytes + _HEAD.size + len(payload)
        os.truncate(self._path, self._size_bytes)

    def add(self, record: Record) -> None:
        """Append a record. If the file can't be written, warn once, and try again with the next record.

        A file to which another loader has written since, such as the run's next attempt, is left alone.
        """
        if self._is_others:
            return
        payload = _packed(record)
        self._total = _checksum(self._total, payload)
        self._unwritten.append(_HEAD.pack(len(payload), len(payload) ^ _COMPLEMENT, self._total) + payload)
        text = b"".join(self._unwritten)
        try:
            with self._path.open("r+b", buffering=0) as file:
                if file.seek(0, os.SEEK_END) != self._size_bytes:
                    self._is_others = True
                    logger.warning("the journal %s ends here: another loader writes to it", self._path)
                    return
                try:
                    left = memoryview(text)
                    while left:
                        left = left[file.write(left) or 0 :]
                except OSError:
                    file.truncate(self._size_bytes)
                    raise
        except OSError as exc:
            if not self._is_failing:
                logger.warning("the journal %s can't be written; training goes on: %s", self._path, exc)
            self._is_failing = True
            return
        self._size_bytes += len(text)
        self._unwritten.clear()
        self._is_failing = False


def read_records(path: Path) -> Iterator[Record]:
    """The whole records of a file, in their order.

    Raises:
        JournalError: it isn't a journal, can't be read, or was altered.
    """
    return (_unpacked(payload) for payload, _ in _payloads(path))


def _payloads(path: Path) -> Iterator[tuple[bytes, int]]:
    """The packed records of a file, each with the checksum of it and all before."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise JournalError(f"{path} is no journal of this version of streamload")
            total = number = 0
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                count, complement, expected = _HEAD.unpack(head)
                is_whole = count ^ complement == _COMPLEMENT
                payload = file.read(count) if is_whole else b""
                if not any(head) or (is_whole and len(payload) < count):
                    return  # cut by a kill, or zeros that a crash left
                total = _checksum(total, payload)
                if total != expected or not is_whole:
                    raise JournalError(f"{path}: record {number} was altered, or one before it")
                yield payload, total
                number += 1
    except OSError as exc:
        raise JournalError(f"the journal can't be read: {exc}") from exc


def _checksum(before: int, payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=before)


def _packed(record: Record) -> bytes:
    arrays = {name: np.ascontiguousarray(array) for name, array in record.arrays.items()}
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    head = json.dumps([record.kind, record.values, shapes], separators=(",", ":")).encode()
    return zlib.compress(b"\n".join([head, b"".join(array.tobytes() for array in arrays.values())]), 9)


def _unpacked(payload: bytes) -> Record:
    head, _, numbers = zlib.decompress(payload).partition(b"\n")
    kind, values, shapes = json.loads(head)
    arrays, place = {}, 0
    for name, (dtype, shape) in shapes.items():
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(numbers, dtype, count, place).reshape(shape)
        place += count * np.dtype(dtype).itemsize
    return Record(kind, values, arrays)
