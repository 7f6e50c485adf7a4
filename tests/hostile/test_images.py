"""Images made to harm, and odd ones that are sound: skipped with a count, or the pixels of Pillow."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.faults import images
from tests.fuzzing.blocks import END
from tests.support.hostile import among_good_ones, picture, sample


def size_of(image: Image.Image) -> tuple[int, int]:
    return image.size


BEFORE, AFTER = sample("before"), sample("after") + END


def chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png(width: int, height: int, data: bytes, *more: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def jpeg_of_size(width: int, height: int) -> bytes:
    data = bytearray(picture())
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def gif(screen: tuple[int, int], frame: tuple[int, int]) -> bytes:
    """With a transparent frame that is to be disposed of, which Pillow makes room for when it is opened."""
    head = b"GIF89a" + struct.pack("<HH", *screen) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    control = b"\x21\xf9\x04\x09\0\0\0\0"
    image = b"\x2c" + struct.pack("<HHHH", 0, 0, *frame) + b"\0"
    return head + control + image + b"\x02\x02\x44\x01\0\x3b"


def webp_canvas(width: int, height: int) -> bytes:
    """An extended WebP whose canvas is far larger than its only frame."""
    inner = picture("WEBP")[12:]
    extended = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (width - 1).to_bytes(3, "little")
    body = b"WEBP" + extended + (height - 1).to_bytes(3, "little") + inner
    return b"RIFF" + struct.pack("<I", len(body)) + body


def tiff(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "TIFF")
    data = bytearray(buffer.getvalue())
    for tag, value in ((256, width), (257, height)):
        place = data.index(struct.pack("<H", tag))
        data[place : place + 12] = struct.pack("<HHII", tag, 4, 1, value)
    return bytes(data)


def bmp(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def icon(image: bytes) -> bytes:
    """An ICO file that says 16 × 16 of the image inside."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(image), 22) + image


BOMBS = {
    "a PNG of 169 megapixels": png(13_000, 13_000, zlib.compress(bytes(64))),
    "a PNG of 2^62 pixels": png((1 << 31) - 1, (1 << 31) - 1, zlib.compress(bytes(64))),
    "a PNG with a text that unpacks to 32 MiB": png(
        8, 8, zlib.compress(bytes(200)), chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(32 << 20), 1))
    ),
    "a PNG with a profile that unpacks to 32 MiB": png(
        8, 8, zlib.compress(bytes(64)), chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(32 << 20), 1))
    ),
    "a JPEG whose frame is 65,500 wide and high": jpeg_of_size(65_500, 65_500),
    "a JPEG whose frame has 169 megapixels": jpeg_of_size(13_000, 13_000),
    "a GIF whose screen is 65,535 wide and high": gif((65_535, 65_535), (65_535, 65_535)),
    "a GIF whose frame is larger than its screen": gif((1, 1), (13_000, 13_000)),
    "a WebP whose canvas is 2^24 wide": webp_canvas(1 << 24, 200),
    "a WebP whose canvas has 169 megapixels": webp_canvas(13_000, 13_000),
    "a TIFF of 2^62 pixels": tiff((1 << 31) - 1, (1 << 31) - 1),
    "a BMP of 169 megapixels": bmp(13_000, 13_000),
    "an icon with a PNG of 169 megapixels": icon(png(13_000, 13_000, zlib.compress(bytes(64)))),
    "an icon with a BMP of 169 megapixels": icon(bmp(13_000, 13_000)[14:]),
    "a JPEG cut in the middle": picture(size=(640, 480))[:2500],
    "a JPEG of its start alone": picture()[:20],
    "a PNG cut in the middle": picture("PNG", (640, 480))[:1000],
    "no bytes": b"",
    "text": b"<html>not an image</html>",
    "a postscript, which others run": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nsystemdict\n",
}


TOO_LARGE = {
    "a PNG of 169 megapixels",
    "a PNG of 2^62 pixels",
    "a JPEG whose frame is 65,500 wide and high",
    "a JPEG whose frame has 169 megapixels",
    "a GIF whose screen is 65,535 wide and high",
    "a GIF whose frame is larger than its screen",
    "a WebP whose canvas is 2^24 wide",  # by Pillow 12 it can't be decoded
    "a TIFF of 2^62 pixels",
    "a BMP of 169 megapixels",
    "an icon with a PNG of 169 megapixels",
    "an icon with a BMP of 169 megapixels",
}


@pytest.mark.parametrize("case", BOMBS)
def test_an_image_that_cannot_be_decoded_is_skipped_and_counted(case: str, tmp_path: Path) -> None:
    found = among_good_ones(tmp_path, BEFORE + sample("bad", BOMBS[case]) + AFTER)
    assert (found.keys, found.error) == (["before", "after"], ""), found.log
    (cause,) = found.skipped
    assert found.skipped == {cause: 1}
    assert cause == "decode" or case in TOO_LARGE, found.log
    assert cause == "too_large" or case not in TOO_LARGE or "WebP" in case, found.log
    assert "sample bad of" in found.log


def test_images_that_would_take_too_much_to_decode_are_skipped_and_counted(tmp_path: Path) -> None:
    """All of them within the memory and the time that one may take."""
    bad = b"".join(sample(name, make()) for name, make in images.BOMBS.items())
    found = among_good_ones(tmp_path, BEFORE + bad + AFTER)
    assert found.keys == ["before", "after"]
    assert (found.skipped, found.error) == ({"too_large": len(images.BOMBS)}, ""), found.log


@pytest.mark.parametrize(
    ("case", "options"),
    [*((case, {}) for case in images.LARGE), ("a PNG of 16 bits and alpha", {"preprocess": size_of})],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "compiled",
)
def test_the_largest_images_that_are_used_take_little(
    case: str, options: dict[str, Any], tmp_path: Path
) -> None:
    found = among_good_ones(tmp_path, BEFORE + sample("large", images.LARGE[case]()) + AFTER, **options)
    assert (found.keys, found.skipped, found.error) == (["before", "large", "after"], {}, ""), found.log


def with_orientation() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return picture(exif=exif)


def animated(kind: str) -> bytes:
    frames = [Image.linear_gradient("L").resize((24, 16)).rotate(turn) for turn in (0, 90, 180)]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], duration=50)
    return buffer.getvalue()


def sixteen_bits() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(24 * 16, dtype=np.uint16).reshape(16, 24) * 170).save(buffer, "PNG")
    return buffer.getvalue()


SOUND = {
    "CMYK": picture(mode="CMYK"),
    "grey": picture(mode="L"),
    "16 bits": sixteen_bits(),
    "alpha": picture("PNG", mode="RGBA"),
    "grey and alpha": picture("PNG", mode="LA"),
    "palette": picture("PNG", mode="P"),
    "palette with transparency": picture("PNG", mode="P", transparency=bytes(range(256))),
    "one bit": picture("PNG", mode="1"),
    "rotated by EXIF": with_orientation(),
    "animated GIF": animated("GIF"),
    "animated WebP": animated("WEBP"),
    "animated PNG": animated("PNG"),
    "1×1": picture(size=(1, 1)),
    "1×1 PNG": picture("PNG", (1, 1)),
    "a line": picture("PNG", (1, 3000)),
    "progressive": picture(progressive=True),
    "a GIF named jpg": picture("GIF", mode="P"),
    "bytes behind the end": picture() + bytes(5000),
}


def as_stored(image: Image.Image) -> tuple[Any, ...]:
    return image.mode, image.size, image.tobytes()


def test_odd_images_that_are_sound_have_the_pixels_that_pillow_gives(tmp_path: Path) -> None:
    """Nothing is rotated and nothing composed: as open_clip's `Image.open(…).convert("RGB")`."""
    middle = b"".join(sample(name, image) for name, image in SOUND.items())
    found = among_good_ones(tmp_path, BEFORE + middle + AFTER, preprocess=as_stored)
    assert (found.keys, found.skipped) == (["before", *SOUND, "after"], {})
    for name, image in zip(found.keys[1:-1], found.images[1:-1], strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert image == as_stored(Image.open(io.BytesIO(SOUND[name])).convert("RGB")), name


def test_odd_images_that_are_sound_come_through_the_default_transform(tmp_path: Path) -> None:
    middle = b"".join(sample(name, image) for name, image in SOUND.items())
    found = among_good_ones(tmp_path, BEFORE + middle + AFTER)
    assert (found.keys, found.skipped) == (["before", *SOUND, "after"], {})
