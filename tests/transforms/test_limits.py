"""What an image may take to decode: by its pixels, its scans, its run lengths and its segments."""

import io
import itertools
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from streamload.derived.prepare.preparation import Preparation
from streamload.errors import DecodeError, ImageTooLarge
from streamload.transforms import by_pillow, kernel, limits
from streamload.transforms.by_pillow import decode_to_pillow
from streamload.transforms.decode import decode_jpeg_or_image
from streamload.transforms.limits import check_scans
from tests.faults.images import png, progressive_jpeg, run_lengths_bmp, tiled_tiff, webp

SIDE = 120
PIXELS = SIDE * SIDE


def encoded(kind, mode="RGB", **options):
    image = Image.linear_gradient("L").resize((SIDE, SIDE)).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


FILES = {
    "JPEG": encoded("JPEG"),
    "progressive JPEG": encoded("JPEG", progressive=True),
    "JPEG with a long header": encoded("JPEG", icc_profile=b"p" * 70_000),
    "JPEG stored as RGB": encoded("JPEG", keep_rgb=True),
    "PNG": encoded("PNG"),
    "GIF": encoded("GIF", "P"),
    "BMP": encoded("BMP"),
    "PPM": encoded("PPM"),
}


def taken(data, most_pixels):
    """Whether an image is decoded, by any way to decode it."""
    ways = (
        lambda: decode_jpeg_or_image(data, most_pixels=most_pixels),
        lambda: decode_jpeg_or_image(memoryview(data), in_scratch=True, most_pixels=most_pixels),
        lambda: decode_to_pillow(data, most_pixels),
        lambda: Preparation(32, most_pixels=most_pixels).pixels(data),
    )
    found = []
    for way in ways:
        try:
            way()
            found.append(True)
        except ImageTooLarge:
            found.append(False)
    (answer,) = set(found)
    return answer


@pytest.fixture(params=["with the kernel", "without it"], autouse=True)
def _kernel(request, monkeypatch):
    if request.param == "without it":
        monkeypatch.setattr(kernel, "jpeg_size", None)
        monkeypatch.setattr(kernel, "jpeg_passes", None)


@pytest.mark.parametrize("kind", FILES)
def test_an_image_of_so_many_pixels_is_decoded_and_no_larger_one(kind):
    assert taken(FILES[kind], PIXELS)
    assert not taken(FILES[kind], PIXELS - 1)


@pytest.mark.parametrize(
    ("kind", "bytes_a_pixel"),
    [("CMYK", 14), ("WEBP", 19), ("TIFF", 20), ("AVIF", 24), ("JPEG2000", 60), ("ICO", 200)],
)
def test_kinds_that_take_more_memory_or_time_may_have_fewer_pixels(kind, bytes_a_pixel):
    options = {"sizes": [(SIDE, SIDE)]} if kind == "ICO" else {}
    data = encoded("JPEG", "CMYK") if kind == "CMYK" else encoded(kind, **options)
    most_pixels = -(-PIXELS * bytes_a_pixel // 12)
    assert taken(data, most_pixels)
    assert not taken(data, most_pixels - 2)


def test_each_image_of_an_icon_counts_before_one_is_decoded(monkeypatch):
    data = encoded("ICO", sizes=[(16, 16), (SIDE, SIDE)])
    assert data[22:24] == bytes([SIDE, SIDE])
    most_pixels = -(-PIXELS * 200 // 12)
    assert taken(data, most_pixels)
    monkeypatch.setattr(Image, "open", None)  # it decodes one of them
    assert not taken(data, most_pixels - 2)


def test_a_tile_counts_as_an_image():
    assert taken(tiled_tiff(16, 64), 64 * 64 * 20 // 12 + 1)
    assert not taken(tiled_tiff(16, 80), 64 * 64 * 20 // 12 + 1)


def test_the_message_says_how_large_it_may_be_and_how_to_allow_more():
    says = r"120×120.*100 pixels.*Images\(max_pixels=…\).*_MAX_IMAGE_PIXELS"
    with pytest.raises(ImageTooLarge, match=says):
        decode_jpeg_or_image(FILES["JPEG"], most_pixels=100)
    assert issubclass(ImageTooLarge, DecodeError)


def test_an_image_that_is_too_large_stays_as_it_is_in_a_prepared_shard():
    assert Preparation(32, most_pixels=PIXELS).prepare(FILES["PNG"]) is not None
    assert Preparation(32, most_pixels=PIXELS - 1).prepare(FILES["PNG"]) is None
    assert Preparation(32, most_pixels=PIXELS).name != Preparation(32, most_pixels=PIXELS - 1).name


@pytest.mark.parametrize("colours", [1, 3, 4])
def test_as_many_scans_are_decoded_as_their_pixels_allow(colours):
    most_pixels = 2 * PIXELS
    assert taken(progressive_jpeg(SIDE, SIDE, 64, colours), most_pixels)
    assert not taken(progressive_jpeg(SIDE, SIDE, 65, colours), most_pixels)


def test_small_images_may_have_a_few_hundred_scans_and_no_more():
    assert taken(progressive_jpeg(16, 16, 290), 20_000_000)
    many = progressive_jpeg(16, 16, 290)[:-2]
    scan = many[many.rindex(b"\xff\xda") :]
    assert not taken(many + scan * 230 + b"\xff\xd9", 20_000_000)


def test_scans_of_thumbnails_and_behind_the_end_do_not_count():
    data = FILES["progressive JPEG"]
    application = b"\xff\xe1" + struct.pack(">H", 2 + 6000) + b"\xff\xda" * 3000
    data = data[:2] + application + data[2:] + b"\xff\xda" * 3000
    assert taken(data, PIXELS)


def test_arithmetic_coding_counts_for_more_and_markers_without_end_are_too_many():
    frame, scan, end = b"\xff\xc9\0\x02", b"\xff\xda\0\x02" + bytes(20), b"\xff\xd9"
    check_scans(b"\xff\xd8" + frame + scan * 4 + end, 100, 100, 10_000)
    check_scans(b"\xff\xd8" + scan * 32 + end, 100, 100, 10_000)
    for data in (frame + scan * 5, scan * 33, b"\xff\xdd\0\x02" * 70_000 + scan * 33):
        with pytest.raises(ImageTooLarge):
            check_scans(b"\xff\xd8" + data + end, 100, 100, 10_000)


def test_run_lengths_count_for_more():
    assert taken(run_lengths_bmp(SIDE, SIDE), 2 * PIXELS)
    assert not taken(run_lengths_bmp(SIDE, SIDE), 2 * PIXELS - 100)


@pytest.mark.parametrize(
    "flood",
    [
        lambda: FILES["JPEG stored as RGB"][:2] + b"\xff\xe5\0\x02" * 900,
        lambda: FILES["JPEG stored as RGB"][:2] + b"\xff" * 900,
        lambda: FILES["PNG"][:33] + (bytes(4) + b"prVt" + struct.pack(">I", zlib.crc32(b"prVt"))) * 900,
        lambda: b"GIF89a\x08\0\x08\0\0\0\0" + b"\x21\xfe\x01x\0" * 900,
        lambda: run_lengths_bmp(16, 16)[:-64] + b"\x01\x02" * 900,
    ],
    ids=["JPEG's segments", "JPEG's padding", "PNG's chunks", "GIF's blocks", "BMP's runs"],
)
def test_headers_in_more_pieces_than_any_has_are_given_up(flood, monkeypatch):
    data = flood()
    monkeypatch.setattr(limits, "_MOST_READS", 500)
    for way in (decode_jpeg_or_image, decode_to_pillow):
        with pytest.raises(ImageTooLarge, match="more than 500"):
            way(data)


MODES = ["1", "L", "P", "RGB", "RGBA", "LA", "I;16", "CMYK", "YCbCr"]


@pytest.mark.parametrize("mode", MODES)
def test_pixels_are_those_of_pillow_however_many_are_converted_at_once(mode, monkeypatch):
    monkeypatch.setattr(by_pillow, "_STRIP_PIXELS", 700)
    image = Image.effect_noise((63, 41), 90).convert("L" if mode == "I;16" else "RGB").convert(mode)
    kinds = {"CMYK": "JPEG", "YCbCr": "JPEG"}
    options = {"transparency": bytes(range(256))} if mode == "P" else {}
    buffer = io.BytesIO()
    image.save(buffer, kinds.get(mode, "PNG"), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a palette with transparency
        whole = Image.open(buffer).convert("RGB")
    np.testing.assert_array_equal(decode_jpeg_or_image(buffer.getvalue()), np.asarray(whole))
    assert decode_to_pillow(buffer.getvalue()).tobytes() == whole.tobytes()


def test_the_images_that_these_tests_are_made_of_are_sound():
    made = [
        progressive_jpeg(40, 24, 9),
        progressive_jpeg(40, 24, 9, 4),
        webp(40, 24),
        run_lengths_bmp(40, 24),
    ]
    made += [png(40, 24, bits, colour) for bits, colour in itertools.product((8, 16), (0, 2, 4, 6))]
    for data in [*made, png(40, 24, 1, 0)]:
        assert decode_jpeg_or_image(data).shape == (24, 40, 3)
