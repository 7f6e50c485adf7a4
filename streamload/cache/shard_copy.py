"""One copy of a shard, open for reading: published, partial, index-only, or a tombstone (step G)."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from streamload.cache.locks import FileLock
from streamload.cache.sample_io import Needed, ReadMemory, read_sample
from streamload.cache.shard import Shard, version_of
from streamload.descriptors import Descriptor
from streamload.errors import CacheCorrupt, is_shortage
from streamload.shards.index import IndexReader
from streamload.shards.record import open_file
from streamload.shards.samples import Entry

_BROKEN = {errno.EIO, errno.ENXIO, errno.ESTALE, errno.EUCLEAN}


class ShardCopy:
    """A directory with entries and bytes of a shard, or with entries alone; open for reading and pinned."""

    def __init__(self, path: Path, shard: Shard, pin: FileLock):
        self.pin = pin
        self.path = path
        try:
            self.reader = IndexReader(path)
        except OSError as exc:
            if exc.errno not in _BROKEN:
                raise
            raise CacheCorrupt(f"{path} can't be read: {exc.strerror}") from exc
        self.version = version_of(self.reader)
        self.is_index_only = self.reader.meta.get("bare") is True
        self.is_in_place = shard.in_place is not None
        self._data: Descriptor | None = None
        if self.is_index_only:
            return
        try:
            self._data = self._open_data(shard.in_place)
        except BaseException:
            self.reader.close()
            raise

    @classmethod
    def open(cls, path: Path, shard: Shard) -> ShardCopy | None:
        """The source at `path`; None while it is being taken away.

        Raises:
            FileNotFoundError: there is none, or one of its files is missing (yet).
            CacheCorrupt: its index has no header (yet), or a damaged one, or its local file can't be opened.
        """
        pin = FileLock.acquire(path / "names", shared=True)
        if pin is None:
            if (path / "names").exists():
                return None
            raise FileNotFoundError(f"there is no {path / 'names'}")
        try:
            return cls(path, shard, pin)
        except BaseException:
            pin.close()
            raise

    def _open_data(self, local: Path | None) -> Descriptor | None:
        """The data's descriptor; None for a tombstone. Neither a link nor a FIFO is opened."""
        try:
            if local is None:
                return open_file(self.path / "data")
            file = Descriptor.open(local, os.O_RDONLY | os.O_NONBLOCK)
            if stat.S_ISREG(os.fstat(file.number).st_mode):
                return file
            file.close()
            raise FileNotFoundError(f"{local} is not a regular file")
        except OSError as exc:
            if self.reader.ended and not self.reader.is_complete and not self.reader.count:
                return None
            if local is None or is_shortage(exc):
                raise
            raise CacheCorrupt(f"{self.path} is of no use: {exc}") from exc

    def sample(
        self, entry: Entry, needed: Needed | None, memory: ReadMemory | None = None
    ) -> tuple[Entry, memoryview] | None:
        """See `read_sample`."""
        number = self._data.number if self._data is not None else -1
        return read_sample(number, entry, needed, memory)

    def close(self) -> None:
        """Let go of it: it may be taken away from now on."""
        self.reader.close()
        self.pin.close()
        if self._data is not None:
            self._data.close()
