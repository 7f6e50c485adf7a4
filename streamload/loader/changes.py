"""Changes in the middle of an epoch: sources' weights, the size of steps, extensions' events (steps B and E).

They are in effect from the first step that no worker of any rank can have begun, and are part of the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from streamload.extension import Event
from streamload.ipc import ControlBlock
from streamload.loader.distributed import gather
from streamload.loader.epoch import Epoch
from streamload.loader.position import Weights
from streamload.loader.schedule import Schedule
from streamload.order.mixing import Change
from streamload.order.steps import Resize
from streamload.worker import Changed, InFlight

_Changed = TypeVar("_Changed", Change, Resize)


class Changes:
    """Changes weights and sizes of a loader, and sends events; the workers read these before each step.

    Args:
        schedule: of its epochs.
        control: which its workers read.
        epoch: the current one; None: there is none, and no worker has begun the next step.
        in_flight: what a step has to fit into; None: it may be of any size.
    """

    def __init__(
        self,
        schedule: Schedule,
        control: ControlBlock,
        epoch: Epoch | None,
        in_flight: InFlight | None = None,
    ):
        self._schedule, self._control, self._epoch = schedule, control, epoch
        self._in_flight = in_flight
        schedule.settle()
        self._now = schedule.tracker.now()

    def set_weights(self, weights: Mapping[str, float]) -> int:
        """See Loader.set_weights."""
        schedule = self._schedule
        steps = schedule.steps_from(self._now)
        position = steps.begin(0 if self._epoch is None else self._epoch.ahead)
        by_rank = gather((dict(weights), schedule.next_block(position)), schedule.topology.world_size)
        agreed = schedule.weights(by_rank[0][0])  # an error is raised on all ranks
        position = max(position for _, position in by_rank)
        step = schedule.step_of(self._now, position)
        schedule.tracker.change(agreed, position)
        self._send()
        return step

    def apply(self, weights: Weights, steps: int) -> None:
        """Set weights that all ranks agree on, from so many steps on, which no worker has begun."""
        schedule = self._schedule
        position = schedule.next_block(schedule.steps_from(self._now).begin(steps))
        schedule.tracker.change(weights, position)
        self._send()

    def set_batch_size(self, rows: int) -> int:
        """See Loader.set_batch_size."""
        schedule, current = self._schedule, self._now
        by_rank = gather((rows, self._first_free()), schedule.topology.world_size)
        rows = by_rank[0][0]
        split, position = schedule.split(), max(position for _, position in by_rank)
        resize = schedule.resized(rows, position, self._in_flight)  # an error is raised on all ranks
        last = None if current.sizes is None else current.sizes.last
        if resize.batch == (split.batch if last is None else last.batch):
            return schedule.step_of(
                current, current.position if last is None else max(current.position, last.position)
            )
        schedule.tracker.resize(split.batch, resize, schedule.step_of(current))
        self._now = schedule.tracker.now()
        if self._epoch is not None:
            self._epoch.plan(schedule.steps(self._now))
        self._send()
        return schedule.step_of(self._now, position)

    def send(self, extension: str, value: Any) -> Event:
        """Send an event of an extension; see extension.Run."""
        schedule = self._schedule
        by_rank = gather(self._first_free(), schedule.topology.world_size)
        event = Event(max(by_rank), value)
        if self._epoch is not None:
            self._send((extension, event))
        return event

    def _first_free(self) -> int:
        """The first position at which a step may have another size: at the epoch's end at the latest.

        A worker that has made its last batch of an epoch makes no more, so the epoch isn't longer for it.
        """
        schedule, number = self._schedule, 0
        if self._epoch is not None:
            left, number = schedule.steps(self._now), self._epoch.ahead
            number = number if left is None else min(number, left)
        return schedule.next_block(schedule.steps_from(self._now).begin(number))

    def _send(self, sent: tuple[str, Event] | None = None) -> None:
        """Tell the workers of the current epoch, also of an event of an extension.

        One that makes its next batch late reads only the latest message, and needs what was in effect for the
        batches of the others since its last one.
        """
        epoch, position = self._epoch, self._schedule.tracker.now()
        if epoch is None:
            return
        before = epoch.changed or Changed([], [], None)
        most = 2 + 2 * epoch.ahead
        changes = _merged(before.changes, position.changes, most)
        resizes = before.resizes
        if position.sizes is not None:
            resizes = _merged(resizes, position.sizes.resizes, most)
        events = before.events
        if sent is not None:
            name, event = sent
            events = {**events, name: [*events.get(name, ()), event]}
        changed = Changed(changes, resizes, epoch.steps, events)
        epoch.changed = changed
        self._control.changes.write(changed.to_json())


def _merged(earlier: Sequence[_Changed], latest: Sequence[_Changed], most: int) -> list[_Changed]:
    """All changes by position: those that are in effect now and later, after earlier ones."""
    merged = [change for change in earlier if change.position < latest[0].position]
    merged.extend(latest)
    return merged[-most:]
