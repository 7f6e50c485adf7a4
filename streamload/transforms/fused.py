"""Crop, resize and normalise in one go (part of I): what torch's kernels give, bit for bit, in half the time.

What does it is _avx2.c. It is built with the package where there is a C compiler, and runs on processors with
AVX2; everywhere else torch's kernel does the same (resize.py).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Literal

import torch

Filter = Literal["bicubic", "bilinear"]

_LONGEST = 1 << 14
"""Pixels of a side: longer ones, for which it would need megabytes, are torch's."""

_avx2: ModuleType | None
try:
    from streamload.transforms import _avx2
except ImportError:
    _avx2 = None


kernel: Callable[..., None] | None = None
"""`resize_into` of _avx2.c; None where it can't be used."""
if _avx2 is not None and _avx2.is_supported():
    kernel = _avx2.resize_into


def why_not() -> str:
    """Why it can't be used here; empty: it can."""
    if _avx2 is None:
        return "streamload was installed without a C compiler for this processor"
    return "" if _avx2.is_supported() else "the processor has no AVX2"


def fits(image: torch.Tensor) -> bool:
    """Whether an image can be resized by it: uint8[1, 3, H, W], each pixel's channels side by side."""
    _, _, height, width = image.shape
    _, channel, _, pixel = image.stride()
    return (channel, pixel) == (1, 3) and max(height, width) <= _LONGEST and kernel is not None


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
    assert kernel is not None
    resize_into, (height, width) = kernel, size
    _, _, image_height, image_width = image.shape
    source, row_bytes, is_bilinear = image.data_ptr(), image.stride(2), by == "bilinear"

    def put(*, out: torch.Tensor, of: torch.Tensor = image) -> None:  # `of` keeps the pixels
        layout = torch.channels_last if statistics is None else torch.contiguous_format
        is_ready = out.is_contiguous(memory_format=layout)
        place = out if is_ready else torch.empty_like(out, memory_format=layout)
        resize_into(
            source, row_bytes, image_height, image_width, is_bilinear, is_columns_first,
            place.data_ptr(), height, width, statistics,
        )  # fmt: skip
        if not is_ready:
            out.copy_(place)

    return put
