"""Torchvision's transforms to one size, for sizes: held to themselves on Pillow images.

These run in the environment that has open_clip and torchvision.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.torchvision_stub import define_torchvision_schemas
from streamload.aspects.images import SizedTransform, sized_plan
from streamload.errors import OptionError
from streamload.transforms import kernel
from streamload.transforms.augment import SeededGenerators
from tests.support.photographs import SIZES, photograph, transformed

define_torchvision_schemas()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "open_clip", reason="open_clip is not in this environment; `make pytest-openclip` runs these tests"
    )
    from torchvision import transforms
    from torchvision.transforms import InterpolationMode, functional

SIZED = ((64, 64), (96, 48), (48, 96), (72, 56))
BICUBIC, BILINEAR = InterpolationMode.BICUBIC, InterpolationMode.BILINEAR
END = (transforms.ToTensor(), transforms.Normalize([0.5], [0.5]))  # as in diffusers' examples


def covering(by: InterpolationMode, size: tuple[int, int], image: Image.Image) -> Image.Image:
    """Resize an image so that it covers a size."""
    factor = min(image.width / size[0], image.height / size[1])
    return functional.resize(image, [round(image.height / factor), round(image.width / factor)], by)


def crop(kind: str, width: int, height: int) -> Any:
    return {"random": transforms.RandomCrop, "middle": transforms.CenterCrop}[kind]((height, width))


@pytest.mark.parametrize("kind", ["random", "middle"])
@pytest.mark.parametrize("by", [BICUBIC, BILINEAR])
@pytest.mark.parametrize(
    "colour",
    [
        pytest.param((), id="plain"),
        pytest.param((transforms.RandomHorizontalFlip(), transforms.RandomGrayscale(0.5)), id="compiled"),
        pytest.param((transforms.RandomHorizontalFlip(), transforms.ColorJitter(0.4, 0.4)), id="as given"),
    ],
)
def test_pixels_and_draws_are_torchvisions(kind: str, by: InterpolationMode, colour: Any) -> None:
    if kernel.why_not() and len(colour) == 2 and isinstance(colour[1], transforms.ColorJitter):
        pytest.skip(kernel.why_not())
    chain = transforms.Compose([transforms.Resize(224, by), crop(kind, 224, 224), *colour, *END])
    plan = sized_plan(chain, SIZED, None)
    for seed, (width, height) in enumerate([*SIZES, (64, 64), (31, 17)]):
        for number, (across, down) in enumerate(SIZED):
            pixels = photograph(width, height).copy()
            resize = functools.partial(covering, by, (across, down))
            reference = transforms.Compose([resize, crop(kind, across, down), *colour, *END])
            with SeededGenerators() as generators:
                generators.seed(seed)
                expected = reference(Image.fromarray(pixels))
                made = torch.zeros(3, down, across)
                transformed(SizedTransform(plan.to(number), False), pixels, made, seed)
            apart = (made - expected).abs().max().item()
            assert apart <= (2 / 127.4 if kernel.why_not() else 1e-6)


def test_what_it_does_not_read_is_refused_with_what_to_give() -> None:
    for says, steps in [
        ("CenterCrop isn't supported, or not at this place", [transforms.CenterCrop(8)]),
        ("RandomResizedCrop isn't supported", [transforms.RandomResizedCrop(8)]),
        ("resizes by lanczos", [transforms.Resize(8, InterpolationMode.LANCZOS), transforms.CenterCrop(8)]),
        ("RandomCrop pads", [transforms.Resize(8), transforms.RandomCrop(8, padding=1)]),
        ("Pad isn't supported", [transforms.Resize(8), transforms.CenterCrop(8), transforms.Pad(1)]),
    ]:
        with pytest.raises(OptionError, match=f"{says}.*give torchvision's Resize"):
            sized_plan(transforms.Compose([*steps, *END]), SIZED, None)
