"""CPU time, memory and disk reads of a process and all its descendants, from /proc."""

import contextlib
import statistics
import threading
import time
from pathlib import Path

from streamload.bench.process_tree import cpu_seconds, pids

__all__ = [
    "MemoryWatch",
    "cpu_seconds",
    "disk_bytes",
    "most_rss_bytes",
    "pids",
    "pss_bytes",
]


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


class MemoryWatch:
    """Samples a tree's PSS in a thread until the block ends.

    Attributes:
        samples: (monotonic seconds, bytes).
    """

    def __init__(self, root: int, every_seconds: float = 0.05) -> None:
        self.samples: list[tuple[float, int]] = []
        self._root = root
        self._every_seconds = every_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch")

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def peak_bytes(self, start: float, stop: float) -> int:
        return max(self._between(start, stop))

    def steady_bytes(self, start: float, stop: float) -> int:
        """The median of the second half of a time."""
        return int(statistics.median(self._between((start + stop) / 2, stop)))

    def last_bytes(self, before: float) -> int:
        """The last sample before a moment."""
        return next((size for at, size in reversed(self.samples) if at < before), 0)

    def _between(self, start: float, stop: float) -> list[int]:
        return [size for at, size in self.samples if start <= at <= stop] or [0]

    def _watch(self) -> None:
        while not self._ended.wait(self._every_seconds):
            self.samples.append((time.monotonic(), pss_bytes(self._root)))
