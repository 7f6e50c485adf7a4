"""Where a cached module's rows are: on disk, and with `MEMORY` in one copy for the node in its tmpfs.

The copy in memory holds what was read lately, within its own limit; it lasts as long as a process of this
user has it open. Where the directory can't be used there is no store, which is said once: modules compute.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import enum
import hashlib
import multiprocessing.util
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamload.cache import memory
from streamload.cache.directory import check_owner
from streamload.cache.locks import FileLock
from streamload.cache.memory import nearest
from streamload.derived.log_once import log_once
from streamload.derived.row_counts import RowCounts
from streamload.derived.row_queue import ComputedRows, Prover, RowQueue
from streamload.derived.row_seal import Row
from streamload.derived.rows import Rows, SealedRow
from streamload.derived.rows_table import DATABASE
from streamload.errors import CacheError
from streamload.metrics import format_bytes
from streamload.options.directories import own_directory
from streamload.options.settings import Settings, read_settings

_LEAST_MEMORY_BYTES = 256 << 10
_LEAST_AUTO_BYTES = 64 << 20
_MOST_AUTO_BYTES = 10_000_000_000
_MOST_SHARE = 0.9


class CacheLevel(enum.Enum):
    """Where rows are read from.

    DISK: the directory. MEMORY: also one copy for all processes of the node, in memory. AUTO: MEMORY where
    the rows that there are fit, else DISK.
    """

    DISK = enum.auto()
    MEMORY = enum.auto()
    AUTO = enum.auto()


@dataclass(frozen=True)
class Place:
    """Where the rows of a module go, and how much they may take.

    Attributes:
        path: the directory; "": `rows` in streamload's cache directory.
        level: whether there is a copy in memory.
        memory_bytes: the limit of that; None: by `STREAMLOAD_MEMORY_SIZE`.
        cache_size: the limit on disk, as of `make_loader`; None: by `STREAMLOAD_CACHE_SIZE`.
    """

    path: str
    level: CacheLevel = CacheLevel.DISK
    memory_bytes: int | None = None
    cache_size: str | int | None = None

    def settings(self) -> Settings:
        """The settings that hold for it."""
        return read_settings(cache_size=self.cache_size)

    @property
    def root(self) -> Path:
        """Of the rows on disk."""
        if not self.path:
            return self.settings().cache_dir / "rows"
        return own_directory(Path.cwd() / Path(self.path).expanduser()) / "rows"


class RowStore:
    """The rows of a place, as this process has them open.

    Args:
        place: where they are.

    Raises:
        CacheError: the directory can't be used.
    """

    def __init__(self, place: Place):
        self.counts = RowCounts()
        self._taken = RowCounts()
        self._settings = place.settings()
        self.disk = Rows(place.root, self._disk_limit, self.counts)
        self._queue = RowQueue(self._store_queued, self._count_dropped)
        self._writer: Rows | None = None
        self.copy: Rows | None = None
        self._copy_lock: FileLock | None = None
        if place.level is not CacheLevel.DISK:
            try:
                self._open_copy(place)
            except (CacheError, OSError) as exc:
                log_once(f"rows aren't kept in memory: {exc}")

    def read(self, keys: Sequence[bytes], label: str) -> dict[bytes, Row]:
        """The rows that are there, of some keys; those that came from the disk are in memory from now on."""
        if self._queue.holds(keys):
            self._queue.flush()
        began = time.perf_counter()
        found: dict[bytes, Row] = {}
        if self.copy is not None:
            found = self.copy.read(keys)
        missing = [key for key in keys if key not in found] if found else keys
        if missing:
            from_disk = self.disk.read(missing)
            found |= from_disk
            if self.copy is not None and from_disk:
                self.copy.write([(key, row.stored) for key, row in from_disk.items()], label)
        self.counts.read_seconds += time.perf_counter() - began
        self.counts.bytes_read += sum(len(row.stored) - row.head_bytes for row in found.values())
        return found

    def add(self, rows: ComputedRows, prover: Prover | None) -> None:
        """Store rows that a module computed, by a thread and soon; who reads one before waits for it.

        Args:
            rows: which.
            prover: tells whether the module is still the same; None: that needs no proof.
        """
        self._queue.add(rows, prover)

    def settle(self) -> None:
        """Let the thread store what is proved by now."""
        self._queue.settle()

    def flush(self) -> None:
        """Store all rows that were added, as far as they are proved and there is room."""
        self._queue.flush()

    def take_counts(self) -> RowCounts:
        """What happened since this was called last, for counters that are told so by one caller."""
        before, self._taken = self._taken, dataclasses.replace(self.counts)
        return self._taken - before

    def write(self, rows: Sequence[SealedRow], label: str) -> None:
        """Store sealed rows at once, as far as there is room."""
        self._write(self.disk, rows, label)

    def _store_queued(self, rows: Sequence[SealedRow], label: str) -> None:
        if self._writer is None:  # so that readers don't wait for a disk to write
            self._writer = Rows(self.disk.root, self._disk_limit, self.counts)
        self._write(self._writer, rows, label)

    def _count_dropped(self, count: int) -> None:
        self.counts.refused += count

    def _write(self, disk: Rows, rows: Sequence[SealedRow], label: str) -> None:
        began = time.perf_counter()
        stored = disk.write(rows, label)
        self.counts.stored += stored
        self.counts.bytes_written += sum(len(data) for _, data in rows) if stored == len(rows) else 0
        if self.copy is not None:
            self.copy.write(rows, label)
        self.counts.store_seconds += time.perf_counter() - began

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete rows."""
        self.flush()
        for rows in self._all():
            rows.delete(keys)

    def clear(self, label: str | None = None) -> int:
        """Delete the rows of a label, or all.

        Returns:
            how many there were on disk.
        """
        self.flush()
        self.clear_memory(label)
        return self.disk.clear(label)

    def clear_memory(self, label: str | None = None) -> None:
        """Delete the rows of a label, or all, from the copy in memory; they are on disk still."""
        self.flush()
        if self.copy is not None:
            self.copy.clear(label)

    def close(self) -> None:
        """Close what is open; the last process that does removes the copy in memory."""
        try:
            self.flush()
        except Exception as exc:
            log_once(f"rows can't be stored: {exc!r}")
        for rows in (self.disk, self._writer):
            if rows is not None:
                rows.close()
        copy, self.copy = self.copy, None
        lock, self._copy_lock = self._copy_lock, None
        if copy is not None and lock is not None:
            copy.close()
            lock.close()
            _sweep(copy.root.parent)

    def _all(self) -> list[Rows]:
        return [self.disk] if self.copy is None else [self.disk, self.copy]

    def _disk_limit(self, used_bytes: int) -> int:
        disk = shutil.disk_usage(
            nearest(self.disk.root if hasattr(self, "disk") else self._settings.cache_dir)
        )
        limit_bytes = self._settings.cache_size.limit_bytes(disk.free, used_bytes)
        available_bytes = disk.free + used_bytes
        return min(
            limit_bytes, available_bytes - self._settings.free_disk.floor_bytes(disk.total, available_bytes)
        )

    def _open_copy(self, place: Place) -> None:
        home = memory.PLACE / f"streamload-rows-{os.geteuid()}"
        check_owner(home)
        home.mkdir(mode=0o700, exist_ok=True)
        check_owner(home)
        _sweep(home)
        root = home / hashlib.blake2b(str(self.disk.root).encode(), digest_size=12).hexdigest()

        def limit(used_bytes: int) -> int:
            free_bytes = memory.free_memory(home).free_bytes
            asked_bytes = place.memory_bytes
            if asked_bytes is None:
                asked_bytes = self._settings.memory_size.limit_bytes(free_bytes, used_bytes)
            return min(asked_bytes, int((free_bytes + used_bytes) * _MOST_SHARE))

        allowed_bytes = limit(0)
        if place.level is CacheLevel.AUTO:
            most_bytes = min(allowed_bytes, _MOST_AUTO_BYTES)
            if most_bytes < _LEAST_AUTO_BYTES or self.disk.used_bytes > most_bytes:
                return
        if allowed_bytes < _LEAST_MEMORY_BYTES:
            raise CacheError(
                f"there is too little memory for them at {home}: {format_bytes(max(0, allowed_bytes))}"
            )
        self._copy_lock = _hold(root)
        self.copy = Rows(root, limit, dataclasses.replace(self.counts))


def _hold(root: Path) -> FileLock:
    """Make a copy's directory, and keep others from removing it."""
    while True:
        root.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            lock = FileLock.acquire(root / "users", shared=True, create=True, wait=True)
            if lock is not None and lock.is_of(root / "users"):
                return lock
            if lock is not None:
                lock.close()


def _sweep(home: Path) -> None:
    """Remove copies that no process has open."""
    with contextlib.suppress(OSError):
        for root in home.iterdir():
            if root.is_symlink() or not root.is_dir():
                continue
            lock = FileLock.acquire(root / "users", create=True)  # a kill may have left none
            if lock is not None:
                shutil.rmtree(root, ignore_errors=True)
                lock.close()


_stores: dict[Place, RowStore | None] = {}


def open_store(place: Place) -> RowStore | None:
    """The store of a place in this process; None: it can't be used, which is said once."""
    if place in _stores:
        return _stores[place]
    try:
        store = RowStore(place)
    except CacheError as exc:
        store = None
        log_once(f"rows are neither read nor stored: {exc}")
    if not _stores:
        multiprocessing.util.Finalize(None, close_stores, exitpriority=10)
    _stores[place] = store
    return store


def stores_at(place: Place) -> list[RowStore]:
    """The stores of this process at a place's directory, whatever their level; of what is there already."""
    found = [store for store in _stores.values() if store is not None and store.disk.root == place.root]
    for one in found:
        one.flush()
    if not found and any(place.root.glob(f"*/{DATABASE}")):
        found = [store] if (store := open_store(place)) is not None else []
    return found


def close_stores() -> None:
    """Close all stores of this process; they are opened again when they are asked for."""
    while _stores:
        _, store = _stores.popitem()
        if store is not None:
            store.close()


def _flush_before_fork() -> None:
    """A child has no rows on their way; what its parent computed so far it finds stored."""
    for store in list(_stores.values()):
        if store is not None:
            try:
                store.flush()
            except Exception as exc:
                log_once(f"rows can't be stored: {exc!r}")


def _forget_parents() -> None:
    """In a forked child: it holds the copy in memory by a lock of its own, and counts for itself."""
    _stores.clear()


os.register_at_fork(before=_flush_before_fork, after_in_child=_forget_parents)
atexit.register(close_stores)
