"""Sizes of images by aspect ratio, and what a crop to each loses. Arithmetic, the same on all processors.

It only divides and compares floats, which every processor rounds alike; logarithms differ.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.errors import OptionError
from streamload.options.values import at_least

Sizes = tuple[tuple[int, int], ...]
"""Width and height of each, in pixels."""
FACTS = ("width", "height")
_LEAST_SHARE = 0.9
"""A size has this share of the pixels at least: so the defaults give SDXL's sizes (its appendix I)."""


def image_sizes(pixels: int = 1024**2, step: int = 64, longest: float = 4.0) -> list[tuple[int, int]]:
    """Return the sizes of about so many pixels, for `Images(sizes=…)`; the defaults are those of SDXL.

        Images(sizes=image_sizes(512**2, step=32, longest=2.0))

    Args:
        pixels: the most of a size; each has at least nine tenths of it.
        step: divides both sides, as that of a latent or a patch has to.
        longest: the long side ÷ the short one, at most.

    Returns:
        Width and height of each, the narrowest first.

    Raises:
        OptionError: a value that can't be used, or no size is like that.
    """
    at_least(1, pixels=pixels, step=step)
    sizes = [
        (width, height)
        for width in range(step, int((pixels * longest) ** 0.5) + 1, step)
        for height in range(pixels // width // step * step, 0, -step)
        if width * height >= _LEAST_SHARE * pixels and max(width, height) <= longest * min(width, height)
    ]
    if not sizes:
        raise OptionError(
            f"no size has {pixels:,} pixels or a tenth less, sides that {step} divides, and a ratio of at "
            f"most {longest:g}: give a smaller step= or a larger longest="
        )
    return sorted(sizes, key=lambda size: (size[0] / size[1], size))


def checked_sizes(option: Any) -> Sizes:
    """The sizes of `Images(sizes=…)`.

    Raises:
        OptionError: it is something else, or two sizes have one ratio: no image would get the second.
    """
    try:
        sizes = tuple((operator.index(width), operator.index(height)) for width, height in option)
    except (TypeError, ValueError):
        sizes = ()
    if not sizes or min(map(min, sizes)) < 1:
        raise OptionError(
            f"sizes={option!r:.100}; expected (width, height) of each size, in pixels: [(1024, 1024), (1216, "
            f"832)], or streamload.aspects.image_sizes(1024**2, step=64)"
        )
    if len({width / height for width, height in sizes}) < len(sizes):
        raise OptionError(f"sizes={option!r:.200} has an aspect ratio twice: give each ratio one size")
    return sizes


def ratios(facts: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Width ÷ height of images by their FACTS, NaN where unknown."""
    widths, heights = (facts[name] for name in FACTS)
    of_images: NDArray[np.float64] = np.full(len(widths), np.nan)
    np.divide(widths, heights, out=of_images, where=(widths > 0) & (heights > 0))
    return of_images


def losses(of_images: NDArray[np.float64], sizes: Sizes) -> NDArray[np.float64]:
    """The share of each image that a crop to each size loses: float64[images, sizes]; 0 where unknown.

    Args:
        of_images: their ratios.
        sizes: of which the one that loses least is the nearest by the logarithm of its ratio.
    """
    shares = of_images[:, None] / np.array([width / height for width, height in sizes])
    lost: NDArray[np.float64] = np.nan_to_num(1 - np.minimum(shares, 1 / shares))
    return lost
