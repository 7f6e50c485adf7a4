"""A policy that changes the batch size: asked with measurements, agreed, logged, resumed and replayed."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import streamload
from streamload import Images, Patches, Source
from streamload.batching import Measured, SizeDecided, ThroughputBalanced
from streamload.errors import OptionError, PolicyError
from streamload.loader.rank_run import Run
from streamload.loader.state import sealed
from streamload.mixing import Replay
from streamload.mixing.batch_size import BatchSizes, BatchSizing
from streamload.testing.shards import write_shards
from streamload.worker.messages import Batch, OrderStep, RowSources
from streamload.worker.states import SealedStates
from tests.loader.test_batch_size import keys_by_step, make

EVERY = 4


class Listed:
    """Gives sizes from a list, in the order of decisions, and keeps what it was asked with."""

    every = EVERY

    def __init__(self, sizes: list[int | None]) -> None:
        self.sizes = sizes
        self.asked: list[Measured] = []

    def decide(self, measured: Measured, memory: Any) -> SizeDecided:
        self.asked.append(measured)
        number = 0 if memory is None else memory["number"]
        size = self.sizes[number] if number < len(self.sizes) else None
        return SizeDecided(size, {"number": number + 1}, f"decision {number}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("policy")
    return [str(path) for path in write_shards(directory, [40, 52, 61, 33], seed=6)]


def test_the_size_changes_at_decision_steps_and_is_logged_once(
    data: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streamload")
    policy = Listed([None, 20, 20, 6])
    with make(data, tmp_path, batch_policy=policy, num_batches=20) as loader:
        rows = [len(batch) for batch in keys_by_step([loader])]
    assert rows == [12] * 8 + [20] * 8 + [6] * 4
    assert [measured.step for measured in policy.asked] == [4, 8, 12, 16]
    assert [measured.size for measured in policy.asked] == [12, 12, 20, 20]
    assert all(0 <= measured.wait_share <= 1 for measured in policy.asked)
    lines = [line for line in caplog.messages if line.startswith("batch size:")]
    assert lines == [
        "batch size: 20 samples a rank, from step 8 of the epoch on, not 12: decision 1",
        "batch size: 6 samples a rank, from step 16 of the epoch on, not 20: decision 3",
    ]


def test_a_plain_function_is_asked_every_200_steps(data: list[str], tmp_path: Path) -> None:
    asked = []

    def policy(measured: Measured) -> int | None:
        asked.append(measured)
        return measured.size * 2

    with make(data, tmp_path, batch_policy=policy, num_batches=210, batch_size=1) as loader:
        rows = [len(batch) for batch in keys_by_step([loader])]
    assert rows == [1] * 200 + [2] * 10
    assert asked[0].size == 1


def run_of(loader: streamload.Loader, epochs: int) -> tuple[list[list[str]], list[Any]]:
    batches, states = [], []
    with loader:
        for _ in range(epochs):
            for batch in loader:
                batches.append(batch["__key__"])
                states.append(json.loads(json.dumps(loader.state_dict())))
    return batches, states


@pytest.mark.parametrize(
    "length",
    [
        pytest.param({}, marks=pytest.mark.deep),
        pytest.param({"num_batches": 13}, marks=pytest.mark.deep),
        {"num_samples": 150},
    ],
)
def test_a_run_is_resumed_and_replayed_batch_by_batch(
    length: dict[str, Any], data: list[str], tmp_path: Path
) -> None:
    sizes: list[int | None] = [20, None, 8, 4, 16, 10]
    log = tmp_path / "decisions.jsonl"
    batches, states = run_of(
        make(data, tmp_path, batch_policy=Listed(sizes), decisions=log, num_workers=1, **length), 3
    )
    assert len({len(batch) for batch in batches}) >= 3
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    sized = [line for line in lines if line["kind"] == "batch_size"]
    assert {"decision 0", "decision 2"} <= {line["reason"] for line in sized}
    assert all(line["step_seconds"] > 0 for line in sized)

    replayed, replayed_states = run_of(make(data, tmp_path, mixing=Replay(log), **length), 3)
    assert replayed == batches
    for cut in range(0, len(batches) - 1, 5):
        workers, epochs = cut % 3, 3 - states[cut]["epoch"]
        for state in (states[cut], replayed_states[cut]):  # a replay goes on from its own states, too
            with make(data, tmp_path, mixing=Replay(log), num_workers=workers, **length) as loader:
                loader.load_state_dict(state)
                assert keys_by_step([loader], epochs) == batches[cut + 1 :], cut


def test_a_resumed_policy_remembers_and_its_log_goes_on(data: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_batches": 20}
    sizes: list[int | None] = [20, 8, 6, 16]
    log = tmp_path / "decisions.jsonl"
    batches, states = run_of(make(data, tmp_path, batch_policy=Listed(sizes), decisions=log, **options), 1)
    assert {len(batch) for batch in batches} == {12, *sizes}
    for cut in (2, 3, 4, 7, 9, 10):  # whatever was measured before the cut counts after it
        (tmp_path / f"{cut}.jsonl").write_bytes(log.read_bytes())
        options["decisions"] = tmp_path / f"{cut}.jsonl"
        with make(data, tmp_path, batch_policy=Listed(sizes), **options) as loader:
            loader.load_state_dict(states[cut])
            assert keys_by_step([loader]) == batches[cut + 1 :]
        with make(data, tmp_path, mixing=Replay(options.pop("decisions")), **options) as loader:
            assert keys_by_step([loader]) == batches
    other = sealed({**states[10], "batch_policy": {"steps": 2, "decided": 3, "memory": None}})
    mismatch = pytest.raises(streamload.errors.StateMismatch, match="batch_policy")
    with make(data, tmp_path, batch_policy=Listed(sizes)) as loader, mismatch:
        loader.load_state_dict(other)


def test_sizes_that_the_training_sets_are_logged_and_replayed_with_weights(
    data: list[str], tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl"
    sources = [Source(data[:2], 1, "a"), Source(data[2:], 1, "b")]
    batches = []
    with make(sources, tmp_path, num_workers=1, num_batches=12, decisions=log) as loader:
        for _ in range(2):
            for number, batch in enumerate(loader):
                batches.append(batch["__key__"])
                if number == 2:
                    loader.set_batch_size(24 - len(batches))
                if number == 4:
                    loader.set_weights({"a": len(batches)})
    with make(sources, tmp_path, num_batches=12, mixing=Replay(log)) as loader:
        assert keys_by_step([loader], 2) == batches
        with pytest.raises(OptionError, match=r"leave out set_batch_size\(\)"):
            loader.set_batch_size(3)
    options: dict[str, Any] = {
        "num_batches": 12,
        "mixing": Replay(log),
        "rank": 0,
        "world_size": 4,
        "groups": 1,
    }
    with (
        make(sources, tmp_path, batch_size=3, **options) as loader,
        pytest.raises(
            streamload.errors.DecisionsError, match="steps of 21 samples, which 4 ranks can't share"
        ),
    ):
        iter(loader)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_is_measured_is_the_time_of_steps_of_one_size(data: list[str], tmp_path: Path) -> None:
    """Not what is between two epochs, and no interval of which less than half was measured."""
    policy, clock = Listed([None] * 9), Clock()
    with make(data, tmp_path, batch_policy=policy) as loader:
        run, schedule = Run(BatchSizes.name, loader._run), loader._run.schedule
        sizing = BatchSizing(run, clock)

    def take(steps: int, rows: int, seconds: float, waited: float) -> None:
        for _ in range(steps):
            clock.now += seconds
            run.counts.add("data_wait_ns", int(waited * 1e9))
            step = OrderStep(0, rows, SealedStates({}), {})
            sizing.taken(Batch({}, 0, 0, step, RowSources(rows, [rows]), []))
            sizing.before_batch()

    def begin() -> None:
        sizing.start_epoch(0)

    begin()
    take(4, 12, 2.0, 0.5)
    assert policy.asked == [Measured(4, 12, 0.25, 2.0)]
    begin()
    clock.now += 1000  # an evaluation
    take(4, 12, 1.0, 0.9)
    assert policy.asked[1] == Measured(8, 12, 0.9, 1.0)
    take(3, 12, 1.0, 0.0)
    take(1, 24, 1.0, 0.0)  # another size: nothing of it is measured yet
    assert len(policy.asked) == 2
    schedule.tracker.add(schedule.resized(24, 0), 12, 0)
    take(4, 24, 3.0, 0.3)
    assert policy.asked[2] == Measured(16, 24, pytest.approx(0.1), 3.0)


def of_two_ranks(rank: int, data: list[str], place: Path) -> None:
    """Rank 1 waits and is slow; its own policy isn't asked."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2
    )
    policy = Listed([10, 4] if rank == 0 else [7, 7])
    options: dict[str, Any] = {"batch_size": 6, "num_batches": 14, "num_workers": rank}
    taken = BatchSizing.taken

    def slow(sizing: BatchSizing, batch: Batch) -> None:
        sizing._run.counts.add("data_wait_ns", rank * 10**12)
        taken(sizing, batch)
        sizing._seconds += rank * 2000

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BatchSizing, "taken", slow)
        with make(data, place / f"{rank}", rank=rank, world_size=2, batch_policy=policy, **options) as loader:
            rows = [len(batch["__key__"]) for batch in loader]
    asked = [[measured.wait_share, measured.step_seconds] for measured in policy.asked]
    (place / f"{rank}.json").write_text(json.dumps([rows, asked]))
    torch.distributed.destroy_process_group()


def test_rank_0_decides_for_all_by_what_the_slowest_rank_measured(data: list[str], tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(of_two_ranks, (data, tmp_path), nprocs=2, start_method="fork")
    (rows, asked), (others, nothing) = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    )
    assert rows == others
    assert rows == [6] * 6 + [10] * 8 or rows == [6] * 6 + [10] * 4 + [4] * 4
    assert all(share > 0.3 and seconds > 1000 for share, seconds in asked)
    assert nothing == []


def failing(measured: Measured) -> int:
    raise KeyError("learning rate")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (failing, "batch_policy=.*failing.* at step 200 of the run: KeyError: 'learning rate'"),
        (lambda measured: -3, "it returned -3; expected a whole number of at least 1, or None"),
        (lambda measured: 2.5, r"it returned 2\.5"),
    ],
)
def test_a_policy_that_fails_ends_the_training_and_says_why(
    policy: Any, message: str, data: list[str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"batch_policy": policy, "num_batches": 210, "batch_size": 1}
    with make(data, tmp_path, **options) as loader, pytest.raises(PolicyError, match=message):
        list(loader)


STEPPED: Mapping[str, Any] = {
    "map_sample": None,
    "images": Images(patches=Patches(8, (4, 9), steps=[(4, 9)])),
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": False}, "batch_policy= is for training"),
        (STEPPED, "batch_policy= is for steps of one size"),
        ({"batch_policy": 3}, "batch_policy=3; expected ThroughputBalanced"),
        ({"rank": 0, "world_size": 2}, "nothing joins the 2 ranks .* initialise torch.distributed"),
        ({"groups": 8, "num_batches": 3, "batch_size": 16}, "equal parts"),
    ],
)
def test_policies_that_can_not_be_are_refused(
    options: dict[str, Any], message: str, data: list[str], tmp_path: Path
) -> None:
    policy = ThroughputBalanced(least=4, most=64)
    with (
        pytest.raises(OptionError, match=message),
        make(data, tmp_path, **{"batch_policy": policy, **options}) as loader,
    ):
        iter(loader)


def test_the_most_rows_of_a_policy_have_to_fit_into_the_limits_of_memory(
    data: list[str], tmp_path: Path
) -> None:
    row = 3 * 224 * 224 * 4
    options: dict[str, Any] = {"map_sample": None, "memory": {"image": 40 * row}}
    for most, fits in ((40, True), (48, False)):
        policy = ThroughputBalanced(least=8, most=most)
        with make(data, tmp_path, batch_policy=policy, **options) as loader:
            if fits:
                iter(loader)
            else:
                with pytest.raises(OptionError, match="image of a batch of 48 rows"):
                    iter(loader)
