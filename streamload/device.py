"""Batches on the device, normalised there where they come as bytes (step L)."""

from __future__ import annotations

from typing import Any

import torch

from streamload.transforms.normalise import normalise_batch


def to_device(values: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """A batch's tensors on the device; images that came as uint8 are normalised there.

    Args:
        values: tensors and lists; tensors in pinned memory are copied without waiting.
        device: None leaves everything where it is.
    """
    if device is None:
        return values
    moved = {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }
    image = moved.get("image")
    if isinstance(image, torch.Tensor) and image.dtype == torch.uint8:
        moved["image"] = normalise_batch(image)
    return moved
