"""Rows of samples from other nodes: fetched from the shared cache into the columns of this one (step H).

Each node fetches the rows of a shard once, when the first of them is looked up. A training stores none there:
`features make` and daemons do (recipe.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

from streamload import limits
from streamload.cache.locks import FileLock
from streamload.cache.shard import Shard
from streamload.cache.shared.tier import SharedTier
from streamload.columns.blocks import RowBlock, block_rows, merged, object_name
from streamload.columns.columns import Columns
from streamload.derived import log_once
from streamload.derived.store.results import layout_of, refuse_uncomputed
from streamload.derived.store.row_store import RowStore
from streamload.derived.store.sealed import class_in, digest_of_parts
from streamload.errors import CacheCorrupt, OriginStopped
from streamload.metrics import Counts

_FETCHES = 2
_ASK_SECONDS = 30.0
"""A node asks for the rows of a shard again after this time."""
_PATIENCE_SECONDS = 5.0
"""The longest wait for rows that are being fetched; after one in vain nothing is waited for."""
_POLL_SECONDS = 0.005


class SharedColumns:
    """The rows that a process fetches from other nodes. It lasts from epoch to epoch; for one thread.

    Args:
        tier: the shared cache; None: there is none.
    """

    def __init__(self, tier: SharedTier | None, counts: Counts):
        self._tier, self._counts = tier, counts
        self._fetches: dict[tuple[str, bytes], Future[None]] = {}  # by fingerprint and name
        self._is_patient = True
        self._pool: limits.Threads | None = None
        self._closing = threading.Event()

    def begin(self) -> None:
        """Begin an epoch: rows are asked for anew."""
        self._fetches.clear()
        self._is_patient = True

    def await_rows(self, store: RowStore, fingerprint: str, names: Mapping[bytes, Shard]) -> None:
        """Fetch the rows of shards, by the names of their columns, unless that was done in this epoch.

        Returns when they are here, or after some seconds.
        """
        if self._tier is None or store.columns is None:
            return
        if self._pool is None:
            self._pool = limits.Threads(_FETCHES, "streamload-columns")
        for name, shard in names.items():
            if shard.local is None and (fingerprint, name) not in self._fetches:
                fetch = self._pool.submit(self._fetch, store, bytes.fromhex(fingerprint), name, shard)
                self._fetches[fingerprint, name] = fetch
        fetches = [self._fetches[fingerprint, name] for name in names if (fingerprint, name) in self._fetches]
        if self._is_patient and not all(fetch.done() for fetch in fetches):
            _, late = wait_for(fetches, _PATIENCE_SECONDS)
            self._is_patient = not late

    def close(self) -> None:
        """End all fetches. Idempotent."""
        self._closing.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, store: RowStore, fingerprint: bytes, name: bytes, shard: Shard) -> None:
        """Fetch the rows of a shard, unless another process of this node has just done so."""
        assert store.columns is not None
        with contextlib.suppress(OSError, OriginStopped):
            lock = None
            while lock is None:
                path = store.columns.asked(fingerprint, name)  # again: its directory may have been evicted
                if not path:
                    return
                lock = FileLock.acquire(path, create=True)
                if lock is None and self._closing.wait(_POLL_SECONDS):
                    return
            with contextlib.closing(lock):
                status = os.fstat(lock.file.number)
                if status.st_size and time.time() - status.st_mtime < _ASK_SECONDS:
                    return
                try:
                    fetch_rows(lambda key: self._read(key, shard), store.columns, fingerprint, name)
                except CacheCorrupt as exc:
                    log_once(f"rows of {shard.name} that another node has stored aren't used: {exc}")
                    self._counts.add("checksum_failures")
                os.pwrite(lock.file.number, b".", 0)

    def _read(self, key: str, shard: Shard) -> bytes | None:
        """An object of the shared cache; None: there is none, or no answer comes."""
        assert self._tier is not None
        tier = self._tier
        return None if self._closing.is_set() else tier.attempt(lambda: tier.column(key), shard)


def fetch_rows(
    read: Callable[[str], bytes | None], columns: Columns, fingerprint: bytes, name: bytes
) -> None:
    """Take the rows of a shard that other nodes have stored, as far as they aren't here.

    Args:
        read: reads an object of columns; None: there is none.

    Raises:
        CacheCorrupt: an object is no block of rows, or of rows that no module has computed.
    """
    number = 0
    while (data := read(object_name(name, fingerprint, number))) is not None:
        block = RowBlock.unpack(data)
        refuse_foreign(block.layout, block.row_bytes)
        columns.fill(fingerprint, name, number * block_rows(block.row_bytes), block)
        number += 1


def refuse_foreign(layout: bytes, row_bytes: int) -> None:
    """Refuse a layout by which results are made of what another node has stored.

    Raises:
        CacheCorrupt: it names a class, can't be read, or is of no computed row of this size.
    """
    try:
        named = class_in(layout)
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        raise CacheCorrupt(f"a layout can't be read: {exc}") from exc
    if named is not None:
        raise CacheCorrupt(f"a layout names the class {named}")
    refuse_uncomputed(layout)
    if layout_of(layout).body_bytes != row_bytes:
        raise CacheCorrupt(f"rows of {row_bytes:,} bytes have a layout of another size")


def store_rows(
    tier: SharedTier,
    fingerprint: bytes,
    name: bytes,
    layout: bytes,
    rows: Sequence[tuple[int, int, bytes]],
    start: int = 0,
) -> None:
    """Store rows for other nodes, ascending; what is there stays, where it is of the same samples.

    Args:
        rows: place, checksum of the sample, and bytes of each.
        start: the place after the last that this maker has stored: blocks without rows from there on are
            stored, too, as who fetches blocks ends at the first that is missing.

    Raises:
        SharedTierError: the shared cache doesn't answer, or doesn't accept them.
    """
    if not rows or not rows[0][2]:
        return
    row_bytes = len(rows[0][2])
    count = block_rows(row_bytes)
    by_block: dict[int, dict[int, tuple[int, bytes]]] = {}
    for place, seed, row in rows:
        by_block.setdefault(place // count, {})[place % count] = seed, row
    for number in range(start // count, rows[-1][0] // count + 1):
        key, stored = object_name(name, fingerprint, number), None
        with contextlib.suppress(CacheCorrupt):
            data = tier.column(key)
            stored = None if data is None else RowBlock.unpack(data)
        block = merged(stored, layout, row_bytes, by_block.get(number, {}))
        if block is not None:
            tier.store_column(key, block.pack())


def note_name(fingerprint: bytes) -> str:
    """The name of the object that says what a fingerprint stands for."""
    return f"columns/notes/{fingerprint.hex()}.json"


def store_note(tier: SharedTier, fingerprint: bytes, label: str, parts: Mapping[str, Any]) -> None:
    """Store what a fingerprint stands for, unless it is there.

    Raises:
        SharedTierError: the shared cache doesn't answer, or doesn't accept it.
    """
    name = note_name(fingerprint)
    if tier.column(name) is None:
        tier.store_column(name, json.dumps({"label": label, "parts": parts}).encode())


def read_note(tier: SharedTier, fingerprint: bytes) -> dict[str, Any] | None:
    """What a fingerprint stands for: "label" and "parts"; None: there is no such note.

    Raises:
        SharedTierError: the shared cache doesn't answer.
    """
    with contextlib.suppress(ValueError, CacheCorrupt, RecursionError):
        note = json.loads(tier.column(note_name(fingerprint)) or b"null")
        if isinstance(note, dict) and digest_of_parts(note.get("parts") or {}) == fingerprint:
            return note
    return None


def noted_fingerprints(tier: SharedTier) -> list[str]:
    """The fingerprints that a shared cache has notes of, as hexadecimal digits.

    Raises:
        SharedTierError: it doesn't answer.
    """
    names = tier.objects.names("columns/notes")
    return [name.rpartition("/")[2].removesuffix(".json") for name in names]
