"""Steps of a run made again, by its journal: an ordinary loader goes on from the state before one.

Part of the journal (streamload/journal), which is below this room.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from streamload.errors import JournalError
from streamload.extension import Extension
from streamload.journal.history import RunHistory, Segment
from streamload.journal.recorder import NAME, digest_of
from streamload.journal.walk import Walk, planned_from
from streamload.journal.witness import PastRow, Witness, Witnessed
from streamload.loader.options import LoaderOptions
from streamload.loader.order_spec import own_groups
from streamload.loader.schedule import RunSchedule
from streamload.loader.state import FINGERPRINT, joined_state
from streamload.order.events import BATCH_SIZE, in_effect, joined, of_kind
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
        batches=replace(options.batches, batch_policy=None, with_keys=True),
        workers=replace(options.workers, memory=None),
        mixing=None,
        batch_size=batch_size,
        num_workers=0,
        device=torch.device("cpu"),
        extensions=(),
    )
    return changed.with_extensions(make.extensions(changed))


def seek(
    segment: Segment,
    step: int,
    options: LoaderOptions,
    make: MakeLoaders,
    groups: Set[int] | None = None,
) -> Sought:
    """The state before a step of a segment, by which any layout goes on.

    Args:
        segment: that recorded it.
        step: of the run.
        options: of the loader that wrote the journal.
        make: makes loaders.
        groups: whose states are wanted; None: all.

    Raises:
        JournalError: the journal lacks what the order depends on.
        StateMismatch: the options are of another run.
    """
    marked_at, states = segment.states_before(step)
    mark = joined_state(states, make.by_rank)
    recorded = as_recorded(options, make, 0, segment.world_size, segment.rows)
    schedule = RunSchedule(recorded, lambda epoch: None)
    schedule.load(mark, {})
    before, fingerprint = schedule.tracker.now(), mark[FINGERPRINT]
    for rank in range(segment.world_size):
        if groups is None or not groups.isdisjoint(schedule.split().groups_told_by(rank)):
            segment.rank(rank)  # raises if it is lost
    parts = {name: value for name, value in mark.items() if name not in schedule.state({}, fingerprint, {})}
    parts[NAME] = {"segment": segment.name, "step": step}
    # Costs say how many samples are in cells; and the rest of a block that a run left comes first.
    is_made_from_mark = recorded.has_cells or any(group.past for group in before.groups.values())
    number = 0 if is_made_from_mark else step - marked_at
    events = joined(before.events, segment.events(marked_at))
    sizes = of_kind(events, BATCH_SIZE)
    steps = schedule.step_options.steps(before.step_start, sizes)
    position = steps.begin(number)
    shards = [len(source.urls) for source in options.sources]
    orders = list(zip(schedule.source_orders(), shards, strict=True))
    walk = Walk(segment, marked_at, before, steps, events, orders, schedule.draws)
    groups_there, target = dict(before.groups), planned_from(steps, position)
    if position:
        groups_there = {
            group: walk.to(group, target)
            for group in (groups_there or range(schedule.order.groups))
            if groups is None or group in groups
        }
    base, counted = before.base_batch, before.steps
    if sizes and base is None:
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
    options = as_recorded(options, make, rank, world_size, rows)
    groups = set(own_groups(options, read_topology(rank, world_size), segment.groups))
    witnessed = replace(options, extensions=(*options.extensions, Witness(witnessed_batches.append)))
    while step < stop:
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
    """
    rank, world_size = layout
    recorded = None
    if world_size == segment.world_size:
        recorded = segment.digest_of(step, rank)
    elif world_size == 1:
        recorded = segment.digest(step)
    if recorded is not None and recorded != digest_of([(row.shard, row.number) for row in witness.rows]):
        raise JournalError(
            f"step {step} would have other samples than it had: one that was replaced can be read now, or "
            f"the reverse, or the journal's decisions were changed"
        )
