"""Dependencies of a module's results besides weights and inputs: code, and values that code reads.

Project code is followed from a class or function through the globals, closures, defaults and bases that it
reaches, and digested by its bytecode: what runs counts, not the text of a file that may have been edited
since, and neither comments, docstrings nor line numbers. Installed packages count by their version. A value
that can't be described exactly is an error that names it, never a random digest.

Names don't tell code apart: lambdas share one, as do closures of one function and classes of two modules.
Where a value is described, code stands with a digest of what it reaches in a few steps; `arrangement` is one
of all code, each with such a digest.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import pathlib
import random
import re
import sys
import sysconfig
import types
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128

from streamload.derived.proof.project_code import (
    Plain,
    bytecode,
    direct_url,
    functions_in,
    functions_of_op,
    globals_of,
    is_of_folder,
    package_of,
    patches,
)
from streamload.errors import FeatureNotCacheable
from streamload.torch_internals import CustomOpDef

_BOOKKEEPING = re.compile(
    r"__(module|name|doc|dict|weakref|annotations|annotate(_func)?|annotations_cache|qualname|firstlineno|"
    r"static_attributes|parameters|abstractmethods|orig_bases|slots|slotnames|match_args|dataclass_params|hash|"
    r"conditional_annotations|type_params)__|_abc_impl|_(streamload|dynamo)_\w+"
)
_Pair = collections.namedtuple("_Pair", ("first", "second"))
_OF_ENUM = re.compile(r"_(?!value_)[a-z_]+_|__objclass__")
"""Names of what an enum itself keeps in its members, some of it once it is used."""
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_OF_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_METHODS_OF_C = (types.BuiltinFunctionType, types.MethodWrapperType)
_NO_VALUES = (types.ModuleType, type, type(None))
_CONTENTS = (str, int, float, bytes, list, tuple, dict, set)
_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType, type(_Pair.first))
_PLAIN = (torch.Tensor, torch.nn.Parameter, np.ndarray, np.memmap, functools.partial)
_SAME_FOR_RESULTS = (logging.Logger, logging.LoggerAdapter, type(os.environ))
"""No value of theirs counts: a variable that is read while a module is built does (builds.py)."""
_DRAWN = (collections.abc.Iterator, random.Random)
"""Each use of them changes them."""
_STEPS = 3
"""So far code is followed to tell apart what has one name."""
ARRANGEMENT = "arrangement"


class _Unordered(list[Any]):
    """Descriptions in no order of their own: they are sorted once code among them has its digests."""


class _Reference(str):
    """The name of code, where it stands in a description."""

    reached: _Reached

    def __new__(cls, reached: _Reached) -> _Reference:
        reference = super().__new__(cls, reached.name)
        reference.reached = reached
        return reference


@dataclass(eq=False)
class _Reached:
    """A function, class or module that was reached."""

    value: Any  # itself, held so that no other object gets its id
    name: str  # under which it counts
    description: Any = None
    """Of what it does, with references to other code; None: it is being described, or of a package."""


class Describer:
    """Describes values as JSON, and collects the code that they stand for.

    Attributes:
        orders_dicts: whether the order of a dict counts.
        origins: where each class of the project was found, as "module:qualname".
        strings: all that code and values hold, some of which may name files.
    """

    orders_dicts = True

    def __init__(self) -> None:
        self._code: dict[str, set[str]] = {}
        self._names: set[str] = set()
        self.origins: dict[str, str] = {}
        self.strings: set[str] = set()
        self._reached: dict[int, _Reached] = {}
        self._inside: list[int] = []
        self._digests: dict[_Reached, str] = {}

    @property
    def code(self) -> dict[str, str]:
        """Of each function and class reached, a digest of its bytecode; of each package its version."""
        return {
            name if len(digests) == 1 else f"{name} {digest}": digest
            for name, digests in self._code.items()
            for digest in digests
        }

    def patches(self) -> dict[str, Any]:
        """Patches of the project in the packages that were reached, by their place.

        Raises:
            FeatureNotCacheable: one can't be described.
        """
        packages = {name.removeprefix("package ") for name in self._code if name.startswith("package ")}
        return {place: self.value(member, place) for place, member in patches(packages, self._names)}

    @property
    def arranged_code(self) -> dict[str, str]:
        """`code`, and under `ARRANGEMENT` a digest of which code stands where in which."""
        digests = self._digests_of_reached()
        return {
            **self.code,
            ARRANGEMENT: digest_of(sorted([reached.name, digests[reached]] for reached in digests)),
        }

    def value(self, value: Any, where: str) -> Any:
        """Describe a value, code in it with digests of what it reaches: equal descriptions, equal values.

        Args:
            value: numbers, text, containers, enums, paths, arrays, tensors, functions, classes, modules, and
                objects made of these.
            where: what it is, for an error.

        Raises:
            FeatureNotCacheable: it can't be described.
        """
        return _with_digests(self.describe(value, where), self._digests_of_reached())

    def describe(self, value: Any, where: str) -> Any:
        """Describe a value, or a part of one; references to code in it have no digests yet. See `value`."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            self.strings.add(value)
            return value
        if kind in (int, float, complex, bytes, type(Ellipsis), range, slice):
            return [kind.__name__, value.hex() if kind in (float, bytes) else repr(value)]
        if id(value) in self._inside:
            return ["again", len(self._inside) - self._inside.index(id(value))]
        self._inside.append(id(value))
        try:
            return self._object(value, where)
        finally:
            self._inside.pop()

    def _object(self, value: Any, where: str) -> Any:
        kind, describe = type(value), self.describe
        if kind in (list, tuple, torch.Size, collections.deque):
            members = [describe(member, f"{where}[{number}]") for number, member in enumerate(value)]
            return [kind.__name__, members, *self._unless_none(getattr(value, "maxlen", None), where)]
        if kind in (dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType):
            pairs = [
                [describe(key, f"a key of {where}"), describe(member, f"{where}[{key!r}]")]
                for key, member in value.items()
            ]
            members = pairs if self.orders_dicts else _Unordered(pairs)
            return [kind.__name__, members, *self._unless_none(_factory_of(value), where)]
        if kind in (set, frozenset):
            return [kind.__name__, _Unordered(describe(member, f"a member of {where}") for member in value)]
        if isinstance(value, torch.Tensor):
            return ["tensor", tensor_digest(value), *self.beside(value, where)]
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
            is_plain = not array.dtype.hasobject
            content = xxh3_128(array.tobytes()).hexdigest() if is_plain else describe(array.tolist(), where)
            return ["array", array.dtype.str, list(array.shape), content, *self.beside(value, where)]
        if isinstance(value, enum.Enum):
            name = value.name if value.name is not None else repr(value.value)  # flags, before Python 3.11
            return ["enum", self.reach(kind, where), name, *self._unless_none(_more_of_member(value), where)]
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype)):
            return [kind.__name__, str(value)]
        if isinstance(value, pathlib.PurePath):
            self.strings.add(str(value))
            return ["path", str(value)]
        if isinstance(value, re.Pattern):
            return ["pattern", describe(value.pattern, where), value.flags]
        if isinstance(value, _METHODS_OF_C) and not isinstance(value.__self__, _NO_VALUES):
            with contextlib.suppress(FeatureNotCacheable):  # `{…}.get`; but not `random.random`
                return ["method", value.__name__, describe(value.__self__, where)]
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
            return ["code", self.reach(value, where)]
        if isinstance(value, types.MethodType):
            return ["method", self.reach(value.__func__, where), describe(value.__self__, where)]
        if isinstance(value, functools.partial):
            members = [describe(member, where) for member in (value.func, value.args, value.keywords)]
            return ["partial", *members, *self.beside(value, where)]
        if isinstance(value, _SAME_FOR_RESULTS):
            return ["logger"]
        plain = next((base for base in _CONTENTS if isinstance(value, base)), None)
        if plain is not None:  # of a subclass
            members = [describe(part, where) for part in (plain(value), _state(value))]
            return [self.reach(kind, where), *members, *self._unless_none(_factory_of(value), where)]
        return self._instance(value, where)

    def beside(self, value: Any, where: str) -> list[Any]:
        """Class and attributes of an object whose content is described elsewhere; nothing of a plain one.

        Attributes of tensors are for libraries' notes, some of which change with each use.
        """
        is_plain = type(value) in _PLAIN or isinstance(value, np.generic)
        described = [] if is_plain else [self.reach(type(value), where)]
        has_notes = isinstance(value, torch.Tensor) or type(value) is np.memmap
        if not has_notes and (state := _state(value)):
            described.append(self.describe(state, where))
        return described

    def _unless_none(self, value: Any, where: str) -> list[Any]:
        return [] if value is None else [self.describe(value, where)]

    def _instance(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.ScriptObject) and hasattr(value, "__getstate__"):  # quantised weights
            return ["script", self.describe(value.__getstate__(), where)]
        if isinstance(value, torch.nn.Module):
            return ["module", *module_parts(value, self, where)]
        if isinstance(value, np.ufunc) and getattr(np, value.__name__, None) is value:
            return ["code", self.reach(value, where)]
        if isinstance(value, CustomOpDef):
            return ["op", [self.describe(member, where) for member in functions_of_op(value)]]
        is_of_package = package_of(type(value)) is not None
        if is_of_package and callable(value) and getattr(value, "__wrapped__", None) is not None:
            return ["wrapped", self.describe(value.__wrapped__, where)]  # functools.lru_cache
        attributes = _state(value)
        if not _is_python(type(value)) or not (attributes or hasattr(value, "__dict__")):
            if (made_of := _made_of(value)) is not None:
                return ["made", *(self.describe(part, where) for part in made_of)]
            raise FeatureNotCacheable(
                f"{where} is a {type(value).__module__}.{type(value).__qualname__}, of which nothing tells "
                f"when it changes; pass what it is made of, or name the version yourself: "
                f'cache_module(version="1")'
            )
        described = {
            name: self.describe(member, f"{where}.{name}")
            for name, member in sorted(attributes.items())
            if not isinstance(member, _SAME_FOR_RESULTS)
        }
        return ["object", self.reach(type(value), where), described]

    def reach(self, value: Any, where: str) -> str:
        """Take in the code of a function, class or module; return the name under which it counts."""
        if id(value) in self._reached:
            return _Reference(self._reached[id(value)])
        package = package_of(value)
        name = getattr(value, "__qualname__", getattr(value, "__name__", "code")).rpartition("<locals>.")[2]
        if package is not None:
            self._code[f"package {package}"] = {_version(package)}
            name = f"{package}:{getattr(value, '__module__', '')}.{name}"
        reached = self._reached[id(value)] = _Reached(value, name)
        if package is not None:
            for base in value.__mro__ if isinstance(value, type) else ():
                if package_of(base) is None:  # a package has made this class of one of the project
                    self.reach(base, where)
            return _Reference(reached)
        inside, self._inside = self._inside, []
        try:
            reached.description = self._describe_code(value, name)
        finally:
            self._inside = inside
        self._digests = {}
        self._code.setdefault(name, set()).add(digest_of(_with_digests(reached.description, {})))
        return _Reference(reached)

    def _describe_code(self, value: Any, name: str) -> Any:
        if isinstance(value, types.ModuleType):
            return self._module(value, name)
        return self._class(value, name) if isinstance(value, type) else self._function(value, name)

    def _digests_of_reached(self) -> dict[_Reached, str]:
        """Of all code that was reached a digest of it and of what it reaches in some steps."""
        if not self._digests:
            reached = [code for code in self._reached.values() if code.description is not None]
            digests: dict[_Reached, str] = {}
            for _ in range(1 + _STEPS):
                digests = {code: digest_of(_with_digests(code.description, digests)) for code in reached}
            self._digests = digests
        return self._digests

    def _module(self, module: types.ModuleType, name: str) -> Any:
        """Of a module that is passed around as a whole: its values, and the code that it defines."""
        members: list[Any] = []
        for key, member in sorted(vars(module).items()):
            is_code = isinstance(member, (type, types.FunctionType))
            if key.startswith("__") or isinstance(member, types.ModuleType):
                continue
            if is_code and getattr(member, "__module__", None) != module.__name__:
                continue
            with contextlib.suppress(FeatureNotCacheable):  # what is hidden is no plain value
                members.append([key, self.describe(member, f"{name}.{key}")])
        return members

    def _class(self, cls: type, name: str) -> Any:
        self.origins[f"{cls.__module__}:{cls.__qualname__}"] = name
        members: list[Any] = [self.reach(base, name) for base in cls.__bases__ if not _is_transparent(base)]
        if package_of(type(cls)) is None:
            members.append(["metaclass", self.reach(type(cls), name)])
        for key, member in sorted(vars(cls).items()):
            if _BOOKKEEPING.fullmatch(key) or isinstance(member, _SLOTS):
                continue
            members.append([key, self._member(member, f"{name}.{key}")])
        return members

    def _member(self, member: Any, where: str) -> Any:
        if isinstance(member, (staticmethod, classmethod)):
            return [type(member).__name__, self.describe(member.__func__, where)]
        if isinstance(member, property):
            return [
                "property",
                *(self.describe(part, where) for part in (member.fget, member.fset, member.fdel)),
            ]
        if isinstance(member, functools.cached_property):
            return ["property", self.describe(member.func, where)]
        if isinstance(member, functools.singledispatchmethod):
            return ["dispatch", self.describe(member.dispatcher, where)]
        if isinstance(member, dict) and where.endswith("__dataclass_fields__"):
            fields = ((key, _annotation(part.type), _default(part)) for key, part in member.items())
            return [[key, annotation, self.describe(default, where)] for key, annotation, default in fields]
        return self.describe(member, where)

    def _function(self, function: Any, name: str) -> Any:
        code = getattr(function, "__code__", None)
        if code is None:
            raise FeatureNotCacheable(
                f"the code of {name} can't be seen (a {type(function).__name__} of no installed package); "
                f'name its version yourself: cache_module(version="1")'
            )
        for inner in functions_in(code):
            self.strings.update(value for value in inner.co_consts if isinstance(value, str))
            self._names.update(inner.co_names)
        parts: list[Any] = [bytecode(code)]
        parts.append(self.describe(function.__defaults__, f"a default of {name}"))
        parts.append(self.describe(function.__kwdefaults__, f"a default of {name}"))
        if getattr(function, "__wrapped__", None) is not None:
            parts.append(self.describe(function.__wrapped__, name))
        registered = getattr(function, "registry", None)  # functools.singledispatch
        if isinstance(registered, types.MappingProxyType):
            parts.append(_Unordered(self.describe(pair, name) for pair in registered.items()))
        for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if free != "__class__":
                parts.append([free, self.describe(_content(cell), f"{free} in {name}")])
        for chain, reached in globals_of(code, function.__globals__):
            parts.append([chain, self.describe(reached, f"{chain} in {name}")])
        return parts


def has_code(code: Mapping[str, str], part: Mapping[str, str]) -> bool:
    """True if code that was reached has the digests that it has in other code, of which it is a part."""
    return all(
        digest in (code.get(name), code.get(f"{name} {digest}"), code.get(name.removesuffix(f" {digest}")))
        for name, digest in part.items()
    )


def _state(value: Any) -> dict[str, Any]:
    """Attributes and slots of an object, without the names that `functools.wraps` copies."""
    state = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        if "__slots__" in vars(cls):
            names = (name for name, slot in vars(cls).items() if isinstance(slot, types.MemberDescriptorType))
            state |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {name: member for name, member in state.items() if not _BOOKKEEPING.fullmatch(str(name))}


def _made_of(value: Any) -> list[Any] | None:
    """Parts of which the standard library makes a copy of an object of its own C code; None: it can't."""
    packages = {package_of(base) for base in type(value).__mro__}
    if type(value) is object or isinstance(value, _DRAWN) or not packages <= {None, *sys.stdlib_module_names}:
        return None
    try:
        parts = value.__reduce_ex__(2)
    except Exception:  # whatever it is that can't be copied
        return None
    parts = [parts] if isinstance(parts, str) else parts
    return [list(part) if isinstance(part, collections.abc.Iterator) else part for part in parts]


def _factory_of(value: Any) -> Any:
    return value.default_factory if isinstance(value, collections.defaultdict) else None


def _more_of_member(member: enum.Enum) -> dict[str, Any] | None:
    """What a member of an enum has beside its name; its value is among those of the class if it can be."""
    held = {name: value for name, value in vars(member).items() if not _OF_ENUM.fullmatch(name)}
    if type(member.value).__hash__ is not None:
        held.pop("_value_", None)
    return held or None


def _is_python(cls: type) -> bool:
    """True if a class is written in Python to its root, so that its state is what its attributes hold."""
    members = (member for base in cls.__mro__ if base is not object for member in vars(base).values())
    return not any(isinstance(member, _OF_C) for member in members)


def _annotation(annotation: Any) -> str:
    is_of_project = isinstance(annotation, type) and package_of(annotation) is None
    return annotation.__qualname__ if is_of_project else str(annotation)  # without the name of a module


def _default(field: dataclasses.Field[Any]) -> Any:
    return None if field.default is dataclasses.MISSING else field.default


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet bound
        return None


def _is_transparent(cls: type) -> bool:
    """True if a base adds nothing of its own to results."""
    return cls is object or bool(vars(cls).get("_streamload_transparent"))


@functools.cache
def _version(package: str) -> str:
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    if package in sys.builtin_module_names or (file.startswith(_STANDARD) and "-packages" not in file):
        return f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    version = getattr(sys.modules.get(package), "__version__", None)
    if not isinstance(version, str):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
    origin = "" if is_of_folder(package) else direct_url(package)  # which the current directory may hide
    return f"{version} {digest_of(origin)[:8]}" if origin else version


def _with_digests(described: Any, digests: dict[_Reached, str]) -> Any:
    """A description in which references to code stand with its digest."""
    if isinstance(described, _Reference):
        digest = digests.get(described.reached)
        return str(described) if digest is None else f"{described} {digest}"
    if isinstance(described, _Unordered):
        return sorted((_with_digests(part, digests) for part in described), key=_text)
    if isinstance(described, list) and not isinstance(described, Plain):
        return [_with_digests(part, digests) for part in described]
    if isinstance(described, dict):
        return {name: _with_digests(part, digests) for name, part in described.items()}
    return described


def _text(described: Any) -> str:
    return json.dumps(described, sort_keys=True)


def digest_of(described: Any) -> str:
    """128 bits of a description, as hexadecimal digits."""
    return hashlib.blake2b(_text(described).encode(), digest_size=16).hexdigest()


STRUCTURE = frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"}
"""Names in the `__dict__` of every module: parameters, buffers, children, hooks, `training`."""
_WRAPPERS = ("OptimizedModule", "DataParallel", "DistributedDataParallel")
"""Of `torch.compile` and of training on several devices: what they hold themselves computes nothing."""
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleDict)
_MANGLED = re.compile(rb"[./]___torch_mangle_\d+")
"""Suffix that TorchScript puts into the name of a class each time that it compiles one."""
_NOT_COMPUTED_WITH = re.compile(r"\.debug_pkl$|/traced_inputs|/\.data/serialization_id$")


def tensor_digest(tensor: torch.Tensor) -> str:
    """128 bits over dtype, shape and bytes; of a CPU tensor at about 9 GB/s.

    Raises:
        FeatureNotCacheable: it has no bytes of its own (meta, sharded, sparse).
    """
    plain = tensor.detach()
    if hasattr(plain, "device_mesh"):
        raise FeatureNotCacheable(
            "weights are sharded: the whole module has to be in this process; keep it out of FSDP"
        )
    if plain.layout is not torch.strided or plain.device.type == "meta":
        raise FeatureNotCacheable(f"a {plain.device.type} tensor of layout {plain.layout} can't be digested")
    digest = xxh3_128(f"{plain.dtype}{list(plain.shape)}".encode())
    if plain.is_quantized:
        digest.update(_quantization(plain).encode())
        plain = plain.int_repr()
    if plain.numel():
        try:
            digest.update(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        except (RuntimeError, NotImplementedError) as exc:
            if type(plain) is torch.Tensor:
                raise
            raise FeatureNotCacheable(f"a {type(plain).__name__} can't be digested: {exc}") from exc
    return digest.hexdigest()


def module_parts(module: torch.nn.Module, describer: Describer, where: str) -> tuple[str, Any, Any]:
    """Parts of a built module; `where` is its name, for errors.

    Returns:
        a digest of weights; by module, its other attributes; by module, its class and its hooks.
    """
    digest, describe = xxh3_128(), describer.describe
    attributes: dict[str, Any] = {}
    classes: dict[str, Any] = {}
    names = {id(child): prefix for prefix, child in module.named_modules()}
    for prefix, child in module.named_modules():
        place = f"{where}.{prefix}" if prefix else where
        described = {
            name: describe(value, f"{place}.{name}") for name, value in sorted(attributes_of(child).items())
        }
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None:
                digest.update(f"{prefix}.{name} {tensor_digest(tensor)}".encode())
                if beside := describer.beside(tensor, f"{place}.{name}"):
                    described[name] = beside
        if described:
            attributes[prefix] = described
        hooks = [
            describe(hook, f"a forward hook of {place}")
            for hook in (*child._forward_pre_hooks.values(), *child._forward_hooks.values())
        ]
        classes[prefix] = [describe(type(child), place), *hooks, *_structure(prefix, child, names)]
    return digest.hexdigest(), attributes, classes


def _structure(prefix: str, module: torch.nn.Module, names: Mapping[int, str]) -> Iterator[Any]:
    """What the names of children and the code of hooks don't tell.

    That are children that `named_modules` has under another name; an order of a container's children that
    isn't the sorted one; and which of the hooks get the keywords of a call.
    """
    for key, child in module._modules.items():
        name = f"{prefix}.{key}" if prefix else key
        if names.get(id(child), name) != name:
            yield ["again", name, names[id(child)]]
    order = list(module._modules) if isinstance(module, _CONTAINERS) else []
    if not all(map(str.isdigit, order)) and order != sorted(order):
        yield ["order", order]
    both = (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    )
    places = [[place for place, key in enumerate(hooks) if key in chosen] for hooks, chosen in both]
    if any(places):
        yield ["keywords", *places]


def attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """Attributes of a module beside parameters, buffers, children, hooks; of TorchScript a digest of all."""
    if isinstance(module, torch.jit.ScriptModule):
        return {"script": script_digest(module)}
    if type(module).__name__ in _WRAPPERS:  # around the module itself
        return {}
    return {
        name: value
        for name, value in vars(module).items()
        if name not in STRUCTURE and not name.startswith("_streamload_")
    }


def script_digest(module: torch.jit.ScriptModule) -> str:
    """128 bits over code, constants, attributes and weights, as they are saved."""
    digest = xxh3_128()
    with zipfile.ZipFile(io.BytesIO(module.save_to_buffer())) as archive:
        for name in sorted(archive.namelist()):
            if not _NOT_COMPUTED_WITH.search(name):
                digest.update(_MANGLED.sub(b"", name.encode() + archive.read(name)))
    return digest.hexdigest()


def _quantization(tensor: torch.Tensor) -> str:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{tensor.qscheme()} {tensor.q_scale()!r} {tensor.q_zero_point()}"
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return f"{tensor.qscheme()} {scales.tolist()} {zeros.tolist()} {tensor.q_per_channel_axis()}"
