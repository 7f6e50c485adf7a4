"""examples/train_openclip.py, as a user runs it on shards of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.photograph_shards import write_photograph_shards
from streamload.testing.server import ShardServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_openclip.py"
AS_A_USER = f"""
from benchmarks.torchvision_stub import define_torchvision_schemas
define_torchvision_schemas()
import runpy, sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


@pytest.mark.deep
def test_the_example_for_open_clip_fetches_each_photograph_once_and_its_loss_falls(tmp_path: Path) -> None:
    shards = write_photograph_shards(tmp_path / "shards", samples=384, samples_per_shard=100)
    with ShardServer(tmp_path / "shards") as server:
        done = subprocess.run(
            [sys.executable, "-c", AS_A_USER, f"pipe:curl -fsSL {server.url}/{{00000..00003}}.tar"],
            cwd=EXAMPLE.parents[1],
            env={**os.environ, "STREAMLOAD_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d: 12 steps, mean loss (\S+?),", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < 0.9 * losses[0]
    assert sorted({request.path for request in server.log}) == [shard.name for shard in shards]
    for shard in shards:  # some in several ranges, each byte once
        assert sum(stop - start for start, stop in server.ranges(shard.name)) == shard.stat().st_size
