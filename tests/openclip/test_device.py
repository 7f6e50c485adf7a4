"""open_clip's own training on a simulated device: its batches are there before its step asks for them."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.openclip.tiny import Run
from tests.support import simulated_device

pytestmark = pytest.mark.skipif(not simulated_device.IS_POSSIBLE, reason="torch has no backends in Python")
FEW = ("--train-num-samples", "128", "--workers", "2", "--epochs", "1", "--device", simulated_device.NAME)
AHEAD = ("streamload-device_0", "uint8", True)
"""By the loader's thread, as bytes, from pinned memory."""


def copies_of_batches(record: Path) -> list[dict[str, Any]]:
    """The copies to the device in a training, of all that has a row for each sample, or is larger."""
    copies: list[dict[str, Any]] = json.loads((record / "device-0.json").read_text())["copies"]
    first = next(place for place, copy in enumerate(copies) if copy["thread"].startswith("streamload"))
    return [copy for copy in copies[first:] if copy["shape"] and copy["shape"][0] >= 6]


@pytest.mark.parametrize(
    ("options", "validated"),
    [
        (("--precision", "amp_bf16", "--streamload-mixing", "progress=2"), 3),
        (("--precision", "pure_bf16", "--accum-freq", "2"), 0),
    ],
    ids=["row losses and validation", "accumulated"],
)
@pytest.mark.deep
def test_a_step_finds_its_batch_on_the_device(
    options: tuple[str, ...],
    validated: int,
    shards: list[Path],
    validation_shards: list[Path],
    train: Callable[..., Run],
    tmp_path: Path,
) -> None:
    place = shards[0].parent
    data = ["--train-data", f"{place}/{{00000..00001}}.tar::{place}/{{00002..00003}}.tar"]
    if validated:
        data += ["--val-data", f"{validation_shards[0].parent}/{{00000..00001}}.tar"]
    train(*data, *FEW, *options, environ={"OPENCLIP_TEST_DEVICES": "1"})
    (record,) = tmp_path.glob("record-*")
    copies = copies_of_batches(record)
    batches = 4 + validated
    kinds = Counter(
        (copy["thread"], copy["dtype"], copy["pinned"]) for copy in copies if copy["shape"][1:] == [3, 64, 64]
    )
    assert kinds.keys() == {AHEAD}
    assert kinds[AHEAD] == batches
    others = [copy for copy in copies if copy["thread"] == "MainThread"]
    assert [copy for copy in others if len(copy["shape"]) > 1] == []


@pytest.mark.deep
def test_a_batch_of_any_precision_is_copied_once_to_its_ranks_device(
    shards: list[Path], tmp_path: Path
) -> None:
    place = Path(__file__).parent
    done = subprocess.run(
        [
            sys.executable,
            str(place / "on_device.py"),
            f"{shards[0].parent}/{{00000..00003}}.tar",
        ],
        env={**os.environ, "STREAMLOAD_CACHE_DIR": str(tmp_path / "cache"), "STREAMLOAD_CACHE_SIZE": "1GB"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    naflex = Counter(found.pop("naflex"))
    steps = naflex["streamload-device uint8 True npu:1"]
    assert steps > 1
    assert naflex == {
        "streamload-device uint8 True npu:1": steps,  # patches
        "streamload-device bool True npu:1": steps,  # which are images, which padding
        "streamload-device int64 True npu:1": 2 * steps,  # their places, and texts
    }
    assert len(found) == 7 + 1 + 2
    for name, copies in found.items():
        device = "npu:1" if "rank 1" in name else "npu:0"
        thread = "MainThread {} False" if "none" in name else "streamload-device {} True"
        dtypes = ("float32" if "none" in name else "uint8", "int64")
        assert Counter(copies) == {f"{thread.format(dtype)} {device}": 4 for dtype in dtypes}, name
