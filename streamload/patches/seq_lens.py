"""Largest number of patches of the images of a step (step E): a hash of where the step begins.

So it is the same on all ranks and workers, and after a resume on any layout. No state, no I/O.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

from streamload.order.hashing import SEQ_LEN, key


@dataclass(frozen=True, slots=True)
class SeqLens:
    """The sequence lengths of a run.

    Attributes:
        lengths: at least one, in patches.
        weights: how often each is drawn, in relation to the others; not all 0.
        seed: of the run.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    def at(self, epoch: int, position: int) -> int:
        """Return the length of the step that begins at a global position of an epoch."""
        stops = list(itertools.accumulate(self.weights))
        drawn = (key(self.seed, SEQ_LEN, epoch, position) >> 11) * 2.0**-53 * stops[-1]
        return self.lengths[bisect.bisect_right(stops, drawn)]
