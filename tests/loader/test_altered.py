"""States that were altered or damaged: refused as such, whatever they hold, before anything is read."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamload
from streamload import Workers
from streamload.loader.state import from_state, sealed
from streamload.testing.shards import write_shards
from tests.support import flat


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of one pass, of an evaluation, of several groups and of several sources; at a border and behind it."""
    place = tmp_path_factory.mktemp("states")
    paths = [str(path) for path in write_shards(place / "data", [30, 8, 50, 21], seed=2)]
    sources = [streamload.Source(paths[:2], 3, "one"), streamload.Source(paths[2:], 1, "other", floor=0.3)]
    found = []
    for urls, options in (
        (paths, {}),
        (paths, {"train": False}),
        (paths, {"groups": 3, "endless": True}),
        (sources, {"num_batches": 7}),
    ):
        layout: dict[str, Any] = {"num_workers": 0, "batch_size": 4, **options}
        with flat.make_loader(
            urls, workers=Workers(map_sample=only_key), cache_dir=place / "cache", cache_size="1GB", **layout
        ) as loader:
            found.append(loader.state_dict())
            for number, _ in enumerate(loader):
                if number == 5:
                    break
            found.append(loader.state_dict())
    return [json.loads(json.dumps(state)) for state in found]


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


NASTY = st.one_of(
    st.sampled_from(
        [10**400, 10**6000, -(10**30), 2**63, 2**64, -1, 0, 1, True, None, float("nan"), 1e308, -0.0]
    ),
    st.sampled_from(
        [float("inf"), "", "0", "9" * 6000, b"bytes", {}, [], [[]], {"0": {}}, 2j, object, {1, 2}]
    ),
    st.builds(nested, st.sampled_from([100, 20_000])),
    st.integers(-(2**70), 2**70),
    st.recursive(st.none() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=4),
    st.just([0] * 10_000),
)


def places_of(value: Any) -> list[tuple[Any, Any]]:
    """Each container in a state with each of its keys."""
    if not isinstance(value, (dict, list)):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [found for key in keys for found in places_of(value[key])]


def alter(state: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """The state with one value changed, left out, doubled, or added."""
    altered = copy.deepcopy(state)
    container, key = data.draw(st.sampled_from(places_of(altered)))
    kind = data.draw(st.sampled_from(["change", "change", "shift", "leave out", "add"]))
    if kind == "change":
        container[key] = data.draw(NASTY)
    elif kind == "shift" and type(container[key]) is int:
        container[key] += data.draw(st.sampled_from([1, -1, 7, 1 << 20]))
    elif kind == "leave out":
        del container[key]
    elif isinstance(container, dict):
        container[f"{key}0"] = container[key]
    else:
        container.append(container[key])
    return altered


def text_of(state: Any) -> str | None:
    try:
        return json.dumps(state, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_an_altered_state_is_refused(states: list[dict[str, Any]], data: st.DataObject) -> None:
    state = data.draw(st.sampled_from(states))
    altered = alter(state, data)
    if text_of(altered) == text_of(state):
        from_state(altered)
        return
    with pytest.raises(streamload.errors.StateMismatch):
        from_state(altered)
    with pytest.raises(streamload.errors.StateMismatch):
        from_state([state, altered])


def resealed(state: dict[str, Any]) -> dict[str, Any]:
    """A state as if it had been saved like that; as it is if it can't be saved."""
    try:
        return sealed(state)
    except (OverflowError, RecursionError, TypeError, ValueError):
        return state


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_an_altered_state_whose_checksum_holds_is_refused_or_within_bounds(
    states: list[dict[str, Any]], data: st.DataObject
) -> None:
    """What isn't seen is at least nothing that a run would follow for hours, or that has no room."""
    altered = alter(data.draw(st.sampled_from(states)), data)
    try:
        order, place = from_state(resealed(altered))
    except streamload.errors.StateMismatch:
        return
    for group in place.groups.values():
        for (_, lanes, window), (cursor, _) in zip(order.sources, group.sources, strict=True):
            assert cursor.skip <= 2 * (window + lanes) + 2_000
            assert cursor.lanes is None or len(cursor.lanes.lanes) <= 1 << 20
            assert sum(samples for _, samples in cursor.done) <= cursor.position


def test_states_are_read_as_they_were_saved(states: list[dict[str, Any]]) -> None:
    for state in states:
        assert from_state(state)[1] == from_state([state, state])[1]
