"""Generators that belong to a transform give a sample the same draws on every layout, and after a resume."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import streamload
from streamload import Batches, Workers
from streamload.testing.shards import write_shards

COUNT = 24
Draw = Callable[[], float]
GLOBAL = np.random.default_rng(7)


class Drawing:
    """A transform with a draw in an attribute, as in a chain of steps."""

    def __init__(self, draw: Draw) -> None:
        self.steps = [{"draw": draw}]

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.tensor([self.steps[0]["draw"]()], dtype=torch.float64)


class Composed:
    """Albumentations' Compose: each transform has two generators, all of them made by one seed."""

    class Step:
        def __init__(self) -> None:
            self.random_generator = np.random.default_rng()
            self.py_random = random.Random()

    def __init__(self) -> None:
        self.py_random = random.Random()
        self.transforms = [self.Step(), self.Step()]

    def __call__(self) -> float:
        draws = [step.random_generator.random() + step.py_random.random() for step in self.transforms]
        return sum(draws) + self.py_random.random()


class OfClass:
    rng = np.random.default_rng(1)

    def __call__(self) -> float:
        return float(self.rng.random())


class Slotted:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def draw(self) -> float:
        return self.rng.random()


def in_closure() -> Draw:
    rng = np.random.RandomState(3)
    return lambda: float(rng.rand())


def of_torch() -> Draw:
    generator = torch.Generator().manual_seed(5)
    return lambda: float(torch.rand(1, generator=generator, dtype=torch.float64))


def of_global() -> float:
    return float(GLOBAL.random())


KINDS: dict[str, Callable[[], Draw]] = {
    "default_rng": lambda: functools.partial(np.random.default_rng(1).uniform, 0, 1),
    "another bit generator": lambda: np.random.Generator(np.random.Philox(1)).random,
    "RandomState": in_closure,
    "random.Random": lambda: random.Random(3).random,
    "torch.Generator": of_torch,
    "a global": lambda: of_global,
    "a global in a comprehension": lambda: lambda: sum([float(GLOBAL.random()) for _ in range(2)]),
    "a class attribute": OfClass,
    "a slot": lambda: Slotted().draw,
    "Albumentations": Composed,
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder, [COUNT])
    return folder


def loader_of(shards: Path, cache: Path, num_workers: int, **options: Any) -> streamload.Loader:
    options.setdefault("batches", Batches(with_keys=True))
    return streamload.make_loader(
        str(shards), batch_size=3, num_workers=num_workers, cache_dir=cache, seed=2, shuffle=4, **options
    )


def draws_of(loader: streamload.Loader, batches: int | None = None) -> dict[str, float]:
    """The draw of each sample, of some batches or all."""
    draws: dict[str, float] = {}
    for count, batch in enumerate(loader, 1):
        draws |= zip(batch[-1]["__key__"], batch[0].flatten().tolist(), strict=True)
        if count == batches:
            break
    return draws


def of_layouts(shards: Path, cache: Path, options: Callable[[], dict[str, Any]]) -> list[dict[str, float]]:
    """The draws on 0, 2 and 3 workers, each in the first epoch and in the same one again."""
    draws = []
    for num_workers in (0, 2, 3):
        with loader_of(shards, cache, num_workers, **options()) as loader:
            draws.append(draws_of(loader))
            loader.set_epoch(0)
            draws.append(draws_of(loader))
    return draws


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_draws_the_same_on_every_layout(
    kind: str, shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, *others = of_layouts(shards, tmp_path, lambda: {"preprocess": Drawing(KINDS[kind]())})
    assert len(set(first.values())) == COUNT
    for other in others:
        assert other == first
    assert "two results" not in caplog.text


def test_an_epoch_and_a_seed_of_their_own_give_other_draws(shards: Path, tmp_path: Path) -> None:
    with loader_of(shards, tmp_path, 0, preprocess=Drawing(of_torch())) as loader:
        first, second = draws_of(loader), draws_of(loader)
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())


def test_a_resumed_training_draws_on(shards: Path, tmp_path: Path) -> None:
    with loader_of(shards, tmp_path, 2, preprocess=Drawing(Composed())) as loader:
        whole = draws_of(loader)
    with loader_of(shards, tmp_path, 2, preprocess=Drawing(Composed())) as loader:
        before = draws_of(loader, 3)
        state = loader.state_dict()
    with loader_of(shards, tmp_path, 3, preprocess=Drawing(Composed())) as loader:
        loader.load_state_dict(state)
        assert {**before, **draws_of(loader)} == whole


class Mapped:
    """Both functions of samples in one, with one generator."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def sample(self, raw: dict[str, Any]) -> dict[str, Any]:
        return {"draw": self.rng.random(), "__key__": raw["__key__"]}

    def collate(self, rows: list[Any]) -> tuple[Any, ...]:
        draws = [row["draw"] + self.rng.random() for row in rows]
        return torch.tensor(draws), {"__key__": [row["__key__"] for row in rows]}


def options_of_mapped() -> dict[str, Any]:
    mapped = Mapped()
    workers = Workers(map_sample=mapped.sample, collate=mapped.collate)
    return {"workers": workers, "batches": Batches()}


def test_map_sample_and_collate_draw_the_same_on_every_layout(shards: Path, tmp_path: Path) -> None:
    first, *others = of_layouts(shards, tmp_path, options_of_mapped)
    assert len(set(first.values())) == COUNT
    for other in others:
        assert other == first


def test_generators_of_the_rank_go_on_where_they_were(shards: Path, tmp_path: Path) -> None:
    generators = np.random.default_rng(1), random.Random(1), np.random.RandomState(1), torch.Generator()
    before = [str(generators[0].bit_generator.state), generators[1].getstate(), generators[3].get_state()]

    def preprocess(image: Any) -> torch.Tensor:
        numpy, python, legacy, of_torch = generators
        draw = numpy.random() + python.random() + legacy.rand() + torch.rand(1, generator=of_torch).item()
        return torch.tensor([draw])

    with loader_of(shards, tmp_path, 0, preprocess=preprocess) as loader:
        drawn = draws_of(loader)
    assert len(set(drawn.values())) == COUNT
    after = [str(generators[0].bit_generator.state), generators[1].getstate(), generators[3].get_state()]
    assert after[:2] == before[:2]
    assert torch.equal(after[2], before[2])
    assert generators[2].rand() == np.random.RandomState(1).rand()


class Fresh:
    """Makes a generator in each call, which nothing can seed, and counts its calls."""

    calls = 0

    def __call__(self, image: Any) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([np.random.default_rng().random()])


def test_draws_that_no_seed_decides_are_named_once_and_the_transform_sees_no_other_call(
    shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = Fresh()
    with caplog.at_level(logging.WARNING), loader_of(shards, tmp_path, 0, preprocess=fresh) as loader:
        draws_of(loader)
        draws_of(loader)
    [text] = [record.getMessage() for record in caplog.records if "two results" in record.getMessage()]
    assert text.startswith("preprocess=<tests.loader.test_own_generators.Fresh object")
    assert fresh.calls == 2 * COUNT


class FreshSample:
    def __call__(self, raw: dict[str, Any]) -> dict[str, Any]:
        return {"draw": np.random.default_rng().random()}


def test_draws_of_map_sample_that_no_seed_decides_are_named_by_one_worker(
    shards: Path, tmp_path: Path
) -> None:
    said = logging.FileHandler(tmp_path / "log")
    logging.getLogger("streamload").addHandler(said)
    workers = Workers(map_sample=FreshSample())
    try:
        with loader_of(shards, tmp_path / "cache", 3, workers=workers, batches=Batches()) as loader:
            for _ in loader:
                pass
    finally:
        logging.getLogger("streamload").removeHandler(said)
        said.close()
    assert (tmp_path / "log").read_text().count(
        "map_sample=<tests.loader.test_own_generators.FreshSample"
    ) == 1


def test_a_copy_of_what_a_global_has_is_not_taken_for_other_draws(
    shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class AsGlobal:
        def __init__(self) -> None:
            self.rng, self.other = GLOBAL, random.Random(1)

        def __call__(self, image: Any) -> torch.Tensor:
            return torch.tensor([self.rng.random() + self.other.random()])

    with loader_of(shards, tmp_path, 0, preprocess=AsGlobal()) as loader:
        assert len(set(draws_of(loader).values())) == COUNT
    assert "two results" not in caplog.text
