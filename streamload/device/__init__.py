"""Batches to the device; uint8 images are normalised there (step L).

If the device has streams, a thread copies batches there ahead of their use (streams.py). Otherwise a batch is
copied when it is handed out. A batch that someone else copies to the device is put into pinned memory.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from streamload.transforms.normalise import normalise_values

if TYPE_CHECKING:
    from streamload.batches.images import MakeImages
    from streamload.transforms.plan import Statistics

Values = dict[str, Any]


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


_MEMORY_FUNCTIONS = (
    "mem_get_info", "memory_reserved", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats",
    "empty_cache", "synchronize",
)  # fmt: skip
"""Of torch.cuda, and of other devices' modules that have them; torch.accelerator of torch 2.7 has none."""


class DeviceMemory:
    """The memory of a device, and its time, by the functions of its module of torch (`torch.cuda`)."""

    def __init__(self, device: torch.device):
        self._device, self._module = device, torch.get_device_module(device)

    def limit_bytes(self) -> int:
        """Memory that this process can have in all."""
        free, _ = self._module.mem_get_info(self._device)
        return int(free + self._module.memory_reserved(self._device))

    def allocated_bytes(self) -> int:
        """Memory that tensors have now."""
        return int(self._module.memory_allocated(self._device))

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self._module.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """The most that tensors had since then."""
        return int(self._module.max_memory_allocated(self._device))

    def free_unused(self) -> None:
        """Give back what was freed, so that fragments become whole again."""
        gc.collect()
        self._module.empty_cache()

    def seconds(self) -> float:
        """A clock, once the device has done what it was given."""
        self._module.synchronize(self._device)
        return time.perf_counter()


def memory_of(device: torch.device | None) -> DeviceMemory | None:
    """Reader of a device's memory; None if there is none. It doesn't start the device."""
    try:
        module = None if device is None else torch.get_device_module(device)
    except RuntimeError:  # of a kind without a module
        return None
    if device is None or not all(hasattr(module, name) for name in _MEMORY_FUNCTIONS):
        return None
    return DeviceMemory(device)


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
        from streamload.device.streams import Pinned

        return Pinned(make_images)
    stream = None if device is None else _stream_of(device)
    if stream is None:
        return Direct(device, statistics, make_images)
    from streamload.device.streams import Streamed

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
            normalise_values(moved, *self._statistics)
        return moved


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
