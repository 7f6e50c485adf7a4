"""Checks of a rank (step K): the order of its batches, bad samples, missing shards, and data waits.

Too large a share of bad samples or shards ends the run. As batches come a share is an estimate, which is
compared once chance is ruled out (BatchChecks, ShardChecks). At the end of an epoch all ranks exchange exact
counts through torch.distributed's store and get the same totals: all raise, or none (PassEnd). After a resume
the counts before it are those of the state, at least: one rank's state has only that rank's bad samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from streamload.errors import (
    NoValidSamples,
    OrderDiverged,
    PassMismatch,
    RankFailed,
    TooManyBadSamples,
    TooManyBadShards,
)
from streamload.metrics import UNCOUNTED, Counters
from streamload.ranks.distributed import agree
from streamload.urls import redact
from streamload.worker.messages import Batch, Ended, SkippedSample

logger = logging.getLogger("streamload")

_DEVIATIONS = 3
"""A share is certain to exceed a limit if it does by this many standard deviations."""
_FEWEST_BAD = 3
"""Fewer bad samples or lost shards end no run, unless they are half of all."""
_SKIPPED_KEPT = 1000
_FREE_SHARDS = 2
"""So few shards given up never end a run."""
_LOGGED_SHARE = 0.03
_SLOW_SHARD_SECONDS = 30.0
_SLOW_SHARD_SHARE = 0.5
"""A shard is logged once it has cost this much data wait, and this share of it all; then at twice as much."""
_SHARDS_KEPT = 64
"""Waits are kept of the shards that cost the most."""
_SHARDS_SHOWN = 4
_NAME_CHARS = 64


class BatchChecks:
    """Checks each batch's order and bad samples, for one rank.

    Args:
        counters: where bad samples are counted.
        train: whether bad samples are replaced, or left out.
        max_bad: the largest share of bad samples that is allowed; None: any.

    Attributes:
        skipped: the first thousand samples that could not be used.
        generation: of the control block's order for which the epoch's batches are made.
    """

    def __init__(self, counters: Counters, train: bool, max_bad: float | None):
        self.skipped: list[SkippedSample] = []
        self.generation = 0
        self._counters = counters
        self._train = train
        self._fate = "replaced" if train else "skipped"
        self._max_bad = max_bad
        self._samples = self._bad = 0
        self._bad_squares = 0  # the sum of the squares of the bad samples by shard
        self._bad_by_shard: dict[str, int] = {}
        self._last: dict[str, tuple[int, int]] = {}  # by sequence: the end of the last span, and its hash

    def start_epoch(self, generation: int) -> None:
        """Expect batches of this generation from now on, and compare no hashes with the last epoch's."""
        self.generation = generation
        self._last = {}

    def check_order(self, batch: Batch) -> None:
        """Compare the order before this batch, as its worker sees it, with the worker's of the last batch.

        Raises:
            OrderDiverged: they differ, or the batch was made for another epoch.
        """
        if batch.generation != self.generation:
            raise OrderDiverged(
                f"a worker returned a batch of order {batch.generation}, but this epoch has order "
                f"{self.generation}"
            )
        for name, span in batch.step.digests.items():
            end, after = self._last.get(name, (span.begin, span.before))
            if end == span.begin and after != span.before:
                raise OrderDiverged(
                    f"the workers disagree on the order before the step at sample {batch.step.position}: "
                    f"they find different samples usable. keep= must depend on the entry alone, and nothing "
                    f"else may change files in the cache"
                )
            self._last[name] = span.end, span.after

    def count_skipped(self, batch: Batch) -> None:
        """Count and log the samples of a batch that could not be used.

        A few bad shards that come early don't end a run: bad samples come by whole shards, so the variance of
        their number is about the sum of the squares of their numbers by shard (a compound Poisson variable).
        With three deviations, ten shards need to have bad samples before any share is certain.

        Raises:
            TooManyBadSamples: their share is certainly larger than allowed.
        """
        self._samples += batch.rows.samples
        if not batch.skipped:
            return
        for skipped in batch.skipped:
            self._counters.add(f"samples_{self._fate}_{skipped.cause}")
        bad = [skipped for skipped in batch.skipped if skipped.cause not in UNCOUNTED]
        self._samples += 0 if self._train else len(bad)
        for skipped in bad:
            if len(self.skipped) < _SKIPPED_KEPT:
                self.skipped.append(skipped)
                logger.warning(
                    "sample %s of %s is %s: %s", skipped.key, skipped.url, self._fate, skipped.message
                )
            before = self._bad_by_shard.get(skipped.url, 0)
            self._bad_by_shard[skipped.url] = before + 1
            self._bad_squares += 2 * before + 1
        self._bad += len(bad)
        if self._max_bad is None or not bad:
            return
        if self._bad - _DEVIATIONS * math.sqrt(self._bad_squares) > self._max_bad * self._samples:
            raise TooManyBadSamples(
                f"{self._bad:,} of {self._samples:,} samples could not be used: more than "
                f"max_bad_samples={self._max_bad:g} allows (None allows any share). "
                f"The last: {bad[-1]}"
            )

    def counts(self) -> list[int]:
        """For the state: all samples so far, bad ones, and the sum of their squares by shard."""
        return [self._samples, self._bad, self._bad_squares]

    def restore(self, counts: Sequence[int]) -> None:
        """Continue from a state's counts."""
        self._samples, self._bad, self._bad_squares = counts
        self._bad_by_shard = {}


class ShardChecks:
    """Checks the share of a rank's shards that were given up.

    A rank that loses many of its own raises alone only if they are too many of all ranks', or chance is ruled
    out; else the end of the pass decides, for all ranks (PassEnd).

    Args:
        max_bad: the largest share that is allowed; None: any.
    """

    def __init__(self, max_bad: float | None):
        self._max_bad = max_bad
        self._before = [0, 0]  # by the state that the run resumed from
        self._now = [0, 0]
        self._checked = self._logged = 0

    def check(self, given_up: int, complete: int, shards: int) -> None:
        """Compare the shards given up with those that came completely, and with all.

        To be called after each batch, once a shard was given up.

        Args:
            given_up: different shards that this loader has given up.
            complete: those that it has seen completely.
            shards: all of the run, of which this rank may read a part.

        Raises:
            TooManyBadShards: more than the allowed share of all, or certainly more of those so far.
        """
        self._now = [given_up, given_up + complete]
        before, self._checked = self._checked, given_up
        if given_up == before or given_up <= _FREE_SHARDS:
            return
        bad, total = self.counts()
        message = (
            f"{bad:,} of {total:,} shards so far were given up ({bad / total:.0%}; there are {shards:,})"
        )
        if bad > _LOGGED_SHARE * total and given_up >= 2 * self._logged:
            self._logged = given_up
            logger.error("%s: training continues without their samples", message)
        if self._max_bad is None:
            return
        is_certain = bad - _DEVIATIONS * math.sqrt(bad) > self._max_bad * total
        if given_up > self._max_bad * shards or is_certain:
            raise TooManyBadShards(
                f"{message}, more than max_bad_shards={self._max_bad:g} allows (None allows any share). The "
                f"log has the reason for each; once they can be read, resume from the last state"
            )

    def counts(self) -> list[int]:
        """For the state: the shards given up, and all so far; zeros before the first one."""
        return [before + current for before, current in zip(self._before, self._now, strict=True)]

    def restore(self, counts: Sequence[int]) -> None:
        """Continue from a state's counts, whatever was counted here."""
        self._before = [saved - current for saved, current in zip(counts, self._now, strict=True)]


class ShardWaits:
    """The data wait of one rank by shard.

    One slow shard delays its lane, and so every batch, each for a moment. A batch lists the shards that its
    worker was blocked on while the training loop waited; the data wait for the batch is charged to them.

    Args:
        url: gives the URL of a shard by its index in the run.
    """

    def __init__(self, url: Callable[[int], str]) -> None:
        self._url = url
        self._by_shard_ns: dict[int, int] = {}
        self._threshold_ns = _SLOW_SHARD_SECONDS * 1e9

    def add(self, blocked: Sequence[tuple[int, int]], waited_ns: int, total_ns: int) -> None:
        """Charge one batch's data wait to its shards.

        Args:
            blocked: shards, and how many nanoseconds the batch's worker was blocked on each.
            waited_ns: the data wait for the batch.
            total_ns: all data wait so far.
        """
        blocked_ns = sum(ns for _, ns in blocked)
        for shard, ns in blocked:
            own_ns = ns if blocked_ns <= waited_ns else ns * waited_ns // blocked_ns
            self._by_shard_ns[shard] = self._by_shard_ns.get(shard, 0) + own_ns
        worst = max(self._by_shard_ns, key=self._by_shard_ns.__getitem__)
        worst_ns = self._by_shard_ns[worst]
        if worst_ns >= self._threshold_ns and worst_ns >= _SLOW_SHARD_SHARE * total_ns:
            self._threshold_ns = 2 * worst_ns
            logger.warning(
                "one shard is slow: %.0f of the %.0f s in which training waited for data were for %s",
                *(worst_ns / 1e9, total_ns / 1e9, redact(self._url(worst))),
            )
        if len(self._by_shard_ns) > _SHARDS_KEPT:
            by_wait = sorted(self._by_shard_ns.items(), key=lambda item: item[1])
            self._by_shard_ns = dict(by_wait[-_SHARDS_KEPT // 2 :])

    def by_shard(self) -> dict[int, int]:
        """Nanoseconds of the shards that are kept, by their index in the run."""
        return dict(self._by_shard_ns)

    def file_name(self, shard: int) -> str:
        """The name of a shard's file, without its folder and anything secret, as others may read it."""
        text = redact(self._url(shard)).partition("?")[0].rstrip("/").rpartition("/")[2]
        return "".join(c if c.isprintable() else "�" for c in text)[-_NAME_CHARS:]

    def worst(self) -> dict[str, int]:
        """Nanoseconds of the shards that cost the most, by redacted URL, most first."""
        most = sorted(self._by_shard_ns.items(), key=lambda item: -item[1])[:_SHARDS_SHOWN]
        return {redact(self._url(shard)): ns for shard, ns in most}


class EpochSum:
    """Adds up what this rank gets of an epoch, and compares it at the end with what was due.

    In training the rows of batches are this rank's part of their steps; if the epoch is a pass, all samples
    of the shards' indexes are in steps, except for less than one step at the end. In evaluation each sample
    that the indexes have for this rank is in a batch, or is left out because it can't be used.

    Args:
        train: whether this is training.
        start: the position at which the epoch starts, or is resumed.
        rank, ranks: of the run.
    """

    def __init__(self, train: bool, start: int, rank: int, ranks: int):
        self._train, self._start, self._rank, self._ranks = train, start, rank, ranks
        self._stop = start
        self._rows = self._left_out = self._steps_rows = 0

    def count(self, batch: Batch) -> None:
        """Add a batch."""
        step, self._stop = batch.step.stop - batch.step.position, batch.step.stop
        rows = (self._rank + 1) * step // self._ranks - self._rank * step // self._ranks
        self._steps_rows += rows if batch.step.rows is None else batch.step.rows
        self._rows += batch.rows.samples
        self._left_out += len(batch.skipped)

    def check(self, epoch: int, end: Ended | None, given_up: int) -> None:
        """Compare the sums with what was due.

        Args:
            epoch: that ends.
            end: as a worker found it; None: the epoch has had the planned number of steps.
            given_up: shards that were given up, for the message.

        Raises:
            PassMismatch: samples were lost, or came too often.
        """
        position, due = self._stop, None if end is None else end.due
        is_over, expected = True, self._steps_rows
        if not self._train:
            expected = max(0, (due or 0) - self._start) - self._left_out
        elif end is not None and due is not None:
            position, is_over = end.position, 0 <= due - self._stop < end.step
        if not is_over or self._rows != expected or self._stop != position:
            indexes = "" if due is None else f", and the shards' indexes have {due:,} samples"
            raise PassMismatch(
                f"epoch {epoch} has ended on rank {self._rank} after {self._rows:,} samples, where "
                f"{expected:,} were due: its steps go from {self._start:,} to {self._stop:,}, the next one "
                f"would begin at {position:,}{indexes}; {self._left_out:,} couldn't be used, and "
                f"{given_up:,} shards were given up. Samples were lost or came twice: resume from the last "
                f"state, and report this message as an error of streamload"
            )


class Totals(NamedTuple):
    """Counts since a pass began, of one rank or of all.

    Attributes:
        ranks: how many ranks counted.
        samples: taken or bad; without those whose caption is missing, or that are left out.
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
        self._samples += batch.rows.samples
        self._usable += batch.rows.samples
        for skipped in batch.skipped:
            if skipped.cause not in UNCOUNTED:
                self._samples += 0 if self._train else 1
                self._bad += 1
                self._last = skipped

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
