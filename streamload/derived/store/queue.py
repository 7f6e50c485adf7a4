"""Rows on their way from a module's calls to the disk: a thread of this process stores them.

computed → proved, by a look at the whole module after they were computed → stored, by the thread

A row is stored only if its module is the same after computing as before. Examining a whole module takes long,
so one examination proves the rows of many calls. Reads of this process find queued rows; a kill loses them.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamload import limits
from streamload.derived import log_once
from streamload.derived.store.sealed import Row
from streamload.errors import LimitReached

_LINGER_SECONDS = 0.2
"""How long the thread waits for more rows: a larger transaction takes less time per row."""
_ENOUGH_BYTES, _ENOUGH_ROWS = 1 << 20, 4096
_MOST_BYTES = 2 << 20
"""Above this, calls wait for the thread. Per process, so each DataLoader worker may hold as much."""
_MOST_UNPROVED_BYTES, _MOST_OF_DEVICE_BYTES = 1 << 20, 32 << 20
"""Above this, the module is examined. A GPU computes rows faster, and examining its module waits for it."""

Material = tuple["np.ndarray[Any, Any]", Sequence[int]]
"""The bytes of each row, uint8[N, bytes], and the digest of each row's input."""


def return_memory() -> None:
    """Return free memory to the system: glibc keeps a finished thread's arena for the next thread."""
    with contextlib.suppress(OSError, AttributeError):  # another library than glibc
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(eq=False, slots=True)
class ComputedRows:
    """The rows of a call."""

    names: Sequence[bytes]  # under which they are stored
    layout: bytes  # of each
    material: Callable[[], Material]
    """Returns their bytes and the digests of their inputs; may wait for a copy from a device."""
    size_bytes: int  # approximate size in memory
    is_of_device: bool  # whether a device computed them
    label: str  # by which they are listed
    is_proved: Callable[[bool], bool | None] | None
    """Returns True if the module hasn't changed since the rows were computed, None if it wasn't examined
    since; with the argument True it examines the module first. No function: the rows need no proof."""
    proved: Material | None = None  # the result of `material`, once they are proved


StoredBatch = tuple[ComputedRows, Material]
"""The rows of a call and their bytes."""


class RowQueue:
    """Computed rows of a store that aren't on disk yet. Thread-safe; a forked child mustn't use its parent's.

    Args:
        write: stores rows of one label; called by one thread at a time.
        on_dropped: called with the number of rows that are dropped because their module has changed.
    """

    def __init__(self, write: Callable[[Sequence[StoredBatch]], None], on_dropped: Callable[[int], None]):
        self._write = write
        self._on_dropped = on_dropped
        self._changed = threading.Condition()
        self._unproved: list[ComputedRows] = []
        self._waiting: deque[StoredBatch] = deque()
        self._latest: dict[bytes, tuple[ComputedRows, int]] = {}
        """By name: the latest computed rows with that name, and the row's number among them."""
        self._bytes = 0
        self._thread: threading.Thread | None = None
        self._writing = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """True if any rows are queued."""
        return bool(self._latest)

    def read(self, names: Sequence[bytes]) -> dict[bytes, Row]:
        """The queued rows with these names; examines the module if they aren't proved yet."""
        pending = self._pending(names)
        if any(rows.proved is None for rows, _ in pending.values()):
            self._prove()
            pending = self._pending(names)
        rows_read: dict[bytes, Row] = {}
        for name, (rows, number) in pending.items():
            if rows.proved is not None:
                bodies, digests = rows.proved
                rows_read[name] = Row(rows.layout, bodies[number].data, digests[number])
        return rows_read

    def _pending(self, names: Sequence[bytes]) -> dict[bytes, tuple[ComputedRows, int]]:
        with self._changed:
            return {name: self._latest[name] for name in names if name in self._latest}

    def add(self, rows: ComputedRows) -> None:
        """Add computed rows."""
        with self._changed:
            self._latest.update((name, (rows, number)) for number, name in enumerate(rows.names))
            if rows.is_proved is not None:
                self._unproved.append(rows)
                most_bytes = _MOST_OF_DEVICE_BYTES if rows.is_of_device else _MOST_UNPROVED_BYTES
                is_full = sum(computed.size_bytes for computed in self._unproved) > most_bytes
        if rows.is_proved is None:
            self._accept([rows])
            return
        if is_full:
            rows.is_proved(True)
        self.settle()

    def settle(self) -> None:
        """Hand the proved rows to the thread, and drop rows whose module has changed."""
        with self._changed:
            unproved, self._unproved = self._unproved, []
        proved, undecided = list[ComputedRows](), list[ComputedRows]()
        for rows in unproved:
            verdict = True if rows.is_proved is None else rows.is_proved(False)
            if verdict is not False:
                (undecided if verdict is None else proved).append(rows)
            else:
                self._forget(rows)
                self._on_dropped(len(rows.names))
        with self._changed:
            self._unproved[:0] = undecided
        self._accept(proved)

    def flush(self) -> None:
        """Prove and store all queued rows before returning."""
        self._prove()
        self._store_all()

    def _prove(self) -> None:
        with self._changed:
            unproved = list(self._unproved)
        for rows in unproved:
            if rows.is_proved is not None:
                rows.is_proved(True)
        self.settle()

    def _accept(self, computed: Sequence[ComputedRows]) -> None:
        for rows in computed:
            try:
                rows.proved = rows.material()
            except BaseException:
                self._forget(rows)
                raise
            with self._changed:
                self._changed.wait_for(lambda: self._bytes < _MOST_BYTES or self._thread is None)
                self._waiting.append((rows, rows.proved))
                self._bytes += rows.size_bytes
                if self._thread is None:
                    self._start()
                elif self._has_enough():
                    self._changed.notify_all()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="streamload-rows", daemon=True)
        try:
            limits.start(self._thread)
        except (RuntimeError, LimitReached):  # as while Python ends: `flush` stores them
            self._thread = None

    def _has_enough(self) -> bool:
        return self._bytes >= _ENOUGH_BYTES or len(self._latest) >= _ENOUGH_ROWS or not self._waiting

    def _run(self) -> None:
        """Store rows as they come; end once none have come for a while."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_enough, _LINGER_SECONDS)
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    break
            self._store_all()
        return_memory()

    def _store_all(self) -> None:
        with self._writing:
            while batch := self._next():
                try:
                    self._write(batch)
                except Exception as exc:  # whatever it is, training goes on
                    log_once(f"rows can't be stored: {exc!r}")
                finally:
                    for rows, _ in batch:
                        self._forget(rows)
                    with self._changed:
                        self._bytes -= sum(rows.size_bytes for rows, _ in batch)
                        self._changed.notify_all()

    def _next(self) -> list[StoredBatch]:
        """The next rows of one label, enough for a few transactions."""
        batch: list[StoredBatch] = []
        size = 0
        with self._changed:
            while self._waiting and size < _ENOUGH_BYTES:
                if batch and self._waiting[0][0].label != batch[0][0].label:
                    break
                batch.append(self._waiting.popleft())
                size += batch[-1][0].size_bytes
        return batch

    def _forget(self, rows: ComputedRows) -> None:
        with self._changed:
            for name in rows.names:
                if self._latest.get(name, (None,))[0] is rows:  # else it was computed again
                    del self._latest[name]
