"""Positions dealt to steps and ranks, and evaluations dealt out."""

import random

import numpy as np
import pytest

from streamload.errors import OptionError
from streamload.order.group import GroupOrder
from streamload.order.lanes import default_lanes
from streamload.order.plan import OrderOptions
from streamload.order.shuffle import default_window
from streamload.order.steps import Split
from tests.support.order_oracle import Case, Given, drain


def evaluation_options(ranks, hints=None):
    """As listed, each rank a group of its own."""
    return OrderOptions(0, ranks, lanes=1, window=0, shuffle_shards=False, hints=hints)


def positions(shares):
    return [(share.group, place) for share in shares for place in range(share.first, share.stop)]


@pytest.mark.parametrize(("batch", "groups"), [(1, 1), (8, 4), (7, 3), (3, 8), (24, 5), (256, 8)])
def test_a_step_takes_the_next_positions_ordered_by_group(batch, groups):
    split = Split(batch, groups, ranks=1)
    for step in range(20):
        dealt = [(p % groups, p // groups) for p in range(step * batch, (step + 1) * batch)]
        assert positions(split.shares(step * batch, 0, ())) == sorted(dealt)
        for group in range(groups):
            assert split.start(step * batch, group) == len(
                [p for p in range(step * batch) if p % groups == group]
            )


@pytest.mark.parametrize("number", range(40))
def test_the_global_batch_is_the_same_for_every_number_of_ranks(number):
    rng = random.Random(number)
    batch, groups = rng.randint(1, 64), rng.randint(1, 8)
    whole = [positions(Split(batch, groups, 1).shares(step * batch, 0, ())) for step in range(6)]
    for ranks in {1, 2, 3, groups, 2 * groups, 4 * groups, batch}:
        split = Split(batch, groups, ranks)
        for step in range(6):
            parts = [positions(split.shares(step * batch, rank, ())) for rank in range(ranks)]
            assert [place for part in parts for place in part] == whole[step]
            if batch % ranks == 0:
                assert {len(part) for part in parts} == {batch // ranks}


def test_a_rank_needs_one_group_where_the_groups_divide_the_ranks():
    split = Split(batch=64, groups=4, ranks=8)
    shares = [split.shares(5 * 64, rank, ()) for rank in (0, 1, 7)]
    assert shares == [[(0, 80, 88, 80, 96)], [(0, 88, 96, 80, 96)], [(3, 88, 96, 80, 96)]]


@pytest.mark.parametrize("number", range(40))
def test_a_rank_reads_the_same_groups_from_any_step_on(number):
    rng = random.Random(number)
    split = Split(rng.randint(1, 40), rng.randint(1, 7), rng.randint(1, 6))
    for rank in range(split.ranks):
        steps = [first + step * split.batch for first in range(split.groups) for step in range(20)]
        read = {share.group for step in steps for share in split.shares(step, rank, ())}
        assert split.groups_of(rank) == sorted(read)
        for step in steps:
            shares = split.shares(step, rank, read)
            assert [share.group for share in shares] == sorted(read)
            assert all(share.end - share.begin >= share.size >= 0 for share in shares)


@pytest.mark.parametrize(("batch", "groups", "ranks"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_dealing_nothing_or_to_nobody_fails(batch, groups, ranks):
    with pytest.raises(OptionError, match="must be at least 1, not 0"):
        Split(batch, groups, ranks)


def test_lanes_and_window_grow_with_the_slice_of_a_batch():
    assert [default_lanes(n) for n in (1, 256, 512, 2048, 10**6)] == [8, 8, 16, 64, 64]
    assert [default_window(n) for n in (1, 256, 1024, 10**6)] == [10_000, 10_240, 40_960, 100_000]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("known", [True, False])
def test_an_evaluation_reads_each_sample_once_over_the_ranks(ranks, known):
    case = Case.drawn(ranks)
    case.entries += [list(range(30))]
    counts = np.array([1 + max(own, default=-1) for own in case.entries])
    options = evaluation_options(ranks, counts if known else None)
    found = []
    for rank in range(ranks):
        part = drain(GroupOrder(options, len(case.entries), rank, 0, passes=1), Given(case.everything))
        assert part == sorted(part)
        found += [reference[1:] for reference in part]
    assert sorted(found) == [(shard, i) for shard, own in enumerate(case.entries) for i in own]


def test_an_evaluation_of_one_rank_is_as_listed():
    case = Case.drawn(5)
    order = GroupOrder(evaluation_options(1), len(case.entries), 0, 0, passes=1)
    listed = [(0, shard, i) for shard, own in enumerate(case.entries) for i in own]
    assert drain(order, Given(case.everything)) == listed
