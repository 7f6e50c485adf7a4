"""open_clip's and torchvision's colour steps on a device, held to what workers make of them on Pillow images.

These run in the environment that has open_clip.
"""

import random
import warnings

import pytest
import torch

from benchmarks.torchvision_stub import define_torchvision_schemas
from streamload.pixels.decoders import HostDecoder
from streamload.pixels.pipeline import DeviceImages, Together, why_not
from streamload.transforms import kernel
from streamload.transforms.augment import SeededGenerators
from streamload.transforms.compile import compile_transform
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS
from streamload.transforms.plan import PlannedTransform
from tests.pixels.plans import jpeg
from tests.pixels.test_pipeline import CPU, of_workers
from tests.support.photographs import SIZES, photograph

define_torchvision_schemas()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "open_clip", reason="open_clip is not in this environment; `make pytest-openclip` runs these tests"
    )
    from open_clip.transform import image_transform
    from torchvision import transforms
pytestmark = pytest.mark.skipif(bool(kernel.why_not()), reason=kernel.why_not())


def open_clips(size, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options that it has used
        return image_transform(size, is_train=True, aug_cfg=options)


def colour_of(*steps):
    crop = transforms.RandomResizedCrop(64, interpolation=transforms.InterpolationMode.BICUBIC)
    return transforms.Compose([crop, *steps, transforms.ToTensor()])


JITTERED = {
    "open_clip's": open_clips(
        64, color_jitter=(0.4, 0.4, 0.4, 0.1), color_jitter_prob=0.8, gray_scale_prob=0.2
    ),
    "torchvision's": colour_of(transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)),
    "strong, of hue alone": colour_of(transforms.ColorJitter(hue=0.5)),
    "with flips and gray": colour_of(
        transforms.RandomHorizontalFlip(),
        transforms.ColorJitter(0.8, (0.1, 3.0), 0.8),
        transforms.RandomGrayscale(0.3),
    ),
}


@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize("name", JITTERED)
def test_jittered_images_are_those_of_workers_to_the_bit(name, is_together):
    plan = compile_transform(JITTERED[name])
    assert plan.given
    assert why_not(plan) is None
    draw, transform = random.Random(1), PlannedTransform(plan)
    sizes = [SIZES[number % len(SIZES)] for number in range(24)]
    files = [jpeg(photograph(*size, which=number % 5)) for number, size in enumerate(sizes)]
    choices = [transform.draw(height, width, draw.getrandbits(64)) for width, height in sizes]
    device = DeviceImages(plan, CPU, HostDecoder(), DEFAULT_MAX_IMAGE_PIXELS)
    if is_together:
        device._transform = Together(plan)
    with SeededGenerators():
        expected = of_workers(plan, files, choices)
    state = torch.get_rng_state()
    assert torch.equal(device.images(files, choices).images, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_other_functions_of_pillow_images_are_refused_by_name():
    plan = compile_transform(colour_of(transforms.ColorJitter(0.4), transforms.GaussianBlur(3)))
    assert "GaussianBlur" in why_not(plan)
    plan = compile_transform(colour_of(transforms.RandomApply([transforms.ColorJitter(0.4)])))
    assert "RandomApply" in why_not(plan)
