"""Other sizes of steps than the options say: which may be set, and how a resumed run goes on with them.

Pure functions of options, position and layout; loader/run_events.py sets sizes, order/steps.py follows them.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from streamload.errors import OptionError, StateMismatch
from streamload.loader.options import LoaderOptions
from streamload.loader.order_spec import OrderSpec, block_steps, split_for
from streamload.loader.position import Position
from streamload.options.values import at_least
from streamload.order.events import BATCH_SIZE, Event, new_batch_size
from streamload.order.steps import Split
from streamload.topology import Topology

logger = logging.getLogger("streamload")


def resized(options: LoaderOptions, split: Split, rows: int, position: int) -> Event:
    """Another size of steps from a position on.

    Args:
        options: the loader's.
        split: of a step by these.
        rows: of a rank.
        position: where a step begins; with bucketing, a block.

    Raises:
        OptionError: steps can't have this size.
    """
    at_least(1, batch_size=rows)
    if not options.train:
        raise OptionError("set_batch_size() is for training: an evaluation has one batch_size")
    if options.step_table is not None:
        raise OptionError("set_batch_size() is for steps of one size: Patches(steps=…) says each step's")
    batch = rows * split.ranks
    if batch % split.groups or split.batch % split.groups:
        raise OptionError(
            f"set_batch_size({rows}): with {split.groups} groups (Order(groups=…)) a step has equal parts of "
            f"each, before and after, and {split.batch} and {batch} samples aren't both multiples of that"
        )
    return new_batch_size(position, batch, block_steps(options, batch) or 1)


def from_block(options: LoaderOptions, saved: OrderSpec, ours: OrderSpec, position: Position) -> Position:
    """Where to resume with other blocks than the state's.

    Args:
        options: the loader's.
        saved: the state's order.
        ours: this loader's.
        position: the state's.

    Raises:
        StateMismatch: within a block, whose samples are planned together.
    """
    if saved.blocks == ours.blocks:
        return position
    place, sizes = position.position, position.batch_sizes
    if saved.blocks is not None:
        count, batch = saved.blocks
        steps = options.step_options(Split(batch, 1, 1), count).steps(position.step_start, sizes)
        block, batch = steps.block(place), steps.at(place).batch
        if block is not None and block.begin != place:
            raise StateMismatch(
                f"the state is from within a block of bucketing=, which ends in "
                f"{(block.end - place) // batch} steps: go on with the same bucketing= and "
                f"global batch size ({batch}) until then, or resume from a state between two blocks"
            )
    events = [event for event in position.events if event.kind != BATCH_SIZE]
    for size in sizes[-1:]:
        batch = size.value["batch"]
        events.append(new_batch_size(place, batch, block_steps(options, batch) or 1))
    return replace(position, blocks_from=place, events=tuple(events))


def of_ranks(options: LoaderOptions, topology: Topology, position: Position) -> Position:
    """Where to resume with another batch size than the state's, which replaces those that were set.

    Raises:
        StateMismatch: the ranks can't share a step that has the size that was set.
    """
    sizes, split = position.batch_sizes, split_for(options, topology, 1)
    if not sizes:
        return position
    if position.base_batch != split.batch:
        logger.warning(
            "batch_size × ranks is %d, not %d as when sizes were set in the state's run: it replaces %d",
            *(split.batch, position.base_batch, sizes[-1].value["batch"]),
        )
        events = tuple(event for event in position.events if event.kind != BATCH_SIZE)
        return replace(position, events=events, base_batch=None, steps=0)
    for size in sizes:
        batch = size.value["batch"]
        if batch % split.ranks:
            raise StateMismatch(
                f"set_batch_size() was called in the state's run: its steps have {batch} samples, "
                f"which {split.ranks} ranks can't share evenly. Resume on a number of ranks that divides "
                f"that, or with another batch_size × ranks than {position.base_batch}, which replaces it"
            )
    return position
