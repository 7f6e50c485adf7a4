"""Fork safety of open files: each descriptor belongs to the process that opened it.

A forked child closes its copies at once, because a copy does harm while the child lives: a lock stays held,
an evicted shard keeps its blocks, the end of a pipe isn't seen. Opening and registering are one step under
a mutex, and so are closing and unregistering; a fork waits for the mutex. So a child sees no unregistered
open file, and no closed number that may belong to another file. Never block (flock) under this mutex.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Opened = TypeVar("_Opened")
_change = threading.RLock()  # reentrant: a signal handler may fork or close a file at any point
_open: set[Descriptor] = set()
_spare: tuple[int, weakref.WeakMethod[Callable[[], bool]]] | None = None  # a thread, how it gives up files
shortages = 0
"""Count of times that this process had too many files open to open another."""


class Descriptor:
    """An open file of this process only; closed in a forked child.

    Args:
        opened: opens it without blocking, and returns its number.

    Attributes:
        number: for system calls; -1 once closed.
    """

    __slots__ = ("number",)

    def __init__(self, opened: Callable[[], int]):
        with _change:
            self.number = opening(opened)
            _open.add(self)

    @classmethod
    def open(cls, path: str | os.PathLike[str], flags: int) -> Descriptor:
        """Open a file with the flags of `os.open`; a new file is accessible to this user only."""
        return cls(lambda: os.open(path, flags | os.O_CLOEXEC, 0o600))

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Descriptor {self.number}>"

    def fileno(self) -> int:
        """Return its number, for `select` and the like."""
        return self.number

    def close(self) -> None:
        """Close it; idempotent."""
        with _change:
            number, self.number = self.number, -1
            if number >= 0:
                _open.discard(self)
                os.close(number)


def opening(opened: Callable[[], _Opened]) -> _Opened:
    """Open something; if this process has too many files, close some that are kept for later, and retry."""
    try:
        return opened()
    except OSError as exc:
        if exc.errno != errno.EMFILE:
            raise
        note_shortage()
        spare = _spare[1]() if _spare is not None and _spare[0] == threading.get_ident() else None
        if spare is None or not spare():
            raise
    return opened()


def note_shortage() -> None:
    """Ask the threads that keep files for later to close some: another one couldn't open a file."""
    global shortages
    shortages += 1


def give_up_when_short(spare: Callable[[], bool]) -> None:
    """Set how the calling thread gives up files; replaces what was set before.

    Args:
        spare: a method that closes some of the files that this thread may open again; False: there are
            none. Its object is not kept alive.
    """
    global _spare
    _spare = threading.get_ident(), weakref.WeakMethod(spare)


def count() -> int:
    """Number of this process's open files that are registered here."""
    return len(_open)


def pipe() -> tuple[Descriptor, Descriptor]:
    """Return the two ends of a pipe: to read from, and to write to."""
    with _change:
        numbers = os.pipe()
        reader, writer = (Descriptor(lambda number=number: number) for number in numbers)  # type: ignore[misc]
        return reader, writer


def _close_in_child() -> None:
    for descriptor in list(_open):
        with contextlib.suppress(OSError):
            descriptor.close()
    _change.release()


os.register_at_fork(before=_change.acquire, after_in_parent=_change.release, after_in_child=_close_in_child)


def in_this_process(act: Callable[..., object]) -> Callable[..., None]:
    """A function that calls `act` in this process, and does nothing in processes forked from it."""
    pid = os.getpid()

    def act_unless_forked(*args: Any) -> None:
        if os.getpid() == pid:
            act(*args)

    return act_unless_forked
