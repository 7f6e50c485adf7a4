"""The memory of a batch of images as patches (step J): [N, L, …], in the format of timm's NaFlexCollator."""

from __future__ import annotations

import math
from typing import Any

import torch

from streamload.batches.collate import Allocate
from streamload.transforms.patches import NAMES, PatchRow
from streamload.transforms.plan import Size


class PatchMemory:
    """The patches of a batch.

    Args:
        size: its capacity, in images.
        allocate: makes its tensors.
        seq_len: L, the patches that each image has room for.
        patch_size: of each patch.
        dtype: of the patches, uint8 or float32.

    Attributes:
        places: of the images.
    """

    def __init__(self, size: int, allocate: Allocate, seq_len: int, patch_size: Size, dtype: torch.dtype):
        self._tensors = (
            allocate((size, seq_len, math.prod(patch_size) * 3), dtype),
            allocate((size, seq_len, 2), torch.int64),
            allocate((size, seq_len), torch.bool),
        )
        self.places = [PatchRow(*row) for row in zip(*self._tensors, strict=True)]

    def values(self, count: int) -> dict[str, Any]:
        """The values of the first `count` images."""
        return {name: tensor[:count] for name, tensor in zip(NAMES, self._tensors, strict=True)}
