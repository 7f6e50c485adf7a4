"""Where a rank is in its run: the epoch of the training loop, and the position in the sample sequence."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from streamload.errors import StateMismatch
from streamload.order.mixing import Change, in_effect
from streamload.order.steps import Resize
from streamload.steering.replay import Replay, changes_of
from streamload.worker.states import GroupState

logger = logging.getLogger("streamload")


class Sizes(NamedTuple):
    """The sizes of steps, of a run on which set_batch_size was called.

    Attributes:
        base: samples of a step over all ranks by the options that the run began with.
        resizes: other sizes, from a position on.
        step: steps of the epoch before that position.
    """

    base: int
    resizes: tuple[Resize, ...]
    step: int

    @property
    def last(self) -> Resize:
        """The size that was set last."""
        return self.resizes[-1]

    def anew(self, position: int, block: int) -> Sizes:
        """The size that was set last as the only one, from the start of a block on."""
        return self._replace(resizes=(Resize(position, self.last.batch, block),))


@dataclass(frozen=True, slots=True)
class Position:
    """The position after the last batch that was yielded.

    Attributes:
        epoch: of the training loop.
        sequence: the epoch in which the sequence started; later epochs may continue it.
        start: the position at which the epoch started.
        position: global samples of the sequence before the next step.
        groups: the state of each group that this rank knows; none at the start of a sequence.
        changes: of the sources' shares, from the position on.
        weights: of the sources, as set last; the last change is by these.
        blocks_from: the position at which blocks of steps began, by the bucketing of now.
        sizes: of the steps; None: all are as the options say.
    """

    epoch: int
    sequence: int
    start: int
    position: int
    groups: Mapping[int, GroupState]
    changes: tuple[Change, ...]
    weights: tuple[float, ...]
    blocks_from: int = 0
    sizes: Sizes | None = None

    def after(self, position: int, groups: Mapping[int, GroupState]) -> Position:
        """The position after a step that ends at `position`."""
        changes, sizes = self.changes, self.sizes
        if len(changes) > 1 and changes[1].position <= position:
            changes = tuple(in_effect(changes, position))
        if sizes is not None:
            sizes = Sizes(sizes.base, tuple(in_effect(sizes.resizes, position)), sizes.step + 1)
        return replace(self, position=position, groups=groups, changes=changes, sizes=sizes)

    def next_epoch(self) -> Position:
        """The start of an epoch that continues where this one stopped."""
        sizes = None if self.sizes is None else self.sizes._replace(step=0)
        return replace(self, epoch=self.epoch + 1, start=self.position, sizes=sizes)

    def in_moved_shards(self) -> Position:
        """The same position in shards that were moved: identified by their indexes, not by their versions.

        Raises:
            StateMismatch: the state lacks the index digest of a shard.
        """
        groups = {}
        for number, group in self.groups.items():
            sources = []
            for source in group.sources:
                if any(checkpoint.samples and not checkpoint.entries for checkpoint in source.begun.values()):
                    raise StateMismatch(
                        "moved=: the state was saved by an earlier version of streamload, without the "
                        "digests that identify moved shards"
                    )
                begun = {shard: checkpoint._replace(version=0) for shard, checkpoint in source.begun.items()}
                sources.append(source._replace(begun=begun))
            groups[number] = group._replace(sources=tuple(sources))
        return replace(self, groups=groups)

    def new_sequence(self) -> Position:
        """The start of the same epoch in a sequence of its own."""
        changes = tuple(
            change._replace(position=max(0, change.position - self.position)) for change in self.changes
        )
        sizes = None if self.sizes is None else self.sizes.anew(0, self.sizes.last.block)
        return Position(self.epoch, self.epoch, 0, 0, {}, changes, self.weights, sizes=sizes)


class Weights(NamedTuple):
    """The weights of the sources as given, and the shares that follow from them."""

    given: tuple[float, ...]
    shares: tuple[int, ...]


class EpochTracker:
    """Tracks the epochs of a training loop: which one is next, and the position in the current one.

    Args:
        epochs_continue: whether an epoch starts where the last one stopped.

    Attributes:
        epoch: the next epoch.
        weights: of the sources, as set last; None before the first epoch.
        sizes: of steps, the last one as set last; None: as the options say.
        replayed: the log that has all weights and sizes, instead of `weights` and `sizes`; None: none is
            replayed.
    """

    def __init__(self, epochs_continue: bool):
        self.epoch = 0
        self.weights: Weights | None = None
        self.sizes: Sizes | None = None
        self.replayed: Replay | None = None
        self._epochs_continue = epochs_continue
        self._current: Position | None = None
        self._is_fresh = False  # no batch was yielded since the position was loaded, or its epoch started
        self._is_finished = False
        self._is_loaded = False  # the position was loaded, and no epoch was started from it
        self._is_changed = False  # weights or sizes were set

    @property
    def is_unused(self) -> bool:
        """True if no epoch was started, no position loaded, and neither weights nor sizes were set."""
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
        self.epoch = self._current.epoch
        return self._current

    def next(self) -> Position:
        """The start of the next epoch: that of the current one if it yielded no batch, after it, or anew."""
        position = self._next()
        if self.replayed is None:
            return position
        recorded = self.replayed.weights(position.sequence, position.position)
        resizes = tuple(self.replayed.sizes(position.sequence, position.position))
        sizes = None
        if resizes:
            base, step = self.replayed.base_batch, 0 if position.sizes is None else position.sizes.step
            if position.sizes is None:  # all steps of the epoch so far are by the options
                step = (position.position - position.start) // base
            sizes = self.sizes = Sizes(base, resizes, step)
        return replace(position, changes=changes_of(recorded), weights=recorded[0].weights, sizes=sizes)

    def saved(self) -> Position:
        """The position for a state: that of `now`, without what a replayed log has for later."""
        position = self.now()
        if self.replayed is None:
            return position
        in_effect_now = self.replayed.weights(position.sequence, position.position)[:1]
        sizes = position.sizes
        if sizes is not None:
            reached = tuple(resize for resize in sizes.resizes if resize.position <= position.position)
            sizes = sizes._replace(resizes=reached) if reached else None
        return replace(
            position, changes=changes_of(in_effect_now), weights=in_effect_now[0].weights, sizes=sizes
        )

    @property
    def shares(self) -> tuple[int, ...]:
        """Of the sources in the next step."""
        return self.now().changes[0].shares

    def _next(self) -> Position:
        last = self._current
        if last is not None and self._is_fresh and (self.epoch == last.epoch or self.is_over):
            return last
        if last is not None and self._epochs_continue and self.epoch == last.epoch + 1:
            return last.next_epoch()
        assert self.weights is not None
        (weights, shares), sizes = self.weights, self.sizes
        if sizes is not None:
            is_base = sizes.last.batch == sizes.base
            sizes = None if is_base else sizes.anew(0, sizes.last.block)._replace(step=0)
        return Position(self.epoch, self.epoch, 0, 0, {}, (Change(0, shares),), weights, sizes=sizes)

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

    def finish(self) -> None:
        """The last batch of the epoch was yielded."""
        self._count_epoch()
        self._is_finished = True

    def load(self, position: Position) -> None:
        """Resume at a position."""
        self._current, self._is_fresh, self._is_finished = position, True, False
        self._is_loaded = True
        self.epoch, self.weights = position.epoch, Weights(position.weights, position.changes[-1].shares)
        self.sizes = position.sizes

    def change(self, weights: Weights, position: int) -> None:
        """Set weights from a position on."""
        self.weights, self._is_changed = weights, True
        if self._current is not None:
            earlier = [change for change in self._current.changes if change.position < position]
            changes = (*earlier, Change(position, weights.shares))
            self._current = replace(self._current, changes=changes, weights=weights.given)

    def resize(self, base: int, resize: Resize, step: int) -> None:
        """Set the size of steps from a position on.

        Args:
            base: the size by the options.
            resize: the new size.
            step: steps of the current epoch so far.
        """
        sizes = None if self._current is None else self._current.sizes
        earlier = () if sizes is None else sizes.resizes
        resizes = (*(size for size in earlier if size.position < resize.position), resize)
        self.sizes, self._is_changed = Sizes(base, resizes, step), True
        if self._current is not None:
            self._current = replace(self._current, sizes=self.sizes)

    def _count_epoch(self) -> None:
        if self._is_fresh:
            self._is_fresh = False
            if self._current is not None and self.epoch == self._current.epoch:
                self.epoch += 1
