"""examples/linear_probe.py, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "linear_probe.py"


@pytest.mark.deep
def test_the_linear_probe_computes_its_features_once_and_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--classes", "14"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "STREAMLOAD_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"mean loss (\S+), features: (\d+) read, (\d+) computed", done.stdout)
    assert [(read, computed) for _, read, computed in said] == [("0", "256"), ("256", "0"), ("256", "0")]
    assert float(said[-1][0]) < 0.9 * float(said[0][0])
