"""What could not be done lately, why, and when it is tried again: after twice as long each time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from streamload.cache.shard import by_name

_MOST_SECONDS = 900.0
_MOST_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class _Failure:
    name: str
    why: str
    times: int
    not_before: float


class Failures:
    """Failures by key. Not thread-safe.

    Args:
        first_seconds: after which what failed once is tried again.
        clock: monotonic.
    """

    def __init__(self, first_seconds: float, clock: Callable[[], float] = time.monotonic):
        self._first_seconds = first_seconds
        self._clock = clock
        self._known: dict[str, _Failure] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def note(self, key: str, name: str, why: str) -> tuple[int, float]:
        """Something has failed; how often it has by now, and the seconds until it is to be tried again."""
        times = self._known[key].times + 1 if key in self._known else 1
        seconds = min(self._first_seconds * 2.0 ** min(times - 1, _MOST_DOUBLINGS), _MOST_SECONDS)
        self._known[key] = _Failure(name, why, times, self._clock() + seconds)
        return times, seconds

    def waiting(self) -> set[str]:
        """What isn't to be tried again yet."""
        now = self._clock()
        return {key for key, failure in self._known.items() if failure.not_before > now}

    def forget(self, key: str) -> None:
        """It has been done."""
        self._known.pop(key, None)

    def keep(self, keys: Collection[str]) -> None:
        """Forget all others."""
        self._known = {key: failure for key, failure in self._known.items() if key in keys}

    def reasons(self) -> dict[str, str]:
        """Of each its name, and why."""
        return by_name((failure.name, failure.why) for failure in self._known.values())
