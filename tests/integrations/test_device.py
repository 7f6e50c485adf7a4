"""Frameworks' own loops on a simulated device: each batch is there before its step, and was copied once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import simulated_device

pytestmark = pytest.mark.skipif(not simulated_device.IS_POSSIBLE, reason="torch has no backends in Python")
PROGRAM = Path(__file__).parents[1] / "support" / "on_device.py"
PINNING = "a DataLoader with pin_memory=True"
AHEAD = "streamload-device uint8 True"
"""A copy of images by the loader's thread, as bytes, from pinned memory."""
Found = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """Run a scenario of on_device.py to its end."""

    def run(scenario: str) -> Found:
        place = tmp_path_factory.mktemp(scenario)
        command = [sys.executable, str(PROGRAM), scenario, str(place)]
        done = subprocess.run(command, cwd=PROGRAM.parents[2], capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stderr[-4000:]
        found: Found = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


def assert_ahead(found: Found, batches: int, device: str, *, looked_ahead: int = 0) -> None:
    """Each batch was copied once, by the loader's thread, and nothing else of it was copied or pinned."""
    kinds = Counter(found["images"])
    assert kinds.keys() == {AHEAD}
    assert batches <= kinds[AHEAD] <= batches + looked_ahead
    assert Counter(found["ids"]) == {"streamload-device True": kinds[AHEAD]}
    assert (found["targets"], found["pins"]) == ([device], 0)
    assert not [line for line in found["log"] if PINNING in line]


@pytest.mark.deep
def test_auto_is_this_processs_device_and_starts_nothing_before_workers_are_forked(
    run: Callable[[str], Found],
) -> None:
    found = run("plain")
    assert found["forks"] == [False]
    devices = {
        "auto": "local rank 0, 2 devices",
        "rank 1": "local rank 1, 2 devices",
        "current": "the current",
    }
    for name, reason in devices.items():
        device = "npu:0" if name == "auto" else "npu:1"
        assert_ahead(found[name], 6 if name == "rank 1" else 12, device)
        assert found[name]["result"] == [device]
        said = [line for line in found[name]["log"] if line.startswith("device=")]
        assert len(said) == 1
        assert f"on {device} ({reason}" in said[0]
    assert found["of a fork"] == ["npu:0", "npu:1"]
    # Without device=, batches that are ready in host memory are a hint and no limit; "cpu" was asked for.
    assert [found[name]["result"]["limit"] for name in ("host", "cpu")] == ["training"] * 2
    hints = ['device="auto"' in found[name]["result"]["advice"] for name in ("host", "cpu")]
    assert hints == [True, False]
    lines = [[line for line in found[name]["log"] if "in host memory" in line] for name in ("host", "cpu")]
    assert [len(said) for said in lines] == [1, 0]
    # Too little memory for a batch ahead: nothing is lost, one line says so, and there is one batch less.
    enough, short = found["0 failures"], found["1 failures"]
    assert short["result"] == enough["result"]
    assert len(short["images"]) == len(enough["images"]) == 6
    assert [len([line for line in one["log"] if "memory is full" in line]) for one in (enough, short)] == [
        0,
        1,
    ]
    assert "out of memory" in found["9 failures"]


@pytest.mark.deep
def test_accelerate_finds_batches_on_its_device(run: Callable[[str], Found]) -> None:
    found = run("accelerate")
    for name in ("prepare", "around", "around, dispatched"):
        assert_ahead(found[name], 12, "npu:0")
        assert found[name]["result"] == ["npu:0"] * 2
    # A DataLoader that pins gets pinned memory, which neither it nor Accelerate copies once more on the host.
    pinned = found["around, pinned"]
    assert Counter(pinned["images"]) == {"MainThread float32 True": 12}
    assert pinned["pins"] == 2 * 12
    assert found["pinned"]["pins"] == 2 * 6
    for name in ("around, pinned", "pinned"):
        assert len([line for line in found[name]["log"] if PINNING in line]) == 1
    assert found["plain"]["result"] == ["cpu"]
    assert "pin_memory=False" in found["refused"]


@pytest.mark.deep
def test_transformers_trainers_find_batches_on_their_device(run: Callable[[str], Found]) -> None:
    found = run("transformers")
    assert_ahead(found["ours"], 12, "npu:0")
    assert_ahead(found["as_dataset"], 6, "npu:0")
    pinned = found["as_dataset, pinned"]
    assert pinned["pins"] == 2 * 6
    assert len([line for line in pinned["log"] if PINNING in line]) == 1
    assert {tuple(one["result"]["devices"]) for one in found.values()} == {("npu:0 torch.float32",)}


@pytest.mark.deep
def test_lightning_and_fabric_find_batches_on_their_root_device(run: Callable[[str], Found]) -> None:
    found = run("lightning")
    fitted, validated, tested, predicted = 12 + 2 + 12, 6, 6, 6  # the sanity check stops early
    assert_ahead(found["npu"], fitted + validated + tested + predicted, "npu:1", looked_ahead=1)
    assert found["npu"]["result"] == {"devices": ["npu:1 torch.float32"], "by hand": ["cpu"]}
    assert_ahead(found["fabric"], 12, "npu:1")
    assert found["fabric"]["result"] == ["npu:1"]
    for name in ("cpu", "fabric, not moved"):
        assert (found[name]["images"], found[name]["pins"]) == ([], 0)
