"""Steps of several sizes: where each begins, how it is split, and what is left of an epoch."""

import random

import pytest

from streamload.errors import OptionError
from streamload.order.events import new_batch_size
from streamload.order.steps import Block, Blocks, Split, Steps, StepTable
from streamload.patches.steps import TableSteps, refuse_uneven

STEPS = ((128, 16), (576, 3), (1024, 2), (128, 16), (128, 5))


def test_steps_that_are_alike_follow_each_other_without_end():
    steps = Steps(Split(12, groups=2, ranks=4), 24)
    assert [steps.begin(number) for number in range(3)] == [24, 36, 48]
    assert steps.at(36) == Split(12, groups=2, ranks=4)
    assert 10**9 in steps
    assert steps.seq_len(36) == 0


def test_steps_of_a_table_begin_where_the_ones_before_end():
    steps = TableSteps(Split(64, groups=2, ranks=4), 100, STEPS)
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


def followed(batch, position, resizes, count):
    """The first steps from a position on, one by one: (where each begins, its size)."""
    found = []
    while len(found) < count:
        batch = next((each.value["batch"] for each in reversed(resizes) if each.position <= position), batch)
        found.append((position, batch))
        position += batch
    return found


@pytest.mark.parametrize("number", range(30))
def test_steps_follow_their_sizes_however_these_become_known(number):
    rng = random.Random(number)
    position, first = rng.randrange(100), rng.randint(1, 9)
    resizes, place, batch = [], position, first
    for _ in range(rng.randint(1, 4)):
        place += rng.randint(0 if not resizes else 1, 5) * batch
        batch = rng.randint(1, 9)
        resizes.append(new_batch_size(place, batch))
    expected = followed(first, position, resizes, 40)
    at_once = Steps(Split(first, 1, 1), position, None, resizes)
    learned = Steps(Split(first, 1, 1), position)
    for known in range(1, len(resizes) + 1):
        learned.resize(resizes[rng.randrange(known) : known])  # those that are over may be left out
    for steps in (at_once, learned):
        assert [steps.begin(each) for each in range(40)] == [begin for begin, _ in expected]
        assert [steps.at(begin).batch for begin, _ in expected] == [size for _, size in expected]
        assert [steps.number(begin) for begin, _ in expected] == list(range(40))
        assert all(steps.number(begin + 1) == each + 1 for each, (begin, _) in enumerate(expected))


@pytest.mark.parametrize("number", range(30))
def test_an_epoch_ends_where_its_next_step_would_not_be_full_in_the_size_until_then(number):
    rng = random.Random(number)
    first, resizes, place, batch = rng.randint(1, 9), [], 0, 0
    batch = first
    for _ in range(rng.randint(0, 3)):
        place += rng.randint(1, 4) * batch
        batch = rng.randint(1, 9)
        resizes.append(new_batch_size(place, batch))
    steps = Steps(Split(first, 1, 1), 0, None, resizes)
    for samples in range(60):
        count, before = 0, first
        for begin, size in followed(first, 0, resizes, 70):
            if begin + max(size, before) > samples:
                break
            count, before = count + 1, size
        assert steps.count_within(samples) == count, samples


def test_blocks_begin_again_where_steps_have_another_size():
    blocks = Blocks(8, 6, are_growing=True)
    steps = Steps(Split(8, 1, 1), 0, blocks, [new_batch_size(64, 16, 3), new_batch_size(160, 4, 12)])
    assert [steps.block(begin) for begin in (0, 8, 24, 56, 64, 96, 112, 159, 160, 207)] == [
        Block(0, 8), Block(8, 16), Block(16, 32), Block(32, 64), Block(64, 112), Block(64, 112),
        Block(112, 160), Block(112, 160), Block(160, 208), Block(160, 208),
    ]  # fmt: skip
    assert [steps.is_planned(begin) for begin in (0, 8, 64)] == [False, True, True]


def test_a_size_that_changes_within_a_step_is_refused():
    with pytest.raises(OptionError, match="change in size at 30, where no step begins"):
        Steps(Split(12, 1, 1), 0, None, [new_batch_size(30, 6)])


def test_groups_that_ranks_cannot_share_evenly_are_refused():
    for groups, ranks in ((1, 5), (2, 8), (4, 4)):
        refuse_uneven(groups, ranks)
    for groups, ranks in ((2, 3), (8, 4)):
        with pytest.raises(OptionError, match=rf"{groups} don't divide {ranks}: give Order\(groups="):
            refuse_uneven(groups, ranks)
