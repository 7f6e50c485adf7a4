"""Compiles chains of timm's functions to patches, as transforms/compile.py does those to images (step I)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamload.errors import OptionError
from streamload.patches.grid import PatchCrop
from streamload.patches.plan import GivenPatches, PatchPlan, clip_patch_plan
from streamload.transforms.chain import NAFLEX, Chain, after_resize, filter_of, shown, size_of
from streamload.transforms.plan import NotRecognised, Size
from streamload.transforms.resize import Filter

if TYPE_CHECKING:
    from streamload.extension import LoaderOptions

logger = logging.getLogger("streamload")


def patch_transform(options: LoaderOptions, is_compiled: bool) -> PatchPlan | GivenPatches:
    """The way in which a loader makes images into patches.

    Args:
        options: of the loader, `LoaderOptions`, with patches.
        is_compiled: whether to compile the transform, if that is possible.

    Raises:
        OptionError: preprocess= doesn't make a transform for a number of patches.
    """
    patches = options.images.patches
    assert patches is not None
    if options.preprocess is None:
        return replace(clip_patch_plan(options.train, patches.sides), max_ratio=patches.max_ratio)
    lengths = patches.lengths(options.train, options.seed).lengths
    try:
        transform = patch_plan_or_given(options.preprocess, lengths, patches.sides, is_compiled)
    except TypeError as exc:
        raise OptionError(
            f"with patches=, preprocess= is a function that returns the transform for a number of "
            f"patches: preprocess(max_seq_len=…, patch_size=…), as in open_clip's main branch, or "
            f"functools.partial(timm.data.create_transform, naflex=True, …); it failed: {exc}"
        ) from exc
    if patches.max_ratio is None:
        return transform
    if isinstance(transform, PatchPlan):
        return replace(transform, max_ratio=patches.max_ratio)
    raise OptionError("max_ratio= is for a compiled transform: this one runs as given, and resizes by itself")


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
