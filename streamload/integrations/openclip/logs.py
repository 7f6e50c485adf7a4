"""The loader's numbers in OpenCLIP's own logs: its log line of a step, its TensorBoard and its wandb.

OpenCLIP logs every --log-every-n-steps; the numbers are those since it last did.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from streamload.integrations.openclip.data import EpochBatches
from streamload.loader import Loader
from streamload.metrics import format_bytes

_LINE = "Train Epoch: "
_FIRST = "train/data_time"
"""The name that each of OpenCLIP's steps is logged under, among others."""


def report_in(main: ModuleType, train: ModuleType) -> Callable[[], None]:
    """Make an OpenCLIP training log the numbers of its loader, too.

    Args:
        main, train: open_clip_train.main and open_clip_train.train.

    Returns:
        A function that restores the original.
    """
    original = main.train_one_epoch
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_one_epoch(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        batches = getattr(bound.arguments["data"]["train"], "dataloader", None)
        if not isinstance(batches, EpochBatches):
            return original(*args, **kwargs)
        numbers = _Numbers(batches.loader)
        writer = bound.arguments.get("tb_writer")
        if writer is not None:
            bound.arguments["tb_writer"] = _Writer(writer, numbers)
        with _in_lines(numbers), _in_wandb(train, numbers):
            return original(*bound.args, **bound.kwargs)

    main.train_one_epoch = train_one_epoch  # type: ignore[attr-defined]
    return functools.partial(setattr, main, "train_one_epoch", original)


class _Numbers:
    """The numbers of one step's log, the same in each of OpenCLIP's loggers.

    OpenCLIP writes the line first: it takes new numbers.
    """

    def __init__(self, loader: Loader):
        self._loader = loader
        self.last: dict[str, float] = {}

    def take(self) -> str:
        """Take the numbers since the last line; returns them in words."""
        self.last = self._loader.metrics()
        waited, ready = self.last["loader/data_wait"], self.last["loader/ready_batches"]
        received = format_bytes(self.last["loader/origin_bytes_per_second"])
        return f"Data wait: {waited:.1%} Ready: {ready:.0f} Origin: {received}/s"


class _Writer:
    """OpenCLIP's TensorBoard writer, with the loader's numbers beside its own."""

    def __init__(self, writer: Any, numbers: _Numbers):
        self._writer = writer
        self._numbers = numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def add_scalar(self, name: str, value: Any, step: Any = None, *more: Any, **about: Any) -> None:
        """Write a value; with the first one of a step, the loader's."""
        self._writer.add_scalar(name, value, step, *more, **about)
        if name == _FIRST:
            for own_name, number in self._numbers.last.items():
                self._writer.add_scalar(own_name, number, step)


class _Wandb:
    """The wandb module as OpenCLIP uses it, with the loader's numbers beside its own."""

    def __init__(self, module: Any, numbers: _Numbers):
        self._module = module
        self._numbers = numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def log(self, data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Log a step's values, and the loader's."""
        numbers = self._numbers.last if _FIRST in data else {}
        return self._module.log({**data, **numbers}, *args, **kwargs)


@contextmanager
def _in_wandb(train: ModuleType, numbers: _Numbers) -> Iterator[None]:
    module = getattr(train, "wandb", None)
    if module is None:
        yield
        return
    train.wandb = _Wandb(module, numbers)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        train.wandb = module  # type: ignore[attr-defined]


@contextmanager
def _in_lines(numbers: _Numbers) -> Iterator[None]:
    """Add the numbers to OpenCLIP's line about a step."""

    def add(record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str) and record.msg.startswith(_LINE) and not record.args:
            record.msg = f"{record.msg} {numbers.take()}"
        return True

    root = logging.getLogger()
    root.addFilter(add)
    try:
        yield
    finally:
        root.removeFilter(add)
