"""Rows in the memory of a process, in front of those on disk; bounded in true bytes by one limit a node.

Each process takes its share of the limit in blocks, and says so in a file of its own in tmpfs, which it holds
locked: a kill gives the share back. Those that get none read from the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from streamload.cache import memory
from streamload.cache.directory import check_owner
from streamload.cache.locks import FileLock, exclusive, live_file, remove_if_unlocked
from streamload.derived.store.queue import return_memory
from streamload.derived.store.sealed import FINGERPRINT_BYTES, Row
from streamload.shards.record import write_at

_ROW_BYTES = 400
"""Bytes of a row beside its body: its key, its object, its place in the dictionary."""
_BLOCK_BYTES, _BLOCKS = 1 << 20, 64
_FULL_SECONDS = 1.0
_RETURNED_PARTS, _LEAST_RETURNED_BYTES = 8, 4 << 20
"""Memory of rows that went is given back when they were one of so many parts of all: a thread that has ended
may have taken it, and then it isn't used again."""


class MemoryRows:
    """The rows that this process holds. Thread-safe.

    Args:
        name: of the directory whose rows they are: processes that use it have one limit together.
        limit: what these may hold, in bytes, given what they hold now.

    Attributes:
        size_bytes: what the rows take.

    Raises:
        CacheError: shares can't be counted here.
        OSError: likewise.
    """

    def __init__(self, name: str, limit: Callable[[int], int]):
        self.size_bytes = 0
        self._freed_bytes = 0
        self._share = _Share(name, limit)
        self._rows: OrderedDict[bytes, Row] = OrderedDict()
        self._layouts: dict[bytes, bytes] = {}
        self._labels: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: bytes) -> Row | None:
        """A row; None: it isn't here."""
        return self.read((key,)).get(key) if self._share.was_refused else self._rows.get(key)

    def read(self, keys: Iterable[bytes]) -> dict[bytes, Row]:
        """Return the rows of these keys that are held; they become the last to be evicted."""
        get = self._rows.get
        rows = {key: row for key in keys if (row := get(key)) is not None}
        if self._share.was_refused:
            with self._lock:
                for key in rows:
                    if key in self._rows:
                        self._rows.move_to_end(key)
        return rows

    def add(self, rows: Iterable[tuple[bytes, Row]], label: str) -> None:
        """Hold rows; those that were not read for longest go to make room."""
        with self._lock:
            for key, row in rows:
                self._labels[key[:FINGERPRINT_BYTES]] = label
                layout = self._layouts.setdefault(row.layout, row.layout)
                self._drop(key)
                size = len(row.body) + _ROW_BYTES
                if size > self._share.size_bytes and not self._share.grow(size):
                    continue
                while self.size_bytes + size > self._share.size_bytes and not self._share.grow(size):
                    if not self._rows:
                        return
                    self._drop(next(iter(self._rows)))
                self._rows[key] = Row(layout, bytes(row.body), row.input_digest)
                self.size_bytes += size
            part_bytes = max(_LEAST_RETURNED_BYTES, self._share.size_bytes // _RETURNED_PARTS)
            is_due = self._freed_bytes > part_bytes
            self._freed_bytes = 0 if is_due else self._freed_bytes
        if is_due:
            return_memory()

    def clear(self, label: str | None = None) -> None:
        """Hold no rows of a label, or none at all."""
        with self._lock:
            for key in list(self._rows):
                if label in (None, self._labels.get(key[:FINGERPRINT_BYTES])):
                    self._drop(key)

    def close(self) -> None:
        """Hold nothing, and give the share back. Idempotent."""
        self.clear()
        self._share.close()

    def _drop(self, key: bytes) -> None:
        row = self._rows.pop(key, None)
        if row is not None:
            self.size_bytes -= len(row.body) + _ROW_BYTES
            self._freed_bytes += len(row.body) + _ROW_BYTES


def home_in(place: Path, purpose: str) -> Path:
    """A directory of this user alone in a place that others use, too; made if it is missing.

    Raises:
        CacheError: it is somebody else's.
    """
    home = place / f"streamload-{purpose}-{os.geteuid()}"
    check_owner(home)
    home.mkdir(mode=0o700, exist_ok=True)
    check_owner(home)
    return home


class _Share:
    """Share of one process in the limit of all that use a directory.

    Attributes:
        size_bytes: what it has taken.
        was_refused: whether there was no more to take at some time, so that rows go for others.
    """

    def __init__(self, name: str, limit: Callable[[int], int]):
        self.size_bytes, self.was_refused = 0, False
        self._root = home_in(memory.PLACE, "memory") / name
        self._limit = limit
        self._full_until = 0.0
        self._root.mkdir(mode=0o700, exist_ok=True)
        self._held: FileLock | None
        with exclusive(self._root / "lock"):
            self._path, self._held = live_file(self._root)

    def grow(self, size_bytes: int) -> bool:
        """Take another block of at least so many bytes; False: there is none left for now."""
        if time.monotonic() < self._full_until or self._held is None:
            return False
        self._full_until = time.monotonic() + _FULL_SECONDS
        with contextlib.suppress(OSError), exclusive(self._root / "lock"):  # somebody may have removed it
            taken_bytes = sum(self._of_others())
            limit_bytes = self._limit(self.size_bytes + taken_bytes)
            block = max(size_bytes, min(_BLOCK_BYTES, limit_bytes // _BLOCKS))
            if self.size_bytes + taken_bytes + block <= limit_bytes:
                write_at(self._held.file, b"%020d" % (self.size_bytes + block), 0)
                self.size_bytes += block
                self._full_until = 0.0
                return True
        self.was_refused = True
        return False

    def _of_others(self) -> Iterator[int]:
        for path in list(self._root.iterdir()):
            if path not in (self._path, self._root / "lock") and not remove_if_unlocked(path):
                with contextlib.suppress(OSError, ValueError):  # else of a process that was killed
                    yield int(path.read_bytes())

    def close(self) -> None:
        """Give it back; the last process that does removes the directory."""
        held, self._held = self._held, None
        if held is None:
            return
        self.size_bytes = 0
        with contextlib.suppress(OSError), exclusive(self._root / "lock"):
            self._path.unlink(missing_ok=True)
            held.close()
            is_last = not list(self._of_others()) and len(list(self._root.iterdir())) == 1
            if is_last:
                shutil.rmtree(self._root, ignore_errors=True)
