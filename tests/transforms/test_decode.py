"""Decoded pixels are Pillow's, whichever decoder made them; what can't be decoded is a DecodeError."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from streamload.errors import DecodeError, ImageTooLarge
from streamload.transforms import decode
from streamload.transforms.by_pillow import decode_to_pillow
from streamload.transforms.decode import decode_jpeg_or_image, jpeg_size
from tests.support.photographs import whole_photograph


def photograph(width=120, height=90, mode="RGB"):
    image = Image.fromarray(whole_photograph()[40:340, 60:460]).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return image.convert(mode)


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def by_pillow(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def png_of_size(width, height):
    def chunk(kind, payload):
        body = kind + payload
        return struct.pack(">I", len(payload)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )


def same_as_pillow(data):
    pixels = decode_jpeg_or_image(memoryview(data))
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    np.testing.assert_array_equal(pixels, by_pillow(data))
    image = decode_to_pillow(memoryview(data))
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), by_pillow(data))


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (15, 17), (64, 48), (120, 90), (333, 251)])
def test_a_sound_jpeg_has_the_pixels_of_pillow_bit_by_bit(size, progressive, subsampling):
    data = encoded(photograph(*size), "JPEG", quality=88, subsampling=subsampling, progressive=progressive)
    assert jpeg_size(data) is not None
    same_as_pillow(data)


def test_a_gray_jpeg_has_the_pixels_of_pillow():
    data = encoded(photograph(mode="L"), "JPEG")
    assert jpeg_size(data) is not None
    same_as_pillow(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(encoded(photograph(mode="CMYK"), "JPEG"), id="CMYK"),
        pytest.param(encoded(photograph(), "JPEG", keep_rgb=True), id="stored as RGB"),
    ],
)
def test_a_jpeg_of_other_colours_has_the_pixels_of_pillow(data):
    assert jpeg_size(data) is None
    same_as_pillow(data)


def test_a_jpeg_that_makes_the_decoder_warn_is_what_pillow_makes_of_it():
    whole = encoded(photograph(300, 200), "JPEG", quality=90)
    accepted = refused = 0
    for place in range(700, len(whole) - 20, len(whole) // 60):
        data = whole[:place] + b"\xff\x00\xaa\x17" + whole[place + 4 :]
        try:
            by_pillow(data)
        except OSError:
            refused += 1
            with pytest.raises(DecodeError):
                decode_jpeg_or_image(data)
        else:
            accepted += 1
            same_as_pillow(data)
    assert accepted > 30, (accepted, refused)


def test_bytes_behind_the_end_of_a_jpeg_change_nothing():
    same_as_pillow(encoded(photograph(), "JPEG") + b"\0" * 1000)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_a_png_of_any_mode_is_converted_as_pillow_does(mode):
    if mode == "I;16":
        image = Image.fromarray((np.arange(90 * 120, dtype=np.uint16) * 6).reshape(90, 120))
    else:
        image = photograph(mode=mode)
    data = encoded(image, "PNG")
    assert Image.open(io.BytesIO(data)).mode == mode
    same_as_pillow(data)


def test_a_palette_with_transparency_is_converted_as_pillow_does_and_no_warning_escapes():
    image = photograph(mode="P")
    data = encoded(image, "PNG", transparency=bytes(range(256)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = decode_jpeg_or_image(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_array_equal(pixels, by_pillow(data))


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 80}, {"lossless": True, "exact": True}])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_webp_has_the_pixels_of_pillow(mode, options):
    same_as_pillow(encoded(photograph(mode=mode), "WEBP", **options))


@pytest.mark.parametrize("kind", ["GIF", "BMP", "PPM", "TIFF", "AVIF", "JPEG2000"])
def test_formats_that_hide_behind_a_wrong_extension_are_decoded(kind):
    same_as_pillow(encoded(photograph(), kind))


@pytest.mark.parametrize("bitmap_format", ["png", "bmp"])
def test_an_icon_has_the_pixels_of_pillow(bitmap_format):
    same_as_pillow(
        encoded(photograph(64, 64), "ICO", sizes=[(32, 32), (64, 64)], bitmap_format=bitmap_format)
    )


@pytest.mark.parametrize("kind", ["PCX", "TGA", "EPS"])
def test_a_format_that_is_not_on_the_list_fails(kind):
    with pytest.raises(DecodeError, match="expected one of JPEG, PNG, WEBP, GIF, BMP"):
        decode_jpeg_or_image(encoded(photograph(64, 64), kind))


PPM = encoded(Image.new("RGB", (5, 4), (1, 2, 3)), "PPM")


@pytest.mark.parametrize(
    "data",
    [
        PPM[:-1],
        PPM[:8],
        b"P6",
        PPM.replace(b"5 4", b"5 0"),
        PPM.replace(b"255", b"127"),
        PPM.replace(b"255", b"65535"),
        PPM.replace(b"5 4", b"5 -4"),
        PPM.replace(b"5 4", b"20000 20000"),
        PPM.replace(b"5 4", b"9" * 60 + b" 4"),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_stored_pixels_that_are_not_all_there_fail(data):
    for decoding in (decode_jpeg_or_image, decode_to_pillow):
        with pytest.raises(DecodeError):
            decoding(memoryview(data))


def test_stored_pixels_in_scratch_are_a_copy():
    kept = decode_jpeg_or_image(PPM, in_scratch=True)
    kept[:] = 9
    np.testing.assert_array_equal(decode_jpeg_or_image(PPM), by_pillow(PPM))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(kind):
    frames = [photograph().point(lambda level, add=add: (level + add) % 256) for add in (0, 90, 180)]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    same_as_pillow(data)


def test_a_picture_with_two_views_is_its_first():
    frames = [photograph(), photograph().point(lambda level: 255 - level)]
    data = encoded(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    same_as_pillow(data)


def test_the_orientation_in_exif_is_left_to_the_user():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(photograph(120, 90), "JPEG", exif=exif)
    assert decode_jpeg_or_image(data).shape == (90, 120, 3)
    same_as_pillow(data)
    assert ImageOps.exif_transpose(decode_to_pillow(data)).size == (90, 120)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_a_cut_image_fails(kind, share):
    whole = encoded(photograph(), kind)
    with pytest.raises(DecodeError):
        decode_jpeg_or_image(whole[: int(len(whole) * share)])


def test_a_jpeg_without_its_last_bytes_fails_as_with_pillow():
    whole = encoded(photograph(), "JPEG")
    for missing in (1, 2, 3, 100):
        with pytest.raises(OSError, match="truncated"):
            by_pillow(whole[:-missing])
        with pytest.raises(DecodeError, match="truncated"):
            decode_jpeg_or_image(whole[:-missing])


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8\xff", b"\xff\xd8\xff\xe0", b"<!DOCTYPE html>", b"\0" * 5000]
)
def test_what_is_no_image_fails(data):
    with pytest.raises(DecodeError, match=f"{len(data)} bytes"):
        decode_jpeg_or_image(data)
    with pytest.raises(DecodeError, match=f"{len(data)} bytes"):
        decode_to_pillow(data)


@pytest.mark.parametrize("size", [(13_000, 13_000), (20_000_001, 1), (200_000, 200_000)])
def test_a_bomb_fails_by_its_header(size):
    with pytest.raises(ImageTooLarge):
        decode_jpeg_or_image(png_of_size(*size))


def test_a_bomb_in_a_jpeg_fails_by_its_header():
    data = bytearray(encoded(photograph(), "JPEG"))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", 13_000, 13_000)
    with pytest.raises(DecodeError, match="13000×13000 by its header"):
        decode_jpeg_or_image(data)
    with pytest.raises(DecodeError, match="13000×13000 by its header"):
        decode_to_pillow(data)


def test_an_image_below_the_limit_is_opened():
    with pytest.raises(DecodeError, match=r"PNG image of .* 4400×4400, could not be decoded"):
        decode_jpeg_or_image(png_of_size(4400, 4400))


def test_random_damage_gives_pixels_or_a_decode_error_and_nothing_else():
    rng = np.random.default_rng(0)
    wholes = [
        encoded(photograph(48, 40, mode), kind)
        for kind, mode in (
            ("JPEG", "RGB"),
            ("JPEG", "CMYK"),
            ("PNG", "P"),
            ("WEBP", "RGBA"),
            ("GIF", "P"),
            ("BMP", "RGB"),
        )
    ]
    outcomes = {True: 0, False: 0}
    for number in range(900):
        data = bytearray(wholes[number % len(wholes)])
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        try:
            outcomes[decode_jpeg_or_image(data).shape[2] == 3] += 1
        except DecodeError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 50, outcomes


def test_pixels_in_scratch_are_those_of_an_image_whatever_was_there_before():
    files = [encoded(photograph(*size), "JPEG") for size in [(500, 375), (64, 48), (2600, 2600), (3, 5)]]
    expected = [decode_jpeg_or_image(file) for file in files]
    for _ in range(2):
        for file, pixels in zip(files, expected, strict=True):
            assert np.array_equal(decode_jpeg_or_image(file, in_scratch=True), pixels)
    kept = decode_jpeg_or_image(files[0])
    for file in files:
        decode_jpeg_or_image(file, in_scratch=True)
    assert np.array_equal(kept, expected[0])
    assert decode._scratch.of(2600, 2600) is None
