"""A loader's checkpoint: its JSON form, with a format version and a checksum; and which loaders it fits."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import xxhash

from streamload.errors import OptionError, StateMismatch
from streamload.loader.options import LoaderOptions
from streamload.loader.order_spec import OrderSpec, data_digest, split_for
from streamload.loader.position import LeftOutOfGroups, Position
from streamload.loader.rank_process import BAD_IN_PASS, BAD_SAMPLES, BAD_SHARDS
from streamload.order.events import (
    BATCH_SIZE,
    UNIT,
    WEIGHTS,
    Event,
    new_batch_size,
    new_weights,
    of_kind,
    sizes_to_json,
    weights_to_json,
)
from streamload.order.group import most_skipped
from streamload.order.plan import WIDEST_LANES, WIDEST_WINDOW
from streamload.order.steps import WIDEST_MULTIPLE, SourcesName, Split, Steps
from streamload.topology import RunAttempt, Topology
from streamload.worker.states import GroupState

logger = logging.getLogger("streamload")

FORMAT = 1
LEFT_OUT = "left_out"
"""The samples left out before the state's sequence, by group; each rank knows those of its own groups."""
RUN = "run"
"""The identity of the run and the attempt, where processes of the run hold leases."""
FINGERPRINT = "fingerprint"
"""Fingerprint of what makes rows (fingerprint.py). Ranks may differ in it; one rank's is kept."""
_COUNTS = {BAD_SAMPLES: 3, BAD_SHARDS: 2, BAD_IN_PASS: 3}
"""The counts in a rank's state, and how many numbers each has. After one step the ranks have the same counts,
except for the bad samples of a pass, which are summed over the ranks whose states are known."""
_PARSE_ERRORS = (
    AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError
)  # fmt: skip
"""Errors that parsing raises if the type or size of a value doesn't fit."""
_MOST = 1 << 62


def to_state(
    order: OrderSpec,
    position: Position,
    counts: Mapping[str, Sequence[int]],
    parts: Mapping[str, Any],
    attempt: RunAttempt | None = None,
) -> dict[str, Any]:
    """Return a state: JSON-able, and no larger for a larger data set.

    Args:
        order: the order of the run.
        position: where the run resumes.
        counts: the counts of each kind, as `counts_in` returns them.
        parts: further values, by key: the fingerprint, and what extensions keep.
        attempt: the attempt of the run; None if nothing has needed it.
    """
    state = {
        "streamload_state": FORMAT,
        "data": order.data,
        "shards": list(order.shards),
        "sizes": order.sizes,
        "choice": list(order.choice),
        "train": order.train,
        "seed": order.seed,
        "groups": order.groups,
        "sources": [list(source) for source in order.sources],
        "opens_slowly": list(order.opens_slowly),
        "fitted": order.fitted,
        "epoch": position.epoch,
        "sequence": position.sequence,
        "began": position.start,
        "position": position.position,
        **weights_to_json(position.events),
        **(
            {}
            if order.blocks is None
            else {"blocks": list(order.blocks), "blocks_from": position.blocks_from}
        ),
        **({} if order.multiple == 1 else {"multiple": order.multiple}),
        **({} if order.sources_of == "mixed" else {"parts": [order.sources_of, order.parts]}),
        **({} if order.table is None else {"table": order.table}),
        **({"given": [list(numbers) for numbers in order.given]} if order.given else {}),
        **(
            {}
            if position.base_batch is None
            else {
                "batch_sizes": {
                    "base": position.base_batch,
                    "step": position.steps,
                    "resizes": sizes_to_json(position.events),
                }
            }
        ),
        "at": {str(number): group.to_json() for number, group in sorted(position.groups.items())},
        **({LEFT_OUT: _left_out_to_json(position.left_out)} if position.left_out else {}),
        **{name: list(numbers) for name, numbers in counts.items() if name != BAD_IN_PASS or any(numbers)},
        **parts,
        **({} if attempt is None else {RUN: list(attempt)}),
    }
    return sealed(state)


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with the checksum of all else in it."""
    return {**state, "checksum": _checksum(state)}


def joined_state(state: Any, by_rank: Collection[str] = ()) -> dict[str, Any]:
    """A state, or those of several ranks after one step as one.

    Args:
        state: as it was saved, or a list of these.
        by_rank: keys of extensions whose values are dicts with parts of each rank; all others are alike.

    Raises:
        StateMismatch: not a state of a loader, of an unknown format, or altered; or the states are not of
            one step.
    """
    states = list(state) if isinstance(state, Sequence) and not isinstance(state, str) else [state]
    if not states:
        raise StateMismatch("an empty list of states: give what state_dict() of each rank returned")
    try:
        for rank_state in states:
            _check_intact(rank_state)
        joined = _joined(states, by_rank)
        return {**joined, **_joined_counts(states)}
    except StateMismatch:
        raise
    except _PARSE_ERRORS as exc:
        raise StateMismatch(f"not a valid state of a loader: {type(exc).__name__}: {exc!s:.200}") from None


def from_state(state: Any) -> tuple[OrderSpec, Position]:
    """The order and position in a state, or in a list of the ranks' states after one step.

    Raises:
        StateMismatch: see `joined_state`.
    """
    return order_and_position(joined_state(state))


def order_and_position(state: Mapping[str, Any]) -> tuple[OrderSpec, Position]:
    """The order and position in a state, as `joined_state` returned it.

    Raises:
        StateMismatch: they can't be read.
    """
    try:
        order = _order_in(state)
        return order, _position_in(state, order)
    except _PARSE_ERRORS as exc:
        raise StateMismatch(f"not a valid state of a loader: {type(exc).__name__}: {exc!s:.200}") from None


def _joined_counts(states: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    counts = [counts_in(rank_state) for rank_state in states]
    samples, bad, lost = zip(*(rank_counts[BAD_IN_PASS] for rank_counts in counts), strict=True)
    in_pass = [max(samples), sum(bad) if states[0]["train"] else min(bad), max(lost)]
    return {**counts[0], BAD_IN_PASS: in_pass}


def counts_in(state: Mapping[str, Any]) -> dict[str, list[int]]:
    """The counts in a state; zeros where it has none.

    Raises:
        StateMismatch: they are damaged.
    """
    try:
        counts = {
            name: [_whole_number(number) for number in state.get(name, [0] * count)]
            for name, count in _COUNTS.items()
        }
    except (TypeError, ValueError) as exc:
        raise StateMismatch(f"not a valid state of a loader: {exc!r:.200}") from exc
    for name, count in _COUNTS.items():
        if len(counts[name]) != count:
            raise StateMismatch(f"not a valid state of a loader: {len(counts[name])} numbers as {name}")
    return counts


def attempt_in(state: Mapping[str, Any]) -> RunAttempt | None:
    """The attempt of the run that saved a state; None if nothing had needed it.

    Raises:
        StateMismatch: it is damaged.
    """
    if RUN not in state:
        return None
    try:
        run, attempt = state[RUN]
        return RunAttempt.parse(run, attempt)
    except (TypeError, ValueError) as exc:
        raise StateMismatch(f"not a valid state of a loader: {exc!s:.200}") from None


def check_fits(saved: OrderSpec, ours: OrderSpec, position: Position, needed: set[int]) -> None:
    """Refuse a state of another run.

    Args:
        saved: the state's order.
        ours: this loader's.
        position: the state's.
        needed: the groups that this rank reads.

    Raises:
        StateMismatch: it says what differs.
    """
    for name, before, current in (
        ("train", saved.train, ours.train),
        ("seed", saved.seed, ours.seed),
        ("the names of the sources", [name for name, *_ in saved.sources], [n for n, *_ in ours.sources]),
        (
            "choice of image_key, text_key, label_key, facts, repeat, listed uids and joined rows",
            saved.choice,
            ours.choice,
        ),
    ):
        if before != current:
            raise StateMismatch(f"the state was saved with another {name}: {before}, and this is {current}")
    if saved.given != ours.given:
        raise StateMismatch(
            f"the state was saved with Sources of other (weight, floor): {[*saved.given]}, and these are "
            f"{[*ours.given]}. Give the same; set_weights() changes the weights of a run"
        )
    if saved.sources_of != ours.sources_of:
        raise StateMismatch(
            f"the state was saved with Batches(sources={saved.sources_of!r}), and this is "
            f"{ours.sources_of!r}: give the same"
        )
    if saved.parts != ours.parts:
        logger.warning(
            "Batches(sources='rank'): the state is of %s ranks, not %s: later steps have other rows",
            *(saved.parts, ours.parts),
        )
    if saved.data != ours.data:
        raise StateMismatch(
            "the state is of another data set: its shards have other URLs, or another order. If the same "
            "shards were moved, give moved={old: new} with the prefixes of their URLs"
        )
    if position.position and None not in (saved.sizes, ours.sizes) and saved.sizes != ours.sizes:
        raise StateMismatch(
            f"sizes.json beside the shards was changed, added or removed since the state was saved: its "
            f"counts would cut the {saved.groups} groups differently in the middle of a pass. Restore the "
            f"file, or load a state of an epoch's start"
        )
    if position.position != position.start and saved.table != ours.table:
        raise StateMismatch(
            f"the state is from the middle of epoch {position.epoch}, which has the steps of another "
            f"Patches(steps=…), cells by budgets where these have none, or the reverse: go on with the same "
            f"steps to its end, and change them between two epochs"
        )
    if position.position and (missing := sorted(needed - position.groups.keys())):
        raise StateMismatch(
            f"the state is incomplete: it lacks groups {missing} of {saved.groups}. A rank knows only its "
            f"own node's: save streamload.gather_state(loader), or give the states of all nodes as a list. "
            f"Where a framework saves one rank's state, make the loader with Order(groups=1)"
        )


def check_options(saved: OrderSpec, ours: OrderSpec, position: Position, options: LoaderOptions) -> None:
    """Refuse options that a state fixes (lanes, window and groups) where they were given differently.

    Args:
        saved: the state's order.
        ours: by this loader's options alone.
        position: the state's.
        options: this loader's.

    Raises:
        StateMismatch: it says which.
    """
    if not options.train:
        return
    groups = options.order.groups
    if position.position and groups not in (None, saved.groups):
        raise StateMismatch(f"the state was saved with groups={saved.groups}, and this is {groups}")
    for (name, lanes, window), (_, our_lanes, our_window) in zip(saved.sources, ours.sources, strict=True):
        of_source = f" for source {name!r}" if len(saved.sources) > 1 else ""
        for option, given, value, other in (
            ("shuffle", options.shuffle, window, our_window),
            ("lanes", options.order.lanes if window else None, lanes, our_lanes),
        ):
            if given is not None and value != other:
                raise StateMismatch(
                    f"the state was saved with {option}={value}{of_source}, and this is {other}"
                    f"{f', by {option}={given}' if of_source else ''}: give {option}= as before, or leave it "
                    f"out"
                )


def from_block(
    options: LoaderOptions,
    saved: OrderSpec,
    ours: OrderSpec,
    position: Position,
    has_other_plan: bool,
    state: Mapping[str, Any],
) -> Position:
    """Position to resume from with other blocks than the state's.

    Args:
        options: the loader's.
        saved: the state's order.
        ours: this loader's.
        position: the state's.
        has_other_plan: whether something else plans the steps of a block, such as what samples cost.
        state: of the loader.

    Raises:
        StateMismatch: within a block, whose samples are planned together.
    """
    is_as_before = saved.parts == ours.parts or saved.sources_of != ours.sources_of
    is_as_before = is_as_before and saved.table == ours.table
    has_same_blocks = saved.blocks == ours.blocks and (saved.blocks is None or is_as_before)
    plans_as_before = all(extension.plans_as(state) for extension in options.extensions)
    if has_same_blocks and not has_other_plan and plans_as_before:
        return position
    place, sizes, left = position.position, position.batch_sizes, None
    if any(group.past for group in position.groups.values()) and (
        has_other_plan or saved.table != ours.table
    ):
        raise StateMismatch(
            "the state has samples of a block that a run left to go on with other cells by max_tokens=: "
            "go on with the same cost= until they were given, or load a state from before"
        )
    if saved.blocks is not None:
        count, batch = saved.blocks
        steps = options.step_options(Split(batch, 1, 1), count).steps(position.step_start, sizes)
        block, batch = steps.block(place), steps.at(place).batch
        if block is not None and block.begin != place:
            numbers = block.begin, (block.end - block.begin) // batch, batch
            parts = [extension.left_block(state, position, numbers) for extension in options.extensions]
            left = None if has_other_plan else next((part for part in parts if part is not None), None)
            if left is None:
                raise StateMismatch(
                    f"the state is from within a block of bucketing=, cost= or sizes=, which ends in "
                    f"{(block.end - place) // batch} steps: go on with the same of them, captions, tokenizer "
                    f"and global batch size ({batch}) until then, with as many ranks if sources='rank', with "
                    f"cells of as many rows if sizes= (microbatch=, else batch_size), or resume from a state "
                    f"between two blocks"
                )
            groups = {
                number: group._replace(past=(*group.past, left)) for number, group in position.groups.items()
            }
            position = replace(position, groups=groups)
    if has_same_blocks and left is None:
        return position
    events = [event for event in position.events if event.kind != BATCH_SIZE]
    weights = of_kind(events, WEIGHTS)
    if weights and weights[-1].position > place:  # they waited for the block's end
        events = [*(event for event in events if event.kind != WEIGHTS), weights[-1]._replace(position=place)]
    for size in sizes[-1:]:
        batch = size.value["batch"]
        events.append(new_batch_size(place, batch, options.block_steps(batch) or 1))
    return replace(position, blocks_from=place, events=tuple(events))


def of_ranks(options: LoaderOptions, topology: Topology, position: Position) -> Position:
    """Position to resume from with another batch size than the state's, which replaces those that were set.

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


def has_more_shards(options: LoaderOptions, saved: OrderSpec, moved: Mapping[str, str]) -> bool:
    """True if the sources are the state's, moved or not, with shards appended."""
    counts = [len(source.urls) for source in options.sources]
    return (
        len(saved.shards) == len(counts)
        and all(before <= now for before, now in zip(saved.shards, counts, strict=True))
        and data_digest(options, moved, saved.shards) == saved.data
    )


def _checksum(state: Mapping[str, Any]) -> str:
    """Checksum of all else in a state, also after JSON or YAML. It finds damage; it isn't a signature."""
    content = {name: value for name, value in state.items() if name != "checksum"}
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def _check_intact(state: Any) -> None:
    """Refuse anything but a state of a known format, unaltered."""
    if not isinstance(state, Mapping) or "streamload_state" not in state:
        raise StateMismatch(f"not a state of a loader, but a {type(state).__name__}")
    version = state["streamload_state"]
    if version != FORMAT:
        is_shown = isinstance(version, int) and abs(version) < _MOST
        shown = version if is_shown else f"of type {type(version).__name__}"
        raise StateMismatch(f"a state of format {shown}; this version of streamload reads {FORMAT}")
    if state.get("checksum") != _checksum(state):
        raise StateMismatch(
            "not a valid state of a loader: it was altered or damaged after it was saved (its checksum "
            "doesn't match). Give what state_dict() returned; options go to make_loader"
        )


def _joined(states: Sequence[Mapping[str, Any]], by_rank: Collection[str]) -> dict[str, Any]:
    joined = {**states[0], "at": {}}
    by_rank = [name for name in by_rank if name in joined]
    joined |= {name: {} for name in by_rank}
    for rank_state in states:
        compared = joined.keys() - {"at", "checksum", RUN, FINGERPRINT, LEFT_OUT, *by_rank, *_COUNTS}
        if other := sorted(name for name in compared if rank_state.get(name) != joined[name]):
            raise StateMismatch(
                f"the states are not of one moment of one run: they differ in {', '.join(other)}"
            )
        joined["at"] = {**rank_state["at"], **joined["at"]}
        if LEFT_OUT in rank_state:
            joined[LEFT_OUT] = _most_left_out(joined.get(LEFT_OUT, {}), rank_state[LEFT_OUT])
        for name in by_rank:
            joined[name] |= rank_state[name]
        if RUN in rank_state:
            joined.setdefault(RUN, rank_state[RUN])
    return joined


def _left_out_to_json(left_out: LeftOutOfGroups) -> dict[str, dict[str, int]]:
    return {str(group): dict(tally) for group, tally in sorted(left_out.items())}


def _most_left_out(joined: Mapping[str, Any], of_rank: Mapping[str, Any]) -> dict[str, Any]:
    """Join what two ranks know: of another rank's groups one may know less, and counts only grow."""
    return {
        group: dict(Counter(joined.get(group, {})) | Counter(of_rank.get(group, {})))
        for group in {**joined, **of_rank}
    }


def _order_in(state: Mapping[str, Any]) -> OrderSpec:
    sources = tuple(
        (str(name), _whole_number(lanes, 1, WIDEST_LANES), _whole_number(window, 0, WIDEST_WINDOW))
        for name, lanes, window in state["sources"]
    )
    opens_slowly = tuple(bool(is_slow) for is_slow in state["opens_slowly"])
    if len(opens_slowly) != len(sources):
        raise OptionError(f"opens_slowly of {len(opens_slowly)} sources, not of {len(sources)}")
    return OrderSpec(
        str(state["data"]),
        tuple(str(part) for part in state["choice"]),
        bool(state["train"]),
        int(state["seed"]),
        _whole_number(state["groups"], 1),
        sources,
        opens_slowly,
        tuple(_whole_number(count) for count in state["shards"]),
        None if state["sizes"] is None else str(state["sizes"]),
        bool(state["fitted"]),
        None if state.get("blocks") is None else _blocks_in(state["blocks"]),
        None if state.get("table") is None else str(state["table"]),
        _whole_number(state.get("multiple", 1), 1, WIDEST_MULTIPLE),
        *_parts_in(state.get("parts", ("mixed", 0))),
        tuple((float(weight), float(floor)) for weight, floor in state.get("given", ())),
    )


def _blocks_in(value: Any) -> tuple[int, int]:
    steps, batch = (_whole_number(number, 1) for number in value)
    return steps, batch


def _parts_in(value: Any) -> tuple[SourcesName, int]:
    sources_of, parts = value
    if sources_of not in get_args(SourcesName):
        raise OptionError(f"parts of a {sources_of!r:.20}")
    return sources_of, _whole_number(parts)


def _position_in(state: Mapping[str, Any], order: OrderSpec) -> Position:
    events = _weights_in(state, len(order.sources))
    groups = {int(number): GroupState.from_json(group) for number, group in state["at"].items()}
    for group in groups.values():
        for (_, lanes, window), source_state in zip(order.sources, group.sources, strict=True):
            if source_state.cursor.skip > min(source_state.cursor.position, most_skipped(lanes, window)):
                raise OptionError(f"a cursor that skips {source_state.cursor.skip} samples")
    epoch, sequence, start, position = (
        _whole_number(state[name]) for name in ("epoch", "sequence", "began", "position")
    )
    blocks_from = _whole_number(state.get("blocks_from", 0), 0, position)
    base, steps = None, 0
    if "batch_sizes" in state:
        sizes = state["batch_sizes"]
        base, steps = _whole_number(sizes["base"], 1), _whole_number(sizes["step"])
        events += _sizes_in(sizes["resizes"], base, position)
    left_out = {
        _whole_number(int(group)): {str(name): _whole_number(count) for name, count in tally.items()}
        for group, tally in state.get(LEFT_OUT, {}).items()
    }
    return Position(
        epoch, sequence, start, position, groups, tuple(events), blocks_from, base, steps, left_out
    )


def _weights_in(state: Mapping[str, Any], sources: int) -> list[Event]:
    """Weight events of a state: it has the shares of each, and the weights of the last one."""
    events = []
    for position, shares in state["changes"]:
        if len(shares) != sources or sum(_whole_number(share) for share in shares) != UNIT:
            raise OptionError(f"shares of {sources} sources that don't add up")
        events.append(new_weights(_whole_number(position), shares))
    weights = tuple(float(weight) for weight in state["weights"])
    if not events or len(weights) != sources or not all(0 <= weight < math.inf for weight in weights):
        raise OptionError(f"not the weights and shares of {sources} sources")
    last = events.pop()
    return [*events, new_weights(last.position, last.value["shares"], weights)]


def _sizes_in(values: Any, base: int, position: int) -> list[Event]:
    events = [
        new_batch_size(_whole_number(start), _whole_number(batch, 1), _whole_number(block, 1))
        for start, batch, block in values
    ]
    if not events:
        raise OptionError("no sizes of steps")
    Steps(Split(base, 1, 1), position, None, events)  # raises where a size changes within a step
    return events


def _whole_number(number: Any, least: int = 0, most: int = _MOST) -> int:
    if type(number) is not int or not least <= number <= most:
        raise OptionError(f"a {type(number).__name__} that is not a whole number from {least} to {most}")
    return number
