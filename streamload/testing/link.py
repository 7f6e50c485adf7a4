"""Bandwidth limits for `ShardServer`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FULL_PIECE_BYTES = 4 * 1024 * 1024
LEAST_PIECE_BYTES = 16 * 1024
_LATE_SECONDS = 0.01


class Link:
    """A link with a bandwidth: senders wait for their turn. Thread-safe.

    Args:
        bytes_per_second: of all senders together; None: no limit.
        closed: once set, nobody waits.
        clock: monotonic.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        closed: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._closed = closed
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def piece_bytes(self) -> int:
        """Number of bytes to send at once: a thousandth of a second's worth.

        Connections then share the link about as packets do. With pieces of a hundredth of a second, 200 KB
        at 20 MB/s, each of eight connections would pause for 70 ms between two pieces.
        """
        if self.bytes_per_second is None:
            return FULL_PIECE_BYTES
        piece_bytes = max(LEAST_PIECE_BYTES, int(self.bytes_per_second / 1000))
        return max(1, min(FULL_PIECE_BYTES, piece_bytes, int(self.bytes_per_second / 100)))

    def take(self, n: int) -> None:
        """Wait until n bytes have passed.

        A sender that is slightly late overslept after its last piece, while a real link would have kept
        sending from its queue: that time is credited, or a lone connection wouldn't reach the bandwidth.
        """
        if self.bytes_per_second is None:
            return
        with self._lock:
            now_seconds = self._clock()
            is_idle = now_seconds - self._free_at > _LATE_SECONDS
            self._free_at = (now_seconds if is_idle else self._free_at) + n / self.bytes_per_second
            delay = self._free_at - now_seconds
        if delay > 0:
            self._closed.wait(delay)
