"""The loader's numbers in OpenCLIP's own logs: its log line of a step, TensorBoard, wandb and trackio.

Its numbers of a step are those since the step logged before: OpenCLIP logs every --log-every-n-steps, its
development version to TensorBoard and wandb also every --log-metric-every-n-steps.
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

    OpenCLIP 3.3 writes a step's line first, the development version last, and not for each step: a logger
    that has had the numbers before takes new ones.
    """

    def __init__(self, loader: Loader):
        self._loader = loader
        self._last: dict[str, float] = {}
        self._served: set[str] = set()  # loggers that have the last numbers

    def of_step(self, logger: str) -> dict[str, float]:
        """The numbers of the step that a logger is about to log."""
        if not self._last or logger in self._served:
            self._last = self._loader.metrics()
            self._served.clear()
        self._served.add(logger)
        return self._last

    def take(self) -> str:
        """The numbers for a line, in words."""
        numbers = self.of_step("line")
        waited, ready = numbers["loader/data_wait"], numbers["loader/ready_batches"]
        received = format_bytes(numbers["loader/origin_bytes_per_second"])
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
            for own_name, number in self._numbers.of_step("TensorBoard").items():
                self._writer.add_scalar(own_name, number, step)


class _Wandb:
    """The wandb or trackio module as OpenCLIP uses it, with the loader's numbers beside its own."""

    def __init__(self, module: Any, numbers: _Numbers):
        self._module = module
        self._numbers = numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def log(self, data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Log a step's values, and the loader's."""
        numbers = self._numbers.of_step("wandb") if _FIRST in data else {}
        return self._module.log({**data, **numbers}, *args, **kwargs)


@contextmanager
def _in_wandb(train: ModuleType, numbers: _Numbers) -> Iterator[None]:
    modules = {name: getattr(train, name, None) for name in ("wandb", "trackio")}
    present = {name: module for name, module in modules.items() if module is not None}
    for name, module in present.items():
        setattr(train, name, _Wandb(module, numbers))
    try:
        yield
    finally:
        for name, module in present.items():
            setattr(train, name, module)


@contextmanager
def _in_lines(numbers: _Numbers) -> Iterator[None]:
    """Add the numbers to OpenCLIP's line about a step, whichever of its loggers logs the line."""
    make = logging.getLogRecordFactory()

    def make_with_numbers(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if isinstance(record.msg, str) and record.msg.startswith(_LINE) and not record.args:
            record.msg = f"{record.msg} {numbers.take()}"
        return record

    logging.setLogRecordFactory(make_with_numbers)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
