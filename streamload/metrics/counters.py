"""One process's counters: a row of integers that only this process writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from streamload.metrics.registry import BUCKET_NS, BUCKETS, COUNTERS, WIDTH
from streamload.metrics.snapshot import Snapshot

_PLACES = {name: place for place, name in enumerate(COUNTERS)}
_FIRST_BUCKET = len(COUNTERS)
_BUCKET_BITS = BUCKET_NS.bit_length() - 1


class Counts(Protocol):
    """Counts events; thread-safe."""

    def add(self, name: str, n: int = 1, /) -> None:
        """Add `n` to a counter of COUNTERS."""
        ...


def total(rows: NDArray[np.int64], name: str) -> int:
    """Value of a counter over all processes; about 2 µs."""
    return int(rows[:, _PLACES[name]].sum())


class Counters:
    """One process's counters: a lock and a row of int64. Thread-safe; each process needs its own row.

    Args:
        row: int64[WIDTH], written in place; default: new memory.
    """

    def __init__(self, row: NDArray[np.int64] | None = None) -> None:
        self.row = np.zeros(WIDTH, np.int64) if row is None else row
        if self.row.shape != (WIDTH,) or self.row.dtype != np.int64:
            raise ValueError(
                f"a row of counters is int64[{WIDTH}], got {self.row.dtype}{list(self.row.shape)}"
            )
        self._lock = threading.Lock()

    def add(self, name: str, n: int = 1, /) -> None:
        """Add `n` to a counter of COUNTERS; about 0.3 µs."""
        place = _PLACES[name]
        with self._lock:
            self.row[place] += n

    def set(self, name: str, n: int, /) -> None:
        """Set this process's part of a gauge that is in rows."""
        self.row[_PLACES[name]] = n

    def observe_wait(self, waited_ns: int) -> None:
        """Count a data wait in its bucket of the histogram."""
        bucket = min((waited_ns >> _BUCKET_BITS).bit_length(), BUCKETS - 1)
        with self._lock:
            self.row[_FIRST_BUCKET + bucket] += 1

    def value(self, name: str) -> int:
        """Value of a counter in this row."""
        return int(self.row[_PLACES[name]])

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a counter in nanoseconds, also if it raises."""
        start_ns = monotonic_ns()
        try:
            yield
        finally:
            self.add(name, monotonic_ns() - start_ns)

    def snapshot(self) -> Snapshot:
        """The snapshot of this row alone."""
        return Snapshot.of(self.row[None])
