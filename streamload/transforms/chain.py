"""Reads chains of torchvision's, open_clip's and timm's functions (step I), without importing any of them.

A function is recognised by its class and module, if nobody has changed it. compile.py makes plans of chains.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from streamload.transforms import kernel
from streamload.transforms.plan import UNIT, Flip, Given, Grey, NotRecognised, Size, Statistics
from streamload.transforms.resize import Filter

TORCHVISION = "torchvision.transforms.transforms"
AUTOAUGMENT = "torchvision.transforms.autoaugment"
OPEN_CLIP = "open_clip.transform"
NAFLEX = "timm.data.naflex_transforms"
_TO_FLOATS = {
    (TORCHVISION, "ToTensor"),
    (OPEN_CLIP, "MaybeToTensor"),
    ("timm.data.transforms", "MaybeToTensor"),
}
TO_RGB = {
    (OPEN_CLIP, "MaybeConvertMode"),
    (OPEN_CLIP, "_convert_to_rgb"),
    ("clip.clip", "_convert_image_to_rgb"),
}
_KEEP_SIZE = {
    *itertools.product(
        [TORCHVISION],
        (
            "ColorJitter",
            "ElasticTransform",
            "GaussianBlur",
            "RandomAdjustSharpness",
            "RandomAffine",
            "RandomAutocontrast",
            "RandomEqualize",
            "RandomInvert",
            "RandomPerspective",
            "RandomPosterize",
            "RandomSolarize",
            "RandomVerticalFlip",
        ),
    ),
    *itertools.product([AUTOAUGMENT], ("AugMix", "AutoAugment", "RandAugment", "TrivialAugmentWide")),
    (OPEN_CLIP, "color_jitter"),
}
"""Functions from an RGB Pillow image to another one of the same size."""
_OF_SEVERAL = {(TORCHVISION, name) for name in ("Compose", "RandomApply", "RandomChoice", "RandomOrder")}


class Chain:
    """The functions of a chain in order, without conversions to RGB: images are RGB already."""

    def __init__(self, transform: Any):
        self._rest = [step for step in flat(transform) if name_of(step) not in TO_RGB]

    def next(self, read: Callable[[Any, tuple[str, str]], Any]) -> Any:
        """Return `read` of the next function and remove it; if None, keep it."""
        step = read(self._rest[0], name_of(self._rest[0])) if self._rest else None
        if step is not None:
            del self._rest[0]
        return step

    def all(self, read: Callable[[Any, tuple[str, str]], Any]) -> list[Any]:
        """Return `read` of the next functions, up to one that gives None."""
        return list(iter(lambda: self.next(read), None))

    def end(self) -> None:
        """Check that nothing is left.

        Raises:
            NotRecognised: a function is left.
        """
        if self._rest:
            raise NotRecognised(f"{shown(self._rest[0])} isn't supported, or not at this place")


def flat(transform: Any) -> Iterator[Any]:
    """Yield the functions of a chain, and of the chains in it."""
    if name_of(transform) == (TORCHVISION, "Compose"):
        for step in transform.transforms:
            yield from flat(step)
    else:
        yield transform


class AfterResize(NamedTuple):
    """Steps after the resizing, with the meaning that they have in a plan."""

    colour: tuple[Flip | Grey, ...]
    given: tuple[Given, ...]
    statistics: Statistics | None


def after_resize(chain: Chain, last: Callable[[Any, tuple[str, str]], Any] | None = None) -> AfterResize:
    """Read all functions that are left.

    Args:
        chain: after its resizing.
        last: reads the one after the tensor, if there may be one more.

    Raises:
        NotRecognised: one isn't supported, or not at its place.
    """
    after = chain.all(lambda step, name: (step, colour_step(step, name)) if _keeps_size(step, name) else None)
    statistics = _statistics(chain)
    if last is not None:
        chain.next(last)
    chain.end()
    colours = [colour for _, colour in after if colour is not None]
    if len(colours) == len(after):
        return AfterResize(tuple(colours), (), statistics)
    if kernel.why_not():
        unknown = next(step for step, colour in after if colour is None)
        raise NotRecognised(f"{shown(unknown)} needs Pillow's pixels to the bit, and {kernel.why_not()}")
    return AfterResize((), tuple(step for step, _ in after), statistics)


def colour_step(step: Any, name: tuple[str, str]) -> Flip | Grey | None:
    """Return what a function does to colours or sides, if it is one of those that are compiled.

    Args:
        step: the function.
        name: from `name_of`.
    """
    if name == (TORCHVISION, "RandomHorizontalFlip"):
        return Flip(float(step.p))
    if name == (TORCHVISION, "RandomGrayscale"):
        return Grey(float(step.p), "torch")
    if name == (TORCHVISION, "Grayscale") and step.num_output_channels == 3:
        return Grey(1.0, None)
    if name == (OPEN_CLIP, "gray_scale") and name_of(step.transf) == (TORCHVISION, "Grayscale"):
        return Grey(float(step.p), "python")
    return None


def _keeps_size(step: Any, name: tuple[str, str]) -> bool:
    """Return whether a function keeps the size of an RGB Pillow image."""
    if name in _OF_SEVERAL:
        return all(_keeps_size(inner, name_of(inner)) for inner in step.transforms)
    if name == (TORCHVISION, "RandomRotation"):
        return not step.expand
    return name in _KEEP_SIZE or colour_step(step, name) is not None


def _statistics(chain: Chain) -> Statistics | None:
    def read(step: Any, name: tuple[str, str]) -> str | None:
        if name in _TO_FLOATS:
            return "floats"
        return "levels" if name == (TORCHVISION, "PILToTensor") else None

    kind = chain.next(read)
    if kind is None:
        chain.end()
        raise NotRecognised("it doesn't end in a tensor")
    if kind == "levels":
        return None
    return chain.next(_normalise) or UNIT


def _normalise(step: Any, name: tuple[str, str]) -> Statistics | None:
    if name != (TORCHVISION, "Normalize"):
        return None
    mean, std = (tuple(map(float, values)) for values in (step.mean, step.std))
    mean, std = (values * (3 if len(values) == 1 else 1) for values in (mean, std))  # of all channels
    if len(mean) != 3 or len(std) != 3 or not all(std):
        raise NotRecognised(f"{shown(step)} isn't for three channels")
    return Statistics(mean, std)


def name_of(step: Any) -> tuple[str, str]:
    """Return module and name of a function or its class, if the module really has it by this name."""
    kind = step if hasattr(step, "__qualname__") else type(step)
    module, name = str(getattr(kind, "__module__", "")), str(getattr(kind, "__qualname__", ""))
    is_it = getattr(sys.modules.get(module), name, None) is kind
    attributes = getattr(step, "__dict__", {})
    changed = {"forward", "__call__", "get_params"} & attributes.keys()
    changed |= {hooks for hooks in ("_forward_hooks", "_forward_pre_hooks") if attributes.get(hooks)}
    return (module, name) if is_it and not changed else ("", "")


def filter_of(step: Any, interpolation: Any) -> Filter:
    """Return the filter of a resizing function by its interpolation mode.

    Raises:
        NotRecognised: another filter.
    """
    value = getattr(interpolation, "value", interpolation)
    if value == "bicubic":
        return "bicubic"
    if value == "bilinear":
        return "bilinear"
    raise NotRecognised(f"{shown(step)} resizes by {value}")


def size_of(size: Any) -> Size:
    """Return the height and width that a function is given, as one number or two.

    Raises:
        NotRecognised: something else.
    """
    if not isinstance(size, Sequence):
        return whole(size), whole(size)
    height, width = size if len(size) == 2 else (*size, *size)
    return whole(height), whole(width)


def whole(value: Any) -> int:
    """Return a number of pixels.

    Raises:
        NotRecognised: something else.
    """
    if not isinstance(value, int) or value < 1:
        raise NotRecognised(f"{value!r} isn't a number of pixels")
    return value


def shown(step: Any) -> str:
    """Return the name of a function or its class, for messages."""
    return getattr(step, "__name__", None) or type(step).__name__
