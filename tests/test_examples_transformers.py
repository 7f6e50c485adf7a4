"""The examples for transformers and Lightning, as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", ["train_transformers_trainer.py", "train_lightning.py"])
def test_the_example_for_a_framework_goes_on_when_it_is_called_again(name: str, tmp_path: Path) -> None:
    for steps in (4, 8):
        done = subprocess.run(
            [sys.executable, str(EXAMPLE.parent / name), "--steps", str(steps), "--batch-size", "8"],
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "STREAMLOAD_CACHE_DIR": str(tmp_path / "cache"),
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"step {steps}: loss" in done.stdout
        assert ("going on from" in done.stdout) is (steps == 8)
