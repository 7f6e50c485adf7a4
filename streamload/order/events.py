"""Run events: what holds from a position of the sample sequence on (step E).

One list of them is a run's history: a part of its state, of the messages to workers, the lines of its log of
decisions, and what a replay goes by. The kernel knows two kinds; other kinds are the names of extensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import isfinite
from typing import Any, NamedTuple

from streamload.errors import OptionError

WEIGHTS, BATCH_SIZE = "weights", "batch_size"
"""The kinds of which the last event up to a position holds there."""
UNIT = 1 << 32
"""The sum of the sources' shares."""


class Event(NamedTuple):
    """A change of a run.

    Attributes:
        position: of the first step for which it holds, in global samples of the sequence; no worker of any
            rank has begun this step.
        kind: WEIGHTS, BATCH_SIZE, or the name of an extension.
        value: JSON-able. Of WEIGHTS a dict with the sources' "weights" as given (None: unknown) and their
            "shares" in UNITs; of BATCH_SIZE one with the samples of a step over all ranks, "batch", and the
            steps of a block, "block".
    """

    position: int
    kind: str
    value: Any


def new_weights(position: int, shares: Sequence[int], weights: Sequence[float] | None = None) -> Event:
    """Other shares of the sources, from the first step that begins at or after a position."""
    given = None if weights is None else tuple(weights)
    return Event(position, WEIGHTS, {"weights": given, "shares": tuple(shares)})


def new_batch_size(position: int, batch: int, block: int = 1) -> Event:
    """Another size of steps, from the one on that begins at a position; one does.

    Args:
        position: where that step begins; between two blocks, if steps are planned by block.
        batch: samples of a step over all ranks.
        block: steps of a block.
    """
    return Event(position, BATCH_SIZE, {"batch": batch, "block": block})


def of_kind(events: Iterable[Event], kind: str) -> list[Event]:
    """The events of one kind, in their order."""
    return [event for event in events if event.kind == kind]


def in_effect(events: Sequence[Event], position: int) -> list[Event]:
    """The events that hold from a position on: of each kind the last one up to it, and all later ones."""
    last = {event.kind: event for event in events if event.position <= position}
    return [event for event in events if event.position > position or event is last[event.kind]]


def shares_of(weights: Sequence[float], floors: Sequence[float]) -> tuple[int, ...]:
    """Return weights as shares of UNIT, exactly proportional except for floors and the last unit.

    Args:
        weights: of each source, in any scale; 0 removes a source, if it has no floor.
        floors: the minimum share of all samples, 0 to 1, of each source.

    Raises:
        OptionError: a weight that is negative or not a number, only zero weights, or floors that add up to
            more than 1.
    """
    for kind, values in (("weights", weights), ("floors", floors)):
        if any(not isfinite(value) or value < 0 for value in values):
            raise OptionError(f"{kind} must be numbers from 0, not {list(values)}.")
    if not any(weights):
        raise OptionError(f"weights must not all be 0: {list(weights)} leaves nothing to read.")
    parts, least = [Fraction(weight) for weight in weights], [Fraction(floor) for floor in floors]
    if sum(least) > 1:
        raise OptionError(f"floors must not add up to more than 1, and {list(floors)} do.")
    raised: set[int] = set()
    while True:
        free, total = 1 - sum(least[i] for i in raised), sum(parts) - sum(parts[i] for i in raised)
        shares = [
            least[i] if i in raised else part * free / total if total else Fraction(0)
            for i, part in enumerate(parts)
        ]
        below = {i for i in range(len(parts)) if shares[i] < least[i]}
        if not below:
            break
        raised |= below
    if sum(shares) < 1:  # all sources with weight are at their floors
        shares = [share / sum(shares) for share in shares]
    whole = [int(share * UNIT) for share in shares]
    rests = sorted(range(len(whole)), key=lambda i: (whole[i] - shares[i] * UNIT, i))
    for i in rests[: UNIT - sum(whole)]:
        whole[i] += 1
    return tuple(whole)


def shares_at(events: Iterable[Event], position: int) -> tuple[int, ...]:
    """The shares of the sources at a position, in UNITs; before the first event, those that it sets."""
    changes = of_kind(events, WEIGHTS)
    shares: tuple[int, ...] = changes[0].value["shares"]
    for change in changes[1:]:
        if change.position > position:
            break
        shares = change.value["shares"]
    return shares


def joined(earlier: Sequence[Event], later: Sequence[Event]) -> list[Event]:
    """Events with later ones: these replace what would hold of their kind from their first position on."""
    first: dict[str, int] = {}
    for event in later:
        first.setdefault(event.kind, event.position)
    kept = [event for event in earlier if event.kind not in first or event.position < first[event.kind]]
    return [*kept, *later]


def weights_to_json(events: Iterable[Event]) -> dict[str, Any]:
    """The weights as set last, and the shares from each position on, as in states and logs of decisions."""
    changes = of_kind(events, WEIGHTS)
    return {
        "changes": [[change.position, list(change.value["shares"])] for change in changes],
        "weights": list(changes[-1].value["weights"]),
    }


def sizes_to_json(events: Iterable[Event]) -> list[list[int]]:
    """The sizes of steps from each position on, as in states and logs of decisions."""
    sizes = of_kind(events, BATCH_SIZE)
    return [[size.position, size.value["batch"], size.value["block"]] for size in sizes]


def from_json(values: Iterable[Sequence[Any]]) -> list[Event]:
    """Events from their JSON form: [position, kind, value] each."""
    events = [Event(*value) for value in values]
    return [
        new_weights(event.position, event.value["shares"], event.value["weights"])
        if event.kind == WEIGHTS
        else event
        for event in events
    ]
