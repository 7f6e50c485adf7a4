"""The run as extensions' parts in the rank see it: agreement among ranks, events for workers (step K)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamload.extension import Event
from streamload.loader.agreement import Agreement
from streamload.loader.distributed import can_compare
from streamload.loader.schedule import Schedule


class RankRun:
    """See extension.Run; one for each part.

    Args:
        schedule: of the loader's epochs.
        send: sends an event to the extension's parts in the workers.
    """

    def __init__(self, schedule: Schedule, send: Callable[[Any], Event]):
        self._schedule = schedule
        self._agreement: Agreement | None = None
        self.send = send

    @property
    def can_agree(self) -> bool:
        """See extension.Run."""
        world_size = self._schedule.topology.world_size
        return world_size == 1 or can_compare(world_size)

    def agree(self, subject: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """See extension.Run."""
        if self._agreement is None:
            self._agreement = Agreement(self._schedule.topology.world_size)
        return self._agreement.decide(subject, value, decide)
