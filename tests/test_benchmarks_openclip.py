"""The peers' adapters run, where open_clip is; the numbers are not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("open_clip")
ROOT = Path(__file__).resolve().parents[1]


def test_all_contenders_do_the_same_work(tmp_path: Path) -> None:
    out = tmp_path / "warm.json"
    command = [sys.executable, "-m", "benchmarks.warm", "--quick", "--out", str(out)]
    command += ["--python", sys.executable, "--openclip-python", sys.executable]
    subprocess.run(command, cwd=ROOT, check=True, timeout=170)
    rounds = json.loads(out.read_text())["rounds"]

    assert len(rounds) == 4
    assert {row["images"] for row in rounds} == {256}
    means = [row["channel_mean"] for row in rounds]
    assert max(means) - min(means) < 0.02  # the same photographs, each with another crop
