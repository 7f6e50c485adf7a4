"""Lazy modules: built at the first use, with the same result as if built at once.

Calls of `train`, `eval`, `to`, `half` and the like are recorded and repeated, in order, after the build;
anything else builds the module. The build runs under the random generators' states of when the module was
made, so its weights are those of a module built at once, and restores the present states afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from streamload.derived.proof.builds import Generators

_PENDING = "_streamload_pending"
_BUILDING = "_streamload_building"
_building = threading.RLock()
not_built: weakref.WeakSet[Any] = weakref.WeakSet()
"""Lazy modules of this process."""
_PROBED = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.bool,
)


@dataclass
class Pending:
    """What it takes to build a lazy module.

    Attributes:
        arguments, keywords: of its `__init__`.
        generators: the random generators' states when it was made.
        asked: recorded calls: method, arguments, and a text that is equal for calls of equal effect.
        device: the device that recorded calls moved it to.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    generators: Generators
    asked: list[tuple[str, tuple[Any, ...], str]] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def ask(self, method: str, arguments: tuple[Any, ...], meaning: str) -> None:
        """Record a call; of consecutive calls of `train` only the last counts."""
        if method == "train" and self.asked and self.asked[-1][0] == "train":
            self.asked.pop()
        self.asked.append((method, arguments, meaning))


class Lazily(type):
    """Metaclass of classes whose instances are built lazily."""

    _streamload_eager: Callable[[], bool]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance without calling `__init__`, after checking its arguments."""
        if cls._streamload_eager():
            built = super().__call__(*args, **kwargs)
            built._streamload_made(args, kwargs)
            return built
        inspect.signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
        make: Any = cls.__new__
        module = make(cls, *args, **kwargs)
        not_built.add(module)
        module.__dict__[_PENDING] = Pending(args, kwargs, Generators())
        module.__dict__["training"] = True
        return module


@functools.cache
def lazy_metaclass(metaclass: Any) -> Any:
    """A lazy metaclass for a class that already has a metaclass."""
    if metaclass is type:
        return Lazily
    return metaclass if issubclass(metaclass, Lazily) else type("Lazily", (Lazily, metaclass), {})


def made_lazy(cls: type[torch.nn.Module], base: type[torch.nn.Module], members: dict[str, Any]) -> Any:
    """Rebuild a class with another base in place of `torch.nn.Module`, and with additional members."""
    bases = tuple(base if own_base is torch.nn.Module else own_base for own_base in cls.__bases__)
    names = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    bases = bases if base in bases else (base, *bases)
    metaclass: Any = type(cls)
    lazy = lazy_metaclass(metaclass)(cls.__name__, bases, {**names, **members})
    lazy.__qualname__ = cls.__qualname__
    for value in names.values():
        _repoint(value, cls, lazy)
    return lazy


def _repoint(value: Any, old: type, new: type) -> None:
    """Point `super()` and `__class__` in a function at another class."""
    if isinstance(value, property):
        for accessor in (value.fget, value.fset, value.fdel):
            _repoint(accessor, old, new)
    if isinstance(value, functools.cached_property):
        _repoint(value.func, old, new)
    function = inspect.unwrap(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value)
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not bound yet
            if cell.cell_contents is old:
                cell.cell_contents = new


class LazyModule(torch.nn.Module):
    """Base class of lazy modules."""

    _streamload_transparent = True

    @staticmethod
    def _streamload_eager() -> bool:
        return False

    def _streamload_made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called after an eager build, with the arguments of `__init__`."""

    def _streamload_build(self, pending: Pending) -> None:
        """Run `__init__` and the recorded calls."""
        self.__init__(*pending.arguments, **pending.keywords)  # type: ignore[misc]
        for method, arguments, _ in pending.asked:
            getattr(self, method)(*arguments)

    def __getattr__(self, name: str) -> Any:
        if is_pending(self) and not (name.startswith("__") and name.endswith("__")):
            build(self)
            return getattr(self, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        build(self)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        build(self)
        super().__delattr__(name)

    def __dir__(self) -> list[str]:
        build(self)
        return list(super().__dir__())  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(not built yet)" if is_pending(self) else super().__repr__()

    def train(self, mode: bool = True) -> Any:
        """As `torch.nn.Module.train`; before the build it is recorded."""
        if not is_pending(self):
            return super().train(mode)
        pending_of(self).ask("train", (mode,), f"train {mode}")
        self.__dict__["training"] = mode
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """As `torch.nn.Module.requires_grad_`; before the build it is recorded."""
        if not is_pending(self):
            return super().requires_grad_(requires_grad)
        pending_of(self).ask("requires_grad_", (requires_grad,), "")
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        meaning = _meaning_of(fn) if is_pending(self) and recurse else None
        if meaning is None:
            build(self)
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        pending = pending_of(self)
        pending.ask("_apply", (fn,), meaning)
        pending.device = fn(torch.empty(0, device=pending.device)).device
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_pending(self) and any(method == "_apply" for method, _, _ in pending_of(self).asked):
            build(self)  # the function of `to` can't be pickled
        return super().__reduce_ex__(protocol)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if _PENDING in state:
            self.__dict__.update(state)
        else:
            super().__setstate__(state)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def is_pending(module: Any) -> bool:
    """True if a module isn't built yet."""
    return _PENDING in module.__dict__


def pending_of(module: Any) -> Pending:
    """Arguments and recorded calls of a lazy module."""
    pending: Pending = module.__dict__[_PENDING]
    return pending


def unbuilt(module: Any) -> contextlib.AbstractContextManager[Any]:
    """Keep other threads from building a module, after waiting for one that is doing so."""
    is_built = not is_pending(module) and _BUILDING not in module.__dict__
    return contextlib.nullcontext() if is_built else _building


def build(module: Any) -> None:
    """Build a module unless it is built. Other threads wait; exceptions of `__init__` propagate unchanged."""
    if not is_pending(module) and _BUILDING not in module.__dict__:
        return
    with _building:
        if not is_pending(module):
            return
        pending: Pending = module.__dict__.pop(_PENDING)
        kept = dict(module.__dict__)
        module.__dict__[_BUILDING] = True
        generators = Generators()
        try:
            pending.generators.restore()
            try:
                module._streamload_build(pending)
            finally:
                generators.restore()
        except BaseException:
            module.__dict__.clear()
            module.__dict__.update({**kept, _PENDING: pending})
            raise
        del module.__dict__[_BUILDING]


def _new_lock() -> None:
    """Fork safety: the thread that holds the lock stays with the parent."""
    global _building
    _building = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


def _meaning_of(fn: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """The dtypes and devices that a function converts tensors to; None: it does something else."""
    results = []
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of complex numbers that become real
            for dtype in _PROBED:
                probe = torch.tensor([0, 1], dtype=dtype)
                result = fn(probe)
                if not torch.equal(result.to("cpu", dtype), probe):
                    return None
                results.append(f"{result.dtype} {result.device.type}")
    except Exception:
        return None
    return ", ".join(results)
