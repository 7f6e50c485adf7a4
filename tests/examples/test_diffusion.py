"""examples/train_diffusion.py, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_diffusion.py"


@pytest.mark.deep
def test_the_example_for_image_sizes_runs_without_arguments_and_learns() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    epochs = re.findall(
        r"epoch \d: 48 microbatches of (\d) sizes, mean loss (\S+), (\S+)% of samples so far off", done.stdout
    )
    losses = [float(loss) for _, loss, _ in epochs]
    assert len(losses) == 3
    assert losses[2] < 0.8 * losses[0]
    assert all(int(sizes) > 3 for sizes, *_ in epochs)
    shares = [float(share) for *_, share in epochs]
    assert shares == sorted(shares, reverse=True)  # the first blocks are the shortest
