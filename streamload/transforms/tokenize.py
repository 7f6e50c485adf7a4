"""Tokenizers of several kinds behind one call for a batch (part of I): list of str → int64[N, L]."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from streamload.transforms.simple_tokenizer import RememberingTokenizer, is_simple_tokenizer

CLIP_LENGTH = 77
_LONGEST = 1024
"""transformers say 10³⁰ where a tokenizer has no limit, models of books 100,000: neither is for captions."""


class Texts(NamedTuple):
    """The tokens of a batch.

    Attributes:
        ids: int64[N, L].
        attention_mask: int64[N, L], as the tokenizer gave it; None if it gave none.
    """

    ids: torch.Tensor
    attention_mask: torch.Tensor | None

    def mask(self) -> torch.Tensor:
        """The tokenizer's mask, or else 1 up to the last id that isn't 0: int64[N, L].

        Zeros at the end are padding; one before the end is a token (CLIP's 0 is an exclamation mark).
        """
        if self.attention_mask is not None:
            return self.attention_mask
        return (self.ids != 0).flip(1).cummax(1).values.flip(1).long()


class BatchTokenizer:
    """A tokenizer called by batch, its results checked; what it raises itself is left as it is.

    As picklable as what it wraps.
    """

    def __init__(self, tokenizer: Callable[..., Any]) -> None:
        self._tokenizer = tokenizer
        self._options = _transformers_options(tokenizer)
        self._length: int | None = None
        if _runs_threads(tokenizer):
            # As open_clip does: workers are processes enough, and the library warns of a fork after a use.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def __call__(self, captions: list[str]) -> Texts:
        """Tokenize a batch.

        Raises:
            TypeError: the tokenizer gave something else than integers.
            ValueError: not one row for each caption, or rows of another length than before.
        """
        result = self._tokenizer(captions, **self._options)
        mask = None
        if isinstance(result, Mapping):
            mask = result.get("attention_mask")
            result = result.get("input_ids")
        ids = self._checked(result, len(captions))
        return Texts(ids, None if mask is None else self._checked(mask, len(captions)))

    def _checked(self, result: Any, count: int) -> torch.Tensor:
        ids = self._as_tensor(result)
        if ids.ndim != 2 or len(ids) != count:
            raise ValueError(
                f"{self._name} gave {list(ids.shape)} for {count} captions; expected [{count}, L]: "
                f"a row for each caption, all padded to one length"
            )
        if self._length is None:
            self._length = ids.shape[1]
        if ids.shape[1] != self._length:
            raise ValueError(
                f"{self._name} gave rows of {ids.shape[1]} ids after rows of {self._length}; "
                f"expected one length: pad each batch to the same"
            )
        return ids

    def _as_tensor(self, result: Any) -> torch.Tensor:
        if isinstance(result, (list, tuple)) and len({np.shape(row) for row in result}) > 1:
            raise ValueError(f"{self._name} gave rows of several lengths; expected them padded to one")
        try:
            ids = result if isinstance(result, torch.Tensor) else torch.from_numpy(np.array(result))
        except TypeError:
            ids = None
        if ids is None or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            kind = type(result).__name__ if ids is None else f"{type(result).__name__} of {ids.dtype}"
            raise TypeError(f"{self._name} gave a {kind}; expected integer ids of shape [N, L]")
        return ids.long()

    @property
    def _name(self) -> str:
        return f"tokenizer {getattr(self._tokenizer, '__name__', type(self._tokenizer).__name__)}"


def adapt_tokenizer(tokenizer: Any) -> BatchTokenizer | None:
    """Wrap a tokenizer.

    To be called before worker processes are forked (see BatchTokenizer).

    Args:
        tokenizer: open_clip's, one of transformers, or any function from a list of str to ids [N, L] as
            tensor, array or lists; None for none. One of transformers pads and truncates to its
            `model_max_length`, or to 77 where that is unset or over 1024.

    Raises:
        TypeError: it can't be called.
    """
    if tokenizer is None:
        return None
    if not callable(tokenizer):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}; expected open_clip's, one of transformers, "
            f"a function from a list of str to ids [N, L], or None"
        )
    return BatchTokenizer(RememberingTokenizer(tokenizer) if is_simple_tokenizer(tokenizer) else tokenizer)


def _transformers_options(tokenizer: Any) -> dict[str, Any]:
    """What one of transformers has to be told, so that it gives rows of one length."""
    length = getattr(tokenizer, "model_max_length", None)
    if length is None or not hasattr(tokenizer, "convert_tokens_to_ids"):
        return {}
    return {
        "padding": "max_length",
        "truncation": True,
        "max_length": int(length) if 0 < length <= _LONGEST else CLIP_LENGTH,
        "return_tensors": "pt",
    }


def _runs_threads(tokenizer: Any) -> bool:
    """Whether it is a fast tokenizer of transformers, or holds one as open_clip's does."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    return bool(getattr(inner, "is_fast", False))
