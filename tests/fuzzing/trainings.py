"""Random trainings and evaluations: layouts, sources, lengths and resumes, held to what an order promises.

Each is read on two layouts of workers and ranks, and taken up in the middle on a third one: global batches
are the same, and every sample comes once in a pass.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import streamload
from streamload import Shards, Workers
from streamload.testing.server import ShardServer
from tests.support import flat


@dataclass(frozen=True)
class Layout:
    """Ranks, and the workers of each."""

    ranks: int
    workers: int


@dataclass(frozen=True)
class Case:
    """A data set and what is asked of it.

    Attributes:
        sources: of each the samples of its shards.
        weights: of the sources.
        options: of make_loader, but for those that depend on the layout.
        batch: samples of a global batch.
        layouts: two to read on, and one to go on with.
        epochs: how many are read.
        stop_at: after how many steps of the second layout a state is taken, modulo all of them.
        over_http: served, not local.
    """

    sources: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]
    options: dict[str, Any] = field(hash=False)
    batch: int
    layouts: tuple[Layout, Layout, Layout]
    epochs: int
    stop_at: int
    over_http: bool


def make(rng: random.Random) -> Case:
    """A case by chance."""
    train = rng.random() < 0.8
    sources = tuple(
        tuple(rng.choice([0, 1, 3, rng.randint(1, 12), rng.randint(5, 40)]) for _ in range(rng.randint(1, 9)))
        for _ in range(rng.choice([1, 1, 1, 2, 3]) if train else 1)
    )
    if not all(map(sum, sources)):
        sources = tuple((*counts, 4) for counts in sources)
    total = sum(map(len, _usable(sources)))
    batch = rng.choice([6, 12])  # shared by 1, 2, 3 or 6 ranks
    options: dict[str, Any] = {"train": train, "seed": rng.randint(0, 99)}
    if train:
        options["shuffle"] = rng.choice([0, 1, rng.randint(2, 30), rng.randint(30, 500), None])
        options["lanes"] = rng.choice([1, 2, rng.randint(1, 12), None])
        length = rng.choice(["pass", "num_samples", "num_batches", "num_samples"])
        if len(sources) > 1 or total < batch or length == "num_samples":
            options["num_samples"] = batch * rng.randint(1, 1 + 2 * total // batch)
    ranks = [1, 2, 3, 6] if train else [1]
    layouts = tuple(Layout(rng.choice(ranks), rng.choice([0, 0, 0, 0, 1, 2])) for _ in range(3))
    return Case(
        sources=sources,
        weights=tuple(rng.choice([1.0, 2.0, 0.5]) for _ in sources),
        options=options,
        batch=batch,
        layouts=(layouts[0], layouts[1], layouts[2]),
        epochs=rng.randint(1, 3),
        stop_at=rng.randint(0, 60),
        over_http=rng.random() < 0.3,
    )


def check(case: Case, rng: random.Random) -> str:
    """Read it in all ways, and compare."""
    with tempfile.TemporaryDirectory() as place, _served(case, Path(place)) as urls:
        run = _Run(case, urls, Path(place))
        first = run.read(case.layouts[0], "a")
        second, states = run.read_to(case.layouts[1], "b", case.stop_at)
        whole, taken = _flat(first), _flat(second)
        assert taken == whole[: len(taken)], "another layout gives other batches"
        epochs = case.epochs - len(second) + 2  # what is left of an epoch may be nothing
        rest = _flat(run.read(case.layouts[2], "c", states, epochs))
        assert rest[: len(whole) - len(taken)] == whole[len(taken) :], "resumed, it differs"
    _check_samples(case, first)
    return "mixed" if len(case.sources) > 1 else "sized" if "num_samples" in case.options else "passes"


Epochs = list[list[list[str]]]
"""Of each epoch the global batches, of each the keys."""


def _flat(epochs: Epochs) -> list[list[str]]:
    return [batch for epoch in epochs for batch in epoch]


class _Run:
    def __init__(self, case: Case, urls: list[list[str]], place: Path):
        self._case, self._urls, self._place = case, urls, place

    def _loader(self, layout: Layout, rank: int, cache: str) -> streamload.Loader:
        case = self._case
        urls: Any = self._urls[0]
        if len(self._urls) > 1:
            urls = [streamload.Source(own, w) for own, w in zip(self._urls, case.weights, strict=True)]
        ranks = {"rank": rank, "world_size": layout.ranks} if case.options["train"] else {}
        return flat.make_loader(
            urls,
            workers=Workers(map_sample=_nothing, multiprocessing_context="fork" if layout.workers else None),
            shards=Shards(keep=_is_kept),
            with_keys=True,
            batch_size=case.batch // layout.ranks,
            num_workers=layout.workers,
            cache_dir=self._place / cache,
            cache_size="50MB",
            **ranks,
            **case.options,
        )

    def read(
        self, layout: Layout, cache: str, states: Sequence[Any] | None = None, epochs: int | None = None
    ) -> Epochs:
        """All epochs from the beginning, or from a state on."""
        by_rank = []
        for rank in range(layout.ranks):
            with self._loader(layout, rank, cache) as loader:
                if states is not None:
                    loader.load_state_dict(states)
                by_rank.append(
                    [[batch["__key__"] for batch in loader] for _ in range(epochs or self._case.epochs)]
                )
        return _joined(by_rank)

    def read_to(self, layout: Layout, cache: str, stop_at: int) -> tuple[Epochs, list[Any]]:
        """The epochs up to a step, of which the last may be cut, and the states of all ranks there."""
        by_rank, states = [], []
        for rank in range(layout.ranks):
            with self._loader(layout, rank, cache) as loader:
                taken: list[list[list[str]]] = []
                left = stop_at
                for _ in range(self._case.epochs):
                    taken.append([])
                    for batch in itertools.islice(loader, left):
                        taken[-1].append(batch["__key__"])
                    left -= len(taken[-1])
                    if left <= 0:
                        break
                states.append(loader.state_dict())
            by_rank.append(taken)
        return _joined(by_rank), states


def _joined(by_rank: list[list[list[list[str]]]]) -> Epochs:
    """The ranks' batches as global ones: the ranks of a step have one each."""
    for epochs in by_rank:
        lengths = [len(epoch) for epoch in epochs]
        assert lengths == [len(epoch) for epoch in by_rank[0]], "ranks have unequal numbers of batches"
    return [
        [[key for keys in step for key in keys] for step in zip(*epochs, strict=True)]
        for epochs in zip(*by_rank, strict=True)
    ]


def _check_samples(case: Case, epochs: Epochs) -> None:
    """Every usable sample comes once in a pass, and no other."""
    usable = _usable(case.sources)
    total = sum(map(len, usable))
    if not case.options["train"]:
        assert all([key for batch in epoch for key in batch] == usable[0] for epoch in epochs), (
            "an evaluation isn't each sample once, as listed"
        )
        return
    if "num_samples" not in case.options:
        for epoch in epochs:
            keys = [key for batch in epoch for key in batch]
            assert len(keys) == len(set(keys)) == total // case.batch * case.batch, "a pass isn't each once"
            assert set(keys) <= set(usable[0])
        return
    sequence = [key for epoch in epochs for batch in epoch for key in batch]
    for own in usable:
        mine = [key for key in sequence if key in set(own)]
        for start in range(0, len(mine), len(own)):
            some = mine[start : start + len(own)]
            assert len(set(some)) == len(some), "a sample comes twice before all have come once"
    assert set(sequence) <= {key for own in usable for key in own}
    assert not Counter(map(len, itertools.chain.from_iterable(epochs))).keys() - {case.batch}


@contextlib.contextmanager
def _served(case: Case, place: Path) -> Iterator[list[list[str]]]:
    paths = []
    for source, counts in enumerate(case.sources):
        folder = place / f"source{source}"
        folder.mkdir()
        keys = iter(_keys(source, counts))
        paths.append(
            [_write(folder / f"{n:02d}.tar", itertools.islice(keys, c)) for n, c in enumerate(counts)]
        )
    if not case.over_http:
        yield [[str(path) for path in own] for own in paths]
        return
    with ShardServer(place) as server:
        yield [[f"{server.url}/{path.relative_to(place)}" for path in own] for own in paths]


def _keys(source: int, counts: Sequence[int]) -> list[str]:
    return [
        f"{source}-{shard:02d}-{number:03d}" for shard, count in enumerate(counts) for number in range(count)
    ]


def _usable(sources: Sequence[Sequence[int]]) -> list[list[str]]:
    return [[key for key in _keys(source, counts) if _kept(key)] for source, counts in enumerate(sources)]


def _write(path: Path, keys: Iterator[str]) -> Path:
    with tarfile.open(path, "w") as tar:
        for key in keys:
            member = tarfile.TarInfo(f"{key}.txt")
            member.size = len(key)
            tar.addfile(member, io.BytesIO(key.encode()))
    return path


def _kept(key: str) -> bool:
    """Nine of ten samples, but all of the small shards."""
    return zlib.crc32(key.encode()) % 10 != 0 or key.endswith(("000", "001", "002", "003"))


def _is_kept(entry: Any) -> bool:
    return _kept(entry.key)


def _nothing(sample: dict[str, Any]) -> dict[str, Any]:
    assert sample["txt"].decode() == sample["__key__"]
    return {}
