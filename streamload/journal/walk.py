"""The order of a run again, from a mark of its journal on: no shard is looked at.

The order's arithmetic runs with the recorded numbers of samples in place of indexes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamload.journal.history import EndedShard, Segment
from streamload.order.events import Event
from streamload.order.group import Cursor, GroupOrder
from streamload.order.parts import PortionsInParts
from streamload.order.plan import OrderOptions, Pieces, pass_order, pieces, shard_axis
from streamload.order.steps import Portions, SourceDraws, Steps
from streamload.worker.states import CheckpointShard, GroupState, OpenShards, SourceState

if TYPE_CHECKING:
    from streamload.extension import Position


def planned_from(steps: Steps, position: int) -> int:
    """The position whose groups' states a state has: where the block of a planned step begins."""
    block = steps.block(position)
    return block.begin if block is not None and steps.is_planned(position) else position


class Walk:
    """The order of a run from a mark on, by the recorded numbers of samples.

    Args:
        segment: that the mark is of.
        at: its step.
        before: its position.
        steps: from there on.
        events: of the run from there on.
        orders: of the sources, and the number of shards of each.
        draws: of the run.
    """

    def __init__(
        self,
        segment: Segment,
        at: int,
        before: Position,
        steps: Steps,
        events: Sequence[Event],
        orders: Sequence[tuple[OrderOptions, int]],
        draws: SourceDraws,
    ):
        self._segment, self._at, self._before = segment, at, before
        self._steps, self._events, self._orders, self._draws = steps, events, orders, draws
        self.begin = planned_from(steps, before.position)
        self._ended = segment.ended(at)
        self._first = segment.sequence_of(at)
        self._axes: dict[int, NDArray[np.int64]] = {}

    def to(self, group: int, target: int) -> GroupState:
        """The state of a group at a position."""
        state, zeros = self._before.groups.get(group), (0,) * len(self._orders)
        positions = zeros if state is None else tuple(source.cursor.position for source in state.sources)
        owed = zeros if state is None else state.owed
        kind = Portions if self._draws.sources == "mixed" else PortionsInParts
        portions = kind(self._steps, group, self.begin, self._events, positions, owed, self._draws)
        portion = portions.at(target)
        sources = []
        for source, position in enumerate(portion.first):
            start = None if state is None else state.sources[source]
            sources.append(self._source(group, source, start, position))
        return GroupState(portion.owed_before, tuple(sources), () if state is None else state.past)

    def _source(self, group: int, source: int, start: SourceState | None, position: int) -> SourceState:
        (options, count), sequence = self._orders[source], self._before.sequence
        own = self._pieces(options, count, source, group)
        ended = self._ended
        begin = None
        if start is not None:
            begin = start.cursor._replace(left_out=None)
            for state in self._states(group, self._first, self._first):  # what these had isn't told again
                begin = _with_done(begin, state.sources[source].cursor)
        order = GroupOrder(
            options,
            count,
            group,
            sequence,
            begin,
            pieces=Pieces(own.shards, {}),  # the recorded samples are the group's own
        )
        arrivals = _Recorded(lambda: ended.get((group, source, order.pass_), {}))
        in_pass_of, is_begun = None, False
        while order.position < position or not is_begun:
            order.advance(arrivals)
            is_begun = True
            if order.pass_start <= position:
                in_pass_of = order.pass_, order.pass_start, order.everything
        cursor = order.mark_at(position)
        if in_pass_of is not None and cursor.pass_ < in_pass_of[0]:  # shards of one pass are in a state
            pass_, start_of, everything = in_pass_of
            cursor = Cursor(position, pass_, position - start_of, everything=everything)
        elif begin is not None:
            cursor = _with_done(cursor, begin)
        shards = np.arange(count) if cursor.everything else own.shards
        in_pass = pass_order(options, shards, group, sequence, cursor.pass_)
        front = order.front[1] if order.pass_ == cursor.pass_ else in_pass.size
        near = in_pass[_first_open(cursor) : front + options.lanes].tolist()
        records = {
            **({} if start is None or start.cursor.pass_ != cursor.pass_ else start.begun),
            **self._marked(group, source, cursor.pass_),
            **{
                shard: shard_end.record
                for shard, shard_end in ended.get((group, source, cursor.pass_), {}).items()
            },
        }
        return SourceState(
            cursor, OpenShards.of({shard: records[shard] for shard in near if shard in records})
        )

    def _pieces(self, options: OrderOptions, count: int, source: int, group: int) -> Pieces:
        if options.groups > 1 and source not in self._axes:
            self._axes[source] = shard_axis(options, count)
        return pieces(options, count, group, self._axes.get(source))

    def _marked(self, group: int, source: int, pass_: int) -> dict[int, CheckpointShard]:
        """Shards as the next mark has them: those that were open to the end of the journal."""
        for state in self._states(group, self._at + 1, self._segment.epoch_after(self._at)):
            marked = state.sources[source]
            return dict(marked.begun) if marked.cursor.pass_ == pass_ else {}
        return {}

    def _states(self, group: int, first: int, last: int) -> Iterator[GroupState]:
        """The states of a group in the marks from one step to another."""
        for records in self._segment.ranks.values():
            for number, state in records.marks.items():
                if first <= number <= last and str(group) in state["at"]:
                    yield GroupState.from_json(state["at"][str(group)])


def _with_done(cursor: Cursor, earlier: Cursor) -> Cursor:
    """A cursor that knows of the shards that an earlier one had done: they give nothing from there on."""
    if cursor.pass_ != earlier.pass_:
        return cursor
    return cursor._replace(done=tuple(sorted({**dict(earlier.done), **dict(cursor.done)}.items())))


def _first_open(cursor: Cursor) -> int:
    """The first place in its pass that a cursor's lanes read."""
    if cursor.lanes is None:
        return 0
    return min((place for place, _, _ in cursor.lanes.lanes if place >= 0), default=cursor.lanes.next)


_ENDLESS = np.broadcast_to(np.int64(0), 1 << 31)


class _Recorded:
    """The numbers of samples as a journal has them: arrivals, of which only the numbers count.

    All ends of shards that the run had come to by a recorded step are recorded. To the others it hadn't come,
    so that they don't matter for the steps up to there.

    Args:
        ended: returns the shards of the current pass by their index.
    """

    def __init__(self, ended: Callable[[], Mapping[int, EndedShard]]):
        self._ended = ended

    def arrived(self, shard: int) -> tuple[NDArray[np.int64], bool]:
        """See order.lanes.Arrivals."""
        shard_end = self._ended().get(shard)
        return (_ENDLESS, False) if shard_end is None else (np.arange(shard_end.samples), True)
