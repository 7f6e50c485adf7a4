"""Crop and antialiased resize of images of unlike size, together, in few operations of torch on any device.

Integer arithmetic of Pillow (transforms/_avx2.c): weights in float64, rounded to 22 fractional bits, sums
rounded to uint8 after each of two passes, in Pillow's order. So pixels don't depend on the device, nor on
which images are resized together. A pass takes a table with one row for each line of pixels, and sums
weighted rows (F.embedding_bag): only the inputs that an output depends on are read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from streamload.transforms.augment import Box
from streamload.transforms.plan import ImagePlan, Size, padding
from streamload.transforms.resize import Filter, goes_down_first

Fit = tuple[Box, Size, Box]
"""The box of an image to resize, its new size, and the part of that to use; see execute.fitted."""

_RADIUS = {"bicubic": 2.0, "bilinear": 1.0}
_POINT = 22
"""Fractional bits of Pillow's weights."""
_TORCH_POINT, _TORCH_BITS = 21, 15
"""torch's uint8 kernel: most fractional bits, and most bits in all."""
_LOW_BITS = 11
_MOST_TAPS = 64
"""With at most so many inputs of an output, float32 sums of 8-bit levels by two-part weights are exact."""
_MOST_LEVELS = 24 << 20
"""Most levels of images that are resized together in a pass, each with up to 20 bytes of scratch memory."""


class Axis(NamedTuple):
    """One axis of an image that is resized.

    Attributes:
        start: of the input that is used, in pixels of the image.
        length: of the input that is used.
        offset: of the input that is used, in the whole input.
        whole: length of the whole input.
        resized: length of the whole output.
        first: output that is used.
        used: outputs, from that one on.
        before: outputs of padding.
    """

    start: int
    length: int
    offset: int
    whole: int
    resized: int
    first: int
    used: int
    before: int

    @property
    def scale(self) -> float:
        """Inputs for each output."""
        return self.whole / self.resized


class _Resizing(NamedTuple):
    """An image to resize, by two passes."""

    row: int
    pixels: torch.Tensor
    is_down_first: bool
    axes: tuple[Axis, Axis]
    """In the order of the passes."""


def resize_images(images: Sequence[torch.Tensor], fits: Sequence[Fit], plan: ImagePlan) -> torch.Tensor:
    """Crop, resize and pad images as a plan says.

    Args:
        images: uint8[H, W, 3] each, on one device; at least one.
        fits: of the images.
        plan: its size, filter and fill are used.

    Returns:
        uint8[N, height, width, 3].
    """
    device = images[0].device
    levels = torch.empty((len(images), *plan.size, 3), dtype=torch.uint8, device=device)
    tasks = [_task(row, *image, plan) for row, image in enumerate(zip(images, fits, strict=True))]
    for group in _groups(tasks, plan.size):
        rows = torch.tensor([task.row for task in group], device=device)
        levels.index_copy_(0, rows, _resized(group, plan))
    return levels


def _task(row: int, pixels: torch.Tensor, fit: Fit, plan: ImagePlan) -> _Resizing:
    box, size, part = fit
    above, before = padding(plan, part)
    radius = _RADIUS[plan.by]
    down = _axis(box.top, box.height, size[0], part.top, part.height, above, radius)
    across = _axis(box.left, box.width, size[1], part.left, part.width, before, radius)
    is_down_first = not plan.on_tensors and goes_down_first(box, size)
    return _Resizing(row, pixels, is_down_first, (down, across) if is_down_first else (across, down))


def _axis(start: int, whole: int, resized: int, first: int, count: int, before: int, radius: float) -> Axis:
    scale = whole / resized
    support = radius * max(scale, 1.0)
    offset = max(int((first + 0.5) * scale - support + 0.5), 0)
    stop = min(int((first + count - 0.5) * scale + support + 0.5), whole)
    return Axis(start + offset, stop - offset, offset, whole, resized, first, count, before)


def _groups(tasks: Sequence[_Resizing], size: Size) -> Iterator[list[_Resizing]]:
    """Group images whose passes have the same order, and lengths within a factor of two; few enough each."""

    def key(task: _Resizing) -> tuple[bool, int, int]:
        return task.is_down_first, *(axis.length.bit_length() for axis in task.axes)  # type: ignore[return-value]

    for (is_down_first, first, second), alike in itertools.groupby(sorted(tasks, key=key), key):
        outputs = size[0] if is_down_first else size[1]
        lines = max(1 << second, *size)
        count = max(1, _MOST_LEVELS // (3 * lines * max(1 << first, outputs)))
        while group := list(itertools.islice(alike, count)):
            yield group


def _resized(group: Sequence[_Resizing], plan: ImagePlan) -> torch.Tensor:
    """Return uint8[N, height, width, 3] of images whose passes have the same order."""
    count, is_down_first = len(group), group[0].is_down_first
    first, second = ([task.axes[number] for task in group] for number in (0, 1))
    outputs = plan.size if is_down_first else plan.size[::-1]
    lines = max(axis.length for axis in second)
    device = group[0].pixels.device

    table = torch.empty((sum(axis.length for axis in first), lines, 3), dtype=torch.uint8, device=device)
    starts = list(itertools.accumulate((axis.length for axis in first), initial=0))
    for task, start in zip(group, starts, strict=False):
        across_first = task.pixels if is_down_first else task.pixels.transpose(0, 1)
        (top, height, *_), (left, width, *_) = task.axes
        table[start : start + height, :width] = across_first[top : top + height, left : left + width]
    between = _pass(table.flatten(1), first, starts[:-1], outputs[0], plan)
    table = between.view(count, outputs[0], lines, 3).transpose(1, 2).reshape(count * lines, outputs[0] * 3)
    starts = list(range(0, count * lines, lines))
    levels = _pass(table, second, starts, outputs[1], plan).view(count, outputs[1], outputs[0], 3)
    return levels.transpose(1, 2) if is_down_first else levels


def _pass(
    table: torch.Tensor, axes: Sequence[Axis], starts: Sequence[int], outputs: int, plan: ImagePlan
) -> torch.Tensor:
    """Resize along one axis.

    Args:
        table: uint8[R, D], the lines of all images, one after the other.
        axes: of the images.
        starts: of the images' lines in the table.
        outputs: of each image.
        plan: its filter and fill are used.

    Returns:
        uint8[N, outputs, D].
    """
    device, count = table.device, len(axes)
    numbers = torch.tensor([(*axis, start) for axis, start in zip(axes, starts, strict=True)], device=device)
    _, length, offset, whole, resized, first, used, before, start = numbers[:, :, None].unbind(1)
    number = torch.arange(outputs, device=device) - before
    taps = max(2 * math.ceil(_RADIUS[plan.by] * max(axis.scale, 1.0)) + 1 for axis in axes)
    places, weights = _weights(plan.by, whole, resized, first + number, taps)
    is_used = (number >= 0) & (number < used)
    weights.masked_fill_(~is_used[..., None], 0.0)
    point: int | torch.Tensor = _POINT
    if plan.on_tensors:
        points = [_torch_point(plan.by, axis.whole, axis.resized) for axis in axes]
        point = torch.tensor(points, device=device)[:, None, None]
    fixed = _fixed(weights, point)
    # Inputs without weight may lie anywhere in the table.
    lines = start[..., None] + (places - offset[..., None]).clamp_(min=0).minimum(length[..., None] - 1)
    sums = _sums(table, lines, fixed)
    levels = ((sums + _half(point)) >> point).clamp_(0, 255).to(torch.uint8)
    if any(axis.used < outputs for axis in axes):
        fill = torch.tensor(plan.fill, dtype=torch.uint8, device=device)
        padded = levels.view(count, outputs, -1, 3)
        levels = torch.where(is_used[..., None, None], padded, fill).flatten(2)
    return levels


def _half(point: int | torch.Tensor) -> int | torch.Tensor:
    return 1 << (point - 1) if isinstance(point, int) else torch.ones_like(point) << (point - 1)


def _weights(
    kind: Filter, whole: torch.Tensor, resized: torch.Tensor, output: torch.Tensor, taps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Pillow's weights, in its order of operations: one at a time, as a fused one rounds otherwise.

    Args:
        kind: of the filter.
        whole: int64[N, 1], length of the whole input.
        resized: int64[N, 1], length of the whole output.
        output: int64[N, outputs].
        taps: inputs of an output, at most.

    Returns:
        The inputs, int64[N, outputs, taps], and their weights, float64; 0.0 for those that are too many.
    """
    scale = whole.double() / resized.double()
    reach = scale.clamp(min=1.0)
    support = reach * _RADIUS[kind]
    centre = (output.double() + 0.5) * scale
    begin = (centre - support + 0.5).long().clamp_(min=0)
    stop = torch.minimum((centre + support + 0.5).long(), whole)
    places = begin[..., None] + torch.arange(taps, device=whole.device)
    distance = (places.double() - centre[..., None] + 0.5) * reach.reciprocal()[..., None]
    weights = _filtered(kind, distance.abs_()).masked_fill_(places >= stop[..., None], 0.0)
    total = torch.zeros_like(centre)
    for tap in weights.unbind(-1):  # one after the other, as Pillow adds
        total += tap
    return places, weights / total.masked_fill_(total == 0.0, 1.0)[..., None]


def _filtered(kind: Filter, distance: torch.Tensor) -> torch.Tensor:
    """Return Keys' cubic with a = -0.5, or a triangle."""
    if kind == "bilinear":
        return (1.0 - distance).clamp_(min=0.0)
    near = ((distance * 1.5 - 2.5) * distance) * distance + 1.0
    far = (((distance - 5.0) * distance + 8.0) * distance - 4.0) * -0.5
    return torch.where(distance < 1.0, near, far.masked_fill_(distance >= 2.0, 0.0))


def _fixed(weights: torch.Tensor, point: int | torch.Tensor) -> torch.Tensor:
    """Round weights to so many fractional bits: whole numbers, as float64."""
    if isinstance(point, int):
        scaled = weights * float(1 << point)
    else:
        scaled = weights * torch.pow(2.0, point.double())
    return (torch.full_like(weights, 0.5).copysign_(weights) + scaled).trunc_()


def _sums(table: torch.Tensor, lines: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
    """Return the exact weighted sums of rows of uint8[R, D]: int32 or int64[N, outputs, D]."""
    count, outputs, taps = fixed.shape
    if taps > _MOST_TAPS:
        sums = _bags(table.double(), lines.view(-1, taps), fixed.view(-1, taps))
        return sums.long().view(count, outputs, -1)
    high = (fixed * 2.0**-_LOW_BITS).round_()
    parts = torch.stack((high, fixed - high * 2.0**_LOW_BITS)).float()
    sums = _bags(table.float(), lines.expand(2, -1, -1, -1).reshape(-1, taps), parts.view(-1, taps))
    highs, lows = sums.int().view(2, count, outputs, -1).unbind()
    return torch.add(lows, highs, alpha=1 << _LOW_BITS)


def _bags(table: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    sums: torch.Tensor = F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)
    return sums


@functools.lru_cache(4096)
def _torch_point(kind: Filter, whole: int, resized: int) -> int:
    """Return the fractional bits of the weights with which torch's uint8 kernel resizes this length."""
    outputs = torch.arange(min(resized, 1 << 16), device="cpu")[None]
    taps = 2 * math.ceil(_RADIUS[kind] * max(whole / resized, 1.0)) + 1
    input_length, output_length = (torch.tensor([[length]], device="cpu") for length in (whole, resized))
    largest = float(_weights(kind, input_length, output_length, outputs, taps)[1].max())
    for point in range(_TORCH_POINT + 1):
        if int(0.5 + largest * (1 << (point + 1))) >= 1 << _TORCH_BITS:
            return point
    return _TORCH_POINT + 1
