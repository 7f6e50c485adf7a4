"""The table of planted bugs is in step with the package: each bug can still be planted, and has its test."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.planted.table import ROOT, Plant, read_plants
from tests.support.turns import third

PLANTS = read_plants()

REPLACED = ("facts/column_file.py",)
"""Modules without plants."""


def test_each_plant_is_planted_at_one_place() -> None:
    for plant in PLANTS:
        text = (ROOT / "streamload" / plant.file).read_text()
        bugged = plant.planted(text)
        assert bugged != text, f"{plant.name} changes nothing"
        compile(bugged, plant.file, "exec")


def test_a_plant_whose_place_is_gone_or_ambiguous_is_refused() -> None:
    plant = Plant("name", "file.py", "a < b", "a <= b", "harm")
    assert plant.planted("if a < b:") == "if a <= b:"
    for text in ("if a > b:", "a < b and a < b"):
        with pytest.raises(LookupError, match=r"name: streamload/file\.py has 'a < b' [02] times, not once"):
            plant.planted(text)


def test_each_plant_has_a_name_of_its_own_a_harm_and_a_test_that_exists() -> None:
    assert Counter(plant.name for plant in PLANTS).most_common(1)[0][1] == 1
    for plant in PLANTS:
        assert plant.harm, plant.name
        assert not plant.file.startswith(REPLACED), plant.name
        assert bool(plant.test) != bool(plant.same), (
            f"{plant.name} needs a test, or a line why it is the same"
        )
        if plant.test:
            path, _, test = plant.test.partition("::")
            name = test.partition("[")[0].rpartition("::")[2]
            assert f"def {name}(" in (ROOT / Path(path)).read_text(), f"{plant.name}: {plant.test} is gone"


def test_all_rooms_of_the_data_path_have_plants() -> None:
    rooms = Counter(plant.file.partition("/")[0] for plant in PLANTS)
    assert len(PLANTS) >= 150
    for room in (
        "batches",
        "cache",
        "ipc",
        "loader",
        "order",
        "origins",
        "prefetch",
        "ranks",
        "shards",
        "worker",
    ):
        assert rooms[room] >= 2, room


def test_each_plant_has_its_turn() -> None:
    turns = [third(PLANTS, turn) for turn in range(3)]
    assert sorted(plant.name for turn in turns for plant in turn) == sorted(plant.name for plant in PLANTS)
    assert max(map(len, turns)) - min(map(len, turns)) <= 1
    assert third(PLANTS, 5) == turns[2]
