"""Batches, states and cache directories are those of the record; see tests/oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import streamload
from tests.oracle import caches, record
from tests.oracle.record import Difference, as_change, differences, digest, expected
from tests.oracle.replay import recorded_cases, replay
from tests.support.turns import third

pytestmark = pytest.mark.timeout(600)

PARTS = 3
"""So that no processor is left with the longest of all tests at the end."""


def test_some_of_all_cases_give_what_is_recorded():
    assert [str(difference) for difference in replay(every=20)] == []


@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_whose_turn_it_is_give_what_is_recorded(part: int):
    names = [*caches.KINDS, *third([*recorded_cases()])]
    assert [str(difference) for difference in replay(names[part::PARTS], jobs=1)] == []


def test_every_kind_of_option_is_in_the_record():
    cases = recorded_cases().values()
    assert len(cases) >= 200
    options = {
        f"{name}.{inner}" if isinstance(value, dict) else name
        for case in cases
        for name, value in case.options.items()
        for inner in (value if isinstance(value, dict) else [""])
    }
    assert options >= {
        "batches.bucketing", "batches.max_tokens", "batches.microbatch", "batches.sample_weight",
        "batches.text_padding", "cache.shared", "features.means", "images.dtype",
        "images.patches", "images.prepare", "mixing", "num_batches", "num_samples", "order.decisions",
        "order.groups", "order.lanes", "order.objective", "preprocess", "shards.facts", "shards.keep",
        "shards.label_key", "shards.repeat", "shuffle", "workers.collate", "workers.map_sample",
    }  # fmt: skip
    assert {method for case in cases for _, method, _ in case.calls} == {"set_weights", "set_batch_size"}
    assert {layout.ranks for case in cases for layout in case.layouts} == {1, 2, 3, 6}
    assert {layout.workers for case in cases for layout in case.layouts} == {0, 1, 2}
    assert {source["way"] for case in cases for source in case.sources} == {"local", "http", "pipe"}


def _swap_rows(batch: dict[str, Any]) -> None:
    for value in batch.values():
        if isinstance(value, list):
            value[0], value[1] = value[1], value[0]
        else:
            value[[0, 1]] = value[[1, 0]]


def _change_a_pixel(batch: dict[str, Any]) -> None:
    batch["image"][0, 0, 0, 0] += 1


def _change_a_weight(batch: dict[str, Any]) -> None:
    batch["weight"][0] *= 1 + 1e-6


def _smallest(is_wanted: Callable[[Any], bool]) -> str:
    """The name of a case with few processes and steps."""
    cases = [
        case
        for case in recorded_cases().values()
        if case.options["output"] == "dict"
        and case.options.get("with_keys")
        and case.options["train"]
        and not {"features", "mixing", "workers"} & case.options.keys()
        and "patches" not in case.options.get("images", {})
        and case.stop > 2
        and is_wanted(case)
    ]
    return min(cases, key=lambda case: [(layout.workers, layout.ranks) for layout in case.layouts]).name


@pytest.mark.parametrize(
    ("change", "value", "is_wanted"),
    [
        (_swap_rows, "keys", lambda case: True),
        (_change_a_pixel, "pixels", lambda case: True),
        pytest.param(
            *(_change_a_weight, "weights"),
            lambda case: "sample_weight" in case.options.get("batches", {}),
            marks=pytest.mark.deep,
        ),
    ],
)
def test_a_change_of_one_row_of_one_batch_is_found(
    change: Callable[[dict[str, Any]], None],
    value: str,
    is_wanted: Callable[[Any], bool],
    monkeypatch: pytest.MonkeyPatch,
):
    plain = streamload.Loader.__iter__

    def changed(loader: streamload.Loader) -> Any:
        for number, batch in enumerate(plain(loader)):
            if number == 1:
                change(batch)
            yield batch

    monkeypatch.setattr(streamload.Loader, "__iter__", changed)
    (first, *_) = [d for d in replay([_smallest(is_wanted)]) if d.value == value]
    assert "the first is step 1" in str(first)


@pytest.mark.parametrize(
    "field",
    ["position", *(pytest.param(name, marks=pytest.mark.deep) for name in ("seed", "weights", "fitted"))],
)
def test_a_change_of_one_field_of_a_state_is_found(field: str, monkeypatch: pytest.MonkeyPatch):
    plain = streamload.Loader.state_dict

    def changed(loader: streamload.Loader) -> dict[str, Any]:
        state = plain(loader)
        return {**state, field: [state[field]]}

    monkeypatch.setattr(streamload.Loader, "state_dict", changed)
    (found,) = [*replay([_smallest(lambda case: True)])]
    assert field in str(found) or "StateMismatch" in str(found)


NUMBERS = {"cut": 1}
RECORDED = {"a": {"keys": "aaaaaaaabbbbbbbb", "numbers": NUMBERS, "states": [{"position": 4}]}}


def test_a_change_that_is_meant_is_expected_from_then_on():
    new = {
        "keys": "aaaaaaaacccccccc",
        "numbers": NUMBERS,
        "states": [{"position": 5}],
        f"{record.OLD}keys": "bbbbbbbb",
    }
    found = differences("a", expected(RECORDED, [])["a"], new, record.environment())
    assert [(difference.value, str(difference)) for difference in found] == [
        ("keys", "a: keys: 1 of 2 steps differ, the first is step 1"),
        ("states", "a: states: [0].position was 4, is 5"),
    ]
    change = as_change(found, "a test")
    assert change["cases"]["a"]["keys"] == {"old": digest("aaaaaaaabbbbbbbb"), "new": "aaaaaaaacccccccc"}
    assert differences("a", expected(RECORDED, [change])["a"], new, record.environment()) == []
    with pytest.raises(ValueError, match="a: keys: before it was another value"):
        expected(RECORDED, [change, change])


def test_what_follows_an_old_state_is_what_followed_it_when_it_was_saved():
    came = {**RECORDED["a"], f"{record.OLD}keys": "cccccccc"}
    found = differences("a", expected(RECORDED, [])["a"], came, record.environment())
    assert found == [Difference("a", f"{record.OLD}keys", "bbbbbbbb", "cccccccc")]


def test_where_images_are_decoded_by_other_libraries_only_what_they_have_no_part_in_is_compared():
    old = {**RECORDED["a"], "pixels": "aaaaaaaabbbbbbbb"}
    came = {"keys": "aaaaaaaacccccccc", "pixels": "ddddddddeeeeeeee"}
    found = differences("a", old, came, {"pillow": "another"})
    assert [difference.value for difference in found] == ["keys"]
