"""Crop, antialiased resize and normalisation of uint8 images (step I), with Pillow's pixels.

The kernel (_avx2.c) matches Pillow to the bit, is 8 to 9× faster, and can normalise in the same pass.
Without it torch's kernels are used, 4 to 8× faster than Pillow; where these have no vector code Pillow is
faster, and is used. torch's weights have 15 bits, Pillow's 22: one value in 300 is a level off, one in a
million two levels (five in a million when enlarging). All of them round to uint8 between the two passes, so
the passes must run in Pillow's order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from streamload.torch_internals import upsample_bicubic, upsample_bilinear
from streamload.transforms import kernel
from streamload.transforms.augment import Box
from streamload.transforms.decode import Pixels, address_of, memory_of

Filter = Literal["bicubic", "bilinear"]
Put = Callable[..., object]
"""Writes an image to the Place `out`; called once the pixels are decoded."""

_KERNEL_SIDE = 1 << 16
"""The longest side, in pixels, that _avx2.c takes."""
_PART_FACTOR = 8
"""A resized image this many times longer than the part that is used: only the part is computed."""
# What F.interpolate calls. F.interpolate has no `out`, which costs a tenth of the resizing.
_TORCH_KERNELS: dict[Filter, Callable[..., torch.Tensor]] = {
    "bicubic": upsample_bicubic,
    "bilinear": upsample_bilinear,
}
_PILLOWS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class Place(NamedTuple):
    """The destination of an image. Made once for reused memory: asking a tensor costs microseconds.

    Attributes:
        tensor: uint8[1, 3, height, width], or float32[3, height, width] for a normalised image.
        address: of its first byte if the tensor has the layout that the kernel writes (uint8: channels last,
            float32: contiguous). Otherwise None, and the result is copied.
    """

    tensor: torch.Tensor
    address: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """Return the place of a tensor, which must outlive it."""
        return cls.of_each([tensor])[0]

    @classmethod
    def of_each(cls, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """Return the places of tensors of one dtype, which must outlive them."""
        layout = _layout(tensors[0]) if tensors else torch.contiguous_format
        return [
            cls(tensor, tensor.data_ptr() if tensor.is_contiguous(memory_format=layout) else None)
            for tensor in tensors
        ]


def resize_box(pixels: Pixels, box: Box, height: int, width: int, by: Filter = "bicubic") -> torch.Tensor:
    """Crop and resize an image, like Pillow's `crop(…).resize(…)`.

    Args:
        pixels: uint8[H, W, 3], writable.
        box: within the image.
        height: of the result.
        width: of the result.
        by: the filter.

    Returns:
        uint8[1, 3, height, width], channels last; a view of the pixels if the crop already has that size.
    """
    if box[2:] == (height, width):
        return crop(pixels, box)
    resized = empty(height, width)
    resizing(pixels, box, (height, width), by)(out=Place.of(resized))
    return resized


def crop(pixels: Pixels, box: Box) -> torch.Tensor:
    """Return a box of uint8[H, W, 3], writable, as uint8[1, 3, box.height, box.width]: a view."""
    top, left, height, width = box
    row, pixel, channel = pixels.strides
    # One step in place of three views: each would be another object, made and freed for every image.
    return memory_of(pixels).as_strided(
        (1, 3, height, width), (0, channel, row, pixel), top * row + left * pixel
    )


def empty(height: int, width: int) -> torch.Tensor:
    """Return an uninitialised uint8[1, 3, height, width], channels last."""
    return torch.empty((1, height, width, 3), dtype=torch.uint8, device="cpu").permute(0, 3, 1, 2)


def resizing(
    pixels: Pixels, box: Box, size: tuple[int, int], by: Filter = "bicubic", part: Box | None = None
) -> Put:
    """Return a function that crops and resizes an image whose pixels may not be decoded yet.

    Args:
        pixels: uint8[H, W, 3], writable.
        box: within the image.
        size: height and width of the resized box.
        by: the filter.
        part: of the resized box, as Pillow's `resize(…).crop(…)`; None: all of it.
    """
    if part is not None and part == (0, 0, *size):
        part = None
    if part is None and box[2:] == size:
        return functools.partial(_copied, crop(pixels, box))
    if fits_kernel(pixels, box):
        return kernel_resizing(pixels, box, size, by, goes_down_first(box, size), None, part)
    image = crop(pixels, box)
    if part is None:
        return _by_library(image, size, by)
    return functools.partial(_resize_and_cut, image, size, part, by)


def resizing_tensor(pixels: Pixels, size: tuple[int, int], by: Filter, part: Box) -> Put:
    """Return a function that resizes an image as torchvision resizes tensors: torch's kernel, rows first.

    Args:
        pixels: uint8[H, W, 3], writable; may not be decoded yet.
        size: height and width of the resized image.
        by: the filter.
        part: of the resized image.
    """
    height, width, _ = pixels.shape
    image = crop(pixels, Box(0, 0, height, width))
    return functools.partial(_resize_tensor_and_cut, image, size, part, by)


def fits_kernel(pixels: Pixels, box: Box) -> bool:
    """Return whether the kernel can resize this box of uint8[H, W, 3]: channels must be adjacent."""
    return (
        kernel.resize_into is not None
        and pixels.strides[1:] == (3, 1)
        and max(box.height, box.width) <= _KERNEL_SIDE
    )


def kernel_resizing(
    pixels: Pixels,
    box: Box,
    size: tuple[int, int],
    by: Filter,
    is_columns_first: bool,
    statistics: bytes | None,
    part: Box | None = None,
) -> Put:
    """Return a function that crops, resizes and normalises by the kernel.

    Args:
        pixels, size, by: as for `resizing`.
        box: one that `fits_kernel`.
        is_columns_first: whether the vertical pass runs before the horizontal one.
        statistics: from `packed`; None: write uint8 levels.
        part: of the resized image, with sides of at most 65,536 pixels; None: all of it.
    """
    resize_into = kernel.resize_into
    assert resize_into is not None
    row_bytes = pixels.strides[0]
    start = address_of(pixels) + box.top * row_bytes + box.left * 3
    source = start, row_bytes, box.height, box.width, by == "bilinear", is_columns_first, *size
    cut = (0, 0, *size) if part is None else part

    def put(*, out: Place, _: Pixels = pixels) -> None:  # keeps the pixels alive
        tensor, address = out
        if address is not None:
            resize_into(*source, address, *cut, statistics)
            return
        between = torch.empty_like(tensor, memory_format=_layout(tensor))
        resize_into(*source, between.data_ptr(), *cut, statistics)
        tensor.copy_(between)

    return put


@functools.cache
def packed(mean: tuple[float, ...], std: tuple[float, ...]) -> bytes:
    """Return mean and std of the channels as the kernel takes them: the bytes of float32[2, C]."""
    return np.array((mean, std), np.float32).tobytes()


def _layout(tensor: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.dtype == torch.uint8 else torch.contiguous_format


@functools.cache
def torch_has_vectors() -> bool:
    """Return whether torch has vector code here to resize uint8: for AVX2. Pillow is faster otherwise."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _by_library(image: torch.Tensor, size: tuple[int, int], by: Filter) -> Put:
    """Resize uint8[1, 3, H, W] without the kernel, in Pillow's order of passes."""
    if not torch_has_vectors():
        return functools.partial(_resize_by_pillow, image, size, by)
    if goes_down_first(Box(0, 0, *image.shape[2:]), size):
        return functools.partial(_resize_down_first, image, size, by)
    return functools.partial(_resize, image, size, by)


def _resize_and_cut(image: torch.Tensor, size: tuple[int, int], part: Box, by: Filter, *, out: Place) -> None:
    top, left, height, width = part
    if max(size) > _PART_FACTOR * max(height, width):
        out.tensor.copy_(_resize_part(image, size, part, by))
        return
    resized = empty(*size)
    _by_library(image, size, by)(out=Place.of(resized))
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
    _TORCH_KERNELS[by](image, size, False, None, None, out=out.tensor)


def _resize_by_pillow(image: torch.Tensor, size: tuple[int, int], by: Filter, *, out: Place) -> None:
    out.tensor.copy_(_pillows(image, size, by))


def _resize_down_first(image: torch.Tensor, size: tuple[int, int], by: Filter, *, out: Place) -> None:
    between = size[0], image.shape[3]
    shorter = _TORCH_KERNELS[by](image, between, False, None, None, out=empty(*between))
    _TORCH_KERNELS[by](shorter, size, False, None, None, out=out.tensor)


def _copied(image: torch.Tensor, *, out: Place) -> None:
    out.tensor.copy_(image)


def _resize_part(image: torch.Tensor, size: tuple[int, int], part: Box, by: Filter) -> torch.Tensor:
    """Compute only a part of the image resized to `size`; for very long images."""
    down, across = image.shape[2] / size[0], image.shape[3] / size[1]
    source = (
        part.left * across,
        part.top * down,
        (part.left + part.width) * across,
        (part.top + part.height) * down,
    )
    return _pillows(image, (part.height, part.width), by, source)


def _pillows(
    image: torch.Tensor,
    size: tuple[int, int],
    by: Filter,
    source: tuple[float, float, float, float] | None = None,
) -> torch.Tensor:
    """Return uint8[1, 3, *size], made by Pillow of the box `source` (left, top, right, bottom)."""
    whole = Image.fromarray(image[0].permute(1, 2, 0).numpy())
    resized = whole.resize(size[::-1], _PILLOWS[by], box=source)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)[None]


def goes_down_first(box: Box, size: tuple[int, int]) -> bool:
    """Return whether Pillow runs the vertical pass first: from 13.0 on, if that saves work."""
    (_, _, height, width), (new_height, new_width) = box, size
    return (
        height > new_height
        and height - new_height > 2 * (width - new_width)
        and new_width != width
        and _pillow_chooses_its_order()
    )


@functools.cache
def _pillow_chooses_its_order() -> bool:
    """Return whether the installed Pillow ever runs the vertical pass first; up to 12 it never does."""
    image = Image.fromarray(
        (np.arange(64 * 16, dtype=np.uint32) * 40503 >> 4).astype(np.uint8).reshape(64, 16)
    )
    bicubic = Image.Resampling.BICUBIC
    rows_first = image.resize((12, 64), bicubic).resize((12, 16), bicubic)
    return image.resize((12, 16), bicubic).tobytes() != rows_first.tobytes()
