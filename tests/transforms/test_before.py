"""What goes before an image's pixels, by _before.c: what the ways in Python give, or left to them."""

import io

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from streamload.errors import DecodeError
from streamload.transforms import kernel
from streamload.transforms.augment import Draws, RandomBox
from streamload.transforms.by_pillow import decode_to_pillow
from streamload.transforms.decode import decode_jpeg_or_image, jpeg_size
from tests.support.photographs import photograph

needs_it = pytest.mark.skipif(
    kernel.jpeg_size is None, reason="streamload was installed without a C compiler"
)
pytestmark = needs_it

side = st.one_of(st.integers(1, 64), st.integers(1, 4000), st.sampled_from([224, 375, 500, 65_500]))
BOUNDS = [
    ((0.9, 1.0), (3 / 4, 4 / 3)),
    ((0.08, 1.0), (3 / 4, 4 / 3)),
    ((1.0, 1.0), (1.0, 1.0)),
    ((0.4, 0.4), (0.5, 2.0)),
    ((1e-6, 1e-5), (0.01, 100.0)),
    ((2.0, 3.0), (0.9, 1.1)),
]


def by_python(boxes, height, width, seed):
    draws = Draws()
    draws.seed(seed)
    return boxes.draw(height, width, draws), draws.torch_taken


@settings(max_examples=500, deadline=None)
@given(
    height=side,
    width=side,
    seed=st.integers(0, 2**64 - 1),
    bounds=st.sampled_from(BOUNDS),
)
def test_boxes_are_those_that_python_draws_and_take_as_many_numbers(height, width, seed, bounds):
    boxes = RandomBox(*bounds)
    found = boxes.draw_seeded(height, width, seed)
    assert found in (None, by_python(boxes, height, width, seed))


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.sampled(2)
def test_next_to_no_box_is_left_to_python(bounds):
    boxes, rng = RandomBox(*bounds), np.random.default_rng(4)
    left = 0
    for _ in range(3000):
        height, width = (int(n) for n in rng.integers(200, 900, 2))
        seed = int(rng.integers(2**63))
        found = boxes.draw_seeded(height, width, seed)
        left += found is None
        if found is not None:
            assert found == by_python(boxes, height, width, seed)
    assert left < 60


def test_without_it_python_draws_them(monkeypatch):
    monkeypatch.setattr(kernel, "random_box", None)
    assert RandomBox().draw_seeded(300, 400, 5) is None


def file(pixels, **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def without_it(monkeypatch, data):
    with monkeypatch.context() as patched:
        patched.setattr(kernel, "jpeg_size", None)
        return jpeg_size(data)


FILES = {
    "plain": file(photograph(500, 375)),
    "grey": file(photograph(120, 90)[:, :, 0]),
    "with a comment": file(photograph(120, 90), comment=b"x" * 300),
    "with EXIF": file(photograph(120, 90), exif=b"Exif\0\0" + b"\xff\xd8\xff\xc0" * 200),
    "with restarts": file(photograph(120, 90), restart_marker_rows=1),
    "444": simplejpeg.encode_jpeg(photograph(64, 48).copy(), 90, "RGB", "444"),
    "411": simplejpeg.encode_jpeg(photograph(64, 48).copy(), 90, "RGB", "411"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_size_of_a_jpeg_is_what_libjpeg_turbo_says(name, monkeypatch):
    data = FILES[name]
    assert kernel.jpeg_size(data[:4096]) == without_it(monkeypatch, data) == jpeg_size(memoryview(data))
    np.testing.assert_array_equal(decode_jpeg_or_image(data), np.asarray(decode_to_pillow(data)))


def cmyk():
    buffer = io.BytesIO()
    Image.new("CMYK", (30, 20)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(file(photograph(120, 90), icc_profile=b"p" * 6000), id="a long profile"),
        pytest.param(file(photograph(120, 90), keep_rgb=True), id="stored as RGB"),
        pytest.param(cmyk(), id="CMYK"),
        pytest.param(file(photograph(120, 90), progressive=True), id="progressive"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff\xd8\xff\xe0", id="cut"),
        pytest.param(b"GIF89a" + bytes(20), id="no JPEG"),
    ],
)
def test_what_is_out_of_the_ordinary_is_left_to_libjpeg_turbo(data, monkeypatch):
    assert kernel.jpeg_size(data[:4096]) is None
    assert jpeg_size(data) == without_it(monkeypatch, data)


def by_adobe(data, transform):
    """A JPEG without JFIF's marker, with Adobe's."""
    assert data[2:4] == b"\xff\xe0"
    marker = b"\xff\xee\x00\x0eAdobe\0\x64\0\0\0\0" + bytes([transform])
    return data[:2] + marker + data[4 + int.from_bytes(data[4:6], "big") :]


@pytest.mark.parametrize(("transform", "is_known"), [(0, False), (1, True), (2, False)])
def test_colours_are_told_by_adobes_marker_where_there_is_no_jfif(transform, is_known, monkeypatch):
    data = by_adobe(FILES["plain"], transform)
    assert (kernel.jpeg_size(data[:4096]) is not None) is is_known
    if transform != 2:  # of which libjpeg-turbo warns, and which is then Pillow's
        assert jpeg_size(data) == without_it(monkeypatch, data)
    np.testing.assert_array_equal(decode_jpeg_or_image(data), np.asarray(decode_to_pillow(data)))


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(sorted(FILES)),
    flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    length=st.floats(0, 1),
    is_cut=st.booleans(),
)
def test_a_damaged_header_gives_the_pixels_that_it_gives_without_it(name, flips, length, is_cut):
    data = bytearray(FILES[name])
    for at, value in flips:
        data[int(at * (min(len(data), 700) - 1))] = value
    data = bytes(data[: int(length * len(data))] if is_cut else data)

    def decoded():
        try:
            return decode_jpeg_or_image(data)
        except DecodeError:
            return None

    ours = decoded()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel, "jpeg_size", None)
        theirs = decoded()
    assert (ours is None) is (theirs is None)
    if ours is not None:
        np.testing.assert_array_equal(ours, theirs)
