"""Colour steps of whole batches on a device, with Pillow's levels: flips, gray, and colour jitter.

Workers call jitter as given, on Pillow images (`ImagePlan.given`). Here its random numbers are drawn again
from a sample's choices, and the arithmetic is Pillow's (src/libImaging/Blend.c, Convert.c), in its precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from streamload.transforms.augment import Draws
from streamload.transforms.chain import OPEN_CLIP, TORCHVISION, colour_step, name_of, shown
from streamload.transforms.plan import Choices, Flip, Given, Grey, NotRecognised

_JITTER = (TORCHVISION, "ColorJitter")
_MOST_LEVELS = 4 << 20
"""Most levels of images that are changed together: hue needs up to 60 bytes of scratch memory for each."""


class ColourStep(Protocol):
    """A step for the images of a batch."""

    def draw(self, draws: Draws) -> Any:
        """Draw what it does to an image, as the function that it replaces would; None: nothing."""
        ...

    def apply(self, levels: torch.Tensor, drawn: Sequence[Any]) -> None:
        """Do it, in place.

        Args:
            levels: uint8[N, H, W, 3].
            drawn: of each image.
        """
        ...


class Whole(NamedTuple):
    """A step that is done to an image or isn't."""

    step: Flip | Grey

    def draw(self, draws: Draws) -> bool | None:
        """Draw if the step is done: True, or None."""
        return self.step.is_drawn(draws) or None

    def apply(self, levels: torch.Tensor, drawn: Sequence[bool | None]) -> None:
        """Do the step to the images for which it was drawn."""
        chosen = {row: 1.0 for row, is_done in enumerate(drawn) if is_done}
        _change(levels, chosen, lambda images, _: self.step(images.permute(3, 0, 1, 2)).permute(1, 2, 3, 0))


class _Adjustment(NamedTuple):
    """One of the four adjustments of an image.

    Attributes:
        kind: its number in torchvision: brightness, contrast, saturation, hue.
        factor: of it.
    """

    kind: int
    factor: float


class Jitter(NamedTuple):
    """torchvision's ColorJitter, or open_clip's, which does it with some probability.

    Attributes:
        ranges: of the factors of brightness, contrast, saturation and hue; None: not done.
        probability: drawn from Python's generator; None: always.
    """

    ranges: tuple[tuple[float, float] | None, ...]
    probability: float | None

    def draw(self, draws: Draws) -> list[_Adjustment] | None:
        """Draw an image's adjustments, in order. See ColourStep."""
        if self.probability is not None and draws.python_random() >= self.probability:
            return None
        order = list(range(4))  # as torch.randperm
        for place in range(3):
            other = place + draws.torch_below(4 - place)
            order[place], order[other] = order[other], order[place]
        factors = [None if bounds is None else _uniform(draws, *bounds) for bounds in self.ranges]
        return [_Adjustment(kind, factor) for kind in order if (factor := factors[kind]) is not None]

    def apply(self, levels: torch.Tensor, drawn: Sequence[list[_Adjustment] | None]) -> None:
        """Adjust images as drawn for each, one place in the order after another."""
        for place in range(4):
            for kind, adjust in enumerate(_ADJUST):
                factors = {
                    row: adjustments[place].factor
                    for row, adjustments in enumerate(drawn)
                    if adjustments and place < len(adjustments) and adjustments[place].kind == kind
                }
                _change(levels, factors, adjust)


def steps_of(functions: Sequence[Given]) -> list[ColourStep]:
    """Return the steps that do the same as functions of Pillow images.

    Raises:
        NotRecognised: one has no form on a device.
    """
    return [_step_of(function) for function in functions]


def draw_all(steps: Sequence[ColourStep], choices: Choices, draws: Draws) -> list[Any]:
    """Draw the steps of an image after the choices that were made for it."""
    draws.seed(choices.seed)
    draws.torch_ahead(choices.torch_taken)
    draws.skip(choices.torch_taken)
    return [step.draw(draws) for step in steps]


def _step_of(function: Any) -> ColourStep:
    name = name_of(function)
    simple = colour_step(function, name)
    if simple is not None:
        return Whole(simple)
    if name == _JITTER:
        return Jitter(_ranges(function), None)
    if name == (OPEN_CLIP, "color_jitter") and name_of(function.transf) == _JITTER:
        return Jitter(_ranges(function.transf), float(function.p))
    raise NotRecognised(shown(function))


def _ranges(jitter: Any) -> tuple[tuple[float, float] | None, ...]:
    bounds = (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    return tuple(None if bound is None else (float(bound[0]), float(bound[1])) for bound in bounds)


def _uniform(draws: Draws, low: float, high: float) -> float:
    """Return `float(torch.empty(1).uniform_(low, high))`."""
    start, stop = np.float32(low), np.float32(high)
    return float(np.float32(draws.torch_rand() * float(stop - start) + float(start)))


def _change(
    levels: torch.Tensor,
    factors: Mapping[int, float],
    function: Callable[[torch.Tensor, Sequence[float]], torch.Tensor],
) -> None:
    """Replace the images of some rows by what a function makes of them, a few at a time."""
    count = max(1, _MOST_LEVELS // levels[0].numel())
    rows = iter(factors)
    while some_rows := list(itertools.islice(rows, count)):
        places = torch.tensor(some_rows, device=levels.device)
        changed = function(levels.index_select(0, places), [factors[row] for row in some_rows])
        levels.index_copy_(0, places, changed)


def _brightness(images: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    return _blended(torch.zeros_like(images[:, :1, :1]), images, factors)


def _contrast(images: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    gray = _gray(images)
    mean = gray.flatten(1).sum(1, dtype=torch.int64).double() / gray[0].numel()
    return _blended((mean + 0.5).to(torch.uint8).view(-1, 1, 1, 1), images, factors)


def _saturation(images: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    return _blended(_gray(images), images, factors)


def _gray(images: torch.Tensor) -> torch.Tensor:
    """Return Pillow's luminance, uint8[N, H, W, 1]."""
    return Grey(1.0, None)(images.permute(3, 0, 1, 2))[:1].permute(1, 2, 3, 0)


def _blended(start: torch.Tensor, images: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    """Return Image.blend(start, image, factor): interpolated, extrapolated and clipped in float32."""
    factor = torch.tensor(factors, dtype=torch.float32, device=images.device).view(-1, 1, 1, 1)
    base = start.int()
    change = (images.int() - base).float() * factor
    return (base.float() + change).clamp_(0.0, 255.0).to(torch.uint8)


def _hue(images: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    turns = torch.tensor([int(factor * 255) % 256 for factor in factors], device=images.device)
    hue, saturation, value = _to_hsv(images)
    return _from_hsv((hue + turns.view(-1, 1, 1)) % 256, saturation, value)


def _to_hsv(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hue, saturation and value, int64[N, H, W] each, from 0 to 255: rgb2hsv_row of Convert.c."""
    channels = images.long()
    red, green, _ = channels.unbind(-1)
    most, least = channels.amax(-1), channels.amin(-1)
    spread = (most - least).clamp_(min=1).float()
    from_red, from_green, from_blue = ((most[..., None] - channels).float() / spread[..., None]).unbind(-1)
    wide_red, wide_green, wide_blue = from_red.double(), from_green.double(), from_blue.double()
    if_red = from_blue - from_green
    if_green = (2.0 + wide_red - wide_blue).float()
    if_blue = (4.0 + wide_green - wide_red).float()
    sixths = torch.where(red == most, if_red, torch.where(green == most, if_green, if_blue))
    turn = torch.fmod(sixths.double() / 6.0 + 1.0, 1.0).float()
    share = spread / most.clamp(min=1).float()
    is_gray = most == least
    hue = (turn.double() * 255.0).long().clamp_(0, 255).masked_fill_(is_gray, 0)
    return hue, (share.double() * 255.0).long().clamp_(0, 255).masked_fill_(is_gray, 0), most


def _from_hsv(hue: torch.Tensor, saturation: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return uint8[N, H, W, 3]: hsv2rgb of Convert.c."""
    sixths = hue.double() * 6.0 / 255.0
    sector = sixths.floor()
    part, share = (sixths - sector).float(), (saturation.double() / 255.0).float()
    full = value.double()
    low = _rounded(full * (1.0 - share.double()))
    falling = _rounded(full * (1.0 - (share * part).double()))
    rising = _rounded(full * (1.0 - share.double() * (1.0 - part.double())))
    top = value
    red = (top, falling, low, low, rising, top)
    green = (rising, top, top, falling, low, low)
    blue = (low, low, rising, top, top, falling)
    number = (sector.long() % 6)[None]
    channels = [torch.stack(levels).gather(0, number)[0] for levels in (red, green, blue)]
    rgb = torch.stack(channels, -1)
    return torch.where(saturation[..., None] == 0, value[..., None], rgb).clamp_(0, 255).to(torch.uint8)


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """Round positive values half up, as C's round()."""
    down = values.floor()
    return down.long() + (values - down >= 0.5)


_ADJUST: Sequence[Callable[[torch.Tensor, Sequence[float]], torch.Tensor]] = (
    _brightness,
    _contrast,
    _saturation,
    _hue,
)
