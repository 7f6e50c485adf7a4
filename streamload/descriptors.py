"""Fork safety of open files: each descriptor belongs to the process that opened it.

A copy that a forked child keeps does harm as long as the child lives: of a lock, the lock stays held; of an
evicted shard, its blocks stay taken; of a pipe, its end isn't seen. So a child closes its copies at once.
Opening with registering, and closing with forgetting, happen under one mutex for which a fork waits: a child
sees no open file that isn't registered, and no number that is closed and may be another file's by now.
Nothing else happens under that mutex; waiting for a lock (flock) least of all.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from types import TracebackType

_change = threading.RLock()  # reentrant: a signal's handler may fork, or close something, in the middle
_open: set[Descriptor] = set()


class Descriptor:
    """An open file of this process alone; in a forked child it is closed.

    Args:
        opened: opens it, without waiting for anything, and gives its number.
    """

    __slots__ = ("number",)

    def __init__(self, opened: Callable[[], int]):
        with _change:
            self.number = opened()
            """For system calls; -1 once it is closed."""
            _open.add(self)

    @classmethod
    def open(cls, path: str | os.PathLike[str], flags: int) -> Descriptor:
        """Open a file by the flags of `os.open`; one that is made is for this user alone."""
        return cls(lambda: os.open(path, flags | os.O_CLOEXEC, 0o600))

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Descriptor {self.number}>"

    def fileno(self) -> int:
        """Its number, for `select` and the like."""
        return self.number

    def close(self) -> None:
        """Close it; once is enough."""
        with _change:
            number, self.number = self.number, -1
            if number >= 0:
                _open.discard(self)
                os.close(number)


def pipe() -> tuple[Descriptor, Descriptor]:
    """The two ends of a pipe: to read from, and to write to."""
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
