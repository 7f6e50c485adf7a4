"""CPU time, memory and disk reads of a process and all its descendants, from /proc."""

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


def disk_bytes(root: int | None = None) -> int:
    """What the kernel read from disks for the tree so far: nothing for what was in memory."""
    total = 0
    for pid in pids(root):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/io").read_text().splitlines():
                if line.startswith("read_bytes:"):
                    total += int(line.split()[1])
    return total


def pss_bytes(root: int) -> int:
    """Memory of the tree, each page divided by the number of processes that map it."""
    total = 0
    for pid in pids(root):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def most_rss_bytes(root: int) -> int:
    """The most memory that each process of the tree ever had, added up; shared pages count in each."""
    total = 0
    for pid in pids(root):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total
