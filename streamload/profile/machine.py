"""The machine that is measured on, and the CPU time of a process tree, from /proc."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    """CPU model, cores, memory, kernel."""
    models = [
        line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")
    ]
    total = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(total) * 1024,
        "kernel": platform.release(),
    }


def pids(root: int | None = None) -> list[int]:
    """A process, by default this one, and its descendants."""
    descendants, waiting = [], [root or os.getpid()]
    while waiting:
        pid = waiting.pop()
        descendants.append(pid)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
    return descendants


def cpu_seconds(root: int | None = None) -> float:
    """User and system time of the tree so far, including children that were waited for."""
    ticks = 0
    for pid in pids(root):
        with contextlib.suppress(OSError):
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in after_name[11:15])  # utime, stime, cutime, cstime
    return ticks / _TICKS


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
