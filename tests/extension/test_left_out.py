"""Samples that extensions leave out, counted in random trainings: compared with the oracle of the order."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from streamload.extension import (
    BatchRows,
    Entry,
    Extension,
    RankPart,
    Run,
    WorkerPart,
    WorkerProcess,
)
from streamload.loader.loader import Loader
from streamload.testing.shards import write_shards
from tests.support import flat
from tests.support.order_oracle import Case, left_out_before


def share_of(key: str, salt: str) -> float:
    return xxhash.xxh3_64_intdigest(f"{salt} {key}".encode()) / 2**64


@dataclass(frozen=True)
class KeepUser:
    """The user's keep=."""

    share: float

    def __call__(self, entry: Entry) -> bool:
        return share_of(entry.key, "keep") >= self.share


class TellInWorker(WorkerPart):
    def finish(self, values: dict[str, Any], rows: BatchRows) -> bytes:
        return json.dumps(rows.left_out).encode()


class TellInRank(RankPart):
    def yielded(self, part: bytes, values: dict[str, Any]) -> dict[str, Any]:
        self.of_pass = Counter(json.loads(part))
        return {}


@dataclass(frozen=True)
class Leaving(Extension):
    """Leaves out a share of the samples, and all of some shards."""

    name: str
    share: float

    def keep(self, entry: Entry) -> bool:
        of_shard = share_of(entry.key[:5], self.name)
        return of_shard >= 0.2 and share_of(entry.key, self.name) >= self.share

    def in_worker(self, process: WorkerProcess) -> WorkerPart:
        return TellInWorker()

    def in_rank(self, run: Run) -> RankPart:
        return TellInRank()


@dataclass
class Training:
    """A random training: shards, what is left out of them, options and layouts."""

    number: int
    folder: Path
    known: dict[int, list[list[tuple[Counter, Counter]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.number)
        unused, used = 3, 0
        while unused > 2 or used < 12:  # after three shards without a used sample a training ends
            one, two = Leaving("one", rng.choice([0.1, 0.5])), Leaving("two", rng.choice([0.0, 0.4, 0.8]))
            self.user, self.leaving = KeepUser(rng.choice([0.0, 0.3])), [one, two]
            self.samples = [rng.choice([0, 1, rng.randint(2, 40)]) for _ in range(rng.randint(1, 7))]
            self.samples += [40, 40]
            left_out = map(len, self.left_out())
            counts = [count - left for count, left in zip(self.samples, left_out, strict=True)]
            unused, used = counts.count(0), sum(counts)
        write_shards(self.folder / "shards", self.samples, seed=self.number)
        self.groups = rng.choice([1, 1, 2, 3])
        self.options = {"shuffle": rng.choice([0, 1, 9, 200]), "lanes": rng.choice([1, 2, 8])}
        if self.groups > 1 or rng.random() < 0.4:
            self.options["num_batches"] = rng.randint(2, 6)

    def layout(self) -> tuple[int, int]:
        """Ranks and workers."""
        return self.rng.choice([1, 2, 3]), self.rng.choice([0, 0, 1, 2])

    @contextlib.contextmanager
    def ranks(self, layout: tuple[int, int], states: Sequence[Any] = ()) -> Iterator[list[Loader]]:
        count, workers = layout
        with contextlib.ExitStack() as stack:
            loaders = [
                flat.make_loader(
                    str(self.folder / "shards"),
                    batch_size=6 // count,
                    num_workers=workers,
                    seed=self.number,
                    rank=rank,
                    world_size=count,
                    groups=self.groups,
                    cache_dir=self.folder / "cache",
                    preprocess=size_of,
                    output="dict",
                    keep=self.user if self.user.share else None,
                    extensions=self.leaving,
                    **self.options,
                )
                for rank in range(count)
            ]
            for loader in loaders:
                stack.enter_context(loader)
                if states:
                    loader.load_state_dict(states)
            yield loaders

    def left_out(self) -> list[dict[int, str]]:
        """Of each shard the entries that are left out, and by what."""
        keys = [[f"{shard:05d}{n:06d}" for n in range(count)] for shard, count in enumerate(self.samples)]
        return [
            {n: cause for n, key in enumerate(of_shard) if (cause := self.cause(key)) is not None}
            for of_shard in keys
        ]

    def cause(self, key: str) -> str | None:
        entry: Any = SimpleNamespace(key=key)
        if self.user.share and not self.user(entry):
            return "keep"
        return next((each.name for each in self.leaving if not each.keep(entry)), None)

    def read_order(self, loader: Loader) -> None:
        """Read the order of the run, once it is settled."""
        (self.order,) = loader._run.schedule.source_orders()

    def counts(self, sequence: int) -> list[list[tuple[Counter, Counter]]]:
        """Of each group what is left out at each position of an epoch's sequence; in all as the last."""
        if sequence not in self.known:
            order, causes = self.order, self.left_out()
            entries = [[*range(count)] for count in self.samples]
            hints = None if order.hints is None else order.hints.tolist()
            case = Case(
                order.seed, entries, order.groups, order.lanes, order.window,
                sequence, order.shuffle_shards, hints, order.opens_slowly,
            )  # fmt: skip
            passes = 60 if "num_batches" in self.options else 1
            self.known[sequence] = [
                left_out_before(case, group, causes, passes) for group in range(order.groups)
            ]
        return self.known[sequence]

    def at(self, state: dict[str, Any]) -> list[tuple[Counter, Counter]]:
        """Of each group what was left out of the passes before a state's, and of its pass."""
        counts, position = self.counts(state["sequence"]), state["position"]
        return [of[-((group - position) // len(counts))] for group, of in enumerate(counts)]

    def expected(self, state: dict[str, Any]) -> Counter:
        """What was left out before a state."""
        ended = [of_group[-1] for sequence in range(state["sequence"]) for of_group in self.counts(sequence)]
        return sum((part for pair in [*ended, *self.at(state)] for part in pair), Counter())


def size_of(image: Any) -> Any:
    import torch

    return torch.tensor([float(image.size[0])])


def counted(loaders: Sequence[Loader]) -> Counter:
    total: Counter = Counter()
    for loader in loaders:
        total.update(loader.stats().samples_left_out)
    return +total


def steps(loaders: Sequence[Loader]) -> Iterator[bool]:
    """Take a step on all ranks; True if there was one."""
    batches = [iter(loader) for loader in loaders]
    while None not in [next(rank, None) for rank in batches]:
        yield True
    yield False


CASES = [*range(8), *(pytest.param(number, marks=pytest.mark.deep) for number in range(8, 60))]


@pytest.mark.parametrize("number", CASES)
def test_counts_are_those_of_the_oracle_at_each_step_of_any_layout_and_after_any_resume(number, tmp_path):
    training = Training(number, tmp_path)
    seen = []
    with training.ranks(training.layout()) as loaders:
        for epoch in range(2):
            for is_step in steps(loaders):
                training.read_order(loaders[0])
                seen.append(json.loads(json.dumps([loader.state_dict() for loader in loaders])))
                state = seen[-1][0]
                assert counted(loaders) == training.expected(state), (epoch, state["position"])
                if is_step and state["epoch"] == epoch:
                    of_pass = [loader._run.parts.by_name["one"].of_pass for loader in loaders]
                    assert +sum(of_pass, Counter()) == sum(
                        (pair[1] for pair in training.at(state)), Counter()
                    )
    assert sum(training.expected(seen[-1][0]).values()) > 0
    for states in training.rng.sample(seen, min(4, len(seen))):
        with training.ranks(training.layout(), states) as loaders:
            assert counted(loaders) == training.expected(states[0])
            for _ in steps(loaders):
                assert counted(loaders) == training.expected(loaders[0].state_dict())
