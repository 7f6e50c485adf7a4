"""Shared memory (memfd), and the pool of slots in which a worker hands over its batches (step J).

Fresh memory for every batch costs page faults and zeroing on both sides, several times the cost of writing.
A slot is free again once the *buffer* that its rank received is dead, including all views. The array under
the tensor tells that, since a tensor dies before its views.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from streamload import limits
from streamload.descriptors import opening
from streamload.ipc.shared_memory import SharedArray, grow, is_plain, shared_file
from streamload.metrics import Counts

_MOST_SLOTS = 64

_names = itertools.count()
_received_here: weakref.WeakValueDictionary[str, BufferPool] = weakref.WeakValueDictionary()
"""The pools whose batches this process receives."""


class Region(NamedTuple):
    """The memory of a slot within its file, in bytes."""

    start: int
    size: int


@dataclass(slots=True)
class _Slot:
    """A slot, as seen by one process."""

    region: Region
    memory: mmap.mmap
    tensor: torch.Tensor | None = None
    """In the worker: the last tensor created here; the next one usually has the same shape."""
    lent: weakref.ref[npt.NDArray[np.uint8]] | None = None
    """In the rank: the last buffer lent out."""

    def tensor_of(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor at the start of the memory; the last one if it has this shape and dtype."""
        last = self.tensor
        if last is None or last.dtype != dtype or last.shape != tuple(shape):
            flat = torch.frombuffer(self.memory, dtype=dtype, count=math.prod(shape))
            last = self.tensor = flat.view(*shape)
        return last


def buffers_for(workers: int, batches: int) -> list[BufferPool]:
    """Return a pool for each worker, each for this many batches; none if the system has no memfd."""
    return [BufferPool(batches) for _ in range(workers)] if hasattr(os, "memfd_create") else []


class BufferPool:
    """The slots of one worker. The rank creates the pool before the worker starts, and receives the batches.

    Args:
        batches: how many batches' memory is kept. While the training loop holds more, further batches get
            fresh memory.
    """

    def __init__(self, batches: int):
        self._batches = batches
        self._name = f"{os.getpid()}-{next(_names)}"
        self._file = shared_file()
        self._held = SharedArray((_MOST_SLOTS,), torch.uint8)
        """True if each slot is in use: set by the worker, cleared by the rank."""
        self._prepare()
        _received_here[self._name] = self

    def _prepare(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._file_bytes = 0
        self._taken: dict[int, int] = {}  # since the last hand-over: memory address → slot
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
        """Return an uninitialised tensor in a slot (one object per memory); None if all are held."""
        size = math.prod(shape) * dtype.itemsize
        index = self._free_slot(size) if size else None
        if index is None:
            return None
        tensor = self._slots[index].tensor_of(shape, dtype)
        self._held.array[index] = 1
        self._taken[tensor.data_ptr()] = index
        return tensor

    def hand_over(self, values: Mapping[str, Any], counts: Counts) -> dict[str, Any]:
        """Return a batch's values ready to send; tensors outside of slots are copied into one.

        Slots that were taken and aren't among the values are freed. A view of a slot is never left for torch
        to send: torch moves its whole storage into memory of its own, so later batches of that slot would be
        written there, and the rank would read what the slot held before.

        Args:
            values: tensors and anything else.
            counts: counts "fresh_tensors", for which there was no slot.
        """
        sent: dict[str, Any] = {}
        handed: set[int] = set()
        for name, value in values.items():
            sent[name] = value
            if not is_plain(value):
                if isinstance(value, torch.Tensor) and not value.numel():  # it may be a view of a slot
                    sent[name] = value.clone()
                continue
            index = self._taken.get(value.untyped_storage().data_ptr())
            if index is None or index in handed:
                copy = self.empty(value.shape, value.dtype)
                if copy is None:
                    counts.add("fresh_tensors")
                    sent[name] = value if index is None else value.clone()
                    continue
                value = copy.copy_(value)
                index = self._taken[value.data_ptr()]
            handed.add(index)
            sent[name] = _Handed(self._name, index, self._slots[index].region, _layout(value))
        self._largest_batch = max(self._largest_batch, self._bytes(handed))
        self.take_back(handed)
        return sent

    def take_back(self, handed: Collection[int] = ()) -> None:
        """Free the slots taken since the last hand-over, except those handed over."""
        for index in self._taken.values():
            if index not in handed:
                self._held.array[index] = 0
        self._taken.clear()

    def _free_slot(self, size: int) -> int | None:
        """Return the smallest free slot that is large enough; otherwise a new or a grown one."""
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
        """Grow the file by the memory of a slot."""
        region = Region(self._file_bytes, -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY)
        self._file_bytes += region.size
        grow(self._file, self._file_bytes)
        return self._mapped(region)

    def _bytes(self, indices: Iterable[int]) -> int:
        return sum(self._slots[index].region.size for index in indices)

    # In the rank:

    def receive(self, index: int, region: Region, layout: _Layout) -> torch.Tensor:
        """Return the tensor handed over in a slot, which is held until the tensor's last view is dead."""
        slot = self._slots.get(index)
        if slot is None or slot.region != region:
            slot = self._slots[index] = self._mapped(region)
        array = np.frombuffer(slot.memory, np.uint8)
        slot.lent = weakref.ref(array, functools.partial(self._release, index, os.getpid()))
        flat = torch.frombuffer(array, dtype=layout.dtype, count=layout.elements)
        return flat.as_strided(layout.shape, layout.strides, layout.offset)

    def _release(self, index: int, pid: int, _: object) -> None:
        if os.getpid() == pid:  # a fork of the rank has the array, too, but must not release it
            self._held.array[index] = 0

    def _mapped(self, region: Region) -> _Slot:
        try:  # a map has a descriptor of its own
            memory = opening(lambda: mmap.mmap(self._file, region.size, offset=region.start))
            return _Slot(region, memory)
        except OSError as exc:
            raise limits.reached(f"{region.size:,} bytes of shared memory can't be mapped", exc) from exc


class _Layout(NamedTuple):
    """The layout of a tensor, in units of its elements. `elements`: how many its storage has."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    elements: int


class _Handed:
    """Pickles to a reference to a slot; unpickles in the rank to the tensor in it."""

    def __init__(self, name: str, index: int, region: Region, layout: _Layout):
        self._where = (name, index, region, layout)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, self._where


def _received(name: str, index: int, region: Region, layout: _Layout) -> torch.Tensor:
    return _received_here[name].receive(index, region, layout)


def _layout(tensor: torch.Tensor) -> _Layout:
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    return _Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), elements)
