"""The shuffle window: references in the lanes' order → references by due time (step D).

Reference *n* is due at *n + u·w*, *u* a hash of *n*. So it comes less than a window late, and no reference
after *n* in the lanes' order is due before *n*. This determines which references can be given out, and from
where to resume to reproduce a position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamload.order.hashing import hash32
from streamload.order.lanes import SAMPLE_BITS

# Due times count in 1/65536 of a reference.
_FRACTION_BITS = 16
# The window opens at least to an eighth of the first 4096 numbers, and by a quarter of those that follow. So
# at most an eighth of all samples come after the last one has arrived; half the window of a longer pass.
_SLOW_NUMBERS = 4096
_FEWEST_SORTED = 4096
_NOTHING = np.empty(0, np.int64)


def due_times(
    key: int, numbers: NDArray[np.int64], window: int, opens_slowly: bool = False
) -> NDArray[np.int64]:
    """Return the due times of the references with these numbers, int64, 65536 to a reference.

    Args:
        key: of the pass.
        numbers: places in the lanes' order of the pass.
        window: how late a reference may come.
        opens_slowly: the window opens with the numbers, so that the first references need little data. False:
            it is open from the beginning.
    """
    width = np.full_like(numbers, window)
    if opens_slowly:
        width = np.minimum((numbers + np.maximum(numbers - _SLOW_NUMBERS, 0)) >> 3, window)
    late = hash32(key, numbers) * width.astype(np.uint64) >> np.uint64(32 - _FRACTION_BITS)
    due: NDArray[np.int64] = (numbers << _FRACTION_BITS) + late.astype(np.int64)
    return due


class ShuffleWindow:
    """The references of one pass that are not yet due.

    Kept in two runs, a long sorted one and the latest ones unsorted, so that a new reference doesn't cost a
    pass over the window. About 0.1 µs a reference in large portions.

    Args:
        key: of the pass.
        window: how late a reference may come.
        shards: number of shards in the pass.
        opens_slowly: see `due_times`.
    """

    def __init__(self, key: int, window: int, shards: int, opens_slowly: bool = False) -> None:
        self._key, self._window, self._opens_slowly = key, window, opens_slowly
        self._portion = max(_FEWEST_SORTED, window // 8)
        # Mutable state: both runs as due times and references; the last due time of each shard. Everything
        # due before `_now` has been given out; all shards before place `_oldest` are finished.
        self._sorted_due, self._sorted = _NOTHING, _NOTHING
        self._latest_due, self._latest = _NOTHING, _NOTHING
        self._last_due = np.full(shards, -1, np.int64)
        self._now = self._oldest = 0

    def push(self, first: int, references: NDArray[np.int64]) -> None:
        """Add the references with the numbers `first`, `first` + 1, … in the lanes' order."""
        numbers = np.arange(first, first + references.size)
        due = due_times(self._key, numbers, self._window, self._opens_slowly)
        np.maximum.at(self._last_due, references >> SAMPLE_BITS, due)
        self._latest_due = np.concatenate([self._latest_due, due])
        self._latest = np.concatenate([self._latest, references])
        if self._latest.size >= self._portion:
            self._sorted_due, self._sorted = _in_order(
                [self._sorted_due, self._latest_due], [self._sorted, self._latest]
            )
            self._latest_due, self._latest = _NOTHING, _NOTHING

    def pop(self, pushed: int) -> NDArray[np.int64]:
        """Return what is determined once the first `pushed` references of the lanes' order were added."""
        self._now = pushed << _FRACTION_BITS
        cut = int(np.searchsorted(self._sorted_due, self._now))
        early = self._latest_due < self._now
        _, references = _in_order(
            [self._sorted_due[:cut], self._latest_due[early]], [self._sorted[:cut], self._latest[early]]
        )
        self._sorted_due, self._sorted = self._sorted_due[cut:], self._sorted[cut:]
        self._latest_due, self._latest = self._latest_due[~early], self._latest[~early]
        return references

    def pop_all(self) -> NDArray[np.int64]:
        """Return the rest: the pass is over."""
        _, references = _in_order([self._sorted_due, self._latest_due], [self._sorted, self._latest])
        return references

    def waiting(self, reading: int, begun: int) -> NDArray[np.int64]:
        """Return the places of shards with references still in the window, by their last due time.

        Args:
            reading: the first place that lanes still read: shards before it get no more references.
            begun: how many shards of the pass the lanes have taken.
        """
        before = self._last_due[self._oldest : reading] >= self._now
        self._oldest += int(before.argmax()) if before.any() else before.size
        last_due = self._last_due[self._oldest : begun]
        places = np.flatnonzero(last_due >= self._now)
        return places[np.argsort(last_due[places], kind="stable")] + self._oldest


def _in_order(
    dues: list[NDArray[np.int64]], references: list[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge runs by due time; for equal ones the earlier run comes first."""
    due = np.concatenate(dues)
    order = np.argsort(due, kind="stable")
    return due[order], np.concatenate(references)[order]


def default_window(batch_slice: int) -> int:
    """Return the default window for a group's slice of a global batch: 40 slices, 10,000 to 100,000."""
    return min(max(40 * batch_slice, 10_000), 100_000)
