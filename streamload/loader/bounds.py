"""Widths of the rows of a step on any rank, where several groups plan their blocks by themselves (step K).

A group knows the lengths of its own samples alone. So at the first step of a block the ranks exchange how
wide each row of each of its steps is, and go by the widest: then a step has one shape on all ranks. This
follows from the data, not from what ranks do: a resumed run finds the same. It waits as a collective would.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
import xxhash

from streamload.batches.padding import Bounds, RowWidths, cut
from streamload.loader.distributed import forget, largest
from streamload.loader.options import LoaderOptions
from streamload.loader.schedule import Schedule
from streamload.worker import Batch, BlockBounds

_KEPT = 64
"""Blocks whose bounds stay in the ranks' store: no rank is so far behind another."""


class AgreedBounds:
    """The widths of rows that all ranks have agreed on.

    Args:
        options: of the loader.
        schedule: of its epochs.
    """

    def __init__(self, options: LoaderOptions, schedule: Schedule):
        self._multiple, self._batches = options.batches.text_pad_multiple, repr(options.batches)
        self._schedule = schedule
        self._block: BlockBounds | None = None
        self._names: deque[str] = deque()

    def cut(self, batch: Batch, values: dict[str, Any]) -> RowWidths | None:
        """Cut the texts of a batch to what its step has on any rank; returns the widths of its rows there.

        Every rank has to call this for each batch.

        Args:
            batch: as the worker made it: with texts of full width, if ranks are to agree.
            values: its values, which are replaced.

        Raises:
            RankFailed: another rank has ended, or didn't come to this block in half an hour.
        """
        if batch.block is not None:
            self._block = self._agreed(batch.block)
        bounds = None if self._block is None else self._block.at(batch.position)
        if batch.widths is None or bounds is None:
            return batch.widths
        widths = batch.widths.with_room(np.minimum(bounds, np.array(batch.widths.full, np.int32)))
        if widths.varies[0]:
            self._cut_texts(values, widths, bounds)
        return widths

    def _cut_texts(self, values: dict[str, Any], widths: RowWidths, bounds: Bounds) -> None:
        length = widths.full[0]
        most = int(widths.bounds[:, 0].max())
        width = min(-(-max(most, 1) // self._multiple) * self._multiple, length)
        columns = slice(length - width, length) if widths.pads_left else slice(0, width)
        for name in widths.texts:
            if isinstance(values.get(name), torch.Tensor):
                values[name] = cut(values[name], columns, length)

    def _agreed(self, own: BlockBounds) -> BlockBounds:
        """The widest of all ranks."""
        schedule, position = self._schedule, self._schedule.tracker.now()
        split, rank = schedule.split(), schedule.topology.rank
        run = repr((schedule.order, self._batches, position.sequence, position.events, own.rows.shape))
        name = f"bounds/{xxhash.xxh3_64_hexdigest(run.encode())}/{own.begin}/{own.end}"
        tellers, told = [], set[int]()
        for other in range(split.ranks):
            groups = set(split.groups_of(other))
            if not groups <= told:
                tellers.append(other)
                told |= groups
        if rank == 0:
            self._names.append(name)
            if len(self._names) > _KEPT:
                forget(self._names.popleft(), split.ranks)
        return own._replace(rows=largest(name, own.rows, rank, tellers, split.ranks))
