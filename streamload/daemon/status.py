"""A daemon's status, for its status server and its command, and the failures of its tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from streamload.cache.shard import by_name

_MOST_SECONDS = 900.0
_MOST_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a daemon.

    Attributes:
        following: the demand, in words.
        wanted, held: shards in the window, and how many of them the target holds.
        working: the names of the tasks that run here.
        elsewhere: tasks that other daemons have leases of.
        failed: the last error of each task that has failed, by name.
        done: tasks that this daemon has completed.
        bytes_arrived: from origins.
        taken_over: leases of dead daemons that this one took over.
        waiting_for: the servers and buckets that tasks of this process wait for, and why: they are down, or
            refuse credentials.
        trouble: why the demand can't be known now; "" if it can.
        notice: who gave the preemption notice, and the seconds left; "" without one.
        seconds_since_look: the age of this status.
    """

    following: str = ""
    wanted: int = 0
    held: int = 0
    working: tuple[str, ...] = ()
    elsewhere: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    done: int = 0
    bytes_arrived: int = 0
    taken_over: int = 0
    waiting_for: dict[str, str] = field(default_factory=dict)
    trouble: str = ""
    notice: str = ""
    seconds_since_look: float = 0.0

    @property
    def is_complete(self) -> bool:
        """True if all demanded shards are held."""
        return not self.trouble and self.held == self.wanted


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
        now_seconds = self._clock()
        return {key for key, failure in self._known.items() if failure.not_before > now_seconds}

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
