"""Jobs by torchrun itself that share a cache: a restart has its dead ranks' leases, another job hasn't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from streamload.cache.shared.objects import Objects

SECONDS = 120.0
pytestmark = [pytest.mark.deep, pytest.mark.timeout(2 * SECONDS)]
SCRIPT = """
import json, os, signal, sys, time
from streamload.cache.shared.leases import Leases
from streamload.cache.shared.objects import Objects
from streamload.topology import RunAttempt

objects, name, dies = Objects(sys.argv[1]), sys.argv[2], sys.argv[3] == "dies"
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
leases = Leases(objects, lease_seconds=3600.0, attempt=RunAttempt.launched("data"), first_beat_seconds=0.2)
has_taken = rank == 0 and leases.take("task")
if dies and not restarts:
    if rank == 0:  # without an address nobody can see it die
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)
if rank == 0:
    result = [has_taken, restarts, list(RunAttempt.launched("data"))]
    objects.write(f"taken/{name}", json.dumps(result).encode())
    while not os.path.exists(sys.argv[4]):
        time.sleep(0.05)
"""


def started(folder: Path, name: str, *options: str, dies: bool = False) -> subprocess.Popen[bytes]:
    environ = {key: value for key, value in os.environ.items() if "TORCHELASTIC" not in key}
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", *options]
    arguments = [str(folder / "shared"), name, "dies" if dies else "lives", str(folder / "end")]
    return subprocess.Popen(
        [*launcher, str(script), *arguments], env=environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    )


def said(folder: Path, name: str, job: subprocess.Popen[bytes]) -> Any:
    """What the job's rank 0 has written, once it has."""
    objects, waiting = Objects(str(folder / "shared")), threading.Event()
    for _ in range(int(SECONDS / 0.1)):
        if (text := objects.read(f"taken/{name}")) is not None:
            return json.loads(text)
        assert job.poll() is None
        waiting.wait(0.1)
    raise AssertionError(f"{name} has written nothing")


def test_two_jobs_that_nothing_tells_apart_never_have_each_others_leases(tmp_path: Path) -> None:
    jobs = [started(tmp_path, "first", "--master-port=29711")]
    try:
        has_taken, _, first = said(tmp_path, "first", jobs[0])
        assert has_taken
        jobs.append(started(tmp_path, "second", "--master-port=29712", "--max-restarts=1", dies=True))
        has_taken, restarts, second = said(tmp_path, "second", jobs[1])
        assert restarts == 1
        assert not has_taken
        assert first[0] != second[0]
    finally:
        (tmp_path / "end").touch()
        assert [job.wait(SECONDS) for job in jobs] == [0] * len(jobs)


def test_a_restart_of_a_named_job_has_the_leases_of_its_dead_ranks_at_once(tmp_path: Path) -> None:
    options = ("--master-port=29713", "--max-restarts=1", "--rdzv-id=job-7")
    job = started(tmp_path, "job", *options, dies=True)
    try:
        has_taken, restarts, (_, attempt) = said(tmp_path, "job", job)
        assert has_taken
        assert (restarts, attempt) == (1, 2)
    finally:
        (tmp_path / "end").touch()
        assert job.wait(SECONDS) == 0
