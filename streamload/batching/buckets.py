"""Rows of about the same length put together: `Batches(bucketing=…)`."""

from __future__ import annotations

from dataclasses import dataclass

from streamload.batching.costs import RowCosts
from streamload.batching.steps import BucketSampler
from streamload.extension import Extension, StepsStart, WorkerPart, WorkerProcess
from streamload.worker.messages import EpochStart
from streamload.worker.reader import Reader

__all__ = ["Buckets"]


@dataclass(frozen=True, slots=True)
class Buckets(Extension):
    """The extension of a loader whose steps are planned by block.

    Attributes:
        costs: of rows.
    """

    costs: RowCosts

    name = "buckets"

    def in_worker(self, process: WorkerProcess) -> WorkerPart:
        """Its part in a worker process; None: it has none there."""
        assert isinstance(process.reader, Reader)
        return WorkerBuckets(self.costs, process.reader)


class WorkerBuckets(WorkerPart):
    """The worker's part.

    Args:
        costs: of rows.
        reader: of the process.
    """

    def __init__(self, costs: RowCosts, reader: Reader):
        self._costs, self._reader = costs, reader

    def sampler(self, start: StepsStart) -> BucketSampler:
        """The steps of an epoch, planned by block."""
        assert isinstance(start, EpochStart)
        return BucketSampler(self._reader.config, self._reader, start, self._costs)
