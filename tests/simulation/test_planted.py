"""The simulation is worth something: it finds each of these bugs, planted into the shipped modules."""

from __future__ import annotations

import re

import pytest

from tests.simulation.planted import BUGS
from tests.simulation.test_seeds import simulation

SEEDS = "0:300"

LATE = {
    "lost-wake-up",
    "open-shard-evicted",
    "publish-in-two-steps",
    "publish-without-end-marker",
    "record-before-its-names",
    "reservation-not-given-back",
}
"""Bugs that take seconds to find: a later seed, or a history without an end."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[pytest.mark.deep] * (bug in LATE)) for bug in sorted(BUGS)]
)
@pytest.mark.sampled(2)
def test_a_planted_bug_is_found(bug: str) -> None:
    done = simulation("--seeds", SEEDS, "--plant", bug)
    assert done.returncode == 1, f"not found: {done.stdout}{done.stderr}"
    told = re.search(r"^seed (\d+): (.*)", done.stdout, re.MULTILINE)
    assert told is not None, done.stderr
    assert (
        f"again by: python -m tests.simulation --seeds {told[1]}:{int(told[1]) + 1} --plant {bug}"
        in done.stdout
    )
    print(f"{bug}: found by seed {told[1]}: {told[2]}")
