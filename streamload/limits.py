"""Limits of this process and machine: what can run out, how much is allowed, and how to allow more.

A resource is asked for where it is needed, not reserved in advance. Whoever is refused waits some seconds if
the shortage may pass, then raises `LimitReached` with a text from here: which limit, its value, what to set.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor  # noqa: TID251  here alone
from pathlib import Path
from typing import ParamSpec, TypeVar

from streamload.errors import LimitReached, is_shortage

PATIENCE_SECONDS = 15.0
"""Longest shortage that is waited for: a checkpoint that is being saved opens many files for a moment."""
_MOST_FILES = 1 << 20
"""No higher soft limit is set: programs that close all possible descriptors take minutes for a billion."""
_MOST_CAUSES = 8
_ENDING_SECONDS = 1.0
"""Longest wait of a fork for threads that are ending, which takes them less than a millisecond."""
_ENDING_POLL_SECONDS = 0.0002
_CGROUP, _CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_threads: set[threading.Thread] = set()
"""Threads that were started from here, or noted: those that run, and those that a fork might still meet."""


def allow_many_files() -> None:
    """Raise this process's soft limit of open files to its hard limit: open shards take descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_files() -> int:
    """Number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def open_files(at_least: int = 0) -> int:
    """Count the open files of this process, whoever opened them.

    Args:
        at_least: the answer where the system doesn't list them.
    """
    try:
        return max(at_least, sum(1 for _ in os.scandir("/proc/self/fd")) - 1)  # one is of the listing
    except OSError as exc:
        return most_files() if exc.errno == errno.EMFILE else at_least  # without one for the listing, all are


def advice(error: BaseException) -> str:
    """Return which limit a shortage has met, and what to set; "" if the error is none."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return _files_advice()
    if number == errno.ENFILE:
        return (
            "all processes of this machine together have too many files open: raise it (sysctl fs.file-max)"
        )
    if number == errno.EAGAIN or "can't start new thread" in str(error):
        return _processes_advice()
    if number == errno.ENOMEM:
        return _memory_advice()
    return ""


def reached(failure: str, error: BaseException) -> LimitReached:
    """Return the error for something that a limit doesn't allow.

    Args:
        failure: can't be done: "a worker process can't be started".
        error: the refusal of the system.
    """
    hint = advice(error)
    return LimitReached(f"{failure}: {error}{'; ' + hint if hint else ''}")


def start(thread: threading.Thread) -> None:
    """Start a thread. A fork of this process waits while it ends, see `note_thread`.

    Raises:
        LimitReached: the user or the container may not have another one.
    """
    with _named(thread.name):
        thread.start()
    _note(thread)


class Threads(ThreadPoolExecutor):
    """A pool of threads. A fork of this process waits while they end, see `note_thread`.

    Args:
        count: of threads, at most.
        name: of each, before its number.
    """

    def __init__(self, count: int, name: str):
        super().__init__(count, name, initializer=note_thread)
        self._name = name

    def submit(
        self, call: Callable[_Parameters, _Result], /, *args: _Parameters.args, **options: _Parameters.kwargs
    ) -> Future[_Result]:
        """Call something in a thread.

        Raises:
            LimitReached: the user or the container may not have another thread.
        """
        with _named(self._name):
            return super().submit(call, *args, **options)


def note_thread() -> None:
    """Let forks of this process wait while the current thread ends.

    Before Python 3.13 `join` returns when a thread has run its last line of Python. It still has to leave the
    C libraries, where it takes OpenSSL's locks: a process that is forked meanwhile has these locked for good,
    and hangs when it opens its first TLS connection. With any Python, nobody joins some threads.
    """
    _note(threading.current_thread())


def _note(thread: threading.Thread) -> None:
    _threads.difference_update(
        [
            ended
            for ended in _ended_threads()
            if ended.native_id == thread.native_id or not _is_in_system(ended)
        ]
    )
    _threads.add(thread)


def _ended_threads() -> list[threading.Thread]:
    """Return the noted threads that have run their last line of Python."""
    return [thread for thread in tuple(_threads) if not thread.is_alive()]


def _is_in_system(thread: threading.Thread) -> bool:
    return thread.native_id is not None and Path(f"/proc/self/task/{thread.native_id}").exists()


def _await_ending_threads() -> None:
    """Wait until each noted thread either runs or is gone. No other one can end after the last look."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while ended := _ended_threads():
        is_late = time.monotonic() >= deadline
        _threads.difference_update([thread for thread in ended if is_late or not _is_in_system(thread)])
        if not _threads.isdisjoint(ended):
            time.sleep(_ENDING_POLL_SECONDS)


os.register_at_fork(before=_await_ending_threads, after_in_child=_threads.clear)


@contextlib.contextmanager
def _named(thread: str) -> Iterator[None]:
    """Say which thread can't be started."""
    try:
        yield
    except RuntimeError as exc:
        if "can't start new thread" not in str(exc):
            raise
        raise reached(f"the thread {thread} can't be started", exc) from exc


def anonymous_memory(size_bytes: int) -> mmap.mmap:
    """Map memory that is private to this process; untouched pages take none.

    Raises:
        LimitReached: the process may not have that much, or not another map.
    """
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise reached(f"{size_bytes:,} bytes of memory can't be mapped", exc) from exc


def shortage_in(error: BaseException | None) -> BaseException | None:
    """Return the shortage that is the cause of an error, if one is.

    A fork that is refused (EAGAIN) isn't found: the same number says that a socket has nothing to read.
    """
    depth = 0
    while error is not None and depth < _MOST_CAUSES:
        is_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
        if is_thread or (isinstance(error, OSError) and is_shortage(error)):
            return error
        reason = getattr(error, "reason", None)  # of urllib3's errors
        error, depth = (
            reason if isinstance(reason, BaseException) else error.__cause__ or error.__context__,
            depth + 1,
        )
    return None


def map_count() -> tuple[int, int]:
    """Count the memory maps of this process, and those that it may have; (0, 0): unknown."""
    try:
        with Path("/proc/self/maps").open("rb") as maps:
            count = sum(1 for _ in maps)
        return count, int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 0, 0


def process_limit() -> tuple[str, int] | None:
    """Return the lowest known limit of processes and threads, with its name; None: there is none."""
    limits = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        limits.append(("ulimit -u", soft))
    for name, path in (
        ("pids.max of the container", _CGROUP / "pids.max"),
        ("pids.max of the container", _CGROUP / "pids" / "pids.max"),
        ("sysctl kernel.threads-max", Path("/proc/sys/kernel/threads-max")),
        ("sysctl kernel.pid_max", Path("/proc/sys/kernel/pid_max")),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max": there is none
            limits.append((name, int(path.read_text())))
    return min(limits, key=lambda limit: limit[1], default=None)


def own_processors(ranks: int = 1) -> int:
    """The number of processors that this rank may use, at least 1.

    They are those that the process may run on, or fewer by a CPU quota of its control groups (v1 or v2), as
    of a container; in equal parts for the ranks of the node, except where Slurm gives each task its own.

    Args:
        ranks: of the node, which share them.
    """
    allowed, quota = len(os.sched_getaffinity(0)), _smallest_quota()
    with contextlib.suppress(KeyError, ValueError):
        of_task = int(os.environ["SLURM_CPUS_PER_TASK"])
        return max(1, min(allowed, of_task, int(min(quota / ranks, allowed))))
    return max(1, int(min(allowed, quota) / ranks))


def _smallest_quota() -> float:
    """The smallest quota of the control groups that this process is in; infinite if there is none."""
    quota = math.inf
    with contextlib.suppress(OSError, ValueError):
        for line in _CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = _CGROUP / "cpu" if controllers else _CGROUP
            group = root / path.lstrip("/")  # in a container often not there: its own group is the root
            groups = [group, *group.parents][: len(group.parts) - len(root.parts) + 1]
            quota = min(quota, *map(_quota, groups))
    return quota


def _quota(group: Path) -> float:
    """Processors by the quota of a control group; infinite if it has none."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # "max": there is none
            quota, period = (int(number) for name in names for number in (group / name).read_text().split())
            if quota > 0:
                return quota / period
    return math.inf


def _files_advice() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = f"{soft:,}" if soft == hard else f"{soft:,}, at most {hard:,}"
    enough = max(4096, 4 * soft)
    return (
        f"this process may have {allowed} files open and has {open_files():,}: allow more before it starts "
        f"(ulimit -n {enough}; ulimit -Hn {enough}, LimitNOFILE= or --ulimit nofile= for the hard limit)"
    )


def _processes_advice() -> str:
    limit = process_limit()
    met = f"{limit[0]} is {limit[1]:,}" if limit is not None else "a limit of processes and threads"
    return (
        f"{met}: allow more processes and threads (ulimit -u; --pids-limit or pids.max of the container), "
        f"or use fewer workers"
    )


def _memory_advice() -> str:
    count, most = map_count()
    if most and count > most * 9 // 10:
        return (
            f"this process has {count:,} of {most:,} memory maps: raise the limit (sysctl vm.max_map_count)"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        return f"this process may have {soft:,} bytes of address space: raise the limit (ulimit -v)"
    return "memory is short: use fewer workers or smaller batches, or raise the limit of the container"
