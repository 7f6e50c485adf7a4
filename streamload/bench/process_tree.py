"""CPU time of a process and all its descendants, from /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def pids(root: int | None = None) -> list[int]:
    """A process (this one by default) and its descendants."""
    found, waiting = [], [root or os.getpid()]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
    return found


def cpu_seconds(root: int | None = None) -> float:
    """User and system time of the tree so far, children that ended and were waited for among it."""
    ticks = 0
    for pid in pids(root):
        with contextlib.suppress(OSError):
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in after_name[11:15])  # utime, stime, cutime, cstime
    return ticks / _TICKS
