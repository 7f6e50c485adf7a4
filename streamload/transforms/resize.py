"""Resizing with antialias of uint8 images (part of I): Pillow's pixels, 8 to 9× faster.

By our kernel (fused.py) they are Pillow's to the bit. Where it can't be used, torch's stands in, 4 to 8×
faster than Pillow's: its weights have 15 bits and Pillow's 22, so one value in 300 differs by a level, and by
two one in a million, of images that are made larger five. All round to uint8 between their two passes, so the
passes must come in Pillow's order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from streamload.transforms import fused
from streamload.transforms.augment import Box
from streamload.transforms.decode import Pixels, memory_of
from streamload.transforms.fused import Filter, Place

Put = Callable[..., object]
"""Puts an image into its place, `out`, a Place, once its pixels are there."""

_LONGEST = 8
"""How many times the part that is used a resized image is long before only that part gets computed."""
# What F.interpolate calls, which can't be told where to put the result: that costs a tenth of the resizing.
_KERNELS: dict[Filter, Callable[..., torch.Tensor]] = {
    "bicubic": torch._C._nn._upsample_bicubic2d_aa,
    "bilinear": torch._C._nn._upsample_bilinear2d_aa,
}
_PILLOWS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def resize_box(pixels: Pixels, box: Box, height: int, width: int, by: Filter = "bicubic") -> torch.Tensor:
    """Crop an image and resize the crop, as `crop(…).resize(…)` of Pillow.

    Args:
        pixels: uint8[H, W, 3], writable.
        box: within the image.
        height: of the result.
        width: of the result.
        by: the filter.

    Returns:
        uint8[1, 3, height, width], channels last; a view of the pixels where the crop has that size.
    """
    if box[2:] == (height, width):
        return crop(pixels, box)
    resized = empty(height, width)
    resizing(pixels, box, (height, width), by)(out=Place.of(resized))
    return resized


def crop(pixels: Pixels, box: Box) -> torch.Tensor:
    """A box of uint8[H, W, 3], writable, as uint8[1, 3, box.height, box.width]: a view of it."""
    top, left, height, width = box
    row, pixel, channel = pixels.strides
    # One step in place of three views: each would be an object more, made here and freed between images.
    return memory_of(pixels).as_strided(
        (1, 3, height, width), (0, channel, row, pixel), top * row + left * pixel
    )


def resizing_tensor(pixels: Pixels, size: tuple[int, int], by: Filter, part: Box) -> Put:
    """What resizes an image as torchvision resizes tensors: by torch's kernel, rows first.

    Args:
        pixels: uint8[H, W, 3], writable; needn't be there yet.
        size: height and width of the result.
        by: the filter.
        part: of the resized image.

    Returns:
        It puts the part into `out`, a Place.
    """
    height, width, _ = pixels.shape
    image = crop(pixels, Box(0, 0, height, width))
    return functools.partial(_resize_tensor_and_cut, image, size, part, by)


def resizing(
    pixels: Pixels, box: Box, size: tuple[int, int], by: Filter = "bicubic", part: Box | None = None
) -> Put:
    """What crops and resizes an image whose pixels needn't be there yet.

    Args:
        pixels: uint8[H, W, 3], writable.
        box: within the image.
        size: height and width of the box, resized.
        by: the filter.
        part: of the resized box, as `resize(…).crop(…)` of Pillow gives it; None: all of it.

    Returns:
        It puts the result into `out`, a Place.
    """
    if part is not None and part == (0, 0, *size):
        part = None
    if part is None and box[2:] == size:
        return functools.partial(_copied, crop(pixels, box))
    if fused.fits(pixels, box):
        return fused.resizing(pixels, box, size, by, _goes_down_first(box, size), None, part)
    image = crop(pixels, box)
    if part is None:
        return _by_torch(image, size, by)
    return functools.partial(_resize_and_cut, image, size, part, by)


def resizing_to_floats(
    pixels: Pixels, box: Box, size: tuple[int, int], by: Filter, part: Box | None, statistics: bytes
) -> Put | None:
    """The same with the normalising, in one go; None where that can't be.

    Args:
        pixels, box, size, by, part: as for `resizing`.
        statistics: see normalise.packed.

    Returns:
        It puts the result into `out`, a Place.
    """
    if not fused.fits(pixels, box):
        return None
    return fused.resizing(pixels, box, size, by, _goes_down_first(box, size), statistics, part)


def _by_torch(image: torch.Tensor, size: tuple[int, int], by: Filter) -> Put:
    """What resizes uint8[1, 3, H, W] by torch's kernel, in Pillow's order of passes."""
    if _goes_down_first(Box(0, 0, *image.shape[2:]), size):
        return functools.partial(_resize_down_first, image, size, by)
    return functools.partial(_resize, image, size, by)


def _resize_and_cut(image: torch.Tensor, size: tuple[int, int], part: Box, by: Filter, *, out: Place) -> None:
    top, left, height, width = part
    if max(size) > _LONGEST * max(height, width):
        out.tensor.copy_(_resize_part(image, size, part, by))
        return
    resized = empty(*size)
    _by_torch(image, size, by)(out=Place.of(resized))
    out.tensor.copy_(resized[:, :, top : top + height, left : left + width])


def _resize_tensor_and_cut(
    image: torch.Tensor, size: tuple[int, int], part: Box, by: Filter, *, out: Place
) -> None:
    top, left, height, width = part
    if image.shape[2:] != size:
        _resize(image, size, by, out=Place.of(resized := empty(*size)))
        image = resized
    out.tensor.copy_(image[:, :, top : top + height, left : left + width])


def _resize(image: torch.Tensor, size: tuple[int, int], by: Filter, *, out: Place) -> None:
    _KERNELS[by](image, size, False, None, None, out=out.tensor)


def _resize_down_first(image: torch.Tensor, size: tuple[int, int], by: Filter, *, out: Place) -> None:
    between = size[0], image.shape[3]
    shorter = _KERNELS[by](image, between, False, None, None, out=empty(*between))
    _KERNELS[by](shorter, size, False, None, None, out=out.tensor)


def _copied(image: torch.Tensor, *, out: Place) -> None:
    out.tensor.copy_(image)


def empty(height: int, width: int) -> torch.Tensor:
    """uint8[1, 3, height, width], channels last."""
    return torch.empty((1, height, width, 3), dtype=torch.uint8, device="cpu").permute(0, 3, 1, 2)


def _resize_part(image: torch.Tensor, size: tuple[int, int], part: Box, by: Filter) -> torch.Tensor:
    """A part of the image resized to `size`, the rest not computed: for very long images."""
    down, across = image.shape[2] / size[0], image.shape[3] / size[1]
    source = (
        part.left * across,
        part.top * down,
        (part.left + part.width) * across,
        (part.top + part.height) * down,
    )
    whole = Image.fromarray(image[0].permute(1, 2, 0).numpy())
    resized = whole.resize((part.width, part.height), _PILLOWS[by], box=source)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)[None]


def _goes_down_first(box: Box, size: tuple[int, int]) -> bool:
    """Whether Pillow resizes columns before rows: from 13.0 on where that saves it work."""
    (_, _, height, width), (new_height, new_width) = box, size
    return (
        height > new_height
        and height - new_height > 2 * (width - new_width)
        and new_width != width
        and _pillow_chooses_its_order()
    )


@functools.cache
def _pillow_chooses_its_order() -> bool:
    """Whether the installed Pillow ever resizes the columns first; up to 12 it never does."""
    image = Image.fromarray(
        (np.arange(64 * 16, dtype=np.uint32) * 40503 >> 4).astype(np.uint8).reshape(64, 16)
    )
    bicubic = Image.Resampling.BICUBIC
    rows_first = image.resize((12, 64), bicubic).resize((12, 16), bicubic)
    return image.resize((12, 16), bicubic).tobytes() != rows_first.tobytes()
