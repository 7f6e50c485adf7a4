"""Compiles chains of torchvision's and open_clip's functions to plans (step I), without importing either.

A function is recognised by its class and module. A chain with an unknown function isn't compiled and runs
as given. Some functions, such as colour jitter, only need to keep the image size: they run as given within
a plan.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from streamload.transforms import kernel
from streamload.transforms.plan import (
    UNIT,
    Flip,
    Grey,
    ImagePlan,
    KeepRatio,
    NotRecognised,
    RandomCrop,
    ShortSide,
    Size,
    Squash,
    Statistics,
)
from streamload.transforms.processors import image_processor_of, plan_of
from streamload.transforms.resize import Filter

logger = logging.getLogger("streamload")

_TORCHVISION = "torchvision.transforms.transforms"
_AUTOAUGMENT = "torchvision.transforms.autoaugment"
_OPEN_CLIP = "open_clip.transform"
_TO_RGB = {
    (_OPEN_CLIP, "MaybeConvertMode"),
    (_OPEN_CLIP, "_convert_to_rgb"),
    ("clip.clip", "_convert_image_to_rgb"),
}
_KEEP_SIZE = {
    *itertools.product(
        [_TORCHVISION],
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
    *itertools.product([_AUTOAUGMENT], ("AugMix", "AutoAugment", "RandAugment", "TrivialAugmentWide")),
    (_OPEN_CLIP, "color_jitter"),
}
"""Functions from an RGB Pillow image to another one of the same size."""
_OF_SEVERAL = {(_TORCHVISION, name) for name in ("Compose", "RandomApply", "RandomChoice", "RandomOrder")}


def plan_or_given(preprocess: Callable[[Any], Any], is_wanted: bool) -> ImagePlan | Callable[[Any], Any]:
    """The plan of a function on Pillow images, or the function itself if it isn't compiled; logs which."""
    if not is_wanted:
        return preprocess
    try:
        plan = compile_transform(preprocess)
    except NotRecognised as exc:
        logger.info("preprocess= runs as given: %s", exc)
        return preprocess
    logger.info("preprocess= is compiled: %s", plan)
    return plan


def compile_transform(transform: Any) -> ImagePlan:
    """Return the plan equivalent to a transform of RGB Pillow images.

    Supported are chains of: RandomResizedCrop; or Resize, or open_clip's ResizeKeepRatio, and CenterCrop or
    open_clip's CenterCropOrPad; bicubic or bilinear; conversion to RGB anywhere; then RandomHorizontalFlip,
    Grayscale, RandomGrayscale or open_clip's gray_scale; with Pillow's pixels to the bit (resize.py), any of
    torchvision's and open_clip's functions that keep an image's size, run as given; then ToTensor,
    open_clip's MaybeToTensor or PILToTensor; and Normalize. And image processors of transformers, where the
    plan gives the same bits (processors.py).

    Raises:
        NotRecognised: it contains something else.
    """
    processor = image_processor_of(transform)
    if processor is not None:
        return plan_of(processor)
    steps = _Steps(transform)
    size, fit, by, fill = _geometry(steps)
    after = steps.all(lambda step, name: (step, _colour(step, name)) if _keeps_size(step, name) else None)
    statistics = _statistics(steps)
    steps.end()
    known = [colour for _, colour in after if colour is not None]
    if len(known) == len(after):
        return ImagePlan(size, fit, by, fill, colour=tuple(known), statistics=statistics)
    if kernel.why_not():
        unknown = next(step for step, colour in after if colour is None)
        raise NotRecognised(f"{_shown(unknown)} needs Pillow's pixels to the bit, and {kernel.why_not()}")
    return ImagePlan(size, fit, by, fill, given=tuple(step for step, _ in after), statistics=statistics)


def leading_resize(transform: Any) -> ShortSide | None:
    """Return the resize with which a transform begins, if its pixels can be computed in advance to the bit.

    None: it begins otherwise, what follows may look at more than pixels, or the kernel isn't built.

    Args:
        transform: a plan, or a function of RGB Pillow images.
    """
    fit: Any = None
    by: Filter | None = None
    if isinstance(transform, ImagePlan):
        if not transform.on_tensors:
            fit, by = transform.fit, transform.by
    elif all(map(_sees_only_pixels, _flat(transform))):
        with contextlib.suppress(NotRecognised):
            fit, by = _Steps(transform).next(_resize) or (None, None)
    return fit if isinstance(fit, ShortSide) and by == "bicubic" and not kernel.why_not() else None


class _Steps:
    """The functions of a chain in order, without conversions to RGB: images are RGB already."""

    def __init__(self, transform: Any):
        self._rest = [step for step in _flat(transform) if _name(step) not in _TO_RGB]

    def next(self, read: Callable[[Any, tuple[str, str]], Any]) -> Any:
        """Return `read` of the next function and remove it; if None, keep it."""
        found = read(self._rest[0], _name(self._rest[0])) if self._rest else None
        if found is not None:
            del self._rest[0]
        return found

    def all(self, read: Callable[[Any, tuple[str, str]], Any]) -> list[Any]:
        """Return `read` of the next functions, up to one that gives None."""
        return list(iter(lambda: self.next(read), None))

    def end(self) -> None:
        """Check that nothing is left.

        Raises:
            NotRecognised: a function is left.
        """
        if self._rest:
            raise NotRecognised(f"{_shown(self._rest[0])} isn't supported, or not at this place")


def _flat(transform: Any) -> Iterator[Any]:
    if _name(transform) == (_TORCHVISION, "Compose"):
        for step in transform.transforms:
            yield from _flat(step)
    else:
        yield transform


def _sees_only_pixels(step: Any) -> bool:
    """Return whether a function is torchvision's or open_clip's: these don't look at Pillow's `info`."""
    module, name = _name(step)
    is_known = module in {_TORCHVISION, _AUTOAUGMENT, *(of for of, _ in _TO_RGB)} and name != "Lambda"
    return is_known and all(map(_sees_only_pixels, getattr(step, "transforms", ())))


def _geometry(steps: _Steps) -> tuple[Size, Any, Filter, tuple[int, int, int]]:
    crop = steps.next(_random_crop)
    if crop is not None:
        size, fit, by = crop
        return size, fit, by, (0, 0, 0)
    resize = steps.next(_resize)
    if resize is None:
        steps.end()
        raise NotRecognised("it doesn't resize")
    fit, by = resize
    cut = steps.next(_cut)
    if cut is not None:
        return cut[0], fit, by, cut[1]
    if isinstance(fit, Squash):
        return fit.size, fit, by, (0, 0, 0)
    raise NotRecognised("its images are of several sizes")


def _random_crop(step: Any, name: tuple[str, str]) -> tuple[Size, RandomCrop, Filter] | None:
    if name != (_TORCHVISION, "RandomResizedCrop"):
        return None
    low, high = map(float, step.scale)
    narrow, wide = map(float, step.ratio)
    if not (0 < low <= high and 0 < narrow <= wide):
        raise NotRecognised(f"{_shown(step)} has invalid bounds")
    return _size(step.size), RandomCrop((low, high), (narrow, wide)), _filter(step)


def _resize(step: Any, name: tuple[str, str]) -> tuple[Any, Filter] | None:
    if name == (_TORCHVISION, "Resize"):
        if step.max_size is not None:
            raise NotRecognised("Resize has a max_size")
        size = step.size
        if isinstance(size, Sequence) and len(size) == 1:
            (size,) = size
        fit = ShortSide(_whole(size)) if not isinstance(size, Sequence) else Squash(_size(size))
        return fit, _filter(step)
    if name == (_OPEN_CLIP, "ResizeKeepRatio"):
        if step.random_scale_prob or step.random_aspect_prob:
            raise NotRecognised("ResizeKeepRatio has random sizes")
        return KeepRatio(_size(step.size), float(step.longest)), _filter(step)
    return None


def _cut(step: Any, name: tuple[str, str]) -> tuple[Size, tuple[int, int, int]] | None:
    if name == (_TORCHVISION, "CenterCrop"):
        return _size(step.size), (0, 0, 0)
    if name == (_OPEN_CLIP, "CenterCropOrPad"):
        fill = step.fill if isinstance(step.fill, Sequence) else (step.fill,) * 3
        if len(fill) != 3 or not all(isinstance(level, int) and 0 <= level < 256 for level in fill):
            raise NotRecognised(f"CenterCropOrPad fills with {step.fill!r}")
        red, green, blue = fill
        return _size(step.size), (red, green, blue)
    return None


def _colour(step: Any, name: tuple[str, str]) -> Flip | Grey | None:
    if name == (_TORCHVISION, "RandomHorizontalFlip"):
        return Flip(float(step.p))
    if name == (_TORCHVISION, "RandomGrayscale"):
        return Grey(float(step.p), "torch")
    if name == (_TORCHVISION, "Grayscale") and step.num_output_channels == 3:
        return Grey(1.0, None)
    if name == (_OPEN_CLIP, "gray_scale") and _name(step.transf) == (_TORCHVISION, "Grayscale"):
        return Grey(float(step.p), "python")
    return None


def _keeps_size(step: Any, name: tuple[str, str]) -> bool:
    """Return whether a function keeps the size of an RGB Pillow image."""
    if name in _OF_SEVERAL:
        return all(_keeps_size(each, _name(each)) for each in step.transforms)
    if name == (_TORCHVISION, "RandomRotation"):
        return not step.expand
    return name in _KEEP_SIZE or _colour(step, name) is not None


def _statistics(steps: _Steps) -> Statistics | None:
    def read(step: Any, name: tuple[str, str]) -> str | None:
        if name in ((_TORCHVISION, "ToTensor"), (_OPEN_CLIP, "MaybeToTensor")):
            return "floats"
        return "levels" if name == (_TORCHVISION, "PILToTensor") else None

    kind = steps.next(read)
    if kind is None:
        steps.end()
        raise NotRecognised("it doesn't end in a tensor")
    if kind == "levels":
        return None
    return steps.next(_normalise) or UNIT


def _normalise(step: Any, name: tuple[str, str]) -> Statistics | None:
    if name != (_TORCHVISION, "Normalize"):
        return None
    mean, std = (tuple(map(float, values)) for values in (step.mean, step.std))
    if len(mean) != 3 or len(std) != 3 or not all(std):
        raise NotRecognised(f"{_shown(step)} isn't for three channels")
    return Statistics(mean, std)


def _name(step: Any) -> tuple[str, str]:
    """Return module and name of a function or its class, if the module really has it by this name."""
    kind = step if hasattr(step, "__qualname__") else type(step)
    module, name = str(getattr(kind, "__module__", "")), str(getattr(kind, "__qualname__", ""))
    is_it = getattr(sys.modules.get(module), name, None) is kind
    own = getattr(step, "__dict__", {})
    changed = {"forward", "__call__", "get_params"} & own.keys()
    changed |= {hooks for hooks in ("_forward_hooks", "_forward_pre_hooks") if own.get(hooks)}
    return (module, name) if is_it and not changed else ("", "")


def _filter(step: Any) -> Filter:
    value = getattr(step.interpolation, "value", step.interpolation)
    if value == "bicubic":
        return "bicubic"
    if value == "bilinear":
        return "bilinear"
    raise NotRecognised(f"{_shown(step)} resizes by {value}")


def _size(size: Any) -> Size:
    if not isinstance(size, Sequence):
        return _whole(size), _whole(size)
    height, width = size if len(size) == 2 else (*size, *size)
    return _whole(height), _whole(width)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise NotRecognised(f"{value!r} isn't a number of pixels")
    return value


def _shown(step: Any) -> str:
    return getattr(step, "__name__", None) or type(step).__name__
