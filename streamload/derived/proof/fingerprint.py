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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy
from xxhash import xxh3_64

from streamload.derived.proof.code import STRUCTURE, Describer, attributes_of, has_code, script_digest
from streamload.derived.store.sealed import compared, digest_of_parts
from streamload.errors import FeatureNotCacheable

FORMAT = 4
_TINY_BYTES, _SMALL_BYTES = 1 << 15, 1 << 20
"""So many bytes of weights are digested in 4 µs: at every call; in 0.1 ms: for a twentieth of the time."""
_SMALL_SHARE, _SHARE = 0.05, 0.01
"""Of the time, for digesting small weights and larger ones while rows are only read."""
_SAMPLED_BYTES, _SAMPLED_TENSORS = 32, 16
"""Of the CPU's tensors so many of each of so many are looked at in a call: each byte is a cache line."""
_DEVICE_BYTES = 128
_FEW_BYTES, _FEW_CHARACTERS = 1 << 14, 2000
"""Attributes that take no more as bytes (10 µs), or described (0.1 ms), are looked at in every call."""
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
    """Where the first weight of a built module is; the CPU if it has none."""
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
    )


@functools.lru_cache(maxsize=256)
def _settings(autocast: object, precision: str, tf32: bool, default: torch.dtype) -> tuple[Any, ...]:
    return torch.__version__, str(autocast), precision, tf32, str(default)


class Stamp:
    """Tells when a weight, buffer, attribute or flag of a module is replaced or written through torch.

    It is of what the objects are, not of what they hold: about 0.3 µs a module and 0.1 µs a tensor, as all
    loops are the interpreter's own. What is written through `.data` or into a list isn't seen; that is for
    `ModuleWatch`.
    """

    def __init__(self, module: torch.nn.Module):
        self._getters: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        self._containers: list[tuple[Any, str, Any]] = []
        self._tensors: list[torch.Tensor] = []
        self._sized: list[Any] = []
        dicts: list[Any] = []
        for child in module.modules():
            self._tensors += tensors_of(child)
            self._sized.append(vars(child))
            held = [getattr(child, name) for name in (*_HOLDING, "_forward_hooks", "_forward_pre_hooks")]
            if isinstance(child, torch.jit.ScriptModule):  # hands out a new object at each look
                self._sized += held
                continue
            dicts += held
            names = [name for name in vars(child) if name not in STRUCTURE or name == "training"]
            self._getters.append((_getter(tuple(names)), vars(child)))
            self._containers += [(vars(child), name, vars(child)[name]) for name in _HOLDING]
        self._dicts, self._empty = [held for held in dicts if held], [held for held in dicts if not held]
        self._copies = [dict(held) for held in self._dicts]
        self._count = sum(map(len, self._sized))
        self._members = [get(state) for get, state in self._getters]
        self._counted = [tensor for tensor in self._tensors if _has_version(tensor)]
        self._versions = list(map(_version_of, self._counted))
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))

    def holds(self, *, whole: bool = False) -> bool:
        """True if all objects are the same, and the tensors' versions.

        Args:
            whole: else an object may be another that is equal, and a dict of parameters another one: that is
                compared in half of the time.
        """
        try:
            members = [get(state) for get, state in self._getters]
            return (
                list(map(_version_of, self._counted)) == self._versions
                and list(map(torch.Tensor.data_ptr, self._tensors)) == self._pointers
                and members == self._members
                and sum(map(len, self._sized)) == self._count
                and self._dicts == self._copies
                and not any(self._empty)
                and (not whole or self._are_identical(members))
            )
        except Exception:  # one has gone, or can't be compared with what stands in its place
            return False

    def _are_identical(self, members: list[tuple[Any, ...]]) -> bool:
        held, copied = (map(dict.values, dicts) for dicts in (self._dicts, self._copies))
        same = all(map(operator.is_, _chained(members), _chained(self._members)))
        same = same and all(map(operator.is_, _chained(held), _chained(copied)))
        return same and all(state[name] is holder for state, name, holder in self._containers)


_chained = itertools.chain.from_iterable
_HOLDING = ("_parameters", "_buffers", "_modules")


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Gets the values of names as a tuple."""
    return operator.itemgetter(*names) if len(names) > 1 else lambda members: (members[names[0]],)


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

    def __init__(self, share: float = _SHARE):
        self._share, self.due = share, 0.0

    @property
    def is_due(self) -> bool:
        """True if a look may begin."""
        return time.monotonic() >= self.due

    def looked(self, start: float) -> None:
        """Note a look that began then (`time.monotonic()`), and has ended now."""
        end = time.monotonic()
        self.due = end + (end - start) / self._share


class ModuleWatch:
    """Notices what changes unseen by torch: weights through `.data`, attributes in place, code and globals.

    What takes little time to look at is looked at in every call. The rest (large weights, of which a sample
    is looked at; many attributes; code) is looked at before rows are stored, and for a hundredth of the time.
    On a GPU the sample is compared there, and the answer is waited for by the next look at the whole.

    Args:
        module: built; to be watched as long as its stamp stays the same.
        code: digests of code by name, which its classes had.
        reached: `Describer.reached`, from there.
        start: before the module was described for its fingerprint, `time.monotonic()`.

    Attributes:
        looked_at: when the last look at the whole began that has found nothing.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        stamp: Stamp,
        code: Mapping[str, str],
        reached: tuple[set[str], set[str]],
        patches: Mapping[str, Any],
        start: float,
    ):
        self.looked_at = start
        self._stamp = stamp
        tensors = [
            tensor.detach() for item in module.modules() for tensor in tensors_of(item) if tensor.numel()
        ]
        self._views = [
            _bytes_of(item) for item in tensors if item.device.type == "cpu" and item.is_contiguous()
        ]
        self._others = [item for item in tensors if not (item.device.type == "cpu" and item.is_contiguous())]
        self._samples = _Samples(self._others)
        size_bytes = sum(map(len, self._views))
        self._is_tiny = not self._others and size_bytes <= _TINY_BYTES
        self._is_small = not self._others and size_bytes <= _SMALL_BYTES
        self._whole = self._digest()
        strided = [view[:: -(-len(view) // _SAMPLED_BYTES) | 1] for view in self._views]
        parts = [
            strided[first : first + _SAMPLED_TENSORS] for first in range(0, len(strided), _SAMPLED_TENSORS)
        ]
        self._sampled = itertools.cycle(
            [(part, list(map(np.ndarray.tobytes, part))) for part in parts or [[]]]
        )
        self._classes = {type(item) for item in module.modules()}
        self._code, self._reached, self._patches = code, reached, patches
        self._scripts = [item for item in module.modules() if isinstance(item, torch.jit.ScriptModule)]
        self._mutable = [
            value for item in module.modules() for value in attributes_of(item).values() if _is_mutable(value)
        ]
        size_bytes = sum(map(_size_of, self._mutable))
        self._are_plain = not size_bytes and _packed(self._mutable) is not None
        self._attributes, self._script_digests = self._attributes_now(), self._script_digests_now()
        most = _FEW_BYTES if self._are_plain else _FEW_CHARACTERS
        is_short = len(self._attributes) <= most and size_bytes <= _SMALL_BYTES
        self._has_few_attributes = bool(self._mutable) and is_short
        self._small_pace, self._pace = LookPace(_SMALL_SHARE), LookPace()

    def is_unchanged(self, *, whole: bool) -> bool:
        """True if all is as it was.

        Args:
            whole: look at everything; else at what takes little time, unless the rest is due.
        """
        start = time.monotonic()
        if not whole and start < self._pace.due:
            if self._others:
                self._samples.compare()
            if self._has_few_attributes and self._attributes_now() != self._attributes:
                return False
            if not self._is_tiny and not (self._is_small and start >= self._small_pace.due):
                views, were = next(self._sampled)  # some bytes of the next tensors; each call looks at others
                return list(map(np.ndarray.tobytes, views)) == were
            same = self._digest() == self._whole
            self._small_pace.looked(start)
            return same
        same = self._stamp.holds(whole=True)
        same = same and self._digest() == self._whole and self._samples.are_unchanged()
        same = same and self._attributes_now() == self._attributes and self._has_same_code()
        same = same and self._script_digests_now() == self._script_digests
        if same:
            self.looked_at = start
            self._pace.looked(start)
        else:
            self._pace = LookPace()  # who looks next finds it, too
        return same

    def _attributes_now(self) -> str | bytes:
        if self._are_plain:
            return _packed(self._mutable) or ""
        return json.dumps(Describer().value(self._mutable, "an attribute"))

    def _script_digests_now(self) -> list[str]:
        return [script_digest(script) for script in self._scripts]

    def _has_same_code(self) -> bool:
        describer = Describer()
        for cls in self._classes:
            describer.reach(cls, cls.__name__)
        same = describer.patches(self._reached) == self._patches
        return same and has_code(self._code, describer.code)

    def _digest(self) -> tuple[int, tuple[int, ...]]:
        digest = xxh3_64()
        for view in self._views:
            digest.update(view.data)
        return digest.intdigest(), tuple(_sums(self._others))


class _Samples:
    """A few bytes of tensors that aren't on the CPU, compared there, without waiting for the answer."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.is_contiguous():  # else a view of its bytes would be of a copy
                view = tensor.reshape(-1).view(torch.uint8)
                step = -(-len(view) // _DEVICE_BYTES) | 1
                by_device.setdefault(tensor.device, []).append(view[::step])
        self._views = list(by_device.values())
        self._were = [torch.cat(views) for views in self._views]
        self._changed: list[torch.Tensor] | None = None

    def compare(self) -> None:
        """Note whether they differ now."""
        if self._views:
            differ = [
                (torch.cat(views) != were).any() for views, were in zip(self._views, self._were, strict=True)
            ]
            if self._changed is not None:
                differ = [
                    now_differ | differed for now_differ, differed in zip(differ, self._changed, strict=True)
                ]
            self._changed = differ

    def are_unchanged(self) -> bool:
        """True if no comparison so far has found a difference; waits for the devices."""
        return not any(bool(differs) for differs in self._changed or ())


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


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    view: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return view


def _sums(tensors: list[torch.Tensor]) -> list[int]:
    """Of each tensor, on its device: sums over its bytes at two strides. Each device is waited for once."""
    sums_by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        view = tensor.contiguous().reshape(-1).view(torch.uint8)
        wide = view[: len(view) // 4 * 4].view(torch.int32) if len(view) % 4 == 0 else view
        sums = wide.sum(dtype=torch.int64), wide[::3].sum(dtype=torch.int64)
        sums_by_device.setdefault(tensor.device, []).extend(sums)
    return [number for sums in sums_by_device.values() for number in torch.stack(sums).tolist()]
