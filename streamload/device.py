"""Batches on the device, normalised there where they come as bytes (step L)."""

from __future__ import annotations

from typing import Any

import torch

from streamload.transforms.normalise import normalise_batch
from streamload.transforms.plan import Statistics


def to_device(
    values: dict[str, Any], device: torch.device | None, statistics: Statistics | None = None
) -> dict[str, Any]:
    """A batch's tensors on the device.

    Args:
        values: tensors and lists; tensors in pinned memory are copied without waiting.
        device: None leaves everything where it is.
        statistics: images are uint8 and get normalised there by these; None: they stay as they are.
    """
    if device is None:
        return values
    moved = {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }
    if statistics is not None:
        moved["image"] = normalise_batch(moved["image"], *statistics)
    return moved
