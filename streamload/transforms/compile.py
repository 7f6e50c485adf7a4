"""Compiles chains of torchvision's and open_clip's functions to plans (step I).

A chain with an unknown function (chain.py) isn't compiled and runs as given. Some functions, such as colour
jitter, only need to keep the image size: they run as given within a plan.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from streamload.transforms import kernel
from streamload.transforms.chain import (
    AUTOAUGMENT,
    OPEN_CLIP,
    TO_RGB,
    TORCHVISION,
    Chain,
    after_resize,
    filter_of,
    flat,
    name_of,
    shown,
    size_of,
    whole,
)
from streamload.transforms.plan import (
    ImagePlan,
    KeepRatio,
    NotRecognised,
    RandomCrop,
    ShortSide,
    Size,
    Squash,
)
from streamload.transforms.processors import image_processor_of, plan_of
from streamload.transforms.resize import Filter

logger = logging.getLogger("streamload")


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
    chain = Chain(transform)
    size, fit, by, fill = _geometry(chain)
    return ImagePlan(size, fit, by, fill, *after_resize(chain))


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
    elif all(map(_sees_only_pixels, flat(transform))):
        with contextlib.suppress(NotRecognised):
            fit, by = Chain(transform).next(_resize) or (None, None)
    return fit if isinstance(fit, ShortSide) and by == "bicubic" and not kernel.why_not() else None


def _sees_only_pixels(step: Any) -> bool:
    """Return whether a function is torchvision's or open_clip's: these don't look at Pillow's `info`."""
    module, name = name_of(step)
    is_known = (
        module in {TORCHVISION, AUTOAUGMENT, *(module_name for module_name, _ in TO_RGB)} and name != "Lambda"
    )
    return is_known and all(map(_sees_only_pixels, getattr(step, "transforms", ())))


def _geometry(chain: Chain) -> tuple[Size, Any, Filter, tuple[int, int, int]]:
    crop = chain.next(_random_crop)
    if crop is not None:
        size, fit, by = crop
        return size, fit, by, (0, 0, 0)
    resize = chain.next(_resize)
    if resize is None:
        chain.end()
        raise NotRecognised("it doesn't resize")
    fit, by = resize
    cut = chain.next(_cut)
    if cut is not None:
        return cut[0], fit, by, cut[1]
    if isinstance(fit, Squash):
        return fit.size, fit, by, (0, 0, 0)
    raise NotRecognised("its images are of several sizes")


def _random_crop(step: Any, name: tuple[str, str]) -> tuple[Size, RandomCrop, Filter] | None:
    if name != (TORCHVISION, "RandomResizedCrop"):
        return None
    low, high = map(float, step.scale)
    narrow, wide = map(float, step.ratio)
    if not (0 < low <= high and 0 < narrow <= wide):
        raise NotRecognised(f"{shown(step)} has invalid bounds")
    return size_of(step.size), RandomCrop((low, high), (narrow, wide)), filter_of(step, step.interpolation)


def _resize(step: Any, name: tuple[str, str]) -> tuple[Any, Filter] | None:
    if name == (TORCHVISION, "Resize"):
        if step.max_size is not None:
            raise NotRecognised("Resize has a max_size")
        size = step.size
        if isinstance(size, Sequence) and len(size) == 1:
            (size,) = size
        fit = ShortSide(whole(size)) if not isinstance(size, Sequence) else Squash(size_of(size))
        return fit, filter_of(step, step.interpolation)
    if name == (OPEN_CLIP, "ResizeKeepRatio"):
        if step.random_scale_prob or step.random_aspect_prob:
            raise NotRecognised("ResizeKeepRatio has random sizes")
        return KeepRatio(size_of(step.size), float(step.longest)), filter_of(step, step.interpolation)
    return None


def _cut(step: Any, name: tuple[str, str]) -> tuple[Size, tuple[int, int, int]] | None:
    if name == (TORCHVISION, "CenterCrop"):
        return size_of(step.size), (0, 0, 0)
    if name == (OPEN_CLIP, "CenterCropOrPad"):
        fill = step.fill if isinstance(step.fill, Sequence) else (step.fill,) * 3
        if len(fill) != 3 or not all(isinstance(level, int) and 0 <= level < 256 for level in fill):
            raise NotRecognised(f"CenterCropOrPad fills with {step.fill!r}")
        red, green, blue = fill
        return size_of(step.size), (red, green, blue)
    return None
