"""open_clip's own training on a simulated device: its batches are there before its step asks for them."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import Run

from tests import simulated_device

pytestmark = pytest.mark.skipif(not simulated_device.IS_POSSIBLE, reason="torch has no backends in Python")
FEW = ("--train-num-samples", "128", "--workers", "2", "--epochs", "1", "--device", simulated_device.NAME)
IMAGES = [32, 3, 64, 64]


def copies_of(tmp_path: Path, rank: int = 0) -> list[dict[str, Any]]:
    """A rank's copies to the device in the last training of a test."""
    record = max(tmp_path.glob("record-*"))
    copies: list[dict[str, Any]] = json.loads((record / f"device-{rank}.json").read_text())["copies"]
    return [copy for copy in copies if copy["source"] == "cpu"]


def test_a_step_finds_its_batch_on_the_device(
    shards: list[Path], train: Callable[..., Run], tmp_path: Path
) -> None:
    data = ("--train-data", f"{shards[0].parent}/{{00000..00003}}.tar")
    train(*data, *FEW, "--precision", "amp_bf16", environ={"OPENCLIP_TEST_DEVICES": "1"})
    images = [copy for copy in copies_of(tmp_path) if copy["shape"] == IMAGES]
    assert Counter((copy["thread"], copy["dtype"], copy["pinned"]) for copy in images) == {
        ("streamload-device_0", "uint8", True): 4
    }
