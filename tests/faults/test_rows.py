"""Every row of the fault matrix; `make faults` makes all of its attempts.

`make test` makes the first attempt at each third quick row; `make deep` the short form of all: each variant
once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reliability
from tests.faults.data import Data
from tests.faults.matrix import ROWS, Sources, run_row
from tests.faults.oracle import LETTERS, Attempt
from tests.faults.readers import Reading, read_in_child
from tests.faults.rows import Row
from tests.faults.steps import SCENARIOS

ROOT = Path(__file__).parents[2]

SLOW = {
    "killed at each step",
    "link cut",
    "node lost",
    "far windows",
    "row writers killed",
    "forks beside filling threads",
    "a rank's shards go",
    "more groups than shards",
    "one slow shard",
    "small cache",
}
"""Rows of which a single attempt takes two seconds of CPU or more."""


@pytest.fixture(scope="module")
def sources() -> Iterator[Sources]:
    with Sources() as sources:
        yield sources


def named(row: Row) -> str:
    return f"{row.number} {row.name}"


def assert_holds(row: Row, sources: Sources, count: int) -> None:
    result = run_row(row, sources, count, short=True, with_peer=False)
    if "left_out" in result:
        pytest.skip(result["left_out"])
    assert result["passes"] == result["attempts"], result["examples"]
    assert result["happened"]


@pytest.mark.parametrize("row", [row for row in ROWS if row.name not in SLOW][::9], ids=named)
def test_what_must_hold_holds_in_the_first_attempt(row: Row, sources: Sources) -> None:
    assert_holds(row, sources, 1)


@pytest.mark.deep
@pytest.mark.timeout(400)
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_what_must_hold_holds_for_each_variant(row: Row, sources: Sources) -> None:
    assert_holds(row, sources, row.short or len(row.variants))


@pytest.mark.deep
def test_the_same_faults_are_met_by_webdataset(sources: Sources) -> None:
    (row,) = (row for row in ROWS if row.name == "body cut")
    met = run_row(row, sources, 2, short=True)["webdataset"]
    assert met["attempts"] == 2
    assert met["happened"]


def of(attempt_function: Any) -> Row:
    return Row(99, "a test's", "none", "N", "that the matrix can fail", attempt_function, count=1)


def test_a_row_whose_fault_never_happens_does_not_pass(sources: Sources) -> None:
    def counted(attempt: Attempt) -> None:
        attempt.happened["requests that met it"] += 0

    for never in (lambda attempt: None, counted):
        assert run_row(of(never), sources, 1)["failed"] == {"fault": 1}


def test_a_lost_a_doubled_and_a_changed_sample_are_told_apart(sources: Sources) -> None:
    def attempt(attempt: Attempt) -> None:
        data = attempt.borrow(0)
        attempt.happened["by hand"] += 1
        result = read_in_child(Reading(attempt.root, data.shards))
        assert not data.differences(result["seen"])
        one, two, three, *_ = result["seen"].values()
        one.pop()
        two.append(two[-1])
        three[0] = [three[0][0], "0" * 16]
        attempt.check_all(data.differences(result["seen"]))

    assert run_row(of(attempt), sources, 1)["failed"] == {"N": 1, "D": 1, "B": 1}


def test_garbage_in_a_tier_and_a_wrong_published_byte_are_seen(sources: Sources) -> None:
    def attempt(attempt: Attempt) -> None:
        data = attempt.borrow(0)
        attempt.happened["by hand"] += 1
        read_in_child(Reading(attempt.root, data.shards))
        (attempt.root / "tier.json.1").write_text("half a rec")
        path = attempt.root / "shards" / data.shards[0].digest / "data"
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
        attempt.check_next_start(data)

    assert run_row(of(attempt), sources, 1)["failed"] == {"C": 1, "T": 1}


def test_every_letter_is_one_of_the_oracles() -> None:
    assert all(set(row.holds) <= set(LETTERS) for row in ROWS)


def test_the_page_shows_the_results_that_are_committed() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "faults.json").read_text())
    assert reliability.rows(result) in (ROOT / "docs/results/faults.md").read_text()
    assert reliability.kills(result) in (ROOT / "docs/results/faults.md").read_text()
    assert {(row["row"], row["name"]) for row in result["rows"]} <= {(row.number, row.name) for row in ROWS}


def test_kills_are_spread_over_the_whole_life_of_a_shard() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "faults.json").read_text())
    assert result["killed_in"] == reliability.killed_in(result["rows"])
    assert sum(result["killed_in"].values()) >= 1000
    for state in ("claiming", "taking over", "evicting", "publishing"):
        assert result["killed_in"][state] >= 50
    filled = [count for state, count in result["killed_in"].items() if state.endswith("% filled")]
    assert len(filled) == 4
    assert min(filled) >= 50
    steps = next(row["happened"] for row in result["rows"] if row["name"] == "killed at each step")
    for scenario in SCENARIOS:
        assert steps[scenario] == steps[f"{scenario}, by strace"]


def test_data_is_what_tarfile_reads(tmp_path: Path) -> None:
    data = Data(tmp_path / "data", 1, spawn=False, counts=[3])
    (samples,) = data.samples.values()
    data.close()
    assert [key for key, _ in samples] == [f"00000{index:06d}" for index in range(3)]
