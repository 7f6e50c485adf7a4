"""Shares of sources: to the sample, on every step, over changes, and from any step on."""

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.errors import OptionError
from streamload.order.events import UNIT, in_effect, new_weights, shares_of
from streamload.order.steps import Portions, Split, Steps, portion


def all_shares(sources):
    numbers = st.lists(st.integers(0, 1000), min_size=sources, max_size=sources)
    return numbers.filter(any).map(lambda weights: shares_of(weights, [0.0] * sources))


@settings(max_examples=60)
@given(st.data())
def test_each_source_has_its_share_at_every_step(data):
    """Off by less than two samples, however often shares and sizes change; never a sample too few or many."""
    sources = data.draw(st.integers(1, 9))
    given_, owed, expected = (0,) * sources, (0,) * sources, [Fraction(0)] * sources
    for _ in range(data.draw(st.integers(1, 6))):
        shares = data.draw(all_shares(sources))
        for size in data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=30)):
            step = portion(given_, owed, shares, size)
            assert (sum(step.take), min(step.take) >= 0) == (size, True)
            assert all(many == 0 for many, share in zip(step.take, shares, strict=True) if not share)
            expected = [e + Fraction(share * size, UNIT) for e, share in zip(expected, shares, strict=True)]
            given_, owed = step.stop, step.owed
            if sources > 1:
                assert [Fraction(credit, UNIT) for credit in owed] == [
                    e - g for e, g in zip(expected, given_, strict=True)
                ]
            assert all(abs(e - g) < 2 for e, g in zip(expected, given_, strict=True))


@pytest.mark.parametrize("number", range(20))
def test_steps_can_be_followed_from_any_on_and_in_any_strides(number):
    rng = random.Random(number)
    split, group = Split(rng.randint(1, 300), groups := rng.randint(1, 5), 1), rng.randrange(groups)
    sources = rng.randint(1, 4)
    weights = [[rng.randint(1, 9) for _ in range(sources)] for _ in range(3)]
    changes = [
        new_weights(position, shares_of(w, [0.0] * sources))
        for position, w in zip((0, 7 * split.batch, 20 * split.batch - 1), weights, strict=True)
    ]
    zeros = [0] * sources
    whole = Portions(Steps(split, 0), group, 0, changes, zeros, zeros)
    steps = [whole.at(step * split.batch) for step in range(30)]
    for begin in range(1, 30):
        before = steps[begin - 1]
        known = in_effect(changes, begin * split.batch)
        at = begin * split.batch
        resumed = Portions(Steps(split, at), group, at, known, before.stop, before.owed)
        for step in range(begin + rng.randint(0, 3), 30, rng.randint(1, 3)):
            assert resumed.at(step * split.batch) == steps[step]
    assert sum(steps[-1].stop) == split.start(30 * split.batch, group)


def test_a_change_counts_from_the_first_step_at_or_behind_it():
    first, second = (UNIT, 0), (0, UNIT)
    for at, step in ((0, 0), (1, 1), (10, 1), (11, 2), (20, 2)):
        changes = [new_weights(0, first), new_weights(at, second)]
        mixture = Portions(Steps(Split(10, 1, 1), 0), 0, 0, changes, (0, 0), (0, 0))
        assert [mixture.at(10 * n).take == (10, 0) for n in range(4)] == [n < step for n in range(4)]


def test_a_step_that_has_gone_by_or_is_none_fails():
    mixture = Portions(Steps(Split(10, 1, 1), 0), 0, 0, [new_weights(0, (UNIT,))], (0,), (0,))
    mixture.at(20)
    for position in (20, 45):
        with pytest.raises(ValueError, match="no step begins at"):
            mixture.at(position)


def test_sources_are_spread_evenly_over_a_step():
    seats = portion((0, 0, 0), (0, 0, 0), shares_of([5, 3, 0], [0, 0, 0]), 64).seats()
    assert np.bincount(seats, minlength=3).tolist() == [40, 24, 0]
    for parts in (2, 4, 8):
        for part in np.split(seats, parts):
            assert abs(np.count_nonzero(part == 0) - 40 / parts) <= 1


def test_shares_are_proportional_and_add_up():
    assert shares_of([3, 1], [0, 0]) == (3 * UNIT // 4, UNIT // 4)
    thirds = shares_of([1, 1, 1], [0, 0, 0])
    assert sum(thirds) == UNIT
    assert max(thirds) - min(thirds) <= 1
    assert shares_of([1e-300, 1e300], [0, 0]) == (0, UNIT)
    assert shares_of([0.5], [0]) == (UNIT,)


def test_a_floor_is_kept_and_the_others_share_the_rest():
    assert shares_of([98, 1, 1], [0, 0.25, 0]) == pytest.approx(
        [0.7424 * UNIT, UNIT / 4, 0.00758 * UNIT], rel=1e-3
    )
    assert shares_of([1, 0], [0, 0.125]) == (7 * UNIT // 8, UNIT // 8)
    assert shares_of([1, 1], [0.5, 0.5]) == (UNIT // 2, UNIT // 2)
    assert shares_of([1, 0], [0.5, 0.25]) == (3 * UNIT // 4, UNIT // 4)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 0.2)), min_size=1, max_size=5))
def test_no_source_is_below_its_floor(sources):
    weights, floors = [weight for weight, _ in sources], [floor for _, floor in sources]
    if not any(weights):
        weights[0] = 1.0
    shares = shares_of(weights, floors)
    assert sum(shares) == UNIT
    assert all(share >= int(Fraction(floor) * UNIT) for share, floor in zip(shares, floors, strict=True))
    free = [i for i, share in enumerate(shares) if share > floors[i] * UNIT + 1 and weights[i]]
    for i in free:
        for j in free:
            assert shares[i] * weights[j] == pytest.approx(
                shares[j] * weights[i], rel=1e-6, abs=2 * max(weights)
            )


@pytest.mark.parametrize(
    ("weights", "floors", "match"),
    [
        ([0, 0], [0, 0], "must not all be 0"),
        ([1, -1], [0, 0], "weights must be numbers from 0"),
        ([1, float("nan")], [0, 0], "weights must be numbers from 0"),
        ([1, float("inf")], [0, 0], "weights must be numbers from 0"),
        ([1, 1], [0, -0.1], "floors must be numbers from 0"),
        ([1, 1], [0.6, 0.6], "must not add up to more than 1"),
    ],
)
def test_weights_that_say_nothing_fail(weights, floors, match):
    with pytest.raises(OptionError, match=match):
        shares_of(weights, floors)
