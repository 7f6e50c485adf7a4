"""A module built again in a process of its own, to compute a few of its rows and compare them (row_check.py).

The process sees no devices, has a low priority, and is bounded in memory and time. What stands in the main
script is made from the statements that it needs: the script itself, which trains, never runs here.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import dis
import importlib
import io
import json
import os
import pickle
import resource
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamload.cache.directory import write_whole

if TYPE_CHECKING:  # what else is needed is imported once the process is bounded
    from streamload.derived.proof.row_check import Module, Rows

_MAIN_NAMES = ("__main__", "__mp_main__")
_NICE = 10
"""A tenth of the share of a process of the training; 19 would be a seventieth, and no epoch waits so long."""
_DEFINITIONS = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.If, ast.Try),
)


class Script(types.ModuleType):
    """The main script of another process, of which only the statements run that a name needs.

    Args:
        path: of its file; "": there is none.
        package: to which it belongs.
    """

    def __init__(self, path: str, package: str | None):
        super().__init__("__main__")
        self.__package__ = package
        if path:  # inspect takes a module with an empty one for broken
            self.__file__ = path
        self.__dict__.update(_path=path, _statements=None)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._run(name)
        if name not in self.__dict__:
            raise AttributeError(f"{self._path or 'the main module, which has no file,'} defines no {name}")
        return self.__dict__[name]

    def _run(self, name: str) -> None:
        if self._statements is None:
            self.__dict__["_statements"] = _statements(self._path) if self._path else []
        names, chosen = {name}, list[_Statement]()
        while more := [
            statement
            for statement in self._statements
            if not (statement in chosen or statement.bound.isdisjoint(names))
        ]:
            chosen += more
            names |= {read for statement in more for read in statement.read}
        new = [statement for statement in self._statements if statement in chosen and not statement.has_run]
        for statement in new:
            statement.has_run = True
        exec(_compiled(self._statements, new, self._path), self.__dict__)


@dataclass(eq=False)
class _Statement:
    """A statement of a script: the names that it binds or writes into, and those that it reads."""

    tree: ast.stmt
    bound: set[str]
    read: set[str]
    has_run: bool = False


def _statements(path: str) -> list[_Statement]:
    tree = ast.parse(Path(path).read_bytes(), path)
    statements = []
    for statement in tree.body:
        code = compile(ast.Module([statement], []), path, "exec", dont_inherit=True)
        is_guard = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        bound = _bound(statement, code) if isinstance(statement, _DEFINITIONS) and not is_guard else set()
        statements.append(_Statement(statement, bound, _read(code)))
    return statements


def _compiled(statements: list[_Statement], chosen: list[_Statement], path: str) -> types.CodeType:
    """Some statements of a script, compiled among all others: bytecode depends on what is imported."""
    futures = [
        statement.tree for statement in statements if getattr(statement.tree, "module", None) == "__future__"
    ]
    unchosen = [
        statement.tree
        for statement in statements
        if statement not in chosen and statement.tree not in futures
    ]
    never = [ast.If(ast.Constant(False), unchosen, [])] if unchosen else []
    body = [*futures, *never, *(statement.tree for statement in chosen if statement.tree not in futures)]
    tree = ast.fix_missing_locations(ast.Module(body, []))
    return compile(tree, path, "exec", dont_inherit=True)


def _bound(statement: ast.stmt, code: types.CodeType) -> set[str]:
    """The names that a statement binds or writes into."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}
    targets: list[ast.expr] = list(getattr(statement, "targets", ()))
    targets += [
        decorator.func if isinstance(decorator, ast.Call) else decorator
        for decorator in getattr(statement, "decorator_list", ())
    ]
    for target in targets:
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
            if isinstance(target, ast.Name):
                names.add(target.id)
    return names


def _read(code: types.CodeType) -> set[str]:
    names = {
        step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_NAME", "LOAD_GLOBAL")
    }
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            names |= _read(value)
    return names - set(vars(builtins))


class _Reader(pickle.Unpickler):
    """Reads what the parent sends; what the main script of the parent defines is made as it is named."""

    def find_class(self, module: str, name: str) -> Any:
        holder: Any = sys.modules["__main__"] if module in _MAIN_NAMES else importlib.import_module(module)
        for step in name.split("."):
            holder = getattr(holder, step)
        return holder


Answer = Callable[[dict[str, Any]], None]


def serve(receive: Callable[[], bytes], answer: Answer) -> None:
    """Build a module, say what it is, then compute its rows and compare them.

    Args:
        receive: the next message: a head as JSON (`row_check.CheckProcess` sends it), a Module, Rows.
        answer: is told {"built": parts, …}, {"is_same": bool}, or {"error": text} of what can't be done here.
    """
    try:
        head = json.loads(receive())
        if not head["is_awaited"]:
            os.nice(_NICE)
        sys.path[:], sys.argv[:] = head["path"], head["arguments"]
        sys.modules["__main__"] = sys.modules["__mp_main__"] = Script(head["script"], head["package"])
        order: Module = _Reader(io.BytesIO(receive())).load()
        rows_data = b"" if head["is_awaited"] else receive()  # before an answer: a channel holds little
        with _settings(order):
            module, before = _built(order)
            answer({"built": _parts(module, order), "generators": before[0], "draws": before[1]})
            if head["is_awaited"]:  # so far the training has waited
                os.nice(_NICE)
            rows: Rows = _Reader(io.BytesIO(rows_data or receive())).load()
            answer({"is_same": _are_same(module, order, rows)})
    except EOFError:  # there is nothing to compare
        return
    except BaseException as exc:
        text = f"{type(exc).__name__}: {exc}"
        answer({"error": text if len(text) < 300 else f"{text[:300]}…"})


def main(channel_number: int, most_bytes: int, most_seconds: int, verdict: str) -> None:
    """Serve a parent, as a process of its own.

    Args:
        channel_number: the descriptor of the channel to the parent.
        most_bytes: of memory.
        most_seconds: that it may take.
        verdict: the file for it; "": there is none.
    """
    began, channel = time.time(), Connection(channel_number)
    signal.alarm(most_seconds)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))

    def answer(value: dict[str, Any]) -> None:
        if "is_same" in value and verdict:  # also where the parent has ended
            result = {"is_same": value["is_same"], "reason": "", "began": began}
            with contextlib.suppress(OSError):
                write_whole(Path(verdict), json.dumps(result))
        with contextlib.suppress(OSError):
            channel.send_bytes(json.dumps(value).encode())

    serve(channel.recv_bytes, answer)
    os._exit(0)


@contextlib.contextmanager
def _settings(order: Module) -> Iterator[None]:
    """The settings of torch under which the rows were made, as far as a CPU has them."""
    import torch

    _, autocast, precision, _, default = order.settings
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, default.removeprefix("torch.")))
    if order.device == "cpu":
        torch.set_float32_matmul_precision(precision)
    dtype = getattr(torch, autocast.removeprefix("torch.")) if autocast else None
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
        yield


def _built(order: Module) -> tuple[Any, tuple[dict[str, str], list[str]]]:
    """The module, and of each random generator the digest of its state before; and which were drawn from."""
    from streamload.derived.proof.builds import Generators
    from streamload.derived.proof.fingerprint import differences
    from streamload.derived.proof.lazy import function_of, pending_instance
    from streamload.derived.proof.module_proof import description_of

    cls: Any = order.cls if order.decorate is None else order.decorate(order.cls)
    calls = [
        (method, (function_of(meaning),) if method == "_apply" else arguments, meaning)
        for method, arguments, meaning in order.asked
    ]
    module, pending = pending_instance(cls, order.arguments, order.keywords, order.generators, calls)
    module.__dict__["_streamload_options"] = dataclasses.replace(cls._streamload_options, place=None)
    description = description_of(module)
    if description.error or description.parts != order.parts:
        names = differences(order.parts, description.parts)[:3] or [description.error]
        raise RuntimeError(f"it comes out otherwise in a process of its own ({', '.join(names)})")
    order.generators.restore()
    before, current = order.generators.digests, Generators().digests
    module._streamload_build(module.__dict__.pop(pending))
    return module, (before, [name for name, state in Generators().digests.items() if state != current[name]])


def _parts(module: Any, order: Module) -> dict[str, Any]:
    from streamload.derived.proof.module_proof import built_state

    built = built_state(module)
    return {**built.parts, "code": built.code, "device": order.device}


def _are_same(module: Any, order: Module, rows: Rows) -> bool:
    from streamload.derived.proof.row_check import cast, is_close
    from streamload.derived.store.results import Result

    value = cast(module._streamload_run(*rows.arguments, **rows.keywords), rows.dtype)
    computed = Result(value, rows.count).leaves
    return is_close(computed, rows.leaves, is_of_device=order.device != "cpu")
