"""ExtensionContract: tests of an extension of a loader, to be subclassed in a test file of pytest."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from streamload.errors import StateMismatch
from streamload.extension import Entry, Extension
from streamload.loader import Batches, Loader, Order, make_loader
from streamload.loader.state import sealed
from streamload.shards.columns import Facts
from streamload.testing.resume import Layout, assert_resumes_exactly, samples_of
from streamload.testing.shards import write_shards

BATCH = 10
"""Samples in a step, over all ranks."""


@dataclass(frozen=True)
class _KeepsTheSame(Extension):
    """Leaves out the samples that another extension leaves out, and does nothing else.

    Attributes:
        verdicts: entries and verdicts of this process's calls, in their order.
    """

    extension: Extension
    verdicts: list[tuple[Entry, bool]] = field(default_factory=list, compare=False)
    name = "keeps_the_same"

    @property
    def own_facts(self) -> Facts:
        return self.extension.own_facts

    @property
    def facts(self) -> Collection[str]:
        return self.extension.facts

    def keep(self, entry: Entry) -> bool:
        assert self.extension.keep is not None
        self.verdicts.append((entry, bool(self.extension.keep(entry))))
        return self.verdicts[-1][1]


class ExtensionContract:
    """Tests that each extension has to pass.

    Attributes:
        extension: as its users make it.
        options: other arguments of make_loader.
        adds: the names of the values that it adds to batches.
        state_keys: the keys that it adds to states, once batches were yielded.
        damaged: values of these keys that it never saves.
        layout: of the run that is interrupted.
        layouts: of the resumed ones.
        ranks: how many ranks, joined by torch.distributed (gloo), run it; 1: it is for one rank.
    """

    extension: Extension
    options: Mapping[str, Any] = MappingProxyType({})
    adds: tuple[str, ...] = ()
    state_keys: tuple[str, ...] = ()
    damaged: tuple[Any, ...] = ()
    layout = Layout(1, 2)
    layouts: tuple[Layout, ...] = (Layout(1, 0), Layout(1, 2))
    ranks: int = 2

    def write_data(self, folder: Path) -> Any:
        """Write the shards of a test.

        Args:
            folder: may be missing.

        Returns:
            make_loader's first argument.
        """
        write_shards(folder, [20, 14, 16], seed=5)
        return str(folder)

    def make(
        self, urls: Any, *, is_extended: bool = True, rank: int = 0, world_size: int = 1, **layout: Any
    ) -> Loader:
        """Make a loader of the test's shards.

        Args:
            urls: from `write_data`.
            is_extended: whether it has the extension; without it the loader reads the same samples.
            rank, world_size: of the loader.
            layout: arguments of make_loader: cache_dir, and with several layouts batch_size and num_workers.
        """
        options = {"batch_size": BATCH, "num_workers": 0, "output": "dict", **self.options, **layout}
        batches, order = options.pop("batches", Batches()), options.pop("order", Order())
        extensions = [*batches.extensions]
        if is_extended:
            extensions.append(self.extension)
        elif self.extension.keep is not None:
            extensions.append(_KeepsTheSame(self.extension))
        return make_loader(
            urls,
            batches=replace(batches, with_keys=True, extensions=extensions),
            order=replace(order, groups=1, rank=rank, world_size=world_size),
            **options,
        )

    def forms(self, folder: Path) -> Sequence[Extension]:
        """The extensions that are pickled on the way to workers.

        Args:
            folder: empty.
        """
        return [self.extension]

    def check_batches(self, batches: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> None:
        """Compare an epoch's batches, without what the extension adds, with those of a loader without it."""
        for batch, expected in zip(batches, plain, strict=True):
            kept = {name: value for name, value in batch.items() if name not in self.adds}
            assert list(samples_of(kept)) == list(samples_of(expected))

    def test_it_is_the_same_after_it_was_pickled(self, tmp_path: Path) -> None:
        """The spec is compared by its values, and goes to workers by pickle."""
        for extension in self.forms(tmp_path):
            assert pickle.loads(pickle.dumps(extension)) == extension

    def test_it_adds_its_values_and_changes_no_other(self, tmp_path: Path) -> None:
        """Batches have their values and no others, and a state its keys."""
        urls, cache = self.write_data(tmp_path / "shards"), tmp_path / "cache"
        with (
            self.make(urls, cache_dir=cache) as extended,
            self.make(urls, is_extended=False, cache_dir=cache) as plain,
        ):
            batches, expected = list(extended), list(plain)
            assert {name for batch in batches for name in batch} - expected[0].keys() == set(self.adds)
            self.check_batches(batches, expected)
            added = extended.state_dict().keys() - plain.state_dict().keys()
            assert added == set(self.state_keys)

    def test_what_it_keeps_depends_on_the_sample_alone(self, tmp_path: Path) -> None:
        """`keep` says the same of a sample again, after others, and in another process."""
        if self.extension.keep is None:
            return
        urls = self.write_data(tmp_path / "shards")
        with self.make(urls, is_extended=False, cache_dir=tmp_path / "cache") as loader:
            list(loader)
            (recorder,) = (
                extension for extension in loader.options.extensions if isinstance(extension, _KeepsTheSame)
            )
        unpickled: Extension = pickle.loads(pickle.dumps(self.extension))
        assert recorder.verdicts
        assert unpickled.keep is not None
        for entry, verdict in reversed(recorder.verdicts):
            assert bool(unpickled.keep(entry)) == verdict, f"keep({entry}) was {verdict} at its first call"

    def test_it_resumes_exactly_at_every_step(self, tmp_path: Path) -> None:
        """A run of two epochs goes on after each step as it would have, with its values."""
        urls = self.write_data(tmp_path / "shards")

        def make(**layout: Any) -> Loader:
            return self.make(urls, **layout)

        assert_resumes_exactly(
            make, tmp_path, global_batch=BATCH, first=self.layout, layouts=self.layouts, epochs=2
        )

    def test_ranks_that_are_joined_have_the_batches_of_one(self, tmp_path: Path) -> None:
        """Ranks under gloo, which can agree, have the batches and values of one; their states go on."""
        if self.ranks == 1:
            return
        urls = self.write_data(tmp_path / "shards")
        arguments = (self, urls, tmp_path)
        start_processes(_run_rank, arguments, nprocs=self.ranks, start_method="fork")  # type: ignore[no-untyped-call]
        by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(self.ranks)]
        steps = list(zip(*by_rank, strict=True))
        batches = [[sample for samples, _ in step for sample in samples] for step in steps]
        with self.make(urls, cache_dir=tmp_path / "alone") as loader:
            assert [_samples_of(batch) for batch in loader] == batches
        middle = len(steps) // 2
        with self.make(urls, cache_dir=tmp_path / "resumed") as loader:
            loader.load_state_dict([state for _, state in steps[middle - 1]])
            assert [_samples_of(batch) for batch in loader] == batches[middle:]

    def test_what_it_leaves_out_is_counted_exactly_at_every_step(self, tmp_path: Path) -> None:
        """A run that is resumed, in another layout, counts at each step what it would have counted."""
        if self.extension.keep is None:
            return
        urls, name = self.write_data(tmp_path / "shards"), self.extension.name

        def counts(loaders: Sequence[Loader]) -> Iterator[int]:
            """Over all ranks, before the first step, after each, and at the end of the epoch."""
            batches, is_over = [iter(loader) for loader in loaders], False
            while not is_over:
                yield sum(loader.stats().samples_left_out[name] for loader in loaders)
                is_over = None in [next(rank, None) for rank in batches]
            yield sum(loader.stats().samples_left_out[name] for loader in loaders)

        with self._ranks(urls, tmp_path / "first", self.layout) as loaders:
            before, states = [], []
            for count in counts(loaders):
                before.append(count)
                states.append([loader.state_dict() for loader in loaders])
        assert before[-1] > 0
        for cut, state in enumerate(json.loads(json.dumps(states[:-1]))):
            layout = self.layouts[cut % len(self.layouts)]
            with self._ranks(urls, tmp_path / f"cut-{cut}", layout) as loaders:
                for loader in loaders:
                    loader.load_state_dict(state)
                is_new_epoch = state[0]["epoch"] > 0
                assert is_new_epoch or list(counts(loaders)) == before[cut:]

    @contextlib.contextmanager
    def _ranks(self, urls: Any, cache: Path, layout: Layout) -> Iterator[list[Loader]]:
        """The loaders of all ranks, in this process."""
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(
                    self.make(
                        urls,
                        cache_dir=cache,
                        batch_size=BATCH // layout.ranks,
                        num_workers=layout.workers,
                        rank=rank,
                        world_size=layout.ranks,
                    )
                )
                for rank in range(layout.ranks)
            ]

    def test_a_state_without_it_loads_and_one_with_it_where_it_is_not_used(self, tmp_path: Path) -> None:
        """A run may begin to use it, and may go on without it."""
        urls, cache = self.write_data(tmp_path / "shards"), tmp_path / "cache"
        with (
            self.make(urls, cache_dir=cache) as extended,
            self.make(urls, is_extended=False, cache_dir=cache) as plain,
        ):
            for loader in (extended, plain):
                next(iter(loader))
            with_it, without = extended.state_dict(), plain.state_dict()
            extended.load_state_dict(without)
            plain.load_state_dict(json.loads(json.dumps(with_it)))
            assert next(iter(extended))["__key__"] == next(iter(plain))["__key__"]
            assert plain.state_dict().keys().isdisjoint(self.state_keys)

    def test_a_damaged_state_fails(self, tmp_path: Path) -> None:
        """A damaged state isn't taken for a sound one, also where nothing else notices the damage."""
        urls = self.write_data(tmp_path / "shards")
        with self.make(urls, cache_dir=tmp_path / "cache") as loader:
            next(iter(loader))
            saved = loader.state_dict()
            for key in self.state_keys:
                for value in self.damaged:
                    try:
                        loader.load_state_dict(sealed({**saved, key: value}))
                    except StateMismatch:
                        continue
                    raise AssertionError(f"{key}={value!r} in a state doesn't raise StateMismatch")


def _samples_of(batch: Mapping[str, Any]) -> list[list[str]]:
    return [list(sample) for sample in samples_of(batch)]


def _run_rank(rank: int, suite: ExtensionContract, urls: Any, folder: Path) -> None:
    """Write the samples of each step of a rank's epoch, and its state after it, as JSON."""
    rendezvous = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=suite.ranks)
    rows, cache = BATCH // suite.ranks, folder / "ranks"
    with suite.make(urls, cache_dir=cache, batch_size=rows, rank=rank, world_size=suite.ranks) as loader:
        steps = [[_samples_of(batch), loader.state_dict()] for batch in loader]
    (folder / f"{rank}.json").write_text(json.dumps(steps))
    torch.distributed.destroy_process_group()
