"""What an image transform does, as data: crop or resize, colour, statistics (part of I).

A plan stands for a chain of functions on Pillow images, open_clip's for one. `compile.py` reads it off such
a chain, `execute.py` carries it out on pixels.
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
"""A function from an RGB Pillow image to another one of its size."""


class NotRecognised(Exception):
    """Why a transform runs as given."""


class Statistics(NamedTuple):
    """What floats are normalised by: (x / 255 − mean) / std."""

    mean: Channels
    std: Channels


UNIT = Statistics((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
"""Floats from 0 to 1."""
OPENAI = Statistics(OPENAI_MEAN, OPENAI_STD)


class Fit(Protocol):
    """How large an image is made, before the middle of it is cut out."""

    def resized(self, height: int, width: int) -> Size:
        """The size of an image of height × width, resized."""
        ...


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """A random box of the image, resized to the size of the result: torchvision's RandomResizedCrop."""

    scale: tuple[float, float] = CLIP_SCALE
    ratio: tuple[float, float] = CLIP_RATIO


@dataclass(frozen=True, slots=True)
class ShortSide:
    """The short side gets this many pixels: torchvision's `Resize(size)`."""

    size: int

    def resized(self, height: int, width: int) -> Size:
        """See Fit."""
        long = int(self.size * max(height, width) / min(height, width))
        return (long, self.size) if width <= height else (self.size, long)


@dataclass(frozen=True, slots=True)
class KeepRatio:
    """One factor for both sides, which the short (0.0) or the long one (1.0) needs: ResizeKeepRatio."""

    size: Size
    longest: float

    def resized(self, height: int, width: int) -> Size:
        """See Fit."""
        down, across = height / self.size[0], width / self.size[1]
        factor = max(down, across) * self.longest + min(down, across) * (1.0 - self.longest)
        return round(height / factor), round(width / factor)


@dataclass(frozen=True, slots=True)
class Squash:
    """Each side as given: torchvision's `Resize((height, width))`."""

    size: Size

    def resized(self, height: int, width: int) -> Size:
        """See Fit."""
        return self.size


@dataclass(frozen=True, slots=True)
class Flip:
    """Left for right with some probability: torchvision's RandomHorizontalFlip."""

    probability: float

    def is_drawn(self, draws: Draws) -> bool:
        """Draw whether it is done."""
        return draws.torch_rand() < _float32(self.probability)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """uint8[3, H, W] → the same, flipped."""
        return image.flip(-1)


@dataclass(frozen=True, slots=True)
class Grey:
    """Pillow's luminance in all channels, with some probability.

    Attributes:
        drawn_by: "torch" as torchvision's RandomGrayscale, "python" as open_clip's; None: always.
    """

    probability: float
    drawn_by: Literal["torch", "python"] | None

    def is_drawn(self, draws: Draws) -> bool:
        """Draw whether it is done."""
        if self.drawn_by == "torch":
            return draws.torch_rand() < _float32(self.probability)
        return self.drawn_by is None or draws.python_random() < self.probability

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """uint8[3, H, W] → the same, grey."""
        # Pillow's own weights of red, green and blue, in 65,536ths, rounded.
        red, green, blue = image.int()
        level: torch.Tensor = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
        return level.to(torch.uint8).expand_as(image)


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """A transform of RGB pixels to an image of one size.

    Attributes:
        size: of the result.
        fit: the random box, or how large the image is made; of that the middle is cut out.
        by: the filter of the resizing.
        fill: red, green and blue where the resized image is smaller than the result.
        colour: what follows, in order.
        given: functions that run as they are behind all that; where there are any, pixels have to be Pillow's
            to the bit.
        statistics: of the floats that come of it; None leaves levels of uint8.
        rounds_down: where the middle is cut out of an odd rest, as by transformers; torchvision rounds half
            to even.
        on_tensors: resize and normalise as torchvision does with tensors of uint8 in place of Pillow images:
            by torch's kernel, rows first, and as (x − 255 mean) / (255 std).
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


def clip_plan(train: bool, size: int = 224) -> ImagePlan:
    """open_clip's own default: in training a box of most of the image, else the middle square of it."""
    return ImagePlan((size, size), RandomCrop() if train else ShortSide(size))


def _float32(value: float) -> float:
    """As torch has it when it compares with a float32."""
    return float(np.float32(value))
