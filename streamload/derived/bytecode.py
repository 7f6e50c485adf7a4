"""What a function's bytecode is and reads: instructions, strings, and the globals that it reaches."""

from __future__ import annotations

import argparse
import dis
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from streamload.derived.packages import package_of

_ATTRIBUTES_ONLY = (argparse.Namespace, types.SimpleNamespace)
"""Of such a global only the attributes that code reads count."""


def globals_of(code: types.CodeType, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The globals that code reads, in the order of its bytecode; of namespaces the attributes it reads."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from globals_of(inner, names)
    chain, value = "", None
    imported = None
    local: dict[str, Any] = {}  # modules that are imported inside
    before = ""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            missing = object()
            inner = getattr(value, step.argval, missing)
            if inner is not missing and _is_namespace(value):
                chain, value = f"{chain}.{step.argval}", inner
                continue
        if chain:
            yield chain, value
        chain, value = "", None
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in names:
            chain, value = step.argval, names[step.argval]
        elif step.opname.startswith("LOAD_FAST") and step.argval in local:
            chain, value = step.argval, local[step.argval]
        elif step.opname == "IMPORT_NAME":
            imported = _imported(step.argval, names)
            if imported is not None and not _is_namespace(imported):
                yield step.argval, imported
        elif step.opname == "IMPORT_FROM" and imported is not None:
            yield step.argval, getattr(imported, step.argval, imported)
        elif step.opname == "STORE_FAST" and before == "IMPORT_NAME" and imported is not None:
            local[step.argval] = sys.modules.get(imported.__name__.partition(".")[0], imported)
        before = step.opname
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


def bytecode(code: types.CodeType) -> Any:
    """The instructions of code with their operands; neither names of files nor lines."""
    steps = [[step.opname, _operand(step.argval)] for step in dis.get_instructions(code)]
    shape = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0xFF]
    return [
        shape,
        list(code.co_varnames[: sum(shape[:3])]),
        steps,
        getattr(code, "co_exceptiontable", b"").hex(),
    ]


def strings(code: types.CodeType) -> Iterator[str]:
    """The strings among the constants of code and of the functions inside it."""
    for value in code.co_consts:
        if isinstance(value, str):
            yield value
        elif isinstance(value, types.CodeType):
            yield from strings(value)


def names(code: types.CodeType) -> Iterator[str]:
    """The names of globals, attributes and modules in code and in the functions inside it."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from names(value)


def _operand(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return bytecode(value)
    if isinstance(value, frozenset):
        return ["frozenset", sorted(repr(one) for one in value)]
    if isinstance(value, tuple):
        return ["tuple", [_operand(one) for one in value]]
    return [type(value).__name__, repr(value)]
