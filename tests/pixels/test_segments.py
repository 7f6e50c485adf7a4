"""A JPEG of which nothing is doubted is taken by the host's decoder; what only decoding can tell is."""

import io
import random
import struct

import numpy as np
import pytest
from PIL import Image

from streamload.errors import DecodeError
from streamload.pixels import segments
from streamload.pixels.segments import refusal
from streamload.transforms import kernel
from streamload.transforms.decode import decode_jpeg_or_image, jpeg_size
from tests.fuzzing import kernels
from tests.pixels import damage


def encoded(mode="RGB", side=(40, 57), **options):
    levels = np.random.default_rng(1).integers(0, 256, (*side, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(levels).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def exif(**tags):
    values = Image.Exif()
    values.update({0x0112: 6, 0x010F: "maker"} | tags)
    return values.tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"mode": "L"}, {"progressive": True}, {"progressive": True, "mode": "L"}, {"optimize": True},
        {"subsampling": 0}, {"subsampling": 1}, {"quality": 100}, {"restart_marker_rows": 1},
        {"comment": b"x" * 70}, {"dpi": (72, 72)}, {"icc_profile": bytes(70_000)}, {"exif": exif()},
        {"exif": exif(), "progressive": True, "side": (301, 450)},
    ],
)  # fmt: skip
def test_what_encoders_write_is_not_doubted(options):
    file = encoded(**options)
    assert refusal(file) is None
    assert refusal(file + b"behind the end") is None


def taken(file):
    try:
        decode_jpeg_or_image(file)
    except DecodeError:
        return False
    return True


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"exif": exif()}])
def test_a_half_with_an_end_mark_is_not_doubted_and_one_without_is(options):
    file = encoded(**options)
    half = file[: len(file) * 2 // 3]
    assert not taken(half)
    assert refusal(half) == "no end mark"
    assert refusal(file[:-2]) == "no end mark"
    ended = half + b"\xff\xd9"
    assert taken(ended)
    assert refusal(ended) is None


def segment_of(marker, payload):
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def with_first(file, marker, payload):
    """The file with another segment before all others."""
    return file[:2] + segment_of(marker, payload) + file[2:]


def damaged_scan(file):
    """Some bits of the scan are others, so that libjpeg warns and Pillow has to open the file."""
    data = bytearray(file)
    start = data.rindex(b"\xff\xda") + 40
    data[start : start + 30] = bytes(range(1, 31))
    return bytes(data)


def with_table(file, marker, change):
    """The first segment of a kind, changed in place."""
    place = file.index(bytes((0xFF, marker))) + 4
    data = bytearray(file)
    change(data, place)
    return bytes(data)


def set_byte(offset, value):
    def change(data, place):
        data[place + offset] = value

    return change


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (with_table(encoded(), 0xC4, set_byte(0, 7)), "a damaged Huffman table"),
        (with_table(encoded(), 0xC4, set_byte(1, 3)), "a damaged Huffman table"),
        (with_table(encoded(), 0xDB, set_byte(0, 9)), "a damaged quantisation table"),
        (with_table(encoded(), 0xC0, set_byte(8, 3)), "a scan without its quantisation table"),
        (with_table(encoded(), 0xDA, set_byte(1, 9)), "a scan of other components than the frame's"),
        (with_table(encoded(), 0xDA, set_byte(2, 0x33)), "a scan without its Huffman tables"),
        (with_table(encoded(progressive=True), 0xDA, set_byte(9, 0x2F)), "a scan that doesn't refine"),
        (with_first(encoded(), 0xDD, b"\0"), "a damaged restart interval"),
        (with_first(damaged_scan(encoded()), 0xE0, b"JFIF\0\1"), "a short application segment"),
        (with_first(damaged_scan(encoded()), 0xE2, b"ICC_PROFILE\0"), "Pillow can't open it"),
    ],
)
def test_what_the_host_refuses_is_doubted(file, reason):
    assert not taken(file)
    assert str(refusal(file)).startswith(reason)


def damaged_header(rng):
    file = kernels._damaged(rng)
    return file.rstrip(b"\xff\xd9") + b"\xff\xd9" if rng.random() < 0.5 else file


@pytest.mark.parametrize("damaged", [damaged_header, damage.damaged])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 20))])
def test_of_damaged_files_those_that_are_not_doubted_are_taken(seed, damaged):
    rng = random.Random(seed)
    undoubted = doubted = 0
    for _ in range(600):
        file = damaged(rng)
        reason = refusal(file)
        undoubted, doubted = undoubted + (reason is None), doubted + (reason is not None)
        assert reason is not None or (taken(file) and jpeg_size(file) is not None), file.hex()
    assert undoubted > 100
    assert doubted > 40


@pytest.mark.skipif(kernel.jpeg_is_sound is None, reason="streamload was installed without a C compiler")
@pytest.mark.parametrize("following", [0x00, 0x01, 0xD0, 0xD7, 0xD8, 0xD9, 0xDA, 0xFF])
def test_a_marker_at_any_place_of_a_scan_is_seen(following):
    file = encoded("L", (8, 8))
    for length in (*range(140), 1000):
        scan = bytes(number % 255 for number in range(length))
        for place in range(max(0, length - 70), length):
            changed = file[:-2] + scan[:place] + bytes((0xFF, following)) + scan[place:] + file[-2:]
            is_within = following == 0 or 0xD0 <= following <= 0xD7
            assert segments._is_plainly_sound(changed) == (is_within or following == 0xD9), (length, place)


@pytest.mark.skipif(kernel.jpeg_is_sound is None, reason="streamload was installed without a C compiler")
def test_what_the_c_code_does_not_doubt_python_does_not_either():
    assert sum(map(segments._is_plainly_sound, damage.sound())) > len(damage.sound()) // 2
    rng, sound = random.Random(0), 0
    for number in range(3000):
        file = damaged_header(rng) if number % 2 else damage.damaged(rng)
        if file[:2] == b"\xff\xd8" and segments._is_plainly_sound(file):
            sound += 1
            assert segments._Jpeg(file).doubt() is None, file.hex()
    assert sound > 300


def test_a_huffman_table_has_no_code_of_ones_alone():
    assert segments._is_huffman(bytes([0, 1, 1, *[0] * 14, 0, 1]))
    assert not segments._is_huffman(bytes([0, 2, *[0] * 15, 0, 1]))
