"""transformers' image processors as transforms (step I): compiled if that is exact, otherwise run as given.

transformers isn't imported here. The arithmetic of a processor depends on its class and release, so a plan
replaces it only if both give the same bits for some test images.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from streamload.transforms import kernel
from streamload.transforms.decode import Pixels
from streamload.transforms.plan import (
    UNIT,
    Fit,
    ImagePlan,
    NotRecognised,
    PlannedTransform,
    RandomCrop,
    ShortSide,
    Size,
    Squash,
    Statistics,
)
from streamload.transforms.resize import Filter, Place

_KNOWN = re.compile(
    r"transformers\.models\.(bit|blip|chinese_clip|clip|deit|siglip|vit)\.image_processing_\w+:"
    r"(Bit|Blip|ChineseCLIP|CLIP|DeiT|Siglip|ViT)ImageProcessor(Pil|Fast)?"
)
"""Processors that only resize, crop and normalise, whatever the image."""
_FILTERS: dict[Any, Filter] = {2: "bilinear", "bilinear": "bilinear", 3: "bicubic", "bicubic": "bicubic"}
_PROBES = ((37, 52), (301, 227), (150, 403), (230, 229))
"""Heights and widths of the test images: enlarged and reduced, with odd and even margins to crop."""


def image_processor_of(transform: Any) -> Any | None:
    """Return the image processor that a transform is or contains, or None."""
    if _is_a(transform, "transformers.processing_utils", "ProcessorMixin"):
        transform = getattr(transform, "image_processor", None)
    is_one = _is_a(transform, "transformers.image_processing_base", "ImageProcessingMixin")
    return transform if is_one else None


def plan_of(processor: Any) -> ImagePlan:
    """Return the plan that gives an image processor's `pixel_values` to the bit.

    Raises:
        NotRecognised: it does something else, or isn't bit-identical here.
    """
    name = type(processor).__name__
    is_known = _KNOWN.fullmatch(f"{type(processor).__module__}:{type(processor).__qualname__}")
    if not is_known or any(map(callable, vars(processor).values())):
        raise NotRecognised(f"{name} isn't supported, or was changed")
    try:
        plan = _read(processor)
    except (AttributeError, TypeError, ValueError) as exc:  # attributes differ between releases
        raise NotRecognised(f"{name} isn't configured as expected: {exc}") from exc
    for candidate in (plan, replace(plan, on_tensors=True)):
        if _are_alike(processor, candidate):
            return candidate
    why = kernel.why_not() or "its arithmetic differs"
    raise NotRecognised(f"{name} would not be compiled to the bit: {why}")


class GivenProcessor:
    """An image processor as given: RGB Pillow image → tensors, `image` and any others."""

    def __init__(self, processor: Any):
        self._processor = processor

    def __call__(self, image: Image.Image) -> dict[str, Any]:
        """Process one image.

        Raises:
            TypeError: it doesn't return tensors with one row for an image.
        """
        values = {}
        for name, value in self._processor(image, return_tensors="pt").items():
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (1,):
                kind = list(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
                raise TypeError(
                    f"{type(self._processor).__name__} returned {name} {kind} for one image; expected "
                    f"tensors with one row. For other values use map_sample= and collate="
                )
            values["image" if name == "pixel_values" else name] = value[0]
        if "image" not in values:
            raise TypeError(
                f"{type(self._processor).__name__} returned {', '.join(values)}, but no pixel_values: call "
                f"it in map_sample="
            )
        return values


def _is_a(value: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _read(processor: Any) -> ImagePlan:
    """Read the plan from a processor's attributes."""

    def has(step: str) -> bool:
        return bool(getattr(processor, f"do_{step}", None))

    if not has("resize") or has("pad"):
        raise NotRecognised(f"{type(processor).__name__} doesn't resize, or pads")
    resample = processor.resample
    by = _FILTERS.get(getattr(resample, "value", resample))
    if by is None:
        raise NotRecognised(f"{type(processor).__name__} resizes by {resample}")
    fit, least = _fit(_sides(processor.size))
    size = _both(_sides(processor.crop_size)) if has("center_crop") else getattr(fit, "size", None)
    if not isinstance(size, tuple) or any(map(int.__gt__, size, least)):
        raise NotRecognised(f"{type(processor).__name__} makes images of several sizes, or pads")
    return ImagePlan(size, fit, by, statistics=_statistics(processor, has), rounds_down=True)


def _fit(sides: Mapping[str, int]) -> tuple[Fit, Size]:
    """Return the resizing, and the minimum size of its results."""
    if sides.keys() == {"shortest_edge"}:
        short = sides["shortest_edge"]
        return ShortSide(short), (short, short)
    size = _both(sides)
    return Squash(size), size


def _both(sides: Mapping[str, int]) -> Size:
    if sides.keys() != {"height", "width"}:
        raise NotRecognised(f"a size by {', '.join(sides)} isn't supported")
    return sides["height"], sides["width"]


def _sides(size: Any) -> dict[str, int]:
    """Return a size (a dict or transformers' own type) without None values."""
    return {name: int(value) for name, value in dict(size or {}).items() if value is not None}


def _statistics(processor: Any, has: Any) -> Statistics | None:
    if not has("rescale") and not has("normalize"):
        return None
    if not has("rescale"):
        raise NotRecognised(f"{type(processor).__name__} normalises without rescaling")
    if not has("normalize"):
        return UNIT
    mean, std = (
        tuple(map(float, values)) if isinstance(values, list | tuple) else (float(values),) * 3
        for values in (processor.image_mean, processor.image_std)
    )
    if len(mean) != 3 or len(std) != 3 or not all(std):
        raise NotRecognised(f"{type(processor).__name__} isn't for three channels")
    return Statistics(mean, std)


def _are_alike(processor: Any, plan: ImagePlan) -> bool:
    """Return whether both give the same bits for the test images."""
    planned, given = PlannedTransform(plan, as_bytes=False), GivenProcessor(processor)
    dtype = torch.uint8 if plan.statistics is None else torch.float32
    for pixels in _images(plan):
        try:
            expected = given(Image.fromarray(pixels))["image"]
        except Exception:  # any error will show with the first image of the training
            return False
        ours = torch.empty((3, *plan.size), dtype=dtype, device="cpu")
        out = ours[None] if plan.statistics is None else ours
        height, width, _ = pixels.shape
        planned.put(pixels, planned.draw(height, width, 0))(out=Place.of(out))
        if expected.dtype != dtype or not torch.equal(ours, expected):
            return False
    return True


def _images(plan: ImagePlan) -> Iterator[Pixels]:
    """Yield every level of each channel, not resized; then waves of several sizes."""
    assert not isinstance(plan.fit, RandomCrop)
    height, width = plan.fit.resized(*plan.size)
    yield (np.arange(height * width * 3) % 256).astype(np.uint8).reshape(height, width, 3)
    for height, width in _PROBES:
        down, across = np.mgrid[:height, :width]
        wave = np.stack(
            [across * 5 + down * 3, across * down // 7, across * across // 11 + down * 9], axis=-1
        )
        yield np.abs(wave % 510 - 255).astype(np.uint8)
