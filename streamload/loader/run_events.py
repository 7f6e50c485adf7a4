"""The rank's list of run events: set in mid-epoch, sent to the workers, part of the state (steps B and E).

An event holds from the first step on that no worker of any rank can have begun.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from streamload.errors import OptionError
from streamload.extension import Event
from streamload.loader.distributed import gather
from streamload.loader.epoch import Epoch
from streamload.loader.position import Position
from streamload.loader.rank_process import RankProcess
from streamload.loader.schedule import RunSchedule
from streamload.order.events import BATCH_SIZE, WEIGHTS, joined, of_kind
from streamload.worker import EpochChange


class RunEvents:
    """The events of one loader; its workers read them before each step.

    Args:
        schedule: of its epochs; it has the weights and sizes that were set.
        process: has the control block, which the workers read.
        expected: returns how many batches are left of an epoch at a position, by the known sizes of shards.
        check_size: raises an OptionError if there is no room for a batch of so many rows.

    Attributes:
        listeners: called with weights and sizes that were set, and the reason for the log.
    """

    def __init__(
        self,
        schedule: RunSchedule,
        process: RankProcess,
        expected: Callable[[Position], int | None],
        check_size: Callable[[int], object],
    ):
        self._schedule, self._process = schedule, process
        self._expected, self._check_size = expected, check_size
        self.listeners: list[Callable[[Event, Mapping[str, Any]], None]] = []
        self._sent: list[Event] = []  # in this epoch
        self._current: weakref.ref[Epoch] | None = None

    @property
    def epoch(self) -> Epoch | None:
        """The current epoch; None: there is none, and no worker has begun the next step."""
        epoch = None if self._current is None else self._current()
        return None if epoch is None or epoch.done else epoch

    def start_epoch(self, epoch: Epoch) -> None:
        """The workers were started on an epoch: events that are set from now on are sent to them."""
        self._current, self._sent = weakref.ref(epoch), []

    def end_epoch(self) -> None:
        """The current epoch ended, or was given up."""
        self._current = None

    def set_weights(self, weights: Mapping[str, float]) -> int:
        """Set weights by the sources' names, and return the step of the epoch from which they hold."""
        self._refuse_recorded("set_weights()")
        schedule, epoch, current = self._schedule, self.epoch, self._now()
        steps = schedule.steps_from(current)
        position = steps.begin(0 if epoch is None else epoch.ahead)
        by_rank = gather((dict(weights), schedule.next_block(position)), schedule.topology.world_size)
        position = max(position for _, position in by_rank)
        event = schedule.weights(by_rank[0][0], position)  # an error is raised on all ranks
        step = schedule.step_of(current, position)
        schedule.tracker.add(event)
        self._send()
        self._event_set(event, {"reason": "set_weights"})
        return step

    def add_weights(self, weights: Event, steps: int) -> Event:
        """Set weights that all ranks agree on, from so many steps on, which no worker has begun."""
        schedule = self._schedule
        position = schedule.next_block(schedule.steps_from(self._now()).begin(steps))
        event = weights._replace(position=position)
        schedule.tracker.add(event)
        self._send()
        return event

    def set_batch_size(self, rows: int, reason: Mapping[str, Any]) -> int:
        """Set the size of a rank's batch, and return the step of the epoch from which it holds.

        Args:
            rows: of a rank in a step.
            reason: for the log of decisions; JSON-able.
        """
        self._refuse_recorded("set_batch_size()")
        schedule, epoch, current = self._schedule, self.epoch, self._now()
        by_rank = gather((rows, self._first_free()), schedule.topology.world_size)
        rows = by_rank[0][0]
        split, position = schedule.split(), max(position for _, position in by_rank)
        event = self.refuse_batch_size(rows, position)  # an error is raised on all ranks
        batch, since = split.batch, current.position
        for size in current.batch_sizes[-1:]:
            batch, since = size.value["batch"], max(current.position, size.position)
        if event.value["batch"] == batch:
            return schedule.step_of(current, since)
        schedule.tracker.add(event, split.batch, schedule.step_of(current))
        current = schedule.tracker.now()
        if epoch is not None:
            epoch.plan(schedule.steps(current))
            epoch.expect(self._expected(current))
        self._send()
        self._event_set(event, reason)
        return schedule.step_of(current, position)

    def refuse_batch_size(self, rows: int, position: int = 0) -> Event:
        """The event that sets a batch size of a rank.

        Raises:
            OptionError: steps can't have this size.
        """
        event = self._schedule.resized(rows, position)
        self._check_size(rows)
        return event

    def send(self, extension: str, value: Any) -> Event:
        """Send an event of an extension to the workers of the current epoch."""
        by_rank = gather(self._first_free(), self._schedule.topology.world_size)
        event = Event(max(by_rank), extension, value)
        self._send(event)
        return event

    def _refuse_recorded(self, call: str) -> None:
        """Refuse other weights and sizes than those of a recorded run."""
        recorded = self._schedule.tracker.recorded
        if recorded is not None:
            raise OptionError(f"mixing={recorded!r} has all decisions: leave out {call}")

    def _event_set(self, event: Event, reason: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            listener(event, reason)

    def _now(self) -> Position:
        self._schedule.settle()
        return self._schedule.tracker.now()

    def _first_free(self) -> int:
        """The first position at which a step may have another size: at the epoch's end at the latest.

        A worker that has made its last batch of an epoch makes no more, so the epoch isn't longer for it.
        """
        schedule, epoch, current, number = self._schedule, self.epoch, self._now(), 0
        if epoch is not None:
            left, number = schedule.steps(current), epoch.ahead
            number = number if left is None else min(number, left)
        return schedule.next_block(schedule.steps_from(current).begin(number))

    def _send(self, sent: Event | None = None) -> None:
        """Write all events of the current epoch for its workers, also one of an extension.

        A worker that makes its next batch late reads only the latest message, and needs what was in effect
        for the batches of the others since its last one.
        """
        epoch = self.epoch
        if epoch is None:
            return
        events = joined(self._sent, self._schedule.tracker.now().events)
        if sent is not None:
            events.append(sent)
        most = 2 + 2 * epoch.ahead
        for kind in (WEIGHTS, BATCH_SIZE):
            for event in of_kind(events, kind)[:-most]:
                events.remove(event)
        self._sent = events
        self._process.control.changes.write(EpochChange(events, epoch.steps).to_json())
