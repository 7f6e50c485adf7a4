"""Images resized together, on any device: the levels of those that workers resize one by one."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from streamload.pixels import resample
from streamload.pixels.pipeline import OneByOne, Together
from streamload.transforms import kernel
from streamload.transforms.augment import Box
from streamload.transforms.plan import Choices, ImagePlan, KeepRatio, RandomCrop, ShortSide
from tests.pixels.plans import an_image, cases

PILLOWS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
EXACT = not kernel.why_not()


def run(transform, plan, images, choices):
    levels = torch.full((len(images), *plan.size, 3), 99, dtype=torch.uint8)
    decoded = {row: torch.from_numpy(image) for row, image in enumerate(images)}
    return levels, transform(plan)(decoded, dict(enumerate(choices)), levels)


@pytest.mark.parametrize(("seed", "count"), [(0, 40), pytest.param(1, 200, marks=pytest.mark.deep)])
def test_random_plans_give_the_levels_of_workers(seed, count):
    sizes = set()
    for plan, images, choices in cases(count, seed):
        expected, failed_alone = run(OneByOne, plan, images, choices)
        levels, failed = run(Together, plan, images, choices)
        assert failed == failed_alone
        sound = [row for row in range(len(images)) if row not in failed]
        apart = (levels[sound].int() - expected[sound].int()).abs()
        assert not apart.numel() or apart.max() <= (0 if EXACT else 2), plan
        sizes.add(plan.size)
    assert len(sizes) > 15


def resized(images, size, by="bicubic", boxes=None):
    """By the device's form, as uint8[N, *size, 3]."""
    plan = ImagePlan(size, RandomCrop(), by)
    fits = [
        (Box(0, 0, *image.shape[:2]) if boxes is None else boxes[number], size, Box(0, 0, *size))
        for number, image in enumerate(images)
    ]
    return resample.resize_images([torch.from_numpy(image) for image in images], fits, plan)


@pytest.mark.parametrize("by", PILLOWS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3000), (3000, 1), (2, 40_000), (1500, 1100), (3, 5)])
@pytest.mark.parametrize("size", [(1, 1), (224, 224), (9, 300)])
def test_long_large_and_tiny_images_have_pillows_levels(shape, size, by):
    """With inputs of an output beyond what float32 sums exactly, too."""
    rng = np.random.default_rng(sum(shape))
    image = (rng.random((*shape, 3)) < 0.5).astype(np.uint8) * 255
    expected = Image.fromarray(image).resize(size[::-1], PILLOWS[by])
    assert np.array_equal(resized([image], size, by)[0].numpy(), np.asarray(expected))


@pytest.mark.parametrize("taps", [4, 64])
def test_sums_in_parts_are_those_in_whole_numbers(monkeypatch, taps):
    image = an_image(random.Random(5))
    expected = resized([image], (33, 41))
    monkeypatch.setattr(resample, "_MOST_TAPS", taps)
    assert torch.equal(resized([image], (33, 41)), expected)


def test_an_images_levels_do_not_depend_on_those_beside_it(monkeypatch):
    draw = random.Random(7)
    images = [an_image(draw) for _ in range(16)]
    together = resized(images, (48, 56))
    assert torch.equal(torch.cat([resized([image], (48, 56)) for image in images]), together)
    monkeypatch.setattr(resample, "_MOST_LEVELS", 1 << 16)
    assert torch.equal(resized(images[::-1], (48, 56)).flip(0), together)


def test_images_are_resized_a_bounded_number_at_a_time(monkeypatch):
    most = 1 << 20
    monkeypatch.setattr(resample, "_MOST_LEVELS", most)
    tables = []
    sums = resample._sums

    def recorded(table, lines, fixed):
        tables.append((table.numel(), fixed.shape[0]))
        return sums(table, lines, fixed)

    monkeypatch.setattr(resample, "_sums", recorded)
    draw = random.Random(3)
    images = [an_image(draw) for _ in range(30)]
    resized(images, (64, 64))
    assert max(levels for levels, count in tables if count > 1) <= most
    assert any(count > 1 for _, count in tables)


def test_only_what_a_crop_needs_of_a_long_image_is_read():
    plan = ImagePlan((24, 24), ShortSide(24))
    image = np.zeros((2, 30_000, 3), np.uint8)
    image[:, 14_990:15_010] = 200
    levels, failed = run(Together, plan, [image], [Choices(None, (), 0, 0)])
    assert not failed
    assert (levels[0, :, 8:16] == 200).all()


def test_an_image_without_pixels_on_its_short_side_fails_by_itself():
    plan = ImagePlan((8, 8), KeepRatio((8, 8), 1.0))
    images = [np.zeros((1, 500, 3), np.uint8), np.full((8, 8, 3), 7, np.uint8)]
    levels, failed = run(Together, plan, images, [Choices(None, (), 0, 0)] * 2)
    assert list(failed) == [0]
    assert "500×1 can't be resized" in failed[0]
    assert (levels[1] == 7).all()
