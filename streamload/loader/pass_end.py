"""The end of a pass: exact shares of bad samples and lost shards, over all ranks (step K).

Within a pass a share is an estimate, which checks.py compares only once chance is ruled out. At the end of an
epoch all ranks exchange their counts through torch.distributed's store and get the same totals: all raise, or
none. After a resume the counts before it are those of the state, at least: one rank's state has only that
rank's bad samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from streamload.errors import NoValidSamples, RankFailed, TooManyBadSamples, TooManyBadShards
from streamload.loader.distributed import agree
from streamload.worker import Batch, SkippedSample

logger = logging.getLogger("streamload")

_FEWEST_BAD = 3
"""Fewer bad samples or lost shards end no run, unless they are half of all."""


class Totals(NamedTuple):
    """Counts since a pass began, of one rank or of all.

    Attributes:
        ranks: how many ranks counted.
        samples: taken or bad; without those whose caption is missing.
        bad: of them, those that couldn't be used.
        usable: samples in batches.
        lost: shards that were given up.
        shards: all shards of the pass.
        samples_before, bad_before: the same before a resume, over all ranks.
        is_pass: 1 if the samples are a whole pass.
    """

    ranks: int
    samples: int
    bad: int
    usable: int
    lost: int
    shards: int
    samples_before: int
    bad_before: int
    is_pass: int

    @property
    def all_samples(self) -> int:
        """Samples of the pass, with those before a resume."""
        return self.samples + self.samples_before

    @property
    def all_bad(self) -> int:
        """Bad samples of the pass, with those before a resume."""
        return self.bad + self.bad_before


def merged(ranks: Sequence[Totals]) -> Totals:
    """The totals of all ranks. What was counted before a resume is the same counts on each of them."""
    sums = Totals(*(sum(column) for column in zip(*ranks, strict=True)))
    return sums._replace(
        samples_before=max(totals.samples_before for totals in ranks),
        bad_before=max(totals.bad_before for totals in ranks),
        is_pass=min(totals.is_pass for totals in ranks),
    )


def exceeds(bad: int, count: int, limit: float | None, *, is_all: bool = True) -> bool:
    """True if an exact share is larger than allowed.

    Args:
        bad: how many are bad.
        count: of how many.
        limit: the largest share that is allowed; None: any.
        is_all: whether these are all. Of some ranks' alone chance has its part: three standard deviations of
            a count that is just allowed.
    """
    if limit is None:
        return False
    allowed = limit * count
    if not is_all:
        return bad > allowed + 3 * math.sqrt(allowed) and bad >= _FEWEST_BAD
    return bad > allowed and (bad >= _FEWEST_BAD or 2 * bad >= count)


class PassEnd:
    """Counts one rank's samples since a pass began, and compares the totals of all ranks with the limits.

    Args:
        train: whether bad samples are replaced, or left out.
        max_bad_samples, max_bad_shards: the largest shares that are allowed; None: any.
    """

    def __init__(self, train: bool, max_bad_samples: float | None, max_bad_shards: float | None):
        self._train, self._max_bad_samples, self._max_bad_shards = train, max_bad_samples, max_bad_shards
        self._samples = self._bad = self._usable = self._lost_before = 0
        self._before = (0, 0)  # samples and bad ones of all ranks, by the state that the run resumed from
        self._is_resumed = False
        self._last: SkippedSample | None = None

    def start_epoch(self, is_new_pass: bool) -> None:
        """Start an epoch; if it isn't the start of a pass, counts continue."""
        if is_new_pass:
            self.restore((0, 0, 0), 0)

    def restore(self, counts: Sequence[int], position: int) -> None:
        """Continue from a state's counts.

        Args:
            counts: as `counts` returned them; zeros: there was no bad sample.
            position: samples of the state's epoch so far.
        """
        samples, bad, self._lost_before = counts
        self._samples = self._bad = self._usable = 0
        self._before = (max(samples, position), bad)
        self._is_resumed, self._last = self._before[0] > 0, None

    def count(self, batch: Batch) -> None:
        """Count the samples of a batch."""
        bad = [skipped for skipped in batch.skipped if skipped.cause != "missing"]
        self._samples += batch.samples + (0 if self._train else len(bad))
        self._usable += batch.samples
        self._bad += len(bad)
        self._last = bad[-1] if bad else self._last

    def counts(self, lost: int, rank: int, world_size: int) -> list[int]:
        """For the state: samples since the pass began, bad ones, and lost shards; zeros: nothing was bad.

        In training the samples are those of all ranks, and the bad ones those of this rank; those before an
        earlier resume belong to rank 0, so that the sum over ranks has them once.
        """
        samples, bad = self._before
        before = bad if rank == 0 or not self._train else 0
        counts = [
            samples + self._samples * (world_size if self._train else 1),
            before + self._bad,
            max(lost, self._lost_before),
        ]
        return counts if any(counts[1:]) else [0, 0, 0]

    def totals(self, lost: int, shards: int, is_pass: bool) -> Totals:
        """Counts of this rank.

        Args:
            lost: shards that were given up, of those that count on this rank.
            shards: how many count on it.
            is_pass: whether an epoch is a pass.
        """
        lost = min(shards, max(lost, self._lost_before))
        samples, bad = self._before
        counted = (self._samples, self._bad)
        if not self._train:  # what was counted before is this rank's own
            counted, samples, bad = (self._samples + samples, self._bad + bad), 0, 0
        return Totals(1, *counted, self._usable, lost, shards, samples, bad, int(is_pass))

    def agree(
        self, name: str, own: Totals, world_size: int, pass_samples: Callable[[], int | None]
    ) -> Totals:
        """The totals of all ranks, the same on each of them; of those that are there within half a minute.

        Args:
            name: of the data and its epoch.
            own: this rank's.
            world_size: of the run; ranks that nothing joins have their own totals.
            pass_samples: returns about how many samples a pass has; None: unknown. It is only called where an
                epoch isn't a pass and the share is too large.

        Raises:
            RankFailed: another rank has failed.
        """

        def decide(values: list[list[int]]) -> list[int]:
            totals = merged([Totals(*value) for value in values])
            is_exceeded = exceeds(totals.all_bad, totals.all_samples, self._max_bad_samples)
            if is_exceeded and not totals.is_pass:
                samples = pass_samples()
                totals = totals._replace(is_pass=int(samples is not None and totals.all_samples >= samples))
            return list(totals)

        try:
            return Totals(*agree(f"end of {name}", list(own), decide, world_size, needs_all=True))
        except RankFailed:
            raise
        except RuntimeError:  # the store is gone with its rank: nobody is left to agree with
            return Totals(*decide([list(own)]))

    def check(self, epoch: int, totals: Totals, world_size: int, *, logs: bool) -> None:
        """Log the shares, and compare them with the limits.

        Args:
            epoch: that ends.
            totals: of all ranks.
            world_size: of the run.
            logs: whether this rank logs them.

        Raises:
            TooManyBadSamples: their share of a pass is larger than allowed; or no sample could be used.
            TooManyBadShards: the share of shards that were given up is larger than allowed.
            NoValidSamples: all samples lack a caption, or all shards were given up.
        """
        bad, samples, is_all = totals.all_bad, totals.all_samples, totals.ranks == world_size
        lost, shards = totals.lost, totals.shards
        text = f"at the end of epoch {epoch}, {'at least ' if self._is_resumed else ''}"
        text += f"{_share(bad, samples)} samples could not be used, "
        text += f"{_share(lost, shards)} shards were given up"
        if not is_all:
            text = f"{text}, as {totals.ranks} of {world_size} ranks have counted"
        if logs and (bad or lost):
            logger.warning(text)
        last = ""
        if self._last is not None:
            last = f". The last on this rank: {self._last.key} of {self._last.url}: {self._last.message}"
        if totals.is_pass and not totals.usable and not self._is_resumed and is_all:
            kind = TooManyBadSamples if bad else NoValidSamples
            raise kind(f"nothing could be used: {text}{last}")
        if totals.is_pass and exceeds(bad, samples, self._max_bad_samples, is_all=is_all):
            raise TooManyBadSamples(
                f"{text}: more than max_bad_samples={self._max_bad_samples:g} allows (None allows any "
                f"share){last}"
            )
        if exceeds(lost, shards, self._max_bad_shards, is_all=is_all):
            raise TooManyBadShards(
                f"{text}: more than max_bad_shards={self._max_bad_shards:g} allows (None allows any "
                f"share). The log has the reason for each shard"
            )


def _share(count: int, total: int) -> str:
    return f"{count:,} of {total:,}" + (f" ({100 * count / total:.3g} %)" if count and total else "")
