"""Rows of several lengths, and their widths where several groups plan their blocks by themselves (I, K).

A group knows the lengths of its own samples alone. So at the first step of a block the ranks exchange how
wide each row of each of its steps is, and go by the widest: then a step has one shape on all ranks. This
follows from the data, not from what ranks do: a resumed run finds the same. It waits as a collective would.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from streamload.batches.assembly import BatchAssembly
from streamload.batches.tokenize import refuse_unknown_padding
from streamload.batching.costs import row_costs_of
from streamload.batching.padding import WIDTHS, RankLengths, RowLengths, Trimming, cut
from streamload.batching.steps import BlockBounds, PlannedStep
from streamload.extension import Extension, RankPart, RowWidths, WorkerPart
from streamload.order.steps import Split
from streamload.ranks.agreement import forget, largest
from streamload.ranks.distributed import can_compare

if TYPE_CHECKING:
    from streamload.extension import BatchRows, LoaderOptions, Run, WorkerConfig, WorkerProcess

Widest = Callable[[BlockBounds], BlockBounds]
"""Returns the widest bounds of a block on any rank; all ranks have to call it."""
_BLOCKS_KEPT = 64
"""Blocks whose widths stay in the ranks' store: no rank is so far behind another."""


@dataclass(frozen=True, slots=True)
class PaddedRows(Extension):
    """The extension of a loader whose rows have several lengths; a run has one of the two others.

    Attributes:
        trimming: of captions.
    """

    trimming: Trimming

    name = RowLengths.name

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse to cut captions without ids, or where it isn't certain which are padding."""
        if options.batches.text_padding == "longest":
            refuse_unknown_padding('text_padding="longest"', options.tokenizer, options.batches.text_columns)

    def assembly(self, assembly: BatchAssembly, options: LoaderOptions, split: Split | None) -> BatchAssembly:
        """Cut captions in workers, unless the ranks agree on the widths of rows and cut them."""
        trimming = self.trimming
        if trimming.multiple is not None and split is not None and _agree_on_widths(options, split):
            most = row_costs_of(options, assembly.tokenizer).text_most
            trimming = replace(trimming, multiple=max(1, most))
        return replace(assembly, trim=trimming)

    def in_run(self, options: LoaderOptions, config: WorkerConfig, plain: BatchAssembly) -> RowLengths:
        """The extension of a run, by whether its ranks agree on the widths of rows."""
        if _agree_on_widths(options, config.split):
            return AgreedLengths(options.batches.text_pad_multiple, config.split)
        return RowLengths()


def padded_rows(options: LoaderOptions) -> PaddedRows:
    """The extension of a loader, by its options, `LoaderOptions`, with text_padding="longest" or patches."""
    batches = options.batches
    if batches.text_padding != "longest":
        return PaddedRows(Trimming(None))
    return PaddedRows(Trimming(batches.text_pad_multiple, options.output == "dict"))


def _agree_on_widths(options: LoaderOptions, split: Split) -> bool:
    """True if several groups plan blocks, each by itself, and ranks can agree on how wide rows are."""
    return options.batches.bucketing is not None and not split.has_one_plan and can_compare(split.ranks)


@dataclass(frozen=True, slots=True)
class AgreedLengths(RowLengths):
    """The extension of a run whose groups agree on the lengths of rows: then ranks cut texts, not workers.

    Attributes:
        multiple: of the columns of texts.
        split: of steps among ranks and groups.
    """

    multiple: int
    split: Split

    def in_worker(self, process: WorkerProcess) -> WorkerPart:
        """Its part in a worker process; None: it has none there."""
        return WorkerBounds()

    def in_rank(self, run: Run) -> RankPart:
        """Its part in the rank; None: it has none."""
        return AgreedBounds(self.multiple, WidestRows(run, self.split).of_block)


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


class AgreedBounds(RankLengths):
    """The rank's part of the widths of rows that all ranks have agreed on.

    Args:
        multiple: of the columns of texts.
        widest: of all ranks.
    """

    def __init__(self, multiple: int, widest: Widest):
        self._multiple, self._widest = multiple, widest
        self._block: BlockBounds | None = None

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
            self._block = self._widest(block)
        bounds = None if self._block is None else self._block.at(position)
        if widths is not None and bounds is not None:
            widths = widths.with_room(np.minimum(bounds, np.array(widths.full, np.int32)))
            if widths.varies[0]:
                self._cut_texts(values, widths)
        return {"widths": widths}

    def _cut_texts(self, values: dict[str, Any], widths: RowWidths) -> None:
        length = widths.full[0]
        most = int(widths.bounds[:, 0].max())
        width = min(-(-max(most, 1) // self._multiple) * self._multiple, length)
        columns = slice(length - width, length) if widths.pads_left else slice(0, width)
        for name in widths.texts:
            if isinstance(values.get(name), torch.Tensor):
                values[name] = cut(values[name], columns, length)


class WidestRows:
    """Widths of the rows of blocks of steps, on which the groups of a run agree: the widest of any rank.

    Args:
        run: of this rank.
        split: of steps among ranks.
    """

    def __init__(self, run: Run, split: Split):
        self._run, self._split, self._rank = run, split, run.rank
        self._names: deque[str] = deque()

    def of_block(self, block: BlockBounds) -> BlockBounds:
        """The widest of all ranks, which all have to call it.

        Args:
            block: with the widths of this rank's rows.

        Raises:
            RankFailed: another rank has ended, or didn't come to this block in half an hour.
        """
        split, rows = self._split, block.rows
        name = f"bounds/{self._digest(rows.shape)}/{block.begin}/{block.end}"
        tellers, covered = [], set[int]()
        for other in range(split.ranks):
            groups = set(split.groups_of(other))
            if not groups <= covered:
                tellers.append(other)
                covered |= groups
        if self._rank == 0:
            self._names.append(name)
            if len(self._names) > _BLOCKS_KEPT:
                forget(self._names.popleft(), split.ranks)
        return block._replace(rows=largest(name, rows, self._rank, tellers, split.ranks))

    def _digest(self, shape: tuple[int, ...]) -> str:
        """A digest of what the widths of a block depend on, alike on all ranks."""
        run, batches = self._run, self._run.options.batches
        lengths = (batches.text_padding, batches.text_pad_multiple, batches.max_tokens)
        position = run.position
        text = repr((run.identity, lengths, position.sequence, position.events, shape))
        return xxhash.xxh3_64_hexdigest(text.encode())
