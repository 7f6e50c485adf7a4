"""open_clip's SimpleTokenizer with what it does again and again remembered (part of I): the same ids, sooner.

Its time goes into cleaning each caption by ftfy and into finding words by a regular expression. No token
reaches over a space, so a caption's ids are those of its words, which come again; and cleaning can't change
plain ASCII, entities apart.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_MODULE = "open_clip.tokenizer"
_WORDS = 1 << 16
"""Words that are remembered; some 15 MB."""
_LONGEST_WORD = 64
_PATTERN = r"<start_of_text>|<end_of_text>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
# What ftfy and html.unescape leave alone: printable ASCII, tabs and line ends, no entity.
_PLAIN = re.compile(r"[\t\n -%'-~]*")


def is_simple_tokenizer(tokenizer: Any) -> bool:
    """Whether it is open_clip's SimpleTokenizer as far as this module knows it: nothing added or dropped."""
    kind = type(tokenizer)
    return (
        kind.__module__ == _MODULE
        and kind is getattr(sys.modules.get(_MODULE), "SimpleTokenizer", None)
        and not {"encode", "bpe"} & vars(tokenizer).keys()
        and getattr(tokenizer, "reduction_fn", "unknown") is None
        and getattr(getattr(tokenizer, "pat", None), "pattern", None) == _PATTERN
        and isinstance(getattr(tokenizer, "context_length", None), int)
    )


class RememberingTokenizer:
    """A SimpleTokenizer that looks its words up; as picklable as it is. Not thread-safe.

    Args:
        tokenizer: one for which `is_simple_tokenizer` holds.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._is_lower = tokenizer.clean_fn is getattr(sys.modules[_MODULE], "_clean_lower", None)
        self._ids: dict[str, bytes] = {}  # as they lie in the rows of a batch

    def __repr__(self) -> str:
        return f"RememberingTokenizer({self._tokenizer!r})"

    @property
    def __name__(self) -> str:
        return type(self._tokenizer).__name__

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """Tokenize captions: int64[N, context_length], as the tokenizer itself."""
        first, last = _packed([self._tokenizer.sot_token_id]), _packed([self._tokenizer.eot_token_id])
        length: int = self._tokenizer.context_length
        size = length * len(last)
        known, rows = self._ids, bytearray()
        for caption in captions:
            row = [first]
            for word in self._cleaned(caption).split(" "):
                ids = known.get(word)
                row.append(self._learn(word) if ids is None else ids)
            rows += (b"".join(row)[: size - len(last)] + last).ljust(size, b"\0")
        return torch.from_numpy(np.frombuffer(rows, np.int64).reshape(len(captions), length))

    def _cleaned(self, caption: str) -> str:
        if self._is_lower and _PLAIN.fullmatch(caption):
            return " ".join(caption.split()).lower()
        cleaned: str = self._tokenizer.clean_fn(caption)
        return cleaned

    def _learn(self, word: str) -> bytes:
        """What SimpleTokenizer.encode does with a cleaned text."""
        tokenizer = self._tokenizer
        numbers: list[int] = []
        for token in tokenizer.pat.findall(word):
            mapped = "".join(tokenizer.byte_encoder[byte] for byte in token.encode("utf-8"))
            numbers += [tokenizer.encoder[part] for part in tokenizer.bpe(mapped).split(" ")]
        ids = _packed(numbers)
        if len(word) <= _LONGEST_WORD:
            if len(self._ids) >= _WORDS:
                self._ids.clear()
            self._ids[word] = ids
        return ids


def _packed(ids: list[int]) -> bytes:
    return np.array(ids, np.int64).tobytes()
