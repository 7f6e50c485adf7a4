"""What a rank checks of each batch: that it is of the epoch, that workers agree, that few samples are bad.

And that few shards were given up, which may be many samples without one that is bad.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from streamload.errors import OrderDiverged, TooManyBadSamples, TooManyBadShards
from streamload.metrics import Counters
from streamload.worker import Batch, SkippedSample

logger = logging.getLogger("streamload")

_CERTAIN = 3
"""By so many standard deviations the share of bad samples, or shards, has to be over the limit."""
_TROUBLES_KEPT = 1000
_FREE_SHARDS = 2
"""So many shards that were given up never end a run."""
_LOUD_SHARE = 0.03


class Checks:
    """One rank's.

    Args:
        counts: where bad samples are counted.
        train: whether others stand for them, or they are left out.
        most_bad: the largest share of bad samples that is allowed; None: any.

    Attributes:
        skipped: the first thousand samples that could not be used.
        generation: of the order in the control block, by which the batches of the epoch are made.
    """

    def __init__(self, counts: Counters, train: bool, most_bad: float | None):
        self.skipped: list[SkippedSample] = []
        self.generation = 0
        self._counts = counts
        self._train = train
        self._what = "replaced" if train else "skipped"
        self._most_bad = most_bad
        self._taken = self._bad = 0
        self._squares = 0  # of the numbers of bad samples by shard, added up
        self._bad_of: dict[str, int] = {}  # by shard
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

    def heed(self, batch: Batch) -> None:
        """Count and report the samples of a batch that could not be used.

        A few bad shards that happen to come early don't end a run: bad samples come by whole shards, so the
        number to expect of them has a variance of about the sum of the squares of their numbers by shard
        (as of a compound Poisson variable). Ten shards have to have some before any share is certain.

        Raises:
            TooManyBadSamples: their share is certainly larger than allowed.
        """
        self._taken += batch.samples
        if not batch.skipped:
            return
        for trouble in batch.skipped:
            self._counts.add(f"samples_{self._what}_{trouble.cause}")
        bad = [trouble for trouble in batch.skipped if trouble.cause != "missing"]
        self._taken += 0 if self._train else len(bad)
        for trouble in bad:
            if len(self.skipped) < _TROUBLES_KEPT:
                self.skipped.append(trouble)
                logger.warning(
                    "sample %s of %s is %s: %s", trouble.key, trouble.url, self._what, trouble.message
                )
            before = self._bad_of.get(trouble.url, 0)
            self._bad_of[trouble.url] = before + 1
            self._squares += 2 * before + 1
        self._bad += len(bad)
        if self._most_bad is None or not bad:
            return
        if self._bad - _CERTAIN * math.sqrt(self._squares) > self._most_bad * self._taken:
            raise TooManyBadSamples(
                f"{self._bad:,} of {self._taken:,} samples could not be used: more than "
                f"max_bad_samples={self._most_bad:g} allows (None allows any share). "
                f"The last: {bad[-1]}"
            )

    def seen(self) -> list[int]:
        """What a state keeps of the samples so far: all, bad ones, the squares of these by shard."""
        return [self._taken, self._bad, self._squares]

    def recall(self, seen: Sequence[int]) -> None:
        """Go on counting from what a state kept."""
        self._taken, self._bad, self._squares = seen
        self._bad_of = {}


class GivenUp:
    """Judges the share of a rank's shards that were given up.

    Args:
        most: the largest share that is allowed; None: any.
    """

    def __init__(self, most: float | None):
        self._most = most
        self._before = [0, 0]  # by the state that the run goes on from
        self._now = [0, 0]
        self._judged = self._said = 0

    def judge(self, given_up: int, whole: int, shards: int) -> None:
        """Compare the shards that were given up with those that came whole, and with all.

        To be called with each batch that is taken, once one was given up.

        Args:
            given_up: different shards that this loader has given up.
            whole: those that it has seen whole.
            shards: all that the rank reads in a pass.

        Raises:
            TooManyBadShards: more than the allowed share of all, or certainly more of those so far.
        """
        self._now = [given_up, given_up + whole]
        before, self._judged = self._judged, given_up
        if given_up == before or given_up <= _FREE_SHARDS:
            return
        bad, seen = self.seen()
        said = f"{bad:,} of {seen:,} shards so far were given up ({bad / seen:.0%}; there are {shards:,})"
        if bad > _LOUD_SHARE * seen and given_up >= 2 * self._said:
            self._said = given_up
            logger.error("%s: the training goes on without their samples", said)
        if self._most is None:
            return
        if given_up > self._most * shards or bad - _CERTAIN * math.sqrt(bad) > self._most * seen:
            raise TooManyBadShards(
                f"{said}, more than max_bad_shards={self._most:g} allows (None allows any share). The log "
                f"says why each was; once they can be had, go on from the last state"
            )

    def seen(self) -> list[int]:
        """What a state keeps: the shards that were given up, and all so far; zeros before the first one."""
        return [before + now for before, now in zip(self._before, self._now, strict=True)]

    def recall(self, seen: Sequence[int]) -> None:
        """Go on counting from what a state kept, whatever has been counted here."""
        self._before = [kept - now for kept, now in zip(seen, self._now, strict=True)]
