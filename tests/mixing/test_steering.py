"""Weights that a policy decides: the same rows on every layout, resumed at every step, replayed."""

from __future__ import annotations

import itertools
import json
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamload
from streamload.errors import DecisionsError, OptionError, PolicyError, StateMismatch
from streamload.loader.state import sealed
from streamload.mixing import Replay
from streamload.mixing.reports import Rows
from streamload.steering import Decided, Summary
from streamload.testing.server import Fault, ShardServer
from streamload.testing.shards import write_shards
from tests.batching.test_padding import words
from tests.support import flat

NAMES = ("a", "b", "c")
STEPS, EVERY = 14, 3


class Seesaw:
    """Weights that depend on all that a policy sees, and on its memory."""

    every = EVERY

    def __init__(self) -> None:
        self.seen: list[Summary] = []

    def decide(self, summary: Summary, memory: Any) -> Decided:
        """Return weights between 1 and 9."""
        self.seen.append(summary)
        turn = (memory or {"turn": 0})["turn"]
        weights = {
            source.name: 1
            + 4 * (source.loss.mean or 0)
            + 2 * (source.alignment.squares > 3)
            + (source.total_samples + turn) % 3
            for source in summary.sources
        }
        return Decided(weights, {"turn": turn + 1}, f"turn {turn}")


def key_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(NAMES):
        write_shards(place / name, [30, 25], seed=seed)
    return place


def make(place: Path, workers: int = 0, floor: float = 0.05, **options: Any) -> streamload.Loader:
    sources = [
        streamload.Source(f"{place}/{name}/{{00000..00001}}.tar", 1, name, floor=floor) for name in NAMES
    ]
    defaults: dict[str, Any] = {"batch_size": 12, "num_batches": STEPS, "shuffle": 40, "num_workers": workers}
    defaults |= {"map_sample": key_of, "with_keys": True, "cache_dir": place / "cache", "cache_size": "1GB"}
    return flat.make_loader(sources, **{**defaults, "multiprocessing_context": "fork", **options})


def losses(keys: list[str]) -> torch.Tensor:
    """Of each row the same number in every run."""
    return torch.tensor([zlib.crc32(key.encode()) % 1000 / 1000 for key in keys])


def rows_of(batch: Any) -> list[tuple[str, str]]:
    return [(Path(url).parent.name, key) for url, key in zip(batch["__url__"], batch["__key__"], strict=True)]


def train(
    loader: streamload.Loader,
    state: Any = None,
    stop: int = 10**9,
    at: Mapping[int, Callable[[streamload.Loader], object]] | None = None,
) -> tuple[list[list[tuple[str, str]]], dict[str, Any]]:
    """The rows of the steps of an epoch, and the state after the last of them."""
    steps: list[list[tuple[str, str]]] = []
    with loader:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        for batch in loader:
            steps.append(rows_of(batch))
            loader.report(loss=losses(batch["__key__"]), alignment=losses(batch["__url__"]))
            if at is not None and len(steps) in at:
                at[len(steps)](loader)
            if len(steps) == stop:
                break
        return steps, loader.state_dict()


@pytest.fixture(scope="module")
def uncut(place: Path) -> list[list[tuple[str, str]]]:
    return train(make(place, mixing=Seesaw(), decisions=place / "uncut.jsonl"))[0]


def shares(steps: list[list[tuple[str, str]]]) -> list[Counter[str]]:
    return [Counter(name for name, _ in rows) for rows in steps]


def test_weights_change_at_the_steps_that_the_policy_decides_on(
    place: Path, uncut: list[list[tuple[str, str]]]
) -> None:
    lines = [json.loads(line) for line in (place / "uncut.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[1:]] == [3, 6, 9, 12]
    assert [line["position"] for line in lines[1:]] == [12 * step for step in (6, 9, 12, 15)]
    assert len({tuple(line["shares"]) for line in lines[1:]}) == 4
    for line, begin in zip(lines[1:4], (6, 9, 12), strict=True):
        given = sum(shares(uncut[begin : begin + EVERY]), Counter())
        for name, share in zip(NAMES, line["shares"], strict=True):
            assert abs(given[name] - 12 * len(uncut[begin : begin + EVERY]) * share / 2**32) < 2


@pytest.mark.parametrize("workers", [1, 3])
def test_decisions_and_rows_are_the_same_with_workers(
    workers: int, place: Path, uncut: list[list[tuple[str, str]]], tmp_path: Path
) -> None:
    """Workers prefetch further than a decision counts ahead: they wait for it."""
    path = tmp_path / "decisions.jsonl"
    assert train(make(place, workers, mixing=Seesaw(), decisions=path, prefetch_factor=4))[0] == uncut
    assert path.read_bytes() == (place / "uncut.jsonl").read_bytes()


def test_a_policy_sees_what_was_reported_and_handed_out(
    place: Path, uncut: list[list[tuple[str, str]]]
) -> None:
    policy = Seesaw()
    train(make(place, mixing=policy))
    for number, summary in enumerate(policy.seen):
        steps = uncut[number * EVERY : (number + 1) * EVERY]
        taken, all_taken = (
            sum(shares(steps), Counter()),
            sum(shares(uncut[: (number + 1) * EVERY]), Counter()),
        )
        assert summary.step == (number + 1) * EVERY
        for source in summary.sources:
            values = losses([key for rows in steps for name, key in rows if name == source.name]).double()
            assert source.loss.count == taken[source.name]
            assert source.loss.total == pytest.approx(float(values.sum()))
            assert source.loss.squares == pytest.approx(float((values**2).sum()))
            assert abs(source.samples - taken[source.name]) < 2
            assert abs(source.total_samples - all_taken[source.name]) < 2
            assert [part.count > 0 for part in source.losses] == [
                True,
                False,
                True,
                False,
                False,
                True,
                *[False] * 2,
            ]
            assert (source.bad, source.evaluation, source.floor) == (0, None, 0.05)
        assert sum(source.share for source in summary.sources) == pytest.approx(1)


class Rare(Seesaw):
    """Takes least of what was repeated most."""

    def decide(self, summary: Summary, memory: Any) -> Decided:
        self.seen.append(summary)
        return Decided({source.name: 1 / (1 + (source.passes or 0)) for source in summary.sources})


@pytest.mark.parametrize("batches", [{}, {"text_padding": "longest", "bucketing": 24}])
def test_passes_are_known_without_a_sizes_json_and_alike_on_all_layouts(
    place: Path, batches: dict[str, Any]
) -> None:
    def long(workers: int, policy: Seesaw, state: Any = None, stop: int = 10**9) -> Any:
        options = {"map_sample": None, "text_key": "txt", "tokenizer": words} if batches else {}
        loader = make(place, workers, mixing=policy, num_batches=40, **options, **batches)
        found = []
        with loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                names = batch if isinstance(batch, dict) else batch[-1]
                found.append(rows_of(names))
                if len(found) == stop:
                    break
            return found, loader.state_dict()

    policy = Rare()
    rows, _ = long(0, policy)
    taken = sum(shares(rows[:39]), Counter())
    for source in policy.seen[-1].sources:
        assert source.passes == pytest.approx(taken[source.name] / 55, rel=0.1)
    assert policy.seen[2].sources[0].passes is None
    assert long(2, Rare())[0] == rows
    for stop in (16, 17, 27):
        half, state = long(0, Rare(), stop=stop)
        assert half + long(0, Rare(), state)[0] == rows


@pytest.mark.parametrize("stop", range(1, STEPS))
@pytest.mark.sampled(5)
def test_a_run_resumed_at_any_step_has_the_same_rows(
    stop: int, place: Path, uncut: list[list[tuple[str, str]]], tmp_path: Path
) -> None:
    """Before a decision, between it and its effect, and after; on other workers, into the same log."""
    path = tmp_path / "decisions.jsonl"
    before, state = train(make(place, mixing=Seesaw(), decisions=path), stop=stop)
    if stop % 2:  # killed some steps after its last state
        train(make(place, mixing=Seesaw(), decisions=path), state, stop=4)
    after, _ = train(make(place, 2 * (stop in (6, 7)), mixing=Seesaw(), decisions=path), state)
    assert before + after == uncut
    assert path.read_bytes() == (place / "uncut.jsonl").read_bytes()


def test_a_state_goes_on_from_epoch_to_epoch(place: Path) -> None:
    def epochs(stop: int) -> list[list[tuple[str, str]]]:
        found: list[list[tuple[str, str]]] = []
        state = None
        for _ in range(40):
            loader = make(place, mixing=Seesaw(), num_batches=5)
            with loader:
                if state is not None:
                    loader.load_state_dict(state)
                while len(found) < 20:
                    for batch in loader:
                        found.append(rows_of(batch))
                        loader.report(loss=losses(batch["__key__"]))
                        state = loader.state_dict()
                        if len(found) % stop == 0 or len(found) == 20:
                            break
                    if len(found) % stop == 0:
                        break
            if len(found) == 20:
                return found
        raise AssertionError

    assert epochs(4) == epochs(7) == epochs(1000)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_log_alone_gives_every_batch_again(
    workers: int, place: Path, uncut: list[list[tuple[str, str]]]
) -> None:
    replay = Replay(place / "uncut.jsonl")
    assert train(make(place, workers, mixing=replay))[0] == uncut
    half, state = train(make(place, mixing=replay), stop=7)
    assert half + train(make(place, workers, mixing=replay), state)[0] == uncut
    assert len(state["changes"]) == 1  # what comes later is in the log


def test_weights_that_the_training_sets_are_replayed(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    at = {
        2: lambda loader: loader.set_weights({"a": 5}),
        3: lambda loader: loader.set_weights({"a": 0, "c": 2}),
    }
    for mixing in (None, Seesaw()):
        for workers in (0, 2):
            options = {"mixing": mixing, "decisions": path, "prefetch_factor": 1}
            rows, _ = train(make(place, workers, **options), at=at)
            assert train(make(place, mixing=Replay(path)))[0] == rows
            reasons = [json.loads(line)["reason"] for line in path.read_text().splitlines()[1:]]
            assert reasons.count("set_weights") == 2
            assert len(reasons) == (2 if mixing is None else 6)


def test_a_replay_of_another_run_is_refused(place: Path, uncut: list[list[tuple[str, str]]]) -> None:
    replay = Replay(place / "uncut.jsonl")
    for options, what in [({"seed": 1}, "seed"), ({"batch_size": 6}, "batch"), ({"shuffle": 20}, "sources")]:
        with (
            make(place, mixing=replay, **options) as loader,
            pytest.raises(DecisionsError, match=f"another {what}"),
        ):
            next(iter(loader))
    with pytest.raises(OptionError, match="leave out decisions="):
        make(place, mixing=replay, decisions="other")
    with make(place, mixing=replay) as loader, pytest.raises(OptionError, match="leave out set_weights"):
        loader.set_weights({"a": 3})


class Failing(Seesaw):
    """Does at step 6 what it is made for."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        super().__init__()
        self._answer = answer

    def decide(self, summary: Summary, memory: Any) -> Decided:
        """Fail at the second decision."""
        return super().decide(summary, memory) if summary.step < 6 else self._answer()


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (lambda: 1 // 0, "ZeroDivisionError: integer division or modulo by zero"),
        (lambda: Decided({"z": 1}), "gave a weight to 'z'"),
        (lambda: Decided({"a": float("nan")}), "gave 'a' the weight nan"),
        (lambda: Decided({"a": -1}), "gave 'a' the weight -1"),
        (lambda: Decided(dict.fromkeys(NAMES, 0)), "every source the weight 0"),
        (lambda: {"a": 1}, "returned a dict; expected a streamload.mixing.Decided"),
        (lambda: Decided(None, {1, 2}), "memory can't be part of a state"),
        (lambda: Decided(None, float("inf")), "memory can't be part of a state"),
        (lambda: Decided(None, "x" * 100_000), "too large for a state"),
    ],
)
def test_a_policy_that_fails_is_an_error_that_names_it(
    answer: Callable[[], Any], match: str, place: Path
) -> None:
    with make(place, mixing=Failing(answer)) as loader:
        batches = iter(loader)
        for _ in range(6):
            next(batches)
        with pytest.raises(PolicyError, match=f"mixing=Failing, at step 6 of the run: .*{match}"):
            next(batches)
        state = loader.state_dict()  # that of the last batch
    rest, _ = train(make(place, mixing=Seesaw()), state)
    assert len(rest) == STEPS - 6


def test_a_sizes_json_that_cannot_be_read_is_not_the_policys_error(place: Path, tmp_path: Path) -> None:
    with ShardServer(place) as server:
        server.misbehave("b/sizes.json", Fault(status=501))
        sources = [streamload.Source(f"{server.url}/{name}/{{00000..00001}}.tar", 1, name) for name in NAMES]
        given: dict[str, Any] = {"batch_size": 12, "num_batches": STEPS, "num_workers": 0}
        given |= {"map_sample": key_of, "cache_dir": tmp_path, "cache_size": "1GB", "mixing": Seesaw()}
        with (
            flat.make_loader(sources, **given) as loader,
            pytest.raises(streamload.errors.OriginError) as caught,
        ):
            list(loader)
    assert "how many samples a source has can't be read" in str(caught.value)
    assert "b/sizes.json: the server answers 501" in str(caught.value)


def test_no_answer_changes_nothing_and_is_logged(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    fixed, _ = train(make(place))

    class Nothing(Seesaw):
        def decide(self, summary: Summary, memory: Any) -> Decided:
            return Decided(None, None, "wait\nand see")

    assert train(make(place, mixing=Nothing(), decisions=path))[0] == fixed
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["weights"], line["reason"]) for line in lines[1:]] == [(None, "wait and see")] * 4


def test_a_plain_function_is_a_policy(place: Path) -> None:
    def only_b(summary: Summary) -> dict[str, float]:
        return {"a": 0, "b": 1, "c": 0}

    batches = {"num_batches": 300, "batch_size": 3, "floor": 0.0}
    steps, _ = train(make(place, mixing=only_b, **batches))
    assert shares(steps[200 + 64 : 202 + 64]) == [Counter(b=3)] * 2
    assert sum(shares(steps[200 : 200 + 64]), Counter()) == Counter(a=64, b=64, c=64)


def test_late_reports_and_those_of_other_batches_count_where_they_belong(place: Path) -> None:
    policy = Seesaw()
    with make(place, mixing=policy) as loader:
        held = []
        for batch in loader:
            held.append((loader.info, batch["__key__"]))
            if len(held) in (5, 8):  # all since the last time; the first ones after their decision
                for info, keys in held[-3:]:
                    loader.report(loss=losses(keys), batch=info)
    counts = [[int(part.count) for part in sum_of(summary)] for summary in policy.seen]
    late = [24, 0, 12, 0, 0, 0, 0, 0]
    assert counts == [[0] * 8, late, late, [0] * 8]


def sum_of(summary: Summary) -> list[Any]:
    first, *others = [source.losses for source in summary.sources]
    parts = list(first)
    for other in others:
        parts = [part.plus(one) for part, one in zip(parts, other, strict=True)]
    return parts


def test_evaluations_and_values_that_are_not_finite_reach_the_policy(place: Path) -> None:
    policy = Seesaw()
    with make(place, mixing=policy) as loader:
        for step, batch in enumerate(loader):
            loader.report(loss=losses(batch["__key__"]) * float("nan" if step == 1 else 1))
            if step == 4:
                loader.report_eval({"a": 0.5, "b": torch.tensor(2.0), "c": float("nan")})
        with pytest.raises(OptionError, match="no source is named z"):
            loader.report_eval({"z": 1})
    assert [sum(source.bad for source in summary.sources) for summary in policy.seen] == [12, 0, 0, 0]
    assert [[source.evaluation for source in summary.sources] for summary in policy.seen[:3]] == [
        [None] * 3,
        [0.5, 2.0, None],
        [None] * 3,
    ]


def test_reports_without_a_policy_do_nothing(place: Path) -> None:
    with make(place) as loader:
        for batch in loader:
            loader.report(loss=losses(batch["__key__"]))
            loader.report_eval({"a": 1.0})
        assert "steering" not in loader.state_dict()


def test_rows_stand_for_the_shares_of_the_start_by_their_importance(place: Path) -> None:
    policy = streamload.mixing.Schedule({4: {"a": 4}, 8: {"a": 1, "b": 1, "c": 1}}, every=4)
    with make(place, mixing=policy) as loader:
        seen = [loader.info.importance for _ in loader]
    for step, importance in enumerate(seen):
        if 8 <= step < 12:  # a decision counts from the next decision step on
            assert importance == pytest.approx((0.5, 2.0, 2.0), rel=1e-4)
        else:
            assert importance is None
    with make(place) as loader:
        next(iter(loader))
        assert loader.info.importance is None


def test_the_objective_is_kept_while_sampling_moves(place: Path) -> None:
    """The weights of a source's rows add up to its share of the objective, whatever its share of rows."""
    objective = {"a": 1, "b": 2, "c": 1}
    sums, steps, seen = np.zeros(3), 0, set()
    with make(place, 2, mixing=Seesaw(), objective=objective, num_batches=60, floor=0.1) as loader:
        for batch in loader:
            info = loader.info
            loader.report(loss=losses(batch["__key__"]))
            assert info.source.tolist() == [NAMES.index(name) for name, _ in rows_of(batch)]
            assert info.run_step == steps
            sums += np.bincount(info.source.numpy(), info.weight.double().numpy(), 3) / info.rows
            steps += 1
            seen.add(tuple(info.weight.tolist()))
    assert len(seen) > 10
    assert sums / steps == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
    with make(place, objective={"a": 3}) as loader:  # the others keep their own weights
        next(iter(loader))
        assert loader.info.weight[loader.info.source == 0].tolist() == [pytest.approx(9 / 5)] * 4
    with pytest.raises(OptionError, match="objective= names z; the sources are a, b, c"):
        make(place, objective={"z": 1})


@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 100)] * 3).filter(any), min_size=4, max_size=4), st.floats(0, 0.33))
def test_floors_hold_at_every_step(place: Path, weights: list[tuple[float, ...]], floor: float) -> None:
    class Given(Seesaw):
        def decide(self, summary: Summary, memory: Any) -> Decided:
            step = 0 if memory is None else memory
            return Decided(dict(zip(NAMES, weights[step % len(weights)], strict=True)), step + 1)

    steps, _ = train(make(place, mixing=Given(), floor=floor))
    for number, taken in enumerate(itertools.accumulate(shares(steps)), 1):
        assert all(taken[name] > 12 * number * floor - 2 for name in NAMES)


def test_a_damaged_state_of_decisions_is_refused(place: Path) -> None:
    _, state = train(make(place, mixing=Seesaw()), stop=7)
    for name, value in [("steps", -1), ("decided", 99), ("handed", [[1, 2]]), ("log", [1]), ("ranks", ["x"])]:
        broken = sealed({**state, "steering": {**state["steering"], name: value}})
        with make(place, mixing=Seesaw()) as loader, pytest.raises(StateMismatch, match="decisions"):
            loader.load_state_dict(broken)


def test_a_state_goes_on_with_fixed_weights_and_with_another_policy(
    place: Path, uncut: list[list[tuple[str, str]]], caplog: pytest.LogCaptureFixture
) -> None:
    class Other(Seesaw):
        pass

    _, state = train(make(place, mixing=Seesaw()), stop=7)
    fixed, _ = train(make(place), state)
    assert shares(fixed)[:2] == shares(uncut)[7:9]  # with what was decided before
    policy = Other()
    with caplog.at_level(logging.INFO, "streamload"):
        train(make(place, mixing=policy), state)
    assert "decided by Seesaw: Other begins anew" in caplog.text
    assert policy.seen[0].step == 9


def test_options_that_make_no_sense_are_refused(place: Path, tmp_path: Path) -> None:
    for options in ({"mixing": Seesaw()}, {"decisions": "d"}):
        with pytest.raises(OptionError, match="is for training"):
            flat.make_loader(f"{place}/a", train=False, **options)
    with pytest.raises(OptionError, match="expected Progress"):
        make(place, mixing=3)
    with (
        make(place, mixing=Seesaw(), rank=1, world_size=2) as loader,
        pytest.raises(OptionError, match="nothing joins the 2 ranks"),
    ):
        iter(loader)
    with make(place, decisions=tmp_path) as loader, pytest.raises(OptionError, match="can't be written"):
        iter(loader)


def test_a_batch_on_hold_is_not_begun_before_its_decision(place: Path) -> None:
    """A rank that takes its time: its workers wait at the decision, and no longer."""
    rows: Rows = slice(0, 6)
    with make(place, 3, mixing=Seesaw(), prefetch_factor=4) as loader:
        found = []
        for batch in loader:
            found.append(rows_of(batch))
            loader.report(loss=losses(batch["__key__"])[rows], rows=rows)
    with make(place, mixing=Seesaw()) as loader:
        for number, batch in enumerate(loader):
            assert rows_of(batch) == found[number]
            loader.report(loss=losses(batch["__key__"])[:6], rows=range(6))


def test_floors_that_add_up_to_one_leave_nothing_to_decide(place: Path) -> None:
    sources = [
        streamload.Source(f"{place}/{name}/*.tar", 1, name, floor=floor)
        for name, floor in zip(NAMES, (0.5, 0.25, 0.25), strict=True)
    ]
    options = {"map_sample": key_of, "with_keys": True, "num_workers": 0, "cache_dir": place / "cache"}
    with flat.make_loader(sources, mixing=Seesaw(), batch_size=12, num_batches=STEPS, **options) as loader:
        for batch in loader:
            loader.report(loss=losses(batch["__key__"]))
            assert Counter(name for name, _ in rows_of(batch)) == Counter(a=6, b=3, c=3)


def test_progress_moves_from_what_has_been_learned_and_not_without_reports(
    place: Path, tmp_path: Path
) -> None:
    """Only the held-out loss of "a" falls; "c" is never reported."""
    steps, share = 240, {}
    for reports in (True, False):
        path = tmp_path / f"{reports}.jsonl"
        policy = streamload.mixing.Progress(signal="eval", every=8, max_passes=1e9)
        loader = make(place, mixing=policy, decisions=path, num_batches=steps)
        with loader:
            for step, batch in enumerate(loader):
                noise = float(losses(batch["__key__"]).mean()) / 100
                if reports:
                    loader.report_eval({"a": 3 - step / 100 + noise, "b": 1 + noise})
        lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        assert len(lines) == steps // 8 - 1
        share[reports] = [line["sources"][0]["share"] for line in lines]
    assert share[False] == pytest.approx([1 / 3] * len(share[False]), abs=1e-5)
    assert share[True][-1] > 0.34


@pytest.mark.deep
def test_shares_by_tokens_are_resumed_and_replayed(place: Path, tmp_path: Path) -> None:
    tokens = {"a": 10.0, "b": 20.0, "c": 40.0}

    def trained(loader: streamload.Loader, state: Any = None, stop: int = 10**9) -> Any:
        steps = []
        with loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            for batch in loader:
                steps.append(rows_of(batch))
                own = torch.tensor([tokens[name] for name, _ in steps[-1]])
                loader.report(tokens=own + losses(batch["__key__"]))
                if len(steps) == stop:
                    break
            return steps, loader.state_dict()

    policy, path = streamload.mixing.TokenShares(every=10), tmp_path / "decisions.jsonl"
    options = {"num_batches": 60, "mixing": policy, "batch_size": 14}
    whole, _ = trained(make(place, decisions=path, **options))
    last = Counter(name for step in whole[40:] for name, _ in step)
    assert [last[name] / 280 for name in NAMES] == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=0.02)
    assert "tokens of a row: 10.5" in path.read_text()
    for stop in (7, 10, 15):
        first, state = trained(make(place, **options), stop=stop)
        rest, _ = trained(make(place, 2, **options), state)
        assert first + rest == whole
    assert trained(make(place, **{**options, "mixing": Replay(path)}))[0] == whole


def test_weights_and_batch_sizes_of_one_run_are_replayed_together(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    at: dict[int, Callable[[streamload.Loader], object]] = {
        3: lambda loader: loader.set_batch_size(8),
        4: lambda loader: loader.set_weights({"a": 4}),
        5: lambda loader: loader.set_batch_size(16),
    }
    rows, _ = train(make(place, 2, mixing=Seesaw(), decisions=path, prefetch_factor=1), at=at)
    assert {len(step) for step in rows} == {8, 12, 16}
    half, state = train(make(place, mixing=Replay(path)), stop=6)
    assert half + train(make(place, 2, mixing=Replay(path)), state)[0] == rows
