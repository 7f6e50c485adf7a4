"""Launchers as they are: two processes of each train on disjoint samples in equal steps, and resume exactly.

Neither mpirun nor srun is needed: two processes get the variables that they would set.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import streamload
from streamload import Order
from streamload.errors import OptionError, OrderDiverged
from streamload.testing.shards import write_shards
from tests.support.launched import SAVED_AFTER, make, train

COUNTS = [21, 26]
PROGRAMS = Path(__file__).parents[1] / "support"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "shards", COUNTS)
    return tmp_path


def check(folder: Path, source: str, nodes: int = 1) -> None:
    """Check what the two ranks wrote: disjoint samples, equal steps, an exact resume, one run on a node."""
    first, resumed = (
        [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]
        for name in ("first", "resumed")
    )
    assert [rank["topology"]["source"] for rank in first] == [source] * 2
    assert [rank["topology"]["nodes"] for rank in first] == [nodes] * 2
    assert [len(rank["steps"]) for rank in first] == [5, 5]
    keys = [key for rank in first for step in rank["steps"] for key in step]
    assert len(set(keys)) == len(keys) == 40
    assert [rank["steps"] for rank in resumed] == [rank["steps"][SAVED_AFTER:] for rank in first]
    assert len({rank["run"] for rank in first}) == nodes


def launch(folder: Path, *command: str) -> None:
    """Run a command of Python's to its end; what it launched ends with it."""
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *command, str(folder)],
            stdout=output,
            stderr=output,
            cwd=folder,
            start_new_session=True,
        )
        try:
            assert process.wait() == 0, (folder / "output").read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.deep
@pytest.mark.timeout(600)  # each process imports Lightning: seconds of a core, on a busy machine minutes
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        pytest.param("ddp_spawn", marks=pytest.mark.deep),
        pytest.param("ddp_fork", marks=pytest.mark.deep),
    ],
)
def test_lightnings_trainer_launches_loaders_made_at_module_level_and_in_a_data_module(
    strategy: str, folder: Path
) -> None:
    launch(folder, str(PROGRAMS / "launched_lightning.py"), strategy)
    check(folder, "torch.distributed")


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_lightnings_fabric_launches_a_loader_made_before(folder: Path) -> None:
    launch(folder, str(PROGRAMS / "launched.py"), "fabric")
    check(folder, "torch.distributed")


@pytest.mark.deep
def test_torchruns_ranks_stay_the_same_once_torch_distributed_is_initialised(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    launch(folder, *torchrun, str(PROGRAMS / "launched.py"), "torchrun")
    check(folder, "torchrun")


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_accelerate_launches_and_saves_a_prepared_loader(folder: Path) -> None:
    launcher = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1")
    defaults = ("--mixed_precision=no", "--dynamo_backend=no")
    launch(folder, *launcher, *defaults, str(PROGRAMS / "launched.py"), "accelerate")
    check(folder, "torchrun")


def in_two_processes(act: Callable[..., None], *given: Any) -> None:
    """Call `act(rank, *given)` in two processes forked from this one."""
    torch.multiprocessing.start_processes(act, given, nprocs=2, start_method="fork")


def set_variables(rank: int, by_rank: Mapping[str, str]) -> None:
    os.environ.update({name: value.format(rank=rank) for name, value in by_rank.items()})


def join(rank: int, folder: Path) -> None:
    rendezvous = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)


def train_by_variables(rank: int, variables: Mapping[str, str], folder: Path) -> None:
    set_variables(rank, variables)
    train(folder)


@pytest.mark.parametrize(
    ("source", "nodes", "variables"),
    [
        ("torchrun", 1, {"RANK": "{rank}", "WORLD_SIZE": "2"}),  # by hand
        (
            "Open MPI",
            1,
            {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "2"}
            | {"OMPI_COMM_WORLD_LOCAL_RANK": "{rank}", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        ),
        (
            "PMI",
            1,
            {"PMI_RANK": "{rank}", "PMI_SIZE": "2", "MPI_LOCALRANKID": "{rank}", "MPI_LOCALNRANKS": "2"},
        ),
        (
            "Slurm",
            2,
            {"SLURM_PROCID": "{rank}", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
            | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "{rank}", "SLURM_STEP_NUM_NODES": "2"},
        ),
    ],
)
def test_ranks_that_only_variables_name_share_the_samples(
    source: str, nodes: int, variables: dict[str, str], folder: Path
) -> None:
    in_two_processes(train_by_variables, variables, folder)
    check(folder, source, nodes)


def train_by_torch_and_by_arguments(rank: int, folder: Path) -> None:
    set_variables(rank, {"WORLD_SIZE": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    join(rank, folder)
    train(folder)
    swapped = folder / "swapped"
    train(swapped, order=Order(rank=1 - rank, world_size=2))
    assert (swapped / f"first-{1 - rank}.json").exists()
    torch.distributed.destroy_process_group()


def test_arguments_come_before_torch_distributed_which_comes_before_variables(folder: Path) -> None:
    write_shards(folder / "swapped" / "shards", COUNTS)
    in_two_processes(train_by_torch_and_by_arguments, folder)
    check(folder, "torch.distributed")
    check(folder / "swapped", "argument")


def iterate_with_another_number_of_nodes(rank: int, folder: Path) -> None:
    if rank:
        set_variables(rank, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    join(rank, folder)
    with make(folder, num_workers=0) as loader:
        try:
            iter(loader)
        except OrderDiverged as exc:
            (folder / f"diverged-{rank}").write_text(str(exc))
    torch.distributed.destroy_process_group()


def test_ranks_that_would_divide_the_samples_differently_are_refused(folder: Path) -> None:
    in_two_processes(iterate_with_another_number_of_nodes, folder)
    [refused] = folder.glob("diverged-*")
    text = refused.read_text()
    assert "1 groups on rank 0 (1 nodes)" in text
    assert "2 groups on rank 1 (2 nodes)" in text


# When ranks are read.


def test_half_a_set_of_variables_is_an_error_where_ranks_are_needed_not_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = make(folder, num_workers=0)
    loader.set_epoch(0)
    repr(loader)
    for act in (len, iter, streamload.Loader.state_dict):
        with pytest.raises(OptionError, match=r"WORLD_SIZE is set and RANK is not.*Lightning"):
            act(loader)
    with make(folder, num_workers=0, order=Order(rank=1, world_size=2)) as loader:
        assert len(list(loader)) == 5
    with make(folder, num_workers=0, num_samples=None, train=False) as loader:  # the whole set
        assert len(list(loader)) == 12


@pytest.mark.parametrize("act", [len, iter, streamload.Loader.state_dict, lambda loader: loader.num_batches])
def test_a_loader_keeps_the_rank_of_its_first_use_and_refuses_another(
    act: Callable[[streamload.Loader], object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(folder, num_workers=0) as loader:
        act(loader)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert loader.world_size == 1
        with pytest.raises(OptionError, match=r"rank 0 of 1 \(alone\), and this is rank 1 of 2 \(torchrun\)"):
            iter(loader)
        monkeypatch.undo()
        assert len(list(loader)) == 10


# Copies of a loader.


def keys(loader: streamload.Loader) -> list[str]:
    with loader:
        return [key for batch in loader for key in batch[-1]["__key__"]]


def note(alert: object) -> None:
    """A listener that can be pickled."""


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_an_unused_loader_is_copied_as_its_recipe(
    copied: Callable[[streamload.Loader], streamload.Loader], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make(folder, num_workers=0)
    loader.set_epoch(3)
    loader.on_alert(note)
    assert len(loader) == 10
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    other = copied(loader)
    assert (len(other), other.observer.requests.listeners) == (5, [note])
    expected = make(folder, num_workers=0)
    expected.set_epoch(3)
    assert keys(other) == keys(expected)


def read_own_rank(rank: int, loader: streamload.Loader, folder: Path) -> None:
    set_variables(rank, {"RANK": "{rank}", "WORLD_SIZE": "2"})
    assert len(loader) == 5
    (folder / f"{rank}.json").write_text(json.dumps(keys(loader)))


def test_a_fork_of_an_unused_loader_reads_its_own_rank(folder: Path) -> None:
    loader = make(folder, num_workers=0)
    assert len(loader) == 10
    in_two_processes(read_own_rank, loader, folder)
    assert len({key for rank in (0, 1) for key in json.loads((folder / f"{rank}.json").read_text())}) == 40


@pytest.mark.parametrize(
    "use",
    [
        lambda loader: next(iter(loader)),
        lambda loader: loader.load_state_dict(loader.state_dict()),
        lambda loader: loader.set_batch_size(2),
    ],
)
def test_a_loader_in_use_is_not_copied(use: Callable[[streamload.Loader], object], folder: Path) -> None:
    with make(folder, num_workers=0) as loader:
        use(loader)
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(OptionError, match=r"can't be pickled or copied.*state_dict\(\)"):
                copied(loader)


def test_an_option_that_can_not_be_pickled_is_named(folder: Path) -> None:
    loader = make(folder, num_workers=0, preprocess=lambda image: image)
    with pytest.raises(OptionError, match=r"preprocess= can't be pickled.*DataModule"):
        pickle.dumps(loader)
