"""What a policy is: objects and plain functions, and what becomes of the weights that they return."""

from dataclasses import dataclass

import pytest

from streamload.errors import OptionError
from streamload.steering import Decided, Policy, Signal, SourceSummary, Summary, as_policy, weights_of

SUMMARY = Summary(
    400, None, (SourceSummary("a", weight=3, share=0.75), SourceSummary("b", weight=1, share=0.25))
)


@dataclass
class Fixed:
    every: int = 10

    def decide(self, summary, memory):
        return Decided({"a": 1}, memory)


def test_a_policy_is_taken_as_it_is():
    policy = Fixed()
    assert isinstance(policy, Policy)
    assert as_policy(policy) is policy


def test_a_plain_function_is_asked_every_200_steps_and_has_no_memory():
    def half(summary):
        return {source.name: 0.5 for source in summary.sources}

    policy = as_policy(half)
    assert policy.every == 200
    assert policy.decide(SUMMARY, None) == Decided({"a": 0.5, "b": 0.5}, None, "half")
    assert as_policy(lambda summary: None).decide(SUMMARY, None).weights is None


@pytest.mark.parametrize("given", [Fixed, 3, "progress", Fixed(0), Fixed(2.5), Fixed(True)])
def test_what_is_no_policy_fails(given):
    with pytest.raises(OptionError, match=r"expected|give an object"):
        as_policy(given)


def test_a_policy_that_names_a_source_that_there_is_not_is_refused():
    policy = Fixed()
    policy.names = ("a", "bb")
    with pytest.raises(OptionError, match="names the source 'bb'; there are: a, b"):
        as_policy(policy, ["a", "b"])
    policy.names = ("b",)
    assert as_policy(policy, ["a", "b"]) is policy
    assert as_policy(policy) is policy


def test_a_source_that_is_not_named_keeps_its_weight():
    assert weights_of(Decided({"b": 3}), SUMMARY) == (3, 3)
    assert weights_of(Decided(None), SUMMARY) is None


@pytest.mark.parametrize(
    "weights", [{"c": 1}, {"a": -1}, {"a": float("nan")}, {"a": float("inf")}, {"a": "1"}, {"a": 0, "b": 0}]
)
def test_weights_that_can_not_be_used_fail(weights):
    with pytest.raises(OptionError, match="the policy gave"):
        weights_of(Decided(weights), SUMMARY)


def test_signals_add_up_over_the_parts_of_an_interval():
    source = SourceSummary("a", 1, 1, losses=(Signal(2, 3, 5), Signal(), Signal(1, 3, 9)))
    assert source.loss == Signal(3, 6, 14)
    assert source.loss.mean == 2
    assert Signal().mean is None
