"""Batches onto the device, normalised there where they come as bytes (step L).

Where the device has streams, a thread copies a batch into pinned memory that is used again, and starts, on
a stream of the feed's own, the copies from there and the one pass that makes floats of levels. Nobody waits
for these but the stream that trains. Elsewhere a batch is copied when it is handed out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from streamload.ipc import is_plain
from streamload.transforms.normalise import normalise_batch
from streamload.transforms.plan import Statistics

Values = dict[str, Any]

_SLOTS = 2
"""One is filled while the other one's copies may still be under way."""
_ALIGNMENT_BYTES = 256


class Feed(Protocol):
    """The way of batches to where they are used; one thread uses it."""

    runs_ahead: bool
    """Whether it is of use to send a batch before it is asked for."""

    def send(self, values: Values) -> Callable[[], Values]:
        """Begin to move a batch's tensors.

        Args:
            values: tensors, and whatever else. Images are uint8 if the feed has statistics.

        Returns:
            What gives the batch, once, to the stream that is current there: the tensors on the device, the
            rest as it was. What went wrong on the way is raised there.
        """
        ...

    def close(self) -> object:
        """Let go of the device; what was sent and not handed out is lost. Once is enough."""
        ...


def feed_for(device: torch.device | None, statistics: Statistics | None = None) -> Feed:
    """The feed to a device.

    Args:
        device: None leaves everything where it is.
        statistics: images are uint8 and get normalised there by these; None: they stay as they are.
    """
    stream = None if device is None else _stream_of(device)
    return Direct(device, statistics) if stream is None else Streamed(stream, statistics)


class Direct:
    """To a device without streams, or nowhere: batches are moved when they are handed out."""

    runs_ahead = False

    def __init__(self, device: torch.device | None, statistics: Statistics | None = None):
        self._device, self._statistics = device, statistics

    def send(self, values: Values) -> Callable[[], Values]:
        """Remember the batch."""
        return functools.partial(self._moved, values)

    def close(self) -> None:
        """Nothing is held."""

    def _moved(self, values: Values) -> Values:
        if self._device is None:
            return values
        moved = {
            name: value.to(self._device) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        if self._statistics is not None:
            moved["image"] = normalise_batch(moved["image"], *self._statistics)
        return moved


class _Sent(NamedTuple):
    """A batch whose tensors are on the device once an event has come."""

    values: Values
    ready: torch.Event


class Streamed:
    """To a device with streams, by a thread and a stream of its own.

    What a batch costs in this process is one copy into pinned memory, in that thread. The memory of a batch
    on the device is used again only behind what the stream that it was handed to had been given by the time
    that its last tensor is dead.

    Args:
        stream: not used for anything else; it says which device.
        statistics: images are uint8 and get normalised there by these; None: they stay as they are.
    """

    runs_ahead = True

    def __init__(self, stream: torch.Stream, statistics: Statistics | None = None):
        self._stream, self._statistics = stream, statistics
        slots = [_Slot() for _ in range(_SLOTS)]
        self._next_slot = itertools.cycle(slots)
        self._thread = ThreadPoolExecutor(1, "streamload-device")
        self.close = weakref.finalize(self, _end, self._thread, slots, os.getpid())
        self.close.atexit = False  # Python itself waits for the thread then

    def send(self, values: Values) -> Callable[[], Values]:
        """Give the batch to the thread."""
        slot = next(self._next_slot)
        sent = self._thread.submit(_send, values, slot, self._stream, self._statistics)
        return functools.partial(_hand_out, sent)


class _Slot:
    """Pinned memory for one batch after the other."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._read: torch.Event | None = None  # comes when what is in it has been read

    def wait(self) -> None:
        """Until what is in it has been read."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None

    def copies(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of tensors in it, laid out alike, in place of what was there and has been read."""
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
        """What is in it has been read once all is done that a stream has been given by now."""
        self._read = stream.record_event()


def _room_for(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A tensor in given memory, of the type, shape and memory format of another."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return memory[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, strides)


def _send(values: Values, slot: _Slot, stream: torch.Stream, statistics: Statistics | None) -> _Sent:
    """In the thread: start the copies to the device, and what is done with them there."""
    torch.accelerator.set_stream(stream)  # of this thread, with its device
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
        moved["image"] = normalise_batch(moved["image"], *statistics)
    return _Sent(moved, stream.record_event())


def _hand_out(sent: Future[_Sent]) -> Values:
    """In the thread that trains: let its stream, but not itself, wait for the tensors."""
    values, ready = sent.result()
    stream = torch.accelerator.current_stream(ready.device)
    stream.wait_event(ready)
    for value in values.values():
        if isinstance(value, torch.Tensor):
            value.record_stream(stream)
    return values


def _end(thread: ThreadPoolExecutor, slots: Sequence[_Slot], pid: int) -> None:
    """End the thread, and let the copies end that read from pinned memory."""
    if os.getpid() != pid:
        return  # a process forked from the rank has neither
    thread.shutdown(cancel_futures=True)
    for slot in slots:
        with contextlib.suppress(RuntimeError):  # of the device; then there are no copies either
            slot.wait()


def _stream_of(device: torch.device) -> torch.Stream | None:
    """A new stream of a device; None where it has none, or isn't there."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    try:
        return torch.Stream(device=device)
    except RuntimeError:  # what is wrong with the device itself is said when a batch is moved there
        return None
