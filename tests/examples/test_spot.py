"""examples/spot_prefetch.py, as a user runs it: prefetching on nodes that come and go."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "spot_prefetch.py"


@pytest.mark.deep
def test_daemons_that_are_killed_and_come_back_change_no_batch() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"killed (\d+) times: the same 48 batches", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) >= 2
