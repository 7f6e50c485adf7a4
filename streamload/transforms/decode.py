"""Image bytes → RGB pixels (step I), identical to Pillow's `convert("RGB")`; no rotation or scaling.

libjpeg-turbo decodes valid 8-bit JPEGs with the GIL released. Pillow decodes everything else (by_pillow.py),
including JPEGs that cause decoder warnings, so Pillow decides what is accepted. Raw pixels (ppm.py) need no
decoding.
"""

from __future__ import annotations

import threading

import numpy as np
import simplejpeg
import torch

from streamload.transforms import kernel
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS, JPEG_START, check_pixels, check_scans
from streamload.transforms.ppm import PPM_START, ppm_pixels
from streamload.transforms.ppm import Pixels as Pixels

_SCRATCH_BYTES = 16 << 20
_HEADER_BYTES = 4096
"""Enough for most JPEG headers; for a longer one the whole file is searched."""
_FAST_COLOURS = frozenset(("YCbCr", "Gray"))


class _Scratch(threading.local):
    """Reused memory for one image at a time: fresh pages for each would cost a sixth of the decoding."""

    def __init__(self) -> None:
        # Allocated once, so that addresses are stable; untouched pages take no memory.
        self._memory = np.empty(_SCRATCH_BYTES, np.uint8)
        self.tensor = torch.from_numpy(self._memory)
        self.address: int = self._memory.__array_interface__["data"][0]
        self.place: Pixels | None = None
        """The latest one; each begins at the start of the memory."""

    def of(self, height: int, width: int) -> Pixels | None:
        """Return where an image of this size is decoded to, by `decode_there`.

        Returns:
            uint8[height, width, 3], writable, undefined until decoded; None if the image is too large.
        """
        size = height * width * 3
        fits = size <= _SCRATCH_BYTES
        self.place = self._memory[:size].reshape(height, width, 3) if fits else None
        return self.place


_scratch = _Scratch()
place_in_scratch = _scratch.of


def jpeg_size(
    data: bytes | memoryview, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
) -> tuple[int, int] | None:
    """Return height and width of a JPEG by its header; None if libjpeg-turbo can't decode it.

    Raises:
        ImageTooLarge: it has more pixels than `most_pixels`, or too many scans for its pixels.
    """
    # The kernel handles only JPEGs with one scan, so there are no scans to count.
    size = None if kernel.jpeg_size is None else kernel.jpeg_size(bytes(data[:_HEADER_BYTES]))
    if size is None:
        if data[:3] != JPEG_START:
            return None
        whole = bytes(data)
        size = None if kernel.jpeg_size is None else kernel.jpeg_size(whole)
        if size is None:
            return _unusual_jpeg_size(whole, most_pixels)
    if size[0] * size[1] > most_pixels:
        check_pixels(*size, most_pixels, "JPEG")
    return size


def _unusual_jpeg_size(jpeg: bytes, most_pixels: int) -> tuple[int, int] | None:
    try:
        height, width, colour, _ = simplejpeg.decode_jpeg_header(jpeg)
    except ValueError:
        return None
    check_pixels(height, width, most_pixels, "JPEG")
    check_scans(jpeg, height, width, most_pixels)
    return (height, width) if colour in _FAST_COLOURS else None


def decode_jpeg_or_image(
    data: bytes | memoryview, *, in_scratch: bool = False, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
) -> Pixels:
    """Decode an image.

    Args:
        data: a whole file of one of FORMATS, or binary PPM.
        in_scratch: the pixels are only needed until this thread decodes another image.
        most_pixels: allowed; the other limits (limits.py) follow from it.

    Returns:
        uint8[H, W, 3], contiguous and writable. Of an animation, the first frame.

    Raises:
        DecodeError: cut, corrupt, or another format.
        ImageTooLarge: decoding it would take too much memory or time, by its header.
    """
    if data[:2] == PPM_START:
        return ppm_pixels(data, in_scratch, most_pixels)
    size = jpeg_size(data, most_pixels)
    if size is None:
        from streamload.transforms.by_pillow import pixels_of

        return pixels_of(data, most_pixels)
    return decode_there(data, place_in_scratch(*size) if in_scratch else None, most_pixels)


def memory_of(pixels: Pixels) -> torch.Tensor:
    """Return a tensor whose storage begins with these pixels; cached for the latest place in scratch."""
    return _scratch.tensor if pixels is _scratch.place else torch.from_numpy(pixels)


def address_of(pixels: Pixels) -> int:
    """Return the address of these pixels; cached for the latest place in scratch."""
    if pixels is _scratch.place:
        return _scratch.address
    address: int = pixels.__array_interface__["data"][0]
    return address


def decode_there(
    data: bytes | memoryview, place: Pixels | None, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
) -> Pixels:
    """Decode a JPEG into `place`, the result of `place_in_scratch` for its size.

    Returns:
        `place`; new memory if that is None, or if Pillow finds another size.

    Raises:
        DecodeError: as for `decode_jpeg_or_image`.
    """
    try:
        there: Pixels = simplejpeg.decode_jpeg(data, "RGB", buffer=place)
    except ValueError:  # also raised for warnings of libjpeg, as strict is the default
        from streamload.transforms.by_pillow import pixels_of

        return pixels_of(data, most_pixels, place)
    return there if place is None else place
