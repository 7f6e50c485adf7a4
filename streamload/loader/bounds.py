"""Widths of the rows of a step on any rank, where several groups plan their blocks by themselves (step K).

A group knows the lengths of its own samples alone. So at the first step of a block the ranks exchange how
wide each row of each of its steps is, and go by the widest: then a step has one shape on all ranks. This
follows from the data, not from what ranks do: a resumed run finds the same. It waits as a collective would.
"""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xxhash

from streamload.batches.assembly import BatchAssembly
from streamload.batches.in_progress import Bounds
from streamload.batches.padding import RankLengths, RowWidths, cut
from streamload.buckets.costs import RowCosts
from streamload.buckets.steps import BlockBounds
from streamload.errors import OptionError
from streamload.loader.distributed import can_compare, forget, largest
from streamload.loader.options import LoaderOptions
from streamload.loader.schedule import RunSchedule
from streamload.shards.columns import TOKENS

_LONG_TEXT = "word " * 4096
_KEPT = 64
"""Blocks whose bounds stay in the ranks' store: no rank is so far behind another."""


class AgreedBounds(RankLengths):
    """The rank's part of the widths of rows that all ranks have agreed on.

    Args:
        options: of the loader.
        schedule: of its epochs.
    """

    def __init__(self, options: LoaderOptions, schedule: RunSchedule):
        self._multiple, self._batches = options.batches.text_pad_multiple, repr(options.batches)
        self._schedule = schedule
        self._block: BlockBounds | None = None
        self._names: deque[str] = deque()

    def yielded(self, part: bytes, values: dict[str, Any]) -> dict[str, Any]:
        """Cut the texts of a batch, of full width, to what its step has on any rank.

        Every rank has to call this for each batch.

        Raises:
            RankFailed: another rank has ended, or didn't come to this block in half an hour.
        """
        widths: RowWidths | None
        block: BlockBounds | None
        widths, position, block = pickle.loads(part)
        if block is not None:
            self._block = self._agreed(block)
        bounds = None if self._block is None else self._block.at(position)
        if widths is not None and bounds is not None:
            widths = widths.with_room(np.minimum(bounds, np.array(widths.full, np.int32)))
            if widths.varies[0]:
                self._cut_texts(values, widths, bounds)
        return {"widths": widths}

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


def are_bounds_agreed(schedule: RunSchedule) -> bool:
    """True if the run's groups are to agree on how wide rows are: then ranks cut texts, not workers."""
    order, topology = schedule.order, schedule.topology
    is_alone = order.groups == 1 or topology.world_size == 1
    return order.blocks is not None and not is_alone and can_compare(topology.world_size)


def row_costs(options: LoaderOptions, assembly: BatchAssembly) -> RowCosts:
    """Options of the lengths of rows, by which blocks of steps are planned.

    Raises:
        OptionError: a row may be longer than a part of a batch.
    """
    text, most, patches = None, 0, options.images.patches
    if options.goes_by_tokens and assembly.tokenizer is not None:
        text, most = TOKENS, assembly.tokenizer([_LONG_TEXT], [0]).ids.shape[1]
    room, longest = options.batches.max_tokens, most + (max(patches.seq_lens) if patches is not None else 0)
    if room is not None and room < longest:
        raise OptionError(f"max_tokens={room}; expected at least {longest}, what the longest row may have")
    costs = RowCosts(text, most, options.batches.text_pad_multiple)
    if patches is None:
        return costs
    return replace(
        costs, patches_most=max(patches.seq_lens), patch_size=patches.sides, max_ratio=patches.max_ratio
    )
