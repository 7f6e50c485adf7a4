"""Topology: what the launchers say, what wins, and what can't be."""

import multiprocessing
import re
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.errors import OptionError
from streamload.topology import RunAttempt, Topology, read_topology, run_name


def torchrun(rank, world, local_rank, local_world):
    return {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world} | {
        "GROUP_RANK": rank // local_world,
        "GROUP_WORLD_SIZE": world // local_world,
    }


def texts(variables):
    return {name: str(value) for name, value in variables.items()}


def test_a_process_that_nobody_launched_is_alone():
    assert read_topology(environ={}) == Topology(0, 1, 0, 1, 0, 1, "alone")


@given(st.integers(1, 16), st.integers(1, 16), st.data())
def test_torchrun_tells_everything(nodes, local_world, data):
    rank = data.draw(st.integers(0, nodes * local_world - 1))
    environ = texts(torchrun(rank, nodes * local_world, rank % local_world, local_world))
    expected = (rank, nodes * local_world, rank % local_world, local_world, rank // local_world, nodes)
    assert read_topology(environ=environ) == Topology(*expected, "torchrun")


def test_slurm_is_believed_inside_of_srun_also_with_uneven_nodes():
    environ = texts(
        {"SLURM_PROCID": 10, "SLURM_STEP_NUM_TASKS": 11, "SLURM_LOCALID": 2, "SLURM_NODEID": 2}
        | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_STEP_NUM_NODES": 3}
    )
    assert read_topology(environ=environ) == Topology(10, 11, 2, 3, 2, 3, "Slurm")


def test_a_slurm_batch_script_outside_of_srun_is_one_process():
    assert (
        read_topology(environ={"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}) == Topology()
    )


def test_torchrun_under_slurm_is_torchrun():
    environ = texts(torchrun(5, 8, 1, 4)) | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert read_topology(environ=environ).source == "torchrun"


@pytest.mark.parametrize(("rank", "local_rank", "node"), [(5, 1, 1), (5, 2, 1), (4, 2, 0)])
def test_mpi_ranks_may_be_dealt_to_nodes_in_blocks_or_in_turn(rank, local_rank, node):
    environ = texts(
        {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 8}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": local_rank, "OMPI_COMM_WORLD_LOCAL_SIZE": 4}
    )
    assert read_topology(environ=environ) == Topology(rank, 8, local_rank, 4, node, 2, "Open MPI")


def test_an_mpi_rank_that_fits_no_layout_fails():
    environ = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
    with pytest.raises(OptionError, match="rank 5 can't be local rank 3"):
        read_topology(environ=environ)


def test_pmi_without_local_variables_is_taken_to_be_one_node():
    assert read_topology(environ={"PMI_RANK": "1", "PMI_SIZE": "2"}) == Topology(1, 2, 1, 2, 0, 1, "PMI")


def test_an_unknown_node_size_is_taken_as_one_node_and_warned_of_when_that_can_not_be(caplog):
    plain = {"RANK": "5", "WORLD_SIZE": "8"}
    assert read_topology(environ=plain) == Topology(5, 8, 5, 8, 0, 1, "torchrun")
    assert not caplog.records
    assert read_topology(environ=plain | {"LOCAL_RANK": "1"}) == Topology(5, 8, 5, 8, 0, 1, "torchrun")
    assert "LOCAL_WORLD_SIZE is not set" in caplog.text


def test_arguments_win_and_keep_the_node_when_the_launcher_means_the_same_rank():
    environ = texts(torchrun(5, 8, 1, 4))
    assert read_topology(5, 8, environ) == Topology(5, 8, 1, 4, 1, 2, "argument")
    assert read_topology(2, 4, environ) == Topology(2, 4, 2, 4, 0, 1, "argument")


LIGHTNING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NODE_RANK": "1", "LOCAL_RANK": "1"}
"""Of its launcher, on the second of two nodes with 8 ranks each."""


@pytest.mark.parametrize(
    ("rank", "world_size", "environ", "node", "warning"),
    [
        (1, 2, LIGHTNING | {"WORLD_SIZE": "2"}, (1, 2, 0, 1), ""),
        (9, 16, LIGHTNING | {"WORLD_SIZE": "16"}, (9, 16, 0, 1), "rank 9 with LOCAL_RANK=1 means several"),
        (9, 16, LIGHTNING | {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, (1, 8, 1, 2), ""),
        (9, 16, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, (1, 8, 1, 2), ""),
        (1, 2, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}, (1, 2, 0, 1), ""),
        (1, 2, {"RANK": "one", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, (1, 2, 0, 1), ""),
        (0, 2, texts(torchrun(0, 2, 4, 4)), (0, 2, 0, 1), "rank 0 can't be|local_rank=4"),
    ],
)
def test_variables_that_lack_or_contradict_the_rank_are_no_error_where_it_is_given(
    rank, world_size, environ, node, warning, caplog
):
    assert read_topology(rank, world_size, environ) == Topology(rank, world_size, *node, "argument")
    assert re.search(warning, caplog.text) if warning else not caplog.records


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ((3, None), {}, "rank=3 with world_size=None"),
        ((None, 3), {}, "rank=None with world_size=3"),
        ((2, 2), {}, "rank=2 with world_size=2"),
        ((-1, 2), {}, "rank=-1"),
        ((0.5, 2), {}, "rank=0.5 is not a whole number"),
        ((None, None), {"RANK": "0"}, "without WORLD_SIZE"),
        ((None, None), {"WORLD_SIZE": "2"}, "RANK is not"),
        ((None, None), {"RANK": "2", "WORLD_SIZE": "2"}, r"rank=2 with world_size=2 \(torchrun\)"),
        ((None, None), {"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero' is not a whole number"),
        ((None, None), texts(torchrun(0, 2, 4, 4)), "local_rank=4"),
        (
            (None, None),
            texts(torchrun(0, 2, 0, 4)) | {"GROUP_WORLD_SIZE": "1"},
            "local_world_size=4 with world_size=2",
        ),
        (
            (None, None),
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0", "LOCAL_RANK": "0"},
            "local_world_size=0",
        ),
    ],
)
def test_what_contradicts_itself_fails(arguments, environ, message):
    with pytest.raises(OptionError, match=message):
        read_topology(*arguments, environ=environ)


def test_an_unreadable_slurm_task_list_fails():
    environ = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "two"}
    with pytest.raises(OptionError, match="SLURM_STEP_TASKS_PER_NODE='two'"):
        read_topology(environ=environ)


def test_an_initialised_torch_wins_over_the_variables():
    script = """
        import tempfile, torch
        from streamload.topology import RunAttempt, read_topology
        before = read_topology(environ={"RANK": "1", "WORLD_SIZE": "2"}).source
        with tempfile.TemporaryDirectory() as folder:
            torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
            after = read_topology(environ={"RANK": "1", "WORLD_SIZE": "2"})
            torch.distributed.destroy_process_group()
        print(before, after.source, after.rank, after.world_size)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["torchrun", "torch.distributed", "0", "1"]


def test_reading_does_not_import_torch():
    script = (
        "import sys, streamload.topology as t; t.read_topology(environ={}); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_a_run_has_a_name_of_its_own_and_each_further_one_another():
    alone = [run_name(Topology(), "a.tar") for _ in range(2)]
    rank = Topology(1, 4, 1, 4, 0, 1, "torchrun")
    together = [run_name(rank, "a.tar") for _ in range(2)]
    assert len({*alone, *together}) == 4


JOB = {"TORCHELASTIC_RUN_ID": "job-7", "TORCHELASTIC_RESTART_COUNT": "0"}
ALLOCATION = {"SLURM_CLUSTER_NAME": "a", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (JOB, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        (ALLOCATION, {"SLURM_RESTART_COUNT": "1"}),
        ({**ALLOCATION, "TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RESTART_COUNT": "2"}),
        ({**ALLOCATION, **JOB, "TORCHELASTIC_RESTART_COUNT": "3"}, {"SLURM_RESTART_COUNT": "1"}),
    ],
)
def test_a_restart_of_a_launched_job_is_a_later_attempt_of_its_run(before, after):
    first, again = RunAttempt.launched("data", before), RunAttempt.launched("data", {**before, **after})
    assert again.is_after(first)
    assert again.next({**before, **after}).is_after(again)
    assert first.next({**before, **after}).is_after(first.next(before))  # both by the same state
    assert RunAttempt.parse(*again) == again
    assert RunAttempt.launched("other data", before).run != first.run


@pytest.mark.parametrize(
    ("variables", "others"),
    [
        ({}, {}),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},) * 2,
        (JOB, {**JOB, "TORCHELASTIC_RUN_ID": "job-8"}),
        (ALLOCATION, {**ALLOCATION, "SLURM_JOB_ID": "13"}),
        (ALLOCATION, {**ALLOCATION, "SLURM_CLUSTER_NAME": "b"}),
        (ALLOCATION, {**ALLOCATION, "SLURM_STEP_ID": "1"}),
    ],
)
def test_what_no_name_tells_to_be_one_job_are_two_runs_fails(variables, others):
    later = {**others, "TORCHELASTIC_RESTART_COUNT": "5", "SLURM_RESTART_COUNT": "x"}
    first, other = RunAttempt.launched("data", variables), RunAttempt.launched("data", later)
    assert first.run != other.run
    assert not other.is_after(first)


def _name_of_a_run(rank, names):
    names.put(run_name(Topology(rank, 2, rank, 2), "a.tar"))


def test_the_ranks_that_one_process_has_launched_call_their_run_by_one_name():
    context = multiprocessing.get_context("spawn")
    names = context.Queue()
    ranks = [context.Process(target=_name_of_a_run, args=(rank, names)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = {names.get(timeout=60) for _ in ranks}
    for process in ranks:
        process.join()
    names.close()
    names.join_thread()
    assert len(found) == 1
