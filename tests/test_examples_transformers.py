"""examples/train_transformers_clip.py, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_transformers_clip.py"


def test_the_example_for_transformers_runs_without_arguments_or_downloads_and_its_loss_falls() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d: 12 steps, mean loss (\S+)", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < 0.95 * losses[0]
