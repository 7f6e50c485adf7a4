"""examples/train_fusion.py, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamload.steering.recorded import read_points

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_fusion.py"


@pytest.mark.deep
def test_the_fusion_example_gives_samples_to_the_source_that_is_learned_and_reports_it(
    tmp_path: Path,
) -> None:
    log = tmp_path / "decisions.jsonl"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--decisions", str(log)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = r"(\w+): share (\d+)% → (\d+)%, in the loss × 1.00, held-out loss (\S+) → (\S+),"
    lines = re.findall(said, done.stdout)
    photographs, noise = ({"name": name, "to": int(to), "loss": float(b)} for name, _, to, _, b in lines)
    assert (photographs["name"], noise["name"]) == ("photographs", "noise")
    assert photographs["to"] > 55
    assert photographs["loss"] < noise["loss"] - 0.5
    assert [source.name for source in read_points(log)[-1].sources] == ["photographs", "noise"]
