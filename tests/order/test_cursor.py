"""Going on from a cursor: exact at every position, and small enough for a checkpoint."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.errors import OptionError
from streamload.order import group
from streamload.order.group import Cursor, GroupOrder
from streamload.order.plan import OrderOptions
from tests.support.order_oracle import Case, Given, drain, sequence

LONG = {0, 5, 6}
"""Cases of `drawn` with many samples: each position is a run of its own."""


def drawn(number: int) -> Case:
    """A case whose passes are some hundred references long, so that lanes' states differ."""
    case, rng = Case.drawn(number), random.Random(number)
    counts = [rng.choice([0, 1, 7, 80, 150, 300]) for _ in range(rng.randint(3, 9))]
    case.entries = [list(range(count)) for count in [*counts, 40]]
    case.groups = rng.choice([1, 1, 2])
    case.hints = rng.choice([None, [1 + len(own) for own in case.entries]])
    return case


def through_json(cursor: Cursor) -> Cursor:
    return Cursor.from_json(json.loads(json.dumps(cursor.to_json())))


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.deep] * (number in LONG)) for number in range(9)]
)
@pytest.mark.sampled(2)
def test_every_position_can_be_resumed_exactly(number):
    """Marks are made while samples arrive, so that lanes stand in the middle of a round, too."""
    case, rng = drawn(number), random.Random(number)
    arrivals, order, found = Given(case.everything), case.order(0, passes=2), []
    for known in case.arriving(rng):
        found += drain(order, Given(known))
    found += drain(order, arrivals)
    assert found == sequence(case, 0, 2)[0]
    for position in range(len(found) + 1):
        resumed = case.order(0, through_json(order.mark_at(position)), passes=2)
        assert resumed.position == position
        assert drain(resumed, arrivals, most=20)[:20] == found[position : position + 20]
        if position % 97 == 0:
            resumed = case.order(0, order.mark_at(position), passes=2)
            assert drain(resumed, arrivals) == found[position:]
            assert resumed.finished
            assert resumed.position == resumed.due == len(found)


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.deep] * (number in LONG)) for number in range(9)]
)
@pytest.mark.sampled(2)
def test_shards_of_which_nothing_is_left_are_not_needed_to_go_on(number):
    """Each lookup of a shard that is done with would be a fetch; what is named as open or coming, too."""
    case, rng = drawn(number), random.Random(number)
    order, expected = case.order(0, passes=2), sequence(case, 0, 2)[0]
    for known in case.arriving(rng):
        drain(order, Given(known))
    drain(order, Given(case.everything))
    first_pass = sum(pass_ == 0 for pass_, _, _ in expected)
    for position in range(first_pass):
        live = {shard for pass_, shard, _ in expected[position:] if pass_ == 0}
        empty = {shard for shard in range(len(case.entries)) if shard not in {s for _, s, _ in expected}}
        arrivals = Watched(case.everything)
        resumed = case.order(0, through_json(order.mark_at(position)), passes=1)
        named = {*resumed.open_shards(), *resumed.coming_shards(99), *resumed.blocked(arrivals)}
        found = []
        while not resumed.finished:
            found += drain(resumed, arrivals, most=1)
            named |= {*resumed.open_shards(), *resumed.coming_shards(99), *resumed.blocked()}
        assert found == expected[position:first_pass]
        assert resumed.due == first_pass
        assert arrivals.asked <= live | empty
        assert named <= live | empty


def test_a_group_that_reads_the_shards_of_all_groups_is_resumed_there():
    case = Case(seed=4, entries=[[], list(range(90)), []], groups=3, lanes=2, window=30)
    (group,) = [g for g in range(3) if len(sequence(case, g, 1)[0]) < len(sequence(case, g, 2)[0]) == 90][:1]
    order, arrivals = case.order(group, passes=4), Given(case.everything)
    found = drain(order, arrivals)
    for position in range(len(found) + 1):
        resumed = case.order(group, through_json(order.mark_at(position)), passes=4)
        assert drain(resumed, arrivals) == found[position:]
        assert resumed.due == len(found)


class Watched(Given):
    """Arrivals that know what was asked for."""

    def __init__(self, known):
        super().__init__(known)
        self.asked = set()

    def arrived(self, shard):
        self.asked.add(shard)
        return super().arrived(shard)


@pytest.mark.parametrize("number", range(8))
@pytest.mark.sampled(3)
def test_a_resumed_order_is_resumed_exactly_while_samples_arrive(number):
    case, rng = drawn(100 + number), random.Random(number)
    expected = sequence(case, 0, 3)[0]
    cursor, at = None, 0
    while at < len(expected):
        order, found = case.order(0, cursor, passes=3), []
        for known in case.arriving(rng):
            found += drain(order, Given(known))
        found += drain(order, Given(case.everything))
        assert found == expected[at:]
        at += rng.randint(1, 400)
        cursor = through_json(order.mark_at(at)) if at <= len(expected) else None


@pytest.mark.parametrize("number", range(8))
@pytest.mark.sampled(3)
def test_a_position_alone_can_be_resumed_where_everything_has_arrived(number):
    case = drawn(200 + number)
    expected, arrivals = sequence(case, 0, 3)[0], Given(case.everything)
    for position in range(0, len(expected) + 1, 7):
        resumed = case.order(0, through_json(Cursor.at(position)), passes=3)
        assert drain(resumed, arrivals, most=30)[:30] == expected[position : position + 30]


def test_a_position_alone_waits_for_the_shards_before_it():
    case = Case(seed=1, entries=[list(range(100))] * 8, groups=1, lanes=2, window=10)
    expected = sequence(case, 0, 1)[0]
    resumed = case.order(0, Cursor.at(500), passes=1)
    found = []
    for known in case.arriving(random.Random(1)):
        found += drain(resumed, Given(known))
    found += drain(resumed, Given(case.everything))
    assert found == expected[500:]


def test_a_mark_costs_a_window_and_little_more():
    class Equal:
        def arrived(self, shard):
            return np.arange(1000), True

    options = OrderOptions(seed=4, groups=1, lanes=8, window=10_000)
    order = GroupOrder(options, 10_000, 0, 0)
    while order.position < 300_000:
        order.advance(Equal())
    for back in (0, 1, 5_000, 65_536):
        cursor = order.mark_at(order.position - back)
        assert 10_000 <= cursor.skip < 10_000 + 2 * 4096 + 8
        assert len(json.dumps(cursor.to_json())) < 250 + 12 * len(cursor.done)
        assert len(cursor.done) < 40
    with pytest.raises(ValueError, match="are kept for the last 65536"):
        order.mark_at(order.position - 200_000)


class Full:
    """Shards of these sizes, all of them there."""

    def __init__(self, sizes):
        self._entries = [np.arange(size) for size in sizes]

    def arrived(self, shard):
        return self._entries[shard], True


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    window=st.sampled_from([0, 1, 300, 3_000, 20_000, 2**31 - 1]) | st.integers(0, 6_000),
    lanes=st.sampled_from([1, 8]) | st.integers(1, 400),
    batch=st.sampled_from([1, 7, 256]) | st.integers(1, 3_000),
    sizes=st.lists(st.sampled_from([1, 30, 1_000, 4_000]) | st.integers(0, 2_000), min_size=1, max_size=9),
    epoch=st.integers(0, 1),
    seed=st.integers(0, 2**32),
)
def test_the_cursor_after_a_batch_is_known_when_the_batch_is(window, lanes, batch, sizes, epoch, seed):
    """A worker follows the order until its batch is known, then asks for the cursor after it."""
    options, arrivals, passes = OrderOptions(seed, 1, lanes, window), Full(sizes), 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_HISTORY", 0)
        order = GroupOrder(options, len(sizes), 0, epoch, passes=passes)
    steps = min(-(-passes * sum(sizes) // batch), 3_000)
    kept, cursors, found = range(0, steps, max(1, steps // 4)), [], [np.empty((3, 0), np.int64)]
    for step in range(steps):
        while order.position < (step + 1) * batch and not order.finished:
            found.append(np.stack(order.advance(arrivals)))
        cursor = order.mark_at(min((step + 1) * batch, order.position))
        cursors += [cursor] if step in kept else []
    whole = np.concatenate(found, axis=1)
    for cursor in cursors:
        resumed = GroupOrder(options, len(sizes), 0, epoch, through_json(cursor), passes=passes)
        rest = [np.empty((3, 0), np.int64)]
        while not resumed.finished and resumed.position < cursor.position + 500:
            rest.append(np.stack(resumed.advance(arrivals)))
        given_out = np.concatenate(rest, axis=1)
        shared = min(given_out.shape[1], whole.shape[1] - cursor.position)  # the first run stops at a step
        assert np.array_equal(given_out[:, :shared], whole[:, cursor.position :][:, :shared])


@pytest.mark.parametrize("window", [0, 300, 5_000])
def test_a_cursor_of_a_late_pass_is_no_dearer_than_one_of_the_first(window):
    """A resume reads no pass before that of its cursor: at most the one in which the window was filled."""
    sizes, passes = [400] * 10, 6
    options = OrderOptions(seed=1, groups=1, lanes=4, window=window)
    order, arrivals = GroupOrder(options, len(sizes), 0, 0, passes=passes), Full(sizes)
    begun = {}
    while not order.finished:
        pass_before = order.pass_
        order.advance(arrivals)
        cursor = order.mark_at(order.position)
        first = order.position // sum(sizes)
        begun[first] = cursor
        assert cursor.pass_ >= min(pass_before, first) - 1 - window // sum(sizes)
        assert cursor.skip <= window + 2 * 4096 + 4
    assert set(begun) >= set(range(passes))
    whole = None
    for cursor in begun.values():
        resumed = GroupOrder(options, len(sizes), 0, 0, through_json(cursor), passes=passes)
        rest = [np.empty((3, 0), np.int64)]
        while not resumed.finished:
            rest.append(np.stack(resumed.advance(arrivals)))
        given_out = np.concatenate(rest, axis=1)
        assert given_out.shape[1] == passes * sum(sizes) - cursor.position
        whole = given_out if whole is None else whole
        assert np.array_equal(given_out, whole[:, whole.shape[1] - given_out.shape[1] :])


@pytest.mark.parametrize("window", [150_000, 400_000, 1_000_000])
def test_the_window_of_a_large_data_set_may_be_most_of_it(window):
    order, step = GroupOrder(OrderOptions(1, 1, 8, window), 60, 0, 1, passes=2), 0
    while not order.finished:
        step += 1
        while order.position < step * 4_096 and not order.finished:
            order.advance(Full([10_000] * 60))
        order.mark_at(min(step * 4_096, order.position))


def test_a_position_that_was_not_given_out_has_no_mark_fails():
    case = Case(seed=1, entries=[[0, 1, 2]], groups=1, lanes=2, window=10)
    order = case.order(0, passes=1)
    order.mark_at(0)
    with pytest.raises(ValueError, match="No cursor for position 1"):
        order.mark_at(1)
    drain(order, Given(case.everything))
    with pytest.raises(ValueError, match="No cursor for position 4"):
        order.mark_at(4)


def test_a_cursor_of_other_lanes_fails():
    case = Case(seed=1, entries=[list(range(900))] * 4, groups=1, lanes=2, window=10)
    order = case.order(0)
    drain(order, Given(case.everything), most=1000)
    cursor = order.mark_at(1000)
    case.lanes = 3
    with pytest.raises(OptionError, match="has 2 lanes"):
        case.order(0, cursor)


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        {"position": 1, "pass": 0},
        {"position": -1, "pass": 0, "skip": 0},
        {"position": 1, "pass": 0, "skip": 1.5},
        {"position": 1, "pass": 0, "skip": 0, "lanes": [1, 2, 3]},
        {"position": 1, "pass": 0, "skip": 0, "lanes": [1, 2, 3, 4, [[0, 0]]]},
        {"position": 1, "pass": 0, "skip": 0, "lanes": [1, 2, 3, 4, [[0, -1, 0]]]},
        {"position": 1, "pass": 0, "skip": 0, "done": [[1]]},
        {"position": 1, "pass": 0, "skip": 0, "done": [[1, -1]]},
    ],
)
def test_what_is_not_a_cursor_fails(value):
    with pytest.raises(OptionError, match="Not a cursor"):
        Cursor.from_json(value)
