"""The values by which a batch's rows are weighed, from facts of their samples (step I)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from streamload.extension import WorkerPart
from streamload.weights.sample import SampleWeight

if TYPE_CHECKING:
    from streamload.extension import BatchRows

VALUE = np.dtype("<f8")
"""The value of a row, as batches carry it."""


class WorkerWeights(WorkerPart):
    """The worker's part.

    Args:
        sample_weight: what a sample weighs.
    """

    def __init__(self, sample_weight: SampleWeight):
        self._sample_weight = sample_weight

    def finish(self, values: dict[str, Any], rows: BatchRows) -> bytes:
        """The values of all rows: VALUE[N], NaN where unknown.

        Raises:
            OptionError: see SampleWeight.of.
        """
        by_row = np.empty(len(rows), VALUE)
        for shard_rows in rows.by_shard():
            by_row[shard_rows.places] = self._sample_weight.of(shard_rows)
        return by_row.tobytes()
