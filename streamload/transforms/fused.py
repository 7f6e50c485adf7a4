"""Crop, resize and normalise in one go (part of I): Pillow's levels, and torch's floats of them, bit for bit.

What does it is _avx2.c. Where that can't be used (kernel.py), resize.py has torch's kernels, which are near.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from streamload.transforms import kernel
from streamload.transforms.augment import Box

Filter = Literal["bicubic", "bilinear"]

_LONGEST = 1 << 16
"""Pixels of a side that _avx2.c takes."""


def fits(image: torch.Tensor) -> bool:
    """Whether an image can be resized by it: uint8[1, 3, H, W], each pixel's channels side by side."""
    _, _, height, width = image.shape
    _, channel, _, pixel = image.stride()
    return (channel, pixel) == (1, 3) and max(height, width) <= _LONGEST and kernel.resize_into is not None


def resizing(
    image: torch.Tensor,
    size: tuple[int, int],
    by: Filter,
    is_columns_first: bool,
    statistics: bytes | None,
    part: Box | None = None,
) -> Callable[..., object]:
    """What resizes an image whose pixels needn't be there yet.

    Args:
        image: one that `fits`.
        size: height and width of the image, resized.
        by: the filter.
        is_columns_first: whether the columns are made shorter (or longer) before the rows.
        statistics: normalise by these (normalise.packed); None: leave the levels as they are.
        part: of the resized image, with sides of at most 65,536 pixels; None: all of it.

    Returns:
        It puts the result into `out`: uint8[1, 3, height, width], where channels last saves a copy;
        normalised, float32[3, height, width].
    """
    resize_into = kernel.resize_into
    assert resize_into is not None
    _, _, image_height, image_width = image.shape
    source = image.stride(2), image_height, image_width, by == "bilinear", is_columns_first, *size
    cut = (0, 0, *size) if part is None else part
    layout = torch.channels_last if statistics is None else torch.contiguous_format

    def put(*, out: torch.Tensor) -> None:
        is_ready = out.is_contiguous(memory_format=layout)
        place = out if is_ready else torch.empty_like(out, memory_format=layout)
        resize_into(image.data_ptr(), *source, place.data_ptr(), *cut, statistics)
        if not is_ready:
            out.copy_(place)

    return put
