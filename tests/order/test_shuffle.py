"""Due times, and the window that hands references out in their order."""

import random

import numpy as np
import pytest

import streamload.order.shuffle as window_room
from streamload.order.lanes import SAMPLE_BITS
from streamload.order.shuffle import ShuffleWindow, due_times

COUNT = 30_000


def whole_due_times(key, numbers, window, opening=None):
    """Due times cut to whole references: many are equal."""
    return due_times(key, numbers, window, opening) >> 16 << 16


@pytest.mark.parametrize("window", [0, 1, 100, 10_000, 60_000])
@pytest.mark.parametrize("largest_push", [7, 5_000])
def test_references_come_by_due_time_and_then_by_number(monkeypatch, window, largest_push):
    monkeypatch.setattr(window_room, "due_times", whole_due_times)
    count = COUNT if largest_push > 100 else COUNT // 10
    numbers = np.arange(count)
    due = whole_due_times(5, numbers, window)
    assert window <= 1 or len(set(due.tolist())) < count
    held, rng, pushed, found = ShuffleWindow(5, window, count), random.Random(window), 0, []
    while pushed < count:
        more = min(rng.randint(1, largest_push), count - pushed)
        held.push(pushed, numbers[pushed : pushed + more] << SAMPLE_BITS)
        pushed += more
        found += held.pop(pushed).tolist()
        assert len(found) == np.count_nonzero(due[:pushed] < pushed << 16)
    found += held.pop_all().tolist()
    assert found == (np.lexsort([numbers, due]) << SAMPLE_BITS).tolist()


@pytest.mark.parametrize("window", [1, 10, 1000, 2**31 - 1])
def test_a_reference_comes_less_than_a_window_late_and_never_early(window):
    numbers = np.arange(2000)
    late = due_times(9, numbers, window) - (numbers << 16)
    assert late.min() >= 0
    assert late.max() < window << 16
    assert late.max() > window << 15


def test_the_window_opens_with_an_eighth_of_the_number_and_later_with_a_quarter():
    numbers = np.arange(100_000)
    late = due_times(9, numbers, 10_000, opens_slowly=True) - (numbers << 16)
    full = due_times(9, numbers, 10_000) - (numbers << 16)
    assert (late <= full).all()
    assert (late[:4_096] <= (numbers[:4_096] // 8) << 16).all()
    for number in (64, 1_000, 4_096, 6_000, 42_000):
        opened = late[number] / full[number] * 10_000
        assert opened == pytest.approx(max(number // 8, number // 4 - 512), rel=0.001)
    assert (late[42_048:] == full[42_048:]).all()


def test_the_widest_window_opens_without_overflow():
    numbers = np.arange(0, 1 << 40, 1 << 30)
    late = due_times(9, numbers, 2**31 - 1, opens_slowly=True) - (numbers << 16)
    assert late.min() >= 0
    assert late.max() < (2**31 - 1) << 16


def test_mixing_spreads_a_shard_as_far_as_lanes_and_window_reach():
    """Of shards of 1,000 a window of 10,000 over 8 lanes mixes about 20 at once: not all, and not few."""
    due = due_times(3, np.arange(100_000), 10_000)
    shard = np.arange(100_000) // 8_000 * 8 + np.arange(100_000) % 8
    batches = shard[np.argsort(due, kind="stable")][20_000:80_000].reshape(-1, 250)
    different = [len(set(batch.tolist())) for batch in batches]
    assert 12 < np.mean(different) < 30
