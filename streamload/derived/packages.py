"""Which code belongs to an installed package, which counts by its version, and which is the project's own."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import pathlib
import sys
import sysconfig
import types
from typing import Any

import torch

_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(pathlib.Path(torch.__file__).parents[1])}
)


def package_of(value: Any) -> str | None:
    """The installed package that a function, class or module belongs to; None: it is of the project."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if isinstance(value, types.FunctionType):  # functools.wraps gives a patch the module of what it replaces
        defining = str(value.__globals__.get("__name__"))
        is_module = vars(sys.modules.get(defining, object)) is value.__globals__
        name = defining if is_module and _package(defining) is None else name
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
    modules = [
        sys.modules.get(name),
        sys.modules.get(top),
    ]  # the modules of C code have no file
    file = next((found for one in modules if (found := getattr(one, "__file__", None))), None)
    if file is None:
        is_known = top in sys.stdlib_module_names or any(getattr(one, "__spec__", None) for one in modules)
        return top if is_known else None
    if not file.startswith(_INSTALLED):
        return None
    return None if is_of_folder(top) else top


def is_of_folder(package: str) -> bool:
    """Whether it was installed from a folder, whose code may change while its version doesn't."""
    return '"dir_info"' in direct_url(package)


@functools.cache
def direct_url(package: str) -> str:
    """From where a package was installed, if not from an index: a folder, which may change, or a commit."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        return importlib.metadata.distribution(package).read_text("direct_url.json") or ""
    return ""
