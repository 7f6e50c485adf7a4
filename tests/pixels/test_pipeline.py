"""Files and choices → a batch on a device, compared with what workers make of them."""

import gc
import random
import weakref

import numpy as np
import pytest
import torch

from streamload.errors import DecodeError, OptionError
from streamload.pixels.decoders import HostDecoder
from streamload.pixels.pipeline import DeviceImages, Together, why_not
from streamload.transforms import kernel
from streamload.transforms.augment import Box
from streamload.transforms.decode import decode_jpeg_or_image
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS
from streamload.transforms.plan import Choices, ImagePlan, PlannedTransform, RandomCrop, clip_plan
from streamload.transforms.resize import Place, empty
from tests.pixels.plans import an_image, cases, jpeg

CPU = torch.device("cpu")


def device_images(plan, decoder=None, **options):
    decoder = HostDecoder() if decoder is None else decoder
    return DeviceImages(plan, CPU, decoder, DEFAULT_MAX_IMAGE_PIXELS, **options)


def of_workers(plan, files, choices):
    """The levels that a worker makes."""
    transform, levels = PlannedTransform(plan), torch.empty(len(files), *plan.size, 3, dtype=torch.uint8)
    images = levels.permute(0, 3, 1, 2)
    for row, (file, choice) in enumerate(zip(files, choices, strict=True)):
        place = Place.of(empty(*plan.size))
        transform.put(decode_jpeg_or_image(file), choice)(out=place)
        images[row] = place.tensor[0]
    return images


@pytest.mark.parametrize("seed", [10, pytest.param(11, marks=pytest.mark.deep)])
def test_a_batch_on_the_cpu_is_that_of_workers_to_the_bit(seed):
    draw = random.Random(seed)
    compared = 0
    for plan, images, choices in cases(110, seed):
        options = {"quality": draw.randint(30, 95), "subsampling": draw.randrange(3)}
        files = [memoryview(jpeg(image, progressive=image.size < 1 << 15, **options)) for image in images]
        decoded = device_images(plan).images(files, choices)
        sound = [row for row in range(len(files)) if row not in decoded.failed]
        expected = of_workers(plan, *([of[row] for row in sound] for of in (files, choices)))
        assert torch.equal(decoded.images[sound], expected)
        assert decoded.images.dtype == expected.dtype
        assert decoded.images.permute(0, 2, 3, 1).is_contiguous()
        compared += len(sound)
    assert compared > 250


def files_and_choices(plan, count, seed=0):
    draw, transform = random.Random(seed), PlannedTransform(plan)
    images = [an_image(draw) for _ in range(count)]
    choices = [transform.draw(*image.shape[:2], draw.getrandbits(64)) for image in images]
    return list(map(jpeg, images)), choices


def test_damaged_files_are_reported_and_harm_no_others():
    plan = clip_plan(train=True, size=32)
    files, choices = files_and_choices(plan, 6)
    expected = of_workers(plan, files, choices)
    files[1], files[4] = b"\xff\xd8\xff\xdb no image", jpeg(np.zeros((400, 400, 3), np.uint8))[:300]
    decoded = device_images(plan).images(files, choices)
    assert list(decoded.failed) == [1, 4]
    assert all("could not be" in reason for reason in decoded.failed.values())
    sound = [0, 2, 3, 5]
    assert torch.equal(decoded.images[sound], expected[sound])


def test_a_batch_of_damaged_files_alone_and_one_of_none_are_batches():
    device = device_images(clip_plan(train=True, size=16))
    decoded = device.images([b"nothing"] * 3, [Choices(None, (), 0, 0)] * 3)
    assert sorted(decoded.failed) == [0, 1, 2]
    assert device.images([], []).images.shape == (0, 3, 16, 16)


def test_a_file_of_another_size_than_its_header_says_fails():
    """Its box would reach beyond its pixels."""
    plan = clip_plan(train=True, size=16)
    files, choices = files_and_choices(plan, 2)
    other = [choices[0]._replace(box=Box(0, 0, 1000, 1)), choices[1]]
    decoded = device_images(plan).images(files, other)
    assert list(decoded.failed) == [0]
    assert "size by its header" in decoded.failed[0]


class Recorded(HostDecoder):
    """Notes the bytes of pixels that it decodes at a time, and that those before are gone."""

    def __init__(self):
        super().__init__()
        self.sizes, self.alive = [], []

    def decode(self, files):
        gc.collect()
        assert not any(pixels() is not None for pixels in self.alive)
        decoded = super().decode(files)
        self.alive = [weakref.ref(pixels) for pixels in decoded]
        self.sizes.append([pixels.nbytes for pixels in decoded])
        return decoded


def test_pixels_are_decoded_within_a_bound_and_a_larger_image_by_itself():
    plan, recorded = clip_plan(train=True, size=32), Recorded()
    files, choices = files_and_choices(plan, 30)
    bound = 1 << 16
    decoded = device_images(plan, decoder=recorded, decoded_bytes=bound).images(files, choices)
    assert torch.equal(decoded.images, of_workers(plan, files, choices))
    assert sum(map(len, recorded.sizes)) == 30
    assert all(sum(sizes) <= bound or len(sizes) == 1 for sizes in recorded.sizes)
    assert max(map(len, recorded.sizes)) > 3
    assert any(sizes[0] > bound for sizes in recorded.sizes)


class Full(HostDecoder):
    """Of a device whose memory is full."""

    def decode(self, files):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def test_a_full_memory_is_an_error_that_says_what_to_lower():
    plan = clip_plan(train=True, size=16)
    message = r"2 images, .*628 MiB.*: lower batch_size= or microbatch=.*decode='host'.*1\.00 GiB"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        device_images(plan, decoder=Full()).images(*files_and_choices(plan, 2))


def test_a_plan_with_functions_of_pillow_images_is_refused_with_what_to_do():
    def darker(image):
        return image.point(lambda level: level // 2)

    plan = ImagePlan((16, 16), RandomCrop(), given=(darker,))
    assert "darker" in why_not(plan)
    with pytest.raises(OptionError, match=r"darker.*Images\(decode='host'\)"):
        device_images(plan)
    assert why_not(clip_plan(train=False)) is None


def test_the_form_of_other_devices_gives_the_same_batches(monkeypatch):
    if kernel.why_not():
        pytest.skip(kernel.why_not())
    for plan, images, choices in cases(10, seed=4):
        files = [jpeg(image) for image in images]
        expected = device_images(plan).images(files, choices)
        together = device_images(plan)
        together._transform = Together(plan)
        decoded = together.images(files, choices)
        assert decoded.failed == expected.failed
        sound = [row for row in range(len(files)) if row not in decoded.failed]
        assert torch.equal(decoded.images[sound], expected.images[sound])


def test_a_decoders_name_is_that_of_its_library():
    assert HostDecoder().name.startswith("libjpeg-turbo (simplejpeg 1.")
    assert isinstance(HostDecoder().decode([b"x"])[0], DecodeError)
