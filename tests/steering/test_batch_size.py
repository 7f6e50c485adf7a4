"""Decisions on the batch size over simulated trainings: few moves that aren't right, whatever the noise."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from streamload.errors import OptionError
from streamload.steering.batch_size import (
    BatchPolicy,
    FunctionBatchPolicy,
    Measured,
    SizeDecided,
    ThroughputBalanced,
    as_batch_policy,
)


@dataclass
class Training:
    """A training whose device takes `fixed` + `row` × size seconds a step, and whose loader gives rows.

    Attributes:
        loader: seconds a row, by the number of the interval.
        jitter: seconds by which a step's batch is late, whatever its size: what larger steps even out. Also
            what a batch takes in `next`, which counts as waiting.
        noise: of both, as a share.
    """

    fixed: float = 0.001
    row: float = 1e-3
    loader: Callable[[int], float] = lambda interval: 0.5e-3
    jitter: float = 0.0
    noise: float = 0.02
    seed: int = 0
    numbers: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.numbers.seed(self.seed)

    def interval(self, number: int, size: int, every: int = 200) -> Measured:
        device = self.fixed + self.row * size
        late = max(0.0, self.loader(number) * size - device) + self.jitter
        device *= 1 + self.noise * self.numbers.gauss(0, 1)
        late *= max(0.0, 1 + self.noise * self.numbers.gauss(0, 1))
        return Measured(number * every, size, late / (late + device), late + device)


def follow(policy: ThroughputBalanced, training: Training, size: int, intervals: int = 120) -> list[int]:
    """The size in each interval; decisions go through JSON, as through a state."""
    memory, sizes = None, []
    for number in range(1, intervals + 1):
        decided = policy.decide(training.interval(number, size), memory)
        memory = json.loads(json.dumps(decided.memory))
        size = decided.size or size
        assert policy.least <= size <= policy.most
        assert decided.reason
        sizes.append(size)
    return sizes


def moves(sizes: list[int]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in itertools.pairwise(sizes) if a != b]


POLICY = ThroughputBalanced(least=64, most=1024)


@pytest.mark.parametrize("seed", range(20))
def test_where_data_is_never_late_steps_never_shrink_and_stay_where_larger_ones_are_no_faster(
    seed: int,
) -> None:
    sizes = follow(POLICY, Training(seed=seed), 512)
    assert sizes[-1] == 512
    assert set(sizes) <= {512, 768}
    assert len(moves(sizes)) <= 2 * 4  # trials, after rests of 8, 16, 32 and 64 intervals


@pytest.mark.parametrize("seed", range(20))
def test_where_data_is_never_late_steps_grow_as_long_as_samples_a_second_do(seed: int) -> None:
    """Each step has 90 ms of its own: 96 rows are 25 % faster than 64, 768 rows 5 % faster than 512."""
    sizes = follow(POLICY, Training(fixed=0.09, seed=seed), 64)
    assert sizes[-1] >= 480
    kept = [before for before, after in moves(sizes) if after > before]
    assert kept == sorted(kept)
    assert all(size >= 64 for size in sizes)


@pytest.mark.parametrize("seed", range(20))
def test_waits_that_larger_steps_even_out_make_them_larger(seed: int) -> None:
    """Each batch is 60 ms late whatever its size: 48 % of the time with 64 rows, 10 % with 530.

    From there on, larger ones are hardly faster: one may be tried and taken back.
    """
    sizes = follow(POLICY, Training(jitter=0.06, seed=seed), 64)
    assert sizes[-1] >= 480
    assert all(after > before or before > 700 for before, after in moves(sizes))
    assert sum(after < before for before, after in moves(sizes)) <= 4  # after rests of 8, 16, 32 and 64


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("row", [1e-4, 1e-5])
def test_a_device_with_a_cost_of_its_own_gets_large_steps_within_ten_decisions(seed: int, row: float) -> None:
    """20 ms a step and 0.1 ms a row: 128 rows are 2.8 × as fast as 32. Batches take 0.8 ms in `next`, 3 %."""
    policy = ThroughputBalanced(least=16, most=512)
    training = Training(fixed=0.02, row=row, loader=lambda _: row / 5, jitter=0.0008, seed=seed)
    sizes = follow(policy, training, 32)
    assert sizes[9] >= 128
    assert sizes[-1] == 512
    assert sum(after < before for before, after in moves(sizes)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_steps_grow_no_farther_than_data_is_on_time(seed: int) -> None:
    """The same device, and a loader of 2,500 rows a second, which 70 rows a step take: 192 are tried once."""
    policy = ThroughputBalanced(least=16, most=512)
    training = Training(fixed=0.02, row=1e-4, loader=lambda _: 4e-4, jitter=0.0008, seed=seed)
    sizes = follow(policy, training, 32)
    assert 64 <= sizes[-1] <= 176
    assert max(sizes) <= 256
    assert sizes.count(max(sizes)) <= 8


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_training_sizes_are_bounded_and_never_below_one_that_was_kept(seed: int) -> None:
    numbers = random.Random(seed)
    least = numbers.randint(1, 200)
    policy = ThroughputBalanced(
        least=least, most=least + numbers.randint(0, 2000), multiple=numbers.choice([1, 7, 8, 64])
    )
    pace = numbers.choice([0.1, 0.9, 1.0, 1.5])
    training = Training(
        fixed=numbers.choice([0.0, 0.02, 0.2]),
        row=(row := numbers.choice([1e-5, 1e-3])),
        loader=lambda number: row * pace * (4 if number % 50 < 3 else 1),
        jitter=numbers.choice([0.0, 0.001, 0.1]),
        noise=numbers.choice([0.0, 0.02, 0.3]),
        seed=seed,
    )
    memory, size = None, least
    kept, past_kept = least, []
    for number in range(1, 200):
        decided = policy.decide(training.interval(number, size), memory)
        memory = json.loads(json.dumps(decided.memory))
        assert len(json.dumps(memory)) < 1000
        if "keeps" in decided.reason:
            past_kept.append(kept := size)
        if decided.size is not None:
            assert decided.size != size
            assert kept <= decided.size <= policy.most
            assert decided.size % policy.multiple == 0 or decided.size in (least, policy.most, kept)
            assert decided.size <= max(4 * size + policy.multiple, 1.5 * size + policy.multiple)
            size = decided.size
    assert past_kept == sorted(past_kept)


@pytest.mark.parametrize("seed", range(20))
def test_a_loader_that_is_evenly_too_slow_is_not_helped_by_any_size(seed: int) -> None:
    sizes = follow(POLICY, Training(loader=lambda _: 2e-3, seed=seed, fixed=0.0), 256, 60)
    assert sizes[-1] == 256
    assert set(sizes) <= {256, 384}
    assert len(moves(sizes)) <= 2 * 3


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_a_loader_that_is_a_little_slow_leaves_steps_as_they_are(seed: int, noise: float) -> None:
    """6 % of the time is waiting, whatever the size: a larger one is tried five times in 200 decisions."""
    training = Training(fixed=0.0, loader=lambda _: 1.064e-3, noise=noise, seed=seed)
    sizes = follow(POLICY, training, 256, 200)
    assert set(sizes) == {256, 384}
    assert len(moves(sizes)) <= 2 * 5
    assert sizes[-1] == 256


@pytest.mark.parametrize("seed", range(40))
def test_spikes_leave_steps_as_they_are(seed: int) -> None:
    """Every tenth interval or so the loader is ten times as slow, twice in a row at most."""
    numbers = random.Random(seed)
    spikes = {number + more for number in range(5, 200, 10) for more in range(numbers.randint(1, 2))}
    training = Training(jitter=0.0164, loader=lambda number: 5e-3 if number in spikes else 0.5e-3, seed=seed)
    sizes = follow(POLICY, training, 256, 200)
    assert set(sizes) == {256, 384}
    assert len(moves(sizes)) <= 2 * 5
    assert sizes[-1] == 256


@pytest.mark.parametrize("slow", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_a_slow_start_costs_one_false_move_at_most(slow: int, seed: int) -> None:
    """While a cache fills the loader is four times as slow; then 6 % of the time is waiting."""
    training = Training(fixed=0.0, loader=lambda n: 4e-3 if n <= slow else 1.064e-3, seed=seed)
    sizes = follow(POLICY, training, 256, 60)
    assert sizes[-1] in (256, 384)
    assert max(sizes) <= 576


def test_it_grows_when_data_gets_late_and_keeps_that_when_it_no_longer_is() -> None:
    late = [0.0] * 80 + [0.1] * 100 + [0.0] * 90
    training, memory, size, sizes = Training(seed=1), None, 256, []
    for number, jitter in enumerate(late, 1):
        training.jitter = jitter
        decided = POLICY.decide(training.interval(number, size), memory)
        memory, size = decided.memory, decided.size or size
        sizes.append(size)
    assert set(sizes[:80]) == {256, 384}
    assert sizes[60] == 256
    assert sizes[179] >= 576
    assert min(sizes[180:]) >= 576


def test_a_decision_depends_on_its_arguments_alone() -> None:
    measured, memory = Measured(600, 128, 0.4, 0.2), None
    for _ in range(4):
        first, again = POLICY.decide(measured, memory), POLICY.decide(measured, memory)
        assert first == again
        memory = first.memory
    assert POLICY.decide(measured, memory).size == 192


def test_policies_are_objects_with_decide_or_functions_and_nothing_else() -> None:
    assert isinstance(POLICY, BatchPolicy)
    assert as_batch_policy(POLICY) is POLICY
    policy = as_batch_policy(lambda measured: 2 * measured.size if measured.wait_share > 0.5 else None)
    assert policy.every == 200
    assert isinstance(policy, FunctionBatchPolicy)
    assert policy.decide(Measured(200, 8, 0.6, 1.0), None) == SizeDecided(16, None, "<lambda>")
    assert policy.decide(Measured(200, 8, 0.4, 1.0), None).size is None
    for given, match in ((ThroughputBalanced, "give an object"), (7, "expected ThroughputBalanced")):
        with pytest.raises(OptionError, match=match):
            as_batch_policy(given)  # type: ignore[arg-type]
    for options, match in (
        ({"least": 0, "most": 8}, "least=0"),
        ({"least": 64, "most": 32}, "most=32; expected a whole number of at least 64"),
        ({"least": 1, "most": 8, "every": 0}, "every=0"),
    ):
        with pytest.raises(OptionError, match=match):
            ThroughputBalanced(**options)
