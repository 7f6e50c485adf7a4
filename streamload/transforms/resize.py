"""Resizing with antialias of uint8 images (part of I): Pillow's pixels, 4 to 8× faster.

By torch's kernel, or by ours (fused.py), which gives the same bits. All round to uint8 between their two
passes, so the passes must come in Pillow's order; then a value differs by at most one level (in one of a
million or more by two: torch's weights have 15 bits, Pillow's 22).
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
from streamload.transforms.fused import Filter

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
    image = crop(pixels, box)
    if box[2:] == (height, width):
        return image
    resized = _empty(height, width)
    resizing(image, height, width, by)(out=resized)
    return resized


def crop(pixels: Pixels, box: Box) -> torch.Tensor:
    """A box of uint8[H, W, 3], writable, as uint8[1, 3, box.height, box.width]: a view of it."""
    top, left, height, width = box
    row, pixel, channel = pixels.strides
    # One step in place of three views: each would be an object more, made here and freed between images.
    return memory_of(pixels).as_strided(
        (1, 3, height, width), (0, channel, row, pixel), top * row + left * pixel
    )


def resizing(image: torch.Tensor, height: int, width: int, by: Filter = "bicubic") -> Callable[..., object]:
    """What resizes a crop whose pixels needn't be there yet: all that can be known of it by then is done.

    Args:
        image: uint8[1, 3, H, W].
        height, width, by: as for `resize_box`.

    Returns:
        It puts the result into `out`, uint8[1, 3, height, width]; channels last saves a copy.
    """
    _, _, image_height, image_width = image.shape
    if (image_height, image_width) == (height, width):
        return functools.partial(_copied, image)
    goes_down_first = _goes_down_first(image_height, image_width, height, width)
    if fused.fits(image):
        return fused.resizing(image, (height, width), by, goes_down_first, None)
    if goes_down_first:
        return functools.partial(_resize_down_first, image, height, width, by)
    return functools.partial(_KERNELS[by], image, (height, width), False, None, None)


def resizing_to_floats(
    image: torch.Tensor, height: int, width: int, by: Filter, statistics: bytes
) -> Callable[..., object] | None:
    """The same with the normalising, in one go; None where that can't be.

    Args:
        image, height, width, by: as for `resizing`.
        statistics: see normalise.packed.

    Returns:
        It puts the result into `out`, float32[3, height, width].
    """
    if not fused.fits(image):
        return None
    goes_down_first = _goes_down_first(image.shape[2], image.shape[3], height, width)
    return fused.resizing(image, (height, width), by, goes_down_first, statistics)


def resize_and_cut(
    pixels: Pixels, height: int, width: int, part: Box, by: Filter = "bicubic"
) -> torch.Tensor:
    """Resize an image to height × width and cut a part out, as `resize(…).crop(…)` of Pillow.

    Args:
        pixels: uint8[H, W, 3], writable.
        height: of the whole image, resized.
        width: the same.
        part: within the resized image.
        by: the filter.

    Returns:
        uint8[3, part.height, part.width]; its memory may be larger than it.
    """
    if max(height, width) > _LONGEST * max(part.height, part.width):
        return _resize_part(pixels, height, width, part, by)
    whole = Box(0, 0, *pixels.shape[:2])
    resized = resize_box(pixels, whole, height, width, by)[0]
    return resized[:, part.top : part.top + part.height, part.left : part.left + part.width]


def _resize_down_first(
    image: torch.Tensor, height: int, width: int, by: Filter, *, out: torch.Tensor
) -> torch.Tensor:
    image_width = image.shape[3]
    between = _KERNELS[by](image, (height, image_width), False, None, None, out=_empty(height, image_width))
    return _KERNELS[by](between, (height, width), False, None, None, out=out)


def _copied(image: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(image)


def _empty(height: int, width: int) -> torch.Tensor:
    """uint8[1, 3, height, width], channels last."""
    return torch.empty((1, height, width, 3), dtype=torch.uint8, device="cpu").permute(0, 3, 1, 2)


def _resize_part(pixels: Pixels, height: int, width: int, part: Box, by: Filter) -> torch.Tensor:
    """A part of the image resized to height × width, the rest not computed: for very long images."""
    down, across = pixels.shape[0] / height, pixels.shape[1] / width
    source = (
        part.left * across,
        part.top * down,
        (part.left + part.width) * across,
        (part.top + part.height) * down,
    )
    image = Image.fromarray(pixels).resize((part.width, part.height), _PILLOWS[by], box=source)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _goes_down_first(height: int, width: int, new_height: int, new_width: int) -> bool:
    """Whether Pillow resizes columns before rows: 13.0 does where that saves it work (found by trying)."""
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
