"""transformers' image processors as preprocess=: compiled to the bit or as given, but tensors."""

import logging
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from examples.photograph_shards import write_photograph_shards
from streamload.transforms import kernel
from streamload.transforms.plan import NotRecognised, Squash
from streamload.transforms.processors import plan_of
from tests.support import flat
from tests.support.processors import NAMES, SIZED, assert_exact

sys.path.append(str(Path(__file__).parents[2] / "examples"))

EXACT = pytest.mark.skipif(bool(kernel.why_not()), reason=kernel.why_not())


def processor(name, **options):
    """One that works on Pillow's images: transformers 5 calls it Pil, 4 has no other for most of these."""
    import transformers  # with what torch compiles by: seconds, and 100 MB

    kind = getattr(transformers, f"{name}ImageProcessorPil", None) or getattr(
        transformers, f"{name}ImageProcessor"
    )
    return kind(**{**SIZED.get(name, {}), **options})


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    directory = tmp_path_factory.mktemp("photographs")
    write_photograph_shards(directory, 24, 12)
    return f"{directory}/{{00000..00001}}.tar"


def batches(shards, tmp_path, **options):
    options = {"train": False, "batch_size": 12, "num_workers": 0, "cache_dir": tmp_path, **options}
    with flat.make_loader(shards, **options) as loader:
        return list(loader)


def tokenizer():
    from train_transformers_clip import tokenizer_of  # with a model of transformers: seconds of imports

    return tokenizer_of(iter(["a photo of a cat, left", "a close up of old coins, right"]))


@EXACT
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(3)
def test_a_known_processor_gives_the_same_bits_by_its_plan(name):
    plan = assert_exact(processor(name), photographs=27)
    assert not plan.on_tensors


@EXACT
@pytest.mark.parametrize("options", [{"do_normalize": False}, {"do_normalize": False, "do_rescale": False}])
def test_without_statistics_it_gives_floats_up_to_1_or_levels(options):
    assert_exact(processor("CLIP", **options), photographs=5)


@EXACT
def test_a_loader_gives_the_same_tensors_compiled_and_as_given(shards, tmp_path, caplog):
    clip = processor("CLIP")
    with caplog.at_level(logging.INFO, "streamload"):
        ours = batches(shards, tmp_path, preprocess=clip, num_workers=2)
    assert "preprocess= is compiled" in caplog.text
    given = batches(shards, tmp_path, preprocess=clip, compile=False)
    for (images, texts), (expected, as_before) in zip(ours, given, strict=True):
        assert (images.shape, images.dtype) == ((12, 3, 96, 61), torch.float32)
        assert_close(images, expected, rtol=0, atol=0)
        assert texts == as_before


def test_a_whole_processor_stands_for_its_image_processor(shards, tmp_path):
    from transformers import VisionTextDualEncoderProcessor

    whole = VisionTextDualEncoderProcessor(processor("CLIP"), tokenizer())
    [batch, _] = batches(shards, tmp_path, preprocess=whole, tokenizer=tokenizer(), output="hf")
    assert batch["pixel_values"].shape == (12, 3, 96, 61)
    [(images, _), _] = batches(shards, tmp_path, preprocess=processor("CLIP"))
    assert_close(batch["pixel_values"], images, rtol=0, atol=0)


def brighter():
    class Brighter(type(processor("CLIP"))):
        def rescale(self, image, scale, **options):
            return super().rescale(image, scale * 1.5, **options)

    return Brighter()


def changed():
    clip = processor("CLIP")
    clip.resize = clip.resize
    return clip


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (brighter, "isn't supported"),
        (changed, "isn't supported, or was changed"),
        (lambda: processor("CLIP", rescale_factor=1 / 127.5), "not be compiled to the bit"),
        (lambda: processor("CLIP", resample=1), "resizes by 1"),
        (lambda: processor("CLIP", do_resize=False), "doesn't resize"),
        (lambda: processor("CLIP", image_mean=["a"]), "isn't configured as expected"),
        (lambda: processor("CLIP", do_center_crop=False), "several sizes"),
        (lambda: processor("CLIP", crop_size={"height": 240, "width": 96}), "or pads"),
    ],
)
def test_a_processor_that_does_anything_else_runs_as_given(made, why):
    with pytest.raises(NotRecognised, match=why):
        plan_of(made())


def test_a_processor_that_runs_as_given_gives_tensors(shards, tmp_path, caplog):
    own = brighter()
    with caplog.at_level(logging.INFO, "streamload"):
        [(images, _), _] = batches(shards, tmp_path, preprocess=own)
    assert "preprocess= runs as given: Brighter isn't supported" in caplog.text
    assert (images.shape, images.dtype) == ((12, 3, 224, 224), torch.float32)
    plain = processor("CLIP", size=own.size, crop_size=own.crop_size)
    [(darker, _), _] = batches(shards, tmp_path, preprocess=plain)
    assert images.mean() > darker.mean() + 0.3


def test_what_else_a_processor_gives_is_in_the_batches_of_hf_alone(shards, tmp_path):
    import transformers

    if not hasattr(transformers, "Siglip2ImageProcessorPil"):
        pytest.skip("this transformers has none")
    siglip2 = transformers.Siglip2ImageProcessorPil(max_num_patches=16)
    [(images, _), _] = batches(shards, tmp_path, preprocess=siglip2)
    [batch, _] = batches(shards, tmp_path, preprocess=siglip2, tokenizer=tokenizer(), output="hf")
    assert batch["pixel_values"].shape == images.shape == (12, 16, 768)
    assert batch["pixel_attention_mask"].shape == (12, 16)
    assert batch["spatial_shapes"].shape == (12, 2)


def test_a_plan_needs_no_more_of_a_size_than_its_numbers():
    assert plan_of(processor("Siglip", size={"height": 64, "width": 96})).fit == Squash((64, 96))


@pytest.mark.parametrize(
    ("preprocess_factory", "options_factory", "error", "said"),
    [
        (
            lambda: processor("CLIP", do_center_crop=False),
            dict,
            ValueError,
            r"float32\[3, .* for sample '0{8}', and float32\[3, .* '00.*resize to one size.*map_sample=",
        ),
        (
            lambda: lambda image: processor("CLIP")(image, return_tensors="pt"),
            dict,
            TypeError,
            "type BatchFeature for sample '00000000'.*image processor of transformers itself as preprocess=",
        ),
        (
            lambda: lambda image: image,
            lambda: {"output": "hf", "tokenizer": tokenizer()},
            TypeError,
            "type Image for sample '00000000'; output=\"hf\" needs tensors: end preprocess= with ToTensor",
        ),
    ],
    ids=["several shapes", "a dict", "no tensor"],
)
def test_what_cannot_be_a_batch_of_images_is_an_error_that_names_a_sample_and_the_way_out(
    preprocess_factory, options_factory, error, said, shards, tmp_path
):
    preprocess, options = preprocess_factory(), options_factory()
    with pytest.raises(error, match=said):
        batches(shards, tmp_path, preprocess=preprocess, **options)


def test_images_that_are_no_tensors_on_purpose_are_a_list(shards, tmp_path):
    [(images, _), _] = batches(shards, tmp_path, preprocess=lambda image: image)
    assert len({image.size for image in images}) > 1
