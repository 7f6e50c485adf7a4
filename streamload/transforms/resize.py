"""Bicubic resizing with antialias of uint8 images (part of I): Pillow's pixels by torch's kernel, 4× faster.

Both round to uint8 between their two passes, so the passes must come in Pillow's order; then a value differs
by at most one level (in one of about 10 million by two: torch's weights have 15 bits, Pillow's 22).
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image

from streamload.transforms.augment import Box
from streamload.transforms.decode import Pixels

_LONGEST = 8
"""How many times its short side a resized image is long before only the part that is used gets computed."""


def resize_box(pixels: Pixels, box: Box, height: int, width: int) -> torch.Tensor:
    """Crop an image and resize the crop, as `crop(…).resize(…, BICUBIC)` of Pillow.

    Args:
        pixels: uint8[H, W, 3], writable.
        box: within the image.
        height: of the result.
        width: of the result.

    Returns:
        uint8[3, height, width] in memory of its own, channels last.
    """
    top, left, box_height, box_width = box
    image = torch.from_numpy(pixels)[None, top : top + box_height, left : left + box_width].permute(
        0, 3, 1, 2
    )
    if _goes_down_first(box_height, box_width, height, width):
        image = _interpolate(image, height, box_width)
    return _interpolate(image, height, width)[0]


def resize_and_crop_centre(pixels: Pixels, size: int) -> torch.Tensor:
    """Resize the short side to `size` and cut the middle square: torchvision's Resize and CenterCrop.

    Args:
        pixels: uint8[H, W, 3], writable.
        size: of the result.

    Returns:
        uint8[3, size, size]; its memory may be larger than it.
    """
    height, width = pixels.shape[:2]
    long = int(size * max(height, width) / min(height, width))
    new_height, new_width = (long, size) if width <= height else (size, long)
    top, left = round((new_height - size) / 2), round((new_width - size) / 2)
    if long > _LONGEST * size:
        return _resize_part(pixels, new_height, new_width, Box(top, left, size, size))
    resized = resize_box(pixels, Box(0, 0, height, width), new_height, new_width)
    return resized[:, top : top + size, left : left + size]


def _interpolate(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    if image.shape[2:] == (height, width):
        return image
    # The kernel is fastest from channels last to channels last; a copy of a crop costs it less than its gaps.
    image = image.contiguous(memory_format=torch.channels_last)
    return F.interpolate(image, (height, width), mode="bicubic", antialias=True)


def _resize_part(pixels: Pixels, height: int, width: int, part: Box) -> torch.Tensor:
    """A part of the image resized to height × width, the rest not computed: for very long images."""
    down, across = pixels.shape[0] / height, pixels.shape[1] / width
    source = (
        part.left * across,
        part.top * down,
        (part.left + part.width) * across,
        (part.top + part.height) * down,
    )
    image = Image.fromarray(pixels).resize((part.width, part.height), Image.Resampling.BICUBIC, box=source)
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
