"""The examples for transformers and Lightning, as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_transformers_clip.py"


@pytest.mark.deep
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


# Both calls have been forked from what has imported the framework, which takes most of the time.
CALLED_TWICE = """
import importlib, os, runpy, sys
framework, script = sys.argv[1:]
importlib.import_module(framework)
for steps in ("4", "8"):
    print("to", steps, flush=True)
    if not (child := os.fork()):
        sys.path.insert(0, os.path.dirname(script))
        sys.argv = [script, "--steps", steps, "--batch-size", "8"]
        runpy.run_path(script, run_name="__main__")
        break
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(status)
"""


@pytest.mark.deep
@pytest.mark.parametrize(
    ("framework", "name"),
    [("transformers.trainer", "train_transformers_trainer.py"), ("lightning", "train_lightning.py")],
)
def test_the_example_for_a_framework_goes_on_when_it_is_called_again(
    framework: str, name: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLED_TWICE, framework, str(EXAMPLE.parent / name)],
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
    first, second = done.stdout.split("to 8\n")
    assert "step 4: loss" in first
    assert "step 8: loss" in second
    assert "going on from" not in first
    assert "going on from" in second
