"""A daemon's status, for its status server and its command."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    trouble: str = ""
    notice: str = ""
    seconds_since_look: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all demanded shards are held."""
        return not self.trouble and self.held == self.wanted
