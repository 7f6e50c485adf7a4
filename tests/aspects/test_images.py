"""Images cut to the size of their cell: Pillow's pixels, and what a batch says of them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from streamload.aspects.images import Cover, SizedPlan, SizedTransform, sized_plan
from streamload.batches.images import ImageAssembly
from streamload.batches.in_progress import Allocate
from streamload.errors import OptionError
from streamload.transforms import kernel
from streamload.transforms.augment import Draws
from streamload.transforms.normalise import normalise_batch, normalise_values
from streamload.transforms.plan import OPENAI, Flip, ImagePlan
from tests.support.photographs import SIZES, photograph, transformed

SIZED = ((64, 64), (96, 48), (48, 96), (72, 56))


def plan_of(cuts_at_random: bool, *colour: Any, rows: int | None = None) -> SizedPlan:
    fit = Cover((1, 1), 0.0, cuts_at_random)
    return SizedPlan(SIZED, ImagePlan((1, 1), fit, "bicubic", (0, 0, 0), colour), rows)


def covering(pixels: np.ndarray, width: int, height: int) -> Image.Image:
    """The image as small as it may be to cover a size, by Pillow."""
    factor = min(pixels.shape[1] / width, pixels.shape[0] / height)
    sides = round(pixels.shape[1] / factor), round(pixels.shape[0] / factor)
    return Image.fromarray(pixels).resize(sides, Image.Resampling.BICUBIC)


@pytest.mark.parametrize("mode", ["middle", "random"])
def test_pixels_are_those_of_pillows_resize_and_crop(mode: str) -> None:
    draws = Draws()
    for seed, (width, height) in enumerate([*SIZES, (64, 64), (48, 96), (31, 17)]):
        for number, (across, down) in enumerate(SIZED):
            pixels = photograph(width, height).copy()
            plan = plan_of(mode == "random").to(number)
            transform = SizedTransform(plan, as_bytes=True)
            made = torch.zeros(3, down, across, dtype=torch.uint8)
            transformed(transform, pixels, made, seed)
            resized = covering(pixels, across, down)
            left, top = round((resized.width - across) / 2), round((resized.height - down) / 2)
            draws.seed(seed)
            if mode == "random" and resized.size != (across, down):
                top, left = (
                    draws.torch_below(n + 1) for n in (resized.height - down, resized.width - across)
                )
            expected = np.asarray(resized.crop((left, top, left + across, top + down))).transpose(2, 0, 1)
            apart = np.abs(made.numpy().astype(int) - expected.astype(int))
            assert apart.max() <= (2 if kernel.why_not() else 0)
            choices = transform.draw(height, width, seed)
            assert transform.top_left(height, width, choices) == (top, left)


def test_the_corner_is_that_in_the_mirrored_image() -> None:
    pixels = photograph(500, 375).copy()
    for seed in range(8):
        transform = SizedTransform(plan_of(True, Flip(0.5)).to(2), as_bytes=True)
        made = torch.zeros(3, 96, 48, dtype=torch.uint8)
        transformed(transform, pixels, made, seed)
        choices = transform.draw(375, 500, seed)
        top, left = transform.top_left(375, 500, choices)
        whole = np.asarray(covering(pixels, 48, 96))
        whole = whole[:, ::-1] if choices.colour[0] else whole
        expected = whole[top : top + 96, left : left + 48].transpose(2, 0, 1)
        assert np.abs(made.numpy().astype(int) - expected.astype(int)).max() <= (2 if kernel.why_not() else 0)


def jpeg(width: int, height: int, file_format: str = "JPEG") -> memoryview:
    file = io.BytesIO()
    Image.fromarray(photograph(width, height)).save(file, file_format, quality=95)
    return memoryview(file.getvalue())


def plain_memory(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


FILES = [(jpeg(120, 90), 1), (jpeg(90, 120), 1), (jpeg(80, 80, "PNG"), 2), (jpeg(50, 300), 2)]


def batch_of(as_bytes: bool, rows: int | None, numbers: list[int], allocate: Allocate = plain_memory) -> Any:
    plan = pickle.loads(pickle.dumps(plan_of(True, Flip(0.5), rows=rows)))
    images = ImageAssembly(plan, as_bytes).batch_factory()(4, allocate)
    parsed = [
        images.parse(file, False, seed, (0, number))
        for seed, ((file, _), number) in enumerate(zip(FILES, numbers, strict=True))
    ]
    for each in parsed:
        images.add(each)
    return images


def test_a_batch_has_a_tensor_for_each_cell_and_one_where_there_is_one() -> None:
    values = batch_of(False, 2, [1, 1, 2, 2]).finish([])
    assert [values[f"image[{cell}]"].shape for cell in range(2)] == [(2, 3, 48, 96), (2, 3, 96, 48)]
    assert values["original_size"].tolist() == [[90, 120], [120, 90], [80, 80], [300, 50]]
    assert values["target_size"].tolist() == [[48, 96]] * 2 + [[96, 48]] * 2
    assert values["crop_top_left"].shape == (4, 2)
    whole = batch_of(False, None, [3, 3, 3, 3]).finish([])
    assert whole["image"].shape == (4, 3, 56, 72)
    assert whole["image"].dtype == torch.float32
    assert "image[0]" not in whole


@pytest.mark.parametrize("rows", [2, None])
def test_bytes_normalised_on_the_device_are_the_floats(rows: int | None) -> None:
    numbers = [1, 1, 2, 2] if rows else [0, 0, 0, 0]
    floats, levels = (batch_of(as_bytes, rows, numbers).finish([]) for as_bytes in (False, True))
    of_device = dict(levels)
    normalise_values(of_device, *OPENAI)
    for name in floats:
        if name.startswith("image"):
            assert levels[name].dtype == torch.uint8
            torch.testing.assert_close(of_device[name], floats[name])
            torch.testing.assert_close(of_device[name], normalise_batch(levels[name], *OPENAI))


def test_a_row_that_was_dropped_leaves_nothing() -> None:
    images = batch_of(True, 2, [1, 1, 2, 2])
    expected = images.finish([])
    again = batch_of(True, 2, [1, 1, 2, 2])
    for _ in range(2):
        again.drop_last()
    for seed in (2, 3):
        again.add(again.parse(FILES[seed][0], False, seed, (0, 2)))
    for name, value in again.finish([]).items():
        assert torch.equal(value, expected[name]), name


def test_the_bytes_of_a_row_are_those_of_the_largest_size() -> None:
    plan = plan_of(False)
    assert plan.row_bytes(as_bytes=True) == 96 * 48 * 3
    assert plan.row_bytes(as_bytes=False) == 96 * 48 * 3 * 4


def test_without_a_transform_images_are_cut_at_random_and_normalised_as_by_clip() -> None:
    plan = sized_plan(None, SIZED, 4)
    assert (plan.plan.fit, plan.statistics, plan.rows) == (Cover((1, 1), 0.0, True), OPENAI, 4)


def test_a_function_that_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"it doesn't end in a tensor|isn't supported.*give torchvision's Resize"
    ):
        sized_plan(np.asarray, SIZED, None)
