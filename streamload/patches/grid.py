"""Images as rows and columns of patches (step I): how many for a box of any size. Pure arithmetic.

From the index's width and height it predicts what is made of the pixels: both call `patch_grid`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.transforms.augment import CLIP_RATIO, CLIP_SCALE, Box

_LEAST, _MOST, _PRECISION = 1e-6, 100.0, 1e-5
"""Between which factors an image is scaled, and how closely the largest one is found: timm's."""
_TRIES = 10


class Grid(NamedTuple):
    """Rows and columns of patches; an image has their product."""

    rows: int
    columns: int


def patch_grid(
    height: int, width: int, seq_len: int, patch_size: tuple[int, int], max_ratio: float | None = None
) -> Grid:
    """Return the largest grid of at most `seq_len` patches that keeps the aspect of a box.

    That of timm's `get_image_size_for_seq`: sides are rounded up to whole patches, so that the aspect changes
    by less than a patch, and small boxes are enlarged.

    Args:
        height: of the box, in pixels.
        width: of the box, in pixels.
        seq_len: at least 1.
        patch_size: height and width of a patch, in pixels.
        max_ratio: by which factor sides are enlarged at most; None: until the patches fill `seq_len`.
    """
    patch_height, patch_width = patch_size
    ceil, low, high = math.ceil, _LEAST, _MOST
    # The grid has to be timm's on the last bit: the same factors are tried, with the same rounding.
    while high - low >= _PRECISION:
        factor = (low + high) / 2.0
        if ceil(height * factor / patch_height) * ceil(width * factor / patch_width) <= seq_len:
            low = factor
        else:
            high = factor
    factor = low if max_ratio is None else min(low, max_ratio)
    return Grid(ceil(height * factor / patch_height), ceil(width * factor / patch_width))


def most_patches(
    heights: NDArray[np.float64],
    widths: NDArray[np.float64],
    patch_size: tuple[int, int],
    max_ratio: float,
) -> NDArray[np.float64]:
    """Return the most patches of images of any sequence length, and of any box of theirs; NaN stays NaN."""
    patch_height, patch_width = patch_size
    rows, columns = np.ceil(heights * max_ratio / patch_height), np.ceil(widths * max_ratio / patch_width)
    counts: NDArray[np.float64] = rows * columns
    return counts


@dataclass(frozen=True, slots=True)
class PatchCrop:
    """A random box, its aspect relative to the image's: timm's RandomResizedCropToSequence.

    Attributes:
        scale: minimum and maximum area of a box, as a share of the image.
        ratio: by which factors its width / height may differ from the image's.
    """

    scale: tuple[float, float] = CLIP_SCALE
    ratio: tuple[float, float] = CLIP_RATIO

    def draw(self, height: int, width: int, numbers: random.Random) -> Box:
        """Draw the box for an image of this size, by the numbers of Python's `random`."""
        area, aspect = height * width, width / height
        narrow, wide = map(math.log, self.ratio)
        for _ in range(_TRIES):
            share = area * numbers.uniform(*self.scale)
            across_by_down = aspect * math.exp(numbers.uniform(narrow, wide))
            box_height = round(math.sqrt(share / across_by_down))
            box_width = round(math.sqrt(share * across_by_down))
            if 0 < box_width <= width and 0 < box_height <= height:
                top = numbers.randint(0, height - box_height)
                return Box(top, numbers.randint(0, width - box_width), box_height, box_width)
        return self._central(height, width)

    def _central(self, height: int, width: int) -> Box:
        aspect = width / height
        narrowest, widest = (aspect * factor for factor in self.ratio)
        box_height, box_width = height, width
        if aspect < narrowest:
            box_height = max(1, min(round(width / narrowest), height))
        elif aspect > widest:
            box_width = max(1, min(round(height * widest), width))
        return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)
