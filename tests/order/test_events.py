"""Run events: what holds at a position, however the list was made, cut or sent."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from streamload.order.events import (
    BATCH_SIZE,
    UNIT,
    WEIGHTS,
    Event,
    from_json,
    in_effect,
    joined,
    new_batch_size,
    new_weights,
    of_kind,
    shares_at,
)


def set_in_turn(drawn: list[tuple[int, str]]) -> tuple[list[Event], list[Event]]:
    """Events that are set one after the other: the list that they make, and all of them as they were set."""
    events = history = [new_weights(0, (UNIT, 0))]
    for number, (position, kind) in enumerate(drawn, 1):
        event = (
            new_batch_size(position, number)
            if kind == BATCH_SIZE
            else new_weights(position, (UNIT - number, number))
        )
        events, history = joined(events, [event]), [*history, event]
    return events, history


def holds(history: list[Event], kind: str, position: int) -> Event | None:
    """The event of a kind that was set last of those up to a position."""
    return next(
        (event for event in reversed(history) if event.kind == kind and event.position <= position), None
    )


DRAWN = st.lists(st.tuples(st.integers(0, 20), st.sampled_from([WEIGHTS, BATCH_SIZE])), max_size=8)


@given(DRAWN)
def test_at_each_position_the_event_holds_that_was_set_last_up_to_it(drawn: list[tuple[int, str]]) -> None:
    events, history = set_in_turn(drawn)
    for position in range(25):
        expected = holds(history, WEIGHTS, position)
        assert expected is not None
        assert shares_at(events, position) == expected.value["shares"]
        assert (of_kind([e for e in events if e.position <= position], BATCH_SIZE) or [None])[-1] == holds(
            history, BATCH_SIZE, position
        )


@given(DRAWN, st.integers(0, 20))
def test_what_is_over_can_be_left_out(drawn: list[tuple[int, str]], cut: int) -> None:
    events, _ = set_in_turn(drawn)
    kept = in_effect(events, cut)
    assert all(shares_at(kept, position) == shares_at(events, position) for position in range(cut, 25))
    assert len(kept) <= len(events)
    assert in_effect(kept, cut) == kept
    late = joined(events[:1], kept)  # a worker that has heard of nothing but the epoch's start
    assert all(shares_at(late, position) == shares_at(events, position) for position in range(cut, 25))


def test_an_event_replaces_those_of_its_kind_from_its_own_position_on() -> None:
    sizes = [new_batch_size(position, 2) for position in (4, 8, 12)]
    assert joined(sizes, [new_batch_size(8, 6)]) == [sizes[0], new_batch_size(8, 6)]
    assert joined(sizes, [new_weights(4, (UNIT,))]) == [*sizes, new_weights(4, (UNIT,))]


def test_events_of_extensions_add_up_and_replace_nothing() -> None:
    first, second = Event(8, "mine", 1), Event(4, "mine", 2)
    assert joined([new_weights(0, (UNIT,)), first], [new_batch_size(4, 8)]) == [
        new_weights(0, (UNIT,)),
        first,
        new_batch_size(4, 8),
    ]
    assert of_kind([first, second], "mine") == [first, second]


def test_events_go_through_json() -> None:
    events = [new_weights(0, (UNIT, 0), (1.0, 0.0)), new_batch_size(8, 4, 2), Event(9, "mine", {"a": [1]})]
    assert from_json(json.loads(json.dumps(events))) == events
