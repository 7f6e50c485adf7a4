"""Prepared images: what is stored and what a training makes by itself have the same pixels."""

import io
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageOps

from streamload.cache.selection import MEMBER_LIMIT_BYTES
from streamload.derived.prepare import preparation
from streamload.derived.prepare.preparation import Preparation
from streamload.errors import DecodeError, OptionError
from streamload.transforms.by_pillow import decode_to_pillow
from streamload.transforms.decode import decode_jpeg_or_image
from tests.support.photographs import whole_photograph

RECIPES = ["raw-64", "jpeg-64-q90"]


def photograph(width, height, mode="RGB"):
    image = Image.fromarray(whole_photograph()).resize((width, height), Image.Resampling.BICUBIC)
    return image.convert(mode)


def encoded(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


IMAGES = {
    "wide": encoded(photograph(200, 150)),
    "tall": encoded(photograph(130, 333)),
    "square": encoded(photograph(128, 128)),
    "one pixel too many": encoded(photograph(65, 65)),
    "of the size": encoded(photograph(64, 90)),
    "smaller": encoded(photograph(40, 30)),
    "1×1": encoded(photograph(1, 1)),
    "a strip": encoded(photograph(3, 900)),
    "a long strip": encoded(photograph(66, 2000)),
    "grey": encoded(photograph(200, 150, "L")),
    "CMYK": encoded(photograph(200, 150, "CMYK")),
    "progressive": encoded(photograph(200, 150), progressive=True),
    "PNG with alpha": encoded(photograph(200, 150, "RGBA"), "PNG"),
    "small PNG": encoded(photograph(20, 15), "PNG"),
    "WebP": encoded(photograph(200, 150), "WEBP"),
    "PPM": encoded(photograph(200, 150), "PPM"),
}


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><r tiff:Orientation="8"/></x:xmpmeta>'
WITH_INFO = {
    "EXIF": encoded(photograph(200, 150), exif=turned(6)),
    "EXIF in a PNG": encoded(photograph(200, 150), "PNG", exif=turned(3)),
    "EXIF in a WebP": encoded(photograph(200, 150), "WEBP", exif=turned(8)),
    "XMP": encoded(photograph(200, 150), xmp=XMP),
    "a colour profile": encoded(photograph(200, 150), icc_profile=bytes(range(256)) * 800),
    "all of it": encoded(photograph(64, 90, "L"), exif=turned(5), icc_profile=b"profile", xmp=XMP),
}
MORE = {
    "a palette": encoded(photograph(90, 70).quantize(30), "PNG"),
    "a palette with transparency": encoded(photograph(90, 70).quantize(30), "PNG", transparency=3),
    "grey with alpha": encoded(photograph(90, 70, "LA"), "PNG"),
    "16 bits": encoded(Image.fromarray(np.arange(60 * 50, dtype=np.uint16).reshape(50, 60) * 21), "PNG"),
    "one bit": encoded(photograph(90, 70, "1"), "PNG"),
    "GIF": encoded(photograph(90, 70).quantize(200), "GIF"),
    "4:4:4": encoded(photograph(91, 71), subsampling=0, quality=98),
    "one row": encoded(photograph(300, 1)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("data", IMAGES.values(), ids=IMAGES)
def test_a_prepared_image_has_the_pixels_that_a_training_makes_itself(data, recipe):
    preparation = Preparation.parse(recipe)
    own = preparation.pixels(data).copy()
    made = preparation.prepare(memoryview(data))
    np.testing.assert_array_equal(decode_jpeg_or_image(made or data), own)
    assert min(own.shape[:2]) == min(64, *Image.open(io.BytesIO(data)).size)
    assert own.flags.c_contiguous
    assert own.flags.writeable


@pytest.mark.parametrize("data", IMAGES.values(), ids=IMAGES)
def test_the_short_side_is_resized_as_by_pillow(data):
    image = Image.open(io.BytesIO(data)).convert("RGB")
    if min(image.size) > 64:
        factor = 64 / min(image.size)
        image = image.resize(
            tuple(int(side * factor + 1e-9) for side in image.size), Image.Resampling.BICUBIC
        )
    own = Preparation(64).pixels(data)
    assert own.shape == (image.height, image.width, 3)
    off = np.abs(own.astype(int) - np.asarray(image))
    assert off.max() <= 2
    assert (off > 1).sum() <= 1  # one value in a million is two levels off (docs/guides/transforms.md)


@pytest.mark.parametrize("data", (all_ := IMAGES | WITH_INFO | MORE).values(), ids=all_)
def test_raw_images_are_the_original_ones_to_the_bit(data):
    made = Preparation.parse("raw").prepare(memoryview(data))
    original = Image.open(io.BytesIO(data)).convert("RGB")
    np.testing.assert_array_equal(decode_jpeg_or_image(made), np.asarray(original))
    np.testing.assert_array_equal(decode_jpeg_or_image(made), decode_jpeg_or_image(data))
    np.testing.assert_array_equal(Preparation.parse("raw").pixels(data), np.asarray(original))
    with Image.open(io.BytesIO(made)) as image:  # what follows the pixels disturbs no reader of PPM
        assert (image.format, image.size) == ("PPM", original.size)
        np.testing.assert_array_equal(np.asarray(image), np.asarray(original))


@pytest.mark.parametrize("data", WITH_INFO.values(), ids=WITH_INFO)
def test_a_function_of_pillow_images_sees_the_orientation_and_profile_of_a_raw_image(data):
    made = decode_to_pillow(Preparation.parse("raw").prepare(data))
    original = decode_to_pillow(data)
    for name in ("exif", "icc_profile", "xmp"):
        assert made.info.get(name) == original.info.get(name), name
    upright, expected = ImageOps.exif_transpose(made), ImageOps.exif_transpose(original)
    assert upright.size == expected.size
    np.testing.assert_array_equal(np.asarray(upright), np.asarray(expected))


def test_more_information_than_can_be_kept_leaves_an_image_as_it_is():
    data = encoded(photograph(20, 30), icc_profile=bytes(2 << 20))
    assert Preparation.parse("raw").prepare(data) is None
    assert Preparation.parse("raw-16").prepare(data) is not None


@pytest.mark.parametrize(
    "tail",
    [b"{}", b"[1]", b"nothing", b'{"exif": 3}', b'{"exif": {"bytes": "xy"}}', b'{"exif": {}}', b"[" * 99_999],
)
def test_what_another_program_has_put_behind_the_pixels_is_ignored(tail):
    data = encoded(photograph(20, 30), "PPM") + b"\nSTREAMLOAD.info " + tail
    assert not decode_to_pillow(data).info


def test_pixels_are_stored_as_pillow_reads_them():
    made = Preparation(64).prepare(IMAGES["wide"])
    with Image.open(io.BytesIO(made)) as image:
        assert (image.format, image.size) == ("PPM", (85, 64))
        np.testing.assert_array_equal(np.asarray(image), Preparation(64).pixels(IMAGES["wide"]))


@pytest.mark.parametrize("recipe", ["raw", *RECIPES])
@pytest.mark.parametrize(
    "data", [b"", b"not an image", IMAGES["wide"][:2000], encoded(photograph(90, 90), "PCX")]
)
def test_what_cannot_be_decoded_stays_as_it_is(data, recipe):
    preparation = Preparation.parse(recipe)
    assert preparation.prepare(data) is None
    with pytest.raises(DecodeError):
        preparation.pixels(data)


def test_an_image_that_is_small_already_is_not_made_a_worse_jpeg():
    small = encoded(photograph(64, 200), "PNG")
    assert Preparation(64, 90).prepare(small) is None
    np.testing.assert_array_equal(Preparation(64, 90).pixels(small), decode_jpeg_or_image(small))
    assert Preparation(64).prepare(small) is not None


def test_pixels_that_take_too_much_stay_in_their_file(monkeypatch):
    assert MEMBER_LIMIT_BYTES > preparation._LARGEST_BYTES + 1000
    monkeypatch.setattr(preparation, "_LARGEST_BYTES", 64 * 85 * 3)
    assert Preparation(64).prepare(IMAGES["wide"]) is not None
    assert Preparation(64).prepare(IMAGES["a long strip"]) is None
    assert Preparation().prepare(IMAGES["wide"]) is None
    assert Preparation().prepare(IMAGES["smaller"]) is not None
    np.testing.assert_array_equal(
        Preparation(64).pixels(IMAGES["a long strip"]), decode_jpeg_or_image(IMAGES["a long strip"])
    )


def test_an_image_too_long_for_a_jpeg_stays_as_it_is():
    data = encoded(Image.new("RGB", (17, 70_000)), "PNG")
    assert Preparation(16, 90).prepare(data) is None
    assert Preparation(16, 90).pixels(data).shape == (70_000, 17, 3)


@pytest.mark.parametrize("text", ["raw", "raw-256", "jpeg-256-q90", "raw-16", "jpeg-4096-q100"])
def test_a_recipe_is_read_as_it_is_written(text):
    assert str(Preparation.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "auto",
        "raw-",
        "raw-8",
        "raw-5000",
        "jpeg-256",
        "jpeg-256-q0",
        "jpeg-256-q101",
        "webp-256",
        "RAW-256",
    ],
)
def test_what_is_no_recipe_fails(text):
    with pytest.raises(OptionError, match="raw-256 or jpeg-256-q90"):
        Preparation.parse(text)


def test_a_name_says_the_recipe_and_what_the_pixels_depend_on(monkeypatch):
    import PIL
    import torch

    names = {Preparation.parse(text).name for text in (*RECIPES, "raw", "raw-65", "jpeg-64-q91")}
    assert len(names) == 5
    name = Preparation(64).name
    assert name.startswith("raw-64-")
    assert f"pillow{PIL.__version__}" in name
    assert f"torch{torch.__version__.partition('+')[0]}" in name
    preparation._libraries.cache_clear()
    monkeypatch.setattr(PIL, "__version__", "99")
    try:
        assert "pillow99" in Preparation(64).name
    finally:
        preparation._libraries.cache_clear()


def test_a_library_that_gives_other_pixels_gives_another_name(monkeypatch):
    name = Preparation(64).name
    real = preparation.resize_box
    monkeypatch.setattr(preparation, "resize_box", lambda *arguments: real(*arguments) ^ 1)
    preparation._digest_of_example.cache_clear()
    try:
        assert Preparation(64).name != name
    finally:
        preparation._digest_of_example.cache_clear()


@pytest.mark.deep
@pytest.mark.parametrize(
    "recipe",
    [*(pytest.param(name, marks=pytest.mark.deep) for name in ("raw", "raw-256")), "jpeg-256-q90"],
)
def test_a_processor_with_fewer_instructions_makes_the_same(recipe):
    code = (
        "from streamload.derived.prepare.preparation import Preparation; "
        f"print(Preparation.parse({recipe!r}).name)"
    )
    limited = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "JSIMD_FORCENONE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=limited, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == Preparation.parse(recipe).name
