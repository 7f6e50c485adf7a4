"""CPU time, memory and disk reads of a process and all its descendants, from /proc."""

import contextlib
from pathlib import Path

from streamload.profile.machine import cpu_seconds, pids

__all__ = [
    "children_cpu_seconds",
    "cpu_seconds",
    "disk_bytes",
    "most_rss_bytes",
    "pids",
    "pss_bytes",
]


def children_cpu_seconds() -> float:
    """CPU time so far of the descendants of this process, to the nanosecond, without threads that ended."""
    total_ns = 0
    for pid in pids()[1:]:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


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
