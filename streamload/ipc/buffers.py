"""Slots of shared memory in which a worker hands its batches over, each used again once nobody has it.

Fresh memory for every batch costs its pages' faults and zeroes on both sides, several times what writing
it costs. A slot is free again when the *buffer* that its rank was given is dead, all views of it included:
that is seen on the array under the tensor, since a tensor dies before its views.
"""

from __future__ import annotations

import errno
import functools
import itertools
import math
import mmap
import os
import resource
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from streamload.errors import CacheFull
from streamload.metrics import Counts

_MOST_SLOTS = 64

_names = itertools.count()
_received_here: weakref.WeakValueDictionary[str, BufferPool] = weakref.WeakValueDictionary()
"""The slots whose batches this process is given."""


class Region(NamedTuple):
    """Where the memory of a slot lies in its file, in bytes."""

    start: int
    size: int


@dataclass(slots=True)
class _Slot:
    """A slot as one process has it."""

    region: Region
    memory: mmap.mmap
    tensor: torch.Tensor | None = None
    """In the worker: the one that was made here last, as the next is mostly the same."""
    given: weakref.ref[npt.NDArray[np.uint8]] | None = None
    """In the rank: the buffer that was given last."""

    def made(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor at the beginning of the memory; the last one again if it is of this shape and dtype."""
        last = self.tensor
        if last is None or last.dtype != dtype or last.shape != tuple(shape):
            flat = torch.frombuffer(self.memory, dtype=dtype, count=math.prod(shape))
            last = self.tensor = flat.view(*shape)
        return last


def buffers_for(workers: int, batches: int) -> list[BufferPool]:
    """Slots for each worker, for so many batches each; none where the system has no such files."""
    return [BufferPool(batches) for _ in range(workers)] if hasattr(os, "memfd_create") else []


class BufferPool:
    """The slots of one worker. Its rank makes them, before the worker starts, and is given what is in them.

    Args:
        batches: how many batches' memory is kept. Where the training loop holds more, the next ones are made
            in memory of their own.
    """

    def __init__(self, batches: int):
        self._batches = batches
        self._name = f"{os.getpid()}-{next(_names)}"
        self._file = os.memfd_create("streamload", os.MFD_CLOEXEC)
        self._held = SharedArray((_MOST_SLOTS,), torch.uint8)
        """Of each slot, whether it is in use: set by the worker, unset by the rank."""
        self._prepare()
        _received_here[self._name] = self

    def _prepare(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._file_bytes = 0
        self._taken: dict[int, int] = {}  # since the last hand-over: address of the memory → slot
        self._largest_batch = 0

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_batches": self._batches,
            "_name": self._name,
            "_file": DupFd(self._file),
            "_held": self._held,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._file = state["_file"].detach()
        self._prepare()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    # In the worker:

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor in a slot, the same object where it is the same memory; None where all are held.

        What is in it is what was in it last.
        """
        size = math.prod(shape) * dtype.itemsize
        index = self._free_slot(size) if size else None
        if index is None:
            return None
        tensor = self._slots[index].made(shape, dtype)
        self._held.array[index] = 1
        self._taken[tensor.data_ptr()] = index
        return tensor

    def hand_over(self, values: Mapping[str, Any], counts: Counts) -> dict[str, Any]:
        """A batch's values as they are sent; tensors that aren't in a slot are copied into one.

        What was taken from here and isn't among the values is free again.

        Args:
            values: tensors, and whatever else.
            counts: where "fresh_tensors" are counted, for which there was no slot.
        """
        sent: dict[str, Any] = {}
        handed: set[int] = set()
        for name, value in values.items():
            sent[name] = value
            if not is_plain(value):
                continue
            index = self._taken.get(value.untyped_storage().data_ptr())
            if index is None or index in handed:
                copy = self.empty(value.shape, value.dtype)
                if copy is None:
                    counts.add("fresh_tensors")
                    continue
                value = copy.copy_(value)
                index = self._taken[value.data_ptr()]
            handed.add(index)
            sent[name] = _Handed(self._name, index, self._slots[index].region, _layout(value))
        self._largest_batch = max(self._largest_batch, self._bytes(handed))
        self.take_back(handed)
        return sent

    def take_back(self, handed: Collection[int] = ()) -> None:
        """Free what was taken since the last hand-over, but for the slots that were handed."""
        for index in self._taken.values():
            if index not in handed:
                self._held.array[index] = 0
        self._taken.clear()

    def _free_slot(self, size: int) -> int | None:
        """The smallest free slot that is large enough; a new one, or one made larger, where there is none."""
        count = len(self._slots)
        free = np.flatnonzero(self._held.array[:count] == 0).tolist()
        fitting = [index for index in free if self._slots[index].region.size >= size]
        if fitting:
            return int(min(fitting, key=lambda index: self._slots[index].region.size))
        needed = self._bytes(set(self._taken.values())) + size
        room = self._batches * max(self._largest_batch, needed) - self._bytes(self._slots)
        if count < _MOST_SLOTS and size <= room:
            self._slots[count] = self._new(size)
            return count
        for index in free:
            if size <= room + self._slots[index].region.size:
                self._slots[index].memory.madvise(mmap.MADV_REMOVE)
                self._slots[index] = self._new(size)
                return int(index)
        return None

    def _new(self, size: int) -> _Slot:
        """Memory at the end of the file, which grows by it."""
        region = Region(self._file_bytes, -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY)
        self._file_bytes += region.size
        grow(self._file, self._file_bytes)
        return self._mapped(region)

    def _bytes(self, indices: Iterable[int]) -> int:
        return sum(self._slots[index].region.size for index in indices)

    # In the rank:

    def receive(self, index: int, region: Region, layout: _Layout) -> torch.Tensor:
        """The tensor that was handed over in a slot, which is held until its last view is dead."""
        slot = self._slots.get(index)
        if slot is None or slot.region != region:
            slot = self._slots[index] = self._mapped(region)
        array = np.frombuffer(slot.memory, np.uint8)
        slot.given = weakref.ref(array, functools.partial(self._release, index, os.getpid()))
        flat = torch.frombuffer(array, dtype=layout.dtype, count=layout.elements)
        return flat.as_strided(layout.shape, layout.strides, layout.offset)

    def _release(self, index: int, pid: int, _: object) -> None:
        if os.getpid() == pid:  # a process forked from the rank has the array, too, but no say
            self._held.array[index] = 0

    def _mapped(self, region: Region) -> _Slot:
        return _Slot(region, mmap.mmap(self._file, region.size, offset=region.start))


class _Layout(NamedTuple):
    """How a tensor lies in its memory, counted in its elements, of which there is room for so many."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    elements: int


class _Handed:
    """A tensor in a slot, on its way; unpickled in the rank it is that tensor."""

    def __init__(self, name: str, index: int, region: Region, layout: _Layout):
        self._where = (name, index, region, layout)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, self._where


def _received(name: str, index: int, region: Region, layout: _Layout) -> torch.Tensor:
    return _received_here[name].receive(index, region, layout)


def _layout(tensor: torch.Tensor) -> _Layout:
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    return _Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), elements)


def is_plain(value: Any) -> bool:
    """Whether it is a tensor of bytes in this process's memory and nothing more."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_quantized
        and value.numel() > 0
    )


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
