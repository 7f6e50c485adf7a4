"""Samples left out, counted at each position of a group's sequence: compared with the oracle's walk."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest

from streamload.order.group import Cursor, GroupOrder
from streamload.order.left_out import LeftOut, LeftOutOf, PassedOver
from tests.support.order_oracle import Case, left_out_before

NAMES = ("short", "score")
PASSES = 3


class Arriving:
    """The entries of a case as they arrive: the used ones, and those that are left out."""

    def __init__(self, case: Case, left_out: list[dict[int, str]]) -> None:
        self.case, self.left_out = case, left_out
        self.known = case.everything
        self.names = LeftOutOf(NAMES, self.of_shard)

    def arrived(self, shard: int):
        have, ended = self.known[shard]
        return np.array([i for i in have if i not in self.left_out[shard]], np.int64), ended

    def of_shard(self, shard: int) -> LeftOut:
        numbers = [i for i in self.known[shard][0] if i in self.left_out[shard]]
        causes = [NAMES.index(self.left_out[shard][i]) for i in numbers]
        return LeftOut(np.array(numbers, np.int64), np.array(causes, np.int64))

    def order(self, group: int, start: Cursor | None = None) -> GroupOrder:
        case = self.case
        return GroupOrder(
            case.options, len(case.entries), group, case.epoch, start, PASSES, left_out=self.names
        )


def drawn(number: int) -> Arriving:
    """A case of which some samples are left out: few, most, or all of some shards."""
    case, rng = Case.drawn(number, largest=rng_size(number)), random.Random(number)
    share = rng.choice([0.1, 0.5, 0.9])
    left_out = []
    for entries in case.entries:
        of_shard = 1.0 if rng.random() < 0.2 else share
        left_out.append({i: rng.choice(NAMES) for i in entries if rng.random() < of_shard})
    return Arriving(case, left_out)


def rng_size(number: int) -> int:
    return (8, 40, 400)[number % 3]


def counted(order: GroupOrder, position: int) -> tuple[Counter, Counter]:
    left_out = order.left_out(position)
    return left_out.before, left_out.in_pass


@pytest.mark.parametrize("number", range(60))
def test_each_position_has_the_samples_left_out_before_it_whatever_arrives_when(number):
    arriving = drawn(number)
    case, rng = arriving.case, random.Random(number)
    group = rng.randrange(case.groups)
    *counts, in_all = left_out_before(case, group, arriving.left_out, PASSES)
    order, seen = arriving.order(group), 0
    for known in itertools.chain(case.arriving(rng), [case.everything]):
        arriving.known = known
        while order.advance(arriving).shards.size:
            pass
        for position in range(seen, order.position + 1):
            assert counted(order, position) == counts[position], position
        seen = order.position
    assert order.finished
    assert order.position == len(counts) - 1
    assert order.left_out_in_all == sum(in_all, Counter())


def test_a_pass_counts_each_sample_that_is_left_out_once():
    arriving = drawn(7)
    case = arriving.case
    case.groups = 1
    order = arriving.order(0)
    while order.advance(arriving).shards.size:
        pass
    names = Counter(name for of_shard in arriving.left_out for name in of_shard.values())
    assert order.left_out_in_all == Counter({name: PASSES * count for name, count in names.items()})


@pytest.mark.parametrize("number", range(60))
def test_a_cursor_at_any_position_goes_on_counting_from_there(number):
    arriving = drawn(number)
    case, rng = arriving.case, random.Random(number)
    group = rng.randrange(case.groups)
    *counts, in_all = left_out_before(case, group, arriving.left_out, PASSES)
    order = arriving.order(group)
    positions = []
    while order.advance(arriving).shards.size:
        positions += rng.sample(range(order.position + 1), min(3, order.position + 1))
    for position in {*positions, 0, order.position}:
        cursor = order.mark_at(position)
        resumed = arriving.order(group, Cursor.from_json(json.loads(json.dumps(cursor.to_json()))))
        assert counted(resumed, position) == counts[position]
        while resumed.advance(arriving).shards.size:
            again = rng.randint(position, resumed.position)
            assert counted(resumed, again) == counts[again], (position, again)
            assert (resumed.mark_at(again).left_out or PassedOver.from_json({})).total == sum(
                counts[again], Counter()
            )
        assert resumed.left_out_in_all == sum(in_all, Counter())


def test_a_cursor_of_an_order_that_leaves_nothing_out_says_nothing_of_it():
    case = Case.drawn(5)
    order = case.order(0, passes=2)
    order.advance(Arriving(case, [{} for _ in case.entries]))
    assert "left_out" not in order.mark_at(order.position).to_json()
    assert PassedOver.from_json({}).to_json() == {}
