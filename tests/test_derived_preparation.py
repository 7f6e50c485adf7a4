"""Prepared images: what is stored and what a training makes by itself have the same pixels."""

import io
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from streamload.derived import preparation
from streamload.derived.preparation import Preparation
from streamload.errors import DecodeError, OptionError
from streamload.shards.keys import MEMBER_LIMIT_BYTES
from streamload.transforms.decode import decode_jpeg_or_image

RECIPES = ["raw-64", "jpeg-64-q90"]


def photograph(width, height, mode="RGB"):
    from skimage import data

    image = Image.fromarray(data.astronaut()).resize((width, height), Image.Resampling.BICUBIC)
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


def test_pixels_are_stored_as_pillow_reads_them():
    made = Preparation(64).prepare(IMAGES["wide"])
    with Image.open(io.BytesIO(made)) as image:
        assert (image.format, image.size) == ("PPM", (85, 64))
        np.testing.assert_array_equal(np.asarray(image), Preparation(64).pixels(IMAGES["wide"]))


@pytest.mark.parametrize("recipe", RECIPES)
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
    np.testing.assert_array_equal(
        Preparation(64).pixels(IMAGES["a long strip"]), decode_jpeg_or_image(IMAGES["a long strip"])
    )


def test_an_image_too_long_for_a_jpeg_stays_as_it_is():
    data = encoded(Image.new("RGB", (17, 70_000)), "PNG")
    assert Preparation(16, 90).prepare(data) is None
    assert Preparation(16, 90).pixels(data).shape == (70_000, 17, 3)


@pytest.mark.parametrize("text", ["raw-256", "jpeg-256-q90", "raw-16", "jpeg-4096-q100"])
def test_a_recipe_is_read_as_it_is_written(text):
    assert str(Preparation.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "raw",
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

    names = {Preparation.parse(text).name for text in (*RECIPES, "raw-65", "jpeg-64-q91")}
    assert len(names) == 4
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


@pytest.mark.parametrize("recipe", ["raw-256", "jpeg-256-q90"])
def test_a_processor_with_fewer_instructions_makes_the_same(recipe):
    code = (
        f"from streamload.derived.preparation import Preparation; print(Preparation.parse({recipe!r}).name)"
    )
    limited = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "JSIMD_FORCENONE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=limited, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == Preparation.parse(recipe).name
