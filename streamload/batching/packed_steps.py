"""Steps of cells that are packed by budgets: how many samples a block has follows from what they cost (E)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from streamload.batches.in_progress import Bounds
from streamload.batching.packing import PackedSamples, enough, interleaved, pack
from streamload.batching.steps import Rows, by_shard, passes_of, references_of, state_between
from streamload.errors import NoValidSamples
from streamload.extension import CellSize
from streamload.order.events import UNIT, WEIGHTS, Event, of_kind, shares_at
from streamload.order.hashing import BUCKETS, key
from streamload.order.left_out import NOTHING_LEFT_OUT
from streamload.order.steps import Block, Portion, Share, Steps
from streamload.worker.messages import Ended, EpochStart, Span, Visit, WorkerConfig
from streamload.worker.reader import Reader
from streamload.worker.sampler import RankStep, Sampler
from streamload.worker.states import GroupState

Budgets = tuple[int, int | None]
"""Of a cell: of text, and of image; None: any."""
NO_ROWS: Rows = np.empty((0, 4), np.int64)
CostsOf = Callable[[Reader, int, npt.NDArray[np.int64]], npt.NDArray[np.float64]]
"""The costs of samples of a shard, float64[N, 3]: of text and image, and what each takes."""
_VISION_SHARE = 12
"""Patches that take as long as a token, where nothing says what a sample takes."""
TOO_LONG = "costs"
"""What samples that exceed a budget are counted under: the name of the extension."""
UNLIMITED = 1 << 40
"""The largest budget."""
_MORE, _LEAST_MORE = 1.05, 64
"""Samples that are looked at beyond those that would fill a block by what is known of it."""


class _Front(NamedTuple):
    """Where a group's next block begins.

    Attributes:
        position: the global one.
        positions: those of the sources.
        owed: what the sources are owed, in UNITs.
        too_long: the samples that exceeded a budget before.
        remaining: rows of a block that a run left before its end, to go on with other cells: they come before
            those of the sequences.
        before: the state where that block begins; None: none of its rows remain.
    """

    position: int
    positions: tuple[int, ...]
    owed: tuple[int, ...]
    too_long: int
    remaining: Rows
    before: GroupState | None


class _Cut(NamedTuple):
    """A block as its begin and its end are told in a state: all that planning it again needs.

    Attributes:
        begin: its global position.
        steps: of it.
        cells: of a step, over all groups.
        text, image: the budgets.
        behind: so many of its steps were trained on.
        shares: of the sources, in UNITs.
    """

    begin: int
    steps: int
    cells: int
    text: int
    image: int
    behind: int
    shares: tuple[int, ...]


class _Gathered(NamedTuple):
    """The next samples of a group, as many as fill a block.

    Attributes:
        rows: of them.
        costs: int64[N, 2]: of text and image.
        fits: int64[M]: the places of those that exceed no budget.
        packed: the cells of these.
        used: how many samples the block takes, too long ones included.
    """

    rows: Rows
    costs: npt.NDArray[np.int64]
    fits: npt.NDArray[np.int64]
    packed: PackedSamples
    used: int


class _Plan(NamedTuple):
    """The cells of a block of one group.

    Attributes:
        block: its global positions.
        rows: of all samples in cells, cell by cell.
        costs: int64[N, 2]: of text and image of each.
        borders: where each cell begins in rows, and the end of the last.
        unplaced: how many samples of the sequence's end make no step.
        before: the state of the group at its begin: a resumed run plans the block again.
        spans: hashes of its references.
        digest: of costs and cells.
    """

    block: Block
    rows: Rows
    costs: npt.NDArray[np.int64]
    borders: npt.NDArray[np.int64]
    unplaced: int
    before: GroupState
    spans: dict[str, Span]
    digest: int

    def cell(self, number: int) -> slice:
        """The rows of a cell."""
        return slice(int(self.borders[number]), int(self.borders[number + 1]))


class PackedBlocks:
    """The plans of the blocks of a rank's groups, one after the other: each begins where the last one ends.

    Args:
        config: what is read.
        reader: has the reference streams and facts.
        steps: of the epoch.
        start: of the epoch.
        costs_of: samples.
        budgets: of a cell.
    """

    def __init__(
        self,
        config: WorkerConfig,
        reader: Reader,
        steps: Steps,
        start: EpochStart,
        costs_of: CostsOf,
        budgets: Budgets,
    ):
        self.steps, self.events = steps, start.events
        self.budgets = np.array(limits(budgets))
        self._config, self._reader, self._start, self._costs_of = config, reader, start, costs_of
        self._fronts: dict[int, _Front] = {}
        self._plans: dict[int, _Plan] = {}

    def at(self, group: int, position: int) -> _Plan:
        """The plan of the block with the step at a global position; waits for the entries of its samples.

        Raises:
            NoValidSamples: one of several sources, which are read again and again, has no usable sample.
        """
        while (plan := self.known(group, position)) is None:
            self._plans[group] = self._next(group)
        return plan

    def known(self, group: int, position: int) -> _Plan | None:
        """The same if it is planned."""
        plan = self._plans.get(group)
        return plan if plan is not None and plan.block.begin <= position < plan.block.end else None

    def state_after(self, group: int, position: int) -> GroupState:
        """The state of a group after the step at a position of a planned block."""
        plan = self._plans[group]
        if position + self.steps.at(position).batch < plan.block.end:
            return plan.before
        front = self._fronts[group]
        return front.before or self._state(group, front)

    def ended(self, position: int) -> int:
        """References of a pass at its end, if as many as positions were in cells before this one."""
        due = self._reader.due()
        taken = sum(sum(front.positions) - len(front.remaining) for front in self._fronts.values())
        return position + due - taken + sum(plan.unplaced for plan in self._plans.values())

    def left_out(self) -> dict[int, int]:
        """The samples that exceed a budget, of each group so far."""
        first = self._config.first_group
        return {first + group: front.too_long for group, front in self._fronts.items() if front.too_long}

    def costs(self, rows: Rows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The costs of rows, int64[N, 2], texts at least 1; and what each takes, float64[N]."""
        columns = np.empty((len(rows), 3))
        for places, shard in by_shard(rows):
            columns[places] = self._costs_of(self._reader, shard, rows[places, 3])
        costs = np.ceil(np.minimum(columns[:, :2], UNLIMITED)).astype(np.int64)
        costs[:, 0] = np.maximum(1, costs[:, 0])  # else a block has no end
        times = np.where(np.isnan(columns[:, 2]), costs[:, 0] + costs[:, 1] / _VISION_SHARE, columns[:, 2])
        return costs, times

    def _front(self, group: int) -> _Front:
        start, zeros = self._start, (0,) * len(self._config.sources)
        state = start.groups.get(self._config.first_group + group)
        block = self.steps.block(start.position)
        assert block is not None
        if state is None:
            return _Front(block.begin, zeros, zeros, 0, NO_ROWS, None)
        positions = tuple(source.cursor.position for source in state.sources)
        front = _Front(block.begin, positions, state.owed, state.left_out[TOO_LONG], NO_ROWS, None)
        for numbers in state.past:
            begin, steps, cells, text, image, behind, *shares = numbers
            cut = _Cut(begin, steps, cells, text, image, behind, tuple(shares))
            front = self._after(group, front, cut)
        return front._replace(before=state) if len(front.remaining) else front

    def _after(self, group: int, front: _Front, cut: _Cut) -> _Front:
        """Where a group goes on after the steps of a block that were trained on."""
        cells = cut.cells // self.steps.at(front.position).groups
        budgets = np.array([cut.text, cut.image])
        block = self._gather(group, front, cut.begin, cut.steps, cells, budgets, cut.shares)
        later = np.flatnonzero(block.packed.cell // cells >= cut.behind)
        unplaced = block.fits[len(block.packed.cell) : block.packed.taken]
        places = [*block.fits[later].tolist(), *unplaced.tolist()]
        remaining = np.concatenate([block.rows[places], front.remaining[block.used :]])
        portion = self._portion(front, max(0, block.used - len(front.remaining)), cut.shares)
        too_long = front.too_long + block.used - int(np.count_nonzero(block.fits < block.used))
        return front._replace(
            positions=portion.stop, owed=portion.owed, too_long=too_long, remaining=remaining
        )

    def _state(self, group: int, front: _Front) -> GroupState:
        """The state of a group between two blocks, with what these have left out."""
        state = state_between(self._reader, group, front.owed, front.positions)
        if not front.too_long:
            return state
        first, *others = state.sources
        others_left_out = first.cursor.left_out or NOTHING_LEFT_OUT
        before = others_left_out.before | Counter({TOO_LONG: front.too_long})
        cursor = first.cursor._replace(left_out=others_left_out._replace(before=before))
        return state._replace(sources=(first._replace(cursor=cursor), *others))

    def _next(self, group: int) -> _Plan:
        front = self._fronts.get(group) or self._front(group)
        block, split = self.steps.block(front.position), self.steps.at(front.position)
        assert block is not None
        steps, cells = (block.end - block.begin) // split.batch, split.batch // split.groups
        for source, first in enumerate(front.positions):
            self._reader.has(group, source, first)
        before = front.before or self._state(group, front)
        digests = [
            self._reader.references(group, source).digest(first)
            for source, first in enumerate(front.positions)
        ]
        several = len(front.positions) > 1
        shares = shares_at(of_kind(self.events, WEIGHTS), front.position) if several else (UNIT,)
        gathered = self._gather(group, front, block.begin, steps, cells, self.budgets, shares)
        rows, costs, fits, packed, used = gathered
        portion = self._portion(front, max(0, used - len(front.remaining)), shares)
        spans = {}
        for source, (first, stop) in enumerate(zip(portion.first, portion.stop, strict=True)):
            behind = self._reader.references(group, source).digest(stop)
            spans[f"{group}.{source}"] = Span(first, digests[source], stop, behind)
        order = fits[np.argsort(packed.cell, kind="stable")]
        borders = np.searchsorted(np.sort(packed.cell), np.arange(packed.steps * cells + 1))
        digest = xxhash.xxh3_64_intdigest(costs[order].tobytes() + borders.tobytes())
        too_long = front.too_long + used - int(np.count_nonzero(fits < used))
        remaining, since = front.remaining[used:], None
        if len(remaining):
            whole = (block.begin, steps, split.batch, *self.budgets.tolist(), steps, *shares)
            since = before._replace(past=(*before.past, whole))
        self._fronts[group] = _Front(block.end, portion.stop, portion.owed, too_long, remaining, since)
        unplaced = packed.taken - len(packed.cell)
        return _Plan(block, rows[order], costs[order], borders, unplaced, before, spans, digest)

    def _gather(
        self,
        group: int,
        front: _Front,
        begin: int,
        steps: int,
        cells: int,
        budgets: npt.NDArray[np.int64],
        shares: Sequence[int],
    ) -> _Gathered:
        """Wait for as many of the next samples as fill a block, and pack them."""
        count, is_end, every = steps * cells, False, steps * cells
        rows, costs, times = NO_ROWS, np.empty((0, 2), np.int64), np.empty(0)
        while not is_end:
            portion = self._portion(front, max(0, count - len(front.remaining)), shares)
            later, is_end = references_of(self._reader, group, portion)
            extended = np.concatenate([front.remaining[:count], later])
            more, taking = self.costs(extended[len(rows) :])
            rows, costs, times = extended, np.concatenate([costs, more]), np.concatenate([times, taking])
            fitting = costs[(costs <= budgets).all(axis=1)]
            if enough(fitting, every, budgets):
                break
            if len(rows) and not len(fitting) and np.ptp(rows[:, 1]) > 1:  # passes of an endless sequence
                raise NoValidSamples(
                    "a whole pass over the shards has no sample whose costs are within max_tokens= and "
                    "max_patches="
                )
            full = float((fitting.sum(axis=0) / (budgets * every)).max(initial=0.0))
            count += max(_LEAST_MORE, min(4 * count, int(count * (_MORE / max(full, 0.01) - 1))))
        fits = np.flatnonzero((costs <= budgets).all(axis=1))
        seed = self._config.sources[0].order.seed
        turns = key(seed, BUCKETS, begin)  # of all groups: a step has like cells everywhere
        packed = pack(costs[fits], times[fits], steps, cells, budgets, turns, is_end=is_end)
        has_all = is_end and packed.taken == len(fits)
        used = len(rows) if has_all else int(fits[packed.taken - 1]) + 1
        return _Gathered(rows, costs, fits, packed, used)

    @staticmethod
    def _portion(front: _Front, count: int, shares: Sequence[int]) -> Portion:
        return interleaved(front.positions, front.owed, shares, count)


def limits(budgets: Budgets) -> list[int]:
    """The budgets of text and image as numbers."""
    return [UNLIMITED if budget is None else budget for budget in budgets]


@dataclass(slots=True)
class PackedStep:
    """A rank's cells of one step; see RankStep. Which samples they have is known once they are asked for.

    Attributes:
        position: the global position where it begins.
        shares: of the groups, in cells.
        passes: by source the latest pass of its samples; after `visits`, if there are several sources.
        left_out: the places of bad samples that their cells lack.
        stand_ins: what others cost, by the places that they take in cells that would be empty.
    """

    config: WorkerConfig
    blocks: PackedBlocks
    position: int
    shares: list[Share]
    bounds: Bounds | None = None
    passes: dict[int, int] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    stand_ins: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)
    _cells: list[tuple[_Plan, slice]] | None = None
    _places: dict[Visit, int] = field(default_factory=dict)

    @property
    def cells(self) -> list[tuple[_Plan, slice]]:
        """The rank's cells: rows of plans; none where the sequence ends before the step."""
        if self._cells is None:
            self._cells = []
            for share, plan in self._plans():
                first = self._number(plan) * (share.end - share.begin) - share.begin
                numbers = range(first + share.first, first + share.stop)
                if share.size and numbers.stop < len(plan.borders):
                    self._cells += [(plan, plan.cell(number)) for number in numbers]
        return self._cells

    @property
    def size(self) -> int:
        """The number of samples that this rank computes, at most."""
        return sum(rows.stop - rows.start for _, rows in self.cells)

    @property
    def rows(self) -> Rows:
        """The rows of all its cells, with bad samples."""
        return np.concatenate([plan.rows[rows] for plan, rows in self.cells])

    @property
    def costs(self) -> npt.NDArray[np.int64]:
        """What these rows cost: int64[N, 2]."""
        return np.concatenate([plan.costs[rows] for plan, rows in self.cells])

    @property
    def seats(self) -> npt.NDArray[np.int64]:
        """The source of each sample."""
        sources = self.rows[:, 0]
        return np.delete(sources, sorted(self.left_out)) if self.left_out else sources

    @property
    def parts(self) -> list[int]:
        """The rows of each cell, without bad samples."""
        counts, place = [], 0
        for _, rows in self.cells:
            stop = place + rows.stop - rows.start
            counts.append(stop - place - sum(place <= bad < stop for bad in self.left_out))
            place = stop
        return counts

    @property
    def sizes(self) -> list[CellSize]:
        """The cells without bad samples."""
        costs, place, cells = self.costs, 0, []
        for stand_in, others in self.stand_ins.items():
            costs[stand_in] = others
        for _, rows in self.cells:
            stop = place + rows.stop - rows.start
            kept = [number for number in range(place, stop) if number not in self.left_out]
            cells.append(CellSize(len(kept), *costs[kept].sum(axis=0).tolist()))
            place = stop
        return cells

    @property
    def planned(self) -> CellSize:
        """All cells of the step of the groups that this rank reads, as they are planned, in one."""
        total = np.zeros(3, np.int64)
        for share, plan in self._plans():
            count = share.end - share.begin
            first, stop = plan.borders[[self._number(plan) * count, (self._number(plan) + 1) * count]]
            total += [stop - first, *plan.costs[first:stop].sum(axis=0)]
        return CellSize(*total.tolist())

    def visits(self) -> Iterator[list[Visit] | None]:
        """The samples, cell by cell; None if there aren't enough for the step, which all ranks skip then."""
        if any(
            (self._number(plan) + 1) * (share.end - share.begin) >= len(plan.borders)
            for share, plan in self._plans()
        ):
            yield None
            return
        rows = self.rows
        self.passes = passes_of(self.config, rows)
        visits = [Visit(*row) for row in rows.tolist()]
        self._places = {visit: place for place, visit in enumerate(visits)}
        yield visits

    def leaves_out(self, visit: Visit) -> bool:
        """Leave a bad sample out of its cell; False if that would be empty."""
        place, begin = self._places[visit], 0
        for _, rows in self.cells:
            stop = begin + rows.stop - rows.start
            if place < stop:
                break
            begin = stop
        if len(self.left_out.intersection(range(begin, stop))) + 1 == stop - begin:
            self.stand_ins[place] = self.costs[place]
            return False
        self.left_out.add(place)
        return True

    def took(self, samples: Sequence[tuple[int, int]]) -> None:
        """Learn the samples of all rows, by shard and number: stand-ins among them cost something else."""
        for place in self.stand_ins:
            row = place - sum(1 for other in self.left_out if other < place)
            costs, _ = self.blocks.costs(np.array([[0, 0, *samples[row]]]))
            self.stand_ins[place] = costs[0]

    def states(self) -> dict[int, GroupState]:
        """The state of each group after the step; valid after `visits`."""
        first = self.config.first_group
        return {
            first + share.group: self.blocks.state_after(share.group, self.position) for share in self.shares
        }

    def spans(self) -> dict[str, Span]:
        """The hashes before and after the block, by group and source, and of its plan."""
        spans: dict[str, Span] = {}
        after = self.position + self.blocks.steps.at(self.position).batch
        for share, plan in self._plans():
            next_ = after if after < plan.block.end else -1  # the next block has another plan
            spans |= plan.spans
            spans[f"{share.group}.plan"] = Span(self.position, plan.digest, next_, plan.digest)
        return spans

    def _plans(self) -> list[tuple[Share, _Plan]]:
        return [(share, self.blocks.at(share.group, self.position)) for share in self.shares]

    def _number(self, plan: _Plan) -> int:
        """The number of the step in its block."""
        return (self.position - plan.block.begin) // self.blocks.steps.at(self.position).batch


class PackedSampler(Sampler):
    """The steps of one epoch, in ascending order, of cells that are packed by budgets.

    Args:
        config, reader, start: see Sampler.
        costs_of: samples.
        budgets: of a cell.
    """

    def __init__(
        self,
        config: WorkerConfig,
        reader: Reader,
        start: EpochStart,
        costs_of: CostsOf,
        budgets: Budgets,
    ):
        super().__init__(config, reader, start)
        self._blocks = PackedBlocks(config, reader, self.steps, start, costs_of, budgets)
        self._step: PackedStep | None = None

    def receive(self, events: Sequence[Event]) -> None:
        """Go by events of later steps; those of earlier ones may be left out."""
        super().receive(events)
        self._blocks.events = self._events

    def at(self, position: int) -> RankStep:
        """The step at a global position."""
        self._step = PackedStep(self._config, self._blocks, position, self._shares(position))
        return self._step

    def coming(self, position: int) -> list[tuple[int, int]]:
        """This rank's samples of a later step, by shard and number, as far as they are known."""
        shares = self.steps.at(position).shares(position, self._config.rank, self._groups)
        if any(self._blocks.known(share.group, position) is None for share in shares):
            return []
        step = PackedStep(self._config, self._blocks, position, shares)
        return [(visit.shard, visit.number) for part in step.visits() for visit in part or ()]

    def fits(self, visit: Visit, shard: int, number: int) -> bool:
        """True if a sample isn't longer than a budget."""
        costs, _ = self._blocks.costs(np.array([[visit.source, visit.pass_, shard, number]]))
        return bool((costs <= self._blocks.budgets).all())

    def ended(self, number: int, position: int) -> Ended:
        """The message that the sequence ends before a step."""
        ended, tallies = super().ended(number, position), dict[int, Mapping[str, int]]()
        for group, count in self._blocks.left_out().items():
            tallies[group] = {**ended.left_out.get(group, {}), TOO_LONG: count}
        return ended._replace(due=self._blocks.ended(position), left_out={**ended.left_out, **tallies})

    def leaves_out(self, visit: Visit) -> bool:
        """True if a bad sample leaves its cell: no other one takes its place."""
        assert self._step is not None
        return self._step.leaves_out(visit)
