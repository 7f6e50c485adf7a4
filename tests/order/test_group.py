"""The sample sequence of a group: against an oracle, over arrivals, groups and passes."""

import random

import numpy as np
import pytest

from streamload.errors import OptionError
from streamload.order.group import GroupOrder
from streamload.order.plan import OrderOptions
from tests.support.order_oracle import Case, Given, drain, pieces, sequence, shard_order, walk

CASES = range(120)


class Equal:
    """Shards of one size, all of them there."""

    def __init__(self, size):
        self._entries = np.arange(size)

    def arrived(self, shard):
        return self._entries, True


@pytest.mark.parametrize("number", CASES)
@pytest.mark.sampled(40)
def test_the_sequence_is_the_one_that_the_rules_give_one_by_one(number):
    case = Case.drawn(number)
    for group in range(case.groups):
        order = case.order(group, passes=2)
        expected, *_ = sequence(case, group, 2)
        assert drain(order, Given(case.everything)) == expected
        assert order.finished
        assert order.position == order.due == len(expected)


@pytest.mark.parametrize("number", range(3))
def test_the_sequence_is_right_past_the_even_rounds_and_in_many_portions(number):
    case = Case.drawn(1000 + number)
    case.entries = [list(range(random.Random(s).choice([3, 300, 900]))) for s in range(12)]
    case.groups, case.lanes, case.window, case.hints = 1, (1, 5, 8)[number], (0, 2000, 150)[number], None
    expected, *_ = sequence(case, 0, 2)
    assert drain(case.order(0, passes=2), Given(case.everything)) == expected


@pytest.mark.parametrize(("lanes", "shards", "is_even"), [(8, 16, True), (2, 20, True), (2, 21, False)])
def test_over_a_link_the_lanes_of_a_short_first_pass_read_at_one_speed(lanes, shards, is_even):
    """Window 0: the order of the lanes alone. At one speed the first shards of all lanes end together."""
    entries = [list(range(200)) for _ in range(shards)]

    def shards_of(opens_slowly, epoch):
        case = Case(1, entries, groups=1, lanes=lanes, window=0, epoch=epoch, opens_slowly=opens_slowly)
        given = drain(case.order(0, passes=1), Given(case.everything))
        assert given == sequence(case, 0, 1)[0]
        return [shard for _, shard, _ in given]

    assert (len(set(shards_of(True, 0)[: lanes * 200])) == lanes) == is_even
    assert len(set(shards_of(False, 0)[: lanes * 200])) > lanes
    assert shards_of(True, 1) == shards_of(False, 1)


@pytest.mark.parametrize("number", CASES)
def test_every_sample_is_in_one_group_and_once_in_a_pass(number):
    case = Case.drawn(number)
    found = []
    for group in range(case.groups):
        found += [reference[1:] for reference in drain(case.order(group, passes=1), Given(case.everything))]
    assert sorted(found) == [(shard, i) for shard, own in enumerate(case.entries) for i in own]


@pytest.mark.parametrize("hints", [[3], [1], [0], [2, 0, 1], [0, 0]])
def test_more_groups_than_samples_share_them_all_the_same(hints):
    entries = [list(range(5)) for _ in hints]
    case = Case(seed=1, entries=entries, groups=8, lanes=2, window=3, hints=hints)
    parts = [drain(case.order(group, passes=1), Given(case.everything)) for group in range(8)]
    assert parts == [sequence(case, group, 1)[0] for group in range(8)]
    found = sorted(reference[1:] for part in parts for reference in part)
    assert found == [(shard, i) for shard in range(len(hints)) for i in range(5)]


@pytest.mark.parametrize("number", range(40))
def test_known_counts_make_groups_that_differ_by_one_sample(number):
    case = Case.drawn(number)
    case.entries = [list(range(len(own))) for own in case.entries]
    case.hints = [len(own) for own in case.entries]
    sizes = [len(drain(case.order(g, passes=1), Given(case.everything))) for g in range(case.groups)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("number", range(60))
@pytest.mark.sampled(20)
def test_whatever_has_arrived_gives_exactly_what_it_determines(number):
    case, rng = Case.drawn(number, largest=25), random.Random(number)
    group = rng.randrange(case.groups)
    order, found = case.order(group, passes=2), []
    for known in case.arriving(rng):
        if rng.random() < 0.5:
            continue
        arrivals = Given(known)
        if rng.random() < 0.3:
            order.blocked(arrivals)
        found += drain(order, arrivals)
        expected, walked, waiting = sequence(case, group, 2, known)
        assert found == expected
        if not order.finished:
            assert order.blocked()[0] == walked.blocked
            assert set(order.open_shards()) == waiting | set(walked.reading)
            ahead = order.coming_shards(100).tolist()
            assert ahead[: len(walked.coming)] == walked.coming
    found += drain(order, Given(case.everything))
    assert found == sequence(case, group, 2)[0]


def test_the_first_reference_comes_when_the_first_sample_has_arrived():
    case = Case(
        seed=1,
        entries=[list(range(1000)) for _ in range(20)],
        groups=1,
        lanes=8,
        window=10_000,
        opens_slowly=True,
    )
    first = shard_order(case.options, 20, 0, 0, 0)[0]
    known = [([], False)] * 20
    known[first] = ([0], False)
    assert drain(case.order(0), Given(known)) == [(0, first, 0)]


def test_the_first_reference_does_not_come_when_another_shard_has_arrived_fails():
    case = Case(
        seed=1,
        entries=[list(range(1000)) for _ in range(20)],
        groups=1,
        lanes=8,
        window=10_000,
        opens_slowly=True,
    )
    first, second = shard_order(case.options, 20, 0, 0, 0)[:2].tolist()
    known = [([], False)] * 20
    known[second] = (list(range(1000)), True)
    order = case.order(0)
    assert drain(order, Given(known)) == []
    assert order.blocked()[0] == first


def test_the_first_batch_needs_few_samples_of_each_lane():
    case = Case(
        seed=3,
        entries=[list(range(1000)) for _ in range(20)],
        groups=1,
        lanes=8,
        window=10_000,
        opens_slowly=True,
    )
    known = [(list(range(40)), False)] * 20
    assert len(drain(case.order(0), Given(known))) >= 256


def test_nothing_new_costs_one_look():
    case = Case(
        seed=3,
        entries=[list(range(1000)) for _ in range(200)],
        groups=1,
        lanes=64,
        window=10_000,
        opens_slowly=True,
    )
    order = case.order(0)
    arrivals = Given([(list(range(40)), False)] * 200)
    drain(order, arrivals)
    arrivals.looks = 0
    assert order.advance(arrivals).shards.size == 0
    assert arrivals.looks == 1


def test_an_advance_without_references_means_that_something_has_to_arrive():
    # The window is open: among the first few hundred references of the lanes' order none may be due.
    order = GroupOrder(OrderOptions(1, 1, 8, 2**31 - 1), 20, 0, 5)
    assert order.advance(Equal(1000)).shards.size == 20_000


def test_another_pass_and_another_epoch_are_other_orders_of_the_same_samples():
    case = Case(seed=3, entries=[list(range(50)) for _ in range(12)], groups=2, lanes=4, window=100)
    arrivals = Given(case.everything)
    both = drain(case.order(1, passes=2), arrivals)
    first, second = both[: len(both) // 2], both[len(both) // 2 :]
    case.epoch = 1
    third = drain(case.order(1, passes=1), arrivals)
    orders = [[reference[1:] for reference in part] for part in (first, second, third)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert {reference[0] for reference in first} == {0}
    assert {reference[0] for reference in second} == {1}


def test_endless_passes_go_on():
    case = Case(seed=3, entries=[[0, 1], [4]], groups=1, lanes=4, window=100)
    found = drain(case.order(0), Given(case.everything), most=3000)
    assert {reference[0] for reference in found} >= set(range(1000))
    assert all(len({r[1:] for r in found[i : i + 3]}) == 3 for i in range(0, 3000, 3))


@pytest.mark.parametrize("hints", [None, [0, 3, 0, 9]])
def test_a_group_without_samples_takes_every_second_pass_from_all_groups(hints):
    case = Case(seed=4, entries=[[], [0, 2], [], [5]], groups=7, lanes=2, window=3, hints=hints)
    passes = []
    for group in range(7):
        expected = sequence(case, group, 6)[0]
        assert drain(case.order(group, passes=6), Given(case.everything)) == expected
        passes.append([sorted(r[1:] for r in expected if r[0] == pass_) for pass_ in range(6)])
    assert [[], [(1, 0), (1, 2), (3, 5)]] * 3 in passes
    assert sorted(sample for own in passes for sample in own[0]) == [(1, 0), (1, 2), (3, 5)]


def test_endless_passes_over_no_samples_end():
    for entries in ([], [[], [], []]):
        case = Case(seed=3, entries=entries, groups=2, lanes=4, window=100)
        order = case.order(1)
        assert drain(order, Given(case.everything)) == []
        assert order.finished
        assert order.open_shards() == order.coming_shards(5).tolist() == order.blocked() == []


def test_without_shuffle_samples_come_as_listed_in_every_pass():
    case = Case(seed=9, entries=[[0, 2], [], [1], [0, 1, 5]], groups=1, lanes=1, window=0, shuffle=False)
    listed = [(shard, i) for shard, own in enumerate(case.entries) for i in own]
    expected = [(pass_, *reference) for pass_ in range(2) for reference in listed]
    for case.window in (0, 1):
        assert drain(case.order(0, passes=2), Given(case.everything)) == expected


def test_coming_shards_go_on_into_the_next_pass():
    case = Case(seed=9, entries=[[0], [0], [0], [0], [0]], groups=1, lanes=2, window=0)
    later = [shard_order(case.options, 5, 0, 0, pass_).tolist() for pass_ in range(2)]
    assert case.order(0).coming_shards(8).tolist() == [*later[0], *later[1][:3]]


def test_coming_shards_end_with_the_last_pass():
    case = Case(seed=9, entries=[[0], [0], [0], [0], [0]], groups=1, lanes=2, window=0)
    assert len(case.order(0, passes=1).coming_shards(8)) == 5


@pytest.mark.parametrize("number", range(30))
def test_the_shard_order_of_a_pass_is_the_one_in_which_lanes_begin_them(number):
    case = Case.drawn(number)
    for group in range(case.groups):
        expected = walk(case, group, 1, [([], False)] * len(case.entries))
        begun = [*expected.reading, *expected.coming]
        assert shard_order(case.options, len(case.entries), group, case.epoch, 1).tolist() == begun
        assert sorted(begun) == sorted(shard for shard, _ in pieces(case, group))


def test_shards_of_the_window_stay_open_until_their_last_reference_is_out():
    case = Case(seed=2, entries=[list(range(30)) for _ in range(40)], groups=1, lanes=3, window=250)
    order, arrivals = case.order(0, passes=1), Given(case.everything)
    known, found = [([], False)] * 40, []
    for shard in shard_order(case.options, 40, 0, 0, 0).tolist():
        known[shard] = arrivals.known[shard]
        found += drain(order, Given(known))
        left = {(s, i) for s in range(40) for i in range(30)} - {reference[1:] for reference in found}
        begun = set(order.open_shards())
        assert begun <= {s for s, _ in left} | set(walk(case, 0, 0, known).reading)
        assert not begun & set(order.coming_shards(40))
        assert {s for s, _ in left} <= begun | set(order.coming_shards(40))


def test_a_million_shards_are_no_more_than_arrays():
    order = GroupOrder(OrderOptions(7, 128, 8, 10_000, opens_slowly=True), 1_000_000, 127, 0)
    references = order.advance(Equal(10))
    assert references.shards.size > 100
    assert len(order.coming_shards(10_000)) == 10_000


def test_hints_are_one_for_each_shard_fails():
    with pytest.raises(OptionError, match="one for each of 3 shards"):
        GroupOrder(OrderOptions(0, 1, 1, 0, hints=np.array([1, 2])), 3, 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 0}, "groups must be at least 1, not 0"),
        ({"lanes": 0}, "lanes must be from 1 to 1048576, not 0"),
        ({"window": -1}, "window must be from 0"),
        ({"window": 2**31}, "window must be from 0"),
        ({"hints": np.array([3, -1])}, "shard 1 has -1"),
        ({"hints": np.array([0.5])}, "one integer for each shard"),
    ],
)
def test_options_out_of_range_fails(options, message):
    with pytest.raises(OptionError, match=message):
        OrderOptions(**{"seed": 0, "groups": 1, "lanes": 1, "window": 0, **options})


def test_a_group_or_a_number_of_passes_that_does_not_exist_fails():
    with pytest.raises(OptionError, match="group must be from 0 to 1, not 2"):
        GroupOrder(OrderOptions(0, 2, 1, 0), 3, 2, 0)
    with pytest.raises(OptionError, match="passes must be at least 1"):
        GroupOrder(OrderOptions(0, 2, 1, 0), 3, 0, 0, passes=0)
