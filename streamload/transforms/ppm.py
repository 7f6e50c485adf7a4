"""Images as binary PPM, such as prepared ones (step I): raw pixels, read in place; nothing is decoded.

What a function of Pillow images may need besides pixels (EXIF, colour profile) follows them, where no reader
of PPM looks.
"""

from __future__ import annotations

import json
import re

import numpy as np
import numpy.typing as npt

from streamload.errors import DecodeError
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS, check_pixels

Pixels = npt.NDArray[np.uint8]
Info = dict[str, bytes | str]
"""Entries of the `info` of a Pillow image."""

MOST_INFO_BYTES = 1 << 20
PPM_START = b"P6"
"""The beginning of an image with raw pixels, which need no decoding."""
_PPM_HEADER = re.compile(rb"P6\s([0-9]{1,8})\s([0-9]{1,8})\s255\s")
"""Plain binary PPM, 8 bits and no comments, as written by Pillow, OpenCV and netpbm."""
_PPM_HEADER_BYTES = 32
_INFO_MARK = b"\nSTREAMLOAD.info "


def ppm_pixels(
    data: bytes | memoryview, in_place: bool, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
) -> Pixels:
    """Return the pixels of a binary PPM.

    Args:
        data: that begins with PPM_START.
        in_place: return a view if `data` is writable, as torch requires; otherwise a copy.
        most_pixels: allowed.

    Raises:
        DecodeError: not 8 bits, or cut.
        ImageTooLarge: more than `most_pixels`.
    """
    header = _PPM_HEADER.match(bytes(data[:_PPM_HEADER_BYTES]))
    if header is None:
        raise DecodeError(f"a PPM that begins with {bytes(data[:16])!r}; expected P6, width, height and 255")
    width, height = map(int, header.groups())
    check_pixels(height, width, most_pixels, "PPM")
    size = height * width * 3
    if not size or len(data) < header.end() + size:
        raise DecodeError(f"PPM of {width}×{height} with {len(data) - header.end()} bytes of pixels")
    pixels = np.frombuffer(data, np.uint8, size, header.end()).reshape(height, width, 3)
    return pixels if in_place and pixels.flags.writeable else pixels.copy()


def ppm_info(data: bytes | memoryview, pixel_bytes: int) -> Info:
    """Return what follows the pixels of a binary PPM by `to_ppm`; empty if that is anything else."""
    header = _PPM_HEADER.match(bytes(data[:_PPM_HEADER_BYTES]))
    start = (header.end() if header is not None else 0) + pixel_bytes
    if data[start : start + len(_INFO_MARK)] != _INFO_MARK:
        return {}
    try:
        values = json.loads(bytes(data[start + len(_INFO_MARK) :][: 8 * MOST_INFO_BYTES]))
        return {
            str(key): str(value["text"]) if "text" in value else bytes.fromhex(value["bytes"])
            for key, value in values.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def to_ppm(pixels: Pixels, info: Info) -> bytes:
    """Return a binary PPM of uint8[H, W, 3], with info of at most MOST_INFO_BYTES."""
    height, width = pixels.shape[:2]
    values = {
        key: {"text": str(value)} if isinstance(value, str) else {"bytes": value.hex()}
        for key, value in info.items()
    }
    tail = _INFO_MARK + json.dumps(values).encode() if info else b""
    return b"".join((b"P6\n%d %d\n255\n" % (width, height), np.ascontiguousarray(pixels).data, tail))
