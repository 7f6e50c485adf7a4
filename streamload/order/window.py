"""D: references in the lanes' order → references in the order of their due times.

Reference *n* is due at *n + u·w*, *u* a hash of *n*. So it comes less than a window late, and nothing that
follows reference *n* in the lanes' order is due before *n*: that decides what may be handed out, and where to
begin again so that a position comes out the same. Knows nothing of where references come from.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamload.order.keys import hash32
from streamload.order.lanes import SAMPLE_BITS

# Due times count in 1/65536 of a reference.
_FRACTION_BITS = 16
# A ramp opens the window to an eighth of the first so many numbers, and by a quarter of what follows.
_SLOW_NUMBERS = 4096
_FEWEST_SORTED = 4096
_NOTHING = np.empty(0, np.int64)


def due_times(key: int, numbers: NDArray[np.int64], window: int, ramp: bool) -> NDArray[np.int64]:
    """When the references with these numbers in the lanes' order are due, int64, 65536 to a reference.

    Args:
        key: of the pass.
        numbers: places in the lanes' order of the pass.
        window: how late a reference may come.
        ramp: whether the window only opens with the number, so that the first references need few: to an
            eighth of it up to 4,096, and by a quarter of what follows.
    """
    width = np.full_like(numbers, window)
    if ramp:
        opened = (numbers + np.maximum(numbers - _SLOW_NUMBERS, 0)) >> 3
        width = np.minimum(width, opened)
    late = hash32(key, numbers) * width.astype(np.uint64) >> np.uint64(32 - _FRACTION_BITS)
    due: NDArray[np.int64] = (numbers << _FRACTION_BITS) + late.astype(np.int64)
    return due


class Window:
    """The references of one pass that are not yet due.

    They lie in two runs, a long one that is sorted and the latest ones that are not, so that one new
    reference costs no look at the whole window. About 0.1 µs a reference in large portions.

    Args:
        key: of the pass.
        window: how late a reference may come.
        ramp: see `due_times`.
        shards: how many shards the pass has.
    """

    def __init__(self, key: int, window: int, ramp: bool, shards: int) -> None:
        self._key, self._window, self._ramp = key, window, ramp
        self._portion = max(_FEWEST_SORTED, window // 8)
        # Mutable state: both runs as due times and references; the last due time of each shard's references;
        # everything due before `_now` has been handed out; all shards before place `_oldest` are done with.
        self._sorted_due, self._sorted = _NOTHING, _NOTHING
        self._latest_due, self._latest = _NOTHING, _NOTHING
        self._last_due = np.full(shards, -1, np.int64)
        self._now = self._oldest = 0

    def push(self, first: int, references: NDArray[np.int64]) -> None:
        """Take the references with the numbers `first`, `first` + 1, … of the lanes' order."""
        due = due_times(self._key, np.arange(first, first + references.size), self._window, self._ramp)
        np.maximum.at(self._last_due, references >> SAMPLE_BITS, due)
        self._latest_due = np.concatenate([self._latest_due, due])
        self._latest = np.concatenate([self._latest, references])
        if self._latest.size >= self._portion:
            self._sorted_due, self._sorted = _in_order(
                [self._sorted_due, self._latest_due], [self._sorted, self._latest]
            )
            self._latest_due, self._latest = _NOTHING, _NOTHING

    def pop(self, pushed: int) -> NDArray[np.int64]:
        """Hand out what is certain when the first `pushed` references of the lanes' order have been taken."""
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
        """Hand out the rest: the pass is over, and this window done with."""
        _, references = _in_order([self._sorted_due, self._latest_due], [self._sorted, self._latest])
        return references

    def waiting(self, reading: int, begun: int) -> NDArray[np.int64]:
        """Places in the pass of the shards with references not yet handed out, by the last of these.

        Args:
            reading: the first place of a shard that lanes still read: those before it get no more references.
            begun: how many shards of the pass lanes have taken.
        """
        before = self._last_due[self._oldest : reading] >= self._now
        self._oldest += int(before.argmax()) if before.any() else before.size
        last_due = self._last_due[self._oldest : begun]
        places = np.flatnonzero(last_due >= self._now)
        return places[np.argsort(last_due[places], kind="stable")] + self._oldest


def _in_order(
    dues: list[NDArray[np.int64]], references: list[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join runs and sort them by due time; among equal ones those of the earlier run come first."""
    due = np.concatenate(dues)
    order = np.argsort(due, kind="stable")
    return due[order], np.concatenate(references)[order]
