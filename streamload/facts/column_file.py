"""The file of one column of facts beside a shard's index in a tier; shard_facts.py says what is in it.

It follows its shard from the part to the published one, and writes within the budget. What can't be stored is
left out. The format is that of shards/facts.py.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamload.cache.directory import BLOCK_BYTES, blocks_bytes
from streamload.cache.locks import FileLock
from streamload.cache.shard_copy import ShardCopy
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier
from streamload.errors import CacheError
from streamload.shards.columns import Column, Values
from streamload.shards.facts import pack_frame, pack_values, valid_frames
from streamload.shards.record import open_file, write_at


class FactsFile:
    """The file of one column beside a shard's index; open only while it is read or extended.

    Args:
        column: whose values it has.

    Attributes:
        is_behind: whether it goes on with samples that the index didn't have when it was read.
    """

    def __init__(self, column: Column):
        self._digest = column.digest
        self._name = f"facts.{column.digest}"
        self._dtype = column.dtype
        self.is_behind = False
        self._path = Path()
        self._copy: ShardCopy | None = None
        self._tier: Tier | None = None  # None: nothing is stored
        self._lock: FileLock | None = None
        self._identity = (0, 0)
        self._count = 0  # the samples whose values have been read or written
        self._size_bytes = 0  # of their frames; what follows is of others, or invalid

    def open(self, view: ShardView, copy: ShardCopy) -> None:
        """Find the file beside an open index."""
        self._copy, self._tier = copy, view.tier_of(copy)
        self._path = copy.path / self._name
        self._follow()

    def read(self, copy: ShardCopy) -> tuple[int, bytes]:
        """The first sample whose value wasn't read before, and the packed values from there on."""
        with contextlib.suppress(OSError), open_file(self._path) as file:
            status = os.fstat(file.number)
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._size_bytes:
                self._identity, self._count, self._size_bytes = identity, 0, 0
            first = self._count
            data = os.pread(file.number, status.st_size - self._size_bytes, self._size_bytes)
            frames = valid_frames(self._digest, data, copy.reader.records, first)
            if len(frames.values) != (frames.stop - first) * np.dtype(self._dtype).itemsize:
                return first, b""  # no writer of ours
            self._count, self._size_bytes = frames.stop, self._size_bytes + frames.size_bytes
            self.is_behind = frames.is_behind and not copy.reader.ended
            return first, frames.values
        if self._follow():
            return self.read(copy)
        self._identity, self._count, self._size_bytes, self.is_behind = (0, 0), 0, 0, False
        return 0, b""

    def lock(self) -> bool:
        """Lock the file, which is created if it is missing; False: try again.

        Another process has it locked, or has published the shard just now: the directory was renamed.
        """
        if self._tier is None:
            return True
        try:
            if self._path.exists() or self._tier.budget.reserve_beside(BLOCK_BYTES):
                self._lock = FileLock.acquire(self._path, create=True)
                if self._lock is not None or self._path.exists():
                    return self._lock is not None
            if self._follow():
                return False
        except (OSError, CacheError):
            pass
        self._tier = None
        return True

    def _follow(self) -> bool:
        """True if the open index is in another directory by now: then the file is there, too."""
        before = self._path
        with contextlib.suppress(OSError):
            if self._copy is not None:
                self._path = self._copy.reader.directory / self._name
        return self._path != before

    def unlock(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def append(self, values: Values, records: npt.NDArray[np.void]) -> None:
        """Append the values that the locked file lacks; what can't be written isn't stored.

        Args:
            values: of all samples so far.
            records: the index records of these samples.
        """
        packed = pack_values(values[self._count :], self._dtype)
        frame = pack_frame(self._digest, self._count, packed, records)
        if self._write(frame):
            self._count, self._size_bytes = len(values), self._size_bytes + len(frame)

    def fill(self, frames: bytes) -> None:
        """Give the locked file, which has no valid frame, those of another node; `read` checks them."""
        self._write(frames)

    def _write(self, data: bytes) -> bool:
        """Write after the valid frames; False if that can't be."""
        if self._lock is None or self._tier is None:
            return False
        size_bytes = self._size_bytes + len(data)
        more_bytes = blocks_bytes(size_bytes) - max(BLOCK_BYTES, blocks_bytes(self._size_bytes))
        try:
            if more_bytes <= 0 or self._tier.budget.reserve_beside(more_bytes):
                os.ftruncate(self._lock.file.number, self._size_bytes)
                write_at(self._lock.file, data, self._size_bytes)
                with contextlib.suppress(FileNotFoundError):  # it was published just now
                    os.utime(self._path.parent)  # so that its size is measured again
                return True
        except (OSError, CacheError):
            pass
        self._tier = None
        return False
