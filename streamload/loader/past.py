"""Steps of a run made again, by its journal: an ordinary loader goes on from the state before one.

Part of the journal (streamload/journal), which is below this room.
"""

from __future__ import annotations

import itertools
import pickle
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from streamload.errors import DatasetChanged, JournalError
from streamload.extension import Extension
from streamload.journal.content import UNKNOWN, digest_of
from streamload.journal.history import RunHistory, Segment
from streamload.journal.leave_out import NAME as LEFT_OUT
from streamload.journal.leave_out import LeftOutSamples, ListedSample, changes_of
from streamload.journal.recorder import NAME
from streamload.journal.walk import Walk, planned_from
from streamload.journal.witness import PastRow, Witness, Witnessed
from streamload.loader.options import LoaderOptions
from streamload.loader.order_spec import CELLS, own_groups
from streamload.loader.position import Position
from streamload.loader.schedule import RunSchedule
from streamload.loader.state import FINGERPRINT, joined_state
from streamload.order.events import BATCH_SIZE, Event, in_effect, joined, of_kind
from streamload.order.steps import Split, Steps
from streamload.topology import read_topology


class MakeLoaders(NamedTuple):
    """How loaders are made, for this module, which knows no extension.

    Attributes:
        loader: a loader of options.
        extensions: those of options.
        by_rank: the keys of a state of which each rank has its part.
    """

    loader: Callable[[LoaderOptions], Any]
    extensions: Callable[[LoaderOptions], tuple[Extension, ...]]
    by_rank: Collection[str]


class Sought(NamedTuple):
    """Where to go on for a step.

    Attributes:
        state: of a loader.
        steps: from there to the step.
    """

    state: dict[str, Any]
    steps: int


@dataclass(frozen=True, slots=True)
class PastStep:
    """A step of a run as it was made again.

    Attributes:
        step: of the run.
        segment: that recorded it.
        batch: as the loader yields it.
        images: of the batch: a tensor, or one for each row; None: it has none.
        rows: of the batch.
    """

    step: int
    segment: Segment
    batch: Any
    images: Any
    rows: list[PastRow]


def as_recorded(
    options: LoaderOptions, make: MakeLoaders, rank: int, world_size: int, batch_size: int
) -> LoaderOptions:
    """The options of a run as its journal is followed: nothing is decided, reported or written."""
    order = replace(
        options.order,
        rank=rank,
        world_size=world_size,
        journal=None,
        decisions=None,
        objective=None,
        mixing=None,
        strict=True,
    )
    changed = replace(
        options,
        order=order,
        shards=replace(options.shards, leave_out=options.leave_out_file),
        batches=replace(options.batches, batch_policy=None, with_keys=True),
        workers=replace(options.workers, memory=None),
        mixing=None,
        batch_size=batch_size,
        num_workers=0,
        device=torch.device("cpu"),
        extensions=(),
        is_past=True,
    )
    extensions = [
        replace(extension, is_followed=True) if isinstance(extension, LeftOutSamples) else extension
        for extension in make.extensions(changed)
    ]
    return changed.with_extensions(tuple(extensions))


class Followed(NamedTuple):
    """A run as it was before a step, and how it went on.

    Attributes:
        marked_at: the step of the last mark before.
        mark: the state of all ranks then.
        schedule: at the mark.
        before: the position of the mark.
        steps: from there on.
        events: of the run from there on.
        walk: the order from there on.
    """

    marked_at: int
    mark: dict[str, Any]
    schedule: RunSchedule
    before: Position
    steps: Steps
    events: list[Event]
    walk: Walk


def follow(segment: Segment, step: int, options: LoaderOptions, make: MakeLoaders) -> Followed:
    """Follow a segment from the last mark before a step on.

    Args:
        segment: that recorded it.
        step: of the run.
        options: of the loader that wrote the journal.
        make: makes loaders.

    Raises:
        JournalError: there is no mark.
        StateMismatch: the options are of another run.
    """
    marked_at, marks = segment.marks_before(step)
    mark = joined_state([mark.state for mark in marks], make.by_rank)
    recorded = as_recorded(options, make, 0, segment.world_size, segment.rows)
    schedule = RunSchedule(recorded, lambda epoch: None)
    schedule.load(mark, {})
    before, origin = schedule.tracker.now(), marks[0].origin
    events = joined(before.events, segment.events(origin))
    steps = schedule.step_options.steps(before.step_start, of_kind(events, BATCH_SIZE))
    shards = [len(source.urls) for source in options.sources]
    orders = list(zip(schedule.source_orders(), shards, strict=True))
    walk = Walk(segment, (marked_at, origin), before, steps, events, orders, schedule.draws)
    return Followed(marked_at, mark, schedule, before, steps, events, walk)


def seek(
    segment: Segment,
    step: int,
    options: LoaderOptions,
    make: MakeLoaders,
    groups: Set[int] | None = None,
) -> Sought:
    """The state before a step of a segment, by which any layout goes on.

    Args:
        segment, step, options, make: see `follow`.
        groups: whose states are wanted; None: all.

    Raises:
        JournalError: the journal lacks what the order depends on.
        StateMismatch: the options are of another run.
    """
    marked_at, mark, schedule, before, steps, events, walk = follow(segment, step, options, make)
    _refuse_lost_ranks(segment, schedule.split(), groups)
    fingerprint = mark[FINGERPRINT]
    parts = {name: value for name, value in mark.items() if name not in schedule.state({}, fingerprint, {})}
    parts[NAME] = {"segment": segment.name, "step": step}
    # Costs say how many samples are in cells; and the rest of a block that a run left comes first.
    is_made_from_mark = schedule.order.table == CELLS or any(group.past for group in before.groups.values())
    number = 0 if is_made_from_mark else step - marked_at
    position = steps.begin(number)
    later = next(segment.marks_after(marked_at, walk.origin), mark)  # as there is one after each change
    if LEFT_OUT in later:
        parts[LEFT_OUT] = [change for change in later[LEFT_OUT] if is_made_from_mark or change[0] <= position]
    groups_there, target = dict(before.groups), planned_from(steps, position)
    if position:
        groups_there = {
            group: walk.to(group, target)
            for group in (groups_there or range(schedule.order.groups))
            if groups is None or group in groups
        }
    base, counted = before.base_batch, before.steps
    if base is None and of_kind(events, BATCH_SIZE):
        base = schedule.split().batch
        counted = (before.position - before.start) // base
    after = replace(
        before,
        position=position,
        groups=groups_there,
        events=tuple(in_effect(events, position)),
        base_batch=base,
        steps=0 if base is None else counted + number,
    )
    schedule.tracker.load(after)
    return Sought(schedule.state({}, fingerprint, parts), step - marked_at - number)


def _refuse_lost_ranks(segment: Segment, split: Split, groups: Set[int] | None) -> None:
    """Refuse a segment without the file of a rank that tells of wanted groups: the first that reads them.

    Raises:
        JournalError: it names the rank.
    """
    read_before: set[int] = set()
    for rank in range(segment.world_size):
        groups_told = set(split.groups_of(rank)) - read_before
        read_before |= groups_told
        if groups_told and (groups is None or not groups.isdisjoint(groups_told)):
            segment.rank(rank)


class Use(NamedTuple):
    """A use of a sample of a shard.

    Attributes:
        pass_: of its group over the source, from 0.
        ordinal: which of the samples that its group has in the shard.
        group: its number.
        first, last: the steps that it may be in: those of a block, where that was planned.
        position: the global one where the first begins.
        origin: the step at which its sequence began.
    """

    pass_: int
    ordinal: int
    group: int
    first: int
    last: int
    position: int
    origin: int


def uses(
    segment: Segment, options: LoaderOptions, make: MakeLoaders, source: int, shard: int
) -> Iterator[Use]:
    """All uses of the samples of a shard in a segment, as the order has them.

    Args:
        segment: that recorded them.
        options, make: see `follow`.
        source: the index of a source.
        shard: that of a shard in it.

    Raises:
        JournalError, StateMismatch: see `follow`.
    """
    marks = segment.all_marks
    origins = sorted({mark.origin for mark in marks.values()})
    for origin, stop in itertools.pairwise([*origins, segment.stop]):
        steps = [step for step, mark in sorted(marks.items()) if mark.origin == origin]
        first = follow(segment, steps[0], options, make)
        window = first.schedule.order.sources[source][2]
        for group in range(segment.groups):
            if first.walk.place(group, source, shard, 0) is None:
                continue
            for pass_ in segment.passes(origin, group, source):
                place = first.walk.place(group, source, shard, pass_)
                before = [segment.reached(step, group, source) for step in steps]
                # The lanes hadn't begun it by then, and what they give comes at most a window earlier.
                read = max((reached.read for reached in before if reached[:2] <= (pass_, place)), default=0)
                is_before = [reached.position <= read - window for reached in before]
                start = max(itertools.compress(steps, is_before), default=steps[0])
                walk = first.walk if start == steps[0] else follow(segment, start, options, make).walk
                positions, ordinals = walk.positions(group, source, shard, pass_, stop)
                for ordinal, place_in in zip(
                    ordinals, walk.steps_of(group, source, positions, stop), strict=False
                ):
                    yield Use(pass_, ordinal, group, *place_in, origin)


def owned_by(
    segment: Segment,
    options: LoaderOptions,
    make: MakeLoaders,
    source: int,
    shard: int,
    numbers: NDArray[np.int64],
) -> dict[int, NDArray[np.int64]]:
    """The samples of a shard that each group has, by group, in the order that `Use.ordinal` counts."""
    walk = follow(segment, segment.first, options, make).walk
    parts = {group: walk.pieces(source, group).parts.get(shard) for group in range(segment.groups)}
    return {group: numbers if part is None else part.owned(numbers) for group, part in parts.items()}


def left_out_of(segment: Segment, use: Use, options: LoaderOptions) -> list[ListedSample]:
    """The samples that were left out of a segment at a use: others came in their places."""
    state: Mapping[str, Any] = next(segment.marks_after(use.first, use.origin), {})
    if not state:
        state = segment.marks_before(use.first)[1][0].state
    if options.leave_out_file is None:
        return []
    changes = changes_of(state, options.leave_out_file)
    return [sample for change in changes if change.position <= use.position for sample in change.samples]


def stored_options(history: RunHistory, segment: Segment) -> LoaderOptions:
    """The options of the loader that wrote a segment, as they are kept beside its journal.

    They are unpickled, which runs code that the file names: it has to be your own.

    Raises:
        JournalError: they couldn't be pickled, or can't be read here.
    """
    begin = history.of_rank(0)[segment.name].begin
    if "loader" not in begin:
        raise JournalError(
            f"{', '.join(begin['unpicklable'])}= of the run's loader couldn't be pickled: give "
            f"--loader MODULE:FUNCTION, which returns such a loader, or call loader.at(step)"
        )
    path = history.folder / str(begin["loader"])
    try:
        options: LoaderOptions = pickle.loads(zlib.decompress(path.read_bytes()))
    except Exception as exc:
        raise JournalError(
            f"the run's loader can't be made from {path}: {exc}. Give --loader MODULE:FUNCTION, which "
            f"returns such a loader, or call loader.at(step) where its functions are defined"
        ) from exc
    return options


def steps_from(
    history: RunHistory,
    step: int,
    options: LoaderOptions,
    make: MakeLoaders,
    layout: tuple[int, int, int] | None = None,
    name: str | None = None,
) -> Iterator[PastStep]:
    """A step of a run and those after it, as far as its segment goes.

    Args:
        history: of the run.
        step: of the run.
        options: of the loader that wrote the journal.
        make: makes loaders.
        layout: the rank whose rows to make, the number of ranks, and rows of each; None: one rank has all.
        name: of the segment that ends the branch in which the step is looked for; None: the last one.

    Raises:
        JournalError: the step isn't recorded, or other samples come than were recorded.
        StateMismatch: rows would be made otherwise than they were; it says what differs.
        DatasetChanged: a shard is another than it was.
    """
    segment = history.at(step, name)
    stop = next(stop for other, _, stop in history.branch(name) if other is segment)
    rank, world_size, rows = layout or (0, 1, segment.rows * segment.world_size)
    witnessed_batches: list[Witnessed] = []
    followed = as_recorded(options, make, rank, world_size, rows)
    groups = set(own_groups(followed, read_topology(rank, world_size), segment.groups))
    witnessed = replace(followed, extensions=(*followed.extensions, Witness(witnessed_batches.append)))
    while step < stop:
        if world_size not in (1, segment.world_size) and segment.gave_up(
            segment.marks_before(step)[1][0].origin
        ):
            raise JournalError(
                f"shards of the run couldn't be read to their ends, so that step {step} is only sure on "
                f"{segment.world_size} ranks, as recorded, or on one"
            )
        sought = seek(segment, step, options, make, groups)
        epoch_stop = min(stop, segment.epoch_after(step))
        with make.loader(witnessed) as loader:
            loader.load_state_dict(sought.state)
            for number, batch in enumerate(loader, step - sought.steps):
                witness = witnessed_batches.pop()
                if number >= step:
                    _check(segment, number, (rank, world_size), witness)
                    yield PastStep(number, segment, batch, witness.images, witness.rows)
                if number + 1 >= epoch_stop:
                    break
            else:
                raise JournalError(f"the epoch of step {step} would end before step {epoch_stop - 1}")
        step = epoch_stop


def _check(segment: Segment, step: int, layout: tuple[int, int], witness: Witnessed) -> None:
    """Compare a step with what was recorded of it, if one rank, or each as then, has its rows.

    Raises:
        JournalError: it has other samples.
        DatasetChanged: they have other bytes.
    """
    rank, world_size = layout
    if world_size not in (1, segment.world_size):
        return
    ranks = range(segment.world_size) if world_size == 1 else [rank]
    samples, content = segment.digests(step, ranks)
    if samples is not None and samples != digest_of([(row.shard, row.number) for row in witness.rows]):
        raise JournalError(
            f"step {step} would have other samples than it had: one that was replaced can be read now, or "
            f"the reverse, or the journal's decisions were changed"
        )
    if content is not None and witness.content not in (UNKNOWN, content):
        urls = ", ".join(dict.fromkeys(row.url for row in witness.rows))
        raise DatasetChanged(
            f"samples of step {step} had other bytes: a shard was changed in place, one of {urls}"
        )
