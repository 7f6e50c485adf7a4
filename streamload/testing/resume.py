"""assert_resumes_exactly: interrupts a run at many steps and resumes each time with another layout.

The oracle is the uninterrupted run. Ranks are loaders in one process, iterated in step; their workers are
real processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from streamload.loader import Loader

State = dict[str, Any]
_MODALITIES = ("image", "text")
"""Values with rows of their own where `Source(modality=…)` leaves some out."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks, and workers of each rank."""

    ranks: int = 1
    workers: int = 0


class MakeLoader(Protocol):
    """Makes the loader of one rank."""

    def __call__(
        self, *, batch_size: int, num_workers: int, rank: int, world_size: int, cache_dir: Path
    ) -> Loader:
        """A loader with these arguments, `Batches(with_keys=True)`, and output="dict" or `map_sample`."""
        ...


@dataclass(frozen=True, slots=True)
class Resumed:
    """A resumed run.

    Attributes:
        cut: the step of the first run after which it was interrupted.
        layout: of the resumed run.
        shards: URLs of the shards with samples left in the epoch.
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
    """Interrupt a run after its steps, resume each time with an empty cache, and compare all samples.

    Args:
        make: makes a rank's loader.
        directory: empty; for the caches of the first run and of each resumed one.
        global_batch: samples per step over all ranks; a multiple of every layout's ranks.
        first: the layout of the run that is interrupted.
        layouts: of the resumed runs, which take them in turn.
        epochs: the length of the run.
        cuts: steps after which the run is interrupted, counted from 0 over all epochs; None: each.
        most_steps: how many steps are compared after each cut; None: all until the end of the run.
        after: called for each resumed run at the end of the interrupted epoch, before its loaders close.

    Returns:
        The number of cuts.

    Raises:
        AssertionError: a sample's position or values differ from those of the uninterrupted run.
    """
    steps = _uncut(make, directory / "uncut", global_batch, first, epochs)
    spread = itertools.cycle(layouts)
    cuts_made = 0
    for cut in range(len(steps)) if cuts is None else cuts:
        layout = next(spread)
        state = _through_json(steps[cut].states)
        remaining = [step for step in steps[cut + 1 :] if step.epoch == steps[cut].epoch]
        later = [step for step in steps[cut + 1 :] if step.epoch != steps[cut].epoch]
        with _run(make, directory / f"cut-{cut}", global_batch, layout) as loaders:
            for loader in loaders:
                loader.load_state_dict(state)
            if remaining or state[0]["epoch"] == steps[cut].epoch:  # else it starts at the next epoch
                _compare(f"cut after step {cut}, {layout}", loaders, remaining, most_steps)
            if after is not None:
                urls = frozenset(url for step in remaining for _, url, *_ in step.samples)
                after(Resumed(cut, layout, urls))
            if most_steps is None or len(remaining) < most_steps:
                for epoch in sorted({step.epoch for step in later}):
                    epoch_steps = [step for step in later if step.epoch == epoch]
                    _compare(
                        f"cut after step {cut}, {layout}, epoch {epoch}", loaders, epoch_steps, most_steps
                    )
        cuts_made += 1
    return cuts_made


def _uncut(make: MakeLoader, cache: Path, batch: int, layout: Layout, epochs: int) -> list[_Step]:
    steps = []
    with _run(make, cache, batch, layout) as loaders:
        for epoch in range(epochs):
            steps += [
                _Step(epoch, samples, [loader.state_dict() for loader in loaders])
                for samples in _in_step(loaders)
            ]
    if not steps:
        raise AssertionError("the run has no steps")
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


def _compare(place: str, loaders: list[Loader], expected: list[_Step], most: int | None) -> None:
    batches = _in_step(loaders)
    for number, step in enumerate(expected[:most]):
        samples = next(batches, None)
        assert samples is not None, f"{place}: ended {len(expected) - number} steps too early"
        assert samples == step.samples, f"{place}: step {number} after it differs"
    if most is None or len(expected) < most:
        assert next(batches, None) is None, f"{place}: continued after the end of the epoch"


def _in_step(loaders: list[Loader]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """The global batches: each sample's key, URL and a digest of its values."""
    for parts in zip(*loaders, strict=True):
        yield tuple(sample for part in parts for sample in samples_of(part))


def samples_of(batch: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The key, the URL and a digest of the values of each sample of a batch, a dict."""
    keys, urls = batch["__key__"], batch["__url__"]
    values = {name: value for name, value in batch.items() if name not in ("__key__", "__url__")}
    patches = values.pop("image") if isinstance(values.get("image"), dict) else {}
    values |= {f"image.{name}": value for name, value in patches.items()}
    places = {name: _places(batch[f"{name}_rows"]) for name in _MODALITIES if f"{name}_rows" in batch}
    for name, value in values.items():
        of_some = places.get(re.split("[._]", name)[0], keys)
        if not isinstance(value, int) and len(value) != len(of_some):
            raise AssertionError(f"{name} has {len(value)} rows in a batch of {len(of_some)}")
    for row, (key, url) in enumerate(zip(keys, urls, strict=True)):
        digest = hashlib.blake2b(digest_size=12)
        for name, value in sorted(values.items()):
            modality = re.split("[._]", name)[0]
            if name == f"{modality}_rows":
                continue
            place = places[modality].get(row) if modality in places else row
            if place is not None:
                of_sample = value if isinstance(value, int) else value[place]
                digest.update(name.encode() + _bytes(of_sample))
        yield key, url, digest.hexdigest()


def _places(rows: torch.Tensor) -> dict[int, int]:
    """The places among the values of a modality, by the rows of a batch that have one."""
    return {row: place for place, row in enumerate(rows.tolist())}


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    return repr(value).encode()


def _through_json(states: list[State]) -> list[State]:
    restored: list[State] = json.loads(json.dumps(states))
    return restored
