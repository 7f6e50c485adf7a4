"""Limits for decoding an image (step I), checked by its header before memory or time is spent.

All limits follow from one number, `most_pixels`. With its default no image takes more than 220 MiB besides
its file, nor more than a second or two. Refused images are counted as `too_large`.
"""

from __future__ import annotations

import io
import re

from streamload.errors import ImageTooLarge
from streamload.options import DEFAULT_MAX_IMAGE_PIXELS as DEFAULT_MAX_IMAGE_PIXELS
from streamload.transforms import kernel

_BYTES_A_PIXEL = 12
"""Memory allowed for each of `most_pixels`. A progressive JPEG takes 10: 6 for coefficients, 4 for Pillow's
pixels. Other formats take less, except for these:"""
JPEG_START = b"\xff\xd8\xff"
_MORE_BYTES_A_PIXEL = {"CMYK": 14, "WEBP": 19, "TIFF": 20, "AVIF": 24, "JPEG2000": 60, "ICO": 200}
"""A progressive JPEG with four colours takes 8 + 4, and some for its rows. Pillow reads every WebP by the
animation decoder of libwebp, with two canvases, and copies one of them twice. libtiff buffers a strip or
tile, perhaps a whole 16-bit image. AVIF takes 10 to 20 and JPEG 2000 25; their limits are for time. Pillow
copies an icon several times."""
_PASSES = 32
"""Passes over `most_pixels` that a decoder may make: a progressive JPEG makes one per scan, and encoders
write 6 to 12 scans."""
_SMALLEST_SHARE = 16
"""An image counts as at least 1/16 of `most_pixels`, because even a scan without pixels takes time."""
_ARITHMETIC_PASSES = 8
_RUN_LENGTH_PASSES = 64
"""Arithmetic coding, and BMP's run lengths, which Pillow decodes in Python, count as this many passes."""
_MOST_READS = 1 << 18
_MOST_MARKERS = 1 << 16

_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
_SCAN, _END = 0xDA, 0xD9
_ARITHMETIC_FRAMES = (0xC9, 0xCA)


def check_pixels(height: int, width: int, most_pixels: int, kind: str = "") -> None:
    """Refuse an image that is too large.

    Args:
        height: in pixels, by its header.
        width: in pixels, by its header.
        most_pixels: that an image may have.
        kind: Pillow's name of its format, or "CMYK" for a JPEG with four colours.

    Raises:
        ImageTooLarge: it has more pixels, or needs more memory than `most_pixels` allow.
    """
    bytes_a_pixel = max(_BYTES_A_PIXEL, _MORE_BYTES_A_PIXEL.get(kind, 0))
    most = most_pixels * _BYTES_A_PIXEL // bytes_a_pixel
    if height * width > most:
        raise ImageTooLarge(
            f"{kind} image of {width}×{height} by its header; at most {most:,} pixels are decoded: "
            f"Images(max_pixels=…) or STREAMLOAD_MAX_IMAGE_PIXELS allows more".lstrip()
        )


def check_passes(height: int, width: int, most_pixels: int, passes: int) -> None:
    """Refuse an image that takes too many passes over its pixels.

    Raises:
        ImageTooLarge: passes × pixels are too many.
    """
    if passes * max(height * width, most_pixels // _SMALLEST_SHARE) > _PASSES * most_pixels:
        raise ImageTooLarge(
            f"image of {width}×{height} that takes as long as {passes:,} passes over its pixels; at most "
            f"{_PASSES} over {most_pixels:,} pixels are allowed: Images(max_pixels=…) or "
            f"STREAMLOAD_MAX_IMAGE_PIXELS allows more"
        )


def check_scans(jpeg: bytes, height: int, width: int, most_pixels: int) -> None:
    """Refuse a JPEG with too many scans for its size.

    Raises:
        ImageTooLarge: scans × pixels are too many, or there are more markers than in any real JPEG.
    """
    passes = (kernel.jpeg_passes or count_passes)(jpeg)
    check_passes(height, width, most_pixels, passes if passes >= 0 else _MOST_MARKERS)


def count_passes(jpeg: bytes) -> int:
    """Count a JPEG's scans like _before.c, arithmetic ones as eight; -1: more markers than any real JPEG."""
    passes = offset = 0
    of_scan = 1
    for _ in range(_MOST_MARKERS):
        segment = _MARKER.search(jpeg, offset)
        if segment is None or segment[1][0] == _END:
            return passes
        marker, offset = segment[1][0], segment.end()
        if marker == _SCAN:
            passes += of_scan
        elif marker in _ARITHMETIC_FRAMES:
            of_scan = _ARITHMETIC_PASSES
        if marker >= 0xC0 and marker != 0xD8:
            offset += max(2, int.from_bytes(jpeg[offset : offset + 2], "big"))
    return -1


def check_run_lengths(height: int, width: int, most_pixels: int) -> None:
    """Refuse a run-length encoded BMP that is too large for Pillow's decoder in Python.

    Raises:
        ImageTooLarge: it is too large.
    """
    check_passes(height, width, most_pixels, _RUN_LENGTH_PASSES)


class MeteredFile(io.BytesIO):
    """A file in memory with a limit for the number of reads: Pillow reads headers a few bytes at a time."""

    def __init__(self, data: bytes | memoryview):
        super().__init__(data)
        self._reads_left = _MOST_READS

    def read(self, size: int | None = -1, /) -> bytes:
        """Read like any file.

        Raises:
            ImageTooLarge: too many reads.
        """
        self._reads_left -= 1
        if self._reads_left < 0:
            raise ImageTooLarge(f"image of more than {_MOST_READS:,} segments, blocks or chunks")
        return super().read(size)
