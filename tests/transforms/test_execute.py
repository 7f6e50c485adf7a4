"""Plans carried out: boxes from the sample's seed, and Pillow's pixels."""

import io
import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image

from streamload.errors import DecodeError
from streamload.transforms import kernel, resize
from streamload.transforms.augment import Box, Draws, RandomBox
from streamload.transforms.decode import decode_jpeg_or_image
from streamload.transforms.plan import (
    Flip,
    Grey,
    ImagePlan,
    KeepRatio,
    PlannedTransform,
    RandomCrop,
    ShortSide,
    Squash,
    clip_plan,
)
from streamload.transforms.resize import Place, resize_box, resizing
from tests.support.photographs import SIZES, photograph, transformed

PILLOWS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@pytest.fixture(params=["our kernel", "torch's"])
def is_exact(request, monkeypatch):
    """With and without the kernel that gives Pillow's bits."""
    if request.param == "torch's":
        monkeypatch.setattr(kernel, "resize_into", None)
    elif kernel.resize_into is None:
        pytest.skip(kernel.why_not())
    return request.param == "our kernel"


def by_pillow(pixels, box, height, width, by="bicubic"):
    top, left, box_height, box_width = box
    crop = Image.fromarray(pixels).crop((left, top, left + box_width, top + box_height))
    return np.asarray(crop.resize((width, height), PILLOWS[by])).transpose(2, 0, 1)


def draw(boxes, height, width, seed):
    draws = Draws()
    draws.seed(seed)
    return boxes.draw(height, width, draws)


def planned(plan, pixels, seed=0):
    destination = torch.zeros(3, *plan.size, dtype=torch.uint8)
    transformed(PlannedTransform(plan), pixels, destination, seed)
    return destination


def levels_apart(ours, pillows):
    return np.abs(np.asarray(ours).astype(int) - pillows.astype(int))


def assert_pillows(ours, expected, is_exact):
    """To the bit, or within two levels, of which two are rare."""
    apart = levels_apart(ours, expected)
    assert apart.max() <= (0 if is_exact else 2)
    assert (apart > 1).sum() <= 3 + apart.size * 1e-4


def test_a_resized_box_is_pillows(is_exact):
    rng = np.random.default_rng(0)
    values = beyond = 0
    for number in range(90):
        pixels = photograph(*SIZES[number % len(SIZES)], which=number % 5)
        box = draw(RandomBox(), *pixels.shape[:2], int(rng.integers(2**32)))
        expected = by_pillow(pixels, box, 224, 224)
        (ours,) = resize_box(pixels, box, 224, 224)
        assert_pillows(ours, expected, is_exact)
        values += expected.size
        beyond += int((levels_apart(ours, expected) > 1).sum())
    assert beyond <= values / 1e6


@pytest.mark.parametrize("by", PILLOWS)
@pytest.mark.parametrize("which", range(3))
@pytest.mark.sampled(6)
def test_boxes_of_any_shape_are_resized_in_pillows_order_of_axes(which, by, is_exact):
    rng = np.random.default_rng(which)
    pixels = photograph(700, 700, which)
    orders = set()
    for _ in range(60):
        height, width, new_height, new_width = (
            int(n) for n in rng.integers((20, 20, 16, 16), (700, 700, 300, 300))
        )
        box = Box(int(rng.integers(700 - height)), int(rng.integers(700 - width)), height, width)
        (ours,) = resize_box(pixels, box, new_height, new_width, by)
        assert_pillows(ours, by_pillow(pixels, box, new_height, new_width, by), is_exact)
        orders.add(goes_down_first((height, width), (new_height, new_width)))
    assert len(orders) == 1 + (int(Image.__version__.partition(".")[0]) >= 13)


def goes_down_first(shape, size):
    return resize.goes_down_first(Box(0, 0, *shape), size)


def test_a_tall_box_resized_in_the_other_order_fails_to_be_pillows(is_exact):
    pixels = np.random.default_rng(0).integers(0, 256, (600, 300, 3), dtype=np.uint8)
    expected = by_pillow(pixels, Box(0, 0, 600, 300), 224, 224)
    (ours,) = resize_box(pixels, Box(0, 0, 600, 300), 224, 224)
    first = (224, 300) if not goes_down_first((600, 300), (224, 224)) else (600, 224)
    half = resize_box(pixels, Box(0, 0, 600, 300), *first)[0].permute(1, 2, 0).numpy()
    (other,) = resize_box(half, Box(0, 0, *first), 224, 224)
    assert_pillows(ours, expected, is_exact)
    assert levels_apart(other, expected).max() > 4


@pytest.mark.parametrize("shape", [(1, 1), (1, 500), (500, 1), (2, 3), (224, 224), (224, 500), (500, 224)])
def test_images_of_odd_sizes_are_transformed(shape):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    for train in (True, False):
        assert planned(clip_plan(train), pixels, seed=3).sum() > 0


def test_a_part_of_the_pixels_in_scratch_is_resized_from_where_it_lies():
    file = io.BytesIO()
    Image.fromarray(photograph(500, 375)).save(file, "JPEG")
    part = decode_jpeg_or_image(file.getvalue(), in_scratch=True)[40:300, 70:400]
    box = Box(3, 5, 200, 300)
    assert torch.equal(resize_box(part, box, 224, 224), resize_box(part.copy(), box, 224, 224))


def test_the_same_seed_gives_the_same_example_in_any_process():
    pixels = photograph(400, 400)
    first, again, other = (torch.zeros(3, 224, 224, dtype=torch.uint8) for _ in range(3))
    transform = PlannedTransform(clip_plan(train=True))
    transformed(transform, pixels, first, seed=2**64 - 1)
    transformed(transform, pixels, other, seed=7)
    transformed(pickle.loads(pickle.dumps(transform)), pixels, again, seed=2**64 - 1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    planned(clip_plan(train=True), photograph(500, 375), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_place_in_either_memory_format_gets_the_same_pixels_and_its_neighbours_none():
    pixels = photograph(500, 375)
    plain = torch.zeros(3, 3, 224, 224, dtype=torch.uint8)
    channels_last = torch.zeros(3, 224, 224, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    for batch in (plain, channels_last):
        transformed(PlannedTransform(clip_plan(train=True)), pixels, batch[1], seed=1)
        assert batch[0].sum() == batch[2].sum() == 0
    assert torch.equal(plain, channels_last)


def test_boxes_have_the_area_and_ratio_asked_for_and_lie_inside():
    boxes = RandomBox(scale=(0.5, 0.6), ratio=(0.8, 1.25))
    for seed in range(300):
        box = draw(boxes, 400, 400, seed)
        assert 0 <= box.top <= box.top + box.height <= 400
        assert 0 <= box.left <= box.left + box.width <= 400
        assert 0.49 < box.height * box.width / 400**2 < 0.61
        assert 0.79 < box.width / box.height < 1.26


@pytest.mark.parametrize(
    ("shape", "box"),
    [((1000, 100), (433, 0, 133, 100)), ((100, 1000), (0, 433, 100, 133)), ((1, 1), (0, 0, 1, 1))],
)
def test_where_no_box_fits_the_central_one_is_taken(shape, box):
    boxes = RandomBox(scale=(0.9, 1.0))
    assert all(draw(boxes, *shape, seed) == box for seed in range(20))


@pytest.mark.parametrize(("width", "height"), [*SIZES, (1000, 130), (130, 1000), (225, 224), (40, 3000)])
def test_evaluation_is_pillows_resize_and_central_crop(width, height, is_exact):
    pixels = photograph(width, height)
    short = min(width, height)
    new_width, new_height = int(224 * width / short), int(224 * height / short)
    whole = Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling.BICUBIC)
    left, top = round((new_width - 224) / 2), round((new_height - 224) / 2)
    expected = np.asarray(whole.crop((left, top, left + 224, top + 224))).transpose(2, 0, 1)
    assert_pillows(planned(clip_plan(train=False), pixels), expected, is_exact)


def test_only_the_pixels_that_a_part_needs_are_looked_at(is_exact):
    rng = np.random.default_rng(1)
    for number in range(60):
        height, width = (int(n) for n in rng.integers(1, 700, 2))
        size = tuple(int(n) for n in rng.integers(1, 400, 2))
        top, left = (int(rng.integers(length)) for length in size)
        part = Box(top, left, int(rng.integers(size[0] - top)) + 1, int(rng.integers(size[1] - left)) + 1)
        pixels = photograph(700, 700, number % 5)[:height, :width].copy()
        whole = by_pillow(pixels, Box(0, 0, height, width), *size)
        cut = torch.empty(1, 3, part.height, part.width, dtype=torch.uint8)
        resizing(pixels, Box(0, 0, height, width), size, part=part)(out=Place.of(cut))
        if max(size) > resize._PART_FACTOR * max(part[2:]) and not is_exact:
            continue  # Pillow resizes from a box of fractions then, which is another rounding
        expected = whole[:, top : top + part.height, left : left + part.width]
        assert_pillows(cut[0], expected, is_exact)


@pytest.mark.parametrize("shape", [(1, 66_000), (66_000, 2)])
def test_what_is_too_long_for_our_kernel_is_evaluated_without_making_it_longer_still(shape):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    size = ShortSide(16).resized(*shape)
    part = Box(*((length - 16) // 2 for length in size), 16, 16)
    cut = torch.empty(1, 3, 16, 16, dtype=torch.uint8)
    resizing(pixels, Box(0, 0, *shape), size, part=part)(out=Place.of(cut))
    whole = by_pillow(pixels, Box(0, 0, *shape), *size)
    apart = levels_apart(cut[0], whole[:, part.top : part.top + 16, part.left : part.left + 16])
    assert apart.max() <= 2


def test_a_line_of_a_million_pixels_is_evaluated():
    buffer = io.BytesIO()
    Image.new("L", (1_000_000, 1), 77).save(buffer, "PNG")
    pixels = decode_jpeg_or_image(buffer.getvalue())
    assert (planned(clip_plan(train=False), pixels) == 77).all()


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (100, 60), (61, 100), (300, 300)])
@pytest.mark.parametrize("size", [(224, 224), (96, 160), (161, 97)])
def test_the_whole_image_fits_into_the_middle_and_the_rest_is_filled(width, height, size, is_exact):
    pixels = photograph(width, height)
    plan = ImagePlan(size, KeepRatio(size, 1.0), fill=(9, 80, 200))
    factor = max(height / size[0], width / size[1])
    new_height, new_width = round(height / factor), round(width / factor)
    expected = np.empty((3, *size), np.uint8)
    expected[:] = np.array(plan.fill)[:, None, None]
    top, left = (size[0] - new_height) // 2, (size[1] - new_width) // 2
    resized = by_pillow(pixels, Box(0, 0, height, width), new_height, new_width)
    expected[:, top : top + new_height, left : left + new_width] = resized
    assert_pillows(planned(plan, pixels), expected, is_exact)


def test_a_squashed_image_has_both_sides_as_given(is_exact):
    pixels = photograph(500, 375)
    expected = by_pillow(pixels, Box(0, 0, 375, 500), 128, 96, "bilinear")
    plan = ImagePlan((128, 96), Squash((128, 96)), by="bilinear")
    assert_pillows(planned(plan, pixels), expected, is_exact)


def test_an_image_of_whose_short_side_nothing_would_be_left_is_refused():
    with pytest.raises(DecodeError, match="1×5000 can't be resized to 0×224"):
        planned(ImagePlan((224, 224), KeepRatio((224, 224), 1.0)), np.zeros((5000, 1, 3), np.uint8))


def test_flips_and_grey_images_are_as_many_as_asked_for_and_exact():
    pixels = photograph(300, 300)
    plain, flipped, grey = (
        planned(ImagePlan((64, 64), RandomCrop((1.0, 1.0), (1.0, 1.0)), colour=colour), pixels)
        for colour in ((), (Flip(1.0),), (Grey(1.0, None),))
    )
    assert torch.equal(plain.flip(-1), flipped)
    luminance = np.asarray(Image.fromarray(plain.permute(1, 2, 0).numpy()).convert("L"))
    assert all(np.array_equal(channel, luminance) for channel in grey.numpy())
    plan = ImagePlan((64, 64), Squash((64, 64)), colour=(Flip(0.3), Grey(0.2, "torch"), Grey(0.1, "python")))
    transform, place = PlannedTransform(plan), torch.zeros(3, 64, 64, dtype=torch.uint8)
    upright = planned(ImagePlan((64, 64), Squash((64, 64))), pixels)
    seen = []
    for seed in range(400):
        transformed(transform, pixels, place, seed)
        is_grey = torch.equal(place[0], place[1])
        seen.append((is_grey, not is_grey and not torch.equal(place, upright)))
    greys, flips = map(sum, zip(*seen, strict=True))
    assert 70 < greys < 160  # 0.28 of 400
    assert 55 < flips < 120  # 0.3 of the others


def test_numbers_drawn_are_those_of_the_generators_that_are_seeded_alike():
    draws = Draws()
    for seed in (0, 7, 2**32 + 5, 2**64 - 1):
        draws.seed(seed)
        torch.manual_seed(seed & 0xFFFF_FFFF)
        random.seed(seed)
        assert [draws.torch_rand() for _ in range(100)] == [torch.rand(1).item() for _ in range(100)]
        assert [draws.python_random() for _ in range(3)] == [random.random() for _ in range(3)]
