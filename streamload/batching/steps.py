"""Steps that are planned by block: which rows they have follows from costs, before any is read (E)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from streamload.batches.in_progress import Bounds
from streamload.batching.copies import Origins
from streamload.errors import NoValidSamples, OptionError
from streamload.order.hashing import BUCKETS, key
from streamload.order.lanes import SAMPLE_BITS
from streamload.order.steps import Block, Portion, Portions, Split, Steps
from streamload.worker.messages import EpochStart, Span, Visit, WorkerConfig
from streamload.worker.reader import Reader
from streamload.worker.sampler import RankStep, Sampler
from streamload.worker.states import GroupState

Rows = npt.NDArray[np.int64]
"""int64[N, 4]: source, pass, shard and number of samples."""
Costs = npt.NDArray[np.float64]
"""float64[N, 2]: of the text and the image of rows."""


class BlockBounds(NamedTuple):
    """Widths of the rows of a block's steps, where the groups of a run have to agree on that.

    Attributes:
        begin, end: the global positions of the block.
        rows: int32[steps, N, 2]: the most tokens of text and image of each row of a rank in each step.
    """

    begin: int
    end: int
    rows: npt.NDArray[np.int32]

    def at(self, position: int) -> Bounds | None:
        """Return the widths of the step at a global position; None outside of the block."""
        if not self.begin <= position < self.end:
            return None
        number = (position - self.begin) * len(self.rows) // (self.end - self.begin)
        bounds: Bounds = self.rows[number]
        return bounds


class PlanRule(Protocol):
    """How the rows of a block are divided among its steps, and those of a step among ranks, by costs."""

    def costs(self, reader: Reader, shard: int, numbers: npt.NDArray[np.int64]) -> Costs:
        """The costs of samples of a shard."""
        ...

    def divide(
        self, costs: Costs, steps: int, turns: int, origins: Origins, parts: int
    ) -> npt.NDArray[np.int64]:
        """Divide a block's rows among its steps.

        Args:
            costs: of the rows.
            steps: of the block; divides the rows.
            turns: decides which step comes when.
            origins: of the rows; samples of a small source may repeat.
            parts: of a step of this group, each of one source; 0: steps have rows of any.

        Returns:
            int64[steps, rows ÷ steps]: for each step its rows.
        """
        ...

    def deal(
        self, costs: Costs, sizes: npt.NDArray[np.int64], rank: int
    ) -> tuple[npt.NDArray[np.int64], Bounds | None]:
        """Deal the rows of a step to the ranks.

        Args:
            costs: of the rows, in the order of the plan.
            sizes: int64[ranks], how many rows each gets; they add up to all.
            rank: this one.

        Returns:
            The places of its rows, int64[m]; and the room for each of them, int32[m, 2], alike for
            all ranks if all get equally many, None: any.
        """
        ...


def refuse_unequal_parts(split: Split, option: str) -> None:
    """Refuse steps to which groups give different numbers of samples.

    Raises:
        OptionError: it names the option that plans steps.
    """
    if split.batch % split.groups:
        raise OptionError(
            f"{option} needs steps of equal parts from each of the {split.groups} groups, and a step has "
            f"{split.batch} samples: give a batch_size so that {split.groups} divides that"
        )


class BlockPlan(NamedTuple):
    """The plan of a block of one group.

    Attributes:
        block: its global positions.
        portion: what it takes of the group.
        rows: of all its samples.
        costs: of the rows.
        steps: int64[steps, rows of a step]: indexes of the rows; fewer steps where the sequence ends.
        before: the state of the group at its begin, which is that after each of its steps but the last: a
            resumed run plans the block again.
        spans: hashes of its references.
        digest: of costs and steps.
    """

    block: Block
    portion: Portion
    rows: Rows
    costs: Costs
    steps: npt.NDArray[np.int64]
    before: GroupState
    spans: dict[str, Span]
    digest: int


class BlockPlanner:
    """The plans of the blocks of a rank's groups, in ascending order.

    Args:
        config: what is read.
        reader: has the reference streams and facts.
        steps: of the epoch, planned by block.
        mixture: gives the portions of a group's blocks.
        rule: by which rows are divided.
    """

    def __init__(
        self,
        config: WorkerConfig,
        reader: Reader,
        steps: Steps,
        mixture: Callable[[int], Portions],
        rule: PlanRule,
    ):
        self.steps, self.rule = steps, rule
        self._config, self._reader, self._mixture = config, reader, mixture
        self._plans: dict[int, BlockPlan] = {}

    def at(self, group: int, position: int) -> BlockPlan:
        """The plan of the block with the step at a global position; waits for the entries of its samples.

        Raises:
            NoValidSamples: one of several sources, which are read again and again, has no usable sample.
        """
        plan = self.known(group, position)
        if plan is None:
            block = self.block(position)
            plan = self._plans[group] = self._plan(group, block, self._mixture(group).at(block.begin))
        return plan

    def known(self, group: int, position: int) -> BlockPlan | None:
        """The same if it is planned."""
        plan = self._plans.get(group)
        return plan if plan is not None and plan.block == self.block(position) else None

    def block(self, position: int) -> Block:
        """The block of the step at a global position."""
        block = self.steps.block(position)
        assert block is not None
        return block

    def state_after(self, group: int, position: int) -> GroupState:
        """The state of a group after the step at a position of a planned block."""
        plan = self._plans[group]
        if position + self.steps.at(position).batch < plan.block.end or len(plan.rows) < sum(
            plan.portion.take
        ):
            return plan.before
        return state_between(self._reader, group, plan.portion.owed, plan.portion.stop)

    def _plan(self, group: int, block: Block, portion: Portion) -> BlockPlan:
        for source, first in enumerate(portion.first):
            self._reader.has(group, source, first)
        before = state_between(self._reader, group, portion.owed_before, portion.first)
        stops = list(enumerate(zip(portion.first, portion.stop, strict=True)))
        streams = [self._reader.references(group, source) for source, _ in stops]
        befores = [streams[source].digest(first) for source, (first, _) in stops]
        rows, _ = references_of(self._reader, group, portion)
        spans = {
            f"{group}.{source}": Span(first, befores[source], stop, streams[source].digest(stop))
            for source, (first, stop) in stops
        }
        costs = np.empty((len(rows), 2))
        for places, shard in by_shard(rows):
            costs[places] = self.rule.costs(self._reader, shard, rows[places, 3])
        split = self.steps.at(block.begin)
        steps = (block.end - block.begin) // split.batch
        size = sum(portion.take) // steps
        whole = min(steps, len(rows) // size)
        seed = self._config.sources[0].order.seed
        turns = key(seed, BUCKETS, block.begin)  # of all groups: a step has like cells everywhere
        planned = np.empty((0, size), np.int64)
        if whole:
            parts = self._config.draws.of_step(split)  # of all groups; 0: each part has rows of any source
            of_group = max(1, parts // split.groups) if parts else 0
            used = rows[: whole * size]
            planned = self.rule.divide(costs[: len(used)], whole, turns, _origins(used), of_group)
        digest = xxhash.xxh3_64_intdigest(costs.tobytes() + planned.tobytes())
        return BlockPlan(block, portion, rows, costs, planned, before, spans, digest)


@dataclass(slots=True)
class PlannedStep:
    """A rank's part of one step of planned blocks.

    Attributes:
        position: the global position where it begins.
        groups: those that the rank reads in it, with how many samples of each.
        seats: int64[size]: the source of each sample; valid after `visits`.
        passes: by source the latest pass of its samples; after `visits`, if there are several sources.
        begins_epoch: whether it is the first one since the epoch began or was resumed.
        bounds: for each row the most tokens of text and image of that row on any rank; valid after `visits`.
    """

    config: WorkerConfig
    planner: BlockPlanner
    position: int
    groups: dict[int, int]
    begins_epoch: bool
    seats: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    passes: dict[int, int] = field(default_factory=dict)
    bounds: Bounds | None = None
    parts: None = None

    @property
    def size(self) -> int:
        """The number of samples that this rank computes."""
        return sum(self.groups.values())

    @property
    def is_first(self) -> bool:
        """True if it is the first step of its block."""
        return self.planner.block(self.position).begin == self.position

    def visits(self) -> Iterator[list[Visit] | None]:
        """The samples, all at once; None if the step isn't full, which all ranks skip then."""
        plans = [self.planner.at(group, self.position) for group in self.groups]
        number = (self.position - plans[0].block.begin) // self._split.batch
        if any(number >= len(plan.steps) for plan in plans):
            yield None
            return
        rows, bounds = self._rows(plans, number)
        self.seats = rows[:, 0]
        self.passes = passes_of(self.config, rows)
        rooms = itertools.repeat(None) if bounds is None else map(tuple, bounds.tolist())
        visits = [
            Visit(source, pass_, shard, number, most)
            for (source, pass_, shard, number), most in zip(rows.tolist(), rooms, strict=False)
        ]
        if bounds is not None:
            self.bounds = fitted(bounds, self.planner.steps.seq_len(self.position))
        yield visits

    def block_bounds(self) -> BlockBounds:
        """The bounds of all steps of the block; valid after `visits`."""
        plans = [self.planner.at(group, self.position) for group in self.groups]
        begin, end = plans[0].block
        whole = range(min(len(plan.steps) for plan in plans))
        steps = [bounds for number in whole if (bounds := self._rows(plans, number)[1]) is not None]
        missing = (end - begin) // self._split.batch - len(steps)  # where a sequence ends
        return BlockBounds(begin, end, np.stack([*steps, *[np.zeros_like(steps[0])] * missing]))

    def _rows(self, plans: Sequence[BlockPlan], number: int) -> tuple[Rows, Bounds | None]:
        """The rows that this rank computes in a step of the block, and their bounds; None: any."""
        parts = [self._dealt(group, plan, number) for group, plan in zip(self.groups, plans, strict=True)]
        times = [(np.arange(len(rows)) + 0.5) / max(1, len(rows)) for rows, _ in parts]
        order = np.argsort(np.concatenate(times), kind="stable")
        rows = np.concatenate([rows for rows, _ in parts])[order]
        bounds = [room for _, room in parts if room is not None]
        return rows, np.concatenate(bounds)[order] if bounds else None

    def states(self) -> dict[int, GroupState]:
        """The state of each group after the step; valid after `visits`."""
        first = self.config.first_group
        return {first + group: self.planner.state_after(group, self.position) for group in self.groups}

    def spans(self) -> dict[str, Span]:
        """The hashes before and after the block, by group and source, and of its plan."""
        spans: dict[str, Span] = {}
        after = self.position + self._split.batch
        for group in self.groups:
            plan = self.planner.at(group, self.position)
            next_ = after if after < plan.block.end else -1  # the next block has another plan
            spans |= plan.spans
            spans[f"{group}.plan"] = Span(self.position, plan.digest, next_, plan.digest)
        return spans

    @property
    def _split(self) -> Split:
        return self.planner.steps.at(self.position)

    def _dealt(self, group: int, plan: BlockPlan, number: int) -> tuple[Rows, Bounds | None]:
        """The rows of a group that this rank computes, and their bounds; None: any."""
        cell = plan.steps[number]
        sizes = np.array(self._split.sizes(self.position, group))
        places, bounds = self.planner.rule.deal(plan.costs[cell], sizes, self.config.rank)
        return plan.rows[cell[places]], bounds


def state_between(
    reader: Reader, group: int, owed: tuple[int, ...], positions: tuple[int, ...]
) -> GroupState:
    """The state of a group between two blocks; earlier references are dropped."""
    sources = []
    for source, position in enumerate(positions):
        stream = reader.references(group, source)
        stream.take(position, position)
        sources.append(stream.state(position))
    return GroupState(owed, tuple(sources))


def references_of(reader: Reader, group: int, portion: Portion) -> tuple[Rows, bool]:
    """Wait for the references of a portion; fewer, and True, where the only source ends.

    Raises:
        NoValidSamples: one of several sources, which are read again and again, has no usable sample.
    """
    seats, is_end = portion.seats(), False
    for source, (first, stop) in enumerate(zip(portion.first, portion.stop, strict=True)):
        if not reader.has(group, source, stop):
            if len(portion.take) > 1:
                name = reader.config.sources[source].name
                raise NoValidSamples(f"no usable sample in source {name!r}, which has a share of a step")
            end = reader.references(group, source).known(stop)
            seats, is_end = seats[: max(0, end - first)], True
    rows = np.empty((len(seats), 4), np.int64)
    rows[:, 0] = seats
    for source, first in enumerate(portion.first):
        are_of_source = seats == source
        stop = first + int(np.count_nonzero(are_of_source))
        rows[are_of_source, 1:] = reader.references(group, source).peek(first, stop)
    return rows, is_end


def passes_of(config: WorkerConfig, rows: Rows) -> dict[int, int]:
    """The latest pass of rows of each source; empty: there is one source."""
    if len(config.sources) == 1:
        return {}
    latest = np.zeros(len(config.sources), np.int64)
    np.maximum.at(latest, rows[:, 0], rows[:, 1])
    return dict(enumerate(latest.tolist()))


def by_shard(rows: Rows) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
    """The places of the rows of each shard."""
    order = np.argsort(rows[:, 2], kind="stable")
    shards = rows[order, 2]
    borders = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(rows)]
    for begin, end in itertools.pairwise(borders):
        if begin < end:
            yield order[begin:end], int(shards[begin])


def _origins(rows: Rows) -> Origins:
    """Sources and samples of rows."""
    return Origins(rows[:, 0], (rows[:, 2] << SAMPLE_BITS) + rows[:, 3])


class PlannedSampler(Sampler):
    """The steps of one epoch, in ascending order, most of them planned by block.

    Args:
        config, reader, start: see Sampler.
        rule: by which rows are divided.
    """

    def __init__(self, config: WorkerConfig, reader: Reader, start: EpochStart, rule: PlanRule):
        super().__init__(config, reader, start)
        self._planner = BlockPlanner(config, reader, self.steps, self._mixture, rule)

    def at(self, position: int) -> RankStep:
        """The step at a global position."""
        if not self.steps.is_planned(position):
            return super().at(position)
        shares = self._shares(position)
        groups = {share.group: share.size for share in shares}
        return PlannedStep(self._config, self._planner, position, groups, position == self._start.position)

    def coming(self, position: int) -> list[tuple[int, int]]:
        """This rank's samples of a later step, by shard and number, as far as they are known."""
        if position not in self.steps or not self.steps.is_planned(position):
            return super().coming(position)
        if any(self._planner.known(group, position) is None for group in self._groups):
            return []
        return [(visit.shard, visit.number) for part in self.at(position).visits() for visit in part or ()]


def fitted(bounds: Bounds, seq_len: int) -> Bounds:
    """Limit bounds to the most patches of an image in a step, in place."""
    bounds[:, 1] = np.minimum(bounds[:, 1], seq_len)
    return bounds
