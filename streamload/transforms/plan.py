"""An image transform as data: crop or resize, colour, statistics (step I).

A plan represents a chain of functions on Pillow images, such as open_clip's. compile.py derives it from the
chain, execute.py runs it on pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image

from streamload.transforms.augment import CLIP_RATIO, CLIP_SCALE, Draws
from streamload.transforms.normalise import OPENAI_MEAN, OPENAI_STD, Channels
from streamload.transforms.resize import Filter

Size = tuple[int, int]
"""Height and width, in pixels."""
Given = Callable[[Image.Image], Image.Image]
"""A function from an RGB Pillow image to another one of the same size."""


class NotRecognised(Exception):
    """The reason why a transform runs as given."""


class Statistics(NamedTuple):
    """The statistics of (x / 255 − mean) / std."""

    mean: Channels
    std: Channels


UNIT = Statistics((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
"""Floats from 0 to 1."""
OPENAI = Statistics(OPENAI_MEAN, OPENAI_STD)


class Fit(Protocol):
    """The size to which an image is resized before the centre crop."""

    def resized(self, height: int, width: int) -> Size:
        """Return the resized size of an image of height × width."""
        ...


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """A random box of the image, resized to the size of the result: torchvision's RandomResizedCrop."""

    scale: tuple[float, float] = CLIP_SCALE
    ratio: tuple[float, float] = CLIP_RATIO


@dataclass(frozen=True, slots=True)
class ShortSide:
    """Resize the short side to this many pixels: torchvision's `Resize(size)`."""

    size: int

    def resized(self, height: int, width: int) -> Size:
        """Return the resized size of an image of height × width."""
        long = int(self.size * max(height, width) / min(height, width))
        return (long, self.size) if width <= height else (self.size, long)


@dataclass(frozen=True, slots=True)
class KeepRatio:
    """Scale both sides by one factor, that of the short (0.0) or the long one (1.0): ResizeKeepRatio."""

    size: Size
    longest: float

    def resized(self, height: int, width: int) -> Size:
        """Return the resized size of an image of height × width."""
        down, across = height / self.size[0], width / self.size[1]
        factor = max(down, across) * self.longest + min(down, across) * (1.0 - self.longest)
        return round(height / factor), round(width / factor)


@dataclass(frozen=True, slots=True)
class Squash:
    """Resize each side: torchvision's `Resize((height, width))`."""

    size: Size

    def resized(self, height: int, width: int) -> Size:
        """Return the resized size of an image of height × width."""
        return self.size


@dataclass(frozen=True, slots=True)
class Flip:
    """Flip with some probability: torchvision's RandomHorizontalFlip."""

    probability: float

    def is_drawn(self, draws: Draws) -> bool:
        """Draw whether it is done."""
        return draws.torch_rand() < _float32(self.probability)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Flip uint8[3, H, W]."""
        return image.flip(-1)


@dataclass(frozen=True, slots=True)
class Grey:
    """Pillow's luminance in all channels, with some probability.

    Attributes:
        drawn_by: the generator: "torch" as in torchvision, "python" as in open_clip; None: always grey.
    """

    probability: float
    drawn_by: Literal["torch", "python"] | None

    def is_drawn(self, draws: Draws) -> bool:
        """Draw whether it is done."""
        if self.drawn_by == "torch":
            return draws.torch_rand() < _float32(self.probability)
        return self.drawn_by is None or draws.python_random() < self.probability

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Make uint8[3, H, W] grey."""
        # Pillow's weights of red, green and blue, in 65,536ths, rounded.
        red, green, blue = image.int()
        level: torch.Tensor = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
        return level.to(torch.uint8).expand_as(image)


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """A transform of RGB pixels to an image of one size.

    Attributes:
        size: of the result.
        fit: the random crop, or the size before the centre crop.
        by: the filter of the resizing.
        fill: red, green and blue of the padding if the resized image is smaller than the result.
        colour: steps after the resizing, in order.
        given: functions that run as given after that; they need Pillow's pixels to the bit.
        statistics: of the float result; None: the result is uint8.
        rounds_down: round the offset of the centre crop down, as transformers does; torchvision rounds half
            to even.
        on_tensors: resize and normalise as torchvision does with uint8 tensors in place of Pillow images: by
            torch's kernel, rows first, and as (x − 255 mean) / (255 std).
    """

    size: Size
    fit: RandomCrop | Fit
    by: Filter = "bicubic"
    fill: tuple[int, int, int] = (0, 0, 0)
    colour: tuple[Flip | Grey, ...] = ()
    given: tuple[Given, ...] = ()
    statistics: Statistics | None = OPENAI
    rounds_down: bool = False
    on_tensors: bool = False

    @property
    def is_random(self) -> bool:
        """True if the steps that are known draw random numbers that matter."""
        drawn = [step for step in self.colour if isinstance(step, Flip) or step.drawn_by is not None]
        return isinstance(self.fit, RandomCrop) or any(0 < step.probability < 1 for step in drawn)


def clip_plan(train: bool, size: int = 224) -> ImagePlan:
    """Return open_clip's default: in training a random crop of most of the image, otherwise a centre crop."""
    return ImagePlan((size, size), RandomCrop() if train else ShortSide(size))


def _float32(value: float) -> float:
    """Round as torch does to compare with a float32."""
    return float(np.float32(value))
