"""Every private name of torch, and of multiprocessing beneath it, that streamload uses.

They are looked up once, at import: a torch without one of them is refused by name and version here, and not
in the middle of a training.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler
from torch.utils.data import DataLoader

_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0
"""Given to workers to end by themselves; torch gives as much to one after the other."""
_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
"""torch's iterators over the workers of all loaders."""
_ITERATORS = "torch.utils.data.dataloader"
NAMES = (
    "torch._utils.ExceptionWrapper",
    "torch.autograd.profiler._is_profiler_enabled",
    "torch._C._remove_worker_pids",
    "torch.UntypedStorage._new_shared_fd_cpu",
    "torch._C._nn._upsample_bicubic2d_aa",
    "torch._C._nn._upsample_bilinear2d_aa",
    f"{_ITERATORS}.DataLoader._iterator",
    f"{_ITERATORS}._BaseDataLoaderIter._next_data",
    f"{_ITERATORS}._MultiProcessingDataLoaderIter._get_data",
    f"{_ITERATORS}._MultiProcessingDataLoaderIter._try_get_data",
    f"{_ITERATORS}._MultiProcessingDataLoaderIter._shutdown_workers",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.nn.modules.dropout._DropoutNd",
    "torch.nn.modules.instancenorm._InstanceNorm",
    "torch.utils._pytree.tree_map",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch._library.custom_ops.OPDEFS",
    "multiprocessing.process._children",
    "multiprocessing.forkserver._forkserver._preload_modules",
)


def require(names: tuple[str, ...] = NAMES) -> None:
    """Check that private names exist, as attributes or as annotations of a class.

    Raises:
        ImportError: this version of torch lacks one.
    """
    for dotted in names:
        package, *path = dotted.split(".")
        value: Any = torch if package == "torch" else multiprocessing
        for name in path:
            if not hasattr(value, name) and name not in getattr(value, "__annotations__", {}):
                raise ImportError(
                    f"torch {torch.__version__} has no {dotted}, which this version of streamload needs: "
                    f"install another torch (>=2.7), or a newer streamload"
                )
            value = getattr(value, name, None)


require()
from torch._library.custom_ops import OPDEFS  # noqa: E402
from torch._library.custom_ops import CustomOpDef as CustomOpDef  # noqa: E402
from torch._utils import ExceptionWrapper as ExceptionWrapper  # noqa: E402
from torch.nn.modules import module as _module  # noqa: E402
from torch.utils._pytree import tree_map as tree_map  # noqa: E402

NormBase = torch.nn.modules.batchnorm._NormBase
DropoutBase = torch.nn.modules.dropout._DropoutNd
InstanceNormBase = torch.nn.modules.instancenorm._InstanceNorm
upsample_bicubic: Callable[..., torch.Tensor] = torch._C._nn._upsample_bicubic2d_aa
upsample_bilinear: Callable[..., torch.Tensor] = torch._C._nn._upsample_bilinear2d_aa
"""The kernels of F.interpolate(antialias=True), which take `out`."""


def storage_of_file(descriptor: int, size_bytes: int) -> torch.UntypedStorage:
    """The storage of a shared file, as torch makes it where it receives a tensor."""
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, size_bytes)  # type: ignore[attr-defined]
    return storage


def custom_ops() -> list[Any]:
    """The operators that were made by `torch.library.custom_op`, torch's own among them."""
    return list(OPDEFS.values())


def global_hooks() -> list[Any]:
    """The hooks that run around the `forward` of every module."""
    return [*_module._global_forward_pre_hooks.values(), *_module._global_forward_hooks.values()]


def running_iterator(loader: DataLoader[Any]) -> Any | None:
    """The iterator over a DataLoader's persistent workers; None before they are started."""
    return getattr(loader, "_iterator", None)


def shut_down_workers(loader: DataLoader[Any]) -> None:
    """End a DataLoader's persistent workers, by force those that are stuck. Idempotent."""
    batches = running_iterator(loader)
    if batches is None or not hasattr(batches, "_shutdown_workers"):
        return
    # torch reports a dead worker from a signal handler, at any line; the others end all the same.
    if not batches._shutdown:
        with contextlib.suppress(RuntimeError):
            _end_workers(batches)
    with contextlib.suppress(RuntimeError):
        batches._shutdown_workers()


def _end_workers(batches: Any) -> None:
    """Tell all workers to end, and kill those that still run after some seconds."""
    batches._workers_done_event.set()
    for messages in batches._index_queues:
        messages.put(None)
    running = {worker.sentinel for worker in batches._workers}
    deadline = time.monotonic() + _END_SECONDS
    while running and (left_seconds := deadline - time.monotonic()) > 0:
        running.difference_update(multiprocessing.connection.wait(running, left_seconds))
    for worker in batches._workers:
        if worker.sentinel in running:
            worker.terminate()


def end_by_kill(workers: Iterable[multiprocessing.process.BaseProcess]) -> None:
    """Let torch and Python send SIGKILL to these workers in place of SIGTERM, at which workers go on."""
    for worker in workers:
        popen: Any = worker._popen  # type: ignore[attr-defined]
        popen_class: Any = type(popen)
        popen.__class__ = _ended_by_kill(popen_class)


@functools.cache
def _ended_by_kill(popen_class: type) -> type:
    def terminate(popen: Any) -> None:
        for batches in list(_iterators):
            if popen in [worker._popen for worker in getattr(batches, "_workers", ())]:
                _expect_deaths(batches)
        popen.kill()

    return type(popen_class.__name__, (popen_class,), {"terminate": terminate})


def _expect_deaths(batches: Any) -> None:
    """Keep torch from reporting that workers of an iterator have died, also of a later one at its address."""
    if getattr(batches, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False


def preload(module: str) -> None:
    """Let the forkserver import a module, if it doesn't run yet."""
    server: Any = forkserver._forkserver
    if module not in server._preload_modules:
        server._preload_modules = [*server._preload_modules, module]


def abandon_workers(batches: Any) -> None:
    """Keep torch and Python from ending an iterator's workers when this process, a fork, ends."""
    batches._shutdown = True
    _expect_deaths(batches)
    for worker in getattr(batches, "_workers", ()):
        multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]


def is_importing_main() -> bool:
    """True if this process was started by spawn or forkserver, and is importing the main script."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def is_main_from_stdin() -> bool:
    """True if the main script is `python - < script`, whose "file" Python would have workers run again."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is not None and Path(path).name == "<stdin>" and not Path(path).exists()


def next_batch(batches: Any, while_waiting: Callable[[], object] | None = None) -> Any:
    """`next(batches)` without its note for a profiler, unless one is recording.

    The note is a fifth of what the rank does for a batch.

    Args:
        batches: torch's iterator.
        while_waiting: called about once a second until the batch arrives, if it comes from a worker.
    """
    if while_waiting is not None and hasattr(batches, "_get_data") and hasattr(batches, "_try_get_data"):

        def get_when_arrived() -> Any:
            while True:
                has_arrived, data = batches._try_get_data(timeout=_LOOK_SECONDS)
                if has_arrived:
                    return data
                while_waiting()

        batches._get_data = get_when_arrived
        try:
            return next_batch(batches)
        finally:
            del batches._get_data
    if not hasattr(batches, "_next_data") or profiler._is_profiler_enabled:
        return next(batches)
    batch = batches._next_data()
    batches._num_yielded += 1
    return batch


class _NotArrived(Exception):
    """The next batch would have to be waited for."""


def next_if_arrived(batches: Any) -> Any | None:
    """The next batch if it has arrived, else None; None, too, from an iterator without workers.

    torch has no public way to ask: this runs its own steps, with the wait replaced.
    """
    if not hasattr(batches, "_get_data") or not hasattr(batches, "_try_get_data"):
        return None

    def get_arrived() -> Any:
        has_arrived, data = batches._try_get_data(timeout=0)
        if not has_arrived:
            raise _NotArrived
        return data

    batches._get_data = get_arrived
    try:
        return next_batch(batches)
    except _NotArrived:
        return None
    finally:
        del batches._get_data


def protect_workers(batches: Any) -> None:
    """Keep forked processes from shutting down the workers that torch's iterator has started."""
    _iterators.add(batches)


def _leave_workers_to_parent() -> None:
    """Keep torch and Python from ending the workers at the end of a process that didn't start them."""
    for batches in list(_iterators):
        abandon_workers(batches)


os.register_at_fork(after_in_child=_leave_workers_to_parent)
