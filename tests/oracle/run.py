"""Read a case's batches into digests, one for each step and kind of value."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

import streamload
from tests.oracle.cases import Case, Layout

Parts = dict[str, list[str]]
"""By kind of value the digest of each step; "" where a step has none."""

_KINDS = {
    "keys": {"__key__", "__url__"},
    "pixels": {"image", "pixel_values", "patches", "patch_coord", "patch_valid", "seq_len", "corner"},
    "ids": {"text", "text_valid", "input_ids", "attention_mask", "image_rows", "text_rows", "length"},
    "labels": {"label", "labels"},
    "weights": {"weight"},
}


@dataclass
class Outcome:
    """What a run gave.

    Attributes:
        parts: digests of each step's values.
        states: of each rank, where the run was stopped.
        cut: the number of steps before that.
        numbers: what else is compared, as it is.
    """

    parts: Parts = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    cut: int = 0
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(self, values: Iterator[tuple[str, str, Any]]) -> None:
        """Add the values of a step: of each the kind, the name, and itself."""
        hashes: dict[str, Any] = {}
        for kind, name, value in values:
            hashes.setdefault(kind, xxhash.xxh3_64()).update(name.encode() + as_bytes(value))
        steps = self.steps
        for kind in {**self.parts, **hashes}:
            digest = hashes[kind].hexdigest()[:8] if kind in hashes else ""
            self.parts.setdefault(kind, [""] * steps).append(digest)

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return max(map(len, self.parts.values()), default=0)


def run(case: Case) -> Outcome:
    """Run a case to its stop, and from the state there to its end, in the directory of the sets."""
    outcome = Outcome()
    with _ranks(case, case.layouts[0], "first") as ranks:
        reading = _Reading(case, ranks, outcome)
        reading.read(case.epochs, case.stop)
        outcome.states = json.loads(json.dumps([rank.loader.state_dict() for rank in ranks]))
    outcome.cut = outcome.steps
    outcome.numbers["epochs left"] = case.epochs - reading.complete
    rest = resume(case, outcome.states, case.epochs - reading.complete)
    for kind in {**outcome.parts, **rest.parts}:
        head = outcome.parts.get(kind, [""] * outcome.cut)
        outcome.parts[kind] = head + rest.parts.get(kind, [""] * rest.steps)
    outcome.numbers["resumed"] = rest.numbers
    if case.options.get("order", {}).get("decisions"):
        outcome.numbers["decisions"] = _decisions()
        if replay(case).parts != outcome.parts:
            raise AssertionError("the log of decisions replays other batches")
    return outcome


def replay(case: Case) -> Outcome:
    """All batches of a case again, by its log of decisions."""
    options = {**case.options, "mixing": "@replay"}
    for group, name in (("order", "decisions"), ("batches", "batch_policy")):
        options[group] = {key: value for key, value in options.get(group, {}).items() if key != name}
    return read(replace(case, options=options, report=False), "replayed")


def read(case: Case, cache_dir: str) -> Outcome:
    """Read a case to its end on its first layout, without a stop."""
    outcome = Outcome()
    with _ranks(case, case.layouts[0], cache_dir) as ranks:
        _Reading(case, ranks, outcome).read(case.epochs, None)
        stats = [rank.loader.stats() for rank in ranks]
    outcome.numbers["origin bytes"] = sum(snapshot.origin_bytes for snapshot in stats)
    outcome.numbers["rows read"] = sum(snapshot.feature_rows_read for snapshot in stats)
    return outcome


def _decisions() -> list[Any]:
    """The log of decisions, without what depends on where shards are."""
    lines = [json.loads(line) for line in Path("decisions.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("sum")
        line.pop("after", None)
        line.get("order", {}).pop("data", None)
    return lines


def resume(
    case: Case,
    states: Sequence[Mapping[str, Any]],
    epochs: int,
    cache_dir: str = "second",
    moved: Mapping[str, str] | None = None,
) -> Outcome:
    """Read on from a state, on the case's second layout, in an empty cache.

    Args:
        case: the case.
        states: of all ranks.
        epochs: how many are read, with the rest of the one that was begun.
        cache_dir: empty.
        moved: where local shards were when the states were saved → where they are.
    """
    outcome = Outcome()
    with _ranks(case, case.layouts[1], cache_dir) as ranks:
        for rank in ranks:
            rank.loader.load_state_dict(list(states), moved=moved)
        _Reading(case, ranks, outcome, calls=False).read(epochs, None)
    return outcome


@dataclass
class _Rank:
    """A rank's loader, and its features by name."""

    loader: streamload.Loader
    features: Mapping[str, Any]


@contextlib.contextmanager
def _ranks(case: Case, layout: Layout, cache_dir: str) -> Iterator[list[_Rank]]:
    with contextlib.ExitStack() as stack:
        ranks = [_Rank(*case.loader(layout, rank, cache_dir)) for rank in range(layout.ranks)]
        for rank in ranks:
            stack.enter_context(rank.loader)
        yield ranks


@dataclass
class _Reading:
    """Reads the ranks of a run in step.

    Attributes:
        calls: whether the case's calls are made.
        complete: how many epochs were read to their end.
    """

    case: Case
    ranks: list[_Rank]
    outcome: Outcome
    calls: bool = True
    complete: int = 0

    def read(self, epochs: int, stop: int | None) -> None:
        """Read so many epochs, or until so many steps were read."""
        loaders, numbers = [rank.loader for rank in self.ranks], self.outcome.numbers
        numbers["batches"] = [loader.num_batches for loader in loaders]
        numbers["samples"] = loaders[0].num_samples
        for _ in range(epochs):
            if not self._read_epoch(stop):
                break
            self.complete += 1
            numbers.setdefault("ends", []).append(self.outcome.steps)
            if stop is not None and self.outcome.steps >= stop:
                break
        if (
            self.complete and not self.case.options["train"]
        ):  # in training, workers are ahead of the last step
            by_rank = [loader.stats().samples_skipped for loader in loaders]
            numbers["skipped"] = [{cause: n for cause, n in causes.items() if n} for causes in by_rank]

    def _read_epoch(self, stop: int | None) -> bool:
        """Whether the epoch was read to its end."""
        if stop is not None and self.outcome.steps >= stop:
            return False
        iterators = [iter(rank.loader) for rank in self.ranks]
        while stop is None or self.outcome.steps < stop:
            self._call()
            batches = [next(iterator, None) for iterator in iterators]
            if all(batch is None for batch in batches):
                return True
            self._report(batches)
            self.outcome.add(self._values(batches))
        return False

    def _call(self) -> None:
        for step, method, argument in self.case.calls:
            if self.calls and step == self.outcome.steps:
                counts_from = [getattr(rank.loader, method)(argument) for rank in self.ranks]
                self.outcome.numbers.setdefault("calls", []).append(counts_from)

    def _report(self, batches: Sequence[Any]) -> None:
        """Report losses that follow from the rows: of each source its own, falling."""
        for rank, batch in zip(self.ranks, batches, strict=True):
            if self.case.report and batch is not None:
                info = rank.loader.info_of(batch)
                rank.loader.report(loss=(1 + info.source.float()) / (1 + info.step / 8))

    def _values(self, batches: Sequence[Any]) -> Iterator[tuple[str, str, Any]]:
        for number, (rank, batch) in enumerate(zip(self.ranks, batches, strict=True)):
            if batch is None:  # in an evaluation, ranks have unlike numbers of batches
                continue
            for kind, name, value in self._of_batch(rank, batch):
                yield kind, f"{number} {name} ", value

    def _of_batch(self, rank: _Rank, batch: Any) -> Iterator[tuple[str, str, Any]]:
        for name, value in (batch if isinstance(batch, Mapping) else _named(batch)).items():
            if name in rank.features:
                yield "features", name, rank.features[name](batch)
            elif name == "image" and isinstance(value, Mapping):
                yield from (("pixels", inner, tensor) for inner, tensor in value.items())
            elif name == "origin":
                yield from (("keys", inner, strings) for inner, strings in value.items())
            else:
                kinds = [kind for kind, names in _KINDS.items() if name in names]
                yield (kinds or ["values"])[0], name, value
        info = rank.loader.info_of(batch)
        yield "weights", "source", info.source
        yield "weights", "info.weight", info.weight
        yield "weights", "importance", info.importance
        yield "weights", "steps and rows", (info.step, info.run_step, info.rows)
        if "microbatch" in self.case.options.get("batches", {}):
            for part in rank.loader.microbatches(batch):
                yield "parts", "part", (part.rows, part.fraction, part.is_last)


def strings(outcome: Outcome) -> dict[str, str]:
    """The digests of all steps in one string, by kind of value."""
    return {
        kind: "".join(digest or "--------" for digest in digests) for kind, digests in outcome.parts.items()
    }


def _named(batch: Sequence[Any]) -> dict[str, Any]:
    """The elements of a tuple, by names that their forms say."""
    named: dict[str, Any] = {}
    for value in batch:
        if isinstance(value, Mapping):
            name = "origin" if "__key__" in value else "image"
        elif isinstance(value, torch.Tensor) and value.ndim == 1:
            name = "weight" if value.is_floating_point() else "label"
        else:
            name = "image" if isinstance(value, torch.Tensor) and value.ndim == 4 else "text"
        assert name not in named, f"two elements of a batch are taken for its {name}"
        named[name] = value
    return named


def as_bytes(value: Any) -> bytes:
    """A value as bytes that say its type and shape, too."""
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            value = value.view(torch.uint16)
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(as_bytes, value)) + b"]"
    if isinstance(value, Mapping):
        return b"{" + b",".join(name.encode() + as_bytes(value[name]) for name in sorted(value)) + b"}"
    return repr(value).encode()
