"""Colour steps of whole batches: the levels and the random numbers of the functions that they replace."""

import itertools
import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from streamload.pixels import colour
from streamload.pixels.colour import Jitter, draw_all
from streamload.transforms.augment import Draws
from streamload.transforms.plan import Choices

RANGES = ((0.6, 1.4), (0.2, 3.0), (0.0, 2.0), (-0.5, 0.5))
KINDS = range(4)


def with_hue(image, factor):
    hue, saturation, value = image.convert("HSV").split()
    turned = np.array(hue) + np.int32(factor * 255).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")


PILLOWS = (
    lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    with_hue,
)


def images(count=3, seed=0):
    """uint8[N, 64, 64, 3]: of all colours, some of them gray, and of few."""
    levels = np.random.default_rng(seed).integers(0, 256, (count, 64, 64, 3), dtype=np.uint8)
    levels[:, :8] = levels[:, :8, :, :1]
    levels[0] //= 16
    levels[1] = 255 - levels[1] // 32
    return torch.from_numpy(levels)


@pytest.mark.parametrize("kind", KINDS)
def test_adjusted_images_have_pillows_levels(kind):
    low, high = RANGES[kind]
    steps = np.linspace(low, high, 11)
    factors = [float(np.float32(factor)) for factor in [*steps, 0.0, 1.0] if low <= factor <= high]
    for factor in factors:
        levels = images()
        expected = [np.asarray(PILLOWS[kind](Image.fromarray(image.numpy()), factor)) for image in levels]
        Jitter(RANGES, None).apply(levels, [[colour._Adjustment(kind, factor)]] * len(levels))
        assert np.array_equal(levels.numpy(), np.stack(expected)), factor


def test_every_colour_has_pillows_hue():
    values = [0, 1, 2, 3, 50, 51, 84, 85, 86, 127, 128, 129, 170, 200, 253, 254, 255]
    levels = torch.tensor(list(itertools.product(values, repeat=3)), dtype=torch.uint8).view(1, 17, -1, 3)
    for factor in np.linspace(-0.5, 0.5, 7):
        expected = np.asarray(with_hue(Image.fromarray(levels[0].numpy()), factor))
        assert np.array_equal(colour._hue(levels, [factor])[0].numpy(), expected)


def test_the_random_numbers_are_those_of_colorjitter():
    """By torchvision's get_params, after numbers that were taken before."""
    for seed in range(300):
        taken = seed % 23
        (drawn,) = draw_all([Jitter(RANGES, None)], Choices(None, (), seed * 0x1_0000_0003, taken), Draws())
        torch.manual_seed(seed * 0x1_0000_0003 & 0xFFFF_FFFF)
        torch.rand(taken)
        order = torch.randperm(4).tolist()
        factors = [float(torch.empty(1).uniform_(*bounds)) for bounds in RANGES]
        assert drawn == [(kind, factors[kind]) for kind in order]


def test_what_is_left_out_is_not_drawn_and_jitter_by_chance_is_pythons():
    jitter = Jitter(((0.5, 1.5), None, None, (-0.1, 0.1)), 0.5)
    done = []
    for seed in range(40):
        (drawn,) = draw_all([jitter], Choices(None, (), seed, 0), Draws())
        done.append(drawn is not None)
        assert done[-1] == (random.Random(seed).random() < 0.5)
        assert drawn is None or sorted(kind for kind, _ in drawn) == [0, 3]
    assert 5 < sum(done) < 35


def test_adjustments_of_a_batch_are_those_of_each_image(monkeypatch):
    jitter, draws = Jitter(RANGES, 0.8), Draws()
    levels = images(12, seed=1)
    drawn = [draw_all([jitter], Choices(None, (), seed, 4), draws)[0] for seed in range(12)]
    assert None in drawn
    expected = levels.clone()
    for image, adjustments in zip(expected, drawn, strict=True):
        for kind, factor in adjustments or []:
            image.copy_(torch.from_numpy(np.array(PILLOWS[kind](Image.fromarray(image.numpy()), factor))))
    monkeypatch.setattr(colour, "_MOST_LEVELS", 3 * levels[0].numel())
    jitter.apply(levels, drawn)
    assert torch.equal(levels, expected)
