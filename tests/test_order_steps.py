"""Steps of several sizes: where each begins, how it is split, and what is left of an epoch."""

import random

import pytest

from streamload.errors import OptionError
from streamload.order.split import Split
from streamload.order.steps import Steps, StepTable, refuse_uneven

STEPS = ((128, 16), (576, 3), (1024, 2), (128, 16), (128, 5))


def test_steps_that_are_alike_follow_each_other_without_end():
    steps = Steps(Split(12, groups=2, ranks=4), 24)
    assert [steps.begin(number) for number in range(3)] == [24, 36, 48]
    assert steps.at(36) == Split(12, groups=2, ranks=4)
    assert 10**9 in steps
    assert steps.seq_len(36) is None


def test_steps_of_a_table_begin_where_the_ones_before_end():
    steps = Steps(Split(64, groups=2, ranks=4), 100, STEPS)
    begins = [steps.begin(number) for number in range(7)]
    assert begins == [100, 164, 176, 184, 248, 268, 268]
    assert [steps.at(begin).batch for begin in begins[:5]] == [64, 12, 8, 64, 20]
    assert [steps.seq_len(begin) for begin in begins[:5]] == [128, 576, 1024, 128, 128]
    assert [begin in steps for begin in begins] == [True] * 5 + [False] * 2


def test_each_epoch_has_all_steps_in_an_order_of_its_own():
    table = StepTable(STEPS, 5, seed=3)
    epochs = [table.of_epoch(epoch) for epoch in range(6)]
    assert all(sorted(steps) == sorted(STEPS) for steps in epochs)
    assert len({tuple(steps) for steps in epochs}) > 3
    assert epochs[2] == StepTable(STEPS, 5, seed=5).of_epoch(0)  # as OpenCLIP adds them
    assert table.rows == 42


def test_an_epoch_of_more_steps_than_the_table_begins_it_again():
    steps = StepTable(STEPS, 8, seed=3).of_epoch(1)
    assert steps == StepTable(STEPS, 5, seed=3).of_epoch(1) + steps[:3]
    assert StepTable(STEPS, 8, seed=3).rows == 42 + 16 + 3 + 2


@pytest.mark.parametrize("number", range(20))
def test_what_is_left_of_an_epoch_begins_at_the_offset_or_after_it(number):
    rng = random.Random(number)
    drawn = tuple((rng.choice([64, 256]), rng.randint(1, 9)) for _ in range(rng.randint(1, 9)))
    table, ranks = StepTable(drawn, rng.randint(1, 20), seed=number), rng.randint(1, 4)
    whole, offset = table.of_epoch(7), 0
    for place, (_, rows) in enumerate(whole):
        assert table.remaining(7, offset, ranks) == whole[place:]
        for within in range(offset + 1, offset + rows * ranks + 1):
            assert table.remaining(7, within, ranks) == whole[place + 1 :]
        offset += rows * ranks
    assert table.remaining(7, offset + 1, ranks) == []


def test_groups_that_ranks_cannot_share_evenly_are_refused():
    for groups, ranks in ((1, 5), (2, 8), (4, 4)):
        refuse_uneven(groups, ranks)
    for groups, ranks in ((2, 3), (8, 4)):
        with pytest.raises(OptionError, match=rf"{groups} don't divide {ranks}: give Order\(groups="):
            refuse_uneven(groups, ranks)
