"""A notice to end: SIGTERM to a training and all that it has started leaves it time to save its state."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamload.testing.shards import write_shards

PROGRAM = Path(__file__).parents[1] / "support" / "noticed.py"
WAIT_SECONDS = 60.0
METHODS = ["fork", *(pytest.param(method, marks=pytest.mark.deep) for method in ("spawn", "forkserver"))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "shards", [40])
    return tmp_path


def in_sessions(leaders: set[int]) -> list[int]:
    """The processes of some sessions, without those that nobody has waited for."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            process, rest = stat.parent.name, stat.read_text().rpartition(")")[2].split()
            if int(rest[3]) in leaders and rest[0] != "Z":
                found.append(int(process))
    return found


def sessions_under(process: int) -> set[int]:
    """The sessions of a process and of its children, as torchrun gives each rank one of its own."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return {os.getsid(int(child)) for child in [process, *children]}


def await_end_of_all(leaders: set[int]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while left := in_sessions(leaders):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


@contextlib.contextmanager
def training(folder: Path, *command: str, ranks: int = 1) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """A command of Python's whose ranks have taken three batches, and the sessions of its processes."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    leaders = {process.pid}
    try:
        assert process.stdout is not None
        said = []
        while ranks:
            said.append(process.stdout.readline())
            assert said[-1], "".join(said)
            ranks -= said[-1].startswith("ready")
        leaders |= sessions_under(process.pid)
        yield process, leaders
    finally:
        for leader in leaders:
            for left in in_sessions({leader}):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
        process.wait()


def after_notice(folder: Path, method: str, handler: str, end: str) -> tuple[int, str]:
    """Exit status and output of a training that got a notice, once none of its processes is left."""
    with training(folder, str(PROGRAM), str(folder), method, handler, end) as (process, leaders):
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=WAIT_SECONDS)
        await_end_of_all(leaders)
    return process.returncode, output


def saved(folder: Path, rank: int = 0) -> int:
    """The number of batches after which a rank has saved its state."""
    count, state = json.loads((folder / f"saved-{rank}.json").read_text())
    assert state
    return int(count)


@pytest.mark.parametrize(
    "method",
    [
        "fork",
        pytest.param("spawn", marks=pytest.mark.deep),
        pytest.param("forkserver", marks=pytest.mark.deep),
    ],
)
def test_a_training_that_handles_the_notice_goes_on_and_saves(method: str, folder: Path) -> None:
    code, output = after_notice(folder, method, "flag", "closed")
    assert (code, output) == (0, "left 0\n")
    assert saved(folder) >= 15


@pytest.mark.parametrize(
    "method",
    [
        "fork",
        pytest.param("spawn", marks=pytest.mark.deep),
        pytest.param("forkserver", marks=pytest.mark.deep),
    ],
)
def test_without_a_handler_the_notice_ends_the_training_and_its_workers(method: str, folder: Path) -> None:
    code, _ = after_notice(folder, method, "none", "closed")
    assert code == -signal.SIGTERM


def test_a_handler_that_exits_leaves_the_training_its_state(folder: Path) -> None:
    code, output = after_notice(folder, "fork", "exit", "closed")
    assert (code, output) == (143, "")
    assert saved(folder) >= 3


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("stuck", 0),
        pytest.param("stuck at exit", 0, marks=pytest.mark.deep),
        pytest.param("with", 0, marks=pytest.mark.deep),
        pytest.param("collected", 0, marks=pytest.mark.deep),
        pytest.param("exit", 0, marks=pytest.mark.deep),
        pytest.param("forked", 0, marks=pytest.mark.deep),
        pytest.param("error", 1, marks=pytest.mark.deep),
        pytest.param("os._exit", 0, marks=pytest.mark.deep),
        pytest.param("killed", -signal.SIGKILL, marks=pytest.mark.deep),
        pytest.param("interrupted", -signal.SIGINT, marks=pytest.mark.deep),
    ],
)
def test_workers_that_outlived_the_notice_end_with_their_loader(end: str, code: int, folder: Path) -> None:
    status, output = after_notice(folder, "fork", "flag", end)
    assert status == code, output
    if end in {"stuck", "with", "collected"}:
        assert output == "left 0\n"


def test_a_stuck_worker_ends_when_its_training_is_gone(folder: Path) -> None:
    with training(folder, str(PROGRAM), str(folder), "fork", "none", "closed") as (process, leaders):
        (folder / "stuck").touch()
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=WAIT_SECONDS)
        await_end_of_all(leaders)


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_torchruns_ranks_save_when_torchrun_gets_the_notice(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = (*torchrun, str(PROGRAM), str(folder), "fork", "flag", "closed")
    with training(folder, *command, ranks=2) as (process, leaders):
        assert len(leaders) == 3
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_SECONDS)
        await_end_of_all(leaders)
    assert saved(folder, 0) >= 15
    assert saved(folder, 1) >= 15
