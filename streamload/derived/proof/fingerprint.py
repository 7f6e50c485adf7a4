"""Proof that a row is still right: everything but the input that the result of a module depends on.

A fingerprint is 128 bits of a readable description: code, arguments, weights, buffers, attributes, flags, and
the settings of torch under which it runs. Rows are stored under it, so a row of anything else isn't found.
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
"""Of the time, for describing modules anew while rows are only read."""
_TINY_BYTES = 1 << 15
"""Weights of no more bytes are compared in every call, which takes about 4 µs."""
_SAMPLED_BYTES, _SAMPLED_TENSORS = 32, 16
"""Of larger weights so many bytes of each of so many tensors are: each byte is a cache line."""
_DEVICE_BYTES = 128
_FEW_VALUES, _FEW_BYTES, _FEW_CHARACTERS, _MOST_BYTES = 32, 1 << 14, 250, 1 << 20
"""Attributes that take no more as bytes (10 µs), or described (20 µs), are looked at in every call, unless
their tensors are larger."""
_HOLDING = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_version_of = operator.attrgetter("_version")
_IMMUTABLE = (
    *(bool, int, float, complex, str, bytes, type, enum.Enum, torch.dtype, torch.device, torch.Size),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)


@dataclass(frozen=True)
class Fingerprint:
    """Dependencies of a module's rows beside their inputs: as JSON by name, and 16 bytes of them."""

    parts: Mapping[str, Any]
    digest: bytes
    base: bytes = field(default=b"", compare=False)  # the digest without what computing reads

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
    """Parts of a module that only a build shows: weights, buffers, attributes, flags, where it is.

    Raises:
        FeatureNotCacheable: it has attributes that can't be described, or weights that aren't all here.
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
    """The settings of torch that change results on a type of device, now (`parts.SETTINGS`); about 1 µs."""
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
    """Tells when a weight, buffer, attribute or flag of a module is replaced or written through torch.

    It is of what the objects are, not of what they hold: about 0.5 µs a module and 0.1 µs a tensor, as all
    loops are the interpreter's own. What is written through `.data` or into a list isn't seen; that is for
    `ModuleWatch`; nor is another object that is equal.
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
        """True if all objects are the same, or equal, and the tensors' versions."""
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
    """When to look at something again, so that looking takes no more than a share of the time.

    Attributes:
        due: when the next look may begin, `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.due = 0.0

    @property
    def is_due(self) -> bool:
        """True if a look may begin."""
        return time.monotonic() >= self.due

    def looked(self, start: float) -> None:
        """Note a look that began then (`time.monotonic()`), and has ended now."""
        end = time.monotonic()
        self.due = end + (end - start) / _SHARE


class ModuleWatch:
    """Notices changes of a module: by its stamp, and of what changes unseen by torch what takes little time.

    That is all of small weights, a sample of large ones, another in each call, and attributes if they are
    few. The rest is seen when the module is described anew (`Proof.look`). On a GPU the sample is compared
    there, without waiting for the answer.

    Args:
        module: built.
        stamp: of it, before it was described.
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
        """True if what is looked at is as it was."""
        if not self._stamp.holds():
            return False
        self._samples.compare()
        if self._mutable and self._attributes_now() != self._attributes:
            return False
        views, were = next(self._sampled)
        return list(map(np.ndarray.tobytes, views)) == were

    def are_device_samples_unchanged(self) -> bool:
        """True if no look so far has found a difference on a device, for which this waits."""
        return self._samples.are_unchanged()

    def _attributes_now(self) -> str | bytes:
        packed = _packed(self._mutable)
        return json.dumps(Describer().value(self._mutable, "an attribute")) if packed is None else packed


class _Samples:
    """A few bytes of tensors that aren't on the CPU, compared there, without waiting for the answer."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.is_contiguous():  # else a view of its bytes would be of a copy
                view = _bytes_of(tensor)
                by_device.setdefault(tensor.device, []).append(view[:: -(-len(view) // _DEVICE_BYTES) | 1])
        self._views = [(views, torch.cat(views)) for views in by_device.values()]
        self._differ = [torch.zeros((), dtype=torch.bool, device=device) for device in by_device]

    def compare(self) -> None:
        """Note whether they differ now."""
        for (views, were), differs in zip(self._views, self._differ, strict=True):
            differs |= (torch.cat(views) != were).any()

    def are_unchanged(self) -> bool:
        """True if no comparison so far has found a difference; waits for the devices."""
        return not any(map(bool, self._differ))


def _packed(value: Any) -> bytes | None:
    """Numbers, text and containers of these as bytes; None: there is something else in it."""
    try:
        return marshal.dumps(value, 2)  # later formats depend on how many references there are
    except ValueError:
        return None


def _size_of(value: Any) -> int:
    """Of the tensors and arrays in an attribute."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, (list, tuple)):
        return sum(map(_size_of, value))
    return sum(map(_size_of, value.values())) if isinstance(value, dict) else 0


def _is_mutable(value: Any) -> bool:
    """True if a value may change and stay the same object."""
    if type(value) is tuple:
        return any(map(_is_mutable, value))
    return value is not None and not isinstance(value, _IMMUTABLE)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
