"""How often samples come in a pass: against the oracle of the order, over groups, passes and cuts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from streamload.errors import DataError
from streamload.facts.repeats import RepeatedArrivals, uses, visit_key
from streamload.order.lanes import apart
from tests.support.order_oracle import Case, Given, chained, drain, draw, sequence

PASSES = 3


def rates_of(case: Case, number: int) -> list[list[float]]:
    rng = random.Random(number)
    kinds = [0.3, 0.9, 1.0, 1.0, 2.0, 2.5, 1e-9, 6.999]
    return [[rng.choice(kinds) for _ in own] for own in case.entries]


def naive(case: Case, rates: list[list[float]], pass_: int) -> list[list[int]]:
    """The entries of each shard as often as they come in a pass, one by one; a use counts in 2**24."""
    found = []
    for shard, own in enumerate(case.entries):
        key = chained(case.seed, 10, case.epoch, pass_, shard)
        count = [
            int(rate) + ((draw(key, number) >> 11) / 2**53 < rate % 1)
            for number, rate in zip(own, rates[shard], strict=True)
        ]
        found.append(
            [
                number + use * 2**24
                for use in range(max(count, default=0))
                for number, many in zip(own, count, strict=True)
                if many > use
            ]
        )
    return found


def expected(case: Case, rates: list[list[float]], group: int) -> list[tuple[int, int, int]] | None:
    """The whole sequence, by the oracle; None where a pass of the group has no sample."""
    result = []
    for pass_ in range(PASSES):
        given = replace(case, entries=naive(case, rates, pass_))
        own = [one for one in sequence(given, group, pass_ + 1)[0] if one[0] == pass_]
        if not own:
            return None
        result += own
    return result


class Shards:
    """Arrivals and rates of a case, and the order that they are for."""

    def __init__(self, case: Case, rates: list[list[float]], group: int, start=None) -> None:
        self.order = case.order(group, start, PASSES)
        self.given = Given(case.everything)
        self.arrivals = RepeatedArrivals(
            self, lambda shard: np.array(rates[shard]), lambda: self.order.pass_, case.seed, case.epoch
        )

    def arrived(self, shard: int):
        return self.given.arrived(shard)

    def all(self) -> list[tuple[int, int, int]]:
        return drain(self.order, self.arrivals)


def drawn(number: int) -> tuple[Case, list[list[float]], int]:
    case = Case.drawn(number, largest=25)
    case.groups = min(case.groups, 1 + number % 3)
    if case.hints is not None and max(case.hints) > 1000:  # the oracle goes over as many entries
        case.hints = None
    return case, rates_of(case, number), number % case.groups


@pytest.mark.parametrize("number", range(40))
def test_samples_come_as_often_as_an_oracle_says_one_by_one(number):
    case, rates, group = drawn(number)
    wanted = expected(case, rates, group)
    if wanted is not None:
        assert Shards(case, rates, group).all() == wanted


@pytest.mark.parametrize("number", range(40))
def test_what_arrives_piece_by_piece_is_the_same_sequence(number):
    case, rates, group = drawn(number)
    shards, found, rng = Shards(case, rates, group), [], random.Random(number)
    for known in case.arriving(rng):
        shards.given = Given(known)
        if rng.random() < 0.3:
            shards.order.blocked(shards.arrivals)
        found += shards.all()
    shards.given = Given(case.everything)
    assert found + shards.all() == Shards(case, rates, group).all()


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.deep] * (number in {0, 3})) for number in range(12)]
)
@pytest.mark.sampled(3)
def test_it_resumes_exactly_at_every_position(number):
    case, rates, group = drawn(number)
    case.entries, rates = case.entries[:6], rates[:6]
    case.hints = None
    whole = Shards(case, rates, group)
    references = whole.all()
    for position in range(len(references) + 1):
        resumed = Shards(case, rates, group, whole.order.mark_at(position))
        assert resumed.all() == references[position:]


def test_a_pass_draws_anew_and_the_mean_is_the_rate():
    numbers, rates = np.arange(20_000), np.tile([0.25, 1.5], 10_000)
    passes = [uses(visit_key(7, 0, pass_, 3), numbers, rates) for pass_ in range(8)]
    assert len({each.tobytes() for each in passes}) == 8
    for parity, rate in ((0, 0.25), (1, 1.5)):
        own = [each[parity::2] for each in passes]
        assert set(np.concatenate(own).tolist()) == {int(rate), int(rate) + 1}
        assert abs(np.mean(own) - rate) < 4 * 0.5 / 80_000**0.5
    again = uses(visit_key(7, 1, 0, 3), numbers, rates)
    assert (again != passes[0]).any()


def test_copies_lie_a_shard_apart_and_each_is_another_visit():
    case = Case(seed=4, entries=[list(range(50))] * 4, groups=1, lanes=2, window=0)
    rates = [[2.0] * 50] * 4
    rows = np.array(Shards(case, rates, 0).all())
    rows = rows[rows[:, 0] == 0]
    apart(rows)
    assert Counter(map(tuple, rows[:, 1:].tolist())) == {(s, n): 2 for s in range(4) for n in range(50)}
    assert len(set(map(tuple, rows.tolist()))) == len(rows)
    places: dict[tuple[int, int], list[int]] = {}
    for place, (_, shard, number) in enumerate(rows.tolist()):
        places.setdefault((shard, number), []).append(place)
    assert min(second - first for first, second in places.values()) >= 50


def test_a_rate_of_one_is_the_order_without_rates():
    case = Case.drawn(3)
    rates = [[1.0] * len(own) for own in case.entries]
    assert Shards(case, rates, 0).all() == drain(case.order(0, passes=PASSES), Given(case.everything))


def test_a_shard_of_too_many_samples_fails():
    case = Case(seed=4, entries=[[0, 1 << 24]], groups=1, lanes=1, window=0)
    with pytest.raises(DataError, match="shards of up to 16,777,216 samples"):
        Shards(case, [[1.0, 1.0]], 0).all()
