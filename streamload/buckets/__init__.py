"""Rows of about the same length put together, `Batches(bucketing=…)`: an extension (streamload/extension.py).

`costs.py` has the lengths of rows, by facts; `cells.py` the steps of a block of rows, `steps.py`
the rank's part of them, and `bounds.py` what groups agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamload.buckets.costs import RowCosts
from streamload.buckets.steps import BucketSampler
from streamload.extension import Extension, WorkerPart, WorkerProcess
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
        return WorkerBuckets(self.costs, process.reader)


class WorkerBuckets(WorkerPart):
    """The worker's part.

    Args:
        costs: of rows.
        reader: of the process.
    """

    def __init__(self, costs: RowCosts, reader: Reader):
        self._costs, self._reader = costs, reader

    def sampler(self, start: Any) -> BucketSampler:
        """The steps of an epoch, a worker.sampler.Sampler, if they aren't those of the plain order."""
        epoch: EpochStart = start
        return BucketSampler(self._reader.config, self._reader, epoch, self._costs)
