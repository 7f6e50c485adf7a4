"""Lengths of rows, and the room that rows get, where steps are planned by block (E)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamload.batches.tokenize import BatchTokenizer
from streamload.errors import OptionError
from streamload.patches.grid import most_patches
from streamload.shards.columns import TOKENS

if TYPE_CHECKING:
    from streamload.extension import LoaderOptions

LONG_TEXT = "word " * 4096
"""A caption with more tokens than any tokenizer keeps."""


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Options of the lengths of rows, by which blocks of steps are planned (cells.py).

    Attributes:
        text: the name of the fact that says how long a sample's text is; None: texts don't count.
        text_most: tokens of the longest text, and of those of which nothing is known.
        text_multiple: of the tokens of a place in a batch.
        patches_most: of an image, and of those of which nothing is known; 0: images have no patches.
        patch_size: of each patch.
        max_ratio: by which factor images are enlarged at most; None: all have the most patches.
    """

    text: str | None
    text_most: int
    text_multiple: int
    patches_most: int = 0
    patch_size: tuple[int, int] = (1, 1)
    max_ratio: float | None = None

    @property
    def facts(self) -> list[str]:
        """The names of the facts that costs follow from."""
        sizes = [] if self.max_ratio is None else ["width", "height"]
        return sizes if self.text is None else [self.text, *sizes]

    def costs(self, facts: Mapping[str, npt.NDArray[np.float64]], count: int) -> npt.NDArray[np.float64]:
        """float64[count, 2]: the length of the text and the size of the image, in tokens, by facts."""
        costs = np.zeros((count, 2))
        if self.text is not None:
            costs[:, 0] = np.fmin(facts[self.text], self.text_most)
        costs[:, 1] = self.patches_most
        if self.max_ratio is not None:
            most = most_patches(facts["height"], facts["width"], self.patch_size, self.max_ratio)
            costs[:, 1] = np.fmin(most, self.patches_most)
        return costs

    def any_row(self, count: int) -> npt.NDArray[np.int32]:
        """The room for rows of any length: int32[count, 2]."""
        return np.full((count, 2), (self.text_most, self.patches_most), np.int32)

    def rounded(self, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
        """The room for rows that cost at most this: int32[N, 2]."""
        room = costs.astype(np.int32)
        room[:, 0] = np.minimum(-(-room[:, 0] // self.text_multiple) * self.text_multiple, self.text_most)
        return room


def row_costs_of(options: LoaderOptions, tokenizer: BatchTokenizer | None) -> RowCosts:
    """Options of the lengths of rows of a loader.

    Args:
        options: of the loader, `LoaderOptions`, with bucketing.
        tokenizer: of its batches.

    Raises:
        OptionError: a row may be longer than a part of a batch.
    """
    batches, patches, text, most = options.batches, options.images.patches, None, 0
    if batches.text_padding == "longest" and tokenizer is not None:
        text, most = TOKENS, tokenizer([LONG_TEXT], [0]).ids.shape[1]
    longest = most + (max(patches.seq_lens) if patches is not None else 0)
    if batches.max_tokens is not None and batches.max_tokens < longest:
        raise OptionError(
            f"max_tokens={batches.max_tokens}; expected at least {longest}, what the longest row may have"
        )
    costs = RowCosts(text, most, batches.text_pad_multiple)
    if patches is None:
        return costs
    return replace(
        costs, patches_most=max(patches.seq_lens), patch_size=patches.sides, max_ratio=patches.max_ratio
    )
