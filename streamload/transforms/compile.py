"""Compiles chains of torchvision's, open_clip's and timm's functions to plans (step I).

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
    NAFLEX,
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
from streamload.transforms.patch_grid import PatchCrop
from streamload.transforms.patches import GivenPatches
from streamload.transforms.plan import (
    ImagePlan,
    KeepRatio,
    NotRecognised,
    PatchPlan,
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


def patch_plan_or_given(
    factory: Callable[..., Any], seq_lens: Sequence[int], patch_size: Size, is_wanted: bool
) -> PatchPlan | GivenPatches:
    """The one plan of the functions that a factory makes for each sequence length, or these; logs which.

    Raises:
        TypeError: the factory isn't one.
    """
    by_length = {length: factory(max_seq_len=length, patch_size=patch_size) for length in seq_lens}
    given = GivenPatches(patch_size, by_length)
    if not is_wanted:
        return given
    try:
        plan, *others = [compile_patches(length, by_length[length], patch_size) for length in seq_lens]
        if any(other != plan for other in others):
            raise NotRecognised("it depends on the number of patches in more than the size")
    except NotRecognised as exc:
        logger.info("preprocess= runs as given: %s", exc)
        return given
    logger.info("preprocess= is compiled: %s", plan)
    return plan


def compile_patches(seq_len: int, transform: Any, patch_size: Size) -> PatchPlan:
    """Return the plan equivalent to a transform of RGB Pillow images to at most `seq_len` patches.

    Supported are chains of timm's RandomResizedCropToSequence or ResizeToSequence, and then as for
    `compile_transform`, with Patchify at the end or without.

    Raises:
        NotRecognised: it contains something else.
    """
    chain = Chain(transform)
    to_patches = chain.next(lambda step, name: _to_sequence(step, name, seq_len, patch_size))
    if to_patches is None:
        chain.end()
        raise NotRecognised("it doesn't resize")
    after = after_resize(chain, lambda step, name: _patchify(step, name, patch_size))
    if after.statistics is None:
        raise NotRecognised("its patches aren't floats")
    crop, by = to_patches
    return PatchPlan(patch_size, crop, by, after.colour, after.given, after.statistics)


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


def _to_sequence(
    step: Any, name: tuple[str, str], seq_len: int, patch_size: Size
) -> tuple[PatchCrop | None, tuple[Filter, ...]] | None:
    if name == (NAFLEX, "RandomResizedCropToSequence"):
        sizes = step.patch_h, step.patch_w
        low, high, narrow, wide = map(float, (*step.scale, *step.ratio))
        crop = PatchCrop((low, high), (narrow, wide))
        usual = (
            step.final_scale_range is None and step.attempts == 10 and 0 < low <= high and 0 < narrow <= wide
        )
    elif name == (NAFLEX, "ResizeToSequence"):
        sizes, crop, usual = size_of(step.patch_size), None, True
    else:
        return None
    if not usual or step.max_ratio is not None or not step.divisible_by_patch:
        raise NotRecognised(f"{shown(step)} has other options than timm's create_transform gives it")
    if (step.max_seq_len, *sizes) != (seq_len, *patch_size):
        raise NotRecognised(f"{shown(step)} makes {step.max_seq_len} patches of {sizes}, not {seq_len}")
    modes = step.interpolation if isinstance(step.interpolation, Sequence) else (step.interpolation,)
    return crop, tuple(filter_of(step, mode) for mode in modes)


def _patchify(step: Any, name: tuple[str, str], patch_size: Size) -> bool | None:
    if name != (NAFLEX, "Patchify"):
        return None
    if not step.flatten_patches or not step.channels_last or size_of(step.patch_size) != patch_size:
        raise NotRecognised(f"{shown(step)} makes patches of another form")
    return True


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
