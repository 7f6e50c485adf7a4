"""Steps, or ranks' rows of them, of one source each: shares to a part, the same for all, from any step on."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from streamload.order.events import UNIT, Event, in_effect, new_batch_size, new_weights, shares_at, shares_of
from streamload.order.parts import PortionsInParts, sources_of_parts
from streamload.order.steps import Blocks, SourceDraws, Split, Steps


def weights(rng: random.Random, sources: int) -> list[float]:
    found = [rng.choice([0, 1, 1, 2, 5, 100, rng.random()]) for _ in range(sources)]
    return found if any(found) else [1.0] * sources


@pytest.mark.parametrize(
    "seed", [*range(60), *(pytest.param(n, marks=pytest.mark.deep) for n in range(60, 600))]
)
def test_each_source_is_less_than_a_part_from_its_share(seed: int) -> None:
    """While shares stay; less than two after they have changed. A source without a share gets nothing."""
    rng = random.Random(seed)
    sources, rows = rng.randint(2, 12), rng.choice([1, 7, 64])
    for changes, bound in ((False, 1), (True, 2)):
        shares = shares_of(weights(rng, sources), [0.0] * sources)
        owed, exact, handed = (0,) * sources, [Fraction(0)] * sources, [0] * sources
        for step in range(200):
            if changes and step % 17 == 16:
                shares = shares_of(weights(rng, sources), [0.0] * sources)
            parts = rng.randint(1, 3)
            of_parts, owed = sources_of_parts(owed, shares, rows, parts)
            assert len(of_parts) == parts
            for source in of_parts:
                assert shares[source]
                handed[source] += rows
            exact = [due + Fraction(s * rows * parts, UNIT) for due, s in zip(exact, shares, strict=True)]
            assert [Fraction(credit, UNIT) for credit in owed] == [
                due - rows_of_it for due, rows_of_it in zip(exact, handed, strict=True)
            ]
            assert max(abs(credit) for credit in owed) < bound * rows * UNIT


class Case:
    """A random run: its steps over groups and ranks, changes of weights and of the size of steps."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.kind = rng.choice(["step", "rank"])
        self.groups = rng.randint(1, 4)
        self.ranks = rng.choice([1, 2, 3, 4, 6, 8])
        self.sources = rng.randint(2, 5)
        block = rng.choice([None, 1, 3, 4])
        unit = self.ranks * (self.groups if block else 1)  # planned steps have equal parts of each group
        sizes = [unit * rng.randint(1, 5) for _ in range(2)]
        floors = [rng.choice([0, 0, 0.1]) for _ in range(self.sources)]
        self.events: list[Event] = [new_weights(0, shares_of(weights(rng, self.sources), floors))]
        resized = rng.randint(1, 5) * (block or 1) * sizes[0]
        if rng.random() < 0.5:
            self.events.append(new_batch_size(resized, sizes[1], block or 1))
        for _ in range(rng.randint(0, 3)):
            at = rng.randint(1, 20) * sizes[0]
            self.events.append(new_weights(at, shares_of(weights(rng, self.sources), floors)))
        self.events.sort(key=lambda event: event.position)
        self.split = Split(sizes[0], self.groups, self.ranks)
        self.blocks = None if block is None else Blocks(sizes[0], block)

    def steps(self, position: int) -> Steps:
        resizes = [event for event in self.events if event.kind == "batch_size"]
        return Steps(self.split, position, self.blocks, in_effect(resizes, position))

    def portions(self, group: int, position: int, given: list[int], owed: list[int]) -> PortionsInParts:
        weights_of_run = in_effect([event for event in self.events if event.kind == "weights"], position)
        return PortionsInParts(
            self.steps(position), group, position, weights_of_run, given, owed, SourceDraws(self.kind)
        )


@pytest.mark.parametrize(
    "seed", [*range(80), *(pytest.param(n, marks=pytest.mark.deep) for n in range(80, 800))]
)
def test_steps_of_any_run_are_those_of_a_plain_count(seed: int) -> None:
    """Each part by exact fractions; each rank's rows of one; resumed at any step or block."""
    case = Case(seed)
    steps, zeros = case.steps(0), [0] * case.sources
    whole = [case.portions(group, 0, zeros, zeros) for group in range(case.groups)]
    debt = [Fraction(0)] * case.sources
    resumed: list[tuple[int, list[PortionsInParts]]] = []
    given = [zeros] * case.groups
    number, position = 0, 0
    while number < 24:
        block = steps.block(position)
        end = position + steps.at(position).batch if block is None else block.end
        portions = [mixture.at(position) for mixture in whole]
        for _, mixtures in resumed:
            assert [mixture.at(position) for mixture in mixtures] == portions
        seats = [iter(portion.seats().tolist()) for portion in portions]
        shares = [Fraction(share, UNIT) for share in shares_at(case.events, position)]
        while position < end:
            split = steps.at(position)
            parts = split.ranks if case.kind == "rank" else 1
            rows = split.batch // parts
            expected = [plain_part(debt, shares, rows) for _ in range(parts)]
            of_step = []
            for group in range(case.groups):
                count = sum(split.sizes(position, group))
                of_step += [next(seats[group]) for _ in range(count)]
            turns = range(parts if case.groups > 1 else 1)
            assert of_step in [np.repeat(expected[n:] + expected[:n], rows).tolist() for n in turns]
            for rank in range(split.ranks):
                first, last = rank * split.batch // split.ranks, (rank + 1) * split.batch // split.ranks
                assert len(set(of_step[first:last])) == 1
            number, position = number + 1, position + split.batch
        assert not [source for rest in seats for source in rest]
        for group, portion in enumerate(portions):
            assert list(portion.stop) == [
                before + many for before, many in zip(given[group], portion.take, strict=True)
            ]
            assert portion.owed == portions[0].owed == tuple(int(due * UNIT) for due in debt)
        given = [list(portion.stop) for portion in portions]
        if len(resumed) < 4 and number % 3 == 0:
            owed = list(portions[0].owed)
            resumed.append(
                (position, [case.portions(g, position, given[g], owed) for g in range(case.groups)])
            )


@pytest.mark.parametrize(
    ("shares", "ranks"), [((0.75, 0.25), 2), ((0.75, 0.25), 4), ((0.875, 0.125), 8), ((0.5, 0.25, 0.25), 4)]
)
def test_by_rank_a_source_comes_from_each_group(shares: tuple[float, ...], ranks: int) -> None:
    """Also one whose parts, of all steps in turn, are always at the same place of a step."""
    events = [new_weights(0, shares_of(shares, [0.0] * len(shares)))]
    steps, zeros, handed = Steps(Split(8 * ranks, 2, ranks), 0), [0] * len(shares), []
    for group in range(2):
        portions = PortionsInParts(steps, group, 0, events, zeros, zeros, SourceDraws("rank"))
        handed.append(portions.at(steps.begin(999)).stop)
    for source, share in enumerate(shares):
        rows = [of_group[source] for of_group in handed]
        assert sum(rows) == share * 8000 * ranks
        assert min(rows) > 0.45 * sum(rows)


def plain_part(debt: list[Fraction], shares: list[Fraction], rows: int) -> int:
    """The source of the next part, by what each is owed in rows, which it updates.

    Among those that would be less than a part ahead of their shares, the one that is a whole part behind
    after the fewest parts.
    """
    for source, share in enumerate(shares):
        debt[source] += share * rows
    may = [source for source, share in enumerate(shares) if share and debt[source] > 0]
    if not may:
        may = [max((source for source, share in enumerate(shares) if share), key=debt.__getitem__)]
    best, fewest = -1, 0
    for source in may:
        parts = -((debt[source] - rows) // (shares[source] * rows))
        if best < 0 or parts < fewest:
            best, fewest = source, parts
    debt[best] -= rows
    return best
