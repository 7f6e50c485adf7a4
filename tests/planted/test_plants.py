"""The tests find the planted bugs, each by its test: a third of them, which the commit chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.planted.overlay import Overlay
from tests.planted.table import ROOT, Plant, read_plants
from tests.support.turns import TURN, third


@pytest.fixture(scope="module")
def overlay() -> Iterator[Overlay]:
    """A copy of the project for the bugs of this process."""
    with Overlay() as copy:
        yield copy


@pytest.mark.deep
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(plant, id=f"third-{TURN + 1}-{plant.name}")
        for plant in third(read_plants())
        if not plant.same
    ],
)
def test_a_planted_bug_is_found(overlay: Overlay, plant: Plant) -> None:
    assert overlay.kills(plant, [plant.test]), f"{plant.test} passes although {plant.harm}:\n{overlay.log}"


@pytest.mark.deep
def test_a_bug_is_found_only_by_a_test_that_fails_with_it_alone(overlay: Overlay) -> None:
    bug = next(plant for plant in read_plants() if plant.name == "repeat-never-rounded-up")
    path = overlay.copy / "streamload" / bug.file
    text = path.read_text()
    assert overlay.kills(bug, [bug.test]) == bug.test
    assert path.read_text() == text == (ROOT / "streamload" / bug.file).read_text()
    assert overlay.run([bug.test])["status"] == 0, overlay.log
    nothing_runs = replace(bug, new="(drawn < no_such_name)")
    unimportable = replace(bug, old="from __future__ import annotations", new="import no_such_module")
    for other in (nothing_runs, unimportable):
        assert not overlay.kills(other, [bug.test])
        assert overlay.run([bug.test])["status"] == 0, overlay.log
