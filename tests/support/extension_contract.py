"""The contract that each extension's test runs: a subclass of `ExtensionContract` for each."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import streamload
from streamload.extension import Extension
from streamload.loader.loader import Loader
from streamload.testing.resume import Layout, assert_resumes_exactly
from streamload.testing.shards import write_shards
from tests.support import flat


def ids(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption), *caption.encode()[:3]] for caption in captions])


def pixels(image: Any) -> torch.Tensor:
    return torch.tensor([float(image.size[0])])


class ExtensionContract:
    """What holds for any extension.

    Attributes:
        extension: as its options make it.
        adds: the names of the values that it adds to batches.
        state_keys: the keys that it adds to states, once batches were yielded.
        damaged: values of these keys that no loader saves.
        layout: of the run that is interrupted.
        layouts: of the resumed ones.
        options: of the loader, beside.
        by_options: options by which a loader makes the extension itself; None: it is given to the loader.
        tokenizer: of the loader.
    """

    extension: Extension
    adds: tuple[str, ...]
    state_keys: tuple[str, ...]
    damaged: tuple[Any, ...]
    layout = Layout(1, 0)
    layouts: tuple[Layout, ...] = (Layout(1, 0), Layout(1, 2))
    options: Mapping[str, Any] = MappingProxyType({})
    by_options: Mapping[str, Any] | None = None
    tokenizer = staticmethod(ids)

    @pytest.fixture
    def shards(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("shards")
        write_shards(folder, [20, 14, 16], seed=5)
        return folder

    def make(self, shards: Path, extended: bool = True, **options: Any) -> Loader:
        """A loader with the extension, or the same one without it."""
        defaults = {"num_workers": 0, "batch_size": 10, "preprocess": pixels, "cache_size": "1GB"}
        defaults |= {"output": "dict", "with_keys": True, **self.options}
        if self.by_options is not None:
            asked = self.by_options if extended else {}
            return flat.make_loader(shards, self.tokenizer, **{**defaults, **options, **asked})
        plain = flat.make_loader(shards, self.tokenizer, **{**defaults, **options})
        return Loader(replace(plain.options, extensions=(self.extension,) if extended else ()))

    def check_batches(self, batches: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> None:
        """Compare an epoch's batches with those of a loader without the extension."""
        for batch, expected in zip(batches, plain, strict=True):
            assert torch.equal(batch["text"], expected["text"])
            assert batch["__key__"] == expected["__key__"]

    def test_it_is_the_same_after_it_was_pickled(self):
        assert pickle.loads(pickle.dumps(self.extension)) == self.extension

    def test_it_adds_its_values_and_changes_no_other(self, shards: Path, tmp_path: Path):
        with (
            self.make(shards, cache_dir=tmp_path) as extended,
            self.make(shards, False, cache_dir=tmp_path) as plain,
        ):
            batches, expected = list(extended), list(plain)
            assert {name for batch in batches for name in batch} - expected[0].keys() == set(self.adds)
            assert all(len(batch[name]) == len(batch["text"]) for batch in batches for name in self.adds)
            self.check_batches(batches, expected)
            if self.by_options is not None:
                assert type(self.extension) in map(
                    type, [*extended._pool.extensions, *extended.options.extensions]
                )
            added = extended.state_dict().keys() - plain.state_dict().keys()
            assert added == set(self.state_keys)

    def test_it_resumes_exactly_at_every_step(self, shards: Path, tmp_path: Path):
        def make(**layout: Any) -> Loader:
            return self.make(shards, groups=1, **layout)

        cuts = assert_resumes_exactly(
            make, tmp_path, global_batch=10, first=self.layout, layouts=self.layouts, epochs=2
        )
        assert cuts == 10

    def test_a_state_without_it_loads_and_one_with_it_where_it_is_not_used(
        self, shards: Path, tmp_path: Path
    ):
        with (
            self.make(shards, cache_dir=tmp_path) as extended,
            self.make(shards, False, cache_dir=tmp_path) as plain,
        ):
            for loader in (extended, plain):
                next(iter(loader))
            with_it, without = extended.state_dict(), plain.state_dict()
            extended.load_state_dict(without)
            plain.load_state_dict(json.loads(json.dumps(with_it)))
            assert next(iter(extended))["__key__"] == next(iter(plain))["__key__"]
            assert plain.state_dict().keys().isdisjoint(self.state_keys)

    def test_a_damaged_state_fails(self, shards: Path, tmp_path: Path):
        with self.make(shards, cache_dir=tmp_path) as loader:
            next(iter(loader))
            saved = {name: value for name, value in loader.state_dict().items() if name != "checksum"}
            for key in self.state_keys:
                for value in self.damaged:
                    with pytest.raises(streamload.errors.StateMismatch):  # one of before there was a checksum
                        loader.load_state_dict({**saved, "streamload_state": 2, key: value})
