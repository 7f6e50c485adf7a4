"""Weights in the loss that a policy decides: the same on every layout, resumed anywhere, replayed, shown."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload.errors import PolicyError, StateMismatch
from streamload.loader.state import sealed
from streamload.mixing import Replay
from streamload.observe.page import read_runs
from streamload.steering import Decided, Summary
from streamload.steering.recorded import read_points
from tests.mixing.test_steering import EVERY, NAMES, STEPS, Seesaw, losses, make, place, rows_of
from tests.mixing.test_steering_ranks import RANKS, in_ranks, of_ranks

__all__ = ["place"]
Step = tuple[list[tuple[str, str]], tuple[float, ...] | None, list[float]]


class Weighed(Seesaw):
    """Decides shares, and at each second decision weights in the loss, by all that it sees of them."""

    def decide(self, summary: Summary, memory: Any) -> Decided:
        decided = super().decide(summary, memory)
        if decided.memory["turn"] % 2 == 0:
            return decided
        weights = {
            source.name: round(source.loss_weight * (1 + (source.alignment.mean or 0.0)), 6)
            for source in summary.sources[:2]
        }
        return decided._replace(loss_weights=weights)


def train(loader: streamload.Loader, state: Any = None, stop: int = STEPS) -> tuple[list[Step], Any]:
    """Of each step the rows, the sources' weights in the loss, and that of each row; the state after them."""
    steps: list[Step] = []
    with loader:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        for batch in loader:
            steps.append((rows_of(batch), loader.info.loss_weight, loader.info.weight.tolist()))
            loader.report(loss=losses(batch["__key__"]), alignment=losses(batch["__url__"]))
            if len(steps) == stop:
                break
        return steps, loader.state_dict()


@pytest.fixture(scope="module")
def uncut(place: Path) -> list[Step]:
    return train(make(place, mixing=Weighed(), decisions=place / "weighed.jsonl"))[0]


def test_each_row_weighs_what_was_decided_for_its_source_from_the_step_of_the_decision_on(
    place: Path, uncut: list[Step]
) -> None:
    lines = [json.loads(line) for line in (place / "weighed.jsonl").read_text().splitlines()][1:]
    decided = {line["step"]: line["loss_weights"] for line in lines if "loss_weights" in line}
    assert list(decided) == [3, 9]
    assert decided[9] != decided[3] != [1.0] * 3
    for step, (rows, by_source, by_row) in enumerate(uncut):
        weights = decided[9] if step >= 9 else decided[3] if step >= 3 else None
        assert by_source == (None if weights is None else tuple(weights))
        named = dict(zip(NAMES, weights or [1.0] * 3, strict=True))
        assert by_row == pytest.approx([named[name] for name, _ in rows])


def test_they_multiply_the_weights_of_an_objective_and_of_samples(place: Path) -> None:
    options = {"mixing": Weighed(), "num_batches": 6, "objective": {"a": 2, "b": 1, "c": 1}}
    with make(place, **options) as loader:
        for number, batch in enumerate(loader):
            info = loader.info
            loader.report(alignment=losses(batch["__url__"]))
            weights = info.loss_weight or (1.0,) * 3
            if number in (0, 5):  # the shares are those of the start, 1/3 each
                expected = [
                    3 * share * weight for share, weight in zip((0.5, 0.25, 0.25), weights, strict=True)
                ]
                assert torch.allclose(info.weight, torch.tensor(expected)[info.source])
        assert weights != (1.0,) * 3


@pytest.mark.parametrize("workers", [0, pytest.param(3, marks=pytest.mark.deep)])
def test_a_run_resumed_at_any_step_and_its_replay_have_the_same_weights(
    place: Path, uncut: list[Step], tmp_path: Path, workers: int
) -> None:
    for step in range(1, STEPS):
        before, state = train(make(place, workers, mixing=Weighed()), stop=step)
        assert before == uncut[:step]
        assert train(make(place, workers, mixing=Weighed()), state)[0] == uncut[step:]
        if step == 5:  # a log that begins in the middle of the run has them
            cut = tmp_path / "cut.jsonl"
            assert train(make(place, mixing=Weighed(), decisions=cut), state)[0] == uncut[step:]
            assert train(make(place, workers, mixing=Replay(cut)), state)[0] == uncut[step:]
    replayed, state = train(make(place, workers, mixing=Replay(place / "weighed.jsonl")), stop=4)
    assert replayed == uncut[:4]
    assert train(make(place, workers, mixing=Replay(place / "weighed.jsonl")), state)[0] == uncut[4:]


def alike(rank: int, place: Path, tmp_path: Path) -> None:
    steps = []
    with of_ranks(place, rank, mixing=Weighed(), decisions=tmp_path / "log") as loader:
        for batch in loader:
            steps.append((loader.info.loss_weight, rows_of(batch)))
            loader.report(loss=losses(batch["__key__"]), alignment=losses(batch["__url__"]))
            if len(steps) == 5:
                state = streamload.gather_state(loader)
    (tmp_path / f"{rank}.pickle").write_bytes(pickle.dumps((steps, state)))


def test_all_ranks_have_the_weights_of_one_that_has_all_rows(
    place: Path, uncut: list[Step], tmp_path: Path
) -> None:
    assert in_ranks(alike, place, tmp_path) == [0] * RANKS
    for rank in range(RANKS):
        steps, state = pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())
        assert [weights for weights, _ in steps] == [weights for _, weights, _ in uncut]
        assert train(make(place, mixing=Weighed()), state)[0] == uncut[5:]
    assert (tmp_path / "log").read_bytes() == (place / "weighed.jsonl").read_bytes()


class Given:
    """Decides these weights in the loss, once."""

    every = EVERY

    def __init__(self, weights: dict[str, Any]) -> None:
        self.weights = weights

    def decide(self, summary: Summary, memory: Any) -> Decided:
        return Decided(None, None, "given", self.weights)


def test_a_modality_names_the_sources_that_have_it_and_a_name_comes_before_it(place: Path) -> None:
    steps, state = train(make(place, mixing=Given({"image-text": 0.5, "b": 2.0}), num_batches=4))
    assert steps[-1][1] == (0.5, 2.0, 0.5)
    for damaged in ([1.0, 2.0], [1.0, -1.0, 1.0], "heavy"):
        steering = {**state["steering"], "loss_weights": damaged}
        with make(place, mixing=Given({})) as loader, pytest.raises(StateMismatch, match="decisions"):
            loader.load_state_dict(sealed({**state, "steering": steering}))


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"d": 1.0}, "a loss weight to 'd', and the sources are a, b, c, image-text"),
        ({"a": -1.0}, "gave 'a' the loss weight -1.0; expected a number from 0"),
        ({"a": float("nan")}, "gave 'a' the loss weight nan"),
        ({"a": 1e39}, r"gave 'a' the loss weight 1e\+39; expected a number from 0 to 1e\+30"),
        ([1.0], r"gave loss weights \[1.0\]; expected a dict by a, b, c, image-text"),
    ],
)
def test_weights_that_can_not_be_used_end_the_run(place: Path, weights: dict[str, Any], match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        train(make(place, mixing=Given(weights)))


def test_they_are_on_the_page_of_the_run_and_in_its_record(place: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with make(place, mixing=Given({"b": 1.5}), decisions=log, cache_dir=tmp_path / "own") as loader:
        for _ in loader:
            loader.report(loss=1.0)
        loader.observer.tick()
        (page,) = read_runs([tmp_path / "own"])
    assert [page.gauge("source_loss_weight", name) for name in NAMES] == [1.0, 1.5, 1.0]
    points = read_points(log)
    assert [[source.loss_weight for source in point.sources] for point in points] == [
        [1.0, 1.0, 1.0],  # in effect up to the decision
        *[[1.0, 1.5, 1.0]] * (len(points) - 1),
    ]
