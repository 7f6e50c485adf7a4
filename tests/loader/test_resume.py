"""Going on from a state: exact at every step, on other layouts, in an empty cache, over epochs' ends."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Workers
from streamload.testing.resume import Layout, assert_resumes_exactly
from streamload.testing.shards import write_shards
from tests.support import flat
from tests.support.drawn import augmented


class Case:
    """A data set and options, drawn at random."""

    def __init__(self, number: int, directory: Path):
        rng = random.Random(number)
        shards = rng.randint(2, 9)
        counts = [rng.choice([0, 1, 3, 8, 14, 20]) for _ in range(shards)] + [16]
        self.paths = [str(path) for path in write_shards(directory / "data", counts, seed=number)]
        samples = sum(counts)
        self.global_batch = rng.choice([4, 6, 12])
        self.epochs = 2
        self.options: dict[str, Any] = {
            "seed": number,
            "shuffle": rng.choice([0, 1, 5, 30, 100]),
            "lanes": rng.choice([1, 2, 3, 5]),
        }
        kind = rng.choice(["pass", "short", "long", "groups", "sources"])
        if kind == "short":
            self.options["num_samples"] = max(self.global_batch, samples // 3)
        elif kind == "long":
            self.options["num_batches"] = samples // self.global_batch + 3
            self.epochs = 1
        elif kind == "groups":
            self.options |= {"groups": rng.choice([2, 3]), "num_samples": max(self.global_batch, samples)}
        elif kind == "sources":
            cut = rng.randint(1, len(self.paths) - 1)
            parts = [self.paths[:cut], self.paths[cut:]] if any(counts[:cut]) else [self.paths]
            self.sources = [
                streamload.Source(part, weight=rng.randint(1, 4), name=f"part {place}")
                for place, part in enumerate(parts)
            ]
            self.options["num_samples"] = 2 * samples
            self.epochs = 1
        self.urls: Any = self.sources if kind == "sources" else self.paths
        self.first = Layout(rng.choice([1, 2]), 0)
        others = [ranks for ranks in (1, 2, 3, 4) if self.global_batch % ranks == 0]
        self.layouts = [Layout(rng.choice(others), 0) for _ in range(5)]

    def make(self, **layout: Any) -> streamload.Loader:
        # The same global batches on every layout: batch_size is that of a rank.
        sizes = {"num_batches", "num_samples"} & self.options.keys()
        assert len(sizes) <= 1
        return flat.make_loader(
            self.urls,
            workers=Workers(map_sample=augmented),
            with_keys=True,
            cache_size="1GB",
            **self.options,
            **layout,
        )


# Passes, short and long epochs, groups and sources; one rank and two before the cut.
SOME = {1, 10, 17, 30, 33, 37}


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.deep] * (number not in SOME)) for number in range(40)]
)
@pytest.mark.sampled(2)
def test_a_run_can_be_cut_at_every_step_and_taken_up_by_any_layout(number: int, tmp_path: Path) -> None:
    case = Case(number, tmp_path)
    made = assert_resumes_exactly(
        case.make,
        tmp_path,
        global_batch=case.global_batch,
        first=case.first,
        layouts=case.layouts,
        epochs=case.epochs,
        most_steps=3,
    )
    assert made > 0
