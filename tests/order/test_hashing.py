"""Hashes and permutations: the same for ever, on every machine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.order.hashing import (
    hash32,
    key,
    mix,
    permutation,
    permutation_stretch,
    pick,
    sample_seed,
    stream,
)
from tests.support.order_oracle import chained, draw, shuffled


def test_mix_is_splitmix64():
    """The first outputs of the reference implementation from seeds 0 and 1234567."""
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(1234567) == 6457827717110365317


def test_keys_are_pinned():
    """Another value here is another order for everyone who resumes a run."""
    assert key() == 0
    assert key(1, 2, 3) == chained(1, 2, 3)
    assert key(7, 4, 0, 1, 2) == 2942502616365514384
    assert permutation(key(7, 1), 8).tolist() == [2, 1, 5, 3, 6, 0, 7, 4]
    assert sample_seed(7, 0, 1, 2, 3) == 1706782330104932856


def test_streams_are_those_of_the_oracle():
    indexes = np.array([0, 1, 5, 2**40])
    for value in (0, 1, 2**64 - 1, key(3)):
        assert stream(value, indexes).tolist() == [draw(value, i) for i in indexes.tolist()]
        assert hash32(value, indexes).tolist() == [draw(value, i) >> 32 for i in indexes.tolist()]
        assert permutation(value, 50).tolist() == shuffled(value, list(range(50)))


def test_negative_and_large_seeds_are_taken_modulo_a_word():
    assert key(-1) == key(2**64 - 1)
    assert key(2**64 + 5) == key(5)


def test_seeds_of_visits_differ():
    seeds = {sample_seed(*visit) for visit in np.ndindex(3, 3, 3, 3, 3)}
    assert len(seeds) == 3**5


def test_picks_are_spread_over_all_and_differ_by_attempt():
    picks = [pick(seed, 0, 5) for seed in range(500)]
    assert set(picks) == set(range(5))
    assert len({pick(9, attempt, 10**6) for attempt in range(20)}) == 20


def test_picking_one_of_none_fails():
    with pytest.raises(ValueError, match="at least one"):
        pick(1, 0, 0)


@given(st.integers(0, 2**64 - 1), st.integers(0, 40_000), st.data())
def test_a_stretch_of_a_permutation_is_that_of_the_whole(value, count, data):
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, count)] * 2)))
    whole = permutation(value, count)
    assert permutation_stretch(value, count, first, last).tolist() == whole[first:last].tolist()
    assert permutation_stretch(value, count, 0, count).tolist() == whole.tolist()
