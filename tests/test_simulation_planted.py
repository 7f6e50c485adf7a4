"""The simulation is worth something: it finds each of these bugs, planted into the shipped modules."""

from __future__ import annotations

import re

import pytest
from simulation.planted import BUGS
from test_simulation_seeds import simulation

SEEDS = "0:300"
"""Those that the modules pass as they are; see test_simulation_seeds.py."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", sorted(BUGS))
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
