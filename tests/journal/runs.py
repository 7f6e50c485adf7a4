"""Runs with a journal of many kinds, recorded batch by batch, and their steps made again from it."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import random
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import streamload
from streamload import Source
from streamload.batching import Measured, SizeDecided
from streamload.errors import DatasetChanged, JournalError, StateMismatch
from streamload.journal.history import RunHistory
from streamload.loader.past import MakeLoaders, steps_from
from streamload.loader.registered import by_rank, extensions_of
from streamload.shards.samples import Entry
from streamload.steering import Decided, Summary
from streamload.testing.resume import samples_of
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.support import flat

BATCH = 12
"""Samples of a step over all ranks, until another size is set."""
SIZES = (6, 12, 18, 24)
REFUSALS = (JournalError, StateMismatch, DatasetChanged)

Rows = list[tuple[str, ...]]
"""The key, the URL and a digest of the values of each row of a batch."""


def small(image: Image.Image) -> torch.Tensor:
    """A random transform."""
    levels = np.array(image.resize((4, 4)), dtype=np.float32)
    return torch.from_numpy(levels / 255).permute(2, 0, 1) + torch.rand(3, 1, 1)


def still(image: Image.Image) -> torch.Tensor:
    """A transform without chance."""
    return torch.from_numpy(np.array(image.resize((4, 4)), dtype=np.float32) / 255).permute(2, 0, 1)


def spelled(captions: list[str]) -> torch.Tensor:
    """A tokenizer whose ids are of many lengths."""
    lengths = [4 + zlib.crc32(caption.encode()) % 16 for caption in captions]
    return torch.tensor(
        [
            [1 + ord(char) for char in caption[:length].ljust(20, "\0")]
            for caption, length in zip(captions, lengths, strict=True)
        ]
    )


spelled.pad_token_id = 1  # type: ignore[attr-defined]


def drawn(sample: dict[str, Any]) -> dict[str, Any]:
    """A `map_sample` with a random number."""
    return {"drawn": torch.rand(2), "bytes": len(sample["jpg"])}


def length_of(entry: Entry) -> float:
    """A cost, by the key alone."""
    return 1 + zlib.crc32(entry.key.encode()) % 97


def area_of(entry: Entry) -> float:
    """Another cost."""
    return entry.width * entry.height / 4


def rate_of(entry: Entry) -> float:
    """How often a sample is used in a pass."""
    return (0.3, 1.0, 2.5, 0.0)[zlib.crc32(entry.key.encode()) % 4]


def is_kept(entry: Entry) -> bool:
    """A choice that leaves one of three samples out."""
    return zlib.crc32(entry.key.encode()) % 3 > 0


def by_mod(entry: Entry) -> bool:
    """The same by a fact."""
    return entry.facts["index"] % 4 < 2


class Seesaw:
    """A policy of weights that depends on all losses and on its memory."""

    every = 3

    def decide(self, summary: Summary, memory: Any) -> Decided:
        """Return weights between 1 and 8."""
        turn = (memory or {"turn": 0})["turn"]
        weights = {
            source.name: 1 + 4 * (source.loss.mean or 0) + (source.total_samples + turn) % 3
            for source in summary.sources
        }
        return Decided(weights, {"turn": turn + 1}, f"turn {turn}")


class Stairs:
    """A policy of sizes."""

    every = 4

    def decide(self, measured: Measured, memory: Any) -> SizeDecided:
        """Return one size after the other, of a global step."""
        turn = (memory or {"turn": 0})["turn"]
        return SizeDecided((1, 2, 3)[turn % 3] * 6, {"turn": turn + 1}, f"turn {turn}")


@dataclass
class Data:
    """Shards of all kinds below a folder, written once."""

    folder: Path
    servers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        sides = {"image_side": (6, 14), "padding_bytes": (0, 200)}
        for name, counts in (
            ("a", [7, 30, 0, 18, 41, 3, 25, 1, 33, 12]),
            ("b", [21, 16, 9, 28]),
            ("c", [35, 5, 14]),
        ):
            options = ShardOptions(folder=name, **sides)  # type: ignore[arg-type]
            write_shards(self.folder / name, counts, seed=ord(name), options=options)
        holes = ShardOptions(without_text_every=3, folder="h", **sides)  # type: ignore[arg-type]
        write_shards(self.folder / "holes", [20, 31, 2, 17, 40, 9], seed=4, options=holes)
        write_shards(self.folder / "damaged", [20, 31, 2, 17, 40, 9], seed=6, options=holes)
        for path in sorted((self.folder / "damaged").glob("*.tar")):
            damage(path, every=7)

    def urls(self, *names: str) -> list[str]:
        """The paths of the shards of folders."""
        return [str(path) for name in names for path in sorted((self.folder / name).glob("*.tar"))]

    def served(self, *names: str) -> tuple[list[str], ShardServer]:
        """URLs of the shards of folders, and their server."""
        server = self.servers.enter_context(ShardServer(self.folder))
        return [f"{server.url}/{Path(url).relative_to(self.folder)}" for url in self.urls(*names)], server

    def sources(self, **weights: float) -> list[Source]:
        """A source for each folder."""
        return [Source(self.urls(name), weight, name) for name, weight in weights.items()]


@streamload.cache_module
class Means(torch.nn.Module):
    """A feature whose rows don't depend on those beside them."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The mean of each channel."""
        return images.mean((2, 3))


def damage(path: Path, every: int) -> None:
    """Cut the images of some samples short, at which no header shows it."""
    samples = read_oracle(path)
    with tarfile.open(path, "w") as tar:
        for number, (key, members) in enumerate(samples):
            for name, content in members.items():
                payload = content[: len(content) // 2] if name == "jpg" and number % every == 2 else content
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))


@dataclass
class Kind:
    """A kind of run.

    Attributes:
        options: of `tests.support.flat.make_loader`.
        actions: what may happen between two steps: "weights", "sizes".
        ranks: on which it may run.
        keeps_ranks: a replay needs the recorded number of ranks.
        steps: about how many of the run are recorded.
        reports: losses of the rows.
        heal: mends the shards; called between two attempts, or after the last.
        values: further values of a batch to compare, by name.
    """

    options: dict[str, Any]
    actions: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (1, 2, 3)
    keeps_ranks: bool = False
    steps: int = 40
    reports: bool = False
    heal: Callable[[], object] = field(default=lambda: None)
    values: Callable[[Any], Mapping[str, Any]] = field(default=lambda batch: {})


def rows_of(kind: Kind, batch: Any) -> Rows:
    """What is compared of a batch."""
    batch = {**batch, **kind.values(batch)}
    if isinstance(batch.get("image"), list):  # of cells
        batch["image"] = [image for cell in batch["image"] for image in cell]
    if "text_valid" in batch:  # as wide as the longest caption of the rank's batch
        batch["text"] = [
            ids[valid] for ids, valid in zip(batch["text"], batch.pop("text_valid"), strict=True)
        ]
    return list(samples_of(batch))


class Recorded:
    """A run with its journal, which `go` continues.

    Args:
        kind: of it.
        directory: empty.
        numbers: decide on what happens.

    Attributes:
        steps: of each step the rows of each rank.
        branches: the steps that led to each segment, in the order of segments.
    """

    def __init__(self, kind: Kind, directory: Path, numbers: random.Random):
        self.kind, self.directory, self._numbers = kind, directory, numbers
        self.is_cold = False
        self.journal, self.steps = directory / "journal", list[list[Rows]]()
        self.branches: list[list[list[Rows]]] = []
        self._states: list[tuple[int, list[Any]]] = []
        self._ranks = numbers.choice(kind.ranks)
        self.events = collections.Counter[str]()

    def make(self, rank: int, ranks: int, cache: Path, workers: int = 0, **options: Any) -> streamload.Loader:
        """A rank's loader."""
        given: dict[str, Any] = {
            "batch_size": BATCH // ranks,
            "num_workers": workers,
            "preprocess": small,
            "tokenizer": spelled,
            "shuffle": 50,
            "lanes": 3,
            "seed": 7,
            "cache_size": "1GB",
            "cache_dir": cache,
            "output": "dict",
            "with_keys": True,
            "journal": self.journal,
            "rank": rank,
            "world_size": ranks,
            "max_bad_samples": None,
            "max_bad_shards": None,
            **self.kind.options,
            **options,
        }
        if given["batch_size"] is None:
            del given["batch_size"]
        return flat.make_loader(given.pop("urls"), **given)

    def go(self) -> None:
        """Run, with all that may happen in between, in two or three attempts."""
        numbers = self._numbers
        for attempt in range(numbers.choice([1, 2, 3])):
            state = None
            if attempt and not self._states:
                self.steps.clear()
            elif attempt:
                self._ranks = self._ranks if self.kind.keeps_ranks else numbers.choice(self.kind.ranks)
                at, state = numbers.choice(self._states)
                del self.steps[at:]
                self._states = [saved for saved in self._states if saved[0] <= at]
            self._attempt(state)
            if numbers.random() < 0.3:
                self.kind.heal()
            if len(RunHistory(self.journal).segments) > len(
                self.branches
            ):  # else nothing was left of its epoch
                self.branches.append(list(self.steps))
        self.kind.heal()

    def _attempt(self, state: list[Any] | None) -> None:
        numbers, first = self._numbers, len(self.steps)
        workers = numbers.choice([0, 0, 0, 2])
        with contextlib.ExitStack() as stack:
            loaders = [
                stack.enter_context(self.make(rank, self._ranks, self.directory / "cache", workers))
                for rank in range(self._ranks)
            ]
            if state is not None:
                for loader in loaders:
                    loader.load_state_dict(state)
            epochs = numbers.randint(1, 4)
            while epochs and len(self.steps) - first < self.kind.steps:
                self._epoch(loaders)
                epochs -= 1
                if numbers.random() < 0.15:
                    self.events["set_epoch"] += 1
                    epoch = numbers.randrange(6)
                    for loader in loaders:
                        loader.set_epoch(epoch)

    def _epoch(self, loaders: list[streamload.Loader]) -> None:
        numbers = self._numbers
        for batches in zip(*loaders, strict=True):
            assert {loader.info.run_step for loader in loaders} == {len(self.steps)}
            self.steps.append([rows_of(self.kind, batch) for batch in batches])
            if self.kind.reports:
                for loader, batch in zip(loaders, batches, strict=True):
                    losses = [zlib.crc32(key.encode()) % 1000 / 1000 for key in batch["__key__"]]
                    loader.report(loss=torch.tensor(losses))
            if numbers.random() < 0.12:
                self._act(loaders)
            if numbers.random() < 0.3:
                states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
                self._states.append((len(self.steps), states))
            if numbers.random() < 0.03:
                self.events["broken off"] += 1
                return
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        self._states.append((len(self.steps), states))

    def _act(self, loaders: list[streamload.Loader]) -> None:
        action = self._numbers.choice([*self.kind.actions, ""])
        self.events[action] += 1
        if action == "weights":
            names = [source.name for source in loaders[0].options.sources]
            weights = {name: self._numbers.choice([0.2, 1.0, 3.0]) for name in names}
            for loader in loaders:
                loader.set_weights(weights)
        if action == "sizes":
            size = self._numbers.choice(SIZES)
            for loader in loaders:
                loader.set_batch_size(size // self._ranks)


@dataclass
class Tally:
    """What came of steps that were made again.

    Attributes:
        equal: how many were as recorded.
        wrong: which weren't.
        refused: which couldn't be made, and why.
    """

    equal: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class Check:
    """Makes random steps of a run again, on random layouts.

    Args:
        run: that was recorded.
        numbers: decide on steps and layouts.
        tally: of all.
    """

    def __init__(self, run: Recorded, numbers: random.Random, tally: Tally):
        self._run, self._numbers, self._tally = run, numbers, tally
        self._history = RunHistory(run.journal)
        self._caches = 0

    def some(self, count: int) -> None:
        """Make so many steps again, each with the one after it."""
        names = [segment.name for segment in self._history.segments]
        for _ in range(count):
            branch = self._numbers.randrange(len(self._run.branches))
            steps = self._run.branches[branch]
            if not steps:
                continue
            name = None if branch == len(names) - 1 else names[branch]
            self.one(steps, self._numbers.randrange(len(steps)), name)

    def one(self, steps: list[list[Rows]], step: int, name: str | None) -> None:
        """Make a step of a branch again."""
        run, numbers = self._run, self._numbers
        segment = self._history.at(step, name)
        stop = next(stop for one, _, stop in self._history.branch(name) if one is segment)
        expected = steps[step : min(step + 2, stop)]
        ranks = segment.world_size
        self._caches += 1
        warm = run.directory / "cache"
        cache = warm if numbers.random() < 0.7 else run.directory / f"cache-{self._caches}"
        how = numbers.choice(["rank", "whole", "at"])
        if run.kind.keeps_ranks and how == "whole":
            how = "rank"
        label = f"step {step} of {name} by {how}, {ranks} ranks"
        try:
            if how == "at":
                count = ranks if run.kind.keeps_ranks else numbers.choice(run.kind.ranks)
                label += f" on {count}"
                workers = numbers.choice([0, 2])
                found = [[] for _ in expected]
                for rank in range(count):
                    with run.make(rank, count, cache, workers) as loader:
                        again = loader.at(step, segment=name)
                        for place, batch in zip(range(len(expected)), again, strict=False):
                            found[place].append(rows_of(run.kind, batch))
                is_same = _sorted(found) == _sorted(expected)
                if count == ranks:
                    is_same = found == expected
            else:
                rank = numbers.randrange(ranks) if how == "rank" else 0
                layout = (rank, ranks, segment.rows) if how == "rank" else None
                with run.make(rank, ranks, cache) as loader:
                    options = loader.options
                makers = MakeLoaders(streamload.Loader, extensions_of, by_rank())
                past = steps_from(self._history, step, options, makers, layout, name)
                found = [[rows_of(run.kind, one.batch)] for _, one in zip(expected, past, strict=False)]
                if how == "rank":
                    is_same = found == [[each[rank]] for each in expected]
                else:
                    is_same = _sorted(found) == _sorted(expected)
        except REFUSALS as exc:
            self._tally.refused.append(f"{label}: {type(exc).__name__}: {exc}")
            return
        if is_same:
            self._tally.equal += 1
        else:
            self._tally.wrong.append(label + f" ({len(found)} of {len(expected)} steps)")


def _sorted(steps: list[list[Rows]]) -> list[Rows]:
    return [sorted(row for rows in ranks for row in rows) for ranks in steps]
