"""uint8 images → float: (x / 255 − mean) / std (step I in a worker, step L on the device)."""

from __future__ import annotations

import functools

import torch

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)

Channels = tuple[float, ...]


def normalise_into(
    image: torch.Tensor,
    destination: torch.Tensor,
    mean: Channels = OPENAI_MEAN,
    std: Channels = OPENAI_STD,
) -> None:
    """Normalise one image into its place in a batch, while it is in the cache.

    Args:
        image: uint8[C, H, W].
        destination: float32[C, H, W].
        mean: of each channel, with 1.0 as white.
        std: the same.
    """
    offset, factor = _constants(mean, std, destination.device)
    destination.copy_(image).sub_(offset).mul_(factor)


def normalise_batch(
    images: torch.Tensor,
    mean: Channels = OPENAI_MEAN,
    std: Channels = OPENAI_STD,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Normalise a batch where it is.

    Args:
        images: uint8[N, C, H, W] on any device.
        mean: of each channel, with 1.0 as white.
        std: the same.
        dtype: of the result; the arithmetic is float32.

    Returns:
        dtype[N, C, H, W], in the memory format of `images`.
    """
    offset, factor = _constants(mean, std, images.device)
    return images.float().sub_(offset).mul_(factor).to(dtype)


@functools.cache
def _constants(mean: Channels, std: Channels, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What to subtract from a level and what to multiply it by: float32[C, 1, 1] each."""
    offset = torch.tensor(mean, dtype=torch.float64).mul(255)
    factor = torch.tensor(std, dtype=torch.float64).mul(255).reciprocal()
    return (
        offset.to(device, torch.float32).view(-1, 1, 1),
        factor.to(device, torch.float32).view(-1, 1, 1),
    )
