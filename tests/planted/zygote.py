"""Runs tests on a copy of the project, each in a fork of this process, which has imported what is heavy once.

Usage: python zygote.py COPY; a request is a line of JSON on the input, and its answer one on the output. Only
libraries are imported here: streamload itself is imported by each fork, from the copy as it is then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_NO_KILL = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "IndentationError")
"""Errors with which any run would fail: no test has found anything then."""
_HEAVY = (
    "torch numpy PIL.Image fsspec psutil urllib3 xxhash sqlite3 asyncio aiohttp pytest "
    "_pytest.assertion.rewrite _pytest.terminal _pytest.pytester _pytest.doctest hypothesis "
    "hypothesis.strategies _hypothesis_pytestplugin anyio.pytest_plugin pytest_timeout"
)
"""What most tests or pytest itself import."""


class _Reports:
    """A plugin of pytest that keeps the first failure of a test."""

    def __init__(self) -> None:
        self.failure: dict[str, str] | None = None
        self.passed = 0

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Note what a test raised; a skip is no failure."""
        if call.excinfo is None:
            self.passed += call.when == "call"
        elif self.failure is None and not call.excinfo.errisinstance(_outcomes()):
            kind = call.excinfo.type.__name__
            self.failure = {"test": item.nodeid, "when": call.when, "kind": kind}


def _outcomes() -> tuple[type[BaseException], ...]:
    import pytest

    return pytest.skip.Exception, pytest.exit.Exception


def serve(copy: Path) -> None:
    """Answer requests until the input ends."""
    sys.path[:] = [str(copy), *(path for path in sys.path[1:] if path not in ("", str(copy)))]
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]  # of the run that asks for this one
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    os.chdir(copy)
    for name in _HEAVY.split():
        with contextlib.suppress(ImportError):
            import_module(name)
    _shrink_nothing()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_answer(copy, **request)) + "\n")
        answers.flush()


def _shrink_nothing() -> None:
    """Have hypothesis fail with the first example that it finds: to make it small takes most of the time."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    settings.register_profile("planted", settings.get_profile("default"), phases=phases)
    settings.load_profile("planted")


def _answer(copy: Path, arguments: list[str], log: str, seconds: float) -> dict[str, Any]:
    """Run pytest in a fork; its exit status and first failure, or "limit"."""
    found, began = copy / ".planted.json", time.monotonic()
    found.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _run(arguments, log, found)
    status: int | None = None
    while status is None and time.monotonic() - began < seconds:
        ended, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        time.sleep(0.02)
    if status is None:
        os.kill(pid, signal.SIGUSR1)  # its stacks
        time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also what it has left running
    if status is None:
        os.waitpid(pid, 0)
    result = json.loads(found.read_text()) if found.exists() else {"failure": None, "passed": 0}
    took = round(time.monotonic() - began, 2)
    return {"status": "limit" if status is None else status, "seconds": took, **result}


def _run(arguments: list[str], log: str, found: Path) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.closerange(3, 256)
    status = 99
    try:
        import pytest

        # Children that are spawned import the main module: pytest's own, as in a plain run.
        main = ModuleType("__main__")
        main.__spec__ = find_spec("pytest.__main__")
        assert main.__spec__ is not None
        main.__file__ = main.__spec__.origin
        sys.modules["__main__"], sys.argv = main, ["pytest"]
        reports = _Reports()
        status = int(pytest.main(arguments, plugins=[reports]))
        found.write_text(json.dumps({"failure": reports.failure, "passed": reports.passed}))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def is_killed(answer: dict[str, Any]) -> bool:
    """True if a test failed, and not as any run would."""
    failure = answer["failure"]
    return answer["status"] == 1 and failure is not None and failure["kind"] not in _NO_KILL


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
