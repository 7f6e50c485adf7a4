"""Time budget for work that isn't needed at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

_SECONDS, _SHARE = 0.1, 0.01


class Allowance:
    """Time budget: a tenth of a second, and a hundredth of the time."""

    def __init__(self) -> None:
        self._seconds = _SECONDS
        self._at = time.monotonic()

    def may_begin(self) -> bool:
        """True if some of it is left."""
        now = time.monotonic()
        self._seconds = min(self._seconds + (now - self._at) * _SHARE, _SECONDS)
        self._at = now
        return self._seconds > 0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of what is done."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds -= time.monotonic() - began
