"""The peers' adapters run, where open_clip is; the numbers are not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = (
    ROOT / ".venv/bin/python"
)  # the parent of the environment that this runs in: it has the newer webdataset


@pytest.mark.deep
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
    assert {row["images"] for row in rounds} == {128}
    means = [row["channel_mean"] for row in rounds]
    assert max(means) - min(means) < 0.02  # the same photographs, each with another crop


@pytest.mark.deep
@pytest.mark.timeout(400)
@pytest.mark.skipif(not OWN.exists(), reason="webdataset's cache is looked at beside its newer version")
def test_a_peer_with_a_cache_is_given_half_of_the_data_as_its_limit(tmp_path: Path) -> None:
    out = tmp_path / "half.json"
    command = [sys.executable, "-m", "benchmarks.half", "--quick", "--out", str(out)]
    command += ["--python", str(OWN), "--openclip-python", sys.executable]
    subprocess.run([*command, "--contenders", "webdataset, cache_dir"], cwd=ROOT, check=True, timeout=380)
    result = json.loads(out.read_text())

    assert [row["images"] for row in result["rounds"]] == [128] * 3
    assert result["limits"]["webdataset, cache_dir"]
    assert result["failures"] == []


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_open_clips_own_order_is_followed(tmp_path: Path) -> None:
    out = tmp_path / "shuffle.json"
    command = [sys.executable, "-m", "benchmarks.shuffle", "--quick", "--out", str(out)]
    command += ["--contenders", "open_clip", "--openclip-python", sys.executable]
    subprocess.run(command, cwd=ROOT, check=True, timeout=380)
    result = json.loads(out.read_text())

    assert result["versions"]["open_clip"].keys() >= {"open_clip_torch", "webdataset"}
    (row,) = result["rounds"]
    # Each of 2 × 8 workers has one of the 16 shards of 300 and gives 10 batches of 32, the last of them from
    # the start of a second time through.
    assert row["rank_shards_in_1"] == 1
    assert row["shards_in_8"] == 16
    assert row["held"] < 16 * 300
    assert 0 < row["unseen"] < 0.1
    assert row["doubled"] == pytest.approx(row["unseen"] + (10 * 32 - 300) / 300, abs=1e-4)
