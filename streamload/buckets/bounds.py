"""Widths of rows that the groups of a run agree on: a worker's message with a block's first step (step I)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from streamload.batches.padding import WIDTHS, RowLengths
from streamload.buckets.steps import PlannedStep
from streamload.extension import BatchRows, RankPart, Run, WorkerPart, WorkerProcess


@dataclass(frozen=True)
class AgreedLengths(RowLengths):
    """The extension of a loader whose groups agree on the lengths of rows: then ranks cut texts, not workers.

    Attributes:
        rank_part: makes its part in the rank, where it stays.
    """

    rank_part: Callable[[], RankPart] | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def in_worker(self, process: WorkerProcess) -> WorkerPart:
        """Its part in a worker process; None: it has none there."""
        return WorkerBounds()

    def in_rank(self, run: Run) -> RankPart | None:
        """Its part in the rank; None: it has none."""
        return None if self.rank_part is None else self.rank_part()


class WorkerBounds(WorkerPart):
    """The worker's part."""

    def finish(self, values: dict[str, Any], rows: BatchRows) -> bytes:
        """The RowWidths of a batch, its position, and the BlockBounds to agree on before its step.

        Those of a block come with its first step, and with an epoch's.
        """
        step, bounds = rows.step, None
        if isinstance(step, PlannedStep) and (step.begins_epoch or step.is_first):
            bounds = step.block_bounds()
        return pickle.dumps((values.pop(WIDTHS, None), step.position, bounds))
