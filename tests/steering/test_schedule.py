"""Schedule and Target: weights by step, and by the distance from a reference loss."""

import json

import numpy as np
import pytest

from streamload.errors import OptionError
from streamload.mixing import Schedule, Target
from streamload.steering import Signal, SourceSummary, Summary, as_policy


def at(step, **given):
    return Summary(step, 1_000, tuple(SourceSummary(name, 1, 0.5, **given) for name in "ab"))


def test_a_schedule_gives_its_weights_once_at_their_steps():
    schedule, memory, found = Schedule({100: {"a": 3, "b": 1}, 250: {"b": 0}}), None, {}
    assert schedule.every == 50
    for step in range(50, 400, 50):
        weights, memory, *_ = schedule.decide(at(step), json.loads(json.dumps(memory)))
        found[step] = weights
    assert {step: weights for step, weights in found.items() if weights} == {
        100: {"a": 3, "b": 1},
        250: {"b": 0},
    }


def test_changes_that_fell_due_together_are_joined():
    schedule = Schedule({3: {"a": 3, "b": 1}, 5: {"b": 0}})
    assert schedule.every == 10
    assert schedule.decide(at(10), None).weights == {"a": 3, "b": 0}


def test_a_schedule_is_read_from_a_file(tmp_path):
    path = tmp_path / "weights.json"
    path.write_text('{"1000": {"a": 1}, "5000": {"a": 0.5, "b": 2}}')
    assert Schedule.read(path) == Schedule({1000: {"a": 1}, 5000: {"a": 0.5, "b": 2}})
    for text in ("[]", "{", '{"soon": {"a": 1}}', '{"0": {"a": 1}}', '{"5": 3}', '{"5": {"a": -1}}'):
        path.write_text(text)
        with pytest.raises(OptionError, match=r"expected|begins"):
            Schedule.read(path)
    with pytest.raises(OptionError, match="No such file"):
        Schedule.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    "wrong",
    [{}, {0: {"a": 1}}, {-1: {"a": 1}}, {1.5: {"a": 1}}, {5: {"a": "1"}}, {5: {"a": float("nan")}}, {5: 1}],
)  # fmt: skip
def test_a_schedule_that_makes_no_sense_fails(wrong):
    with pytest.raises(OptionError, match="Schedule"):
        Schedule(wrong)


@pytest.mark.parametrize("policy", [Schedule({5: {"c": 1}}), Target({"c": 1.0})])
def test_a_source_that_is_not_there_fails_at_once(policy):
    with pytest.raises(OptionError, match="'c'; there are: a, b"):
        as_policy(policy, ["a", "b"])


def steered(target, losses, steps=4_000, passes=None, each=lambda step: None):
    """The shares after a run in which the losses stay as they are."""
    memory, shares = None, np.full(len(losses), 1 / len(losses))
    for step in range(target.every, steps + 1, target.every):
        sources = tuple(
            SourceSummary(name, 1, share, samples=1_000, total_samples=10 * step, passes=passes,
                          losses=(Signal(500, 500 * loss, 500 * (loss * loss + 1)),) * 8,
                          evaluation=each(step))
            for name, share, loss in zip("abcd", shares, losses, strict=False)
        )  # fmt: skip
        weights, memory, *_ = target.decide(Summary(step, steps, sources), json.loads(json.dumps(memory)))
        if weights is not None:
            moved = np.array(list(weights.values()))
            assert np.abs(moved - shares).sum() / 2 <= 0.05 + 1e-9
            shares = moved
    return shares


def test_shares_follow_the_excess_over_the_reference():
    found = steered(Target({"a": 1.0, "b": 2.0}, every=100), [4.0, 3.0])
    assert found == pytest.approx([0.75, 0.25], abs=0.03)


def test_a_source_that_reached_its_reference_goes_to_its_floor():
    found = steered(Target({"a": 1.0, "b": 3.5, "c": 0.0}, floor=0.05), [4.0, 3.0, 0.5])
    assert found[1] <= found[2] <= found[0]
    assert found[1] == pytest.approx(0.08, abs=0.02)


def test_a_source_without_a_reference_keeps_its_share():
    found = steered(Target({"a": 1.0, "b": 2.0}), [4.0, 2.1, 9.0])
    assert found[2] == pytest.approx(1 / 3)
    assert found[0] > 0.5


def test_nothing_moves_when_all_is_reached_or_nothing_is_reported():
    assert steered(Target({"a": 5.0, "b": 5.0}), [4.0, 3.0]) == pytest.approx([0.5, 0.5])
    assert Target({"a": 5.0}).decide(at(200), None).reason == "no source with a reference has reports"
    spoiled = at(200, losses=(Signal(5, float("nan"), 1.0),) * 8)
    assert Target({"a": 5.0}).decide(spoiled, None).weights is None


def test_evaluations_may_be_compared_with_the_reference():
    assert steered(Target({"a": 1.0, "b": 2.0}, "eval"), [0.0, 0.0], each=lambda step: 3.0)[
        0
    ] == pytest.approx(2 / 3, abs=0.03)
    assert steered(Target({"a": 1.0, "b": 2.0}, "eval"), [9.0, 9.0])[0] == 0.5


@pytest.mark.parametrize(
    "wrong", [({},), ({"a": float("nan")},), ({"a": 1.0}, "levels"), ({"a": 1.0}, "loss", -1)]
)
def test_a_target_that_makes_no_sense_fails(wrong):
    with pytest.raises(OptionError, match="Target"):
        Target(*wrong)
