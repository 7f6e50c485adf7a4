"""The C code before and after a decoder: headers of JPEGs, sound and damaged; boxes, strides, offsets, parts.

What must hold: a header that is understood says what libjpeg-turbo says, and its JPEG has one scan; scans are
counted as by Python, which doubts no JPEG that is sound by C; resized pixels are Pillow's to the bit; no byte
is touched but of the image and of the result, which code built with sanitizers (sanitized.py) reports.
"""

from __future__ import annotations

import functools
import io
import random
import re
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from streamload.pixels import segments
from streamload.transforms import kernel
from streamload.transforms.limits import count_passes

_LONGEST = 65_536
_STATISTICS = np.array([0.48, 0.46, 0.41, 0.27, 0.26, 0.28], np.float32)
_FAST_COLOURS = ("YCbCr", "Gray")
_SEGMENT = re.compile(rb"\xff[\xc0-\xfe]")
_MARKERS = (0x01, *range(0xC0, 0x100))
_FILTERS = (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR)


class Jpeg(NamedTuple):
    """A JPEG, or what was one."""

    data: bytes


class Resize(NamedTuple):
    """An image, a box of it, the size that the box is made, and the part of that which is wanted.

    Attributes:
        noise: seeds the levels; None: all are one.
        image: height and width.
        gap: bytes between its rows.
        box, part: top, left, height, width.
        size: height and width.
    """

    noise: int | None
    image: tuple[int, int]
    gap: int
    box: tuple[int, int, int, int]
    size: tuple[int, int]
    part: tuple[int, int, int, int]
    is_bilinear: bool
    is_columns_first: bool
    is_normalised: bool


class Refused(NamedTuple):
    """Numbers for a resize that have to be refused before any memory is touched."""

    numbers: tuple[int, ...]


class RandomBox(NamedTuple):
    """What the random box of an image is drawn by."""

    arguments: tuple[Any, ...]


Case = Jpeg | Resize | Refused | RandomBox


def make(rng: random.Random) -> Case:
    """Half of the cases are JPEGs, nearly all others boxes."""
    draw = rng.random()
    if draw < 0.5:
        return Jpeg(_damaged(rng))
    if draw < 0.95:
        return _resize(rng)
    if draw < 0.97:
        return _refused(rng)
    shares = sorted(rng.choice((0.01, 0.08, 0.5, 0.9, 1.0)) for _ in range(2))
    ratio = rng.choice((0.1, 0.5, 0.75, 1.0))
    sides = (rng.choice((1, 2, 17, 500, 65_500)) for _ in range(2))
    spans = shares[1] - shares[0], float(np.log(ratio)), float(-2 * np.log(ratio))
    return RandomBox((rng.getrandbits(32), *sides, shares[0], *spans))


def check(case: Case, rng: random.Random) -> str:
    """Raise where a property doesn't hold; else how it ended."""
    if kernel.jpeg_size is None or kernel.jpeg_passes is None or kernel.random_box is None:
        return "not built"
    if isinstance(case, Jpeg):
        return _check_jpeg(case.data, kernel.jpeg_size, kernel.jpeg_passes)
    if isinstance(case, RandomBox):
        return _check_box(kernel.random_box, *case.arguments)
    if kernel.resize_into is None:
        return "not built for this processor"
    if isinstance(case, Refused):
        try:
            kernel.resize_into(*case.numbers, None)
        except (ValueError, OverflowError):
            return "refused"
        raise AssertionError("it wasn't refused")
    return _check_resize(case, kernel.resize_into)


# ---- JPEGs ----


@functools.cache
def _wholes() -> list[bytes]:
    """JPEGs of all kinds that are written."""
    rng = np.random.default_rng(0)
    levels = rng.integers(0, 256, (24, 33, 3), np.uint8)
    options: list[dict[str, Any]] = [
        {}, {"progressive": True}, {"comment": b"x" * 40}, {"exif": b"Exif\0\0" + bytes(60)},
        {"quality": 100},
        {"icc_profile": bytes(3000)}, {"restart_marker_rows": 1}, {"optimize": True}, {"keep_rgb": True},
        {"subsampling": 0}, {"subsampling": 2, "progressive": True}, {"dpi": (300, 300)},
    ]  # fmt: skip
    found = []
    for mode in ("RGB", "L", "CMYK"):
        for chosen in options[: 12 if mode == "RGB" else 3]:
            buffer = io.BytesIO()
            Image.fromarray(levels).convert(mode).save(buffer, "JPEG", **chosen)
            found.append(buffer.getvalue())
    return [*found, simplejpeg.encode_jpeg(levels, 90, "RGB", "411")]


def _damaged(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(_wholes()))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        at = _place(data, rng)
        draw = rng.random()
        if draw < 0.35:
            data[at : at + 1] = bytes((rng.choice((0, 1, 2, 8, 0xC0, 0xD8, 0xFE, 0xFF, rng.randrange(256))),))
        elif draw < 0.5:
            del data[at : at + rng.choice((1, 2, 3, 17))]
        elif draw < 0.7:
            payload = rng.randbytes(rng.choice((0, 0, 1, 6, 12, 40)))
            stated = rng.choice((2 + len(payload), 2 + len(payload), 0, 1, 65_535, rng.randrange(65_536)))
            data[at:at] = bytes((0xFF, rng.choice(_MARKERS))) + struct.pack(">H", stated) + payload
        elif draw < 0.85:
            start = _place(data, rng)
            data[at:at] = data[start : start + rng.choice((4, 20, 100))]
        else:
            del data[at:]
    return bytes(data)


def _place(data: bytearray, rng: random.Random) -> int:
    """Where something is changed: mostly in the first bytes of a segment."""
    if rng.random() < 0.2:
        return rng.randrange(len(data) + 1)
    markers = [found.start() for found in _SEGMENT.finditer(data, 0, 700)]
    return min(len(data), rng.choice(markers or [0]) + rng.randrange(18))


def _check_jpeg(data: bytes, jpeg_size: Any, jpeg_passes: Any) -> str:
    passes = jpeg_passes(data)
    assert passes == count_passes(data), f"{passes} passes, by Python {count_passes(data)}"
    is_doubted = data[:2] == b"\xff\xd8" and segments._Jpeg(data).doubt() is not None
    assert not (is_doubted and segments._is_plainly_sound(data)), "sound, but not by Python"
    size = jpeg_size(data)
    if size is None:
        return "left to libjpeg-turbo"
    try:
        height, width, colour, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        height, width, colour = None, None, ""
    decoded = _decoded(data)
    if colour:
        assert size == (height, width), f"{size} and not {(height, width)}"
        assert colour in _FAST_COLOURS, colour
    else:
        assert decoded is None, "libjpeg-turbo decodes what it has no size of"
    if decoded is not None:
        assert decoded == size
        assert passes <= 1, f"{passes} scans"
    return "decoded" if decoded is not None else "understood, but can't be decoded"


def _decoded(data: bytes) -> tuple[int, ...] | None:
    """Height and width of a JPEG by what is decoded of it, where that is little."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        return simplejpeg.decode_jpeg(data, "RGB").shape[:2] if height * width < 1 << 20 else None
    except ValueError:
        return None


# ---- Boxes ----


def _side(rng: random.Random, most: int = 90) -> int:
    return rng.choice((1, 2, 3, 5, 8, 9, rng.randint(1, most), rng.randint(1, most), rng.randint(1, most)))


def _resize(rng: random.Random) -> Resize:
    draw = rng.random()
    if draw < 0.03:  # long ones, thin ones
        image = rng.choice(((1, _LONGEST), (_LONGEST, 1), (3, 9000), (4000, 2)))
    else:
        image = _side(rng), _side(rng, 200)
    height, width = rng.randint(1, image[0]), rng.randint(1, image[1])
    if rng.random() < 0.5:
        height, width = image
    box = rng.randint(0, image[0] - height), rng.randint(0, image[1] - width), height, width
    size = _side(rng), _side(rng)
    if rng.random() < 0.1:
        size = (height, size[1]) if rng.random() < 0.5 else (size[0], width)
        size = min(size[0], 3000), min(size[1], 3000)
    down, across = size if rng.random() < 0.5 else (rng.randint(1, size[0]), rng.randint(1, size[1]))
    part = rng.randint(0, size[0] - down), rng.randint(0, size[1] - across), down, across
    flags = [rng.random() < 0.5 for _ in range(3)]
    gap = rng.choice((0, 0, 1, 2, 3, 13, 64))
    return Resize(rng.getrandbits(32), image, gap, box, size, part, *flags)


def _refused(rng: random.Random) -> Refused:
    """Right numbers but for one that can't be."""
    numbers = [1, 30, 4, 10, 0, 0, 6, 7, 1, 0, 0, 6, 7]
    height, width, new_height, new_width, top, left, down, across = 2, 3, 6, 7, 9, 10, 11, 12
    place, wrong = rng.choice(
        [(side, value) for side in (height, width, down, across) for value in (0, _LONGEST + 1, 1 << 63)]
        + [(side, value) for side in (new_height, new_width) for value in (0, 5, 1 << 31, 1 << 62)]
        + [(side, value) for side in (top, left) for value in (1, 8, (1 << 64) - 1, (1 << 64) - 6)]
        + [(rng.randrange(13), -1)]
    )  # fmt: skip
    numbers[place] = wrong
    return Refused(tuple(numbers))


def _check_resize(case: Resize, resize_into: Any) -> str:
    levels = _levels(case)
    top, left, height, width = case.box
    expected = _by_pillow(case, levels[top : top + height, left : left + width])
    row_bytes = 3 * case.image[1] + case.gap
    start = levels.__array_interface__["data"][0] + top * row_bytes + 3 * left
    _, _, down, across = case.part
    made: npt.NDArray[Any]
    if case.is_normalised:
        made = np.full((3, down, across), np.nan, np.float32)
        means, deviations = _STATISTICS[:3, None, None], _STATISTICS[3:, None, None]
        expected = (expected.transpose(2, 0, 1) / np.float32(255) - means) / deviations
    else:
        made = np.full((down, across, 3), 77, np.uint8)
    resize_into(
        *(start, row_bytes, height, width, case.is_bilinear, case.is_columns_first, *case.size),
        *(made.__array_interface__["data"][0], *case.part),
        _STATISTICS.tobytes() if case.is_normalised else None,
    )
    wrong = int((made != expected).sum())
    assert not wrong, f"{wrong} of {made.size} values differ from Pillow's"
    return "normalised" if case.is_normalised else "resized"


def _levels(case: Resize) -> npt.NDArray[np.uint8]:
    """The image, in memory that ends with its last pixel."""
    height, width = case.image
    row_bytes = 3 * width + case.gap
    memory = np.empty(row_bytes * (height - 1) + 3 * width, np.uint8)
    memory[:] = np.random.default_rng(case.noise).integers(0, 256, len(memory), np.uint8)
    return np.lib.stride_tricks.as_strided(memory, (height, width, 3), (row_bytes, 3, 1))


def _by_pillow(case: Resize, box: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """One pass after the other, as Pillow makes them in either order."""
    image, by = Image.fromarray(np.ascontiguousarray(box)), _FILTERS[case.is_bilinear]
    height, width = case.size
    between = (image.width, height) if case.is_columns_first else (width, image.height)
    resized = np.asarray(image.resize(between, by).resize((width, height), by))
    top, left, down, across = case.part
    return resized[top : top + down, left : left + across]


def _check_box(random_box: Any, *arguments: Any) -> str:
    found = random_box(*arguments)
    box, taken = found or ((), 4)  # None: it is left to Python
    assert 4 <= taken <= 22, taken
    if box:
        top, left, height, width = box
        assert 0 <= top <= arguments[1] - height, found
        assert 0 <= left <= arguments[2] - width, found
        assert min(height, width) >= 1, found
    return "a box"
