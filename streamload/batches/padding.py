"""Padding of captions: which ids are padding, and a batch cut to its longest caption (part of step I).

Tokenizers pad to one length on one side. What is padding is read from what the tokenizer itself reports,
never guessed from ids: many tokenizers pad with an id that captions also have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from streamload.batches.simple_tokenizer import CachingTokenizer
from streamload.errors import OptionError

_END_TOKENS = ("eos_token_id", "eot_token_id", "eot_token", "sep_token_id")


Bounds = npt.NDArray[np.int32]
"""int32[N, 2]: the most tokens and the most patches of each row of a batch."""


class TextPadding(NamedTuple):
    """Options of cutting captions to the longest of their batch.

    Attributes:
        multiple: of the columns that remain, up to the tokenizer's length.
        with_valid: whether the batch says which ids are padding, as `text_valid` bool[N, L].
    """

    multiple: int
    with_valid: bool


class RowWidths(NamedTuple):
    """The columns that each row of a batch needs; kept in host memory, so that no device is asked for them.

    Attributes:
        bounds: int32[N, 2]: the most tokens and the most patches of each row.
        full: the most that any row of any batch can have of both.
        varies: of which of both rows may have fewer.
        texts: the values of the batch whose columns are tokens.
        pads_left: whether captions are padded on the left.
    """

    bounds: Bounds
    full: tuple[int, int]
    varies: tuple[bool, bool]
    texts: tuple[str, ...]
    pads_left: bool

    def with_room(self, bounds: Bounds | None) -> RowWidths:
        """The same with room for rows of other ranks."""
        return self if bounds is None else self._replace(bounds=np.maximum(self.bounds, bounds))


class RecordingTokenizer:
    """A tokenizer of transformers within another tokenizer: keeps the ids and the mask of its last call."""

    def __init__(self, tokenizer: Any):
        self.inner = tokenizer
        self.last: Mapping[str, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the inner tokenizer, which also returns its mask."""
        result = self.inner(*args, **{**options, "return_attention_mask": True})
        self.last = result
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # asked for by copy and pickle, before there is one
            raise AttributeError(name)
        return getattr(self.inner, name)


def up_to_last(ids: torch.Tensor, end: int) -> torch.Tensor:
    """Mark each row's ids up to its last `end` token: bool[N, L], from int64[N, L]."""
    return (ids == end).flip(1).cumsum(1).flip(1) > 0


def recorded(ids: torch.Tensor, recorder: RecordingTokenizer) -> torch.Tensor | None:
    """Return the mask of the inner tokenizer's last call; None if its ids aren't these.

    Ids that the outer tokenizer has replaced by padding (open_clip's `strip_sep_token`) are padding, too.
    """
    inner, mask = (recorder.last.get(name) for name in ("input_ids", "attention_mask"))
    if not isinstance(inner, torch.Tensor) or mask is None or inner.shape != ids.shape:
        return None
    is_kept = ids == inner
    if not torch.isin(ids[~is_kept], torch.tensor([0, recorder.inner.pad_token_id or 0])).all():
        return None
    valid: torch.Tensor = mask.bool() & is_kept
    return valid


def declared(ids: torch.Tensor, tokenizer: Any) -> torch.Tensor | None:
    """Mark all but a tokenizer's `pad_token_id`; None if it has none, or ends captions with the same id."""
    pad = getattr(tokenizer, "pad_token_id", None)
    if not isinstance(pad, int) or pad in [getattr(tokenizer, name, None) for name in _END_TOKENS]:
        return None
    return ids != pad


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


def known_valid(tokenizer: Any, ids: torch.Tensor, others: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """As `valid_ids`, but None where nothing says what is padding."""
    recorder = getattr(tokenizer, "tokenizer", None)
    simple = tokenizer.original if isinstance(tokenizer, CachingTokenizer) else tokenizer
    if "attention_mask" in others:
        mask: torch.Tensor = others["attention_mask"]
        return mask.bool()
    if isinstance(recorder, RecordingTokenizer):
        return recorded(ids, recorder)
    if _is_simple(simple):
        return up_to_last(ids, simple.eot_token_id)
    return declared(ids, tokenizer)


def valid_ids(tokenizer: Any, ids: torch.Tensor, others: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mark the ids that aren't padding: bool[N, L].

    Args:
        tokenizer: which returned them; one that holds another has a RecordingTokenizer in its place.
        ids: int64[N, L].
        others: all else that it returned.

    Raises:
        OptionError: nothing says for certain what is padding.
    """
    valid = known_valid(tokenizer, ids, others)
    if valid is None or valid.shape != ids.shape:
        name = getattr(tokenizer, "__name__", type(tokenizer).__name__)
        raise OptionError(
            f"nothing says for certain which ids of tokenizer {name} are padding, which "
            f'text_padding="longest" and text_columns= need to know: return a dict of input_ids and '
            f"attention_mask, both [N, L], or give it a pad_token_id that is no other token's"
        )
    return valid


def _is_simple(tokenizer: Any) -> bool:
    """True if it is open_clip's SimpleTokenizer in any of its modes: each row ends with an end token."""
    simple = "open_clip.tokenizer", "SimpleTokenizer"
    return any((kind.__module__, kind.__name__) == simple for kind in type(tokenizer).__mro__)
