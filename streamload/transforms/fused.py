"""Crop, resize and normalise in one go (part of I): what torch's kernels give, bit for bit, in half the time.

What does it is _avx2.c; where it can't be used (kernel.py), torch's kernels do the same (resize.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from streamload.transforms import kernel

Filter = Literal["bicubic", "bilinear"]

_LONGEST = 1 << 14
"""Pixels of a side: longer ones, for which it would need megabytes, are torch's."""


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
) -> Callable[..., object]:
    """What resizes an image whose pixels needn't be there yet.

    Args:
        image: one that `fits`.
        size: height and width of the result.
        by: the filter.
        is_columns_first: whether the columns are made shorter (or longer) before the rows.
        statistics: normalise by these (normalise.packed); None: leave the levels as they are.

    Returns:
        It puts the result into `out`: uint8[1, 3, height, width], where channels last saves a copy;
        normalised, float32[3, height, width].
    """
    resize_into, (height, width) = kernel.resize_into, size
    assert resize_into is not None
    _, _, image_height, image_width = image.shape
    source = image.stride(2), image_height, image_width, by == "bilinear", is_columns_first
    layout = torch.channels_last if statistics is None else torch.contiguous_format

    def put(*, out: torch.Tensor) -> None:
        is_ready = out.is_contiguous(memory_format=layout)
        place = out if is_ready else torch.empty_like(out, memory_format=layout)
        resize_into(image.data_ptr(), *source, place.data_ptr(), height, width, statistics)
        if not is_ready:
            out.copy_(place)

    return put
