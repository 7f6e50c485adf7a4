"""A loader's part in its process: the control block of its workers, its counters, and its checks (step K)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from streamload import limits
from streamload.ipc import ControlBlock
from streamload.loader.checks import BatchChecks, ShardChecks, ShardWaits
from streamload.loader.clock import LoopClock
from streamload.loader.options import LoaderOptions
from streamload.loader.pass_end import PassEnd
from streamload.loader.state import BAD_IN_PASS, BAD_SAMPLES, BAD_SHARDS
from streamload.metrics import Counters, Snapshot, total
from streamload.topology import Topology
from streamload.worker import Batch


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
        self.checks = BatchChecks(self.counts, options.train, shards.max_bad_samples)
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
        if batch.samples:
            self.counts.add("batches_yielded")
            self.counts.add("samples_yielded", batch.samples)
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
