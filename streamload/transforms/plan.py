"""An image transform as data: crop or resize, colour, statistics; and how it runs on pixels (step I).

A plan represents a chain of functions on Pillow images, such as open_clip's; compile.py derives it from the
chain. A function that can't be compiled runs as given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image

from streamload.errors import DecodeError
from streamload.transforms.augment import CLIP_RATIO, CLIP_SCALE, Box, Draws, RandomBox, SeededGenerators
from streamload.transforms.decode import Pixels
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS
from streamload.transforms.normalise import (
    OPENAI_MEAN,
    OPENAI_STD,
    Channels,
    normalise_into,
    normalise_levels_into,
)
from streamload.transforms.resize import (
    Filter,
    Place,
    empty,
    fits_kernel,
    goes_down_first,
    kernel_resizing,
    packed,
    resizing,
    resizing_tensor,
)
from streamload.transforms.resize import Put as Put

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


class Choices(NamedTuple):
    """The random choices for one image.

    Attributes:
        box: the part that is used; None: given by the plan.
        colour: whether each of the plan's colour steps is applied.
        seed: of all choices.
        torch_taken: how many numbers of torch's generator they took.
    """

    box: Box | None
    colour: tuple[bool, ...]
    seed: int
    torch_taken: int


class PlannedTransform:
    """Runs a plan on pixels, with the results of Pillow's resizing and torch's normalisation.

    To the bit where the kernel can be used, otherwise close to it (resize.py). About 190 µs for 500×375 →
    224 px; 360 where the kernel can't be used, and 290 to normalise. Deterministic in (pixels, choices);
    functions as given leave the global generators changed. One thread at a time.

    Args:
        plan: to run.
        as_bytes: leave out the normalisation.
    """

    def __init__(self, plan: ImagePlan, as_bytes: bool = True) -> None:
        self.plan = plan
        self._statistics = None if as_bytes else plan.statistics
        self._packed = None if self._statistics is None else packed(*self._statistics)
        self._normalise = normalise_levels_into if plan.on_tensors else normalise_into
        self._levels: torch.Tensor | None = None
        self._boxes = RandomBox(plan.fit.scale, plan.fit.ratio) if isinstance(plan.fit, RandomCrop) else None
        self._is_random = self._boxes is not None or bool(plan.colour)
        self._draws = Draws()
        self._generators = SeededGenerators()

    def draw(self, height: int, width: int, seed: int) -> Choices:
        """Make the random choices exactly as the functions of the original transform would.

        Args:
            height: of the image, in pixels.
            width: of the image, in pixels.
            seed: uint64 of sample and pass, with which the original's generators would be seeded.
        """
        if self._boxes is not None and not self.plan.colour:
            drawn = self._boxes.draw_seeded(height, width, seed)
            if drawn is not None:
                return Choices(drawn[0], (), seed, drawn[1])
        if self._is_random:
            self._draws.seed(seed)
        box = None if self._boxes is None else self._boxes.draw(height, width, self._draws)
        colour = tuple([step.is_drawn(self._draws) for step in self.plan.colour])
        return Choices(box, colour, seed, self._draws.torch_taken)

    def put(self, pixels: Pixels, choices: Choices) -> Put:
        """Return a function that transforms pixels, which may not be decoded yet.

        Args:
            pixels: uint8[H, W, 3], writable.
            choices: for an image of this size.

        Returns:
            A function that writes the image to the Place `out`. A Place without address costs 90 µs more.

        Raises:
            DecodeError: the image is so elongated that its short side would have no pixel.
        """
        plan = self.plan
        height, width, _ = pixels.shape
        box, size, part = fitted(plan, height, width, choices.box)
        is_all = not (plan.given or any(choices.colour)) and part[2:] == plan.size
        if plan.on_tensors:
            return functools.partial(
                self._finished, resizing_tensor(pixels, size, plan.by, part), part, choices
            )
        if is_all and self._packed is not None and fits_kernel(pixels, box):
            return kernel_resizing(pixels, box, size, plan.by, goes_down_first(box, size), self._packed, part)
        levels = resizing(pixels, box, size, plan.by, part)
        if is_all and self._statistics is None:
            return levels
        return functools.partial(self._finished, levels, part, choices)

    def _finished(self, put: Put, part: Box, choices: Choices, *, out: Place) -> None:
        """Pad, apply the colour steps that were drawn, and normalise, as far as the plan says."""
        plan = self.plan
        if self._levels is None:
            self._levels = empty(*plan.size)
        levels = self._levels
        if part[2:] == plan.size:
            put(out=Place.of(levels))
        else:
            put(out=Place.of(resized := empty(*part[2:])))
            levels.copy_(torch.tensor(plan.fill, dtype=torch.uint8, device="cpu").view(3, 1, 1))
            above, before = padding(plan, part)
            levels[:, :, above : above + part.height, before : before + part.width] = resized
        image = levels[0]
        for step, is_done in zip(plan.colour, choices.colour, strict=True):
            if is_done:
                image = step(image)
        if plan.given:
            image = self._as_given(image, choices)
        if self._statistics is None:
            out.tensor.copy_(image)
        else:
            self._normalise(image, out.tensor, *self._statistics)

    def _as_given(self, levels: torch.Tensor, choices: Choices) -> torch.Tensor:
        """Run the functions as given on uint8[3, H, W], with the random numbers that they would draw."""
        self._generators.seed(choices.seed, choices.torch_taken)
        return run_given(self.plan.given, levels)


class UserTransform:
    """Applies a user's function on RGB Pillow images to image files.

    Raises DecodeError if the image can't be decoded; errors of the function are passed on unchanged.
    """

    def __init__(
        self, function: Callable[[Image.Image], Any], most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
    ) -> None:
        self._function = function
        self._most_pixels = most_pixels

    def decoded(self, data: bytes | memoryview) -> Image.Image:
        """The image in a file."""
        from streamload.transforms.by_pillow import decode_to_pillow

        return decode_to_pillow(data, self._most_pixels)

    def __call__(self, image: Image.Image, generators: SeededGenerators, seed: int) -> Any:
        """Seed, and call the function.

        Args:
            image: which the function may keep.
            generators: entered by the caller, around the batch.
            seed: uint64 of sample and pass.
        """
        generators.seed(seed)
        return self._function(image)


def fitted(plan: ImagePlan, height: int, width: int, box: Box | None) -> tuple[Box, Size, Box]:
    """Return the box of an image to resize, its new size, and the part of that to use.

    Args:
        plan: that says so.
        height: of the image, in pixels.
        width: of the image, in pixels.
        box: that was drawn, with a RandomCrop of the image, else of the resized one; None: given by the plan.

    Raises:
        DecodeError: the image is so elongated that its short side would have no pixel.
    """
    if isinstance(plan.fit, RandomCrop):
        assert box is not None
        return box, plan.size, Box(0, 0, *plan.size)
    size = plan.fit.resized(height, width)
    if not all(size):
        raise DecodeError(f"image of {width}×{height} can't be resized to {size[1]}×{size[0]}")
    if box is not None:
        return Box(0, 0, height, width), size, box
    cut = _middle_rounded_down if plan.rounds_down else _middle
    (top, down), (left, across) = map(cut, size, plan.size)
    return Box(0, 0, height, width), size, Box(max(top, 0), max(left, 0), down, across)


def padding(plan: ImagePlan, part: Box) -> tuple[int, int]:
    """Return the rows above and the columns before an image that is smaller than the plan's size."""
    return (plan.size[0] - part.height) // 2, (plan.size[1] - part.width) // 2


def run_given(functions: Sequence[Given], levels: torch.Tensor) -> torch.Tensor:
    """Run functions of Pillow images on uint8[3, H, W]; the global generators are seeded.

    Raises:
        TypeError: the last one returned an image of another size or mode.
    """
    _, height, width = levels.shape
    image = Image.fromarray(levels.permute(1, 2, 0).numpy())
    for function in functions:
        image = function(image)
    if (image.mode, image.size) != ("RGB", (width, height)):
        raise TypeError(
            f"{functions[-1]} returned an image of {image.width}×{image.height} in {image.mode}, expected "
            f"{width}×{height} in RGB: use compile=False for a preprocess= that contains it"
        )
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _middle(length: int, size: int) -> tuple[int, int]:
    """Return start and length of the middle of a side; the start is negative if the side is too short.

    Rounds like torchvision's CenterCrop, which pads sides that are too short.
    """
    if length < size:
        return -((size - length) // 2), length
    return round((length - size) / 2), size


def _middle_rounded_down(length: int, size: int) -> tuple[int, int]:
    """Do the same with the rounding of transformers' image processors, for a side that is long enough."""
    return (length - size) // 2, size


def _float32(value: float) -> float:
    """Round as torch does to compare with a float32."""
    return float(np.float32(value))
