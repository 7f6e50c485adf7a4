"""Whether a loader goes on exactly: a run is cut at many steps, and each time taken up by another layout.

The oracle is the run itself, uncut. Ranks are loaders in one process, iterated in step; their workers are
real ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from streamload.loader import Loader

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is spread."""

    ranks: int = 1
    workers: int = 0
    """Of each rank."""


class MakeLoader(Protocol):
    """Makes the loader of one rank."""

    def __call__(
        self, *, batch_size: int, num_workers: int, rank: int, world_size: int, cache_dir: Path
    ) -> Loader:
        """A loader with `with_keys=True` and output "dict" or `map_sample`, made with these arguments."""
        ...


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run that was taken up did.

    Attributes:
        cut: behind which step of the first run.
        layout: of the run that went on.
        shards: the URLs of which samples were still to come in the epoch.
    """

    cut: int
    layout: Layout
    shards: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Step:
    epoch: int
    samples: tuple[tuple[str, ...], ...]
    states: list[State]


def assert_resumes_exactly(
    make: MakeLoader,
    directory: Path,
    *,
    global_batch: int,
    first: Layout,
    layouts: Sequence[Layout],
    epochs: int = 1,
    cuts: Iterable[int] | None = None,
    most_steps: int | None = None,
    after: Callable[[Resumed], None] | None = None,
) -> int:
    """Cut a run at its steps, go on with each cut in an empty cache, and compare all that comes.

    Args:
        make: makes a rank's loader.
        directory: empty; gets a cache for the first run and one for each cut.
        global_batch: samples of a step over all ranks; every layout's ranks have to divide it.
        first: how the run that is cut is spread.
        layouts: how the runs that go on are spread; cut after cut takes the next.
        epochs: how long the run is.
        cuts: behind which steps it is cut, counted from 0 over all epochs; None: at each.
        most_steps: how many steps are compared behind each cut; None: all to the end of the run.
        after: called after each run that went on, its loaders still open, where it has come to the end of
            the epoch that was cut.

    Returns:
        How many cuts were made.

    Raises:
        AssertionError: a sample, its place or its values are others than in the run that wasn't cut.
    """
    steps = _uncut(make, directory / "uncut", global_batch, first, epochs)
    spread = itertools.cycle(layouts)
    made = 0
    for cut in range(len(steps)) if cuts is None else cuts:
        layout = next(spread)
        state = _through_json(steps[cut].states)
        rest = [step for step in steps[cut + 1 :] if step.epoch == steps[cut].epoch]
        later = [step for step in steps[cut + 1 :] if step.epoch != steps[cut].epoch]
        with _run(make, directory / f"cut-{cut}", global_batch, layout) as loaders:
            for loader in loaders:
                loader.load_state_dict(state)
            if (
                rest or state[0]["epoch"] == steps[cut].epoch
            ):  # else the state is of the next epoch's beginning
                _compare(f"cut behind step {cut}, {layout}", loaders, rest, most_steps)
            if after is not None:
                urls = frozenset(url for step in rest for _, url, *_ in step.samples)
                after(Resumed(cut, layout, urls))
            if most_steps is None or len(rest) < most_steps:
                for epoch in sorted({step.epoch for step in later}):
                    own = [step for step in later if step.epoch == epoch]
                    _compare(f"cut behind step {cut}, {layout}, epoch {epoch}", loaders, own, most_steps)
        made += 1
    return made


def _uncut(make: MakeLoader, cache: Path, batch: int, layout: Layout, epochs: int) -> list[_Step]:
    steps = []
    with _run(make, cache, batch, layout) as loaders:
        for epoch in range(epochs):
            steps += [
                _Step(epoch, samples, [loader.state_dict() for loader in loaders])
                for samples in _in_step(loaders)
            ]
    if not steps:
        raise AssertionError("the run has no step")
    return steps


@contextlib.contextmanager
def _run(make: MakeLoader, cache: Path, batch: int, layout: Layout) -> Iterator[list[Loader]]:
    if batch % layout.ranks:
        raise ValueError(f"{layout.ranks} ranks don't divide a global batch of {batch}")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                make(
                    batch_size=batch // layout.ranks,
                    num_workers=layout.workers,
                    rank=rank,
                    world_size=layout.ranks,
                    cache_dir=cache,
                )
            )
            for rank in range(layout.ranks)
        ]


def _compare(what: str, loaders: list[Loader], expected: list[_Step], most: int | None) -> None:
    found = _in_step(loaders)
    for number, step in enumerate(expected[:most]):
        samples = next(found, None)
        assert samples is not None, f"{what}: it ended {len(expected) - number} steps too early"
        assert samples == step.samples, f"{what}: step {number} behind it is another one"
    if most is None or len(expected) < most:
        assert next(found, None) is None, f"{what}: it went on behind the end of the epoch"


def _in_step(loaders: list[Loader]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """The global batches: of each sample its key, its URL and a digest of its values."""
    for parts in zip(*loaders, strict=True):
        yield tuple(sample for part in parts for sample in _samples(part))


def _samples(batch: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    keys, urls = batch["__key__"], batch["__url__"]
    values = {name: value for name, value in batch.items() if name not in ("__key__", "__url__")}
    for place, (key, url) in enumerate(zip(keys, urls, strict=True)):
        digest = hashlib.blake2b(digest_size=12)
        for name, value in sorted(values.items()):
            digest.update(name.encode() + _bytes(value[place]))
        yield key, url, digest.hexdigest()


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()


def _through_json(states: list[State]) -> list[State]:
    restored: list[State] = json.loads(json.dumps(states))
    return restored
