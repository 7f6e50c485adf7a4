"""Position of a rank in its run: the epoch of the training loop, and the place in the sample sequence."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from streamload.errors import StateMismatch
from streamload.extension import RecordedEvents
from streamload.order.events import (
    BATCH_SIZE,
    WEIGHTS,
    Event,
    in_effect,
    joined,
    new_weights,
    of_kind,
    shares_at,
)
from streamload.order.steps import StepStart
from streamload.worker.states import GroupState, OpenShards

logger = logging.getLogger("streamload")

LeftOutOfGroups = Mapping[int, Mapping[str, int]]
"""Numbers of samples by group, and by the name of what left them out."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position after the last batch that was yielded.

    Attributes:
        epoch: the epoch of the training loop.
        sequence: the epoch in which the sequence started; later epochs may continue it.
        start: the position at which the epoch started.
        position: global samples of the sequence before the next step.
        groups: the state of each group that this rank knows; none at the start of a sequence.
        events: the events in effect at the position, and later ones; the first has the sources' shares.
        blocks_from: the position at which blocks of steps began, with the current bucketing.
        base_batch: samples of a step over all ranks by the options that the run began with; None unless
            events have set another size.
        steps: the epoch's steps before the position, counted if events have set a size.
        left_out: the samples left out of each group before the sequence, by what left them out.
    """

    epoch: int
    sequence: int
    start: int
    position: int
    groups: Mapping[int, GroupState]
    events: tuple[Event, ...]
    blocks_from: int = 0
    base_batch: int | None = None
    steps: int = 0
    left_out: LeftOutOfGroups = field(default_factory=dict)

    @property
    def all_left_out(self) -> LeftOutOfGroups:
        """The samples left out of each group before the position, by what left them out."""
        return _added(self.left_out, {number: group.left_out for number, group in self.groups.items()})

    @property
    def references(self) -> int:
        """The samples of the sequence that its groups have given so far, or that a block's begin had."""
        return sum(source.cursor.position for group in self.groups.values() for source in group.sources)

    @property
    def step_start(self) -> StepStart:
        """The start of the steps from here on."""
        offset = self.position - self.start
        return StepStart(self.sequence, self.position, self.blocks_from, self.epoch, offset)

    @property
    def shares(self) -> tuple[int, ...]:
        """The sources' shares of the next step, in UNITs."""
        return shares_at(self.events, self.position)

    @property
    def weights(self) -> tuple[float, ...]:
        """The sources' weights, as set last."""
        weights: tuple[float, ...] = of_kind(self.events, WEIGHTS)[-1].value["weights"]
        return weights

    @property
    def batch_sizes(self) -> list[Event]:
        """The events that set another size of steps than the options do."""
        return of_kind(self.events, BATCH_SIZE)

    def after(self, position: int, groups: Mapping[int, GroupState]) -> Position:
        """The position after a step that ends at `position`."""
        events, steps = self.events, self.steps + (self.base_batch is not None)
        if len(events) > 1:
            events = tuple(in_effect(events, position))
        return replace(self, position=position, groups=groups, events=events, steps=steps)

    def next_epoch(self) -> Position:
        """The start of an epoch that continues where this one stopped."""
        return replace(self, epoch=self.epoch + 1, start=self.position, steps=0)

    def in_moved_shards(self) -> Position:
        """The same position in shards that were moved: identified by their indexes, not by their versions.

        Raises:
            StateMismatch: the state lacks the index digest of a shard, which was damaged when it was saved.
        """
        groups = {}
        for number, group in self.groups.items():
            sources = []
            for source in group.sources:
                if any(checkpoint.samples and not checkpoint.entries for checkpoint in source.begun.values()):
                    raise StateMismatch(
                        "moved=: the index of a shard was damaged when the state was saved, so that it lacks "
                        "the digest by which a moved shard is identified"
                    )
                begun = {shard: checkpoint._replace(version=0) for shard, checkpoint in source.begun.items()}
                sources.append(source._replace(begun=OpenShards.of(begun)))
            groups[number] = group._replace(sources=tuple(sources))
        return replace(self, groups=groups)

    def new_sequence(self) -> Position:
        """The start of the same epoch in a sequence of its own."""
        events = [
            event._replace(position=max(0, event.position - self.position))
            for event in self.events
            if event.kind != BATCH_SIZE
        ]
        events += [size._replace(position=0) for size in self.batch_sizes[-1:]]
        return Position(
            self.epoch,
            self.epoch,
            0,
            0,
            {},
            tuple(events),
            base_batch=self.base_batch,
            steps=self.steps,
            left_out=self.all_left_out,
        )


def _added(before: LeftOutOfGroups, later: LeftOutOfGroups) -> LeftOutOfGroups:
    groups = before.keys() | later.keys()
    sums = {group: Counter(before.get(group, {})) + Counter(later.get(group, {})) for group in groups}
    return {group: tally for group, tally in sums.items() if tally}


class EpochTracker:
    """Tracks the epochs of a training loop: which one is next, and the position in the current one.

    Args:
        epochs_continue: whether an epoch starts where the last one stopped.

    Attributes:
        epoch: the next epoch.
        latest: the events that were set last, by kind; no WEIGHTS before the order is settled.
        recorded: the events of a recorded run, in place of those that are set; None: no run is replayed.
    """

    def __init__(self, epochs_continue: bool):
        self.epoch = 0
        self.latest: dict[str, Event] = {}
        self.recorded: RecordedEvents | None = None
        self._base_batch: int | None = None  # of a run whose steps were given another size
        self._epochs_continue = epochs_continue
        self._current: Position | None = None
        self._is_fresh = False  # no batch was yielded since the position was loaded, or its epoch started
        self._is_finished = False
        self._is_loaded = False  # the position was loaded, and no epoch was started from it
        self._is_changed = False  # an event was set
        self._ended: LeftOutOfGroups = {}  # what was left out of a sequence that has ended

    @property
    def is_unused(self) -> bool:
        """True if no epoch was started, no position loaded, and no event set."""
        return self._current is None and not self._is_changed

    @property
    def is_over(self) -> bool:
        """True if the next epoch is the one that the loaded position has finished: nothing is left of it.

        The position after the last batch of an epoch is the first one of the next epoch.
        """
        loaded = self._current if self._is_loaded else None
        return loaded is not None and self.epoch == loaded.epoch - 1 and loaded.position == loaded.start

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch; warn if that goes back before a loaded position."""
        self.epoch = epoch
        loaded = self._current if self._is_loaded else None
        if loaded is not None and epoch < loaded.epoch and not self.is_over:
            logger.warning(
                "set_epoch(%d) goes back before the loaded state, in epoch %d: epoch %d starts again "
                "from its first batch. To continue from the state, start with set_epoch(%d)",
                epoch,
                loaded.epoch,
                epoch,
                loaded.epoch,
            )

    def pass_over(self) -> None:
        """The next epoch was iterated, which is over: the loaded position's epoch comes after it."""
        logger.info("nothing is left of epoch %d in the loaded state: it yields no batch", self.epoch)
        self.epoch += 1

    def start(self) -> Position:
        """Start the next epoch. It counts as started with its first batch, or when it ends without one."""
        self._current = self.next()
        self._is_fresh, self._is_finished, self._is_loaded = True, False, False
        self._ended = {}
        self.epoch = self._current.epoch
        return self._current

    def next(self) -> Position:
        """The start of the next epoch: that of the current one if it yielded no batch, after it, or anew."""
        position = self._next()
        if self.recorded is None:
            return position
        events = self.recorded.events(position.sequence, position.position)
        sizes = of_kind(events, BATCH_SIZE)
        if not sizes:
            return replace(position, events=tuple(events), base_batch=None, steps=0)
        self.latest[BATCH_SIZE], base, steps = sizes[-1], self.recorded.base_batch, position.steps
        if position.base_batch is None:  # all steps of the epoch so far are by the options
            steps = (position.position - position.start) // base
        return replace(position, events=tuple(events), base_batch=base, steps=steps)

    def saved(self) -> Position:
        """The position for a state: `now`, without the later events of a recorded run."""
        position = self.now()
        if self.recorded is None:
            return position
        events = of_kind(self.recorded.events(position.sequence, position.position), WEIGHTS)[:1]
        sizes = [size for size in position.batch_sizes if size.position <= position.position]
        base = position.base_batch if sizes else None
        steps = position.steps if sizes else 0
        return replace(position, events=(*events, *sizes), base_batch=base, steps=steps)

    def _next(self) -> Position:
        last = self._current
        if last is not None and self._is_fresh and (self.epoch == last.epoch or self.is_over):
            return last
        if last is not None and self._epochs_continue and self.epoch == last.epoch + 1:
            return last.next_epoch()
        weights, size = self.latest[WEIGHTS].value, self.latest.get(BATCH_SIZE)
        events, base = [new_weights(0, weights["shares"], weights["weights"])], None
        if size is not None and size.value["batch"] != self._base_batch:
            base = self._base_batch
            events.append(size._replace(position=0))
        left_out: LeftOutOfGroups = {}
        if last is not None:
            left_out = _added(last.left_out, self._ended) if self._ended else last.all_left_out
        return Position(self.epoch, self.epoch, 0, 0, {}, tuple(events), base_batch=base, left_out=left_out)

    def now(self) -> Position:
        """The position for a state: after the last batch, or the start of the next epoch."""
        current = self._current
        if current is None or self._is_finished or (self._is_fresh and self.epoch != current.epoch):
            return self.next()
        return current

    def advance(self, position: int, groups: Mapping[int, GroupState]) -> None:
        """A batch was yielded; its step ends at `position`."""
        self._count_epoch()
        assert self._current is not None
        self._current = self._current.after(position, groups)

    def finish(self, left_out: LeftOutOfGroups) -> None:
        """The last batch of the epoch was yielded.

        Args:
            left_out: the samples left out of each group of a sequence that has ended; none: it goes on.
        """
        self._count_epoch()
        self._is_finished, self._ended = True, left_out

    def load(self, position: Position) -> None:
        """Resume at a position."""
        self._current, self._is_fresh, self._is_finished = position, True, False
        self._is_loaded, self._ended = True, {}
        self.epoch = position.epoch
        self.latest = {event.kind: event for event in position.events}
        self._base_batch = position.base_batch

    def add(self, event: Event, base_batch: int | None = None, steps: int = 0) -> None:
        """Set weights or the size of steps, from a position on.

        Args:
            event: has these.
            base_batch: with another size, the one by the options.
            steps: with another size, those of the current epoch so far.
        """
        self.latest[event.kind], self._is_changed, current = event, True, self._current
        if base_batch is not None:
            self._base_batch = base_batch
        if current is None:
            return
        self._current = replace(current, events=tuple(joined(current.events, [event])))
        if base_batch is not None:
            self._current = replace(self._current, base_batch=base_batch, steps=steps)

    def _count_epoch(self) -> None:
        if self._is_fresh:
            self._is_fresh = False
            if self._current is not None and self.epoch == self._current.epoch:
                self.epoch += 1
