"""Samples that are looked at some in a row, and get their pixels afterwards."""

import dataclasses
import functools
import gc
import io
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from streamload.batches.tokenize import adapt_tokenizer
from streamload.derived.prepare.preparation import Preparation
from streamload.errors import BlankCaption, CaptionError, DecodeError
from streamload.ipc import own_empty
from streamload.shards.samples import Sample
from streamload.transforms.decode import decode_jpeg_or_image
from streamload.transforms.plan import PlannedTransform, clip_plan
from tests.support.photographs import clip_examples, photograph, transformed


def encoded(width, height, kind="JPEG", mode="RGB", **options):
    buffer = io.BytesIO()
    image = Image.fromarray(photograph(width, height)).convert(mode)
    image.save(buffer, kind, **({"quality": 90} | options if kind == "JPEG" else options))
    return buffer.getvalue()


def damaged(data):
    """A JPEG that libjpeg warns of, and Pillow takes."""
    for place in range(700, len(data), 997):
        file = data[:place] + b"\xff\x00\xaa\x17" + data[place + 4 :]
        try:
            Image.open(io.BytesIO(file)).load()
        except OSError:
            continue
        return file
    raise AssertionError("Pillow takes none of them")


@functools.cache
def files():
    """Images by what they are; made when a test asks for them, not when the tests are collected."""
    return {
        "a JPEG": encoded(500, 375),
        "a larger one": encoded(640, 480),
        "a small one": encoded(64, 48),
        "gray": encoded(375, 500, mode="L"),
        "for Pillow": encoded(300, 200, mode="CMYK"),
        "that libjpeg warns of": damaged(encoded(333, 251)),
        "PNG": encoded(120, 90, "PNG"),
        "pixels as they are": encoded(260, 300, "PPM"),
        "larger than what is kept for pixels": encoded(2600, 2600, quality=50),
        "another JPEG": encoded(451, 300),
    }


def sample(key, image, caption=b"a photograph"):
    # The bytes lie in memory that may be written to, as those do that a worker reads.
    return Sample(key, "", {"jpg": memoryview(bytearray(image)), "txt": memoryview(caption)})


@pytest.mark.parametrize("as_bytes", [True, False])
@pytest.mark.parametrize("recipe", [None, "raw-200", "jpeg-200-q90"])
@pytest.mark.sampled(3)
def test_images_that_are_looked_at_in_a_row_have_the_pixels_of_each_alone(as_bytes, recipe):
    preparation = None if recipe is None else Preparation.parse(recipe)
    of = clip_examples(as_bytes, preparation)
    batch = of.batch_factory()(len(files()), own_empty)
    seen = [batch.parse(sample(key, data), seed) for seed, (key, data) in enumerate(files().items())]
    for one in seen:
        batch.add(one)
    values = batch.finish()
    assert values["__key__"] == list(files())

    transform, expected = PlannedTransform(clip_plan(train=True)), torch.empty(3, 224, 224, dtype=torch.uint8)
    for seed, (image, data) in enumerate(zip(values["image"], files().values(), strict=True)):
        pixels = decode_jpeg_or_image(data) if preparation is None else preparation.pixels(data).copy()
        transformed(transform, pixels, expected, seed)
        if as_bytes:
            torch.testing.assert_close(image, expected, rtol=0, atol=0)
        else:
            mean, std = (torch.tensor(each).view(3, 1, 1) for each in of.images.preprocess.statistics)
            torch.testing.assert_close(image, (expected / 255 - mean) / std, rtol=0, atol=1e-5)


@pytest.mark.parametrize("as_bytes", [True, False])
def test_memory_that_is_used_again_holds_the_batch_that_was_made_last(as_bytes):
    begin, kept = clip_examples(as_bytes).batch_factory(), {}

    def again(shape, dtype):
        return kept.setdefault((*shape, dtype), own_empty(shape, dtype))

    def made(names, allocate):
        batch = begin(4, allocate)
        for seed, name in enumerate(names):
            batch.add(batch.parse(sample(name, files()[name]), seed))
        return batch.finish()["image"]

    for names in (["a JPEG", "PNG", "gray", "a small one"], ["gray", "another JPEG"], ["a JPEG"]):
        assert torch.equal(made(names, again), made(names, own_empty))
    assert len(kept) == 1


def test_memory_that_nobody_has_any_more_is_let_go():
    begin, taken = clip_examples().batch_factory(), []

    def fresh(shape, dtype):
        array = own_empty(shape, dtype).numpy()
        taken.append(weakref.ref(array))
        return torch.from_numpy(array)

    for _ in range(3):
        batch = begin(1, fresh)
        batch.add(batch.parse(sample("", files()["a JPEG"]), 0))
        assert taken[-1]() is not None
        batch.finish()
        del batch
    gc.collect()
    assert [reference() is None for reference in taken] == [True, True, True]


def test_what_else_the_tokenizer_gives_is_kept_where_it_is_asked_for():
    tokenizer = adapt_tokenizer(lambda captions: {"input_ids": [[7, 0]] * len(captions), "mask": [[1, 0]]})
    for as_model_inputs, expected in ((True, {"mask": [[1, 0]]}), (False, {})):
        of = dataclasses.replace(clip_examples(), tokenizer=tokenizer, as_model_inputs=as_model_inputs)
        batch = of.batch_factory()(1, own_empty)
        batch.add(batch.parse(sample("", files()["a JPEG"]), 0))
        values = batch.finish()
        assert values["text"].tolist() == [[7, 0]]
        assert {name: each.tolist() for name, each in values.items() if name == "mask"} == expected


def test_a_blank_caption_is_refused_where_that_is_asked_for():
    blank = sample("", files()["a JPEG"], caption=b" \n\t ")
    clip_examples().batch_factory()(1, own_empty).parse(blank, 0)
    batch = dataclasses.replace(clip_examples(), blank_captions=False).batch_factory()(1, own_empty)
    with pytest.raises(BlankCaption):
        batch.parse(blank, 0)
    batch.parse(sample("", files()["a JPEG"], caption=b" a "), 0)


def test_a_corrupt_image_leaves_the_batch_as_it_was():
    batch = clip_examples().batch_factory()(3, own_empty)
    good, cut = files()["a JPEG"], files()["a larger one"]
    first, bad, last = (batch.parse(sample("", data), 7) for data in (good, cut[: len(cut) // 2], good))
    batch.add(first)
    with pytest.raises(DecodeError):
        batch.add(bad)
    batch.add(last)
    images = batch.finish()["image"]
    assert len(images) == 2
    torch.testing.assert_close(images[0], images[1], rtol=0, atol=0)
    assert np.ptp(images[0].numpy()) > 100


def test_what_a_header_or_caption_shows_is_said_before_any_pixel():
    batch = clip_examples().batch_factory()(1, own_empty)
    huge = b"P6\n20000 20000\n255\n"
    with pytest.raises(DecodeError, match="20000×20000"):
        batch.parse(sample("", huge), 0)
    with pytest.raises(CaptionError):
        batch.parse(sample("", files()["a JPEG"], caption=b"\xff\xfe\xff"), 0)


def drawn(rows):
    return {"draw": torch.rand(1)}


def test_the_draws_of_collate_depend_on_all_samples_of_a_batch():
    assembly = dataclasses.replace(clip_examples(), images=None, map_sample=dict, collate=drawn)
    begin = assembly.batch_factory()

    def draw(*seeds):
        batch = begin(len(seeds), own_empty)
        for seed in seeds:
            batch.add(batch.parse(sample("", b""), seed))
        values = batch.finish()
        batch.close()
        return values["draw"].item()

    assert len({draw(1, 3), draw(2, 3), draw(1, 4)}) == 3
    assert draw(1, 3) == draw(1, 3)


def refusing(raw):
    if raw["__key__"] == "refused":
        raise CaptionError("not this one")
    return {"image": raw["image"], "key": raw["__key__"]}


def test_images_stay_with_their_samples_where_map_sample_refuses_some():
    assembly = dataclasses.replace(clip_examples(), map_sample=refusing)
    begin = assembly.batch_factory()

    def made(*names):
        batch = begin(2, own_empty)
        for name in names:
            image = files()["a JPEG" if name == "refused" else name]
            parsed = batch.parse(sample(name, image), 5)
            if name == "refused":
                with pytest.raises(CaptionError):
                    batch.add(parsed)
            else:
                batch.add(parsed)
        values = batch.finish()
        batch.close()
        return values

    with_refused = made("gray", "refused", "PNG")
    assert with_refused["__key__"] == ["gray", "PNG"]
    assert torch.equal(with_refused["image"], made("gray", "PNG")["image"])
