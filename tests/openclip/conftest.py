"""What the tests with open_clip share: shards, and its training in processes of their own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.torchvision_stub import define_torchvision_schemas
from tests.openclip.tiny import TINY, Batch, Run, write_colour_shards

define_torchvision_schemas()  # before anything imports torchvision


@pytest.fixture(scope="session")
def shards(scratch: Path) -> list[Path]:
    """800 samples in 4 shards."""
    return write_colour_shards(scratch / "train", [200] * 4, seed=1)


@pytest.fixture(scope="session")
def validation_shards(scratch: Path) -> list[Path]:
    """70 samples in 2 shards: two batches of 32, and 6 left over."""
    return write_colour_shards(scratch / "val", [50, 20], seed=2)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Run]:
    """Run open_clip's training of the tiny model to its end: `train("--train-data", …, ranks=2)`.

    Or until it is killed, `killed_behind` so many steps of rank 0. Runs of one test have one directory.
    """
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(TINY))

    def run(
        *arguments: str,
        ranks: int = 1,
        environ: Mapping[str, str] | None = None,
        killed_behind: int | None = None,
    ) -> Run:
        launcher = [sys.executable, str(Path(__file__).parent / "launch.py")]
        if ranks > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            launcher = [sys.executable, *torchrun, launcher[1], "--"]
        record = tmp_path / f"record-{len(list(tmp_path.glob('record-*')))}"
        record.mkdir()
        kill = {} if killed_behind is None else {"OPENCLIP_TEST_KILL_BEHIND": str(killed_behind)}
        fixed = "--model tiny --device cpu --precision fp32 --batch-size 32 --warmup 5 --lr 2e-3 --epochs 2"
        logs = f"--logs {tmp_path} --name run --log-every-n-steps 1 --save-frequency 0"
        done = subprocess.run(
            [*launcher, *fixed.split(), *logs.split(), "--dataset-type", "webdataset", *arguments],
            env={
                **os.environ,
                "OPENCLIP_TEST_MODEL": str(model),
                "OPENCLIP_TEST_RECORD": str(record),
                "STREAMLOAD_CACHE_DIR": str(tmp_path / "cache"),
                "STREAMLOAD_CACHE_SIZE": "50GB",
                "OMP_NUM_THREADS": "1",
                **kill,
                **(environ or {}),
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        ended = done.returncode == 0 if killed_behind is None else done.returncode in (1, -signal.SIGKILL)
        assert ended, done.stdout[-3000:] + done.stderr[-6000:]
        batches = [
            [Batch(**json.loads(line)) for line in (record / f"rank-{rank}.jsonl").read_text().splitlines()]
            for rank in range(ranks)
        ]
        results = tmp_path / "run" / "checkpoints" / "results.jsonl"
        lines = results.read_text().splitlines() if results.exists() else []
        return Run(batches, (tmp_path / "run" / "out.log").read_text(), [json.loads(line) for line in lines])

    return run
