"""What a rank checks of each batch: that it is of the epoch, that workers agree, that few samples are bad."""

from __future__ import annotations

import logging

from streamload.dataset import Batch, Trouble
from streamload.errors import OrderDiverged, TooManyBadSamples
from streamload.metrics import Counters

logger = logging.getLogger("streamload")

_BAD_SHARE = 0.01
_BAD_FREE = 16
"""So many bad samples are never too many: a share says nothing of a few."""
_TROUBLES_KEPT = 1000


class Checks:
    """One rank's.

    Args:
        counts: where bad samples are counted.
        train: whether others stand for them, or they are left out.

    Attributes:
        troubles: the first thousand samples that could not be used.
        generation: of the order on the board, by which the batches of the epoch are made.
    """

    def __init__(self, counts: Counters, train: bool):
        self.troubles: list[Trouble] = []
        self.generation = 0
        self._counts = counts
        self._what = "replaced" if train else "skipped"
        self._bad = 0
        self._last: dict[str, tuple[int, int]] = {}  # of each sequence, where it was hashed to

    def begin(self, generation: int) -> None:
        """A new epoch, by the order of this generation: digests begin anew."""
        self.generation = generation
        self._last = {}

    def agree(self, batch: Batch) -> None:
        """Compare what this batch's worker takes for the past with what the last one's did.

        Raises:
            OrderDiverged: they differ, or it was made for another epoch.
        """
        if batch.generation != self.generation:
            raise OrderDiverged(
                f"a worker gave a batch of order {batch.generation}, and this epoch goes by {self.generation}"
            )
        for name, span in batch.digests.items():
            end, behind = self._last.get(name, (span.begin, span.before))
            if end == span.begin and behind != span.before:
                raise OrderDiverged(
                    f"the workers disagree on the order before the step at sample {batch.position}: they "
                    f"don't find the same samples usable. keep= must depend on the entry alone; and files in "
                    f"the cache must not be changed by others"
                )
            self._last[name] = span.end, span.behind

    def heed(self, batch: Batch, taken: int) -> None:
        """Count and report the samples of a batch that could not be used.

        Args:
            batch: the one that is taken.
            taken: how many samples were taken before it.

        Raises:
            TooManyBadSamples: more than can be an accident.
        """
        for trouble in batch.troubles:
            self._counts.add(f"samples_{self._what}_{trouble.cause}")
            if len(self.troubles) < _TROUBLES_KEPT:
                self.troubles.append(trouble)
                logger.warning(
                    "sample %s of %s is %s: %s", trouble.key, trouble.url, self._what, trouble.message
                )
        self._bad += len(batch.troubles)
        if batch.troubles and self._bad > max(_BAD_FREE, _BAD_SHARE * taken):
            raise TooManyBadSamples(
                f"{self._bad} of {taken} samples could not be used, more than {_BAD_SHARE:.0%}: that is no "
                f"accident. The last: {batch.troubles[-1]}"
            )
