"""The bytes of tensors as they are now, on the CPU; a GPU isn't waited for until somebody needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def copied(value: torch.Tensor | NDArray[Any]) -> Callable[[], Bytes]:
    """Copy a tensor or array as it is now; what is called for the bytes waits for the copy."""
    if isinstance(value, np.ndarray):
        array = np.array(value, order="C").reshape(-1).view(np.uint8)
        return lambda: array
    tensor = value.detach()
    flat = tensor.contiguous().reshape(-1)
    if not flat.numel():
        return lambda: np.empty(0, np.uint8)
    if flat.device.type != "cuda":
        host = flat.cpu()
        host = host.clone() if host.data_ptr() == tensor.data_ptr() else host
        data: Bytes = host.view(torch.uint8).numpy()
        return lambda: data
    pinned = flat.view(torch.uint8).to("cpu", non_blocking=True)
    event = torch.cuda.current_stream(flat.device).record_event()

    def arrived() -> Bytes:
        event.synchronize()
        found: Bytes = pinned.numpy()
        return found

    return arrived
