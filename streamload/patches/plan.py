"""A transform to patches as data: compile.py derives it from a chain, execute.py runs it (step I)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamload.patches.grid import PatchCrop
from streamload.transforms.plan import OPENAI, Flip, Given, Grey, Size, Statistics
from streamload.transforms.resize import Filter

NAMES = ("patches", "patch_coord", "patch_valid")
"""The values of an image as patches, or of a batch; a training loop has them in one dict, with `seq_len`."""


@dataclass(frozen=True, slots=True)
class PatchPlan:
    """A transform of RGB pixels to patches; how many at most is given with each image.

    Attributes:
        patch_size: of each patch.
        crop: the random crop; None: all of the image.
        by: the filter of the resizing; of several, each image draws one.
        colour, given, statistics: as of an ImagePlan.
        max_ratio: by which factor sides are enlarged at most; None: until the patches fill the sequence.
    """

    patch_size: Size
    crop: PatchCrop | None
    by: tuple[Filter, ...] = ("bicubic",)
    colour: tuple[Flip | Grey, ...] = ()
    given: tuple[Given, ...] = ()
    statistics: Statistics = OPENAI
    max_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class GivenPatches:
    """Functions that run as given: from a Pillow image to a float image of whole patches, or to its patches.

    Attributes:
        patch_size: of each patch.
        transforms: the function for each sequence length.
    """

    patch_size: Size
    transforms: Mapping[int, Callable[[Any], Any]]


def clip_patch_plan(train: bool, patch_size: Size) -> PatchPlan:
    """Return the default of open_clip's main branch: in training a random crop of most of the image."""
    return PatchPlan(patch_size, PatchCrop() if train else None)
