"""The calls of the operating system, as simulated tasks make them: each may hand the turn over first.

What is called is the kernel's own, on real files. For a dead process nothing is called any more; locks that
would block hand the turn over; names, times of files and the order of directories come from the seed. Threads
that aren't simulated go straight through.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import logging
import os
import pathlib
import secrets
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from streamload import descriptors
from streamload.cache import directory, part, shard_copy
from streamload.prefetch import fallback, prefetcher, scheduler

from .disk import Disk
from .engine import Engine, Killed, Process, Task, TaskThread
from .threads import Threads

_PLAIN = ("stat", "lstat", "pread", "read", "fstat", "fsync", "link")
_OWN = (
    *("open", "close", "write", "pwrite", "scandir", "listdir", "mkdir", "rmdir"),
    *("unlink", "rename", "replace", "utime", "getpid"),
)
_real: dict[str, Any] = {name: getattr(os, name) for name in (*_PLAIN, *_OWN)}
_real_flock, _real_io_open = fcntl.flock, io.open
_real_monotonic, _real_sleep, _real_token_hex = time.monotonic, time.sleep, secrets.token_hex
_real_start = threading.Thread.start

_MISSING = object()
MUTATING = frozenset(
    ("create", "write", "pwrite", "mkdir", "rmdir", "unlink", "rename", "replace", "utime", "flock", "link")
)
"""The calls that change something others can see."""


class System:
    """The operating system of one simulation.

    Args:
        engine: whose tasks call it.
        disk: where sizes are kept.
        short_writes: how often a write takes only a part of what it is given.
    """

    def __init__(self, engine: Engine, disk: Disk, short_writes: float):
        self.engine = engine
        self.disk = disk
        self.torn: Process | None = None
        """Dies within its next write."""
        self._short_writes = short_writes
        self._locking: list[Task] = []
        self._files: dict[int, _File] = {}
        engine.on_kill = self._close_all

    def open(self, task: Task, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        self.engine.step(task, "create" if flags & os.O_CREAT else "open", path)
        descriptor: int = _real["open"](path, flags, mode, dir_fd=dir_fd)
        status = _real["fstat"](descriptor)
        if self.disk.opened(descriptor, path, task.process.name, status):
            self._date(path)
        task.process.descriptors[descriptor] = str(path)
        return descriptor

    def close(self, task: Task, descriptor: int) -> None:
        self.engine.step(task, "close", task.process.descriptors.get(descriptor, ""))
        self._close(task.process, descriptor)

    def write(self, task: Task, descriptor: int, data: Any) -> int:
        return self._write(task, "write", descriptor, data)

    def pwrite(self, task: Task, descriptor: int, data: Any, offset: int) -> int:
        return self._write(task, "pwrite", descriptor, data, offset)

    def _write(self, task: Task, call: str, descriptor: int, data: Any, *offset: int) -> int:
        view = memoryview(data).cast("B")
        self.engine.step(
            task, call, f"{len(view)} bytes {task.process.descriptors.get(descriptor)} {offset or ''}"
        )
        is_torn = self.torn is task.process
        if len(view) > 1 and (is_torn or self.engine.rng.random() < self._short_writes):
            view = view[: self.engine.rng.randrange(1, len(view))]
        written: int = _real[call](descriptor, view, *offset)
        status = _real["fstat"](descriptor)
        self._touch(descriptor)
        self.disk.written(descriptor, task.process.name, status.st_size)
        if is_torn:
            self.torn = None
            self.engine.kill(task.process)
            raise Killed
        return written

    def scandir(self, task: Task, path: Any = ".") -> _Entries:
        self.engine.step(task, "scandir", task.process.descriptors.get(path, path))
        with _real["scandir"](path) as entries:
            return _Entries(sorted(entries, key=lambda entry: entry.name))

    def listdir(self, task: Task, path: Any = ".") -> list[str]:
        self.engine.step(task, "listdir", path)
        return sorted(_real["listdir"](path))

    def mkdir(self, task: Task, path: Any, *args: Any, **named: Any) -> None:
        self.engine.step(task, "mkdir", path)
        _real["mkdir"](path, *args, **named)
        self._date(path)

    def rmdir(self, task: Task, path: Any, **named: Any) -> None:
        self.engine.step(task, "rmdir", path)
        _real["rmdir"](path, **named)

    def unlink(self, task: Task, path: Any, **named: Any) -> None:
        self.engine.step(task, "unlink", path)
        status = _real["lstat"](path, **named)
        _real["unlink"](path, **named)
        if status.st_nlink == 1:
            self.disk.unlinked(status.st_ino)
        if not named:
            self._touch(os.path.dirname(path))

    def rename(self, task: Task, path: Any, target: Any) -> None:
        self._rename(task, "rename", path, target)

    def replace(self, task: Task, path: Any, target: Any) -> None:
        self._rename(task, "replace", path, target)

    def _rename(self, task: Task, call: str, path: Any, target: Any) -> None:
        self.engine.step(task, call, f"{path} → {target}")
        replaced = None
        with contextlib.suppress(FileNotFoundError):
            replaced = _real["lstat"](target).st_ino
        _real[call](path, target)
        if replaced is not None:
            self.disk.unlinked(replaced)
        for folder in {os.path.dirname(path), os.path.dirname(target)}:
            self._touch(folder)

    def utime(self, task: Task, path: Any, *args: Any, **named: Any) -> None:
        self.engine.step(task, "utime", path)
        self._touch(path)

    def getpid(self, task: Task) -> int:
        return 1000 + task.process.pid

    def flock(self, task: Task, descriptor: Any, operation: int) -> None:
        path = task.process.descriptors.get(descriptor)
        self.engine.step(task, "flock", path)
        while True:
            try:
                return _real_flock(descriptor, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                if operation & fcntl.LOCK_NB:
                    raise
            self._locking.append(task)
            self.engine.wait(task, f"the lock on {path}")

    def io_open(self, task: Task, path: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        """A file object whose reads, writes and close are calls like all others."""
        flags = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC}[mode[0]]
        if "+" in mode:
            flags = flags & ~os.O_WRONLY | os.O_RDWR
        descriptor = self.open(task, path, flags | os.O_CLOEXEC, 0o666)
        raw = _File(self, descriptor, mode.replace("t", ""))
        self._files[descriptor] = raw
        kind: Any = io.BufferedReader if mode[0] == "r" else io.BufferedWriter
        buffered = io.BufferedRandom(raw) if "+" in mode else kind(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

    def monotonic(self, task: Task) -> float:
        return self.engine.now

    def sleep(self, task: Task, seconds: float) -> None:
        self.engine.step(task, "sleep", f"{seconds:.3f}")
        self.engine.wait(task, "time to pass", seconds)

    def token_hex(self, task: Task, count: int = 16) -> str:
        return self.engine.rng.randbytes(count).hex()

    def plain(self, name: str) -> Callable[..., Any]:
        def call(task: Task, *args: Any, **named: Any) -> Any:
            what = task.process.descriptors.get(args[0], args[0])
            self.engine.step(task, name, what)
            return _real[name](*args, **named)

        return call

    def _close(self, process: Process, descriptor: int) -> None:
        self._files.pop(descriptor, None)
        process.descriptors.pop(descriptor, None)
        self.disk.closed(descriptor)
        _real["close"](descriptor)
        self._unlocked()

    def _close_all(self, process: Process) -> None:
        """What the kernel does for a process that was killed."""
        for descriptor in list(process.descriptors):
            file = self._files.get(descriptor)
            if file is not None:
                file.detach_dead()
            self._close(process, descriptor)

    def _unlocked(self) -> None:
        for task in self._locking:
            self.engine.wake(task)
        self._locking.clear()

    def _touch(self, path: Any) -> None:
        at = int(self.engine.now * 1e9)
        _real["utime"](path, ns=(at, at))

    def _date(self, path: Any) -> None:
        """Something new is there: it and its directory are of now."""
        self._touch(path)
        self._touch(os.path.dirname(path))


class _Entries(list[Any]):
    """What `os.scandir` gives, in the order of names."""

    def __enter__(self) -> Iterator[Any]:
        return iter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _File(io.FileIO):
    """A file object's lowest layer, for a descriptor that is opened and closed through the system."""

    def __init__(self, system: System, descriptor: int, mode: str):
        super().__init__(descriptor, mode, closefd=False)
        self._system = system
        self._descriptor = descriptor

    def _task(self) -> Task:
        task = self._system.engine.here()
        if task is None or self._descriptor not in task.process.descriptors:
            raise Killed
        return task

    def _step(self, call: str) -> None:
        task = self._task()
        self._system.engine.step(task, call, task.process.descriptors[self._descriptor])

    def readinto(self, buffer: Any) -> int | None:  # type: ignore[override]
        self._step("read")
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._step("read")
        return super().readall()

    def write(self, data: Any) -> int:
        return self._system.write(self._task(), self._descriptor, data)

    def detach_dead(self) -> None:
        """Its process is dead: nothing is to be closed any more."""
        super().close()

    def close(self) -> None:
        if not self.closed:
            task = self._task()
            super().close()
            self._system.close(task, self._descriptor)


@contextlib.contextmanager
def installed(system: System) -> Iterator[None]:
    """The shipped modules call `system` as long as this holds, where simulated tasks call them."""
    engine = system.engine

    def dispatch(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            task = engine.here()
            return real(*args, **named) if task is None else simulated(task, *args, **named)

        return call

    threads = Threads(engine)
    places: list[tuple[Any, str, Any]] = [
        (os, name, dispatch(real, system.plain(name) if name in _PLAIN else getattr(system, name)))
        for name, real in _real.items()
    ]
    io_open = dispatch(_real_io_open, system.io_open)
    places += [
        (fcntl, "flock", dispatch(_real_flock, system.flock)),
        (io, "open", io_open),
        (time, "monotonic", dispatch(_real_monotonic, system.monotonic)),
        (time, "sleep", dispatch(_real_sleep, system.sleep)),
        (secrets, "token_hex", dispatch(_real_token_hex, system.token_hex)),
        (directory, "threading", threads),
        (prefetcher, "threading", threads),
        (scheduler, "threading", threads),
        (fallback, "threading", threads),
        (threading.Thread, "start", _start_of_no_task(engine)),
        # Each simulated process would have its own.
        (descriptors, "_open", set()),
        (descriptors, "_change", contextlib.nullcontext()),
        (sys, "unraisablehook", _no_word_of_the_dead(sys.unraisablehook)),
        # Sets of these are gone through: their order must not depend on where they lie in memory.
        (part.Part, "__hash__", lambda one: zlib.crc32(one.path.name.encode())),
        (shard_copy.ShardCopy, "__hash__", lambda found: zlib.crc32(found.path.name.encode())),
    ]
    accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps its own references
    if accessor is not None:
        simulated = {name: value for module, name, value in places if module is os} | {"open": io_open}
        places += [
            (accessor, name, staticmethod(v)) for name, v in simulated.items() if hasattr(accessor, name)
        ]
    before = [(module, name, module.__dict__.get(name, _MISSING)) for module, name, _ in places]
    logger = logging.getLogger("streamload")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    gc.disable()  # what is collected, and when, must not depend on what ran before
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            if value is _MISSING:
                delattr(module, name)
            else:
                setattr(module, name, value)
        logger.setLevel(level)
        gc.enable()
        gc.collect()


def _start_of_no_task(engine: Engine) -> Callable[[threading.Thread], None]:
    """`Thread.start` for all but simulated tasks: a real thread would live outside of the history."""

    def start(thread: threading.Thread) -> None:
        here = engine.here()
        if here is not None and not isinstance(thread, TaskThread):
            engine.fail(f"{here.name} starts the real thread {thread.name}: its module has to be simulated")
            raise Killed
        _real_start(thread)

    return start


def _no_word_of_the_dead(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """What a killed process left of files and generators does nothing when it is cleared away."""

    def silent(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, Killed):
            hook(unraisable)

    return silent
