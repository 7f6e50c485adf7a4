"""Batches of one source, by step or by rank: the same samples as mixed, in order, on any layout, resumed."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Batches, Order, Source
from streamload.errors import DecisionsError, OptionError, StateMismatch
from streamload.mixing import Replay, Schedule
from streamload.order.events import UNIT, shares_of
from streamload.testing.shards import ShardOptions, write_shards
from tests.loader.test_buckets import tokenize
from tests.order.test_parts import plain_part
from tests.support import flat

COUNTS = {"a": [30, 41, 22], "b": [9, 8], "c": [25, 14], "d": [11]}
STEPS = 16
Step = list[list[str]]
"""The keys of each rank."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one source")
    for seed, (name, counts) in enumerate(COUNTS.items()):
        write_shards(
            directory / name, counts, seed=seed, options=ShardOptions(folder=f"{name}/", image_side=(8, 12))
        )
    return directory


class Case:
    """A random run, drawn by its seed.

    Attributes:
        changes: after so many steps these weights are set.
        cuts: it is resumed after these steps, by number, of which the last change is known.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.sources = rng.choice(["step", "rank"])
        self.names = rng.sample([*COUNTS], rng.randint(2, 4))
        self.weights = {name: rng.choice([1, 2, 3, 0.7]) for name in self.names}
        self.floors = {name: rng.choice([0, 0, 0.1]) for name in self.names}
        self.changes = {
            rng.randint(2, 9): {name: rng.choice([1, 4, 0.5, 0]) for name in self.names[1:]}
            for _ in range(rng.randint(0, 2))
        }
        self.bucketing = rng.choice([None, None, "step", 24, 64])
        self.ranks = rng.choice([1, 2, 4]) if self.sources == "rank" else 1
        self.groups = rng.choice([1, 1, 2]) if self.ranks != 1 or self.sources == "step" else 1
        self.batch = 8
        self.cuts = sorted(rng.sample(range(max([0, *self.changes]), STEPS - 1), 2))
        self.layouts = [
            (self.ranks if self.sources == "rank" else n, rng.choice([0, 0, 2])) for n in (1, 2, 4)
        ]

    def block_ends(self) -> set[int]:
        """After how many steps a block ends: the first ones grow, 1, 1, 2, 4, … steps."""
        block = self.bucketing // self.batch if isinstance(self.bucketing, int) else 1
        grown = next(size for size in (1, 2, 4, 8) if size >= block)
        return {1, 2, 4, 8, 16} & {*range(grown + 1)} | {*range(grown, STEPS + 1, block)}

    @contextlib.contextmanager
    def loaders(
        self, data: Path, cache: Path, ranks: int, workers: int = 0, **changed: Any
    ) -> Iterator[list[streamload.Loader]]:
        options: dict[str, Any] = {"sources": self.sources, "bucketing": self.bucketing, **changed}
        batches = Batches(with_keys=True, text_padding="longest", **options)
        sources = [
            Source(str(data / name), self.weights[name], name, floor=self.floors[name]) for name in self.names
        ]
        made = [
            flat.make_loader(
                sources, tokenize, batch_size=self.batch // ranks, num_workers=workers, seed=3,
                cache_dir=cache, cache_size="1GB", output="dict", batches=batches,
                shuffle=20, lanes=2, num_batches=STEPS,
                order=Order(rank=rank, world_size=ranks, groups=self.groups),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            yield made
        finally:
            for loader in made:
                loader.close()

    def run(
        self, loaders: list[streamload.Loader], steps: int = STEPS
    ) -> tuple[list[Step], list[Any], dict[int, dict[str, float]]]:
        """Steps over all ranks, the states after each, and the changes by the steps from which they count."""
        found: list[Step] = []
        states, counted = [], {}
        epochs = [itertools.chain.from_iterable(itertools.repeat(loader)) for loader in loaders]
        for batches in itertools.islice(zip(*epochs, strict=True), steps):
            found.append([batch["__key__"] for batch in batches])
            if len(found) in self.changes:
                (start,) = {loader.set_weights(self.changes[len(found)]) for loader in loaders}
                counted[start] = self.changes[len(found)]
            states.append([json.loads(json.dumps(loader.state_dict())) for loader in loaders])
        return found, states, counted


def of_source(keys: list[str]) -> str:
    (name,) = {key.partition("/")[0] for key in keys}
    return name


def in_order(case: Case, data: Path, cache: Path) -> dict[str, Iterator[str]]:
    """Of each source its samples, as a run has them whose steps are mixed."""
    with case.loaders(data, cache, 1, sources="mixed", bucketing=None) as (mixed,):
        keys = list(next(iter(mixed))["__key__"])
        mixed.set_weights(dict.fromkeys(case.names, 1.0))  # lanes and windows stay those of the first weights
        while len(keys) < case.batch * STEPS * (len(case.names) + 1):
            keys += [key for batch in mixed for key in batch["__key__"]]
    return {name: iter([key for key in keys if key.startswith(f"{name}/")]) for name in case.names}


def check(case: Case, steps: list[Step], counted: dict[int, dict[str, float]], sequences: Any) -> None:
    """Compare a run, of one group, with a plain count over the sources' sequences."""
    debt, weights = [Fraction(0)] * len(case.names), dict(case.weights)
    expected: dict[str, list[str]] = {name: [] for name in case.names}
    handed: dict[str, list[str]] = {name: [] for name in case.names}
    for number, step in enumerate(steps):
        weights |= counted.get(number, {})
        floors = [case.floors[name] for name in case.names]
        units = shares_of([weights[name] for name in case.names], floors)  # rounded, as ties depend on it
        shares = [Fraction(share, UNIT) for share in units]
        for keys in step:
            name = case.names[plain_part(debt, shares, len(keys))]
            assert of_source(keys) == name
            rows = [next(sequences[name]) for _ in keys]
            assert case.bucketing is not None or keys == rows
            expected[name] += rows
            handed[name] += keys
        if number + 1 in case.block_ends():
            assert {name: sorted(keys) for name, keys in handed.items()} == {
                name: sorted(keys) for name, keys in expected.items()
            }


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.deep) for n in range(4, 64))]
)
def test_any_run_is_the_plain_count_on_every_layout_and_resumed(
    seed: int, data: Path, tmp_path: Path
) -> None:
    case = Case(seed)
    with case.loaders(data, tmp_path, case.ranks) as loaders:
        steps, states, counted = case.run(loaders)
    if case.groups == 1:
        check(case, steps, counted, in_order(case, data, tmp_path))
    for step in steps:
        names = [of_source(keys) for keys in step]
        assert case.sources == "rank" or len(set(names)) == 1
    flat_steps = [sorted(itertools.chain.from_iterable(step)) for step in steps]
    for cut, (ranks, workers) in zip(case.cuts, case.layouts, strict=False):
        with case.loaders(data, tmp_path, ranks, workers) as loaders:
            for loader in loaders:
                loader.load_state_dict(states[cut] if len(states[cut]) > 1 else states[cut][0])
            rest = [[batch["__key__"] for batch in batches] for batches in zip(*loaders, strict=True)]
        assert [sorted(itertools.chain.from_iterable(step)) for step in rest] == flat_steps[cut + 1 :]
        assert len({len(keys) for step in rest for keys in step}) == 1
        if ranks == case.ranks:
            assert rest == steps[cut + 1 :]


def plain_case(sources: str, ranks: int = 1, bucketing: Any = None) -> Case:
    """Two sources at 3 : 1, the smaller of which comes again and again."""
    case = Case(0)
    case.sources, case.ranks, case.groups, case.bucketing = sources, ranks, 1, bucketing
    case.names, case.changes = ["a", "b"], {}
    case.weights, case.floors = {"a": 3, "b": 1}, {"a": 0, "b": 0}
    return case


@pytest.mark.parametrize(("saved", "other"), [("step", "mixed"), ("mixed", "rank"), ("rank", "step")])
def test_a_state_of_other_batches_is_refused(saved: str, other: str, data: Path, tmp_path: Path) -> None:
    case = plain_case(saved)
    with case.loaders(data, tmp_path, 1) as loaders:
        _, states, _ = case.run(loaders, 3)
    with (
        case.loaders(data, tmp_path, 1, sources=other) as (loader,),
        pytest.raises(StateMismatch, match=rf"sources='{saved}'\), and this is '{other}'"),
    ):
        loader.load_state_dict(states[-1][0])


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_by_rank_other_ranks_continue_each_source(ranks: int, data: Path, tmp_path: Path) -> None:
    """Each rank's rows are of one source again, no sample is lost, and shares are as exact."""
    case = plain_case("rank", 4)
    with case.loaders(data, tmp_path, 4) as loaders:
        steps, states, _ = case.run(loaders)
    sequences = in_order(case, data, tmp_path)
    handed: dict[str, list[str]] = {"a": [], "b": []}
    with case.loaders(data, tmp_path, ranks) as loaders:
        for loader in loaders:
            loader.load_state_dict(states[6][0])
        rest = [[batch["__key__"] for batch in batches] for batches in zip(*loaders, strict=True)]
    assert rest != steps[7:]
    for keys in itertools.chain.from_iterable([*steps[:7], *rest]):
        handed[of_source(keys)] += keys
    for name, keys in handed.items():
        assert keys == [next(sequences[name]) for _ in keys]
    assert abs(len(handed["b"]) - STEPS * case.batch / 4) < case.batch // ranks


def test_by_rank_other_ranks_begin_between_two_blocks(data: Path, tmp_path: Path) -> None:
    case = plain_case("rank", 2, 32)
    with case.loaders(data, tmp_path, 2) as loaders:
        steps, states, _ = case.run(loaders)
    with case.loaders(data, tmp_path, 4) as loaders:
        with pytest.raises(StateMismatch, match=r"ends in 2 steps: .* as many ranks if sources='rank'"):
            loaders[0].load_state_dict(states[9][0])
        for loader in loaders:
            loader.load_state_dict(states[7][0])
        rest = [[batch["__key__"] for batch in batches] for batches in zip(*loaders, strict=True)]
    assert len(rest) == STEPS - 8
    assert all(of_source(keys) for step in rest for keys in step)
    with case.loaders(data, tmp_path, 2) as loaders:
        for loader in loaders:
            loader.load_state_dict(states[9][0])
        assert [[b["__key__"] for b in batches] for batches in zip(*loaders, strict=True)] == steps[10:]


@pytest.mark.parametrize("sources", ["step", "rank"])
def test_planned_batches_have_a_sample_once_and_rows_of_like_length(
    sources: str, data: Path, tmp_path: Path
) -> None:
    case, widths = plain_case(sources, 2, 64), {}
    for bucketing in (None, 64):
        with case.loaders(data, tmp_path, 2, bucketing=bucketing) as loaders:
            batches = list(zip(*loaders, strict=True))[8:]
        widths[bucketing] = sum(batch["text"].shape[1] for step in batches for batch in step)
        if bucketing is not None:
            shapes = [{batch["text"].shape for batch in step} for step in batches]
            assert all(len(of_step) == 1 for of_step in shapes)
            assert all(len(set(batch["__key__"])) == 4 for step in batches for batch in step)
    assert widths[64] < widths[None]


def test_decisions_are_replayed_with_the_same_batches_only(data: Path, tmp_path: Path) -> None:
    case, log = plain_case("step"), tmp_path / "decisions.jsonl"
    sources = [Source(str(data / name), case.weights[name], name) for name in case.names]

    def run(kind: str, mixing: Any, path: Path | None) -> list[list[str]]:
        with streamload.make_loader(
            sources,
            tokenize,
            batch_size=8,
            num_workers=0,
            seed=3,
            cache_dir=tmp_path / "cache",
            output="dict",
            batches=Batches(with_keys=True, sources=kind),
            order=Order(num_batches=12, mixing=mixing, decisions=path),
        ) as loader:
            return [batch["__key__"] for batch in loader]  # fmt: skip

    recorded = run("step", Schedule({4: {"b": 9}}, every=4), log)
    names = [of_source(keys) for keys in recorded]
    assert names[:8].count("b") == 2
    assert names[8:].count("b") == 3  # decided after step 4, by what was known at step 8
    assert run("step", Replay(log), None) == recorded
    with pytest.raises(DecisionsError, match="another sources_of: 'step', and this is None"):
        run("mixed", Replay(log), None)


def test_one_source_is_as_it_was(data: Path, tmp_path: Path) -> None:
    case = plain_case("step")
    case.names = ["a"]
    runs = []
    for kind in ("step", "mixed"):
        with case.loaders(data, tmp_path, 1, sources=kind) as loaders:
            steps, states, _ = case.run(loaders)
        runs.append((steps, states[-1][0]["checksum"]))
    assert runs[0] == runs[1]


def test_what_batches_of_one_source_cannot_be_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="sources='source'"):
        Batches(sources="source")  # type: ignore[arg-type]
    case = plain_case("rank", 2, 64)
    case.groups, case.batch = 3, 12
    with case.loaders(data, tmp_path, 2) as loaders, pytest.raises(OptionError, match="2 ranks and 3 groups"):
        next(iter(loaders[0]))
    texts = Source(str(data / "b"), 1, "b", modality="text")
    with pytest.raises(OptionError, match="leave out sources='rank'"):
        streamload.make_loader(
            [Source(str(data / "a"), 3, "a"), texts], tokenize, batch_size=8, output="dict",
            batches=Batches(sources="rank"), order=Order(num_batches=4),
        )  # fmt: skip
