"""Limits that are planted in real runs are named by the verdict: the user's slow function, the slow shard.

How it shows that it works: twenty runs of each are drawn at random, in which one thing alone is slow. In
nineteen the verdict names it, or says that it can't tell ("unclear", as where it slows a few batches alone).
"""

from __future__ import annotations

import functools
import random
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import streamload
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat

PLANTS = 20
FEWEST_NAMED, FEWEST_NOT_WRONG = 15, 19

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]
_BLOCK = bytes(range(256)) * 64


class Work(NamedTuple):
    """What takes the time of a slow function.

    Attributes:
        seconds: of each call.
        sleeps: waits instead of computing.
    """

    seconds: float
    sleeps: bool

    def do(self) -> None:
        """Take the time."""
        if self.sleeps:
            time.sleep(self.seconds)
            return
        began = time.thread_time()
        while time.thread_time() - began < self.seconds:
            zlib.compress(_BLOCK, 9)


def make(urls: Any, cache: Path, **options: Any) -> streamload.Loader:
    return flat.make_loader(
        urls,
        cache_dir=cache,
        cache_size="1GB",
        multiprocessing_context="fork" if options["num_workers"] else None,
        **options,
    )


def verdict_of(loader: streamload.Loader, step_seconds: float) -> streamload.observe.verdict.Verdict:
    for _ in loader:
        time.sleep(step_seconds)
    return loader.verdict(600)


def slow_preprocess(work: Work, image: Any) -> torch.Tensor:
    work.do()
    return torch.zeros(3, 2, 2)


def slow_sample(work: Work, sample: dict[str, Any]) -> dict[str, Any]:
    work.do()
    return {"number": 1}


def plain_sample(sample: dict[str, Any]) -> dict[str, Any]:
    return {"number": 1}


def slow_batch(work: Work, samples: list[Any]) -> dict[str, Any]:
    work.do()
    return {"number": torch.ones(len(samples))}


def slow_tokenizer(work: Work, captions: list[str]) -> torch.Tensor:
    work.do()
    return torch.zeros(len(captions), 8, dtype=torch.int64)


class SlowFunction(NamedTuple):
    """A run in which one of the user's functions takes most of the time.

    Attributes:
        argument: of make_loader that gets the function.
        batch_work: in its calls for one batch.
        step_share: a step of the training, as a share of the time in which the workers make a batch.
    """

    argument: str
    batch_work: Work
    step_share: float
    workers: int
    batch_size: int
    batches: int

    @classmethod
    def drawn(cls, rng: random.Random) -> SlowFunction:
        """A run by chance, of about three seconds."""
        workers, seconds = rng.choice([0, 1, 2]), rng.choice([0.03, 0.1, 0.3])
        return cls(
            argument=rng.choice(["preprocess=", "map_sample=", "collate=", "tokenizer="]),
            batch_work=Work(seconds, sleeps=rng.random() < 0.5),
            step_share=rng.choice([0.0, 0.2, 0.5]),
            workers=workers,
            batch_size=rng.choice([2, 8, 24]),
            batches=round(3 * max(1, workers) / seconds),
        )

    def options(self) -> dict[str, Any]:
        """What make_loader gets."""
        each = self.batch_work._replace(seconds=self.batch_work.seconds / self.batch_size)
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "preprocess=": lambda: {"preprocess": functools.partial(slow_preprocess, each)},
            "map_sample=": lambda: {"map_sample": functools.partial(slow_sample, each)},
            "collate=": lambda: {
                "map_sample": plain_sample,
                "collate": functools.partial(slow_batch, self.batch_work),
            },
            "tokenizer=": lambda: {"tokenizer": functools.partial(slow_tokenizer, self.batch_work)},
        }
        return makers[self.argument]()

    def named(self, urls: str, place: Path) -> tuple[str, str]:
        """What the verdict names, and all that it says."""
        options = {**self.options(), "num_workers": self.workers, "batch_size": self.batch_size}
        with make(urls, place, num_batches=self.batches, **options) as loader:
            step_seconds = self.step_share * self.batch_work.seconds / max(1, self.workers)
            verdict = verdict_of(loader, step_seconds)
        is_right = verdict.limit == "CPU" and f"in your {self.argument}" in verdict.evidence
        return "right" if is_right else "unclear" if verdict.limit == "unclear" else "wrong", str(verdict)


class SlowShard(NamedTuple):
    """A run in which one shard comes slowly.

    Attributes:
        shards: how many there are.
        slow: the number of the one that is slow.
        seconds: about how long it takes.
        retries: it is refused so often, and comes fast then; 0: it comes slowly.
        step_seconds: of the training.
    """

    shards: int
    samples: int
    slow: int
    seconds: float
    retries: int
    shuffle: int
    step_seconds: float
    workers: int
    batch_size: int

    @classmethod
    def drawn(cls, rng: random.Random) -> SlowShard:
        """A run by chance, of some seconds."""
        shards = rng.randint(3, 12)
        return cls(
            shards=shards,
            samples=rng.choice([10, 40]),
            slow=rng.randrange(shards),
            seconds=rng.uniform(3, 6),
            retries=rng.choice([0, 0, 0, 4]),
            shuffle=rng.choice([0, 0, 20, 200]),
            step_seconds=rng.choice([0.0, 0.01]),
            workers=rng.choice([0, 1, 2]),
            batch_size=rng.choice([2, 8]),
        )

    def named(self, place: Path) -> tuple[str, str]:
        """What the verdict names, and all that it says."""
        paths = write_shards(
            place / "data", [self.samples] * self.shards, options=ShardOptions(padding_bytes=(2000, 4000))
        )
        slow = paths[self.slow]
        fault = Fault(bytes_per_second=slow.stat().st_size / self.seconds)
        with ShardServer(place / "data") as server:
            server.misbehave(
                slow.name, *([Fault(first=self.retries, status=503)] if self.retries else [fault])
            )
            urls = f"{server.url}/{{00000..{self.shards - 1:05d}}}.tar"
            options = {"num_workers": self.workers, "batch_size": self.batch_size, "shuffle": self.shuffle}
            with make(urls, place / "cache", **options) as loader:
                verdict = verdict_of(loader, self.step_seconds)
        is_right = f"of the wait was for {slow.name}" in verdict.evidence
        return "right" if is_right else "unclear" if verdict.limit == "unclear" else "wrong", str(verdict)


def judge(outcomes: dict[str, tuple[str, str]]) -> None:
    """Check that enough are right, and none but one wrong; the message says which weren't right."""
    hows = [how for how, _ in outcomes.values()]
    others = [f"{how}: {plant}: {said}" for plant, (how, said) in outcomes.items() if how != "right"]
    assert len(outcomes) == PLANTS
    assert hows.count("right") >= FEWEST_NAMED, "\n".join(others)
    assert PLANTS - hows.count("wrong") >= FEWEST_NOT_WRONG, "\n".join(others)


def test_a_slow_function_of_twenty_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [100] * 4, seed=3)
    urls, rng = f"{tmp_path}/data/{{00000..00003}}.tar", random.Random(5)
    plants = [SlowFunction.drawn(rng) for _ in range(PLANTS)]
    judge({f"{number} {plant}": plant.named(urls, tmp_path / "cache") for number, plant in enumerate(plants)})


def test_a_slow_shard_of_twenty_is_named(tmp_path: Path) -> None:
    rng = random.Random(5)
    plants = [SlowShard.drawn(rng) for _ in range(PLANTS)]
    judge({f"{number} {plant}": plant.named(tmp_path / str(number)) for number, plant in enumerate(plants)})
