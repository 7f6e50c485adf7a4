"""examples/train_vlm.py, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_vlm.py"


@pytest.mark.deep
def test_the_example_for_conversations_learns_in_two_processes_without_downloads() -> None:
    pytest.importorskip("transformers", "5")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"step (\d+): loss (\S+), (\d+) tokens, (\d+) patches", done.stdout)
    assert [int(step) for step, *_ in lines] == [1, 10, 20, 30, 40]
    losses = [float(loss) for _, loss, *_ in lines]
    assert losses[-1] < 0.3 * losses[0]
    assert len({tokens for *_, tokens, _ in lines}) > 1  # nothing is padded
