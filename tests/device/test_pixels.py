"""JPEG decoded by a GPU's engine, and images transformed there. These need CUDA and `streamload[gpu]`."""

from __future__ import annotations

import random

import pytest
import torch

from streamload.pixels.decoders import HostDecoder, decoder_for
from streamload.pixels.engine import EngineDecoder
from streamload.pixels.pipeline import DeviceImages, OneByOne, Together
from streamload.transforms import kernel
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS
from streamload.transforms.plan import PlannedTransform, clip_plan
from tests.pixels.plans import cases, jpeg
from tests.support.photographs import SIZES, photograph

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def engine() -> EngineDecoder:
    pytest.importorskip("nvidia.nvimgcodec", reason="streamload[gpu] isn't installed")
    decoder = decoder_for(CUDA)
    assert isinstance(decoder, EngineDecoder)
    return decoder


def photographs(**options: int | bool) -> list[bytes]:
    sizes = enumerate(SIZES * 4)
    return [jpeg(photograph(*size, which=number % 5), quality=85, **options) for number, size in sizes]


@pytest.mark.skipif(bool(kernel.why_not()), reason=kernel.why_not())
def test_images_are_transformed_to_the_levels_of_workers() -> None:
    for plan, images, choices in cases(100, seed=21):
        levels = torch.zeros(len(images), *plan.size, 3, dtype=torch.uint8)
        on_device = levels.to(CUDA)
        decoded = {row: torch.from_numpy(image) for row, image in enumerate(images)}
        chosen = dict(enumerate(choices))
        failed = OneByOne(plan)(decoded, chosen, levels)
        there = {row: pixels.to(CUDA) for row, pixels in decoded.items()}
        assert Together(plan)(there, chosen, on_device) == failed
        sound = [row for row in range(len(images)) if row not in failed]
        assert torch.equal(on_device.cpu()[sound], levels[sound])


@pytest.mark.parametrize(
    ("options", "most_mean"),
    [
        ({"subsampling": 0}, 0.5),
        ({"subsampling": 2}, 0.6),
        ({"subsampling": 1}, 0.6),
        ({"progressive": True}, 0.6),
    ],
)
def test_the_engines_pixels_are_close_to_those_of_libjpeg_turbo(
    engine: EngineDecoder, options: dict[str, int | bool], most_mean: float
) -> None:
    files = photographs(**options)
    for pixels, expected in zip(engine.decode(files), HostDecoder().decode(files), strict=True):
        assert isinstance(pixels, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert pixels.shape == expected.shape
        assert (pixels.cpu().float() - expected.float()).abs().mean() <= most_mean


def test_a_batch_is_the_same_alone_and_among_others(engine: EngineDecoder) -> None:
    plan, files = clip_plan(train=True), photographs()
    transform, draw = PlannedTransform(plan), random.Random(0)
    choices = [transform.draw(height, width, draw.getrandbits(64)) for width, height in SIZES * 4]
    device = DeviceImages(plan, CUDA, engine, DEFAULT_MAX_IMAGE_PIXELS)
    together = device.images(files, choices).images
    assert torch.equal(device.images(files[:5], choices[:5]).images, together[:5])
    small = DeviceImages(plan, CUDA, engine, DEFAULT_MAX_IMAGE_PIXELS, decoded_bytes=1 << 20)
    assert torch.equal(small.images(files, choices).images, together)


def test_a_damaged_file_fails_by_itself(engine: EngineDecoder) -> None:
    files = photographs()[:4]
    files[2] = files[2][:200] + bytes(400)
    plan = clip_plan(train=False)
    choices = [PlannedTransform(plan).draw(300, 300, 0)] * 4
    decoded = DeviceImages(plan, CUDA, engine, DEFAULT_MAX_IMAGE_PIXELS).images(files, choices)
    assert list(decoded.failed) == [2]
