"""open_clip's and torchvision's transforms as plans, held to themselves on Pillow images.

These run in the environment that has open_clip.
"""

import logging
import random
import subprocess
import sys
import warnings

import pytest
import torch
from PIL import Image

from benchmarks.torchvision_stub import define_torchvision_schemas
from examples.photograph_shards import write_photograph_shards
from streamload.derived.prepare import decision
from streamload.derived.prepare.choice import Costs, Form
from streamload.errors import OptionError
from streamload.transforms import kernel
from streamload.transforms.augment import SeededGenerators
from streamload.transforms.compile import compile_transform, leading_resize
from streamload.transforms.normalise import normalise_into
from streamload.transforms.plan import OPENAI, NotRecognised, PlannedTransform, ShortSide, clip_plan
from tests.support import flat
from tests.support.photographs import SIZES, photograph, transformed

define_torchvision_schemas()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    open_clip = pytest.importorskip(
        "open_clip", reason="open_clip is not in this environment; `make pytest-openclip` runs these tests"
    )
    from open_clip.transform import AugmentationCfg, CenterCropOrPad, image_transform
    from torchvision import transforms
    from torchvision.transforms import InterpolationMode

BICUBIC = InterpolationMode.BICUBIC
SIGLIP = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def open_clips(size, *, is_train, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options that it has used
        return image_transform(size, is_train=is_train, **options)


def chain(*steps):
    return transforms.Compose([*steps, transforms.ToTensor()])


def colour_of(*steps, size=(96, 128)):
    crop = transforms.RandomResizedCrop(size, scale=(0.3, 1.0), interpolation=BICUBIC)
    return chain(crop, *steps)


KNOWN = {
    "open_clip's training": open_clips(224, is_train=True),
    "one with small crops": open_clips(96, is_train=True, aug_cfg={"scale": (0.08, 1.0)}),
    "not square": open_clips((160, 96), is_train=True),
    "SigLIP's statistics": open_clips(256, is_train=True, **SIGLIP),
    "some grey": open_clips(64, is_train=True, aug_cfg=AugmentationCfg(gray_scale_prob=0.4)),
    "shortest": open_clips(224, is_train=False),
    "shortest, bilinear": open_clips(224, is_train=False, interpolation="bilinear"),
    "shortest, not square": open_clips((160, 96), is_train=False),
    "longest": open_clips(224, is_train=False, resize_mode="longest", fill_color=127),
    "longest, odd": open_clips((95, 161), is_train=False, resize_mode="longest"),
    "squash": open_clips(384, is_train=False, resize_mode="squash", **SIGLIP),
    "flipped": colour_of(transforms.RandomHorizontalFlip(0.7)),
    "flipped and grey": colour_of(transforms.RandomHorizontalFlip(), transforms.RandomGrayscale(0.5)),
    "grey": colour_of(transforms.Grayscale(3)),
    "one value for all channels": transforms.Compose(
        [transforms.Resize((50, 70), BICUBIC), transforms.ToTensor(), transforms.Normalize([0.5], [0.25])]
    ),
    "imagenet's": chain(transforms.Resize(256), transforms.CenterCrop(224)),
    "nested": chain(transforms.Compose([transforms.Resize([80], BICUBIC), transforms.CenterCrop([100])])),
    "levels": transforms.Compose([transforms.Resize((50, 70), BICUBIC), transforms.PILToTensor()]),
}  # fmt: skip

JITTER = {"color_jitter": (0.4, 0.4, 0.4, 0.1), "color_jitter_prob": 0.8, "gray_scale_prob": 0.2}
GIVEN = {
    "jittered": colour_of(transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)),
    "open_clip's jitter": open_clips(64, is_train=True, aug_cfg=JITTER),
    "flipped, now and then jittered, and grey": colour_of(
        transforms.RandomHorizontalFlip(),
        transforms.RandomApply([transforms.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8),
        transforms.RandomGrayscale(0.2),
    ),
    "blurred": colour_of(transforms.RandomApply([transforms.GaussianBlur(5)]), transforms.RandomGrayscale()),
    "augmented": colour_of(transforms.RandAugment()),
    "trivially": colour_of(transforms.TrivialAugmentWide()),
    "by a policy": colour_of(transforms.AutoAugment()),
    "mixed": colour_of(transforms.AugMix()),
    "one or the other": colour_of(
        transforms.RandomChoice([transforms.RandomSolarize(128), transforms.RandomPosterize(3)]),
        transforms.RandomOrder([transforms.RandomInvert(), transforms.RandomEqualize()]),
    ),
    "turned": colour_of(transforms.RandomRotation(30), transforms.RandomVerticalFlip()),
    "bent": colour_of(transforms.RandomAffine(10, (0.1, 0.1)), transforms.RandomPerspective()),
    "evaluated jittered": chain(
        transforms.Resize(80), transforms.CenterCrop(72), transforms.ColorJitter(0.5)
    ),
    "with a frame": transforms.Compose(
        [*open_clips(96, is_train=False, resize_mode="longest").transforms[:2], transforms.RandomInvert(0.5),
         transforms.ToTensor()]
    ),
    "levels, sharp": transforms.Compose(
        [transforms.Resize((50, 70), BICUBIC), transforms.RandomAdjustSharpness(2), transforms.PILToTensor()]
    ),
}  # fmt: skip
EXACT = pytest.mark.skipif(bool(kernel.why_not()), reason=kernel.why_not())


def as_given(transform, pixels, seed):
    with SeededGenerators() as generators:
        generators.seed(seed)
        return transform(Image.fromarray(pixels))


def as_planned(plan, pixels, seed):
    levels = torch.zeros(3, *plan.size, dtype=torch.uint8)
    transformed(PlannedTransform(plan), pixels, levels, seed)
    if plan.statistics is None:
        return levels
    image = torch.empty(3, *plan.size)
    normalise_into(levels, image, *plan.statistics)
    return image


PHOTOGRAPHS = [12, pytest.param(30, marks=pytest.mark.deep)]
"""Each size once, or with several photographs."""


@pytest.mark.parametrize("photographs", PHOTOGRAPHS)
@pytest.mark.parametrize("name", KNOWN)
def test_a_known_chain_gives_the_same_image_by_its_plan(name, photographs):
    transform, plan = KNOWN[name], compile_transform(KNOWN[name])
    std = 1 / 255 if plan.statistics is None else min(plan.statistics.std)
    apart = []
    assert not plan.given
    for number in range(photographs):
        pixels = photograph(*SIZES[number % len(SIZES)], which=number % 5)
        expected = as_given(transform, pixels, seed=31 * number)
        ours = as_planned(plan, pixels, seed=31 * number)
        assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
        if not kernel.why_not():
            assert torch.equal(ours, expected)
        apart.append(((ours.double() - expected.double()).abs() * 255 * std).flatten())
    every = torch.cat(apart)
    assert every.max() < 2.01
    assert (every > 1.01).sum() <= 5e-6 * every.numel() + 3


@EXACT
@pytest.mark.parametrize("photographs", PHOTOGRAPHS)
@pytest.mark.parametrize("name", GIVEN)
def test_functions_that_keep_an_images_size_run_as_given_within_a_plan(name, photographs):
    transform, plan = GIVEN[name], compile_transform(GIVEN[name])
    assert plan.given
    differ = 0
    for number in range(photographs):
        pixels = photograph(*SIZES[number % len(SIZES)], which=number % 5)
        expected = as_given(transform, pixels, seed=77 * number)
        with SeededGenerators():
            ours = as_planned(plan, pixels, seed=77 * number)
            other = as_planned(plan, pixels, seed=77 * number + 1)
        assert torch.equal(ours, expected)
        differ += not torch.equal(ours, other)
    assert differ > photographs // 3


@EXACT
def test_a_function_that_gives_another_size_after_all_is_an_error_that_names_it(monkeypatch):
    plan = compile_transform(colour_of(transforms.GaussianBlur(3)))
    monkeypatch.setattr(transforms.GaussianBlur, "forward", lambda self, image: image.crop((0, 0, 9, 9)))
    with (
        SeededGenerators(),
        pytest.raises(TypeError, match=r"GaussianBlur.* returned an image of 9×9 in RGB, expected 128×96"),
    ):
        as_planned(plan, photograph(300, 200), seed=1)


BEFORE_RANDOM_CROP = chain(
    transforms.Resize(64, BICUBIC), transforms.RandomCrop(48), transforms.ColorJitter(0.5)
)


@EXACT
def test_the_resize_with_which_a_chain_begins_is_found_if_the_rest_sees_only_pixels():
    for transform in (BEFORE_RANDOM_CROP, open_clips(64, is_train=False)):
        assert leading_resize(transform) == ShortSide(64)
    for transform in (
        open_clips(64, is_train=True),
        chain(transforms.Resize(64), transforms.CenterCrop(48)),  # bilinear
        chain(transforms.Resize((64, 64), BICUBIC)),
        chain(transforms.Resize(64, BICUBIC), transforms.Lambda(lambda image: image)),
        chain(transforms.Resize(64, BICUBIC), transforms.RandomApply([lambda image: image])),
        chain(lambda image: image, transforms.Resize(64, BICUBIC)),
    ):
        assert leading_resize(transform) is None


@EXACT
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize(
    "transform", [BEFORE_RANDOM_CROP, open_clips(64, is_train=False)], ids=["random crop", "validation"]
)
def test_a_chain_gives_the_same_batches_from_images_on_which_its_first_resize_was_done(
    tmp_path, monkeypatch, transform, is_compiled
):
    write_photograph_shards(tmp_path / "shards", samples=40, samples_per_shard=20)
    urls = f"{tmp_path}/shards/{{00000..00001}}.tar"

    def forms(images, recipes, directory):
        assert [str(recipe) for recipe in recipes] == ["raw", "raw-64"]
        return Costs((Form("", 9.0, 9.0), Form("raw-64", 9.0, 1.0)), 0.0, 0.0)

    monkeypatch.setattr(decision, "measure", forms)
    options = {"batch_size": 8, "num_workers": 0, "compile": is_compiled, "preprocess": transform}
    options["cache_size"] = "1GB"
    with flat.make_loader(urls, cache_dir=tmp_path / "plain", **options) as loader:
        plain = [images for images, _ in loader]
    for _ in range(2):  # made, and read
        with flat.make_loader(urls, cache_dir=tmp_path / "cache", prepare="auto", **options) as loader:
            found = [images for images, _ in loader]
        assert len(found) == len(plain) == 5
        assert all(map(torch.equal, found, plain))
    assert len(list((tmp_path / "cache" / "shards").iterdir())) == 2


def test_without_our_kernel_what_would_make_more_of_a_difference_runs_as_given(monkeypatch):
    monkeypatch.setattr(kernel, "_avx2", None)
    with pytest.raises(NotRecognised, match="ColorJitter needs Pillow's pixels to the bit, and streamload"):
        compile_transform(GIVEN["jittered"])
    assert compile_transform(KNOWN["flipped and grey"]).colour


def test_what_runs_without_arguments_is_what_open_clip_has_by_default():
    for train in (True, False):
        assert compile_transform(open_clips(224, is_train=train)) == clip_plan(train)
    assert clip_plan(True).statistics == OPENAI


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (lambda image: image, "it doesn't resize|<lambda> isn't supported"),
        (transforms.ToTensor(), "ToTensor isn't supported, or not at this place"),
        (transforms.Compose([]), "it doesn't resize"),
        (chain(transforms.Resize(64)), "of several sizes"),
        (transforms.Compose([transforms.Resize((64, 64))]), "doesn't end in a tensor"),
        (colour_of(transforms.RandomRotation(5, expand=True)), "RandomRotation isn't supported"),
        (colour_of(transforms.RandomApply([lambda image: image])), "RandomApply isn't supported"),
        (colour_of(transforms.Pad(2)), "Pad isn't supported"),
        (colour_of(transforms.Grayscale(1)), "Grayscale isn't supported"),
        (chain(transforms.RandomHorizontalFlip(), transforms.Resize((8, 8))), "RandomHorizontalFlip"),
        (transforms.Compose([*colour_of().transforms, transforms.RandomErasing()]), "RandomErasing"),
        (chain(transforms.Resize(64, max_size=90), transforms.CenterCrop(64)),
         "max_size"),
        (chain(transforms.Resize(64, InterpolationMode.LANCZOS), transforms.CenterCrop(64)), "by lanczos"),
        (chain(transforms.Resize(64), CenterCropOrPad(64, fill=0.5)),
         "fills with 0.5"),
        (transforms.Compose([*colour_of().transforms, transforms.Normalize([0.5] * 2, [0.5] * 2)]),
         "three channels"),
    ],
)  # fmt: skip
def test_what_no_plan_could_do_exactly_is_not_recognised(transform, reason):
    with pytest.raises(NotRecognised, match=reason):
        compile_transform(transform)


def test_what_only_looks_like_a_known_function_is_not_recognised():
    class RandomResizedCrop(transforms.RandomResizedCrop):
        def forward(self, image):
            return super().forward(image).rotate(90)

    RandomResizedCrop.__module__ = "torchvision.transforms.transforms"
    crop = transforms.RandomResizedCrop(64, interpolation=BICUBIC)
    assert compile_transform(chain(crop)).size == (64, 64)
    with pytest.raises(NotRecognised):
        compile_transform(chain(RandomResizedCrop(64, interpolation=BICUBIC)))
    hooked = transforms.RandomResizedCrop(64, interpolation=BICUBIC)
    hooked.register_forward_hook(lambda module, arguments, image: image.rotate(90))
    with pytest.raises(NotRecognised):
        compile_transform(chain(hooked))
    crop.forward = lambda image: image
    with pytest.raises(NotRecognised):
        compile_transform(chain(crop))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    directory = tmp_path_factory.mktemp("photographs")
    write_photograph_shards(directory, 96, 48)
    return f"{directory}/{{00000..00001}}.tar"


def images(shards, tmp_path, **options):
    with flat.make_loader(
        shards, batch_size=16, cache_dir=tmp_path, cache_size="1GB", seed=5, **{"num_workers": 2, **options}
    ) as loader:
        return torch.cat([image for image, _ in loader])


def seen_with_generators(shards, tmp_path, **options):
    """The images, and what the global generators give after them."""
    torch.manual_seed(5)
    random.seed(5)
    seen = images(shards, tmp_path, **options)
    return seen, torch.rand(3), torch.tensor([random.random() for _ in range(3)])


@EXACT
@pytest.mark.parametrize("name", ["jittered", "open_clip's jitter", "augmented", "levels, sharp"])
def test_a_loader_gives_the_same_batches_with_a_plan_that_holds_functions_as_given(name, shards, tmp_path):
    transform = GIVEN[name]
    (ours, *generators), (given, *as_before) = (
        seen_with_generators(shards, tmp_path, preprocess=transform, compile=compile_, num_workers=0)
        for compile_ in (True, False)
    )
    assert torch.equal(ours, given)
    assert all(map(torch.equal, generators, as_before))
    assert torch.equal(ours, images(shards, tmp_path, preprocess=transform, num_workers=2))
    if transform is not GIVEN["levels, sharp"]:
        levels = images(shards, tmp_path, preprocess=transform, dtype="uint8")
        mean, std = compile_transform(transform).statistics
        mean, std = (torch.tensor(of).view(3, 1, 1) for of in (mean, std))
        assert torch.equal(levels.to(torch.float32).div(255).sub(mean).div(std), given)


@pytest.mark.parametrize("name", ["open_clip's training", "some grey", "flipped and grey", "longest"])
def test_a_loader_gives_the_same_batches_compiled_and_as_given(name, shards, tmp_path, caplog):
    transform = KNOWN[name]
    statistics = compile_transform(transform).statistics
    with caplog.at_level(logging.INFO, "streamload"):
        ours = images(shards, tmp_path, preprocess=transform)
    assert "preprocess= is compiled" in caplog.text
    given = images(shards, tmp_path, preprocess=transform, compile=False)
    assert (ours.shape, ours.dtype) == (given.shape, given.dtype)
    if not kernel.why_not():
        assert torch.equal(ours, given)
    levels = (ours - given).abs() * 255 * min(statistics.std)
    assert levels.max() < 2.01
    assert (levels > 1.01).float().mean() < 1e-5


def test_levels_are_what_a_worker_would_have_normalised(shards, tmp_path):
    transform = KNOWN["SigLIP's statistics"]
    floats = images(shards, tmp_path, preprocess=transform)
    levels = images(shards, tmp_path, preprocess=transform, dtype="uint8")
    assert levels.dtype == torch.uint8
    torch.testing.assert_close((levels / 255 - 0.5) / 0.5, floats, rtol=0, atol=1e-5)
    on_device = images(shards, tmp_path, preprocess=transform, device="cpu")
    torch.testing.assert_close(on_device, floats, rtol=0, atol=1e-5)


def test_levels_are_asked_for_only_where_they_can_be_had(shards, tmp_path):
    with pytest.raises(OptionError, match="Pad isn't supported"):
        images(shards, tmp_path, preprocess=colour_of(transforms.Pad(2)), dtype="uint8")
    with pytest.raises(OptionError, match="functions that run as given"):
        images(shards, tmp_path, preprocess=KNOWN["grey"], dtype="uint8", compile=False)
    with pytest.raises(OptionError, match="dtype='int8'"):
        images(shards, tmp_path, dtype="int8")


def test_a_transform_that_is_not_recognised_runs_as_given_and_the_log_says_why(shards, tmp_path, caplog):
    transform = colour_of(transforms.Pad(2))
    with caplog.at_level(logging.INFO, "streamload"):
        ours = images(shards, tmp_path, preprocess=transform)
    assert "preprocess= runs as given: Pad isn't supported" in caplog.text
    assert torch.equal(ours, images(shards, tmp_path, preprocess=transform, compile=False))


def test_recognising_imports_neither_torchvision_nor_open_clip_nor_transformers():
    code = (
        "import sys, streamload; from streamload.transforms.compile import compile_transform\n"
        "from streamload.transforms.plan import NotRecognised\n"
        "try: compile_transform(lambda image: image)\n"
        "except NotRecognised: print(sorted({'torchvision', 'open_clip', 'transformers'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "[]\n"
