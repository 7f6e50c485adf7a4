"""Random boxes of an image (part of I); no pixel is touched."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from streamload.transforms.draws import Draws

CLIP_SCALE = (0.9, 1.0)
CLIP_RATIO = (3 / 4, 4 / 3)
_TRIES = 10
_NEARLY = 1.00001  # far more than float32 rounds off


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class RandomBox:
    """Boxes of random area and aspect ratio, those of torchvision's `RandomResizedCrop.get_params`.

    Args:
        scale: least and largest share of the area that a box has.
        ratio: least and largest width / height of a box.
    """

    def __init__(
        self, scale: tuple[float, float] = CLIP_SCALE, ratio: tuple[float, float] = CLIP_RATIO
    ) -> None:
        self._scale, self._ratio = scale, ratio
        low, high = torch.stack([torch.tensor(scale), torch.log(torch.tensor(ratio))]).double().T
        self._low, self._span = low.tolist(), (high - low).tolist()
        self._drawn = np.empty(2, np.float32)
        self._drawn_ratio = torch.from_numpy(self._drawn)[1:]

    def __reduce__(self) -> tuple[type[RandomBox], tuple[Any, ...]]:
        return RandomBox, (self._scale, self._ratio)

    def draw(self, height: int, width: int, draws: Draws) -> Box:
        """Draw the box for an image of this size."""
        area, most_across, most_down = (
            height * width,
            _NEARLY * (width + 0.5) ** 2,
            _NEARLY * (height + 0.5) ** 2,
        )
        for _ in range(_TRIES):
            share = draws.torch_rand() * self._span[0] + self._low[0]
            log_ratio = draws.torch_rand() * self._span[1] + self._low[1]
            ratio = math.exp(log_ratio)
            if area * share * ratio > most_across or area * share / ratio > most_down:
                continue  # too large, as most are, whatever float32 makes of it
            share, ratio = self._rounded(share, log_ratio)
            target = area * share
            box_width = round(math.sqrt(target * ratio))
            box_height = round(math.sqrt(target / ratio))
            if 0 < box_width <= width and 0 < box_height <= height:
                top = draws.torch_below(height - box_height + 1)
                return Box(top, draws.torch_below(width - box_width + 1), box_height, box_width)
        return self._central(height, width)

    def _rounded(self, share: float, log_ratio: float) -> tuple[float, float]:
        """The share of the area and the ratio as torch has them, in float32."""
        self._drawn[:] = share, log_ratio
        self._drawn_ratio.exp_()
        share, ratio = self._drawn.tolist()
        return share, ratio

    def _central(self, height: int, width: int) -> Box:
        low, high = self._ratio
        box_height, box_width = height, width
        if width / height < low:
            box_height = round(width / low)
        elif width / height > high:
            box_width = round(height * high)
        return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)
