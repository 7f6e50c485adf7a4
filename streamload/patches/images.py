"""The patches of a batch's images in its memory, written by a plan or by functions as given (steps I, J)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from streamload.batches.given import GivenImages
from streamload.batches.images import ImageAssembly, ImageMaker, ImagesFactory, PlannedImages
from streamload.batches.in_progress import Allocate
from streamload.patches.execute import PatchRow, PlannedPatches
from streamload.patches.plan import NAMES, GivenPatches, PatchPlan
from streamload.transforms.plan import Size, Statistics


@dataclass(frozen=True, slots=True)
class PatchImages(ImageMaker):
    """The transform of images to patches.

    Attributes:
        transform: compiled, or functions that run as given.
    """

    transform: PatchPlan | GivenPatches

    @property
    def statistics(self) -> Statistics | None:
        """The statistics for images that are left as uint8; None: they can't be."""
        return self.transform.statistics if isinstance(self.transform, PatchPlan) else None

    def batch_factory(self, assembly: ImageAssembly) -> ImagesFactory:
        """A function that makes the images of an empty batch."""
        transform, as_bytes = self.transform, assembly.as_bytes
        if isinstance(transform, GivenPatches):
            return lambda size, allocate, seq_len=0: _GivenPatchImages(
                transform, assembly, size, allocate, seq_len
            )
        planned = functools.cache(functools.partial(PlannedPatches, transform, as_bytes=as_bytes))
        dtype = torch.uint8 if as_bytes else torch.float32
        return lambda size, allocate, seq_len=0: PlannedImages(
            planned(seq_len), assembly, PatchMemory(size, allocate, seq_len, transform.patch_size, dtype)
        )


class PatchMemory:
    """The patches of a batch, in the format of timm's NaFlexCollator.

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


class _GivenPatchImages(GivenImages):
    """The user's own transform to patches, run as given; its results are written into the batch at once."""

    def __init__(
        self, given: GivenPatches, assembly: ImageAssembly, size: int, allocate: Allocate, seq_len: int
    ):
        super().__init__(
            given.transforms[seq_len],
            assembly.draws,
            assembly.resized,
            assembly.most_pixels,
            assembly.as_model_inputs,
            allocate,
        )
        self._patch_size, self._count = given.patch_size, 0
        self._memory = PatchMemory(size, allocate, seq_len, given.patch_size, torch.float32)

    def add(self, parsed: tuple[memoryview, bool, int]) -> None:
        """Make the patches of a parsed image, as the next row of the batch."""
        super().add(parsed)
        self._memory.places[self._count].put_given(self._values.pop(), self._patch_size)
        self._count += 1

    def drop_last(self) -> None:
        self._count -= 1

    def finish(self, keys: Sequence[str]) -> dict[str, Any]:
        return self._memory.values(self._count)
