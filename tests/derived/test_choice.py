"""`prepare="auto"`: which recipes are exact, what is measured, and what follows from the numbers."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from streamload.derived.prepare.choice import Costs, Form, Room, choose, exact_recipes, measure
from streamload.derived.prepare.preparation import Preparation
from streamload.transforms import kernel
from streamload.transforms.decode import decode_jpeg_or_image
from streamload.transforms.plan import ImagePlan, KeepRatio, PlannedTransform, ShortSide, Squash, clip_plan
from tests.support.photographs import SIZES, photograph, transformed

LIMIT = 20_000_000
GB = 1_000_000_000
needs_kernel = pytest.mark.skipif(bool(kernel.why_not()), reason="resizes aren't to the bit")

AS_IT_IS = Form("", 100_000, 1400e-6)
RAW = Form("raw", 500_000, 200e-6)
RAW_224 = Form("raw-224", 200_000, 20e-6)
COSTS = Costs((AS_IT_IS, RAW, RAW_224), memory_seconds=0.2e-9, disk_seconds=1e-9)


def room(data: float = 10, cache: float = 100, memory: float = 100, processes: int = 1) -> Room:
    return Room(int(data * GB), int(cache * GB), int(memory * GB), processes)


def recipes_of(transform: object) -> list[str]:
    return [str(recipe) for recipe in exact_recipes(transform, LIMIT)]


@needs_kernel
def test_a_plan_that_begins_with_its_own_resize_can_have_that_done_in_advance() -> None:
    assert recipes_of(clip_plan(train=False, size=224)) == ["raw", "raw-224"]
    assert recipes_of(ImagePlan((96, 96), ShortSide(128))) == ["raw", "raw-128"]


@pytest.mark.parametrize(
    "transform",
    [
        clip_plan(train=True),
        ImagePlan((96, 96), ShortSide(128), by="bilinear"),
        ImagePlan((96, 96), ShortSide(128), on_tensors=True),
        ImagePlan((8, 8), ShortSide(8)),
        ImagePlan((96, 96), Squash((96, 96))),
        ImagePlan((96, 96), KeepRatio((96, 96), 0.0)),
        lambda image: image,
    ],
    ids=["random crop", "bilinear", "tensors", "too small", "squash", "ratio", "unknown"],
)
def test_of_any_other_transform_only_decoding_can_be_done_in_advance(transform: object) -> None:
    assert recipes_of(transform) == ["raw"]


@needs_kernel
@pytest.mark.parametrize(
    ("width", "height"), [*SIZES, (225, 224), (223, 400), (1, 700), (449, 448), (2000, 230)]
)
@pytest.mark.parametrize("size", [224, 97])
def test_exact_recipes_give_the_pixels_of_the_plan_to_the_bit(width: int, height: int, size: int) -> None:
    plan = clip_plan(train=False, size=size)
    data = jpeg(width, height)
    for as_bytes, dtype in ((True, torch.uint8), (False, torch.float32)):
        transform = PlannedTransform(plan, as_bytes)
        made = []
        for image in (data, *(recipe.prepare(data) for recipe in exact_recipes(plan, LIMIT))):
            assert image is not None
            made.append(torch.empty((3, size, size), dtype=dtype))
            transformed(transform, np.array(decode_jpeg_or_image(image)), made[-1])
        assert all(torch.equal(each, made[0]) for each in made[1:])


def test_the_cheapest_form_is_chosen_with_the_numbers_that_it_follows_from() -> None:
    answer = choose(COSTS, room())
    assert answer.chosen == "raw-224"
    for number in ("as it is 1,420 µs", "raw 300 µs", "raw-224 60 µs"):
        assert number in answer.why


def test_what_does_not_fit_into_the_cache_is_not_chosen() -> None:
    """Raw pixels take five times the bytes here, resized ones twice."""
    assert choose(COSTS, room(data=10, cache=21)).chosen == "raw-224"
    assert choose(Costs(COSTS.forms[:2], 0.2e-9, 1e-9), room(data=10, cache=49)).chosen == ""
    assert choose(Costs(COSTS.forms[:2], 0.2e-9, 1e-9), room(data=10, cache=51)).chosen == "raw"
    answer = choose(COSTS, room(data=10, cache=19))
    assert answer.chosen == ""
    assert "the cache takes" in answer.why


def test_what_has_to_come_from_a_slow_disk_is_computed_instead() -> None:
    """Half a megabyte takes 5 ms from a disk of 100 MB/s; from memory it is cheap."""
    slow = Costs((AS_IT_IS, RAW), memory_seconds=0.2e-9, disk_seconds=10e-9)
    assert choose(slow, room(memory=60)).chosen == "raw"
    assert choose(slow, room(memory=40)).chosen == ""


def test_processes_share_the_disk_and_not_the_processors() -> None:
    disk = Costs((AS_IT_IS, RAW), memory_seconds=0.2e-9, disk_seconds=0.5e-9)
    assert choose(disk, room(memory=0, processes=1)).chosen == "raw"
    assert choose(disk, room(memory=0, processes=16)).chosen == ""


def test_a_gain_of_less_than_half_is_not_worth_the_room() -> None:
    cheap = Form("", 10_000, 100e-6)
    for seconds, chosen in ((49e-6, "raw"), (52e-6, "")):
        costs = Costs((cheap, Form("raw", 10_000, seconds)), memory_seconds=0.0, disk_seconds=0.0)
        assert choose(costs, room()).chosen == chosen


def test_data_of_unknown_size_stays_as_it_is() -> None:
    answer = choose(COSTS, Room(None, 100 * GB, 100 * GB, 1))
    assert answer.chosen == ""
    assert "unknown" in answer.why


def jpeg(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(photograph(width, height)).save(out, "JPEG", quality=93)
    return out.getvalue()


def test_measuring_finds_what_the_forms_take_and_leaves_nothing(tmp_path: Path) -> None:
    recipes, image = [Preparation(), Preparation(64)], jpeg(640, 480)
    costs = measure([image], recipes, tmp_path)
    assert costs is not None
    assert [form.recipe for form in costs.forms] == ["", "raw", "raw-64"]
    as_it_is, raw, small = (form.image_bytes for form in costs.forms)
    assert (as_it_is, raw, small) == (
        len(image),
        640 * 480 * 3 + len(b"P6\n640 480\n255\n"),
        85 * 64 * 3 + len(b"P6\n85 64\n255\n"),
    )
    assert all(form.compute_seconds > 0 for form in costs.forms)
    assert costs.memory_seconds > 0 < costs.disk_seconds
    assert not os.listdir(tmp_path)


def test_what_cannot_be_decoded_does_not_count(tmp_path: Path) -> None:
    image = jpeg(640, 480)
    costs = measure([b"nothing", image], [Preparation()], tmp_path)
    assert costs is not None
    assert [form.image_bytes for form in costs.forms] == [len(image), 640 * 480 * 3 + 15]
    assert measure([b"nothing"], [Preparation()], tmp_path) is None


def test_a_disk_that_cannot_be_written_fails(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        measure([jpeg(64, 48)], [Preparation()], tmp_path / "nowhere")
