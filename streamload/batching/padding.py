"""Rows of several lengths: a batch cut to its longest caption, and the columns that each row needs (step I).

Tokenizers pad to one length on one side (tokenize.py). Only loaders with `text_padding="longest"` or patches
have a `Trimming`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streamload.batches.in_progress import Bounds, Trim
from streamload.batches.tokenize import Texts
from streamload.extension import Extension, RankPart, RowWidths, WorkerPart

if TYPE_CHECKING:
    from streamload.extension import BatchRows, Run, WorkerProcess

WIDTHS = "__widths__"
"""The RowWidths among the values of a batch."""


@dataclass(frozen=True, slots=True)
class Trimming(Trim):
    """Cutting of captions to the longest of their batch.

    Attributes:
        multiple: of the columns that remain, up to the tokenizer's length; None: captions aren't cut.
        with_valid: whether the batch says which ids are padding, as `text_valid` bool[N, L].
    """

    multiple: int | None
    with_valid: bool = False

    def cut(self, texts: Texts, bounds: Bounds | None) -> Texts:
        """Leave out columns that no row needs, here or elsewhere."""
        return texts if self.multiple is None else cut_to_longest(texts, self.multiple, bounds)

    def beside(self, texts: Texts) -> dict[str, torch.Tensor]:
        """More values of a batch, beside its ids."""
        return {"text_valid": texts.valid} if self.with_valid and texts.valid is not None else {}

    def measured(
        self, values: Mapping[str, Any], texts: Texts | None, length: int, bounds: Bounds | None
    ) -> dict[str, Any]:
        """More values of a batch, by the lengths of its rows."""
        if texts is None:
            widths = widths_of(values, None)
        else:
            valid = None if self.multiple is None else texts.valid
            widths = widths_of(values, valid, length, texts.columns())
        return {} if widths is None else {WIDTHS: widths.with_room(bounds)}


def widths_of(
    values: Mapping[str, Any], text_valid: torch.Tensor | None, length: int = 0, texts: Sequence[str] = ()
) -> RowWidths | None:
    """Count the columns that each row of a batch needs; None if nothing in it is padded to its longest row.

    Args:
        values: of the batch; `patch_valid` bool[N, P] marks the patches of images.
        text_valid: bool[N, L]: the ids that aren't padding; rows are padded on one side. None: `text` has a
            fixed length.
        length: of texts that aren't cut.
        texts: the names of the values whose columns are tokens.
    """
    patch_valid = values.get("patch_valid")
    if text_valid is None and patch_valid is None:
        return None
    pads_left = False
    rows = len(text_valid if text_valid is not None else patch_valid)  # type: ignore[arg-type]
    bounds = np.zeros((rows, 2), np.int32)
    if text_valid is not None:
        has_ids, width = text_valid.any(1), text_valid.shape[1]
        first = text_valid.int().argmax(1)
        pads_left = bool((first[has_ids] > 0).any())
        last = width - text_valid.flip(1).int().argmax(1)
        bounds[:, 0] = ((width - first if pads_left else last) * has_ids).numpy()
    else:
        bounds[:, 0] = length
    if patch_valid is not None:
        bounds[:, 1] = patch_valid.sum(1).numpy()
    full = length, 0 if patch_valid is None else patch_valid.shape[1]
    varies = text_valid is not None, patch_valid is not None
    return RowWidths(bounds, full, varies, tuple(texts), pads_left)


def cut_to_longest(texts: Texts, multiple: int, bounds: Bounds | None = None) -> Texts:
    """Leave out columns that are padding in all rows.

    Args:
        texts: of a batch.
        multiple: of the number of columns that remain, unless there aren't as many.
        bounds: int32[N, 2], room for the ids and patches of each row.
    """
    if texts.valid is None:
        return texts
    least = 1 if bounds is None or not len(bounds) else int(bounds[:, 0].max())
    columns, length = columns_for(texts.valid, multiple, least), texts.ids.shape[1]
    others = {name: cut(value, columns, length) for name, value in texts.others.items()}
    return Texts(cut(texts.ids, columns, length), others, cut(texts.valid, columns, length))


def columns_for(valid: torch.Tensor, multiple: int, least: int = 1) -> slice:
    """Find the columns that hold all valid ids of a batch, rounded up to a multiple, at least one.

    Args:
        valid: bool[N, L]; rows are padded on one side, and the result ends or starts there.
        multiple: of the number of columns, which isn't more than L.
        least: the fewest columns.
    """
    used = valid.any(0).nonzero().flatten().tolist()
    first, stop = (used[0], used[-1] + 1) if used else (0, 1)
    length = valid.shape[1]
    width = min(-(-max(stop - first, least) // multiple) * multiple, length)
    start = min(first, length - width)
    return slice(start, start + width)


def cut(tensor: torch.Tensor, columns: slice, length: int) -> torch.Tensor:
    """Cut a tensor [N, length, …] to some columns; one of another shape is returned as it is."""
    if tensor.ndim < 2 or tensor.shape[1] != length:
        return tensor
    return tensor[:, columns].contiguous()


@dataclass(frozen=True, slots=True)
class RowLengths(Extension):
    """The extension of a run whose rows have several lengths: the rank gets each batch's RowWidths."""

    name = "row_lengths"

    def in_worker(self, process: WorkerProcess) -> WorkerPart:
        """Its part in a worker process; None: it has none there."""
        return WorkerLengths()

    def in_rank(self, run: Run) -> RankPart | None:
        """Its part in the rank; None: it has none."""
        return RankLengths()


class WorkerLengths(WorkerPart):
    """The worker's part."""

    def finish(self, values: dict[str, Any], rows: BatchRows) -> bytes:
        """The RowWidths of a batch, pickled; None: rows have one length."""
        return pickle.dumps(values.pop(WIDTHS, None))


class RankLengths(RankPart):
    """The rank's part."""

    def yielded(self, part: bytes, values: dict[str, Any]) -> dict[str, Any]:
        """The RowWidths of a batch, as `widths`."""
        return {"widths": pickle.loads(part)}
