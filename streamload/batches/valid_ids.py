"""Which ids of a tokenizer's result are padding (part of step I).

It is read from what the tokenizer itself reports, never guessed from ids: many tokenizers pad with an id that
captions also have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from streamload.batches.simple_tokenizer import CachingTokenizer
from streamload.errors import OptionError

_END_TOKENS = ("eos_token_id", "eot_token_id", "eot_token", "sep_token_id")


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
