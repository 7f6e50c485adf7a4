"""Content and reads of a function's bytecode: instructions, strings, and the globals that it reaches."""

from __future__ import annotations

import argparse
import dis
import functools
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from streamload.derived.proof.packages import package_of

_ATTRIBUTES_ONLY = (argparse.Namespace, types.SimpleNamespace)
"""Of such a global only the attributes that code reads count."""


class Plain(list[Any]):
    """A description in which no other code stands."""


@functools.lru_cache(maxsize=1024)
def _steps(code: types.CodeType) -> list[tuple[str, Any]]:
    """The name and operand of each instruction."""
    return [(step.opname, step.argval) for step in dis.get_instructions(code)]


def globals_of(code: types.CodeType, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The globals that code reads, in the order of its bytecode; of namespaces the attributes it reads."""
    for function in _inside(code):
        yield from globals_of(function, names)
    chain, value = "", None
    imported = None
    local: dict[str, Any] = {}  # modules that are imported inside
    before = ""
    for opname, argval in _steps(code):
        if opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            missing = object()
            inner = getattr(value, argval, missing)
            if inner is not missing and _is_namespace(value):
                chain, value = f"{chain}.{argval}", inner
                continue
        if chain:
            yield chain, value
        chain, value = "", None
        if opname in ("LOAD_GLOBAL", "LOAD_NAME") and argval in names:
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
    """The functions that stand in code."""
    return (value for value in code.co_consts if isinstance(value, types.CodeType))


def strings(code: types.CodeType) -> Iterator[str]:
    """The strings among the constants of code and of the functions inside it."""
    yield from (value for value in code.co_consts if isinstance(value, str))
    for inner in _inside(code):
        yield from strings(inner)


def names(code: types.CodeType) -> Iterator[str]:
    """The names of globals, attributes and modules in code and in the functions inside it."""
    yield from code.co_names
    for inner in _inside(code):
        yield from names(inner)


def _operand(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return bytecode(value)
    if isinstance(value, frozenset):
        return ["frozenset", sorted(repr(member) for member in value)]
    if isinstance(value, tuple):
        return ["tuple", [_operand(member) for member in value]]
    return [type(value).__name__, repr(value)]
