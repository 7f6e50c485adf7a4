"""A part that runs out of memory: the step begins again in smaller parts on all ranks, or ends them all."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import streamload
from streamload import Batches, Order
from streamload.errors import OptionError, RankFailed, StateMismatch
from streamload.loader.state import sealed
from streamload.testing.shards import write_shards
from tests.batching.test_padding import words
from tests.batching.test_part_size import LIMIT, Device
from tests.support import flat

ROWS, STEPS = 16, 8


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("retried")
    write_shards(directory, [64], seed=3)
    return str(directory)


class Memory(Device):
    """A device with room for nine rows (without weights), which runs out of memory as torch does.

    Attributes:
        kept: bytes between two steps, without gradients.
        freed: how often unused memory was given back.
    """

    def __init__(self, rows: float = 9.5) -> None:
        super().__init__(LIMIT // 1000, 0, LIMIT / rows, 0, 0, 0.05, 1)
        self.kept, self.freed = self.allocated, 0

    def update(self) -> None:
        super().update()
        self.kept = self.allocated

    def free_unused(self) -> None:
        self.allocated = self.kept
        self.freed += 1

    def compute(self, rows: int, width: float, is_first: bool) -> None:
        try:
            super().compute(rows, width, is_first)
        except Exception as exc:
            raise torch.OutOfMemoryError(f"simulated: {exc}") from None


@contextlib.contextmanager
def made(shards: str, place: Path, memory: Device, **options: Any) -> Iterator[streamload.Loader]:
    """A loader whose batches are on a simulated device."""
    options = {"batches": Batches(microbatch="auto"), "batch_size": ROWS, "num_batches": STEPS, **options}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("streamload.batching.microbatches.memory_of", lambda device: memory)
        with flat.make_loader(
            shards, words, num_workers=0, output="dict", with_keys=True, cache_dir=place, **options
        ) as loader:
            yield loader


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(8, 4), nn.Flatten(), nn.Linear(80, 1)).double()


def loss_of(model: nn.Module, part: Any) -> torch.Tensor:
    loss: torch.Tensor = model(part["text"]).tanh().mean()
    return loss


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None for grad in found)
    return [grad.clone() for grad in found if grad is not None]


class FailsInBackward(torch.autograd.Function):
    """The identity; its backward runs out of memory, after the gradients of later layers were added."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise torch.OutOfMemoryError("simulated, in backward")


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("step", [0, 1, 6])
def test_the_step_begins_again_in_halves_and_has_the_gradients_of_the_whole_batch(
    shards: str, tmp_path: Path, stage: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    memory, model = Memory(), small_model()
    attempts: list[list[list[int]]] = []
    with made(shards, tmp_path, memory) as loader:
        for number, batch in enumerate(loader):
            attempts.append([])
            for parts in loader.microbatches(batch).attempts(model.zero_grad):
                attempts[-1].append([])
                with parts:
                    for part in parts:
                        rows = len(part["text"])
                        attempts[-1][-1].append(rows)
                        is_failing = number == step and len(attempts[-1]) == 1
                        is_failing &= rows > 1 and part.rows.start > 1
                        if is_failing and stage == "forward":
                            raise torch.OutOfMemoryError("simulated, in forward")
                        embedded = model[0](part["text"])
                        if is_failing:
                            embedded = FailsInBackward.apply(embedded)
                        (model[2](model[1](embedded)).tanh().mean() * part.fraction).backward()
                        memory.compute(rows, 1.0, is_first=part.rows.start == 0)
            memory.update()
            by_parts = gradients(model)
            model.zero_grad()
            loss_of(model, batch).backward()
            torch.testing.assert_close(by_parts, gradients(model), rtol=1e-10, atol=1e-14)
        state = loader.state_dict()
    for number, tried in enumerate(attempts):
        assert len(tried) == (2 if number == step else 1)
        assert sum(tried[-1]) == ROWS
        failed = attempts[step][0][-1]
        if number == step:
            assert max(tried[1]) <= failed // 2
        if number > step:
            assert max(tried[0]) <= failed // 2
    assert state["microbatch"] == {"rows": attempts[step][0][-1] // 2, "limit_bytes": LIMIT}
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"memory ran out in step {step}, a microbatch of rows" in messages[0]
    assert messages[1] == f"step {step} begins again, in microbatches of at most {failed // 2} rows"
    assert memory.freed == 1


def run_out(loader: streamload.Loader, fails: Callable[[int, int, int], bool]) -> list[list[list[int]]]:
    """Take an epoch by attempts, which run out of memory by `fails(step, attempt, rows)`; the rows tried."""
    tried: list[list[list[int]]] = []
    for step, batch in enumerate(loader):
        tried.append([])
        for attempt, parts in enumerate(loader.microbatches(batch).attempts(lambda: None)):
            tried[-1].append([])
            with parts:
                for part in parts:
                    tried[-1][-1].append(len(part["text"]))
                    if fails(step, attempt, len(part["text"])):
                        raise torch.OutOfMemoryError("simulated")
    return tried


def test_a_step_that_runs_out_of_memory_twice_is_the_error(shards: str, tmp_path: Path) -> None:
    with (
        pytest.raises(torch.OutOfMemoryError) as raised,
        made(shards, tmp_path, Memory()) as loader,
    ):
        run_out(loader, lambda step, attempt, rows: step == 2)
    assert "in step 2, a microbatch of rows 0–7 of 16" in raised.value.__notes__[0]


def test_a_part_of_one_row_has_no_halves(shards: str, tmp_path: Path) -> None:
    with (
        pytest.raises(torch.OutOfMemoryError) as raised,
        made(shards, tmp_path, Memory()) as loader,
    ):
        run_out(loader, lambda step, attempt, rows: True)
    assert raised.value.__notes__[1].startswith(
        "The step doesn't begin again: a rank ran out of memory in a microbatch of one row"
    )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("another"),
        MemoryError(),
        RuntimeError("not enough memory"),
        RankFailed("rank 1 of 2 has failed: CUDA out of memory"),
    ],
)
def test_other_errors_and_memory_of_the_host_end_the_step(
    shards: str, tmp_path: Path, error: Exception
) -> None:
    tried = 0
    with made(shards, tmp_path, Memory()) as loader, contextlib.suppress(type(error)):
        for parts in loader.microbatches(next(iter(loader))).attempts(lambda: None):
            tried += 1
            with parts:
                for _ in parts:
                    raise error
        raise AssertionError("the error was lost")
    assert tried == 1


@pytest.mark.parametrize("text", ["NPU out of memory. Tried to allocate 2 GiB", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_memory_of_the_device_that_another_library_asks_for(shards: str, tmp_path: Path, text: str) -> None:
    tried = []
    with made(shards, tmp_path, Memory()) as loader:
        for parts in loader.microbatches(next(iter(loader))).attempts(lambda: None):
            tried.append(0)
            with parts:
                for part in parts:
                    tried[-1] += len(part["text"])
                    if len(tried) == 1 and len(part["text"]) > 1:
                        raise RuntimeError(text)
    assert tried == [3, ROWS]


def test_with_a_given_number_of_rows_there_is_one_attempt(shards: str, tmp_path: Path) -> None:
    with made(shards, tmp_path, Memory(), batches=Batches(microbatch=8)) as loader:
        assert set(map(len, run_out(loader, lambda *_: False))) == {1}
        assert "microbatch" not in loader.state_dict()
        with pytest.raises(torch.OutOfMemoryError):
            run_out(loader, lambda *_: True)


def test_an_attempt_without_with_is_refused(shards: str, tmp_path: Path) -> None:
    with made(shards, tmp_path, Memory()) as loader:
        (parts,) = itertools.islice(loader.microbatches(next(iter(loader))).attempts(lambda: None), 1)
        with pytest.raises(OptionError, match="an attempt is a context manager"):
            next(iter(parts))


def test_a_second_loop_over_the_parts_of_an_attempt_is_refused(shards: str, tmp_path: Path) -> None:
    with made(shards, tmp_path, Memory()) as loader:
        batch = next(iter(loader))
        (parts,) = loader.microbatches(batch).attempts(lambda: None)
        with parts:
            assert sum(len(part["text"]) for part in parts) == ROWS
            with pytest.raises(OptionError, match=r"call loader\.microbatches\(batch\) for each loop"):
                next(iter(parts))


def test_an_evaluation_begins_again_by_itself(shards: str, tmp_path: Path) -> None:
    options = {"train": False, "order": Order(rank=0, world_size=2), "num_batches": None, "batch_size": 8}
    with made(shards, tmp_path, Memory(), **options) as loader:
        tried = run_out(loader, lambda step, attempt, rows: step == 1 and not attempt and rows > 1)
    assert [len(step) for step in tried] == [1, 2, 1, 1]
    assert max(tried[1][1]) == tried[1][0][-1] // 2


def test_a_resumed_run_begins_with_what_was_learned_unless_there_is_more_memory(
    shards: str, tmp_path: Path
) -> None:
    with made(shards, tmp_path, Memory()) as loader:
        for batch in itertools.islice(loader, 2):
            for attempt, parts in enumerate(loader.microbatches(batch).attempts(lambda: None)):
                with parts:
                    for part in parts:
                        if not attempt and len(part["text"]) == 8:
                            raise torch.OutOfMemoryError("simulated")
            assert loader.state_dict()["microbatch"] == {"rows": 4, "limit_bytes": LIMIT}
        state = json.loads(json.dumps(loader.state_dict()))
        assert streamload.gather_state(loader)["microbatch"] == state["microbatch"]

    def largest(memory: Memory) -> int:
        with made(shards, tmp_path, memory) as resumed:
            resumed.load_state_dict(state)
            assert resumed.state_dict()["microbatch"] == state["microbatch"]
            steps = [[len(part["text"]) for part in resumed.microbatches(batch)] for batch in resumed]
        assert list(map(sum, steps)) == [ROWS] * (STEPS - 2)
        return max(map(max, steps))

    more = Memory()
    more.limit_bytes = lambda: 2 * LIMIT  # type: ignore[method-assign]
    assert (largest(Memory()), largest(more)) == (4, ROWS)


@pytest.mark.parametrize(
    "damaged", [3, {"rows": 0, "limit_bytes": 5}, {"rows": 4}, {"rows": "4", "limit_bytes": 5}]
)
def test_a_damaged_state_is_refused(shards: str, tmp_path: Path, damaged: object) -> None:
    with made(shards, tmp_path, Memory()) as loader:
        state = sealed({**loader.state_dict(), "microbatch": damaged})
        with pytest.raises(StateMismatch, match="as microbatch"):
            loader.load_state_dict(state)


def test_ranks_that_nothing_joins_have_no_attempts(shards: str, tmp_path: Path) -> None:
    with made(shards, tmp_path, Memory(), order=Order(rank=0, world_size=2)) as loader:
        parts = loader.microbatches(next(iter(loader)))
        with pytest.raises(OptionError, match="nothing joins the 2 of this run"):
            next(parts.attempts(lambda: None))


def in_ranks(function: Callable[..., object], *arguments: object) -> None:
    torch.multiprocessing.start_processes(function, arguments, nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def joined(rank: int, place: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2
    )
    yield
    torch.distributed.destroy_process_group()


def train_by_attempts(rank: int, shards: str, place: Path) -> None:
    """DDP; rank 1 runs out of memory in the second part of steps 1 and 6, forward and backward in turn."""
    with joined(rank, place):
        memory, model = Memory(5.5), DistributedDataParallel(small_model())
        tried: list[list[list[int]]] = []
        options = {"order": Order(rank=rank, world_size=2)}
        with made(shards, place / f"cache-{rank}", memory, **options) as loader:
            for step, batch in enumerate(loader):
                tried.append([])
                for parts in loader.microbatches(batch).attempts(model.zero_grad):
                    tried[-1].append([])
                    with parts:
                        for part in parts:
                            tried[-1][-1].append(len(part["text"]))
                            is_second = len(tried[-1][-1]) == 2 and not part.is_last
                            fails = rank == 1 and step in (1, 6) and len(tried[-1]) == 1 and is_second
                            with contextlib.nullcontext() if part.is_last else model.no_sync():
                                loss = loss_of(model, part) * part.fraction
                                if fails and step == 1:
                                    raise torch.OutOfMemoryError("simulated, in forward")
                                loss.backward()
                                if fails:
                                    raise torch.OutOfMemoryError("simulated, in backward")
                            memory.compute(len(part["text"]), 1.0, is_first=part.rows.start == 0)
                memory.update()
                by_parts = gradients(model)
                model.zero_grad()
                loss_of(model, batch).backward()
                torch.testing.assert_close(by_parts, gradients(model), rtol=1e-10, atol=1e-14)
            learned = loader.state_dict()["microbatch"]
        (place / f"{rank}.json").write_text(json.dumps([tried, learned]))


def test_all_ranks_begin_again_where_one_ran_out_of_memory(shards: str, tmp_path: Path) -> None:
    in_ranks(train_by_attempts, shards, tmp_path)
    (tried, learned), second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert [tried, learned] == second
    assert [len(step) for step in tried] == [1, 2, 1, 1, 1, 1, 2, 1]
    for step, attempts in enumerate(tried):
        assert sum(attempts[-1]) == ROWS
        if step in (1, 6):
            assert len(attempts[0]) == 2
            assert max(attempts[1]) <= attempts[0][1] // 2
    assert learned == {"rows": tried[6][0][1] // 2, "limit_bytes": LIMIT}


def reduce_in_parts(rank: int, shards: str, place: Path, waits: bool) -> None:
    """Each part has a collective; rank 1 runs out of memory before it."""
    error = "none"
    with joined(rank, place):
        try:
            with pytest.MonkeyPatch.context() as patched, contextlib.ExitStack() as stack:
                patched.setattr("streamload.batching.retry._PATIENCE_SECONDS", 1.5)
                options = {"batch_size": ROWS // 2, "order": Order(rank=rank, world_size=2)}
                loader = stack.enter_context(made(shards, place / f"cache-{rank}", Memory(), **options))
                for parts in loader.microbatches(next(iter(loader))).attempts(lambda: None):
                    with parts:
                        for part in parts:
                            if rank == 1 and part.rows.start:
                                raise torch.OutOfMemoryError("simulated")
                            work = torch.distributed.all_reduce(torch.ones(1), async_op=True)
                            if waits or part.rows.start == 0:
                                work.wait()
        except Exception as exc:
            error = "\n".join([type(exc).__name__, str(exc), *getattr(exc, "__notes__", [])])
        (place / f"{rank}.txt").write_text(error)
        os._exit(0)  # as a rank that failed; the other one is in a collective


@pytest.mark.parametrize("waits", [False, True])
def test_ranks_that_are_in_a_collective_of_a_part_end_with_the_error(
    shards: str, tmp_path: Path, waits: bool
) -> None:
    """Those that don't wait for it (NCCL) would take the next attempt's in its place."""
    in_ranks(reduce_in_parts, shards, tmp_path, waits)
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert second.startswith("OutOfMemoryError\nsimulated")
    if waits:
        assert "The step doesn't begin again: one of 2 ranks ended while all agreed on" in second
        assert first.startswith("RuntimeError")  # gloo's: its peer is gone
    else:
        assert "The step doesn't begin again: a rank ran out of memory" in second
        assert first.startswith("RankFailed\na rank ran out of memory")
        assert first.endswith("before a collective of others")
