"""Patches: images of any aspect and resolution, as make_loader's `Images(patches=…)` takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from streamload.errors import OptionError
from streamload.options.values import at_least
from streamload.order.steps import SeqLens

_LONGEST_PIXELS = 1 << 16
"""The longest side of a resized image (transforms/resize.py)."""


@dataclass(frozen=True, slots=True)
class Patches:
    """Images as patches, each in its own aspect and resolution: timm's NaFlex.

    Args:
        patch_size: height and width of a patch, in pixels; one number for both.
        seq_lens: the most patches of an image; images are resized to as many as fit. A step of training has
            one of these, drawn by the seed, the same on all ranks; an evaluation has the largest.
        seq_len_probs: how often each is drawn, in relation to the others; None: all alike.
        max_ratio: by which factor images are enlarged at most, as timm's ResizeToSequence has it; 1.0: they
            aren't, so small ones have fewer patches, and `Batches(bucketing=…)` goes by these, too. None: all
            are enlarged until they fill the sequence.
        steps: of training, as (most patches of an image, rows of a rank), in place of drawn lengths and of
            batch_size. Each epoch has all of them in another order; num_batches may ask for fewer or more.

    Raises:
        OptionError: a value that can't be used.
    """

    patch_size: int | tuple[int, int] = 16
    seq_lens: Sequence[int] = (128, 256, 576, 784, 1024)
    seq_len_probs: Sequence[float] | None = None
    max_ratio: float | None = None
    steps: Sequence[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        is_pair = isinstance(self.patch_size, Sequence) and len(self.patch_size) == 2
        if not (is_pair or isinstance(self.patch_size, int)):
            raise OptionError(f"patch_size={self.patch_size!r}; expected one or two numbers of pixels")
        if not (isinstance(self.seq_lens, Sequence) and self.seq_lens):
            raise OptionError(f"seq_lens={self.seq_lens!r}; expected at least one number of patches")
        for side in self.sides:
            at_least(1, patch_size=side)
        for seq_len in self.seq_lens:
            at_least(1, seq_lens=seq_len)
        if (longest := max(self.seq_lens) * max(self.sides)) > _LONGEST_PIXELS:
            raise OptionError(
                f"{max(self.seq_lens)} patches in a row have {longest:,} pixels; at most {_LONGEST_PIXELS:,} "
                f"are possible: lower seq_lens or patch_size"
            )
        if self.max_ratio is not None and not 0 < self.max_ratio < math.inf:
            raise OptionError(f"max_ratio={self.max_ratio!r}; expected a factor above 0, or None")
        probs = self.seq_len_probs
        if probs is not None and (
            len(probs) != len(self.seq_lens)
            or not all(0 <= prob < math.inf for prob in probs)
            or not any(probs)
        ):
            raise OptionError(
                f"seq_len_probs={probs!r}; expected a number of at least 0 for each of the seq_lens "
                f"{tuple(self.seq_lens)}, and not only 0"
            )
        if self.steps is not None:
            self._check_steps(self.steps)

    def _check_steps(self, steps: Sequence[tuple[int, int]]) -> None:
        if self.seq_len_probs is not None:
            raise OptionError("give seq_len_probs= or steps=, which has the length of each step")
        if not (steps and {seq_len for seq_len, _ in steps} <= set(self.seq_lens)):
            raise OptionError(
                f"steps={steps!r:.100}; expected at least one (seq_len, rows), each seq_len one of the "
                f"seq_lens {tuple(self.seq_lens)}"
            )
        for _, rows in steps:
            at_least(1, steps=rows)

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of a patch, in pixels."""
        height, width = (self.patch_size,) * 2 if isinstance(self.patch_size, int) else self.patch_size
        return height, width

    def lengths(self, train: bool, seed: int) -> SeqLens:
        """The sequence lengths of a run."""
        if not train:
            return SeqLens((max(self.seq_lens),), (1,), seed)
        return SeqLens(tuple(self.seq_lens), tuple(self.seq_len_probs or [1] * len(self.seq_lens)), seed)
