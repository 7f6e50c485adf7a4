"""Steps over borders: of epochs, of broken-off ones, of sequences with other counts, and of marks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload.journal import recorder
from streamload.journal.history import RunHistory
from tests.journal.runs import Data, rate_of
from tests.support import flat

Keys = list[list[str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Data]:
    data = Data(tmp_path_factory.mktemp("shards"))
    with data.servers:
        yield data


def make(folder: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 12, "num_workers": 0, "shuffle": 50, "lanes": 3, "map_sample": key_of}
    defaults |= {"cache_dir": folder / "cache", "journal": folder / "journal", "with_keys": True}
    given = {**defaults, **options}
    return flat.make_loader(given.pop("urls"), **given)


def key_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def run(
    loader: streamload.Loader, epochs: list[int], after: dict[int, Callable[[], object]] | None = None
) -> Keys:
    """The keys of the steps of epochs, each broken off after so many."""
    steps: Keys = []
    for most in epochs:
        for batch in itertools.islice(loader, most):
            steps.append(batch["__key__"])
            (after or {}).get(len(steps), lambda: None)()
    return steps


def again(folder: Path, step: int, **options: Any) -> Keys:
    with make(folder, **options) as loader:
        return [batch["__key__"] for batch in loader.at(step)]


def test_epochs_with_other_counts_are_made_again_by_their_own(data: Data, tmp_path: Path) -> None:
    options = {"urls": data.urls("a"), "repeat": rate_of, "num_batches": 40}
    with make(tmp_path, **options) as loader:
        steps = run(loader, [999])
        loader.set_epoch(3)
        steps += run(loader, [999])
    for step in (0, 20, 70):
        assert again(tmp_path, step, **options) == steps[step:]


def test_a_replay_goes_on_as_the_run_did_after_an_epoch_was_broken_off(data: Data, tmp_path: Path) -> None:
    options = {"urls": data.urls("a")}
    with make(tmp_path, **options) as loader:
        steps = run(loader, [5, 999])
    assert again(tmp_path, 3, **options) == steps[3:]


def test_weights_that_a_mark_has_hold_in_a_replay_from_before_it(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MARK_STEPS", 4)
    options = {"urls": data.sources(a=3.0, b=1.0), "num_batches": 12}
    with make(tmp_path, **options) as loader:
        steps = run(loader, [999], {8: lambda: loader.set_weights({"a": 0.1})})
    assert again(tmp_path, 5, **options) == steps[5:]


def test_a_loader_that_is_closed_has_written_all_steps(data: Data, tmp_path: Path) -> None:
    with make(tmp_path, urls=data.urls("a")) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
    assert RunHistory(tmp_path / "journal").segment().stop == 5


def test_a_saved_state_has_all_its_steps_in_the_journal(data: Data, tmp_path: Path) -> None:
    """Whatever becomes of the process then."""
    options = {"urls": data.urls("a"), "num_batches": 12}
    with make(tmp_path, **options) as loader:
        batches = iter(loader)
        seen = [next(batches)["__key__"] for _ in range(5)]
        state = loader.state_dict()
        assert RunHistory(tmp_path / "journal").segment().stop == 5
        next(batches)
    with make(tmp_path, **options) as loader:
        loader.load_state_dict(state)
        seen += [batch["__key__"] for batch in loader]
    with make(tmp_path, **options) as loader:
        again = [*loader.at(0), *loader.at(5)]
    assert [batch["__key__"] for batch in again] == seen
