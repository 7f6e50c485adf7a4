"""Looks at a size again and again while something runs."""

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.process_tree import pss_bytes


class Watch:
    """Calls `look` in a thread until the block ends.

    Attributes:
        samples: (monotonic seconds, bytes), without those looks that gave None.
    """

    def __init__(self, look: Callable[[], int | None], every_seconds: float) -> None:
        self.samples: list[tuple[float, int]] = []
        self._look = look
        self._every_seconds = every_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch")

    def __enter__(self) -> "Watch":
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

    def mean_bytes(self, start: float, stop: float) -> int:
        """The mean over a time; of all samples where none falls into it."""
        between = [size for at, size in self.samples if start <= at < stop]
        return int(statistics.mean(between or [size for _, size in self.samples] or [0]))

    def last_bytes(self, before: float) -> int:
        """The last sample before a moment."""
        return next((size for at, size in reversed(self.samples) if at < before), 0)

    def _between(self, start: float, stop: float) -> list[int]:
        return [size for at, size in self.samples if start <= at <= stop] or [0]

    def _watch(self) -> None:
        while not self._ended.wait(self._every_seconds):
            size = self._look()
            if size is not None:
                self.samples.append((time.monotonic(), size))


def memory(root: int) -> Watch:
    """A process tree's PSS."""
    return Watch(lambda: pss_bytes(root), 0.05)


def folder(root: Path) -> Watch:
    """What the files below a directory take on the disk."""
    return Watch(lambda: held_bytes(root), 0.1)


def held_bytes(root: Path) -> int:
    """What the files below a directory take on the disk now; one that is renamed meanwhile counts once."""
    found = {}
    for place, _, names in os.walk(root):
        for name in names:
            try:
                status = os.lstat(os.path.join(place, name))
            except FileNotFoundError:
                continue  # it went meanwhile
            found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())
