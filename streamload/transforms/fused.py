"""Crop, resize and normalise in one go (part of I): Pillow's levels, and torch's floats of them, bit for bit.

What does it is _avx2.c. Where that can't be used (kernel.py), resize.py has torch's kernels, which are near.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from streamload.transforms import kernel
from streamload.transforms.augment import Box
from streamload.transforms.decode import Pixels, address_of

Filter = Literal["bicubic", "bilinear"]

_LONGEST = 1 << 16
"""Pixels of a side that _avx2.c takes."""


class Place(NamedTuple):
    """Where an image goes; made once for memory that is used again: asking a tensor costs microseconds.

    Attributes:
        tensor: uint8[1, 3, height, width], or float32[3, height, width] for a normalised one.
        address: of its first byte, if it is laid out as the kernel writes it: the former channels last, the
            latter contiguous. Else None, and what is written is copied.
    """

    tensor: torch.Tensor
    address: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """The place of a tensor; the tensor has to live as long."""
        is_ready = tensor.is_contiguous(memory_format=_layout(tensor))
        return cls(tensor, tensor.data_ptr() if is_ready else None)


def _layout(tensor: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.dtype == torch.uint8 else torch.contiguous_format


def fits(pixels: Pixels, box: Box) -> bool:
    """Whether a box of uint8[H, W, 3] can be resized by it: a pixel's channels have to lie side by side."""
    return (
        kernel.resize_into is not None
        and pixels.strides[1:] == (3, 1)
        and max(box.height, box.width) <= _LONGEST
    )


def resizing(
    pixels: Pixels,
    box: Box,
    size: tuple[int, int],
    by: Filter,
    is_columns_first: bool,
    statistics: bytes | None,
    part: Box | None = None,
) -> Callable[..., object]:
    """What crops and resizes an image whose pixels needn't be there yet.

    Args:
        pixels: uint8[H, W, 3].
        box: of these, one that `fits`.
        size: height and width of the box, resized.
        by: the filter.
        is_columns_first: whether the columns are made shorter (or longer) before the rows.
        statistics: normalise by these (normalise.packed); None: leave the levels as they are.
        part: of the resized image, with sides of at most 65,536 pixels; None: all of it.

    Returns:
        It puts the result into `out`, a Place.
    """
    resize_into = kernel.resize_into
    assert resize_into is not None
    row_bytes = pixels.strides[0]
    start = address_of(pixels) + box.top * row_bytes + box.left * 3
    source = start, row_bytes, box.height, box.width, by == "bilinear", is_columns_first, *size
    cut = (0, 0, *size) if part is None else part

    def put(*, out: Place, _: Pixels = pixels) -> None:  # which have to live until then
        tensor, address = out
        if address is not None:
            resize_into(*source, address, *cut, statistics)
            return
        between = torch.empty_like(tensor, memory_format=_layout(tensor))
        resize_into(*source, between.data_ptr(), *cut, statistics)
        tensor.copy_(between)

    return put
