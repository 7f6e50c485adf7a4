"""A circuit breaker: after repeated failures, nothing is tried for a while.

After the pause one attempt decides: a success closes the breaker, a failure opens it again. The pattern is
from Nygard's "Release It!" (2007).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PAUSE_SECONDS = 60.0
_FAILURES = 3


class CircuitBreaker:
    """Opens after three failures in a row. Thread-safe.

    Args:
        doublings: how often the pause may double while failures continue.
    """

    def __init__(
        self,
        pause_seconds: float = PAUSE_SECONDS,
        doublings: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pause_seconds, self._doublings, self._clock = pause_seconds, doublings, clock
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._in_a_row = 0
        self._open_until = clock()

    @property
    def is_open(self) -> bool:
        """True if nothing should be tried now."""
        with self._lock:
            return self._clock() < self._open_until

    @property
    def in_a_row(self) -> int:
        """Failures since the last success."""
        with self._lock:
            return self._in_a_row

    def succeed(self) -> None:
        """Note a success."""
        with self._lock:
            self._in_a_row = 0

    def fail(self) -> float:
        """Note a failure; returns for how many seconds it opens the breaker, 0 if not yet."""
        with self._lock:
            self._in_a_row += 1
            beyond = self._in_a_row - _FAILURES
            if beyond < 0:
                return 0.0
            seconds = self._pause_seconds * 2.0 ** min(beyond, self._doublings)
            self._open_until = self._clock() + seconds
            return seconds
