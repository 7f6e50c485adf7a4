"""Runs drawn at random have the same batches, states and counts where the rank decodes.

`make fuzz` runs thousands (tests/fuzzing/decoders.py).
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from streamload.pixels import auto
from tests.fuzzing.decoders import CHOSEN, all_differences, differences, differences_of_batches, make
from tests.oracle.cases import Case

pytestmark = pytest.mark.timeout(900)

SHORT, ALL, PARTS = 4, 12, 2
CHOOSING = 4


def cases() -> Iterator[Case]:
    return (make(random.Random(seed)) for seed in itertools.count())


def test_the_batches_of_some_runs_are_the_same_where_the_rank_decodes() -> None:
    assert all_differences(differences_of_batches, list(itertools.islice(cases(), SHORT)), jobs=2) == []


@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
def test_many_runs_are_the_same_and_resume_either_way(part: int) -> None:
    assert all_differences(differences, list(itertools.islice(cases(), ALL))[part::PARTS], jobs=1) == []


@pytest.mark.parametrize("count", [CHOOSING, pytest.param(2 * CHOOSING, marks=pytest.mark.deep)])
def test_runs_that_choose_in_mid_epoch_are_the_same_and_resume_either_way(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(auto, "FIRST_STEP", 1)
    monkeypatch.setattr(auto, "LAST_STEP", 2)
    monkeypatch.setattr(auto.DecoderChoice, "_measured", lambda self, *began: auto.DecodingLoad("", 1.0, 1.0))
    alone = (
        replace(case, layouts=[replace(layout, ranks=1) for layout in case.layouts])
        for case in cases()
        if case.options.get("train", True)  # an evaluation chooses nothing
    )
    chosen = list(itertools.islice(alone, count))
    lines = all_differences(functools.partial(differences, decode="auto"), chosen, jobs=2)
    assert [line for line in lines if not line.endswith(CHOSEN)] == []
    assert len(lines) >= count // 4
