"""Repeats of samples in a pass: expected numbers of uses → references (between steps B and C).

A sample with rate r comes floor(r) times and, with probability frac(r), once more: a hash of seed, epoch,
pass, shard and sample decides, so each pass draws anew, alike in every process. The second uses of a shard's
samples follow all of the first ones, the third uses these: copies are far apart, and what has been
given of a shard never changes while more of it arrives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from streamload.errors import DataError
from streamload.order.hashing import REPEAT, key, stream
from streamload.order.lanes import COPY_SHIFT, Arrivals

_NUMBERS = 1 << COPY_SHIFT


def uses(key_: int, numbers: NDArray[np.int64], rates: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how often samples of a shard come in a pass, int64.

    Args:
        key_: of the shard and the pass.
        numbers: of the samples.
        rates: of each, at least 0.
    """
    whole = np.floor(rates)
    drawn = (stream(key_, numbers) >> np.uint64(11)) * 2.0**-53
    count: NDArray[np.int64] = (whole + (drawn < rates - whole)).astype(np.int64)
    return count


def visit_key(seed: int, epoch: int, pass_: int, shard: int) -> int:
    """Return the key of a shard in a pass, for `uses`."""
    return key(seed, REPEAT, epoch, pass_, shard)


class RepeatedArrivals:
    """Arrivals in which samples come as often as their rates say; of one pass at a time.

    Args:
        arrivals: each usable sample once, by ascending numbers.
        rates: returns how often the usable samples of a shard come, after `arrivals` was asked for it.
        pass_: returns the current pass.
        seed: of the source's order.
        epoch: in which the sequence began.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        rates: Callable[[int], NDArray[np.float64]],
        pass_: Callable[[], int],
        seed: int,
        epoch: int,
    ) -> None:
        self._arrivals, self._rates, self._pass_of = arrivals, rates, pass_
        self._seed, self._epoch = seed, epoch
        self._pass = -1
        self._growing: dict[int, tuple[int, NDArray[np.int64]]] = {}  # samples of a shard, their references

    def arrived(self, shard: int) -> tuple[NDArray[np.int64], bool]:
        """The references of a shard's samples so far, as `apart` takes them, and whether all are there.

        Raises:
            DataError: the shard has more samples than can be repeated.
        """
        pass_ = self._pass_of()
        if pass_ != self._pass:
            self._pass = pass_
            self._growing.clear()
        numbers, ended = self._arrivals.arrived(shard)
        count, references = self._growing.pop(shard, (-1, numbers))
        if ended or count != len(numbers):
            references = self._references(shard, numbers, ended)
        if not ended:
            self._growing[shard] = len(numbers), references
        return references, ended

    def _references(self, shard: int, numbers: NDArray[np.int64], ended: bool) -> NDArray[np.int64]:
        if numbers.size and numbers[-1] >= _NUMBERS:
            raise DataError(f"repeat= is for shards of up to {_NUMBERS:,} samples")
        key_ = visit_key(self._seed, self._epoch, self._pass, shard)
        count = uses(key_, numbers, self._rates(shard)[: len(numbers)])
        most = int(count.max(initial=0)) if ended else 1
        return np.concatenate([numbers[count > use] + (use << COPY_SHIFT) for use in range(max(1, most))])
