"""Processes that are killed or stopped on purpose, and what they were doing when it hit them.

A `Child` runs a function in a forked process. The function says in words what it is doing (`Stage`), in
memory that outlives it; so a kill can be aimed at a stage, and what it really hit is known afterwards.
`kill_loop` kills one again and again, then lets it finish.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from multiprocessing import forkserver
from typing import Any, NamedTuple

_WORD_BYTES = 128
_LOOK_SECONDS = 0.001
_STACKS_SECONDS = 1.0

__all__ = ["Child", "ChildFailed", "Hit", "Moment", "Stage", "kill_loop"]


class ChildFailed(AssertionError):
    """A process that nobody killed did not do its work; with its traceback."""


class Stage:
    """What a process is doing, in a word or two: written by it, read by whoever watches it.

    Make it before the fork. `enter` costs about a microsecond.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * _WORD_BYTES)  # the stage, then the one that is waited for
        self._end: Moment | None = None
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ring, False)

    def __str__(self) -> str:
        return self._word(0)

    def enter(self, name: str) -> None:
        """Say what is being done from now on."""
        self._write(0, name)
        if self._end is not None and name.startswith(self._end.stage):
            end, self._end = self._end, None
            _kill_this_process_in(end.seconds)
        aim = self._word(_WORD_BYTES)
        if aim and name.startswith(aim):
            with contextlib.suppress(BlockingIOError):
                os.write(self._ring, b".")

    def end_at(self, moment: Moment) -> None:
        """Have the kernel kill this process at a moment: to the microsecond, whatever it is doing then."""
        self._end = moment
        if not moment.stage:
            self.enter(str(self))

    def wait_for(self, name: str, seconds: float) -> bool:
        """Wait until a stage is entered whose name begins so; False if it isn't in time."""
        self._write(_WORD_BYTES, name)
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, 65536)
        if str(self).startswith(name):
            return True
        bell = select.poll()  # a test process may have more than the 1,024 descriptors that select takes
        bell.register(self._bell, select.POLLIN)
        return bool(bell.poll(1000 * seconds))

    def close(self) -> None:
        """Give back the memory; once is enough."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self._bell)
            os.close(self._ring)

    def _word(self, at: int) -> str:
        return self._memory[at : at + _WORD_BYTES].rstrip(b"\0").decode("utf-8", "replace")

    def _write(self, at: int, word: str) -> None:
        self._memory[at : at + _WORD_BYTES] = word.encode()[:_WORD_BYTES].ljust(_WORD_BYTES, b"\0")


class Child:
    """A function in a forked process, to be killed, stopped or waited for; a context manager.

    What the function needs is there by the fork: imports are done, nothing is pickled. Threads aren't copied
    by a fork, so it must not need one that ran before. What it starts by multiprocessing is forked, too.

    Args:
        work: called in the process with its stage; what it returns has to be fit for JSON.
        kill_at: when the kernel kills it (None: it lives).
        limit_seconds: after which the process ends by itself, whoever forgot about it.

    Attributes:
        pid: of the process.
        status: its exit status once it has ended (negative: the signal that ended it), None before.
        result: what the function returned, None before.
        error: the traceback of what it raised, empty if nothing.
        killed_in: the stage in which a SIGKILL ended it, None if none did.
    """

    def __init__(
        self,
        work: Callable[[Stage], Any],
        *,
        kill_at: Moment | None = None,
        limit_seconds: float = 120.0,
    ) -> None:
        self.stage = Stage()
        self.status: int | None = None
        self.result: Any = None
        self.error = ""
        self.killed_in: str | None = None
        self._said = os.memfd_create("child")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork in a process with threads
            self.pid = os.fork()
        if not self.pid:
            self._work(work, kill_at, limit_seconds)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def __repr__(self) -> str:
        return f"<Child {self.pid}: {'running' if self.status is None else self.status}>"

    def kill(self) -> str | None:
        """SIGKILL; returns the stage that it hit, None if the process had ended before."""
        if self.status is not None or self.join(0.0) is not None:
            return None
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self._ended(status)
        return self.killed_in

    def stop(self) -> str:
        """SIGSTOP, and wait until it holds; returns the stage that it hit."""
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._ended(status)
            raise ChildFailed(f"{self!r} ended before it could be stopped: {self.error}")
        return str(self.stage)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def join(self, seconds: float) -> int | None:
        """Wait for the end; returns the status, None if it isn't over in time."""
        deadline = time.monotonic() + seconds
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ended(status)
            elif time.monotonic() >= deadline:
                return None
            else:
                time.sleep(_LOOK_SECONDS)
        return self.status

    def finish(self, seconds: float) -> Any:
        """Wait for the end and return the function's result.

        Raises:
            ChildFailed: it raised, was killed, or isn't done in time (then its stacks are printed, by the
                handler that conftest.py sets, and it is killed).
        """
        if self.join(seconds) is None:
            os.kill(self.pid, signal.SIGUSR1)
            self.join(_STACKS_SECONDS)
            stage = self.kill()
            raise ChildFailed(f"not done after {seconds:g} s, in stage {stage!r}")
        if self.status != 0:
            raise ChildFailed(self.error or f"ended with status {self.status}")
        return self.result

    def _ended(self, status: int) -> None:
        self.status = os.waitstatus_to_exitcode(status)
        said = os.pread(self._said, os.fstat(self._said).st_size, 0)
        os.close(self._said)
        if self.status == -signal.SIGKILL:
            self.killed_in = str(self.stage)
        self.stage.close()
        if said:
            self.result, self.error = json.loads(said)

    def _work(self, work: Callable[[Stage], Any], kill_at: Moment | None, limit_seconds: float) -> None:
        """The process from the fork to its end; doesn't return."""
        said, status = "", 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, limit_seconds)
            # A forkserver can be used by the process alone that started it (Python looks whether it lives).
            multiprocessing.set_start_method("fork", force=True)
            vars(forkserver._forkserver).update(vars(forkserver.ForkServer()))
            if kill_at is not None:
                self.stage.end_at(kill_at)
            said = json.dumps([work(self.stage), ""])
            status = 0
        except BaseException:
            said = json.dumps([None, traceback.format_exc()])
        finally:
            os.pwrite(self._said, said.encode(), 0)
            os._exit(status)


class Moment(NamedTuple):
    """When to kill: so many seconds after a stage was entered whose name begins so ("": after the start)."""

    stage: str = ""
    seconds: float = 0.0


class Hit(NamedTuple):
    """What a kill hit: the stage, None if the process had ended before."""

    moment: Moment
    stage: str | None


def kill_loop(
    work: Callable[[Stage], Any],
    moments: Iterable[Moment],
    *,
    after_kill: Callable[[Hit], None] = lambda hit: None,
    limit_seconds: float = 60.0,
) -> tuple[list[Hit], Any]:
    """Start a process and kill it, for each moment anew; then start it once more and let it finish.

    Args:
        work: what the process does; see `Child`.
        moments: when it is killed.
        after_kill: called after each kill, before the next start: look here at what was left.
        limit_seconds: for each start.

    Returns:
        What each kill hit, and the result of the last start.

    Raises:
        ChildFailed: a process failed by itself, or the last one wasn't done in time.
    """
    hits = []
    for moment in moments:
        with Child(work, kill_at=moment, limit_seconds=limit_seconds) as child:
            if child.join(limit_seconds) not in {0, -signal.SIGKILL}:
                raise ChildFailed(child.error or f"ended with status {child.status} by itself")
            hit = Hit(moment, child.killed_in)
        hits.append(hit)
        after_kill(hit)
    with Child(work, limit_seconds=limit_seconds) as child:
        return hits, child.finish(limit_seconds)


def _kill_this_process_in(seconds: float) -> None:
    """SIGKILL from a timer of the kernel, which needs no thread of this process to be awake."""
    if seconds <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
    libc = ctypes.CDLL(None, use_errno=True)
    event = (ctypes.c_int * 16)(0, 0, signal.SIGKILL, 0)  # sigevent: a value, the signal, SIGEV_SIGNAL
    timer = ctypes.c_void_p()
    whole, rest = divmod(max(1, round(seconds * 1e9)), 10**9)
    when = (ctypes.c_long * 4)(0, 0, whole, rest)  # itimerspec: no interval, then the first time
    if libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "no timer for a kill")
    libc.timer_settime(timer, 0, when, None)
