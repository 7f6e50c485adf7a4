"""Histories of several processes on one tier, drawn from seeds: whatever happens, the cache doesn't lie."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def simulation(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The simulation in a process of its own: it puts itself in the place of the operating system."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seeds", "rarest"),
    [("0:30", "kills at create"), pytest.param("30:260", "kills at rename", marks=pytest.mark.deep)],
)
def test_what_must_hold_does_for_every_seed(seeds: str, rarest: str) -> None:
    done = simulation("--seeds", seeds, "--jobs", "2")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    happened = {
        name: int(count.replace(",", "")) for name, count in re.findall(r"([a-z_ ]+) ([\d,]+)", done.stdout)
    }
    for needed in (
        "stops",
        rarest,
        "kills at write",
        "shards_taken_over",
        "shards_evicted",
        "range_reads",
    ):
        assert any(name.strip() == needed and count for name, count in happened.items()), (
            f"no {needed} in these seeds"
        )


def test_a_seed_is_always_the_same_history() -> None:
    first, second = (simulation("--seeds", "7:12", "--trace").stdout for _ in range(2))
    assert first == second
    assert first.count("\n") > 5000
