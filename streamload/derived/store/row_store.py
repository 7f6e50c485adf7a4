"""Stores of a cached module's rows: on disk, with `MEMORY` also in the process, or in a user's own mapping.

On disk rows of samples are in columns (streamload/columns), those of calls in a table.

Without a usable directory there is no store: that is logged once, and modules compute every row.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import enum
import gc
import hashlib
import itertools
import multiprocessing
import multiprocessing.util
import os
import shutil
import time
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamload.cache import memory
from streamload.cache.tier import Tier
from streamload.columns.columns import Columns, RowRoom, is_address, open_home, recorded_bytes
from streamload.derived import log_once
from streamload.derived.store.database import DATABASE
from streamload.derived.store.memory import MemoryRows
from streamload.derived.store.queue import RowQueue, StoredBatch
from streamload.derived.store.sealed import KEY_BYTES, Row, read_row, seal, seal_rows, unseal
from streamload.derived.store.table import RowCounts, RowTable, SealedRow, log_bytes
from streamload.errors import CacheCorrupt, CacheError, OptionError
from streamload.metrics import format_bytes
from streamload.options.directories import nearest, own_directory
from streamload.options.settings import Settings, read_settings

_LEAST_MEMORY_BYTES = 256 << 10
_LEAST_AUTO_BYTES = 64 << 20
_MOST_AUTO_BYTES = 10_000_000_000
_MOST_SHARE = 0.9


class CacheLevel(enum.Enum):
    """A source of rows.

    DISK: the directory alone. MEMORY: also the rows that this process read or computed lately. AUTO: MEMORY
    if all stored rows fit, else DISK.
    """

    DISK = enum.auto()
    MEMORY = enum.auto()
    AUTO = enum.auto()


class Mapped:
    """A mapping that is compared by identity, so that it can be part of a `RowPlace`.

    Raises:
        OptionError: it isn't a mapping.
    """

    def __init__(self, mapping: MutableMapping[str, bytes]):
        names = ("__getitem__", "__setitem__", "__delitem__", "__iter__", "get")
        if missing := [name for name in names if not hasattr(mapping, name)]:
            raise OptionError(
                f"store={type(mapping).__name__}: expected a mapping of str to bytes, such as a dict or a "
                f"diskcache.Cache; it lacks {', '.join(missing)}"
            )
        self.mapping = mapping


@dataclass(frozen=True)
class RowPlace:
    """Place of a module's rows, and their limits."""

    path: str  # the directory; "": `rows` in streamload's cache directory
    level: CacheLevel = CacheLevel.DISK  # whether rows are held in memory, too
    memory_bytes: int | None = None
    """Limit of the rows in memory, shared by all processes of the node; None: by `STREAMLOAD_MEMORY_SIZE`."""
    cache_size: str | int | None = None
    """The limit on disk, as of `make_loader`; None: by `STREAMLOAD_CACHE_SIZE`."""
    mapped: Mapped | None = None
    """Mapping in place of a directory; only the process that made it uses it."""
    reads_default: bool = False
    """Whether missing rows are also looked up in the default directory, read-only."""

    def __hash__(self) -> int:
        return hash(self.path)  # of a few places in a process: each call looks for its own

    def settings(self) -> Settings:
        """Settings of this place."""
        return read_settings(cache_size=self.cache_size)

    @property
    def root(self) -> Path:
        """Directory of the rows on disk."""
        if not self.path:
            return self.settings().cache_dir / "rows"
        return own_directory(Path.cwd() / Path(self.path).expanduser()) / "rows"

    @property
    def others(self) -> list[Path]:
        """Other directories in which missing rows are looked up."""
        default = RowPlace("").root
        return [default] if self.reads_default and default != self.root else []


class MappingRows:
    """The rows of a mapping, with the methods of `RowTable` by which a `RowStore` reads and writes.

    Keys are hexadecimal digits and values are sealed rows as bytes, so nothing is pickled. An exception of
    the mapping counts as a miss. The mapping's owner decides which rows to keep.
    """

    used_bytes = 0  # of the node's directories

    def __init__(self, mapped: Mapped):
        self._mapping = mapped.mapping

    def read(self, keys: Sequence[bytes]) -> list[tuple[bytes, Any]]:
        """The keys and values of the rows that are there, unchecked."""
        pairs: list[tuple[bytes, Any]] = []
        for key in keys:
            try:
                pairs.append((key, self._mapping[key.hex()]))
            except KeyError:
                pass
            except Exception as exc:
                self._failed(exc)
        return pairs

    def write(self, rows: Sequence[SealedRow], label: str) -> int:
        """Store sealed rows; returns how many the mapping accepted. The label is ignored."""
        stored = 0
        for key, data in rows:
            try:
                self._mapping[key.hex()] = bytes(data)
                stored += 1
            except Exception as exc:
                self._failed(exc)
        return stored

    def close(self) -> None:
        """Leave the mapping to its owner."""

    def _failed(self, error: Exception) -> None:
        log_once(f"rows can't be read or stored for now in store={type(self._mapping).__name__}: {error!r}")


class RowStore:
    """The rows of a place, as this process has them open.

    Attributes:
        place: of the rows.
        disk: the rows of calls on disk, or those of a mapping.
        memory: the rows in memory; None: there are none.
        queue: computed rows that aren't stored yet; reading one waits for its proof.
        counts: counts of this process.

    Raises:
        CacheError: the directory can't be used.
    """

    def __init__(self, place: RowPlace):
        self.counts = RowCounts()
        self._taken = RowCounts()
        self.place = place
        self._settings = place.settings()
        self._tier: Tier | None = None
        self.disk: RowTable | MappingRows
        if place.mapped is None:
            self.disk = RowTable(place.root, self._disk_limit, self.counts)
        else:
            self.disk = MappingRows(place.mapped)
        self._others = [RowTable(root, None, self.counts) for root in place.others]
        self._columns: list[Columns] = []  # where samples' rows are; they are written to the first
        if place.mapped is None:
            room = RowRoom(self._open_tier, self._most_columns_bytes())
            self._columns = [Columns(place.root.parent, room)]
            for root in place.others:
                with contextlib.suppress(CacheError):  # it is somebody else's
                    self._columns.append(Columns(root.parent, None))
        self.queue = RowQueue(self._store, self._count_dropped)
        self.memory: MemoryRows | None = None
        if place.level is not CacheLevel.DISK:
            try:
                self._open_memory(place)
            except (CacheError, OSError) as exc:
                log_once(f"rows aren't kept in memory: {exc}")

    def read(self, keys: Sequence[bytes], label: str) -> dict[bytes, Row]:
        """The stored rows among these keys; rows from disk are added to memory."""
        start = time.perf_counter()
        rows = self.queue.read(keys) if self.queue.is_busy else {}
        if self.memory is not None:
            rows = self.memory.read(keys) | rows
        if len(rows) < len(keys):
            stored = self._read([key for key in keys if key not in rows] if rows else keys)
            if self.memory is not None and stored:
                self.memory.add(stored.items(), label)
            rows = rows | stored if rows else stored
        self.counts.read_seconds += time.perf_counter() - start
        self.counts.bytes_read += sum([len(row.body) for row in rows.values()])
        return rows

    def _read(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows on disk: rows of samples by address, rows of calls by names of 32 bytes."""
        names = [key for key in keys if len(key) == KEY_BYTES]
        stored: dict[bytes, Row] = {}
        for place in (self.disk, *self._others):
            if len(stored) < len(names):
                pairs = place.read([key for key in names if key not in stored] if stored else names)
                stored |= self._checked(pairs)
        if len(names) < len(keys):
            addresses = [key for key in keys if is_address(key)]
            for columns in self._columns:
                if addresses:
                    rows = columns.read(addresses)
                    stored.update((key, Row(layout, body, 0)) for key, (layout, body) in rows.items())
                    addresses = [key for key in addresses if key not in rows]
        return stored

    def read_from_memory(self, key: bytes) -> Row | None:
        """A row in memory; None: it isn't there, or the queue has to be read first."""
        if self.queue.is_busy:
            return None
        row = None if self.memory is None else self.memory.get(key)
        if row is not None:
            self.counts.bytes_read += len(row.body)
        return row

    def _checked(self, pairs: Iterable[tuple[bytes, Any]]) -> dict[bytes, Row]:
        """The rows that pass their checksums; others are counted as corrupt."""
        rows: dict[bytes, Row] = {}
        for key, data in pairs:
            try:
                rows[key] = read_row(key, data)
            except (CacheCorrupt, TypeError, AttributeError) as exc:
                self.counts.corrupt += 1
                log_once(f"{exc}; it is computed again")
        return rows

    def read_note(self, key: bytes) -> bytes | None:
        """The text of a note in any directory that is read; None: missing or corrupt."""
        for rows in (self.disk, *self._others):
            for _, data in rows.read((key,)):
                with contextlib.suppress(CacheCorrupt, TypeError, AttributeError):
                    return bytes(unseal(key, data).body)
        return None

    def write_note(self, key: bytes, text: bytes, label: str) -> None:
        """Store a note."""
        self.disk.write([(key, seal(key, b"", text, 0))], label)

    def _store(self, batch: Sequence[StoredBatch]) -> None:
        """Store rows of one label: rows of samples in columns, rows of calls in the table."""
        label, sealed, of_samples = batch[0][0].label, list[SealedRow](), list[tuple[bytes, bytes, Any]]()
        for rows, (bodies, digests) in batch:
            are_named = [len(name) == KEY_BYTES for name in rows.names]
            names = list(itertools.compress(rows.names, are_named))
            if names:
                chosen = bodies if all(are_named) else bodies[np.array(are_named)]
                of_names = list(itertools.compress(digests, are_named))
                sealed += seal_rows(names, rows.layout, chosen, of_names)
            if len(names) < len(rows.names):
                data, size = np.ascontiguousarray(bodies).reshape(-1).data, bodies.shape[1]
                of_samples += [
                    (name, rows.layout, data[number * size : (number + 1) * size])
                    for number, name in enumerate(rows.names)
                    if not are_named[number]
                ]
        if sealed:
            self.write(sealed, label)
        if of_samples:
            self.write_columns(of_samples, label)

    def write_columns(self, rows: Sequence[tuple[bytes, bytes, Any]], label: str) -> None:
        """Store rows of samples (address, layout, bytes) as far as there is room."""
        start = time.perf_counter()
        stored = self._columns[0].write(rows)
        self.counts.stored += stored
        self.counts.refused += len(rows) - stored
        self.counts.bytes_written += sum(len(body) for *_, body in rows) if stored == len(rows) else 0
        if self.memory is not None:
            self.memory.add(((key, Row(layout, body, 0)) for key, layout, body in rows), label)
        self.counts.store_seconds += time.perf_counter() - start

    def write(self, rows: Sequence[SealedRow], label: str) -> None:
        """Store sealed rows of calls as far as there is room. One thread at a time."""
        start = time.perf_counter()
        stored = self.disk.write(rows, label)
        self.counts.stored += stored
        self.counts.refused += len(rows) - stored
        self.counts.bytes_written += sum(len(data) for _, data in rows) if stored == len(rows) else 0
        if self.memory is not None:
            self.memory.add(((key, unseal(key, bytes(data))) for key, data in rows), label)
        self.counts.store_seconds += time.perf_counter() - start

    @property
    def columns(self) -> Columns | None:
        """Columns that store the rows of samples; None: a mapping stores them."""
        return self._columns[0] if self._columns else None

    def flush(self) -> None:
        """Store all computed rows that are proved, as far as there is room."""
        self.queue.flush()

    def take_counts(self) -> RowCounts:
        """Counts since the last call. For a single caller."""
        before, self._taken = self._taken, dataclasses.replace(self.counts)
        return self._taken - before

    def clear_memory(self, label: str | None = None) -> None:
        """Drop a label's rows, or all, from memory; rows on disk and in the queue stay."""
        if self.memory is not None:
            self.memory.clear(label)

    def close(self) -> None:
        """Store the queued rows and close everything."""
        _flush(self)
        for rows in (self.disk, self.memory, *self._others):
            if rows is not None:
                rows.close()

    def _count_dropped(self, count: int) -> None:
        self.counts.refused += count

    def _open_tier(self) -> Tier:
        return open_home(self.place.root.parent, self._settings)

    def _most_columns_bytes(self) -> int | None:
        """Limit of the columns by the place's own option; None: the tier's limit alone."""
        if self.place.cache_size is None:
            return None
        free_bytes = shutil.disk_usage(nearest(self.place.root)).free
        return self._settings.cache_size.limit_bytes(free_bytes, recorded_bytes(self.place.root.parent))

    def _disk_limit(self, used_bytes: int, new_bytes: int) -> int:
        """Limit of the rows of calls; in a tier's directory, no more than the tier reserves for them."""
        disk, home = shutil.disk_usage(nearest(self.place.root)), self.place.root.parent
        available_bytes = disk.free + used_bytes
        floor_bytes = self._settings.free_disk.floor_bytes(disk.total, available_bytes)
        limit_bytes = self._settings.cache_size.limit_bytes(disk.free, used_bytes)
        limit_bytes = min(limit_bytes, available_bytes - floor_bytes)
        if not new_bytes:
            return limit_bytes
        if self._tier is None and (home / "tier.json").is_file():
            self._tier = Tier.open(home, free_disk=self._settings.free_disk)
        if self._tier is None:
            return limit_bytes
        wanted_bytes = used_bytes + new_bytes + log_bytes(limit_bytes)
        return min(limit_bytes, self._tier.budget.reserve_rows(min(wanted_bytes, limit_bytes)))

    def _open_memory(self, place: RowPlace) -> None:
        def limit(used_bytes: int) -> int:
            free_bytes = memory.available().free_bytes
            asked_bytes = place.memory_bytes
            if asked_bytes is None:
                asked_bytes = self._settings.memory_size.limit_bytes(free_bytes, used_bytes)
            return min(asked_bytes, int((free_bytes + used_bytes) * _MOST_SHARE))

        allowed_bytes = limit(0)
        if place.level is CacheLevel.AUTO:
            most_bytes = min(allowed_bytes, _MOST_AUTO_BYTES)
            held_bytes = self.disk.used_bytes + recorded_bytes(place.root.parent)
            if most_bytes < _LEAST_AUTO_BYTES or held_bytes > most_bytes:
                return
        if allowed_bytes < _LEAST_MEMORY_BYTES:
            raise CacheError(f"there is too little memory for them: {format_bytes(max(0, allowed_bytes))}")
        name = hashlib.blake2b(str(place.root).encode(), digest_size=12).hexdigest()
        self.memory = MemoryRows(name, limit)


_stores: dict[RowPlace, RowStore | None] = {}


def open_store(place: RowPlace) -> RowStore | None:
    """The store of a place in this process; None: it can't be used, which is logged once."""
    if (opened := _stores.get(place)) is not None or place in _stores:
        return opened
    try:
        store = RowStore(place)
    except CacheError as exc:
        store = None
        log_once(f"rows are neither read nor stored: {exc}")
    if not _stores:
        multiprocessing.util.Finalize(None, close_stores, exitpriority=10)
        if multiprocessing.current_process().daemon:
            # In a worker of a DataLoader: else collecting garbage, which many rows cause, writes into each
            # object that was inherited, and so copies its page.
            gc.freeze()
    _stores[place] = store
    return store


def stores_at(place: RowPlace) -> list[RowStore]:
    """The stores of this process in a place's directory, at any level, after storing their queued rows."""
    opened = {
        store_place: store
        for store_place, store in _stores.items()
        if store is not None and not store_place.mapped
    }
    stores = [store for store_place, store in opened.items() if store_place.root == place.root]
    for store in stores:
        store.flush()
    if not stores and (place.root / DATABASE).exists():
        store_here = open_store(place)
        return [] if store_here is None else [store_here]
    return stores


def close_stores() -> None:
    """Close all stores of this process; the next use opens them again."""
    while _stores:
        _, store = _stores.popitem()
        if store is not None:
            store.close()


def _flush(store: RowStore) -> None:
    try:
        store.flush()
    except Exception as exc:
        log_once(f"rows can't be stored: {exc!r}")


def _flush_before_fork() -> None:
    """Fork safety: the queue is empty at a fork, so the child finds its parent's rows on disk."""
    for store in list(_stores.values()):
        if store is not None:
            _flush(store)


# A forked child has its own share of memory and its own counts.
os.register_at_fork(before=_flush_before_fork, after_in_child=_stores.clear)
atexit.register(close_stores)
