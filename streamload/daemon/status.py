"""How far a daemon is: what its pages, its command and its tests go by."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Status:
    """How far a daemon is.

    Attributes:
        following: what is wanted, in words.
        wanted, held: shards in the window, and how many of them are held.
        working: the names of those that are worked on here.
        elsewhere: how many are worked on by other daemons.
        failed: of those that could not be had lately: why.
        done: tasks that this daemon has brought.
        bytes_arrived: from origins.
        taken_over: leases of dead daemons that this one has taken.
        trouble: why what is wanted can't be known now; "" if it can.
        notice: who said that this machine goes, and in how many seconds it does; "" if nobody.
        seconds_since_look: how old all of this is.
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
        """Whether all that is wanted is held."""
        return not self.trouble and self.held == self.wanted
