"""Length of an epoch, as far as options, sizes.json and the indexes in the cache tell."""

from __future__ import annotations

from streamload.loader.options import LoaderOptions
from streamload.loader.position import Position
from streamload.loader.schedule import RunSchedule
from streamload.loader.worker_config import counted_samples
from streamload.metrics import Counters


class EpochLengths:
    """The lengths of a loader's epochs.

    Args:
        options: of the loader.
        schedule: of its epochs.
    """

    def __init__(self, options: LoaderOptions, schedule: RunSchedule):
        self._options, self._schedule = options, schedule
        self._batches: int | None = None  # as of the last call of `batches`
        self._counted: tuple[int, int] | None = None  # epoch, samples by the indexes in the cache

    def batches(self, counts: Counters) -> int | None:
        """Batches of this rank; None while unknown, or if there is no end."""
        schedule = self._schedule
        batches = schedule.num_batches
        if batches is None and schedule.is_one_pass:
            epoch = schedule.drawn_epoch
            if self._counted is None or self._counted[0] != epoch:
                samples = counted_samples(self._options, counts, epoch)
                self._counted = None if samples is None else (epoch, samples)
            if self._counted is not None:
                batches = schedule.batches_of(self._counted[1])
        self._batches = batches
        return batches

    def samples(self, counts: Counters) -> int | None:
        """Samples over all ranks; None while unknown, or if there is no end."""
        schedule = self._schedule
        samples, batches = schedule.num_samples, self.batches(counts)
        if samples is not None or batches is None:
            return samples
        if not self._options.train:
            return None if self._counted is None else self._counted[1]
        return batches * schedule.rows * schedule.topology.world_size

    def least_of_pass(self, counts: Counters) -> int | None:
        """The fewest samples that a training takes of a pass over all shards; None if that is unknown."""
        options, schedule = self._options, self._schedule
        samples = counted_samples(options, counts, schedule.drawn_epoch)
        if samples is None and options.repeat is None:
            samples = schedule.listed_samples()
        step = schedule.rows * schedule.topology.world_size
        return None if samples is None else samples - samples % step or samples

    def expected(self, position: Position) -> int | None:
        """Batches of one pass after a position, by the sizes of shards; None unless `batches` was called."""
        schedule = self._schedule
        if self._batches is None or not schedule.is_one_pass or self._options.repeat is not None:
            return None
        samples = schedule.epoch_samples() or (None if self._counted is None else self._counted[1])
        if position.base_batch is None or samples is None:
            return self._batches - schedule.step_of(position)
        return schedule.steps_within(position, samples)
