"""Policy for a batch that waits for bytes: a value that says what blocks it, and a policy (step F).

The policy is a function of that value alone. The reader collects the facts, and acts.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Hashable
from dataclasses import dataclass

REPORT_SECONDS = 5.0
"""After this the rank is told what blocks this process."""
WARN_SECONDS = 30.0
"""After each of these a warning is logged."""
_FEWEST_ARRIVED = 32
"""With fewer samples, chance decides how many stay in the window."""
_POLL_SECONDS = (0.004, 0.05)
_POLL_SHARE = 0.02
"""A worker sleeps for this share of the time it has waited, within those bounds: each look costs processor
time that the fills need."""


class Superseded(Exception):
    """The rank has started another epoch, or has died."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A batch that waits for bytes, as of one look.

    Attributes:
        shards: what it waits for, the most urgent first; none where the order itself goes on.
        seconds: how long it has waited.
        is_stuck: the most urgent shard has a copy that can be neither used nor deleted.
        is_refused: there is no room for one of the shards.
        is_reported: the rank has been told of the most urgent shard.
        warnings: how many were logged during this wait.
    """

    shards: tuple[int, ...]
    seconds: float
    is_stuck: bool = False
    is_refused: bool = False
    is_reported: bool = False
    warnings: int = 0


class Action(enum.Enum):
    """Decision of a reader on a blocked batch."""

    USE_FALLBACK = "fill the most urgent shard in the fallback tier"
    FIND_ROOM = "go on without storing the shards, if no room will come"
    REPORT = "tell the rank what blocks this process"
    WARN = "log a warning"


def decide(blocked: Blocked) -> list[Action]:
    """The actions for a blocked batch, in order; then it waits for `poll_seconds`."""
    if not blocked.shards:
        return []
    needed = {
        Action.USE_FALLBACK: blocked.is_stuck,
        Action.FIND_ROOM: blocked.is_refused,
        Action.REPORT: blocked.seconds > REPORT_SECONDS and not blocked.is_reported,
        Action.WARN: blocked.seconds >= WARN_SECONDS * (blocked.warnings + 1),
    }
    return [action for action, is_needed in needed.items() if is_needed]


def poll_seconds(blocked: Blocked) -> float:
    """Time to sleep before the next look."""
    least, most = _POLL_SECONDS
    return min(most, max(least, _POLL_SHARE * blocked.seconds))


class Wait:
    """One wait of a batch, over several looks."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._progress: dict[Hashable, tuple[int, int]] = {}
        self.warnings = 0

    def seconds(self) -> float:
        """Time so far."""
        return time.monotonic() - self._began

    def is_held_back(self, stream: Hashable, read: int, released: int) -> bool:
        """True if the shuffle window has kept most of the samples that have arrived since the first look.

        A smaller window would then have let the batch go on. A full one lets out as many as it takes in.

        Args:
            stream: whose samples the batch waits for.
            read: how many its lanes have read so far.
            released: how many of these its window has released.
        """
        first_read, first_released = self._progress.setdefault(stream, (read, released))
        arrived = read - first_read
        return arrived >= _FEWEST_ARRIVED and released - first_released < arrived / 2
