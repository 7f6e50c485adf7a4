"""Where a rank is: the epoch of the training loop and the place in the sequence; and how a state tells it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import xxhash

from streamload.errors import OptionError, StateMismatch
from streamload.order.group import most_skipped
from streamload.order.mixing import UNIT, Change, in_effect
from streamload.order.plan import WIDEST_LANES, WIDEST_WINDOW
from streamload.worker.messages import GroupState, changes_from

FORMAT = 3
_WITHOUT_CHECKSUM = 2
"""The format before: without the numbers of shards, the digest of sizes, openings and the checksum."""
BAD_SAMPLES, BAD_SHARDS = "bad_samples", "bad_shards"
_COUNTED = {BAD_SAMPLES: 3, BAD_SHARDS: 2}
"""What a rank has counted (seen() of its checks), as so many numbers; of one moment, any rank's will do."""
_NOT_A_STATE = (
    AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError
)  # fmt: skip
"""What reading a value raises that isn't of the types and sizes that a state has."""
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class Position:
    """Behind the last batch that was handed out.

    Attributes:
        epoch: of the training loop.
        sequence: the epoch in which the sequence began; others may go on in it.
        began: the position at which the epoch began.
        position: how many samples of the sequence, over all ranks, lie before the next step.
        groups: of each group that this rank knows of, where it is; none at the beginning of a sequence.
        changes: of the sources' shares, from the position on.
        weights: of the sources, those that were set last; the last change is by these.
    """

    epoch: int
    sequence: int
    began: int
    position: int
    groups: Mapping[int, GroupState]
    changes: tuple[Change, ...]
    weights: tuple[float, ...]

    def behind(self, position: int, groups: Mapping[int, GroupState]) -> Position:
        """The place behind a step that ends at a position."""
        return replace(
            self, position=position, groups=groups, changes=tuple(in_effect(self.changes, position))
        )

    def next_epoch(self) -> Position:
        """The beginning of an epoch that goes on where this one stopped."""
        return replace(self, epoch=self.epoch + 1, began=self.position)

    def moved(self) -> Position:
        """The same place in shards that were moved: each is known by its index, not by its version.

        Raises:
            StateMismatch: the state doesn't know the index of one.
        """
        groups = {}
        for number, group in self.groups.items():
            sources = []
            for source in group.sources:
                if any(begun.samples and not begun.entries for begun in source.begun.values()):
                    raise StateMismatch(
                        "moved=: the state is of an earlier version of streamload, which kept nothing by "
                        "which shards in another place are known to be the same"
                    )
                known = {shard: begun._replace(version=0) for shard, begun in source.begun.items()}
                sources.append(source._replace(begun=known))
            groups[number] = group._replace(sources=tuple(sources))
        return replace(self, groups=groups)

    def anew(self) -> Position:
        """The beginning of the same epoch in a sequence of its own."""
        changes = tuple(
            change._replace(position=max(0, change.position - self.position)) for change in self.changes
        )
        return Position(self.epoch, self.epoch, 0, 0, {}, changes, self.weights)


class Weights(NamedTuple):
    """What the sources weigh, as it was given, and the shares that this comes to."""

    given: tuple[float, ...]
    shares: tuple[int, ...]


class EpochTracker:
    """Which epoch a training loop begins next, and where.

    Args:
        goes_on: whether an epoch begins where the last one stopped.

    Attributes:
        epoch: the one that begins next.
        weights: of the sources, those that were set last; None before any is known.
    """

    def __init__(self, goes_on: bool):
        self.epoch = 0
        self.weights: Weights | None = None
        self._goes_on = goes_on
        self._place: Position | None = None
        self._untouched = False  # no batch was taken since the place was loaded, or its epoch began
        self._ran_out = False

    def begin(self) -> Position:
        """Begin the next epoch; it counts as begun when its first batch is taken, or when it has none."""
        self._place = self.next()
        self._untouched, self._ran_out = True, False
        self.epoch = self._place.epoch
        return self._place

    def next(self) -> Position:
        """Where the next epoch would begin: in one without a batch taken yet, after the last one, or anew."""
        last = self._place
        if last is not None and self._untouched and self.epoch == last.epoch:
            return last
        if last is not None and self._goes_on and self.epoch == last.epoch + 1:
            return last.next_epoch()
        assert self.weights is not None
        given, shares = self.weights
        return Position(self.epoch, self.epoch, 0, 0, {}, (Change(0, shares),), given)

    def now(self) -> Position:
        """What a state tells: behind the last batch of an epoch, or where the next begins if that is over."""
        place = self._place
        if place is None or self._ran_out or (self._untouched and self.epoch != place.epoch):
            return self.next()
        return place

    def take(self, position: int, groups: Mapping[int, GroupState]) -> None:
        """A batch was handed out, whose step ends at a position."""
        self._touch()
        assert self._place is not None
        self._place = self._place.behind(position, groups)

    def run_out(self) -> None:
        """The epoch was given to its end."""
        self._touch()
        self._ran_out = True

    def load(self, place: Position) -> None:
        """Go on from a place."""
        self._place, self._untouched, self._ran_out = place, True, False
        self.epoch, self.weights = place.epoch, Weights(place.weights, place.changes[-1].shares)

    def change(self, weights: Weights, position: int) -> list[Change]:
        """New weights from a position on; the changes that count from here on."""
        self.weights = weights
        if self._place is None:
            return [Change(0, weights.shares)]
        kept = [change for change in self._place.changes if change.position < position]
        changes = (*kept, Change(position, weights.shares))
        self._place = replace(self._place, changes=changes, weights=weights.given)
        return list(changes)

    def _touch(self) -> None:
        if self._untouched:
            self._untouched = False
            if self._place is not None and self.epoch == self._place.epoch:
                self.epoch += 1


@dataclass(frozen=True, slots=True)
class OrderSpec:
    """What the order of a run depends on, and is fixed with its first state.

    Attributes:
        data: a digest of the shards, source by source.
        choice: which members are image, caption and label.
        train: whether it is shuffled.
        seed: of the run.
        groups: how many sequences the samples are dealt into.
        sources: of each source its name, its lanes and its window.
        opens_after: of each source, after how many samples of a run's first pass the window opens; 0: at once
            (local files); None: slowly, as all did in states of format 2.
        shards: how many shards each source has; empty in states of format 2.
        sizes: a digest of the samples of each shard, by which groups were cut; "" for a single group, None
            where it isn't known.
        fitted: whether these are settled. Where they were not given they are, at the latest, when the first
            epoch begins: a cache with too little room for them cuts them.
    """

    data: str
    choice: tuple[str, ...]
    train: bool
    seed: int
    groups: int
    sources: tuple[tuple[str, int, int], ...]
    opens_after: tuple[int | None, ...]
    shards: tuple[int, ...] = ()
    sizes: str | None = None
    fitted: bool = True


def to_state(order: OrderSpec, place: Position, counted: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """A state: JSON-able, of a size that doesn't depend on that of the data set."""
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
        "opens_after": list(order.opens_after),
        "fitted": order.fitted,
        "epoch": place.epoch,
        "sequence": place.sequence,
        "began": place.began,
        "position": place.position,
        "changes": [[change.position, list(change.shares)] for change in place.changes],
        "weights": list(place.weights),
        "at": {str(number): group.to_json() for number, group in sorted(place.groups.items())},
        **{name: list(numbers) for name, numbers in counted.items()},
    }
    return {**state, "checksum": _checksum(state)}


def _checksum(state: Mapping[str, Any]) -> str:
    """Of all of a state, whatever JSON or YAML it went through. It finds damage; it isn't a signature."""
    rest = {name: value for name, value in state.items() if name != "checksum"}
    return xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True).encode())


def from_state(state: Any) -> tuple[OrderSpec, Position]:
    """The order and place that a state, or a list of states of one moment, tells of.

    Raises:
        StateMismatch: it is no state of a loader, of another format, or altered; or they are of different
            moments.
    """
    states = list(state) if isinstance(state, Sequence) and not isinstance(state, str) else [state]
    if not states:
        raise StateMismatch("an empty list of states: give what state_dict() of each rank returned")
    try:
        for one in states:
            _check_whole(one)
        merged = _merged(states)
        counted_of(merged)
        order = _order(merged)
        return order, _place(merged, order)
    except StateMismatch:
        raise
    except _NOT_A_STATE as exc:
        raise StateMismatch(f"not a whole state of a loader: {type(exc).__name__}: {exc!s:.200}") from None


def _check_whole(state: Any) -> None:
    """Refuse what isn't a state of a format that is known, as it was saved."""
    if not isinstance(state, Mapping) or "streamload_state" not in state:
        raise StateMismatch(f"not a state of a loader, but a {type(state).__name__}")
    form = state["streamload_state"]
    if form not in (FORMAT, _WITHOUT_CHECKSUM):
        said = form if isinstance(form, int) and abs(form) < _MOST else f"of type {type(form).__name__}"
        raise StateMismatch(
            f"a state of format {said}; this version of streamload reads {_WITHOUT_CHECKSUM} and {FORMAT}"
        )
    has_checksum = form == FORMAT or "checksum" in state
    if has_checksum and state.get("checksum") != _checksum(state):
        raise StateMismatch(
            "not a whole state of a loader: it was altered, or damaged, after it was saved (its checksum is "
            "of other content). Give what state_dict() returned; other options go to make_loader"
        )


def _merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of those of several ranks."""
    merged = {**states[0], "at": {}}
    for one in states:
        compared = merged.keys() - {"at", "checksum", *_COUNTED}
        if other := sorted(name for name in compared if one.get(name) != merged[name]):
            raise StateMismatch(
                f"the states are not of one moment of one run: they differ in {', '.join(other)}"
            )
        merged["at"] = {**one["at"], **merged["at"]}
    return merged


def counted_of(state: Any) -> dict[str, list[int]]:
    """What was counted before a state, or a list of states of one moment; zeros where it says nothing.

    Raises:
        StateMismatch: it is something else.
    """
    one = state if isinstance(state, Mapping) else state[0]
    try:
        found = {
            name: [_whole(number) for number in one.get(name, [0] * count)]
            for name, count in _COUNTED.items()
        }
    except (TypeError, ValueError) as exc:
        raise StateMismatch(f"not a whole state of a loader: {exc!r:.200}") from exc
    for name, count in _COUNTED.items():
        if len(found[name]) != count:
            raise StateMismatch(f"not a whole state of a loader: {len(found[name])} numbers as {name}")
    return found


def _order(state: Mapping[str, Any]) -> OrderSpec:
    sources = tuple(
        (str(name), _whole(lanes, 1, WIDEST_LANES), _whole(window, 0, WIDEST_WINDOW))
        for name, lanes, window in state["sources"]
    )
    sizes = state.get("sizes")
    opens_after = tuple(
        None if after is None else _whole(after) for after in state.get("opens_after", [None] * len(sources))
    )
    if len(opens_after) != len(sources):
        raise OptionError(f"openings of {len(opens_after)} sources, not of {len(sources)}")
    return OrderSpec(
        str(state["data"]),
        tuple(str(part) for part in state["choice"]),
        bool(state["train"]),
        int(state["seed"]),
        _whole(state["groups"], 1),
        sources,
        opens_after,
        tuple(_whole(count) for count in state.get("shards", ())),
        None if sizes is None else str(sizes),
        bool(state.get("fitted", True)),
    )


def _place(state: Mapping[str, Any], order: OrderSpec) -> Position:
    changes = tuple(changes_from(state["changes"]))
    sources = len(order.sources)
    for position, shares in changes:
        _whole(position)
        if len(shares) != sources or sum(_whole(share) for share in shares) != UNIT:
            raise OptionError(f"shares of {sources} sources that don't add up")
    weights = tuple(float(weight) for weight in state["weights"])
    if not changes or len(weights) != sources or not all(0 <= weight < math.inf for weight in weights):
        raise OptionError(f"not the weights and shares of {sources} sources")
    groups = {int(number): GroupState.from_json(group) for number, group in state["at"].items()}
    for group in groups.values():
        for (_, lanes, window), own in zip(order.sources, group.sources, strict=True):
            if own.cursor.skip > min(own.cursor.position, most_skipped(lanes, window)):
                raise OptionError(f"a cursor that skips {own.cursor.skip} samples")
    epoch, sequence, began, position = (
        _whole(state[name]) for name in ("epoch", "sequence", "began", "position")
    )
    return Position(epoch, sequence, began, position, groups, changes, weights)


def _whole(number: Any, least: int = 0, most: int = _MOST) -> int:
    if type(number) is not int or not least <= number <= most:
        raise OptionError(f"a {type(number).__name__} that is not a whole number from {least} to {most}")
    return number


def check_fits(saved: OrderSpec, ours: OrderSpec, place: Position, needed: set[int]) -> None:
    """Refuse a state that isn't of this loader's run.

    Args:
        saved: of the state.
        ours: of this loader.
        place: of the state.
        needed: the groups that this rank reads.

    Raises:
        StateMismatch: it says what differs.
    """
    for what, before, now in (
        ("train", saved.train, ours.train),
        ("seed", saved.seed, ours.seed),
        ("the names of the sources", [name for name, *_ in saved.sources], [n for n, *_ in ours.sources]),
        ("choice of image_key, text_key and label_key", saved.choice, ours.choice),
    ):
        if before != now:
            raise StateMismatch(f"the state was saved with another {what}: {before}, and this is {now}")
    if saved.data != ours.data:
        raise StateMismatch(
            "the state is of another data set: the URLs of its shards are others, or in another order. If "
            "the same shards are in another place now, say moved={old: new}, what their URLs begin with"
        )
    if place.position and None not in (saved.sizes, ours.sizes) and saved.sizes != ours.sizes:
        raise StateMismatch(
            f"sizes.json beside the shards was changed, added or removed since the state was saved: by its "
            f"counts the {saved.groups} groups would be cut differently in the middle of a pass. Put it back "
            f"as it was, or load a state of an epoch's beginning"
        )
    if place.position and (missing := sorted(needed - place.groups.keys())):
        raise StateMismatch(
            f"the state is incomplete: it lacks groups {missing} of {saved.groups}. A rank knows only its "
            f"own node's: save streamload.gather_state(loader), or give the states of all nodes as a list"
        )
