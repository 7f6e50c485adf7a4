"""A loader's part in its process: its workers' control block, counters, checks, and the clock (step K)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from streamload import limits
from streamload.ipc import ControlBlock, spent_ns
from streamload.loader.checks import BatchChecks, PassEnd, ShardChecks, ShardWaits
from streamload.loader.options import LoaderOptions
from streamload.metrics import Counters, Snapshot, total
from streamload.topology import Topology
from streamload.worker.messages import Batch, ready_counts

BAD_SAMPLES, BAD_SHARDS, BAD_IN_PASS = "bad_samples", "bad_shards", "bad_in_pass"
"""The counts of a rank in a state."""


class RankProcess:
    """State of a loader in this process; anew in one that was forked from it, whose workers aren't its own.

    Args:
        options: of the loader.

    Attributes:
        control: shared with the workers.
        counts: of this process.
        clock: of the training loop.
        checks: of each batch.
        waits: of the training, by shard.
        pass_end: compares the counts of a pass with the limits.
    """

    control: ControlBlock
    counts: Counters
    clock: LoopClock
    checks: BatchChecks
    waits: ShardWaits
    pass_end: PassEnd

    def __init__(self, options: LoaderOptions):
        self._options = options
        self.reset()

    def reset(self) -> None:
        """Begin anew in this process."""
        options, shards = self._options, self._options.shards
        self._pid = os.getpid()
        limits.allow_many_files()
        self.control = ControlBlock(1 + options.num_workers, len(options.sources))
        self.counts = Counters(self.control.counters[0])
        self.clock = LoopClock(self.control, self.counts, options.num_workers > 0)
        self.checks = BatchChecks(
            self.counts, options.train and not options.has_cells, shards.max_bad_samples
        )
        self.waits = ShardWaits(options.urls.__getitem__)
        self._shard_checks = ShardChecks(shards.max_bad_shards)
        self.pass_end = PassEnd(options.train, shards.max_bad_samples, shards.max_bad_shards)

    @property
    def is_forked(self) -> bool:
        """True if this process was forked from the one in which it was made."""
        return self._pid != os.getpid()

    @property
    def given_up(self) -> int:
        """Shards that were given up."""
        return total(self.control.counters, "shards_given_up")

    def stats(self) -> Snapshot:
        """The counters of all processes of this rank so far."""
        names = [source.name for source in self._options.sources]
        by_source = dict(zip(names, self.control.by_source.sum(axis=0), strict=True))
        return Snapshot.of(self.control.counters, by_source, self.waits.worst())

    def count(self, batch: Batch) -> None:
        """Count the samples of a batch, and those that could not be used.

        Raises:
            TooManyBadSamples, TooManyBadShards: more than allowed.
        """
        self.checks.count_skipped(batch)
        self.pass_end.count(batch)
        self.check_shards()
        if batch.rows.samples:
            self.counts.add_all({"batches_yielded": 1, "samples_yielded": batch.rows.samples})
            self.control.by_source[0, :, 0] += batch.rows.by_source

    def check_shards(self) -> None:
        """Compare the shards that were given up with the limit.

        Raises:
            TooManyBadShards: more than allowed.
        """
        if given_up := self.given_up:
            complete = total(self.control.counters, "shards_complete")
            self._shard_checks.check(given_up, complete, len(self._options.urls))

    def state(self, topology: Topology) -> dict[str, list[int]]:
        """Counts for a state."""
        return {
            BAD_SAMPLES: self.checks.counts(),
            BAD_SHARDS: self._shard_checks.counts(),
            BAD_IN_PASS: self.pass_end.counts(self.given_up, topology.rank, topology.world_size),
        }

    def restore(self, counts: Mapping[str, Sequence[int]], samples: int) -> None:
        """Continue from the counts of a state, after so many samples of its epoch."""
        self.checks.restore(counts[BAD_SAMPLES])
        self._shard_checks.restore(counts[BAD_SHARDS])
        self.pass_end.restore(counts[BAD_IN_PASS], samples)


class LoopClock:
    """Counts the time of one training loop.

    Args:
        control: shared with the workers.
        counts: of this process.
        has_workers: whether batches come from other processes.

    Attributes:
        wait_began_ns: of the current wait, by the monotonic clock; 0: none.
    """

    def __init__(self, control: ControlBlock, counts: Counters, has_workers: bool) -> None:
        self._control, self._counts, self._has_workers = control, counts, has_workers
        self.wait_began_ns = 0
        self._returned_ns = 0  # when the training loop got its last batch; 0: it has asked since
        self._counted_until_ns = 0  # up to here the time in `next` is counted
        self._waited_ns = 0  # of the batch that is asked for
        self._features_ns = 0  # for which features had been computed when it was asked for
        self._spent_ns = 0

    def start_epoch(self) -> None:
        """An epoch begins."""
        self._returned_ns, self._spent_ns = 0, spent_ns()

    def asked(self) -> None:
        """The training loop asks for its next batch: from here on it waits."""
        self._counted_until_ns, self._waited_ns = time.monotonic_ns(), 0
        self._features_ns = self._counts.value("feature_compute_ns")
        if self._returned_ns:
            self._counts.add("step_ns", self._counted_until_ns - self._returned_ns)
            self._returned_ns = 0

    def wait_began(self, since: float) -> None:
        """The training loop waits for its workers, since then by the monotonic clock."""
        self._count_own_work()
        self._control.want(True)
        self.wait_began_ns = int(since * 1e9)

    def wait_ended(self, since: float) -> int:
        """End the wait; return its nanoseconds."""
        self._control.want(False)
        self.wait_began_ns, waited_ns = 0, int((time.monotonic() - since) * 1e9)
        self._counted_until_ns, self._waited_ns = time.monotonic_ns(), self._waited_ns + waited_ns
        self._counts.add("data_wait_ns", waited_ns)
        if not self._counts.value("batches_yielded"):
            self._counts.add("first_batch_ns", waited_ns)
        return waited_ns

    def copying(self) -> AbstractContextManager[None]:
        """Count a block as a wait for a batch's copy to the device."""
        return self._counts.timed("device_ns")

    def took(self, batch: Batch, waited_ns: int) -> None:
        """The training loop gets a batch.

        Args:
            batch: as its worker made it.
            waited_ns: the data wait for it.
        """
        counts = self._counts
        counts.add_all(ready_counts(batch.values), -1)
        if batch.blocked:
            counts.add("blocked_wait_ns", min(waited_ns, sum(ns for _, ns in batch.blocked)))
        before, self._spent_ns = self._spent_ns, spent_ns()
        if self._has_workers:
            counts.add("hand_over_ns", self._spent_ns - before)

    def returned(self) -> None:
        """The training loop has its batch, and does its own work from here on."""
        self._count_own_work()
        self._counts.observe_wait(self._waited_ns)
        self._returned_ns = self._counted_until_ns

    def _count_own_work(self) -> None:
        """Count the time since the last wait, in which `next` passed a batch on, as data wait, too."""
        before, self._counted_until_ns = self._counted_until_ns, time.monotonic_ns()
        own_ns = self._counted_until_ns - before
        computed_ns, self._features_ns = self._features_ns, self._counts.value("feature_compute_ns")
        handed_over_ns = max(0, own_ns - (self._features_ns - computed_ns))
        self._counts.add_all({"data_wait_ns": own_ns, "hand_over_ns": handed_over_ns})
        self._waited_ns += own_ns
