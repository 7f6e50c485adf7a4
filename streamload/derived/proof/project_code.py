"""Which code is the project's, what its bytecode says and reads, and what of it runs inside packages.

A package counts by its version, so what `F.gelu = mine` or `Attention.forward = mine` puts into it is looked
for, and described beside the code that was reached; likewise global hooks and custom ops.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import functools
import importlib
import importlib.metadata
import multiprocessing
import os
import pathlib
import re
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import torch

from streamload.torch_internals import custom_ops, global_hooks

_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(pathlib.Path(torch.__file__).parents[1])}
)
_OF_TORCH = ("torch", "torch.functional", "torch.nn", "torch.fft", "torch.linalg")
"""Modules with torch's own functions, beside those below `torch.nn`: 80,000 members take 30 ms."""

_NAMES_OF_MODULE = ("__name__", "__package__", "__doc__", "__spec__", "__loader__")
"""Globals of a module that a renamed file changes, or a script that is imported."""
_FAST = re.compile(r"(?:LOAD|STORE)_FAST")
_ATTRIBUTES_ONLY = (argparse.Namespace, types.SimpleNamespace)
"""Of such a global only the attributes that code reads count."""


def package_of(value: Any) -> str | None:
    """The installed package that a function, class or module belongs to; None: it is of the project."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if isinstance(value, types.FunctionType):  # functools.wraps gives a patch the module of what it replaces
        defining = str(value.__globals__.get("__name__"))
        is_module = vars(sys.modules.get(defining, object)) is value.__globals__
        name = defining if is_module and _package(defining) is None else name
        if name in (None, "builtins"):  # made by `exec`
            return None
    if name is None:
        owner = getattr(value, "__objclass__", getattr(value, "__self__", None))
        name = getattr(owner, "__module__", None) or type(value).__module__
    return _package(str(name))


@functools.lru_cache(maxsize=4096)
def _package(name: str) -> str | None:
    top = name.partition(".")[0]
    if top in ("__main__", "__mp_main__"):
        return None
    if top == "streamload" or top in sys.builtin_module_names:
        return top
    modules = [sys.modules.get(name), sys.modules.get(top)]
    file = next((path for module in modules if (path := _place_of(module))), None)
    if file is None:  # C code
        is_known = top in sys.stdlib_module_names or any(
            getattr(module, "__spec__", None) for module in modules
        )
        return top if is_known else None
    if not file.startswith(_INSTALLED):
        return None
    return None if is_of_folder(top) else top


def _place_of(module: types.ModuleType | None) -> str | None:
    """The file of a module, or the folder of a package without `__init__.py`."""
    return getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)


def is_of_folder(package: str) -> bool:
    """True if it was installed from a folder, whose code may change while its version doesn't."""
    return '"dir_info"' in direct_url(package)


@functools.cache
def direct_url(package: str) -> str:
    """From where a package was installed, if not from an index: a folder, which may change, or a commit."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        return importlib.metadata.distribution(package).read_text("direct_url.json") or ""
    return ""


def patches(packages: set[str], names: set[str]) -> Iterator[tuple[str, Any]]:
    """The functions that the project has put into packages, each with where it stands.

    Args:
        packages: those whose code was reached.
        names: in the code that was reached: of custom ops only those count that it may call.
    """
    for package in sorted(packages - {"streamload"} - sys.stdlib_module_names):
        process, functions = _functions.get(package, (0, []))
        if process in (0, os.getpid()) or not multiprocessing.current_process().daemon:
            functions = list(_functions_in(package))
            _functions[package] = os.getpid(), functions
        yield from functions
    for number, hook in enumerate(global_hooks()):
        if package_of(hook) is None:
            yield f"global hook {number}", hook
    for op in custom_ops():
        if op._name in names:
            yield from ((f"torch.ops.{op._qualname}", function) for function in functions_of_op(op))


def functions_of_op(op: Any) -> list[Any]:
    """The user's functions of a `torch.library.custom_op`: torch's own stand around each."""
    kernels = [
        cell.cell_contents for function in op._backend_fns.values() for cell in function.__closure__ or ()
    ]
    functions = {id(function): function for function in (op._init_fn, *kernels) if _is_of_project(function)}
    return list(functions.values())


_functions: dict[str, tuple[int, list[tuple[str, Any]]]] = {}
"""By package the process that has looked, and the functions of the project in it. A forked worker takes what
its parent has found: looking would copy each page on which a function of the package is."""


def _functions_in(package: str) -> Iterator[tuple[str, Any]]:
    """The functions of the project in a package, each with where it stands."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != package or not isinstance(module, types.ModuleType):
            continue
        if package == "torch" and name not in _OF_TORCH and not name.startswith("torch.nn."):
            continue
        defined = vars(module)
        for key, member in list(defined.items()):
            if _is_of_project(member, defined):
                yield f"{module.__name__}.{key}", member
            elif isinstance(member, type) and member.__module__ == module.__name__:
                for inner, value in list(vars(member).items()):
                    if _is_of_project(value, defined):
                        yield f"{module.__name__}.{key}.{inner}", value


def _is_of_project(value: Any, defined: dict[str, Any] | None = None) -> bool:
    """True if a value is a function of the project; `defined` are the globals of a package's module."""
    if type(value) is not types.FunctionType or value.__globals__ is defined:
        return False
    return package_of(value) is None


class Plain(list[Any]):
    """A description in which no other code stands."""


@functools.lru_cache(maxsize=1024)
def _steps(code: types.CodeType) -> list[tuple[str, Any]]:
    """The name and operand of each instruction."""
    return [(step.opname, step.argval) for step in dis.get_instructions(code)]


def _steps_one_by_one(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """`_steps`, with two of each that loads or stores two variables (`LOAD_FAST_LOAD_FAST`, Python 3.13)."""
    for opname, argval in _steps(code):
        kinds = _FAST.findall(opname)
        if len(kinds) == 2 and isinstance(argval, tuple):
            yield from zip(kinds, argval, strict=True)
        else:
            yield opname, argval


def globals_of(code: types.CodeType, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The globals that code reads, in the order of its bytecode; of namespaces the attributes it reads."""
    for function in _inside(code):
        yield from globals_of(function, names)
    yield from _named_by_constants(code, names)
    chain, value = "", None
    imported = None
    local: dict[str, Any] = {}  # modules that are imported inside
    before = ""
    for opname, argval in _steps_one_by_one(code):
        if opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            missing = object()
            inner = getattr(value, argval, missing)
            if inner is not missing and (_is_namespace(value) or _is_state(inner, value)):
                chain, value = f"{chain}.{argval}", inner[1:] if inner is sys.argv else inner
                continue
        if chain:
            yield chain, value
        chain, value = "", None
        if opname in ("LOAD_GLOBAL", "LOAD_NAME") and argval in names and argval not in _NAMES_OF_MODULE:
            chain, value = argval, names[argval]
        elif opname.startswith("LOAD_FAST") and argval in local:
            chain, value = argval, local[argval]
        elif opname == "IMPORT_NAME":
            imported = _imported(argval, names)
            if imported is not None and not _is_namespace(imported):
                yield argval, imported
        elif opname == "IMPORT_FROM" and imported is not None:
            yield argval, getattr(imported, argval, imported)
        elif opname == "STORE_FAST" and before == "IMPORT_NAME" and imported is not None:
            local[argval] = sys.modules.get(imported.__name__.partition(".")[0], imported)
        before = opname
    if chain:
        yield chain, value


def _is_namespace(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return package_of(value) is None
    return type(value) in _ATTRIBUTES_ONLY


def _is_state(value: Any, holder: Any) -> bool:
    """True if an attribute of a library is a state of the process: the command line, torch's switches."""
    if value is sys.argv or value is torch.backends:
        return True
    is_of_backends = isinstance(holder, types.ModuleType) and holder.__name__.startswith("torch.backends")
    return is_of_backends and isinstance(value, (types.ModuleType, bool, int, str))


def _named_by_constants(code: types.CodeType, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values that code reaches by a constant: `globals()["SCALE"]`, `eval("SCALE")`, `import_module("x")`."""
    strings = [value for value in code.co_consts if isinstance(value, str)]
    called = set(code.co_names)
    if "eval" in called:
        for text in strings:
            with contextlib.suppress(SyntaxError, ValueError):
                strings = [*strings, *compile(text, "", "eval").co_names]
    if called & {"globals", "eval"}:
        yield from ((name, names[name]) for name in strings if name in names and name not in _NAMES_OF_MODULE)
    if called & {"import_module", "__import__"}:
        modules = ((name, sys.modules.get(name)) for name in strings)
        yield from ((name, module) for name, module in modules if module and package_of(module) is None)


def _imported(name: str, names: dict[str, Any]) -> Any:
    for full in (name, f"{names.get('__package__') or ''}.{name}"):
        if full in sys.modules:
            return sys.modules[full]
    try:
        return importlib.import_module(name)
    except Exception:  # the function's own matter, when it runs
        return None


@functools.lru_cache(maxsize=1024)
def bytecode(code: types.CodeType) -> Plain:
    """The instructions of code with their operands; neither names of files nor lines."""
    steps = [[opname, _operand(argval)] for opname, argval in _steps(code)]
    shape = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0xFF]
    named = list(code.co_varnames[: sum(shape[:3])])
    return Plain([shape, named, steps, getattr(code, "co_exceptiontable", b"").hex()])


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    return (value for value in code.co_consts if isinstance(value, types.CodeType))


def functions_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of all functions inside it."""
    yield code
    for inner in _inside(code):
        yield from functions_in(inner)


def _operand(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return bytecode(value)
    if isinstance(value, frozenset):
        return ["frozenset", sorted(repr(member) for member in value)]
    if isinstance(value, tuple):
        return ["tuple", [_operand(member) for member in value]]
    return [type(value).__name__, repr(value)]
