"""An accelerator in Python that counts copies: torch's own dispatch, streams and `.to()`, no hardware.

`install()` registers a backend under torch's name for accelerators from outside ("PrivateUse1"), called
"npu", which open_clip, accelerate and transformers know. A tensor on it has its data in host memory, where
all of its operations run, so whole trainings work. Copies from and to it are recorded with their thread;
pinned memory is host memory whose addresses are remembered. What it doesn't simulate is time: work is done
when it is queued.

It is for the whole process, and for good: tests run it in a process of their own.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_iter, tree_map

NAME = "npu"
IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""torch ≥ 2.10 has backends in Python."""
_MIXED = ("aten::copy_", "aten::_copy_from", "aten::_to_copy", "aten::index", "aten::_index", "aten::set_")
"""Operations that take tensors of host and device together."""

_DIRECT = (
    torch.ops.aten.arange.default,
    torch.ops.aten.arange.start,
    torch.ops.aten.arange.start_step,
    torch.ops.aten._copy_from.default,
)
"""What the fallback misses: factories that resize an empty tensor, and what torch.tensor() calls."""


@dataclass(frozen=True)
class Copy:
    """A copy between host and device, or between two devices."""

    thread: str
    source: str
    target: str
    dtype: str
    shape: tuple[int, ...]
    pinned: bool


@dataclass
class Device:
    """What happened on the device.

    Attributes:
        copies: in order.
        pins: the shapes of tensors that were copied into pinned memory by `pin_memory()`.
        index: of the current device.
        count: how many there are.
        is_initialized: whether anything has used it.
        failures: how many of the next allocations by `.to()` and factories find no memory.
    """

    copies: list[Copy] = field(default_factory=list)
    pins: list[tuple[int, ...]] = field(default_factory=list)
    index: int = 0
    count: int = 1
    is_initialized: bool = False
    failures: int = 0

    def copied(self, source: str = "cpu", *, least: int = 1) -> list[dict[str, Any]]:
        """The copies from a device, of tensors with so many elements at least, as JSON."""
        return [
            asdict(copy)
            for copy in self.copies
            if copy.source.partition(":")[0] == source and torch.Size(copy.shape).numel() >= least
        ]


DEVICE = Device()
_pinned: list[torch.Tensor] = []  # kept, so that no other tensor gets their addresses
_registered: list[torch.library.Library] = []


class DeviceTensor(torch.Tensor):
    """A tensor on the device; `host` has its data."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=device,
        )  # fmt: skip
        tensor.host = host
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({self.host!r}, device={self.device})"

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def record_stream(self, stream: Any) -> None:
        """Do nothing: memory is kept for as long as the tensor."""

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, *args, **(kwargs or {}))


def install(count: int = 1) -> Device:
    """Make the device torch's accelerator.

    Args:
        count: how many there are.
    """
    DEVICE.count = count
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_module())
    for key, fallback in (("PrivateUse1", _run), ("AutocastPrivateUse1", torch.library.fallthrough_kernel)):
        _registered.append(torch.library.Library("_", "IMPL"))
        _registered[-1].fallback(fallback, key)
    _registered.append(torch.library.Library("aten", "IMPL"))
    for op in _DIRECT:
        _registered[-1].impl(op.name(), functools.partial(_run, op), "PrivateUse1")
    torch.autograd.set_multithreading_enabled(False)  # its engine knows one device
    _simulate_pinned_memory()
    _simulate_streams()
    stub: Any = types.ModuleType("torch_npu")  # which accelerate and transformers look for
    stub.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    stub.__version__ = torch.__version__
    stub.npu_fusion_attention = stub.npu_rotary_mul = None
    sys.modules["torch_npu"] = stub
    return DEVICE


@torch.inference_mode(False)  # else a view of a tensor from outside couldn't be wrapped
@torch.no_grad()
def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of device tensors, or one that makes such, in host memory."""
    DEVICE.is_initialized = True
    name = op.name()
    inputs = {id(x.host): x for x in tree_iter((args, kwargs)) if isinstance(x, DeviceTensor)}
    here = next((tensor.device for tensor in inputs.values()), None)
    _refuse_mixed(name, args, here)
    asked = kwargs.get("device")
    target = here if asked is None else torch.device(asked)
    if target is not None and target.type == NAME and target.index is None:
        target = torch.device(NAME, DEVICE.index)
    _record(name, args, target)
    given, options = tree_map(lambda x: x.host if isinstance(x, DeviceTensor) else x, (args, kwargs))
    if asked is not None and target is not None and target.type == NAME:
        options["device"] = torch.device("cpu")
        _allocate()
    options.pop("pin_memory", None)
    if name == "aten::_copy_from":
        given[1].copy_(given[0])
        return args[1]
    result = op(*given, **options)
    if target is None or target.type != NAME:
        return result

    def on_device(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, DeviceTensor):
            return x
        return inputs[id(x)] if id(x) in inputs else DeviceTensor(x, target)

    return tree_map(on_device, result)


def _refuse_mixed(name: str, args: Any, here: torch.device | None) -> None:
    """Raise as accelerators do where tensors of host and device are mixed."""
    if here is None or name.startswith(_MIXED):
        return
    for x in tree_iter(args):
        if isinstance(x, torch.Tensor) and x.dim() and x.device != here:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got {x.device}, {here}"
            )


def _record(name: str, args: Any, target: torch.device | None) -> None:
    """Record a copy between two devices."""
    if name == "aten::copy_":
        source, to = args[1], args[0].device
    elif name == "aten::_copy_from":
        source, to = args[0], args[1].device
    elif name == "aten::_to_copy":
        source, to = args[0], target
    else:
        return
    if to is None or source.device == to:
        return
    DEVICE.copies.append(
        Copy(
            threading.current_thread().name,
            str(source.device),
            str(to),
            str(source.dtype).removeprefix("torch."),
            tuple(source.shape),
            source.device.type == "cpu" and source.is_pinned(),
        )
    )


def _allocate() -> None:
    """Raise as an accelerator does whose memory is full, as often as DEVICE.failures says."""
    if DEVICE.failures:
        DEVICE.failures -= 1
        raise torch.OutOfMemoryError("the simulated device is out of memory")


def _simulate_pinned_memory() -> None:
    """torch asks the backend for pinned memory, and one in Python has none."""
    plain_empty = torch.empty

    @functools.wraps(plain_empty)
    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = plain_empty(*args, **kwargs)
        if pin_memory:
            _pinned.append(made)
        return made

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        return tensor.device.type == "cpu" and any(
            start.data_ptr() <= tensor.data_ptr() < start.data_ptr() + max(1, start.nbytes)
            for start in _pinned
        )

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        if is_pinned(tensor):
            return tensor
        DEVICE.pins.append(tuple(tensor.shape))
        pinned = torch.empty_like(tensor)
        _pinned.append(pinned)
        return pinned.copy_(tensor)

    torch.empty = empty
    torch.Tensor.is_pinned = is_pinned  # type: ignore[method-assign]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]


class _Event:
    """Of a stream whose work is done when it is queued."""

    def __init__(self, device: torch.device):
        self.device = device

    def synchronize(self) -> None:
        """Return at once."""


class _Stream:
    """What `torch.Stream(device=…)` is on the device; torch's own has no events for a backend in Python."""

    def __init__(self, device: torch.device | str):
        device = torch.device(device)
        self.device = torch.device(NAME, DEVICE.index if device.index is None else device.index)

    def record_event(self) -> _Event:
        """An event after all work so far."""
        return _Event(self.device)

    def wait_event(self, event: _Event) -> None:
        """Later work comes after the event."""


def _simulate_streams() -> None:
    current = threading.local()

    def current_stream(device: Any = None) -> _Stream:
        return getattr(current, "stream", None) or _Stream(device or NAME)

    torch.Stream = _Stream  # type: ignore[misc,assignment]
    torch.accelerator.set_stream = lambda stream: setattr(current, "stream", stream)
    torch.accelerator.current_stream = current_stream  # type: ignore[assignment]
    torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]


def _module() -> types.ModuleType:
    """`torch.npu`."""

    def set_device(device: Any) -> None:
        index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
        DEVICE.index, DEVICE.is_initialized = index or 0, True

    def current_device() -> int:
        DEVICE.is_initialized = True
        return DEVICE.index

    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: DEVICE.is_initialized
    module.device_count = lambda: DEVICE.count
    module.current_device, module.set_device = current_device, set_device
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.synchronize = module.empty_cache = lambda *_: None
    module.get_rng_state = lambda *_: torch.zeros(8, dtype=torch.uint8)
    module.set_rng_state = lambda *_: None
    module.get_rng_state_all, module.set_rng_state_all = list, lambda *_: None
    module.get_device_name = lambda *_: "simulated"
    module.is_bf16_supported = lambda *_: True
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def on_host(tensors: Any) -> Iterator[torch.Tensor]:
    """The data of tensors, without a copy that would be counted."""
    return (x.host if isinstance(x, DeviceTensor) else x for x in tree_iter(tensors))
