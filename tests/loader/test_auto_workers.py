"""num_workers="auto": processors by affinity, quotas and ranks, workers by them, and states of any number."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Batches, Order, limits
from streamload.errors import OptionError
from streamload.loader.auto_workers import auto_workers
from streamload.observe.figures import Machine
from streamload.observe.verdict import judge
from streamload.testing.shards import write_shards
from tests.observe.test_verdict import figures_of


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 processors whose control groups are files of this folder."""
    monkeypatch.setattr(limits, "_CGROUPS", tmp_path / "proc/self/cgroup")
    monkeypatch.setattr(limits, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("seed", range(60))
def test_the_smallest_quota_of_all_groups_counts_in_equal_parts_for_ranks(groups: Path, seed: int) -> None:
    numbers = random.Random(seed)
    is_v2, ranks = numbers.random() < 0.5, numbers.randint(1, 8)
    depth = numbers.randint(0, 3)
    place = "/" + "/".join("abc"[:depth])
    put(groups / "proc/self/cgroup", f"3:memory:/x\n{'0:' if is_v2 else '1:cpu,cpuacct'}:{place}\n")
    root = groups / "cgroup" / ("" if is_v2 else "cpu")
    root.mkdir(parents=True)
    put(groups / "cpu.max", "100000 100000")  # above the root: no group
    put(groups / "cgroup/memory/cpu.max", "100000 100000")
    allowed = 64.0
    for level in range(depth + 1):
        group = root.joinpath(*"abc"[:level])
        period = numbers.choice([50_000, 100_000])
        quota = numbers.choice([None, numbers.randint(30_000, 9_000_000)])
        if level and numbers.random() < 0.3:
            continue  # not there, as within a container
        if is_v2:
            put(group / "cpu.max", f"{'max' if quota is None else quota} {period}\n")
        else:
            put(group / "cpu.cfs_quota_us", f"{-1 if quota is None else quota}\n")
            put(group / "cpu.cfs_period_us", f"{period}\n")
        allowed = min(allowed, allowed if quota is None else quota / period)
    assert limits.own_processors(ranks) == max(1, int(allowed / ranks))
    expected = min(16, max(1, max(1, int(allowed / ranks)) - 1))
    assert auto_workers(Order(rank=0, world_size=ranks)) == expected


def test_without_control_groups_affinity_counts_and_slurm_says_what_each_task_has(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limits.own_processors() == 64
    assert limits.own_processors(8) == 8
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "12")
    assert limits.own_processors(8) == 12
    put(groups / "proc/self/cgroup", "0::/\n")
    put(groups / "cgroup/cpu.max", "1600000 100000")
    assert limits.own_processors(4) == 4  # Slurm's 12 of each task, and 16 by the group of all


@pytest.fixture
def one_processor() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def make(place: Path, workers: Any, **options: Any) -> streamload.Loader:
    batches = Batches(with_keys=True)
    return streamload.make_loader(
        str(place / "shards"), batch_size=8, num_workers=workers, cache_dir=place / "cache",
        batches=batches, **options,
    )  # fmt: skip


@pytest.mark.usefixtures("one_processor")
def test_a_state_saved_under_auto_resumes_on_any_number_of_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streamload")
    write_shards(tmp_path / "shards", [30, 30])
    with make(tmp_path, "auto") as loader:
        assert loader.num_workers == 1
        keys = []
        for number, (*_, row) in enumerate(loader):
            keys.append(row["__key__"])
            if number == 2:
                state = json.loads(json.dumps(loader.state_dict()))
    lines = [line for line in caplog.messages if "num_workers" in line]
    assert lines == ['num_workers="auto": 1, as each of the 1 ranks of this node may use 1 processors']
    assert "workers" not in json.dumps(state)
    for workers in (0, 2, "auto"):
        with make(tmp_path, workers) as loader:
            loader.load_state_dict(state)
            assert [row["__key__"] for *_, row in loader] == keys[3:]


def test_ranks_of_the_node_share_its_processors_and_the_first_of_them_logs(
    groups: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streamload")
    write_shards(tmp_path / "shards", [8])
    workers = [make(tmp_path, "auto", order=Order(rank=rank, world_size=8)).num_workers for rank in range(8)]
    assert workers == [7] * 8
    assert sum("num_workers" in line for line in caplog.messages) == 1
    with pytest.raises(OptionError, match="num_workers='some'"):
        make(tmp_path, "some")


def test_a_daemonic_process_has_none() -> None:
    def put_workers() -> None:
        numbers.put(auto_workers(Order()))

    context = multiprocessing.get_context("fork")
    numbers = context.SimpleQueue()
    child = context.Process(target=put_workers, daemon=True)
    child.start()
    assert numbers.get() == 0
    child.join()


@pytest.mark.parametrize(
    ("machine", "given", "says"),
    [
        (Machine(8, 9), {"stages": {"decode": 96.0}}, "2 of the 8 workers would be enough (num_workers=)."),
        (Machine(2, 9), {"stages": {"decode": 96.0}}, "make the training faster."),
        (
            Machine(4, 16),
            {"data_wait_seconds": 24.0, "stages": {"decode": 230.0}},
            "More workers: 7 would do, 16 cores can be used (num_workers=).",
        ),
        (
            Machine(4, 6),
            {"data_wait_seconds": 24.0, "stages": {"decode": 230.0}},
            "More workers: 6 cores can be used (num_workers=).",
        ),
    ],
)
def test_the_verdict_says_when_fewer_or_more_workers_would_do(
    machine: Machine, given: dict[str, Any], says: str
) -> None:
    figures = figures_of(machine=machine, seconds=60, batches_yielded=100, **given)
    assert says in judge(figures).advice
