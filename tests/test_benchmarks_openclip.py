"""The peers' adapters run, where open_clip is; the numbers are not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OWN = (
    ROOT / ".venv/bin/python"
)  # the parent of the environment that this runs in: it has the newer webdataset


@pytest.mark.timeout(400)
def test_all_contenders_do_the_same_work(tmp_path: Path) -> None:
    out = tmp_path / "warm.json"
    contenders = ["streamload", "streamload, open_clip's preprocess", "open_clip"]
    if OWN.exists():
        contenders.append("webdataset, cache_dir")
    command = [sys.executable, "-m", "benchmarks.warm", "--quick", "--out", str(out)]
    command += ["--python", str(OWN if OWN.exists() else sys.executable), "--openclip-python", sys.executable]
    subprocess.run([*command, "--contenders", *contenders], cwd=ROOT, check=True, timeout=380)
    rounds = json.loads(out.read_text())["rounds"]

    assert {row["contender"] for row in rounds} == set(contenders)
    assert {row["images"] for row in rounds} == {256}
    means = [row["channel_mean"] for row in rounds]
    assert max(means) - min(means) < 0.02  # the same photographs, each with another crop
