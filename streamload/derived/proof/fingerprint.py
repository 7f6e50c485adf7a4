"""Fingerprints: everything except the input that a module's results depend on.

A fingerprint is a 128-bit digest of a readable description: code, arguments, weights, buffers, attributes,
flags, and the settings of torch. Rows are stored under it, so rows of anything else aren't found.
"""

from __future__ import annotations

import enum
import functools
import itertools
import json
import marshal
import operator
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from streamload.derived.proof.code import Describer, attributes_of
from streamload.derived.store.sealed import compared, digest_of_parts
from streamload.errors import FeatureNotCacheable

FORMAT = 5
_SHARE = 0.01
"""Share of the time for describing modules again while rows are only read."""
_TINY_BYTES = 1 << 15
"""Weights of at most this size are compared in every call, about 4 µs."""
_SAMPLED_BYTES, _SAMPLED_TENSORS = 32, 16
"""Of larger weights, each call compares this many bytes of this many tensors: each byte is a cache line."""
_DEVICE_BYTES = 128
_FEW_VALUES, _FEW_BYTES, _FEW_CHARACTERS, _MOST_BYTES = 32, 1 << 14, 250, 1 << 20
"""Attributes up to these sizes, as bytes (10 µs) or described (20 µs), are compared in every call, unless
their tensors are larger."""
_HOLDING = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_version_of = operator.attrgetter("_version")
_IMMUTABLE = (
    *(bool, int, float, complex, str, bytes, type, enum.Enum, torch.dtype, torch.device, torch.Size),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)


@dataclass(frozen=True)
class Fingerprint:
    """Dependencies of a module's rows beside their inputs: by name, as JSON, and their digest of 16 bytes."""

    parts: Mapping[str, Any]
    digest: bytes
    base: bytes = field(
        default=b"", compare=False
    )  # digest without the files and variables that computing reads

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> Fingerprint:
        """Digest the parts."""
        return cls(parts, digest_of_parts(parts))

    def __str__(self) -> str:
        return self.digest.hex()


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The names of the parts in which two fingerprints differ, such as "code.FeatureExtractor.forward"."""
    return [name for name, _, _ in compared(first, second)]


def built_parts(module: torch.nn.Module, describer: Describer) -> dict[str, Any]:
    """Parts of a module that are known only once it is built: weights, buffers, attributes, flags, device.

    Raises:
        FeatureNotCacheable: it has attributes that can't be described, or weights outside this process.
    """
    _, weights, attributes, classes = describer.value(module, type(module).__name__)
    flags = {prefix: child.training for prefix, child in module.named_modules()}
    return {
        "weights": weights,
        "attributes": attributes,
        "classes": classes,
        "patches": describer.patches(),
        "training": module.training if len(set(flags.values())) == 1 else flags,
        "device": device_of(module).type,
        "compiled": module._compiled_call_impl is not None,
    }


def device_of(module: torch.nn.Module) -> torch.device:
    """Device of a built module's first weight; the CPU if it has none."""
    for child in module.modules():
        for tensor in tensors_of(child):
            return tensor.device
    return torch.device("cpu")


def torch_settings(device: str) -> tuple[Any, ...]:
    """The settings of torch that now change results on a type of device; about 1 µs."""
    return _settings(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else "",
        torch.get_float32_matmul_precision(),
        device == "cuda" and torch.backends.cudnn.allow_tf32,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


@functools.lru_cache(maxsize=256)
def _settings(
    autocast: object, precision: str, tf32: bool, default: torch.dtype, is_deterministic: bool
) -> tuple[Any, ...]:
    return torch.__version__, str(autocast), precision, tf32, str(default), is_deterministic


class Stamp:
    """Detects when a weight, buffer, attribute or flag of a module is replaced, or written through torch.

    Compares object identities and tensor versions, not contents: about 0.5 µs a module and 0.1 µs a tensor,
    as all loops run in C. It misses writes through `.data` or into a list, which `ModuleWatch` finds, and a
    replacement by an equal object.
    """

    def __init__(self, module: torch.nn.Module):
        dicts: list[dict[str, Any]] = []
        self._tensors: list[torch.Tensor] = []
        for child in module.modules():
            is_script = isinstance(child, torch.jit.ScriptModule)  # hands out a new object at each look
            dicts += [vars(child), *(vars(child)[name] for name in _HOLDING if not is_script)]
            self._tensors += tensors_of(child)
        self._dicts, self._empty = [held for held in dicts if held], [held for held in dicts if not held]
        self._copies = [dict(held) for held in self._dicts]
        self._counted = [tensor for tensor in self._tensors if _has_version(tensor)]
        self._versions = list(map(_version_of, self._counted))
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))

    def holds(self) -> bool:
        """True if all objects are the same or equal, and no tensor has another version."""
        try:
            return (
                list(map(_version_of, self._counted)) == self._versions
                and list(map(torch.Tensor.data_ptr, self._tensors)) == self._pointers
                and self._dicts == self._copies
                and not any(self._empty)
            )
        except Exception:  # one can't be compared with what stands in its place
            return False


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a module itself."""
    both = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in both if tensor is not None]


def _has_version(tensor: torch.Tensor) -> bool:
    if is_lazy(tensor):
        raise FeatureNotCacheable(
            "the module has weights that only its first call makes (as LazyLinear's): call it once before"
        )
    return not tensor.is_inference()


class LookPace:
    """Schedule of repeated examinations, so that they take no more than a share of the time.

    Attributes:
        due: `time.monotonic()` at which the next examination may begin.
    """

    def __init__(self) -> None:
        self.due = 0.0

    @property
    def is_due(self) -> bool:
        """True if an examination may begin."""
        return time.monotonic() >= self.due

    def looked(self, start: float) -> None:
        """Record an examination that started at a `time.monotonic()` and has just ended."""
        end = time.monotonic()
        self.due = end + (end - start) / _SHARE


class ModuleWatch:
    """Detects changes of a module cheaply: by its stamp, and by comparing contents.

    Each call compares all of small weights, another sample of large ones, and attributes if they are few. The
    rest is found when the module is described again (`Proof.look`). Samples on a GPU are compared there
    without waiting for the result.

    Args:
        module: built.
        stamp: taken before the module was described.
    """

    def __init__(self, module: torch.nn.Module, stamp: Stamp):
        self._stamp = stamp
        tensors = [
            tensor.detach() for child in module.modules() for tensor in tensors_of(child) if tensor.numel()
        ]
        of_cpu = [tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors]
        views = [_bytes_of(tensor).numpy() for tensor in itertools.compress(tensors, of_cpu)]
        self._samples = _Samples(
            [tensor for tensor, is_seen in zip(tensors, of_cpu, strict=True) if not is_seen]
        )
        parts = [views]
        if sum(map(len, views)) > _TINY_BYTES:
            views = [view[:: -(-len(view) // _SAMPLED_BYTES) | 1] for view in views]
            starts = range(0, len(views), _SAMPLED_TENSORS)
            parts = [views[start : start + _SAMPLED_TENSORS] for start in starts]
        self._sampled = itertools.cycle([(part, list(map(np.ndarray.tobytes, part))) for part in parts])
        values = [value for child in module.modules() for value in attributes_of(child).values()]
        self._mutable = list({id(value): value for value in values if _is_mutable(value)}.values())
        are_plain = _packed(self._mutable) is not None
        if sum(map(_size_of, self._mutable)) > _MOST_BYTES or (
            len(self._mutable) > _FEW_VALUES and not are_plain
        ):
            self._mutable = []
        self._attributes = self._attributes_now()
        if len(self._attributes) > (_FEW_BYTES if are_plain else _FEW_CHARACTERS):
            self._mutable = []

    def is_unchanged(self) -> bool:
        """True if this call's comparisons find no change."""
        if not self._stamp.holds():
            return False
        self._samples.compare()
        if self._mutable and self._attributes_now() != self._attributes:
            return False
        views, were = next(self._sampled)
        return list(map(np.ndarray.tobytes, views)) == were

    def are_device_samples_unchanged(self) -> bool:
        """True if no comparison on a device has found a difference; waits for the devices."""
        return self._samples.are_unchanged()

    def _attributes_now(self) -> str | bytes:
        packed = _packed(self._mutable)
        return json.dumps(Describer().value(self._mutable, "an attribute")) if packed is None else packed


class _Samples:
    """Samples of tensors on devices other than the CPU, compared there without waiting for the result."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.is_contiguous():  # else a view of its bytes would be of a copy
                view = _bytes_of(tensor)
                by_device.setdefault(tensor.device, []).append(view[:: -(-len(view) // _DEVICE_BYTES) | 1])
        self._views = [(views, torch.cat(views)) for views in by_device.values()]
        self._differ = [torch.zeros((), dtype=torch.bool, device=device) for device in by_device]

    def compare(self) -> None:
        """Compare the samples with the tensors now."""
        for (views, were), differs in zip(self._views, self._differ, strict=True):
            differs |= (torch.cat(views) != were).any()

    def are_unchanged(self) -> bool:
        """True if no comparison so far has found a difference; waits for the devices."""
        return not any(map(bool, self._differ))


def _packed(value: Any) -> bytes | None:
    """Serialize numbers, text and containers of these; None: the value contains something else."""
    try:
        return marshal.dumps(value, 2)  # later formats depend on how many references there are
    except ValueError:
        return None


def _size_of(value: Any) -> int:
    """Bytes of the tensors and arrays in an attribute."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, (list, tuple)):
        return sum(map(_size_of, value))
    return sum(map(_size_of, value.values())) if isinstance(value, dict) else 0


def _is_mutable(value: Any) -> bool:
    """True if a value can change in place."""
    if type(value) is tuple:
        return any(map(_is_mutable, value))
    return value is not None and not isinstance(value, _IMMUTABLE)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
