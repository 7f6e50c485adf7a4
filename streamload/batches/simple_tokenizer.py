"""open_clip's SimpleTokenizer with a cache of words (part of step I): the same ids in less time.

Its time goes into cleaning captions with ftfy and splitting them with a regular expression. No token spans a
space, so a caption's ids are those of its words, which repeat; and cleaning doesn't change plain ASCII
without entities.
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
"""Words in the cache; about 15 MB."""
_LONGEST_WORD = 64
_PATTERN = r"<start_of_text>|<end_of_text>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
# What ftfy and html.unescape leave alone: printable ASCII, tabs and line ends, no entity.
_PLAIN = re.compile(r"[\t\n -%'-~]*")


def is_simple_tokenizer(tokenizer: Any) -> bool:
    """True if it is open_clip's SimpleTokenizer, in a version that this module knows, unmodified."""
    kind = type(tokenizer)
    return (
        kind.__module__ == _MODULE
        and kind is getattr(sys.modules.get(_MODULE), "SimpleTokenizer", None)
        and not {"encode", "bpe"} & vars(tokenizer).keys()
        and getattr(tokenizer, "reduction_fn", "unknown") is None
        and getattr(getattr(tokenizer, "pat", None), "pattern", None) == _PATTERN
        and isinstance(getattr(tokenizer, "context_length", None), int)
    )


class CachingTokenizer:
    """A SimpleTokenizer with a cache of words; picklable if it is. Not thread-safe.

    Args:
        tokenizer: one for which `is_simple_tokenizer` holds.

    Attributes:
        original: that tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self.original = tokenizer
        self._is_lower = tokenizer.clean_fn is getattr(sys.modules[_MODULE], "_clean_lower", None)
        self._ids: dict[str, bytes] = {}  # of int64 ids, by word

    def __repr__(self) -> str:
        return f"CachingTokenizer({self.original!r})"

    @property
    def __name__(self) -> str:
        return type(self.original).__name__

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """Tokenize captions like the tokenizer itself: int64[N, context_length]."""
        first, last = _packed([self.original.sot_token_id]), _packed([self.original.eot_token_id])
        length: int = self.original.context_length
        size = length * len(last)
        cached_ids, rows = self._ids, bytearray()
        for caption in captions:
            row = [first]
            for word in self._cleaned(caption).split(" "):
                ids = cached_ids.get(word)
                row.append(self._encode(word) if ids is None else ids)
            rows += (b"".join(row)[: size - len(last)] + last).ljust(size, b"\0")
        return torch.from_numpy(np.frombuffer(rows, np.int64).reshape(len(captions), length))

    def _cleaned(self, caption: str) -> str:
        if self._is_lower and _PLAIN.fullmatch(caption):
            return " ".join(caption.split()).lower()
        cleaned: str = self.original.clean_fn(caption)
        return cleaned

    def _encode(self, word: str) -> bytes:
        """The ids of a cleaned word, as by SimpleTokenizer.encode; caches them."""
        tokenizer = self.original
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
