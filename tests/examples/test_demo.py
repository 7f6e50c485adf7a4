"""examples/demo.py, in small: it trains, shows its figures, and leaves only the picture and the figures."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from examples.photograph_shards import write_photograph_shards

EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def demo(tmp_path):
    """Starts the demo on its own, with a temporary directory of its own."""
    (tmp_path / "temporary").mkdir()

    def start(*arguments):
        return subprocess.Popen(
            [sys.executable, str(EXAMPLE), *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path / "temporary"), "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


@pytest.mark.deep
def test_the_demo_trains_from_the_link_and_then_from_the_cache(demo, tmp_path):
    process = demo("--samples", 192, "--samples-per-shard", 48, "--batch-size", 16, "--link", "8MB")
    printed, _ = process.communicate(timeout=170)
    assert process.returncode == 0, printed
    figures = json.loads((tmp_path / "demo-out" / "demo.json").read_text())
    first, second = figures["epochs"]
    assert first["samples"] == second["samples"] == 192
    assert first["origin_bytes"] == figures["total_bytes"]
    assert (second["origin_bytes"], second["origin_requests"]) == (0, 0)
    assert second["loss"] < first["loss"]
    assert 0 < figures["trained_share"] < 1
    assert f"in which {figures['trained_share']:.0%} of the samples were trained" in " ".join(printed.split())
    assert f"in ranges, two at a time, not each at once: {first['origin_requests']} req" in " ".join(
        printed.split()
    )
    assert (tmp_path / "demo-out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "demo-out/demo.png" in printed
    assert list((tmp_path / "temporary").glob("streamload*")) == []


@pytest.mark.deep
def test_ctrl_c_ends_the_demo_and_leaves_nothing(demo, tmp_path):
    write_photograph_shards(tmp_path / "shards", 96, 48)
    process = demo("--directory", tmp_path / "shards", "--batch-size", 16, "--link", "100KB")
    family = psutil.Process(process.pid)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "temporary").glob("streamload-demo-*/cache/parts/*")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    members = [family, *family.children(recursive=True)]
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    psutil.wait_procs(members, timeout=10)
    assert [member for member in members if member.is_running() and member.status() != "zombie"] == []
    assert list((tmp_path / "temporary").glob("streamload*")) == []
    assert Path(tmp_path / "shards" / "sizes.json").exists()


@pytest.mark.deep
def test_the_demo_fails_with_one_line_on_a_link_that_is_no_size(demo, tmp_path):
    process = demo("--link", "fast", "--samples", 128)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "demo: --link='fast' is not a size" in printed
    assert "Traceback" not in printed
    assert list((tmp_path / "temporary").glob("streamload*")) == []
