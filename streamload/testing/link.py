"""A line with a bandwidth, for `ShardServer`."""

from __future__ import annotations

import threading
import time

FULL_PIECE_BYTES = 4 * 1024 * 1024
LEAST_PIECE_BYTES = 16 * 1024


class Link:
    """A line with a bandwidth: whoever sends waits for its turn. Safe among threads."""

    def __init__(self, bytes_per_second: float | None, closed: threading.Event) -> None:
        self.bytes_per_second = bytes_per_second
        self._closed = closed
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def piece_bytes(self) -> int:
        """How much to send at once: a thousandth of a second's worth, so that connections share as on a line.

        A line shares by packets. By pieces of a hundredth of a second, of 200 KB at 20 MB/s, each of eight
        connections would stand still for 70 ms between two of its own.
        """
        if self.bytes_per_second is None:
            return FULL_PIECE_BYTES
        wanted = max(LEAST_PIECE_BYTES, int(self.bytes_per_second / 1000))
        return max(1, min(FULL_PIECE_BYTES, wanted, int(self.bytes_per_second / 100)))

    def take(self, n: int) -> None:
        """Wait until n bytes have passed."""
        if self.bytes_per_second is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + n / self.bytes_per_second
            delay = self._free_at - now
        self._closed.wait(delay)
