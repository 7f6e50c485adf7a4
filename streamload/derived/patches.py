"""Code of the project that runs inside packages: functions that replace theirs, global hooks, custom ops.

A package counts by its version, so what `F.gelu = mine` or `Attention.forward = mine` puts into it is looked
for, and described beside the code that was reached.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from streamload.derived.packages import package_of
from streamload.torch_internals import custom_ops, global_hooks

_OF_TORCH = ("torch", "torch.functional", "torch.nn", "torch.fft", "torch.linalg")
"""Where torch's own functions are looked at, with what is below `torch.nn`: 80,000 members take 30 ms."""


def patches(packages: set[str], names: set[str]) -> Iterator[tuple[str, Any]]:
    """The functions that the project has put into packages, each with where it stands.

    Args:
        packages: those whose code was reached.
        names: in the code that was reached: of custom ops only those count that it may call.
    """
    for module in _modules(packages):
        for key, member in list(vars(module).items()):
            place = f"{module.__name__}.{key}"
            if _is_of_project(member):
                yield place, member
            elif isinstance(member, type) and member.__module__ == module.__name__:
                inside = list(vars(member).items())
                yield from ((f"{place}.{name}", own) for name, own in inside if _is_of_project(own))
    for number, hook in enumerate(global_hooks()):
        if package_of(hook) is None:
            yield f"global hook {number}", hook
    for op in custom_ops():
        if op._name in names:
            yield from ((f"torch.ops.{op._qualname}", function) for function in functions_of_op(op))


def functions_of_op(op: Any) -> list[Any]:
    """The user's functions of a `torch.library.custom_op`: torch's own stand around each."""
    kernels = [cell.cell_contents for one in op._backend_fns.values() for cell in one.__closure__ or ()]
    found = {id(one): one for one in (op._init_fn, *kernels) if _is_of_project(one)}
    return list(found.values())


def _modules(packages: set[str]) -> list[types.ModuleType]:
    tops = packages - {"streamload"} - sys.stdlib_module_names
    found = []
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        is_looked_at = top != "torch" or name in _OF_TORCH or name.startswith("torch.nn.")
        if top in tops and is_looked_at and isinstance(module, types.ModuleType):
            found.append(module)
    return found


def _is_of_project(value: Any) -> bool:
    if type(value) is not types.FunctionType:
        return False
    return package_of(value) is None
