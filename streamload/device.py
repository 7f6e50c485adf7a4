"""Batches to the device; uint8 images are normalised there (step L).

If the device has streams, a thread copies a batch into reused pinned memory. On a stream of its own it
starts the copies to the device and the normalisation, in one pass; only the training stream waits for
these. Otherwise a batch is copied when it is handed out. A batch that someone else copies to the device is
put into pinned memory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import torch

from streamload import limits
from streamload.batches.images import MakeImages
from streamload.ipc import is_plain
from streamload.transforms.normalise import normalise_batch
from streamload.transforms.plan import Statistics

logger = logging.getLogger("streamload")

Values = dict[str, Any]
_SLOTS = 2
"""One is filled while the copies from the other may still be running."""
_ALIGNMENT_BYTES = 256


class Feed(Protocol):
    """Transfers batches to the device. Not thread-safe.

    Attributes:
        runs_ahead: whether to send a batch before it is requested.
    """

    runs_ahead: bool

    def send(self, values: Values) -> Callable[[], Values]:
        """Start to move a batch's tensors.

        Args:
            values: tensors and anything else. Images are uint8 if the feed has statistics.

        Returns:
            A function to call once, which returns the batch for the current stream: tensors on the device,
            other values unchanged. It raises the errors of the transfer.
        """
        ...

    def close(self) -> object:
        """Release the device; idempotent. Batches that were not handed out are lost."""
        ...


class CudaMemory:
    """The memory of a CUDA device, and its time."""

    def __init__(self, device: torch.device):
        self._device = device

    def limit_bytes(self) -> int:
        """Memory that this process can have in all."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free + torch.cuda.memory_reserved(self._device))

    def allocated_bytes(self) -> int:
        """Memory that tensors have now."""
        return int(torch.cuda.memory_allocated(self._device))

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """The most that tensors had since then."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def seconds(self) -> float:
        """A clock, once the device has done what it was given."""
        torch.cuda.synchronize(self._device)
        return time.perf_counter()


def memory_of(device: torch.device | None) -> CudaMemory | None:
    """Reader of a device's memory; None if there is none. It doesn't start the device."""
    return CudaMemory(device) if device is not None and device.type == "cuda" else None


def feed_for(
    device: torch.device | None,
    statistics: Statistics | None = None,
    *,
    is_pinned: bool = False,
    make_images: MakeImages | None = None,
) -> Feed:
    """Return the feed to a device.

    Args:
        device: None leaves everything where it is.
        statistics: normalise uint8 images on the device by these; None: leave them unchanged.
        is_pinned: put batches into pinned host memory, and nowhere else.
        make_images: makes the images of a batch before the rest of it is moved; None: workers made them.
    """
    if is_pinned:
        return Pinned(make_images)
    stream = None if device is None else _stream_of(device)
    if stream is None:
        return Direct(device, statistics, make_images)
    return Streamed(stream, statistics, make_images)


class Direct:
    """To a device without streams, or to none: batches are moved when they are handed out."""

    runs_ahead = False

    def __init__(
        self,
        device: torch.device | None,
        statistics: Statistics | None = None,
        make_images: MakeImages | None = None,
    ):
        self._device, self._statistics, self._make_images = device, statistics, make_images

    def send(self, values: Values) -> Callable[[], Values]:
        """Keep the batch until it is handed out."""
        return functools.partial(self._moved, values)

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def _moved(self, values: Values) -> Values:
        if self._make_images is not None:
            values = self._make_images(values)
        if self._device is None:
            return values
        moved = {
            name: value.to(self._device) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        if self._statistics is not None:
            _normalise(moved, self._statistics)
        return moved


class Pinned:
    """To pinned host memory, by a thread, for a DataLoader around the loader that would pin each batch."""

    runs_ahead = True

    def __init__(self, make_images: MakeImages | None = None) -> None:
        self._make_images = make_images
        self._thread = limits.Threads(1, "streamload-pin")
        self.close = weakref.finalize(self, _end, self._thread, (), os.getpid())
        self.close.atexit = False  # at exit Python itself waits for the thread

    def send(self, values: Values) -> Callable[[], Values]:
        """Pass the batch to the thread."""
        return self._thread.submit(_pin, values, self._make_images).result


def _pin(values: Values, make_images: MakeImages | None) -> Values:
    """In the thread: copy a batch into pinned memory, which torch reuses once its tensors are dead."""
    if make_images is not None:
        values = make_images(values)
    return {name: value.pin_memory() if is_plain(value) else value for name, value in values.items()}


class _Sent(NamedTuple):
    """A batch whose tensors are on the device once `ready` has happened."""

    values: Values
    ready: torch.Event


class Streamed:
    """To a device with streams, by its own thread and stream.

    A batch costs one copy into pinned memory in this process, in that thread. Device memory of a batch is
    reused only after the work that the receiving stream had queued when the batch's last tensor died. Once it
    wasn't enough for a batch ahead of the step, batches are sent when they are handed out.

    Args:
        stream: of the device; not used for anything else.
        statistics: normalise uint8 images on the device by these; None: leave them unchanged.
        make_images: makes the images of a batch, on the stream; None: workers made them.
    """

    runs_ahead = True

    def __init__(
        self,
        stream: torch.Stream,
        statistics: Statistics | None = None,
        make_images: MakeImages | None = None,
    ):
        self._stream, self._statistics, self._make_images = stream, statistics, make_images
        slots = [_PinnedSlot() for _ in range(_SLOTS)]
        self._next_slot = itertools.cycle(slots)
        self._is_short = False  # of device memory, for a batch ahead
        self._thread = limits.Threads(1, "streamload-device")
        self.close = weakref.finalize(self, _end, self._thread, slots, os.getpid())
        self.close.atexit = False  # at exit Python itself waits for the thread

    def send(self, values: Values) -> Callable[[], Values]:
        """Pass the batch to the thread."""
        return functools.partial(self._hand_out, values, None if self._is_short else self._submit(values))

    def _submit(self, values: Values) -> Future[_Sent]:
        slot = next(self._next_slot)
        return self._thread.submit(_send, values, slot, self._stream, self._statistics, self._make_images)

    def _hand_out(self, values: Values, sent: Future[_Sent] | None) -> Values:
        """In the training thread: the batch, for its stream."""
        if sent is not None:
            try:
                return _received(sent.result())
            except torch.OutOfMemoryError as error:
                self._give_up_ahead(error)
        return _received(self._submit(values).result())

    def _give_up_ahead(self, error: BaseException) -> None:
        """Send no more batches ahead, and wait until the device has freed what its queued work uses."""
        traceback.clear_frames(error.__traceback__)  # these hold the tensors that did fit
        if not self._is_short:
            self._is_short = True
            logger.warning(
                "the device's memory is full with a batch ahead of the step: from now on a batch is copied "
                "when the training asks for it, and the step waits for that (%s)",
                str(error).partition(". ")[0],
            )
        torch.accelerator.synchronize(self._stream.device)


class _PinnedSlot:
    """Reused pinned memory for one batch at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._read: torch.Event | None = None  # happens when the content has been read

    def wait(self) -> None:
        """Wait until the content has been read."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None

    def copies(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors into it, with the same layout. Waits until the previous content has been read."""
        self.wait()
        sizes = [-(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for tensor in tensors.values()]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=True)
        starts = itertools.accumulate(sizes, initial=0)
        return {
            name: _room_for(tensor, self._memory[start:]).copy_(tensor)
            for (name, tensor), start in zip(tensors.items(), starts, strict=False)
        }

    def is_read_by(self, stream: torch.Stream) -> None:
        """Note that the content is read by the work that a stream has queued so far."""
        self._read = stream.record_event()


def _room_for(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return a tensor in given memory with the dtype, shape and memory format of another."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return memory[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, strides)


def _send(
    values: Values,
    slot: _PinnedSlot,
    stream: torch.Stream,
    statistics: Statistics | None,
    make_images: MakeImages | None,
) -> _Sent:
    """In the thread: start the images, the copies to the device, and the normalisation."""
    torch.accelerator.set_stream(stream)  # of this thread, with its device
    if make_images is not None:
        values = make_images(values)
    moved = dict(values)
    try:
        for name, copy in slot.copies({k: v for k, v in values.items() if is_plain(v)}).items():
            moved[name] = copy.to(stream.device, non_blocking=True)
    finally:
        slot.is_read_by(stream)
    for name, value in moved.items():
        if isinstance(value, torch.Tensor):
            moved[name] = value.to(stream.device)
    if statistics is not None:
        _normalise(moved, statistics)
    return _Sent(moved, stream.record_event())


def _normalise(values: Values, statistics: Statistics) -> None:
    """Normalise the images of a batch on its device, or its patches; these are 0 where there are none."""
    if "image" in values:
        values["image"] = normalise_batch(values["image"], *statistics)
    elif "patches" in values:
        levels, valid = values["patches"], values["patch_valid"]
        channels_last = levels.view(len(levels), -1, 1, 3).permute(0, 3, 1, 2)
        floats = normalise_batch(channels_last, *statistics).permute(0, 2, 3, 1).reshape(levels.shape)
        values["patches"] = floats.masked_fill_(~valid[..., None], 0.0)


def _received(sent: _Sent) -> Values:
    """In the training thread: make its stream, not the thread, wait for the tensors."""
    values, ready = sent
    stream = torch.accelerator.current_stream(ready.device)
    stream.wait_event(ready)
    for value in values.values():
        if isinstance(value, torch.Tensor):
            value.record_stream(stream)
    return values


def _end(thread: limits.Threads, slots: Sequence[_PinnedSlot], pid: int) -> None:
    """End the thread, and wait for copies that read from pinned memory."""
    if os.getpid() != pid:
        return  # a fork of the rank has neither
    thread.shutdown(cancel_futures=True)
    for slot in slots:
        with contextlib.suppress(RuntimeError):  # of the device; then there are no copies
            slot.wait()


def _stream_of(device: torch.device) -> torch.Stream | None:
    """Return a new stream of a device; None if it has no streams or doesn't exist."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    try:
        return torch.Stream(device=device)
    except RuntimeError:  # moving a batch to the device will report the error
        return None


def is_accelerator_used() -> bool:
    """True if this process has started its accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and is_initialized(accelerator)


def is_initialized(accelerator: torch.device) -> bool:
    """True if this process has started a device of this kind."""
    state = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return state is not None and bool(state())
