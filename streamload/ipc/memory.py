"""Memory for tensors: of this process, or anonymous shared files (memfd) that travel by their descriptor."""

from __future__ import annotations

import errno
import math
import os
import resource
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from streamload.errors import CacheFull


def shared_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor in shared memory that travels to another process by its descriptor.

    Args:
        shape: its shape.
        dtype: its element type.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes == 0 or not hasattr(os, "memfd_create"):
        return own_empty(shape, dtype)
    descriptor = os.memfd_create("streamload", os.MFD_CLOEXEC)
    try:
        grow(descriptor, size_bytes)
        # What torch itself does on the receiving side of such a tensor; there is no public way to it.
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, size_bytes)  # type: ignore[attr-defined]
    finally:
        os.close(descriptor)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(*shape)


def grow(descriptor: int, size_bytes: int) -> None:
    """Make a shared file larger; it takes memory where it is written to.

    Raises:
        CacheFull: this process may have no file of that size.
    """
    try:
        os.ftruncate(descriptor, size_bytes)
    except OSError as exc:
        if exc.errno != errno.EFBIG:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        raise CacheFull(
            f"shared memory of {size_bytes:,} bytes can't be made: it counts as a file, and files may have "
            f"{limit:,} bytes here; raise that limit (ulimit -f)"
        ) from exc


def own_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor in the memory of this process, where nobody else has to read it."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


class SharedArray:
    """An array of zeros in shared memory that travels to another process by its descriptor.

    Args:
        shape: its shape.
        dtype: its element type.

    Attributes:
        array: the memory, as numpy has it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype):
        tensor = shared_empty(shape, dtype)
        if not hasattr(os, "memfd_create"):  # torch shares it by a file's name then
            tensor = tensor.zero_().share_memory_()  # type: ignore[no-untyped-call]
        self._hold(tensor)

    def __getstate__(self) -> torch.Tensor:
        return self._tensor  # torch knows how to send it

    def __setstate__(self, state: torch.Tensor) -> None:
        self._hold(state)

    def _hold(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.array: npt.NDArray[Any] = tensor.numpy()
