"""Batches through pinned memory, in a thread: to a device with streams, or for another's copy (step L).

The thread copies a batch into reused pinned memory. On a stream of its own it starts the copies to the device
and the normalisation, in one pass; only the training stream waits for these.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from streamload import limits
from streamload.batches.images import MakeImages
from streamload.ipc import is_plain
from streamload.transforms.normalise import normalise_values
from streamload.transforms.plan import Statistics

logger = logging.getLogger("streamload")

Values = dict[str, Any]
_SLOTS = 2
"""One is filled while the copies from the other may still be running."""
_ALIGNMENT_BYTES = 256


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
        normalise_values(moved, *statistics)
    return _Sent(moved, stream.record_event())


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
