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
    lines = re.findall(r"step (\d+): loss (\S+), tokens \+ patches (.*)", done.stdout)
    assert [int(step) for step, *_ in lines] == [1, 10, 20, 30, 40]
    losses = [float(loss) for _, loss, _ in lines]
    assert losses[-1] < 0.3 * losses[0]
    cells = [tuple(map(int, cell.split(" + "))) for *_, cells in lines for cell in cells.split(", ")]
    assert len(cells) == 10
    assert all(tokens <= 600 and patches <= 480 for tokens, patches in cells)
    assert len({*cells}) > 5  # nothing is padded
