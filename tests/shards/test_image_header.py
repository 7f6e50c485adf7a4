"""Image sizes from headers, against Pillow."""

import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from streamload.shards.samples import HEADER_BYTES, image_size

SIZES = [(1, 1), (3, 257), (640, 480), (4097, 2)]


def encoded(size, image_format, **options):
    out = io.BytesIO()
    mode = options.pop("mode", "RGB")
    Image.new(mode, size, 7).save(out, image_format, **options)
    return out.getvalue()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("image_format", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"mode": "CMYK"}),
        ("JPEG", {"icc_profile": bytes(50_000), "comment": b"c" * 3000}),
        ("PNG", {}),
        ("PNG", {"mode": "LA"}),
        ("PNG", {"mode": "I;16"}),
        ("GIF", {"mode": "P"}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"lossless": True, "mode": "RGBA"}),
        ("WEBP", {"exif": b"Exif\0\0" + bytes(40)}),
    ],
)
def test_sizes_are_those_that_pillow_gives(size, image_format, options):
    data = encoded(size, image_format, **options)
    assert image_size(data) == Image.open(io.BytesIO(data)).size == size
    assert image_size(memoryview(data)) == size


def test_exif_rotation_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert image_size(encoded((40, 20), "JPEG", exif=exif)) == (40, 20)


@pytest.mark.parametrize("fill", [1, 2, 5])
def test_a_marker_may_follow_fill_bytes(fill):
    data = encoded((40, 20), "JPEG")
    place = data.index(b"\xff\xc0")
    filled = data[:place] + b"\xff" * fill + data[place:]
    assert image_size(filled) == Image.open(io.BytesIO(filled)).size == (40, 20)


def test_a_size_behind_64_kb_is_unknown():
    data = encoded((40, 20), "JPEG", icc_profile=bytes(200_000))
    assert data.index(b"\xff\xc0") > HEADER_BYTES
    assert image_size(data) is None


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "GIF", "WEBP"])
def test_a_cut_header_gives_the_size_or_none_and_never_another(image_format):
    data = encoded((321, 123), image_format)
    found = [image_size(data[:length]) for length in range(len(data) + 1)]
    assert found == sorted(found, key=bool)
    assert set(found) == {None, (321, 123)}


@given(st.binary(max_size=200))
def test_garbage_has_no_size(tail):
    image_size(tail)
    image_size(b"\xff\xd8" + tail)
    image_size(b"RIFF\0\0\0\0WEBP" + tail)
    assert image_size(b"BM" + tail) is None


def test_damaged_headers_give_a_size_or_none():
    rng = random.Random(3)
    for image_format in ("JPEG", "PNG", "GIF", "WEBP"):
        data = bytearray(encoded((30, 20), image_format)[:700])
        for _ in range(300):
            damaged = bytearray(data)
            damaged[rng.randrange(len(data))] = rng.randrange(256)
            size = image_size(bytes(damaged))
            assert size is None or (size[0] > 0 and size[1] > 0)
