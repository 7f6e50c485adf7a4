"""timm's NaFlex transforms as plans, held to themselves: grids, boxes, pixels, and the batch of its collator.

These run in the environment that has open_clip, and timm with it.
"""

import dataclasses
import functools
import random
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.torchvision_stub import define_torchvision_schemas
from streamload.ipc import own_empty
from streamload.patches.compile import compile_patches, patch_plan_or_given
from streamload.patches.execute import PlannedPatches
from streamload.patches.grid import PatchCrop, patch_grid
from streamload.patches.images import PatchMemory
from streamload.patches.plan import GivenPatches, clip_patch_plan
from streamload.transforms import kernel
from streamload.transforms.augment import SeededGenerators
from streamload.transforms.plan import NotRecognised
from tests.support.photographs import photograph

define_torchvision_schemas()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    timm_data = pytest.importorskip(
        "timm.data", reason="timm is not in this environment; `make pytest-openclip` runs these tests"
    )
    from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
    from timm.data.naflex_dataset import NaFlexCollator
    from timm.data.naflex_transforms import (
        Patchify,
        RandomResizedCropToSequence,
        ResizeToSequence,
        get_image_size_for_seq,
    )
    from torchvision import transforms

PATCH = (16, 16)
SIZES = [(1, 1), (10, 1000), (1000, 10), (3, 2), (500, 375), (375, 500), (224, 224), (640, 480), (31, 517)]
STATISTICS = {"mean": OPENAI_DATASET_MEAN, "std": OPENAI_DATASET_STD}


def create(**options):
    """A factory such as open_clip's main branch makes of these: `factory(max_seq_len=…, patch_size=…)`."""
    return functools.partial(timm_data.create_transform, (3, 224, 224), naflex=True, **STATISTICS, **options)


TRAINING = {"is_training": True, "hflip": 0.0, "scale": (0.9, 1.0), "color_jitter": None, "re_mode": "pixel"}
"""What open_clip's main branch gives timm; it has no statistics, ratio and interpolation of its own."""
KNOWN = {
    "open_clip's training": create(**TRAINING, interpolation="bicubic"),
    "open_clip's evaluation": create(is_training=False, patchify=True, interpolation="bicubic"),
    "flipped": create(**TRAINING | {"hflip": 0.5, "scale": (0.1, 1.0)}, interpolation="bilinear"),
    "any filter": create(**TRAINING | {"ratio": (0.5, 2.0)}, interpolation="random"),
    "grey": create(**TRAINING, grayscale_prob=0.5, interpolation="bicubic"),
    "another ratio": create(**TRAINING | {"ratio": (1.2, 3.0)}, interpolation="bicubic"),
    "patchified": create(**TRAINING, patchify=True, interpolation="bicubic"),
}
JITTERED = {
    "jittered": create(**TRAINING | {"color_jitter": 0.4}, interpolation="bicubic"),
    "all of it": create(
        **TRAINING | {"color_jitter": (0.4, 0.4, 0.4, 0.1), "hflip": 0.5, "scale": (0.2, 1.0)},
        color_jitter_prob=0.8,
        grayscale_prob=0.3,
        gaussian_blur_prob=0.5,
        vflip=0.5,
        interpolation="random",
    ),
}
UNKNOWN = {
    "erased": create(**TRAINING, re_prob=0.5, interpolation="bicubic"),
    "augmented": create(**TRAINING, auto_augment="rand-m9", interpolation="bicubic"),
    "nearest": create(**TRAINING, interpolation="nearest"),
}


def sizes(count):
    numbers = np.random.default_rng(35)
    return (2 ** numbers.uniform(0, 12.5, (count, 2))).astype(int)


def test_the_grid_of_a_size_is_timms():
    numbers = random.Random(35)
    for height, width in [*SIZES, *sizes(10_000).tolist()]:
        seq_len, patch = (
            numbers.choice([1, 49, 128, 256, 576, 784, 1024]),
            numbers.choice([(16, 16), (14, 32)]),
        )
        most = numbers.choice([None, 0.3, 1.0, 2.5])
        _, (expected_height, expected_width) = get_image_size_for_seq(
            (height, width), patch, seq_len, max_ratio=most
        )
        grid = patch_grid(height, width, seq_len, patch, most)
        assert grid == (expected_height // patch[0], expected_width // patch[1]), (height, width)
        assert grid.rows * grid.columns <= seq_len


@pytest.mark.parametrize("scale", [(0.9, 1.0), (0.05, 0.3), (1.0, 1.0)])
@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (1.5, 3.0), (0.2, 0.7), (1.0, 1.0)])
def test_boxes_and_filters_are_timms_for_the_same_seed(scale, ratio):
    theirs = RandomResizedCropToSequence(PATCH, 256, scale, ratio)
    crop = PatchCrop(scale, ratio)
    for seed, (height, width) in enumerate([*SIZES, *sizes(300).tolist()]):
        random.seed(seed)
        box, size, _ = theirs.get_params(
            Image.new("L", (width, height)), scale, ratio, patch_h=16, patch_w=16, max_seq_len=256
        )
        ours = crop.draw(height, width, random.Random(seed))
        assert ours == tuple(box)
        grid = patch_grid(ours.height, ours.width, 256, PATCH)
        assert (grid.rows * 16, grid.columns * 16) == tuple(size)


def batch_of(plan, seq_len, images):
    """The images in a batch, by a plan."""
    planned = PlannedPatches(plan, seq_len, as_bytes=False)
    memory = PatchMemory(len(images), own_empty, seq_len, plan.patch_size, torch.float32)
    with SeededGenerators():
        for seed, (row, pixels) in enumerate(zip(memory.places, images, strict=True)):
            pixels = pixels.copy()
            planned.put(pixels, planned.draw(*pixels.shape[:2], seed))(out=row)
    return memory.values(len(images))


def batch_of_timms(transform, seq_len, images):
    """The same by timm's functions, as open_clip's main branch calls them."""
    patchify, made = Patchify(PATCH), []
    with SeededGenerators() as generators:
        for seed, pixels in enumerate(images):
            generators.seed(seed)
            value = transform(Image.fromarray(pixels))
            made.append((value if isinstance(value, dict) else patchify(value), 0))
    return NaFlexCollator(seq_len)(made)[0]


def assert_timms(ours, theirs):
    assert ours.keys() | {"seq_len"} == theirs.keys()
    assert ours["patches"].shape[1] == theirs["seq_len"]
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        if name == "patches" and kernel.why_not():  # two levels, at the smallest deviation
            assert (value - theirs[name]).abs().max() <= 2 / 255 / min(OPENAI_DATASET_STD)
        else:
            assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("seq_len", [16, 256, 1024])
@pytest.mark.parametrize("name", [*KNOWN, *JITTERED])
def test_a_compiled_chain_makes_the_batch_of_timms_collator(name, seq_len):
    if name in JITTERED and kernel.why_not():
        pytest.skip(kernel.why_not())
    transform = (KNOWN | JITTERED)[name](max_seq_len=seq_len, patch_size=PATCH)
    plan = compile_patches(seq_len, transform, PATCH)
    images = [photograph(*size, which=number % 5) for number, size in enumerate(SIZES)]
    assert_timms(batch_of(plan, seq_len, images), batch_of_timms(transform, seq_len, images))


def test_the_default_is_that_of_open_clips_main_branch():
    for train, name in ((True, "open_clip's training"), (False, "open_clip's evaluation")):
        plan = patch_plan_or_given(KNOWN[name], (128, 576), PATCH, True)
        # Its statistics come as float32 tensors: equal once they are rounded.
        expected = clip_patch_plan(train, PATCH)
        torch.testing.assert_close(
            torch.tensor(plan.statistics), torch.tensor(expected.statistics), rtol=0, atol=0
        )
        assert dataclasses.replace(plan, statistics=expected.statistics) == expected


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_chain_with_an_unknown_function_runs_as_given(name):
    given = patch_plan_or_given(UNKNOWN[name], (16, 256), PATCH, True)
    assert isinstance(given, GivenPatches)
    assert list(given.transforms) == [16, 256]
    assert given.transforms[16].transforms[0].max_seq_len == 16


def test_a_chain_for_other_patches_is_not_compiled():
    tail = [transforms.ToTensor()]
    for step in (
        ResizeToSequence(16, 128),
        ResizeToSequence(32, 256),
        ResizeToSequence(16, 256, max_ratio=1.0),
        ResizeToSequence(16, 256, divisible_by_patch=False),
        RandomResizedCropToSequence(16, 256, final_scale_range=(0.5, 1.0)),
        RandomResizedCropToSequence(16, 256, attempts=3),
        transforms.Resize((64, 64)),
    ):
        with pytest.raises(NotRecognised):
            compile_patches(256, transforms.Compose([step, *tail]), PATCH)
    known = ResizeToSequence(16, 256)
    compile_patches(256, transforms.Compose([known, *tail]), PATCH)
    for end in (
        [transforms.PILToTensor()],
        [*tail, Patchify(32)],
        [*tail, Patchify(16, channels_last=False)],
        [*tail, Patchify(16, flatten_patches=False)],
    ):
        with pytest.raises(NotRecognised):
            compile_patches(256, transforms.Compose([known, *end]), PATCH)
