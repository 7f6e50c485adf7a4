"""The commands of docs/guides/deploying.md for torchrun and Ray Train, as they stand, by their launchers."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from streamload.testing.shards import write_shards
from tests.support.s3 import S3Server

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "deploying.md").read_text()
STEPS_OF_AN_EPOCH = 160 // (32 * 2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server() as store:
        store.create_bucket("data")
        store.put_files("data", *write_shards(tmp_path_factory.mktemp("data") / "shards", [16] * 10))
        yield store


def command(beginning: str) -> list[str]:
    """The first command of the guide that begins so, on one line."""
    found = re.search(rf"^{re.escape(beginning)}.*[^\\]$", GUIDE, re.MULTILINE)
    assert found is not None
    return shlex.split(found[0])


def environ(store: S3Server, place: Path) -> dict[str, str]:
    """As the guide's reader has it, in a folder with the repository's examples."""
    (place / "examples").symlink_to(ROOT / "examples")
    commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"STREAMLOAD_CACHE_DIR": str(place / "cache"), "STREAMLOAD_CACHE_SIZE": "1GB"}
    few = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "false"}
    return {**os.environ, **store.environ, **own, **few, "PATH": commands, "PYTHONPATH": str(ROOT)}


def test_torchrun_starts_a_training_that_resumes(store: S3Server, tmp_path: Path) -> None:
    given = environ(store, tmp_path)
    said = []
    for epochs in ("2", "3"):
        done = subprocess.run(
            [*command("torchrun --nproc-per-node 2"), "--every=2", f"--epochs={epochs}"],
            cwd=tmp_path,
            env=given,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(re.findall(r"^epoch (\d), step (\d+): loss", done.stdout, re.MULTILINE))
    assert said == [[("1", "2"), ("2", "4")], [("3", "6")]]


def test_ray_train_goes_on_after_a_worker_is_killed(store: S3Server, tmp_path: Path) -> None:
    words = [*command("python examples/train_ray.py"), "--every=1", "--epochs=6"]
    words += [f"--storage={tmp_path / 'results'}"]
    log = tmp_path / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            words, cwd=tmp_path, env=environ(store, tmp_path), stdout=output, stderr=output
        ) as process,
    ):
        killed = 0
        try:
            while process.poll() is None:
                checkpoints = list((tmp_path / "results").glob("*/checkpoint_*"))
                if checkpoints and not killed:
                    found = [int(pid) for pid in re.findall(r"RayTrainWorker pid=(\d+)", log.read_text())]
                    killed = found[0]
                    os.kill(killed, signal.SIGKILL)
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            for child in (
                psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ()
            ):
                child.kill()
            process.kill()
    text = log.read_text()
    assert process.returncode == 0, text
    assert killed
    assert f"step {6 * STEPS_OF_AN_EPOCH}: loss" in text
