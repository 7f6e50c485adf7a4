"""The check of a run that builds no module: a process of its own computes some of its rows again.

    rows are read → their inputs and bytes go to a process (rebuilding.py) → later calls read its verdict

One process a node at a time checks, for all processes of the node: a verdict that is younger than a run is
the run's. A difference is an error of the next call; what can't be computed there is logged, and checked when
the module is built next. Nothing is computed in the training itself, which waits only at the end of an epoch.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamload import limits
from streamload.cache import memory
from streamload.cache.locks import FileLock
from streamload.derived.store.memory import home_in
from streamload.errors import CacheError, FeatureNotCacheable
from streamload.torch_internals import DropoutBase, InstanceNormBase, NormBase, tree_map

MOST_SECONDS = 600
"""A process that takes longer is ended."""
_MEMORY_SHARE = 0.5
"""Of the memory that is available when a process starts it may take so much."""
_PATIENCE_SECONDS = 60.0
"""So long the end of an epoch waits for a verdict."""
_AT_EXIT_SECONDS = 30.0
_POLL_SECONDS = 0.2
_KEPT_SECONDS = 86400.0
_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float64: 1e-6, torch.complex128: 1e-6}
_TOLERANCE = 2e-3
"""Of other types: kernels for batches of another size add up in another order."""
_DEVICE_TOLERANCE = 2e-2
_UNEQUAL_SHARE = 0.02
"""Of whole numbers that a device computed: an argmax may be another where two scores are about the same."""
_NO_DEVICES = dict.fromkeys(
    (
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
        *("ASCEND_RT_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES", "TPU_VISIBLE_DEVICES"),
    ),
    "",
) | {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU"}


@dataclass(frozen=True)
class Module:
    """A module that isn't built, as it can be made in another process.

    Attributes:
        cls: its class, or that which it wraps.
        decorate: makes the module's class of one that was named before it; None: `cls` is decorated itself.
        arguments, keywords, generators, asked: see `lazy.Pending`.
        parts: of its description here.
        device: the type of device on which its rows were made.
        settings: see `fingerprint.torch_settings`.
    """

    cls: type
    decorate: Callable[[type], Any] | None
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    generators: Any
    asked: list[tuple[str, tuple[Any, ...], str]]
    parts: dict[str, Any]
    device: str
    settings: tuple[Any, ...]


@dataclass(frozen=True)
class Rows:
    """Stored rows, and the inputs that they were computed from."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    count: int | None  # of rows; None: it is one whole result
    leaves: list[Any]  # of the stored rows
    dtype: Any = None  # to which results are cast before they are stored; None: they aren't


class CannotCheck(Exception):
    """A module can't be built, or its rows can't be computed, in a process of its own."""


@dataclass(frozen=True)
class RowVerdict:
    """The result of a check."""

    is_same: bool | None  # whether rows were computed as they are stored; None: they couldn't be computed
    reason: str = ""  # why not
    began: float = 0.0  # when the check began, `time.time()`


def remade(
    module: Any, pending: Any, parts: dict[str, Any], device: str, settings: tuple[Any, ...]
) -> Module:
    """Describe a module that isn't built to another process (see `Module`).

    Raises:
        CannotCheck: its class can't be found by another process.
    """
    cls = type(module)
    wrapped = vars(cls).get("_streamload_wrapped")
    named = cls if wrapped is None else wrapped
    if "<locals>" in named.__qualname__:
        raise CannotCheck(f"{named.__qualname__} is defined inside a function")
    if not _has_file(named.__module__):
        raise CannotCheck(f"{named.__module__} has no file that another process could import")
    calls = [(name, () if name == "_apply" else values, to) for name, values, to in pending.asked]
    decorate = None
    if wrapped is not None:
        decorate = functools.partial(cls._streamload_decorate, options=cls._streamload_options)
    arguments, keywords = pending.arguments, pending.keywords
    return Module(named, decorate, arguments, keywords, pending.generators, calls, parts, device, settings)


def _has_file(name: str) -> bool:
    if name in ("__main__", "__mp_main__"):
        return bool(getattr(sys.modules["__main__"], "__file__", None))
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(name) is not None
    return False


def map_tensors(act: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A tree of lists, tuples, dicts and dataclasses, with each of its tensors replaced."""
    return tree_map(lambda leaf: act(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def on_cpu(value: Any) -> Any:
    """A tree with its tensors on the CPU, in memory of their own."""
    return map_tensors(lambda tensor: tensor.detach().cpu().clone(), value)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """A tree with its floating tensors in a dtype; None: as it is."""
    if dtype is None:
        return value
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


class CheckProcess:
    """A process that builds a module, and holds the node's lock for checks until it ends.

    Args:
        module: that is to be built.
        lock: of the node.
        rows: that it is to compute then, packed; b"": they are sent later.
        verdict: where it is written; None: nowhere.

    Raises:
        CannotCheck: the module can't be sent.
    """

    def __init__(self, module: Module, lock: FileLock, rows: bytes, verdict: Path | None):
        self._lock = lock
        self._owner = os.getpid()
        self._ends = time.monotonic() + MOST_SECONDS
        try:
            messages = [_head(is_awaited=not rows), module_bytes(module), rows]
            self._process, self._channel = _started(verdict)
            for message in filter(None, messages):
                self.send(message)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def begin(cls, module: Module, rows: bytes = b"", verdict: Path | None = None) -> CheckProcess | None:
        """Begin a check; None: another process of the node has one going.

        Raises:
            CannotCheck: there is no place for a lock, or the module can't be sent.
        """
        try:
            lock = FileLock.acquire(_home() / "lock", create=True)
        except (OSError, CacheError) as exc:
            raise CannotCheck(str(exc)) from exc
        return None if lock is None else cls(module, lock, rows, verdict)

    def send(self, data: bytes) -> None:
        """Send what `module_bytes` gave; a process that has ended is noticed by `answer`."""
        with contextlib.suppress(OSError):
            self._channel.send_bytes(data)

    def answer(self, most_seconds: float = MOST_SECONDS) -> dict[str, Any]:
        """Wait for the next answer of `rebuilding.serve`.

        Raises:
            CannotCheck: it has failed, ended, or needs longer.
        """
        left = min(self._ends - time.monotonic(), most_seconds)
        try:
            if not self._channel.poll(max(0.0, left)):
                raise CannotCheck(f"it takes more than {most_seconds:.0f} s")
            answer: dict[str, Any] = json.loads(self._channel.recv_bytes())
        except (EOFError, OSError) as exc:
            raise CannotCheck(f"its process ended with {self._process.wait()}") from exc
        if "error" in answer:
            raise CannotCheck(answer["error"])
        return answer

    def __del__(self) -> None:
        if hasattr(self, "_process") and os.getpid() == self._owner:  # not in a fork
            self.close()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._channel.close()
        self._lock.close()


class RowCheck:
    """A check of some rows of one fingerprint, which a thread of this process waits for.

    Args:
        module: that computes them.
        rows: which.
        name: of their fingerprint and place, by which the node's processes share the verdict.
        process: that has built the module already; None: it is started as soon as no other checks.
        at_exit: called when this process ends, if the verdict is known then.

    Attributes:
        verdict: what was found; None: it isn't known yet.

    Raises:
        CannotCheck: the rows can't be sent.
    """

    def __init__(
        self,
        module: Module,
        rows: Rows,
        name: str,
        process: CheckProcess | None,
        at_exit: Callable[[RowVerdict], None],
    ):
        self.verdict: RowVerdict | None = None
        self.at_exit: Callable[[RowVerdict], None] | None = at_exit
        self._module, self._data = module, module_bytes(rows)
        self._name, self._process = name, process
        self._is_done = threading.Event()
        module_bytes(module)  # what can't be sent is known at once
        _listen()
        _running.append(self)
        limits.start(threading.Thread(target=self._run, name="streamload-check", daemon=True))

    def wait(self, most_seconds: float = _PATIENCE_SECONDS) -> None:
        """Wait for the verdict, so long."""
        self._is_done.wait(most_seconds)

    def _run(self) -> None:
        verdict = None
        try:
            verdict = self._found()
        except Exception as exc:
            verdict = RowVerdict(None, str(exc) if isinstance(exc, CannotCheck) else repr(exc))
        finally:
            self.verdict = verdict
            if self._process is not None:
                self._process.close()
            if verdict is None or verdict.is_same is not False:  # the module may go before the process does
                _running.remove(self)
                self.at_exit = None
            self._is_done.set()

    def _found(self) -> RowVerdict:
        """The verdict of another process of the node that checked since this run began; or one's own."""
        if self._process is not None:
            self._process.send(self._data)
            return RowVerdict(self._process.answer()["is_same"])
        ends = time.monotonic() + MOST_SECONDS
        path = _home() / self._name
        while True:
            verdict = _read_verdict(path)
            if verdict is not None and (verdict.began >= _run_began() or verdict.is_same is False):
                return verdict
            self._process = CheckProcess.begin(self._module, self._data, path)
            if self._process is not None:
                break
            if time.monotonic() > ends:
                raise CannotCheck("other processes of the node are checking")
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(OSError):  # verdicts of a day ago
            for old in path.parent.iterdir():
                if old.name != "lock" and old.lstat().st_mtime < time.time() - _KEPT_SECONDS:
                    old.unlink()
        self._process.answer()
        return RowVerdict(self._process.answer()["is_same"])


_running: list[RowCheck] = []
"""Checks without a verdict, and those that found a difference."""


def module_bytes(value: Module | Rows) -> bytes:
    """Pack what is sent to another process.

    Raises:
        CannotCheck: there is something in it that can't be pickled.
    """
    try:
        return pickle.dumps(value)
    except Exception as exc:
        raise CannotCheck(f"{type(exc).__name__}: {exc}") from exc


def _head(*, is_awaited: bool) -> bytes:
    """The first message to a process: where it finds the code, and whether a training waits for a build."""
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    head = {
        "path": sys.path,
        "arguments": sys.argv,
        "script": "" if script is None else str(Path(script).absolute()),
        "package": getattr(main, "__package__", None),
        "is_awaited": is_awaited,
    }
    return json.dumps(head).encode()


def _started(verdict: Path | None) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process that serves (`rebuilding.main`), and the channel to it."""
    if not sys.executable:
        raise CannotCheck("this Python has no executable")
    most_bytes = max(0, int(memory.available().free_bytes * _MEMORY_SHARE))
    here, there = multiprocessing.Pipe()
    with there:
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from streamload.derived.proof.rebuilding import main; "
            f"main({there.fileno()}, {most_bytes}, {MOST_SECONDS}, {str(verdict or '')!r})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            env={**os.environ, **_NO_DEVICES},
            start_new_session=True,  # an interrupt at the terminal is for the training
        )
    return process, here


def _home() -> Path:
    """The directory of the node's lock and verdicts."""
    return home_in(memory.PLACE if memory.PLACE.is_dir() else Path(tempfile.gettempdir()), "checks")


def _read_verdict(path: Path) -> RowVerdict | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return RowVerdict(**json.loads(path.read_bytes()))
    return None


def _run_began() -> float:
    """When this process began, or the one that made it its worker, `time.time()`."""
    parent = multiprocessing.parent_process()
    process = os.getpid() if parent is None else parent.pid
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _imported_at
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")


_imported_at = time.time()


def _finish() -> None:
    """At the end of the process: wait a while for what is being checked, and say what is wrong."""
    ends = time.monotonic() + _AT_EXIT_SECONDS
    for check in _running.copy():
        check.wait(max(0.0, ends - time.monotonic()))
        if check.verdict is not None and check.at_exit is not None:
            check.at_exit(check.verdict)


@functools.cache
def _listen() -> None:
    atexit.register(_finish)  # after all imports: before stores are closed
    os.register_at_fork(after_in_child=_running.clear)  # the threads that wait stayed with the parent


def refuse_module(module: torch.nn.Module) -> None:
    """Refuse a built module whose results depend on more than an input.

    Raises:
        FeatureNotCacheable: it is sharded, or in train mode with dropout or batch norm.
    """
    name = type(module).__name__
    for prefix, child in module.named_modules():
        where = f"{name}.{prefix}" if prefix else name
        for tensor in child._parameters.values():
            if tensor is not None and (hasattr(tensor, "device_mesh") or tensor.device.type == "meta"):
                raise FeatureNotCacheable(
                    f"the weights of {where} are sharded, or not loaded: the whole module has to be in this "
                    f"process; keep it out of FSDP (ignored_modules)"
                )
        if type(child).__name__ in ("FullyShardedDataParallel", "FlatParameter"):
            raise FeatureNotCacheable(f"{where} is sharded: keep it out of FSDP (ignored_modules)")
        if not child.training:
            continue
        is_random = isinstance(child, DropoutBase) and child.p > 0
        is_random = is_random or _share_of(child, "drop_prob") > 0 or _share_of(child, "dropout") > 0
        is_per_row = isinstance(child, InstanceNormBase) and not child.track_running_stats
        if is_random or (isinstance(child, NormBase) and not is_per_row):
            raise FeatureNotCacheable(
                f"{where} is a {type(child).__name__} in train mode: its results differ from call to call; "
                f"call .eval() on the module (a parent's .train() undoes it)"
            )


def _share_of(module: torch.nn.Module, name: str) -> float:
    value = vars(module).get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def is_close(first: Sequence[Any], second: Sequence[Any], *, is_of_device: bool = False) -> bool:
    """True if leaves of two results are the same but for how kernels round.

    Args:
        is_of_device: only one of the results is a CPU's: devices multiply in fewer bits (TF32), and add up in
            an order of their own. Then the distance of all elements together counts, as that of a few grows
            with the depth of a module.
    """
    return len(first) == len(second) and all(
        _is_leaf_close(leaf, other, is_of_device) for leaf, other in zip(first, second, strict=True)
    )


def _is_leaf_close(leaf: Any, other: Any, is_of_device: bool) -> bool:
    first, second = (
        value.cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
        for value in (leaf, other)
    )
    dtype = first.dtype
    if first.shape != second.shape or dtype != second.dtype:
        return False
    if not (dtype.is_floating_point or dtype.is_complex):
        unequal = int((first != second).sum())
        return unequal <= (_UNEQUAL_SHARE * first.numel() if is_of_device else 0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    first, second = first.to(wide), second.to(wide)
    if not is_of_device:
        tolerance = _TOLERANCES.get(dtype, _TOLERANCE if dtype.itemsize > 1 else 2e-1)
        scale = first[first.isfinite()].abs().max().item() if first.isfinite().any() else 0.0
        least = tolerance * scale * 0.1 + 1e-12
        return torch.allclose(first, second, rtol=tolerance, atol=least, equal_nan=True)
    if not torch.equal(first.isfinite(), second.isfinite()):
        return False
    first, second = first[first.isfinite()], second[second.isfinite()]
    distance = (first - second).abs()
    tolerance = max(_DEVICE_TOLERANCE, _TOLERANCES.get(dtype, 0.0))
    near = distance.square().sum().sqrt() <= tolerance * second.abs().square().sum().sqrt() + 1e-12
    return bool(near) and bool((distance <= 10 * tolerance * second.abs().max() + 1e-12).all())
