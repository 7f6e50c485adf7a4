"""Normalisation, uint8 → float: (x / 255 − mean) / std (step I in a worker, step L on the device)."""

from __future__ import annotations

import functools
from typing import Any

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
    """Normalise one image into its place in a batch; bit-identical to torchvision.

    Args:
        image: uint8[C, H, W].
        destination: float32[C, H, W].
        mean: of each channel; 1.0 is white.
        std: of each channel.
    """
    means, stds = _as_tensors(mean, std)
    destination.copy_(image).div_(255).sub_(means).div_(stds)


def normalise_levels_into(
    image: torch.Tensor, destination: torch.Tensor, mean: Channels, std: Channels
) -> None:
    """Do the same bit-identical to transformers' tensor processors: (x − 255 mean) / (255 std).

    Args: as for `normalise_into`.
    """
    means, stds = _as_tensors(mean, std)
    destination.copy_(image).sub_(means * 255).div_(stds * 255)


def normalise_batch(
    images: torch.Tensor,
    mean: Channels = OPENAI_MEAN,
    std: Channels = OPENAI_STD,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Normalise a batch on its device, in one pass: on a GPU a single kernel from bytes to floats.

    Args:
        images: uint8[N, C, H, W] on any device.
        mean: of each channel; 1.0 is white.
        std: of each channel.
        dtype: of the result; the arithmetic is float32.

    Returns:
        dtype[N, C, H, W], in the memory format of `images`.
    """
    factor, black = _constants(mean, std, images.device)
    if images.device.type == "mps":
        images = images.float()  # MPS kernels don't mix types
    result = torch.empty_like(images, dtype=dtype)
    return torch.addcmul(black, images, factor, out=result)


def normalise_values(values: dict[str, Any], mean: Channels, std: Channels) -> None:
    """Normalise the images of a batch on its device, or its patches; these are 0 where there are none."""
    for name in [name for name in values if name == "image" or name.startswith("image[")]:
        values[name] = normalise_batch(values[name], mean, std)
    if "patches" in values:
        levels, valid = values["patches"], values["patch_valid"]
        channels_last = levels.view(len(levels), -1, 1, 3).permute(0, 3, 1, 2)
        floats = normalise_batch(channels_last, mean, std).permute(0, 2, 3, 1).reshape(levels.shape)
        values["patches"] = floats.masked_fill_(~valid[..., None], 0.0)


@functools.cache
def _as_tensors(mean: Channels, std: Channels) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as float32[C, 1, 1] on the CPU."""
    means, stds = (
        torch.tensor(channels, dtype=torch.float32, device="cpu").view(-1, 1, 1) for channels in (mean, std)
    )
    return means, stds


@functools.cache
def _constants(mean: Channels, std: Channels, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factor for a level, and the value of black: float32[C, 1, 1]."""
    means, stds = (torch.tensor(channels, dtype=torch.float64, device="cpu") for channels in (mean, std))
    factor, black = (
        values.to(device, torch.float32).view(-1, 1, 1)
        for values in ((stds * 255).reciprocal(), -means / stds)
    )
    return factor, black
