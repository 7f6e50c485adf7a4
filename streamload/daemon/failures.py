"""Failed tasks: why, and when each is retried, with exponential backoff."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from streamload.cache.shard import by_name

_MOST_SECONDS = 900.0
_MOST_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed task.

    Attributes:
        name: of the task.
        why: the last error.
        times: how often it has failed in a row.
        not_before: when it is retried.
        is_refused: whether it failed for want of room.
    """

    name: str
    why: str
    times: int
    not_before: float
    is_refused: bool = False


class Failures:
    """Failures by key. Not thread-safe.

    Args:
        first_seconds: the first backoff, doubled each further time up to 15 minutes; infinite: no retries.
        clock: monotonic.
    """

    def __init__(self, first_seconds: float, clock: Callable[[], float] = time.monotonic):
        self._first_seconds = first_seconds
        self._most_seconds = max(_MOST_SECONDS, first_seconds)
        self._clock = clock
        self._known: dict[str, Failure] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def note(self, key: str, name: str, why: str, *, is_refused: bool = False) -> tuple[int, float]:
        """Note a failure; returns how often it has failed by now, and the seconds until it is retried."""
        times = self._known[key].times + 1 if key in self._known else 1
        seconds = min(self._first_seconds * 2.0 ** min(times - 1, _MOST_DOUBLINGS), self._most_seconds)
        self._known[key] = Failure(name, why, times, self._clock() + seconds, is_refused)
        return times, seconds

    def waiting(self) -> set[str]:
        """The keys that aren't to be retried yet."""
        now = self._clock()
        return {key for key, failure in self._known.items() if failure.not_before > now}

    def forget(self, key: str) -> None:
        """Forget a failure: the task was done."""
        self._known.pop(key, None)

    def keep(self, keys: Collection[str]) -> None:
        """Forget all others."""
        self._known = {key: failure for key, failure in self._known.items() if key in keys}

    def by_key(self) -> dict[str, Failure]:
        """All failures."""
        return dict(self._known)

    def reasons(self) -> dict[str, str]:
        """The last error of each task, by its name."""
        return by_name((failure.name, failure.why) for failure in self._known.values())
