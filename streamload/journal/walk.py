"""The order of a run again, from a mark of its journal on: no shard is looked at.

The order's arithmetic runs with the recorded numbers of samples in place of indexes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamload.journal.history import EndedShard, OfPass, Segment
from streamload.order.events import Event
from streamload.order.group import Cursor, GroupOrder
from streamload.order.parts import PortionsInParts
from streamload.order.plan import OrderOptions, Pieces, pass_order, shard_axis
from streamload.order.plan import pieces as pieces_of
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
        marked: its step, and the one at which its sequence began.
        before: its position.
        steps: from there on.
        events: of the run from there on.
        orders: of the sources, and the number of shards of each.
        draws: of the run.
    """

    def __init__(
        self,
        segment: Segment,
        marked: tuple[int, int],
        before: Position,
        steps: Steps,
        events: Sequence[Event],
        orders: Sequence[tuple[OrderOptions, int]],
        draws: SourceDraws,
    ):
        self._segment, (self._at, self.origin), self._before = segment, marked, before
        self._steps, self._events, self._orders, self._draws = steps, events, orders, draws
        self.begin = planned_from(steps, before.position)
        self._axes: dict[int, NDArray[np.int64]] = {}

    def to(self, group: int, target: int) -> GroupState:
        """The state of a group at a position."""
        state, portion = self._before.groups.get(group), self._portions(group).at(target)
        sources = []
        for source, position in enumerate(portion.first):
            start = None if state is None else state.sources[source]
            sources.append(self._source(group, source, start, position))
        return GroupState(portion.owed_before, tuple(sources), () if state is None else state.past)

    def _portions(self, group: int) -> Portions:
        state, zeros = self._before.groups.get(group), (0,) * len(self._orders)
        positions = zeros if state is None else tuple(source.cursor.position for source in state.sources)
        owed = zeros if state is None else state.owed
        kind = Portions if self._draws.sources == "mixed" else PortionsInParts
        return kind(self._steps, group, self.begin, self._events, positions, owed, self._draws)

    def _source(self, group: int, source: int, start: SourceState | None, position: int) -> SourceState:
        (options, count), sequence = self._orders[source], self._before.sequence
        group_pieces, begin = self.pieces(source, group), Cursor.at(0) if start is None else start.cursor
        if start is not None:
            for state in self._states(group, self.origin, self.origin):  # what these had isn't told again
                begin = _with_done(begin, state.sources[source].cursor)
        skipped = begin.skip + position - begin.position
        order, arrivals = self._order(group, source, begin._replace(position=position, skip=skipped))
        latest = None  # of the passes that begin up to the position
        while latest is None or order.released < position:
            order.advance(arrivals)
            if latest is None or order.pass_start <= position:
                latest = order.pass_, order.pass_start, order.everything
        cursor = order.mark_at(position)
        if cursor.pass_ < latest[0] and latest[1] <= position:  # shards of one pass are in a state
            cursor = Cursor(position, latest[0], position - latest[1], everything=latest[2])
        else:
            cursor = _with_done(cursor, begin)
        shards = np.arange(count) if cursor.everything else group_pieces.shards
        in_pass = pass_order(options, shards, group, sequence, cursor.pass_)
        front = order.front[1] if order.pass_ == cursor.pass_ else in_pass.size
        near = in_pass[_first_open(cursor) : front + options.lanes].tolist()
        records = {
            **({} if start is None or start.cursor.pass_ != cursor.pass_ else start.begun),
            **self._marked(group, source, cursor.pass_),
            **{
                shard: shard_end.record
                for shard, shard_end in self._ended(group, source, cursor.pass_).items()
            },
        }
        return SourceState(
            cursor, OpenShards.of({shard: records[shard] for shard in near if shard in records})
        )

    def positions(
        self, group: int, source: int, shard: int, pass_: int, stop: int
    ) -> tuple[list[int], list[int]]:
        """The positions in the sequence of a group, in a source, of all samples of a shard in a pass.

        From the mark on, and at least as far as steps before `stop` go.

        Returns:
            The positions, and of each which of the group's samples in the shard it has.
        """
        state = self._before.groups.get(group)
        order, _ = self._order(group, source, None if state is None else state.sources[source].cursor)
        arrivals = _Recorded(lambda: self._ended(group, source, order.pass_), np.arange(_MOST_SAMPLES))
        positions, ordinals = list[int](), list[int]()
        before = order.position
        place = self.place(group, source, shard, pass_)
        most = -(-self._steps.begin(stop - self._at) // self._orders[source][0].groups)
        while order.pass_ <= pass_ and before < most:
            references = order.advance(arrivals)
            if not references.shards.size:
                break
            hits = np.flatnonzero((references.shards == shard) & (references.passes == pass_))
            positions += (before + hits).tolist()
            ordinals += references.samples[hits].tolist()
            before = order.position
            if order.front > (pass_, place or 0) and shard not in order.open_shards():
                break  # lanes have left it, and the window has
        return positions, ordinals

    def place(self, group: int, source: int, shard: int, pass_: int) -> int | None:
        """The place of a shard in a pass of a group; None: it isn't the group's."""
        shards = self.pieces(source, group).shards
        if shard not in shards:
            return None
        order = pass_order(self._orders[source][0], shards, group, self._before.sequence, pass_)
        return int(np.flatnonzero(order == shard)[0])

    def steps_of(
        self, group: int, source: int, positions: Sequence[int], stop: int
    ) -> list[tuple[int, int, int]]:
        """The steps before `stop` that have positions of a group's sequence in a source, ascending.

        Positions that no such step has are left out: the last ones, as the order gives some ahead.

        Returns:
            The first and last step that each may be in: those of a block, where it was planned; and the
            global position where the first begins.
        """
        portions, steps, begin = self._portions(group), list[tuple[int, int, int]](), self.begin
        portion = portions.at(begin)
        for position in positions:
            start = max(begin, self._before.position)
            while portion.stop[source] <= position and self._at + self._steps.number(start) < stop:
                start = begin = self._end(begin)
                portion = portions.at(begin)
            first, last = self._steps.number(start), self._steps.number(self._end(begin)) - 1
            if self._at + first >= stop:
                break
            steps.append((self._at + first, min(self._at + last, stop - 1), start))
        return steps

    def _end(self, begin: int) -> int:
        """The position at which the step, or the block, after one begins."""
        block = self._steps.block(begin)
        return begin + self._steps.at(begin).batch if block is None else block.end

    def _order(self, group: int, source: int, cursor: Cursor | None) -> tuple[GroupOrder, _Recorded]:
        options, count = self._orders[source]
        order = GroupOrder(
            options,
            count,
            group,
            self._before.sequence,
            None if cursor is None else cursor._replace(left_out=None),
            pieces=Pieces(self.pieces(source, group).shards, {}),  # recorded are the group's own samples
        )
        return order, _Recorded(lambda: self._ended(group, source, order.pass_))

    def _ended(self, group: int, source: int, pass_: int) -> Mapping[int, EndedShard]:
        return self._segment.ended.get(OfPass(self.origin, group, source, pass_), {})

    def pieces(self, source: int, group: int) -> Pieces:
        """The shards of a group in a source."""
        options, count = self._orders[source]
        if options.groups > 1 and source not in self._axes:
            self._axes[source] = shard_axis(options, count)
        return pieces_of(options, count, group, self._axes.get(source))

    def _marked(self, group: int, source: int, pass_: int) -> dict[int, CheckpointShard]:
        """Shards as the next mark has them: those that were open to the end of the journal."""
        for state in self._states(group, self._at + 1, self._segment.epoch_after(self._at)):
            marked = state.sources[source]
            return dict(marked.begun) if marked.cursor.pass_ == pass_ else {}
        return {}

    def _states(self, group: int, first: int, last: int) -> Iterator[GroupState]:
        """The states of a group in the marks from one step to another."""
        for records in self._segment.ranks.values():
            for number, mark in records.marks.items():
                if first <= number <= last and mark.origin == self.origin and str(group) in mark.state["at"]:
                    yield GroupState.from_json(mark.state["at"][str(group)])


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
_MOST_SAMPLES = 1 << 22
"""More than the shards have whose end isn't recorded; numbers of so many take 32 MB."""


class _Recorded:
    """The numbers of samples as a journal has them: arrivals, of which only the numbers count.

    All ends of shards that the run had come to by a recorded step are recorded. To the others it hadn't come,
    so that they don't matter for the steps up to there.

    Args:
        ended: returns the shards of the current pass by their index.
        others: the samples of a shard whose end isn't recorded.
    """

    def __init__(self, ended: Callable[[], Mapping[int, EndedShard]], others: NDArray[np.int64] = _ENDLESS):
        self._ended, self._others = ended, others

    def arrived(self, shard: int) -> tuple[NDArray[np.int64], bool]:
        """See order.lanes.Arrivals."""
        shard_end = self._ended().get(shard)
        return (self._others, False) if shard_end is None else (np.arange(shard_end.samples), True)
