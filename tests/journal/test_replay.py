"""The matrix: random steps of recorded runs of all kinds, made again on random layouts, equal to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamload.journal import recorder
from tests.journal.kinds import KINDS
from tests.journal.runs import Check, Data, Recorded, Tally
from tests.support.turns import TURN

SHORT = (
    "weights_and_sizes",
    "buckets_weights_and_sizes",
    "cells_and_weights",
    "groups_with_holes",
    "repeats",
)
UNSURE = ("given_up", "given_up_in_groups", "missing", "missing_for_a_while")
"""Kinds with shards that can't be read, and may be later: steps are refused where they aren't sure."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Data]:
    data = Data(tmp_path_factory.mktemp("shards"))
    with data.servers:
        yield data


@pytest.mark.parametrize("name", SHORT)
def test_steps_are_made_again(name: str, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = one_run(name, 1, data, tmp_path, 5, monkeypatch)
    assert (tally.wrong, tally.refused) == ([], [])
    assert tally.equal == 5


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(KINDS))
def test_random_steps_of_random_runs_are_made_again(
    name: str, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of six runs of each kind, which the commit chooses."""
    tally = random_runs(name, data, tmp_path, range(2 * TURN, 2 * TURN + 2), monkeypatch)
    assert not tally.wrong
    assert not tally.refused or name in UNSURE
    assert tally.equal >= (3 if name in UNSURE else 15)


def random_runs(
    name: str, data: Data, directory: Path, attempts: range, monkeypatch: pytest.MonkeyPatch
) -> Tally:
    """What came of ten steps of each of some runs of a kind."""
    tally = Tally()
    for attempt in attempts:
        one_run(name, attempt, data, directory / str(attempt), 10, monkeypatch, tally)
    return tally


def one_run(
    name: str,
    attempt: int,
    data: Data,
    directory: Path,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    tally: Tally | None = None,
) -> Tally:
    """Record a run, and make some of its steps again."""
    tally = Tally() if tally is None else tally
    numbers = random.Random(f"{name} {attempt}")
    monkeypatch.setattr(recorder, "MARK_STEPS", numbers.choice([3, 7, 512]))
    directory.mkdir(exist_ok=True)
    run = Recorded(KINDS[name](data, directory, numbers), directory, numbers)
    run.go()
    Check(run, numbers, tally).some(steps)
    return tally
