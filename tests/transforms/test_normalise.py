"""Normalised images are (x / 255 − mean) / std within float32 rounding, image by image and by batch."""

import pytest
import torch

from streamload.transforms.normalise import (
    OPENAI_MEAN,
    OPENAI_STD,
    normalise_batch,
    normalise_into,
    normalise_levels_into,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def every_level():
    return torch.arange(256, dtype=torch.uint8).repeat(3, 4, 1).contiguous()


def reference(images, mean=OPENAI_MEAN, std=OPENAI_STD):
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (mean, std))
    return (images.double() / 255 - mean) / std


def test_an_image_is_normalised_into_its_place_in_a_batch():
    batch = torch.zeros(3, 3, 4, 256)
    normalise_into(every_level(), batch[1])
    torch.testing.assert_close(batch[1].double(), reference(every_level()), rtol=0, atol=5e-7)
    assert batch[0].abs().sum() == batch[2].abs().sum() == 0


def test_an_image_in_channels_last_is_normalised_the_same():
    plain, last = torch.zeros(3, 4, 256), torch.zeros(3, 4, 256)
    normalise_into(every_level(), plain)
    normalise_into(every_level().permute(1, 2, 0).contiguous().permute(2, 0, 1), last)
    assert torch.equal(plain, last)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_is_normalised_where_it_is_and_stays_what_it_was(device):
    images = torch.stack([every_level(), every_level().flip(2)]).to(device)
    normalised = normalise_batch(images)
    assert normalised.dtype == torch.float32
    assert normalised.device == images.device
    torch.testing.assert_close(normalised.cpu().double(), reference(images.cpu()), rtol=0, atol=5e-7)
    assert torch.equal(images[0].cpu(), every_level())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("mean", "std"),
    [
        (OPENAI_MEAN, OPENAI_STD),
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet's
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # SigLIP's
    ],
    ids=["OpenAI", "ImageNet", "SigLIP"],
)
def test_every_level_is_on_the_device_what_it_is_on_the_host_within_the_bound_of_the_guide(mean, std, device):
    """2⁻²¹, also where the device fuses the product and the sum, as GPUs may."""
    bound = 2.0**-21
    factor, black = (
        torch.tensor(values, dtype=torch.float64).float().double().view(3, 1, 1)
        for values in ([1 / (255 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)])
    )
    fused = (every_level().double() * factor + black).float()
    on_device = normalise_batch(every_level()[None].to(device), mean, std)[0].cpu()
    for normalise in (normalise_into, normalise_levels_into):
        on_host = torch.empty(3, 4, 256)
        normalise(every_level(), on_host, mean, std)
        assert (on_device - on_host).abs().max() <= bound
        assert (fused - on_host).abs().max() <= bound


def test_a_batch_keeps_its_memory_format():
    images = every_level().repeat(2, 1, 1, 1)
    last = normalise_batch(images.contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, normalise_batch(images))


def test_other_constants_and_dtypes():
    images = every_level()[None]
    half = normalise_batch(images, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(
        half.double(), reference(images, (0.5,) * 3, (0.5,) * 3), rtol=0.01, atol=0.004
    )
