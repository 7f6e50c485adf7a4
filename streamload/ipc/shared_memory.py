"""Tensors and arrays in shared memory: anonymous files, of which a kill leaves nothing behind (step J)."""

from __future__ import annotations

import errno
import math
import os
import resource
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from streamload import limits
from streamload.descriptors import opening
from streamload.errors import CacheFull
from streamload.torch_internals import storage_of_file


def is_plain(value: Any) -> bool:
    """Return whether this is an ordinary, non-empty CPU tensor without gradient."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_quantized
        and value.numel() > 0
    )


def shared_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor in shared memory, sent to other processes by its descriptor."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes == 0 or not hasattr(os, "memfd_create"):
        return own_empty(shape, dtype)
    descriptor = shared_file()
    try:
        grow(descriptor, size_bytes)
        storage = storage_of_file(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(*shape)


def memory_file() -> int:
    """Create a file in memory and return its descriptor.

    Raises:
        OSError: too many open files, though this thread gave up those that it can open again.
    """
    return opening(lambda: os.memfd_create("streamload", os.MFD_CLOEXEC))


def shared_file() -> int:
    """Create a file in memory for other processes to map or lock, and return its descriptor.

    Raises:
        LimitReached: there may be no more open files.
    """
    try:
        return memory_file()
    except OSError as exc:
        raise limits.reached("shared memory can't be created", exc) from exc


def grow(descriptor: int, size_bytes: int) -> None:
    """Grow a shared file; only written pages take memory.

    Raises:
        CacheFull: the process may not have a file of this size.
    """
    try:
        os.ftruncate(descriptor, size_bytes)
    except OSError as exc:
        if exc.errno != errno.EFBIG:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        raise CacheFull(
            f"shared memory of {size_bytes:,} bytes can't be created: it counts as a file, and files are "
            f"limited to {limit:,} bytes here; raise that limit (ulimit -f)"
        ) from exc


def own_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor in the private memory of this process."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


class SharedArray:
    """An array of zeros in shared memory, sent to other processes by its descriptor.

    Attributes:
        array: the memory as a numpy array.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype):
        tensor = shared_empty(shape, dtype)
        if not hasattr(os, "memfd_create"):  # torch shares it by a named file then
            tensor = tensor.zero_().share_memory_()  # type: ignore[no-untyped-call]
        self._hold(tensor)

    def __getstate__(self) -> torch.Tensor:
        return self._tensor  # torch can send it

    def __setstate__(self, state: torch.Tensor) -> None:
        self._hold(state)

    def _hold(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.array: npt.NDArray[Any] = tensor.numpy()
