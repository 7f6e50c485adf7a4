"""ExtensionContract finds what each of its tests is for: an extension for each that breaks its promise."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from streamload.extension import Extension, RankPart, WorkerPart
from streamload.testing.extension import ExtensionContract


class Numbering(WorkerPart):
    """Numbers the batches that a process makes, which a resumed run can't know."""

    batches = 0

    def finish(self, values, rows):
        self.batches += 1
        values["number"] = torch.full((len(rows),), self.batches)
        return b""


class Reversing(WorkerPart):
    def finish(self, values, rows):
        values["text"] = values["text"][::-1]
        return b""


@dataclass(frozen=True)
class Changing(WorkerPart):
    """Changes a value of each batch."""

    name: str
    change: Callable[[Any], Any]

    def finish(self, values, rows):
        values[self.name] = self.change(values[self.name])
        return b""


def one_more(values):
    return [*values, values[0]]


def flat_rows(values):
    return values.reshape(len(values), -1)


def as_integers(values):
    return values.view(torch.int32)


class TooMany(WorkerPart):
    def finish(self, values, rows):
        values["number"] = torch.zeros(len(rows) + 3)
        return b""


class Trusting(RankPart):
    """Takes any state for its own, and needs one."""

    def state(self, position):
        return {"trusting": 1}

    def load(self, state):
        self.saved = state["trusting"]


@dataclass(frozen=True)
class Breaking(Extension):
    worker: Callable[[], WorkerPart] | None = None
    rank: type[RankPart] | None = None

    name = "breaking"

    def in_worker(self, process):
        return self.worker and self.worker()

    def in_rank(self, run):
        return self.rank and self.rank()


class Unequal(Extension):
    name = "unequal"


@pytest.mark.parametrize(
    ("extension", "declared", "test", "error"),
    [
        (Unequal(), {}, "test_it_is_the_same_after_it_was_pickled", AssertionError),
        (Breaking(Numbering), {}, "test_it_adds_its_values_and_changes_no_other", AssertionError),
        (Breaking(Reversing), {}, "test_it_adds_its_values_and_changes_no_other", AssertionError),
        (Breaking(rank=Trusting), {}, "test_it_adds_its_values_and_changes_no_other", AssertionError),
        *(
            (
                Breaking(partial(Changing, name, change)),
                {},
                "test_it_adds_its_values_and_changes_no_other",
                AssertionError,
            )
            for name, change in (("text", one_more), ("image", flat_rows), ("image", as_integers))
        ),
        (
            Breaking(TooMany),
            {"adds": ("number",)},
            "test_it_resumes_exactly_at_every_step",
            AssertionError,
        ),
        (
            Breaking(Numbering),
            {"adds": ("number",)},
            "test_it_resumes_exactly_at_every_step",
            AssertionError,
        ),
        (
            Breaking(rank=Trusting),
            {"state_keys": ("trusting",)},
            "test_a_state_without_it_loads_and_one_with_it_where_it_is_not_used",
            KeyError,
        ),
        (
            Breaking(rank=Trusting),
            {"state_keys": ("trusting",), "damaged": ("x",)},
            "test_a_damaged_state_fails",
            AssertionError,
        ),
    ],
)
def test_an_extension_that_breaks_its_promise_fails(tmp_path, extension, declared, test, error):
    suite = type("Suite", (ExtensionContract,), {"extension": extension, **declared})()
    with pytest.raises(error):
        getattr(suite, test)(tmp_path)


def test_one_that_keeps_them_passes(tmp_path):
    suite = type("Suite", (ExtensionContract,), {"extension": Breaking()})()
    for name in dir(suite):
        if name.startswith("test_"):
            getattr(suite, name)(tmp_path / name)
