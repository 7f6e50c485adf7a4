"""examples/train_labels.py, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_labels.py"


@pytest.mark.deep
def test_the_example_for_labels_runs_without_arguments_and_learns_classes() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--classes", "14"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d: 6 steps, mean loss (\S+)", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < 0.9 * losses[0]
    assert len(re.findall(r"\d+% of the validation set", done.stdout)) == 2
