"""Claims: each batch is made by one worker, the one that is free, and comes in its turn."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from streamload.ipc import control
from streamload.ipc.control import Numbers, StepClaims
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat
from tests.support.tiers import until

GENERATION = 2


def claim(shared: StepClaims, count: int, answers: Any) -> None:
    """Claim so many numbers, and say which."""
    answers.put([shared.next(GENERATION) for _ in range(count)])


def die_in_claim(shared: StepClaims) -> None:
    control.os.pwrite = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined, assignment]
    shared.next(GENERATION)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_processes_claim_each_number_once_and_in_order(method: str) -> None:
    context, shared = multiprocessing.get_context(method), StepClaims()
    answers = context.Queue()
    processes = [context.Process(target=claim, args=(shared, 500, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    claimed = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    assert sorted(itertools.chain.from_iterable(claimed)) == list(range(1500))
    assert all(numbers == sorted(numbers) for numbers in claimed)


def test_a_process_that_is_killed_while_it_claims_stops_no_other() -> None:
    context, shared = multiprocessing.get_context("fork"), StepClaims()
    process = context.Process(target=die_in_claim, args=(shared,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert shared.next(GENERATION) == 0


def test_a_later_order_begins_at_0_and_ends_the_claims_of_the_one_before() -> None:
    shared = StepClaims()
    before = Numbers(shared, GENERATION)
    assert [next(iter(before)), next(iter(before))] == [0, 1]
    assert list(zip(Numbers(shared, GENERATION + 2), range(2), strict=False)) == [(0, 0), (1, 1)]
    assert list(before) == []


def test_a_number_that_was_claimed_in_advance_is_the_next_one() -> None:
    for numbers in (Numbers(StepClaims(), GENERATION), Numbers(None, GENERATION)):
        taken = iter(numbers)
        assert [next(taken), numbers.coming(), numbers.coming(), next(taken), next(taken)] == [0, 1, 1, 1, 2]


def test_numbers_of_an_iteration_that_was_dropped_are_the_processs_own_again() -> None:
    shared = StepClaims()
    dropped, other = Numbers(shared, GENERATION, most=4), Numbers(shared, GENERATION, most=4)
    assert [next(iter(dropped)), dropped.coming(), next(iter(other))] == [0, 1, 2]
    again = Numbers(shared, GENERATION, most=4, before=dropped)
    assert next(iter(again)) == 0
    once_more = Numbers(shared, GENERATION, most=4, before=again)
    assert [next(iter(once_more)) for _ in range(3)] == [0, 1, 3]
    assert next(iter(Numbers(shared, GENERATION + 2, most=4, before=once_more))) == 0


class Slow:
    """An image of its worker's number. Worker 0 waits with its first one until others have made so many."""

    def __init__(self, made: Path, others: int):
        self.made, self.others = made, others

    def __call__(self, image: Any) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        if info.id == 0:
            until(lambda: len(list(self.made.iterdir())) >= self.others)
        else:
            (self.made / os.urandom(8).hex()).touch()
        return torch.full((3, 2, 2), float(info.id))


class FailsAhead:
    """Fails at one image at once; the images of the first batch wait for that."""

    def __init__(self, failed: Path):
        self.failed = failed

    def __call__(self, image: Any) -> torch.Tensor:
        if image.size == (9, 9):
            self.failed.touch()
            raise ArithmeticError("no such image")
        until(self.failed.exists)
        return torch.zeros(3, 2, 2)


def test_a_worker_that_is_slow_makes_fewer_batches_and_none_is_out_of_turn(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [32] * 4)
    made = tmp_path / "made"
    made.mkdir()
    workers, batch = 3, 4
    may_be_ahead = workers * 2 - 1
    options: dict[str, Any] = {"batch_size": batch, "output": "dict", "with_keys": True, "seed": 3}
    options |= {"cache_dir": tmp_path / "cache"}
    slow = Slow(made, may_be_ahead * batch)
    with flat.make_loader(
        str(tmp_path / "shards"), None, preprocess=slow, num_workers=workers, **options
    ) as loader:
        batches = list(loader)
    with flat.make_loader(str(tmp_path / "shards"), None, num_workers=0, **options) as loader:
        assert [each["__key__"] for each in batches] == [each["__key__"] for each in loader]
    makers = [int(each["image"][0, 0, 0, 0]) for each in batches]
    assert makers[: may_be_ahead + 1].count(0) <= 1


def test_an_error_is_raised_in_its_turn_after_the_batches_before_it(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    write_shards(shards, [4], options=ShardOptions(image_side=(8, 8)))
    write_shards(tmp_path / "odd", [4], options=ShardOptions(image_side=(9, 9)))
    (tmp_path / "odd" / "00000.tar").rename(shards / "00001.tar")
    with flat.make_loader(
        str(shards),
        None,
        preprocess=FailsAhead(tmp_path / "failed"),
        train=False,
        batch_size=4,
        num_workers=2,
        cache_dir=tmp_path / "cache",
    ) as loader:
        batches = iter(loader)
        assert len(next(batches)[0]) == 4
        with pytest.raises(ArithmeticError, match="no such image"):
            next(batches)
