"""The device of a loader's batches: the one given, torch's own ("auto"), or that of the framework around it.

Nothing here starts an accelerator: workers that are forked afterwards must not inherit its context.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader

from streamload.device import is_initialized
from streamload.errors import OptionError
from streamload.loader.groups import Order
from streamload.topology import read_topology

logger = logging.getLogger("streamload")

AUTO: Literal["auto"] = "auto"
DeviceOption = torch.device | Literal["auto"] | None
"""None: batches stay in host memory, unless a framework says where they go."""

_FABRIC = ("lightning.fabric.", "lightning_fabric.")
_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")
_ACCELERATE = ("accelerate.",)
_BETWEEN = ("torch.utils.data.", "streamload.")
"""Modules whose frames may stand between a framework's loop and the loader; a user's code may not."""


class Destination:
    """Destination of a loader's batches.

    Args:
        given: the loader's `device=`.
        order: its ranks, for "auto" on a machine with several devices.

    Attributes:
        device: where the batches of the next epoch go, known from `settle` on; None: nothing says so, and
            they stay in host memory.
        is_pinned: whether they go into pinned host memory, as a DataLoader around the loader asks for it.
    """

    def __init__(self, given: DeviceOption, order: Order):
        self._given, self._order = given, order
        self._placed: torch.device | None = None
        self._auto: torch.device | None = None
        self._auto_pid = 0  # of the process that looked for it
        self._is_warned = False
        self.device = None if given == AUTO else given
        self.is_pinned = False

    def place(self, device: str | torch.device) -> None:
        """Take a framework's device from the next epoch on, unless `device=` names one."""
        if self._given in (None, AUTO):
            self._placed = torch.device(device)

    def expected(self) -> torch.device:
        """Destination of batches in a plain loop."""
        return self._chosen(Surroundings()) or torch.device("cpu")

    def settle(self) -> bool:
        """Decide for the epoch that begins; called beneath `iter()`.

        Returns:
            Whether workers have to start again: for a device they make images as uint8.

        Raises:
            OptionError: a DataLoader around the loader pins memory, and `device=` names an accelerator.
        """
        before, around = (_accelerator(self.device), self.is_pinned), surroundings()
        self.is_pinned = around.pins
        self.device = self._chosen(around)
        return (_accelerator(self.device), self.is_pinned) != before

    def _chosen(self, around: Surroundings) -> torch.device | None:
        option = self._given
        if option not in (None, AUTO):
            assert isinstance(option, torch.device)
            if around.pins and _accelerator(option) is not None:
                raise OptionError(
                    f"a DataLoader with pin_memory=True is around this loader, whose batches are on "
                    f"device={str(option)!r} already: give that DataLoader pin_memory=False"
                )
            return option
        if around.pins:
            self._warn_of_pinning()
            return torch.device("cpu")
        if around.device is not None or self._placed is not None:
            return around.device or self._placed
        return None if option is None else self._found()

    def _found(self) -> torch.device | None:
        """The device that "auto" stands for; the first call in a process logs it."""
        if self._auto is None or self._auto_pid != os.getpid():  # a fork may have another rank
            order = self._order
            device, reason = auto_device(lambda: read_topology(order.rank, order.world_size).local_rank)
            place = "in host memory" if device is None else f"on {device}"
            logger.info('device="auto": batches are %s (%s)', place, reason)
            self._auto, self._auto_pid = device or torch.device("cpu"), os.getpid()
        return self._auto

    def _warn_of_pinning(self) -> None:
        if not self._is_warned:
            self._is_warned = True
            logger.warning(
                "a DataLoader with pin_memory=True is around this loader: batches come in pinned host "
                "memory, and are copied to the device in the training step. To have them there ahead of it, "
                "give that DataLoader pin_memory=False (transformers' TrainingArguments: "
                "dataloader_pin_memory=False)"
            )


class Surroundings(NamedTuple):
    """The framework that iterates a loader.

    Attributes:
        device: to which a framework moves the batches; None: no framework does.
        pins: whether a DataLoader around the loader copies each batch into pinned host memory.
    """

    device: torch.device | None = None
    pins: bool = False


def read_device(device: Any) -> DeviceOption:
    """The value of `device=`, checked.

    Raises:
        OptionError: torch doesn't know such a device, or finds none.
    """
    if device is None:
        return None
    if isinstance(device, str) and device == AUTO:
        return AUTO
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise OptionError(
            f"device={device!r}; expected 'auto', or one of torch's, like 'cuda', 'cuda:1', 'mps' or 'cpu'"
        ) from exc
    if parsed.type == "cuda" and (parsed.index or 0) >= (there := torch.cuda.device_count()):
        raise OptionError(f"device={device!r}: torch {torch.__version__} finds {there} such devices here")
    return parsed


def auto_device(local_rank: Callable[[], int]) -> tuple[torch.device | None, str]:
    """The accelerator of this process.

    It is the current device, if that isn't the first one, which is current where none was set; else the one
    of the local rank.

    Args:
        local_rank: of this process on its node; called if there are several devices.

    Returns:
        The device, None without an accelerator; and the reason, for the log.
    """
    accelerator = torch.accelerator.current_accelerator()
    count = 0 if accelerator is None else torch.accelerator.device_count()
    if accelerator is None or not count:
        return None, "torch finds no accelerator"
    current = _current_index(accelerator)
    if current:
        return torch.device(accelerator.type, current), "the current device"
    if count == 1:
        return torch.device(accelerator.type, 0), "the only one"
    rank = local_rank()
    return torch.device(accelerator.type, rank % count), f"local rank {rank}, {count} devices"


def surroundings() -> Surroundings:
    """Find what iterates a loader, by the callers of `iter()`: frameworks don't tell a DataLoader."""
    pins = False
    caller: FrameType | None = sys._getframe(1)
    while caller is not None:
        module = f"{caller.f_globals.get('__name__', '')}."
        is_framework = module.startswith((*_FABRIC, *_LIGHTNING, *_ACCELERATE))
        if not (is_framework or module.startswith(_BETWEEN)):
            break
        owner = _self_of(caller)
        if is_framework:
            device = _device_of(module, owner)
            if device is not None:
                return Surroundings(device, pins)
        elif isinstance(owner, DataLoader) and owner.pin_memory:
            pins = _can_pin()
        caller = caller.f_back
    return Surroundings(None, pins)


def _self_of(frame: FrameType) -> Any:
    """The object whose method a frame runs; None if it runs a function.

    Before Python 3.13 `f_locals` is a copy that the frame keeps, with all that it refers to, until it ends: a
    loader, or a batch, would outlive its last name. So the copy is emptied, and only that of a method, as the
    `f_locals` of a module are its namespace.
    """
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return None
    variables = frame.f_locals
    owner = variables.get("self")
    if isinstance(variables, dict):
        variables.clear()
    return owner


def _device_of(module: str, owner: Any) -> torch.device | None:
    """The device to which a framework's object moves batches, if it is one that does."""
    if module.startswith(_LIGHTNING):
        strategy = getattr(getattr(owner, "trainer", None), "strategy", None)
        device = getattr(strategy, "root_device", None)
    else:  # Fabric's DataLoader, or one of Accelerate's; its dispatcher has the device in its state
        device = getattr(owner, "device", None) or getattr(getattr(owner, "state", None), "device", None)
    return device if isinstance(device, torch.device) else None


def _accelerator(device: torch.device | None) -> torch.device | None:
    """The device if workers make images for it as uint8."""
    return None if device is None or device.type == "cpu" else device


def _can_pin() -> bool:
    """True if a DataLoader's pin_memory=True has an effect here."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type != "mps" and torch.accelerator.device_count() > 0


def _current_index(accelerator: torch.device) -> int:
    """The index of the current device; 0 if the accelerator wasn't started."""
    if not is_initialized(accelerator):
        return 0
    current: Callable[[], int] | None = getattr(torch.get_device_module(accelerator), "current_device", None)
    return 0 if current is None else current()
