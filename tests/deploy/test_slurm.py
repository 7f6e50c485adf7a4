"""The batch scripts of deploy/slurm, submitted to a real Slurm as they stand."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamload.cache.shared.objects import Objects
from streamload.daemon.plan_file import PlannedSource, PlanProgress, plan_of
from streamload.order.plan import OrderOptions
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from streamload.urls import expand_urls
from tests.support.slurm import Slurm, needs_slurm

pytestmark = needs_slurm
SCRIPTS = Path(__file__).parents[2] / "deploy" / "slurm"
SHARDS, GROUPS = 12, 3


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    for name in ("slurm", "nvme"):
        (tmp_path / name).mkdir()
    with Slurm(tmp_path / "slurm", disk=tmp_path / "nvme" if os.geteuid() == 0 else None) as slurm:
        yield slurm


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "origin", [4] * SHARDS)
    with ShardServer(tmp_path / "origin") as server:
        yield server


def pattern(server: ShardServer) -> str:
    return f"{server.url}/{{00000..{SHARDS - 1:05d}}}.tar"


def environ(tmp_path: Path) -> dict[str, str]:
    """The scripts' own variables, and where the commands are."""
    commands = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin"
    return {
        "PATH": commands,
        "STREAMLOAD_SHARED_CACHE": str(tmp_path / "shared"),
        "NVME": str(tmp_path / "nvme"),
        "CACHE_SIZE": "1GB",
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 150
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def held(tmp_path: Path) -> int:
    return sum(name.endswith("/index") for name in Objects(str(tmp_path / "shared")).names("shards"))


def check_each_byte_was_sent_once(server: ShardServer) -> None:
    paths = {path.name: path for path in server.root.glob("*.tar")}
    sent = sum(each.sent for each in server.log if each.path in paths)
    assert sent == sum(path.stat().st_size for path in paths.values())


def test_an_array_of_daemons_brings_all_groups_and_ends_by_a_signal(
    slurm: Slurm, server: ShardServer, tmp_path: Path
) -> None:
    urls = expand_urls(pattern(server))
    made, _ = plan_of([PlannedSource(SHARDS, OrderOptions(7, GROUPS, 2, 10))], False, urls, None)
    objects = Objects(str(tmp_path / "shared"))
    objects.write(f"runs/{made.run}/plan.json", made.written())
    for group in range(GROUPS):
        progress = PlanProgress(group, 0, ((0, 0),))
        objects.write(f"runs/{made.run}/{progress.name}", progress.written())
    given = {**environ(tmp_path), "ORIGIN": server.url}
    job = slurm.submit("--output=daemon-%a.log", SCRIPTS / "daemons.sbatch", environ=given)
    until(lambda: held(tmp_path) == SHARDS and objects.names("leases") == [])
    slurm.signal(job, "TERM")
    until(lambda: slurm.states(job) == {"COMPLETED"})
    logs = [(tmp_path / "slurm" / f"daemon-{n}.log").read_text() for n in (0, 1)]
    assert all("told to end by SIGTERM" in log for log in logs), logs
    assert all(f"run {made.run}, {GROUPS} groups" in log for log in logs)
    check_each_byte_was_sent_once(server)


TRAINING = """
import argparse, json, os, pathlib, sys
import streamload
parser = argparse.ArgumentParser()
parser.add_argument("urls")
parser.add_argument("--place", type=pathlib.Path)
given = parser.parse_args()
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
loader = streamload.make_loader(
    given.urls, batch_size=2, num_workers=0, num_samples=48, seed=1, shuffle=8,
    workers=streamload.Workers(map_sample=lambda sample: {"key": sample["__key__"]}),
)
with loader:
    keys = [key for batch in loader for key in batch["key"]]
    names = {"world": world, "nodes": loader._run.schedule.topology.nodes, "keys": keys}
(given.place / f"rank-{rank}.json").write_text(json.dumps(names))
"""


@pytest.mark.deep
def test_a_training_reads_on_each_node_what_warm_brings_there(
    slurm: Slurm, server: ShardServer, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    job = slurm.submit(
        *("--output=train.log", "--gpus-per-node=2", SCRIPTS / "train.sbatch", tmp_path / "train.py"),
        *(pattern(server), "--place", tmp_path),
        environ=environ(tmp_path),
    )
    log = tmp_path / "slurm" / "train.log"
    until(lambda: slurm.states(job) not in ({"PENDING"}, {"CONFIGURING"}, {"RUNNING"}, {"COMPLETING"}))
    assert slurm.states(job) == {"COMPLETED"}, log.read_text()
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [(rank["world"], rank["nodes"]) for rank in ranks] == [("4", 2)] * 4
    keys = [key for rank in ranks for key in rank["keys"]]
    assert len(keys) == len(set(keys)) == 48
    check_each_byte_was_sent_once(server)
