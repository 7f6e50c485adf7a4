"""`loader.info`: where the rows of a batch come from, compared with the folders of their shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload import Batches, Order
from streamload.errors import OptionError
from streamload.testing.shards import write_shards
from tests.batching.test_padding import words
from tests.support import flat

NAMES = ("large", "small", "middle")
COUNTS = {"large": [40, 52, 61, 33], "small": [12, 9], "middle": [30, 35]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    place = tmp_path_factory.mktemp("sources")
    return {
        name: [str(path) for path in write_shards(place / name, COUNTS[name], seed=seed)]
        for seed, name in enumerate(NAMES)
    }


def make(folders: dict[str, list[str]], cache: Path, **options: Any) -> streamload.Loader:
    sources = [
        streamload.Source(folders[name], weight, name)
        for name, weight in zip(NAMES, (5, 1, 2.5), strict=True)
    ]
    defaults = {"batch_size": 20, "num_workers": 0, "shuffle": 40, "num_batches": 8, "output": "dict"}
    options = {**defaults, "with_keys": True, "cache_dir": cache, "cache_size": "1GB", **options}
    return flat.make_loader(sources, None if "map_sample" in options else words, **options)


def by_folder(batch: dict[str, Any]) -> list[int]:
    """The oracle: each source's shards lie in a folder of its own."""
    return [NAMES.index(Path(url).parent.name) for url in batch["__url__"]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "batches",
    [
        Batches(),
        Batches(text_padding="longest", bucketing=80),
        Batches(text_padding="longest", bucketing="step"),
    ],
)
def test_each_row_has_its_source_and_its_key(
    workers: int, batches: Batches, folders: dict[str, list[str]], tmp_path: Path
) -> None:
    with make(folders, tmp_path / "cache", num_workers=workers, batches=batches) as loader:
        for step, batch in enumerate(loader):
            info = loader.info
            assert (info.step, info.rows, info.sources) == (step, 20, NAMES)
            assert (info.source.dtype, info.source.tolist()) == (torch.int64, by_folder(batch))
            assert (info.weight.dtype, info.weight.tolist()) == (torch.float32, [1.0] * 20)
            assert list(info.keys) == batch["__key__"]
            assert info.shapes["image"] == tuple(batch["image"].shape)
            assert info.shapes["text"] == tuple(batch["text"].shape)
            if step == 1:
                loader.set_weights({"small": 3})


def test_ranks_know_the_sources_of_their_own_rows(folders: dict[str, list[str]], tmp_path: Path) -> None:
    for rank in range(3):
        order = Order(rank=rank, world_size=3, groups=2)
        with make(folders, tmp_path / "cache", order=order, batch_size=7) as loader:
            for batch in loader:
                assert loader.info.source.tolist() == by_folder(batch)


def test_a_batch_that_is_still_held_is_found_by_its_tensors(
    folders: dict[str, list[str]], tmp_path: Path
) -> None:
    with make(folders, tmp_path / "cache", output="tuple") as loader:
        held = list(loader)
        for step, batch in enumerate(held):
            assert loader.info_of(batch).step == step
            assert loader.info_of(batch).source.tolist() == by_folder(batch[-1])
        with pytest.raises(OptionError, match="as this loader yielded it"):
            loader.info_of((held[0][0].clone(), held[0][1].clone()))


def test_a_part_of_a_batch_has_the_sources_of_its_rows(folders: dict[str, list[str]], tmp_path: Path) -> None:
    with make(folders, tmp_path / "cache", batches=Batches(microbatch=6)) as loader:
        batch = next(iter(loader))
        for part in loader.microbatches(batch):
            assert loader.info.source[part.rows].tolist() == by_folder(part)


def test_tokens_are_counted_without_padding(folders: dict[str, list[str]], tmp_path: Path) -> None:
    longest = Batches(text_padding="longest", text_pad_multiple=1)
    with make(folders, tmp_path / "cache", batches=longest) as loader:
        for batch in loader:
            assert loader.info.tokens == {"text": int(batch["text_valid"].sum())}
    with make(folders, tmp_path / "cache") as loader:
        batch = next(iter(loader))
        assert loader.info.tokens == {"text": batch["text"].numel()}


def test_values_of_your_own_have_sources_too(folders: dict[str, list[str]], tmp_path: Path) -> None:
    options = {"map_sample": lambda sample: {"size": len(sample["jpg"])}, "num_workers": 0}
    with make(folders, tmp_path / "cache", **options) as loader:
        for batch in loader:
            assert loader.info.source.tolist() == by_folder(batch)


def test_one_source_is_named_and_its_rows_are_its_own(folders: dict[str, list[str]], tmp_path: Path) -> None:
    options = {"batch_size": 16, "num_workers": 0, "cache_dir": tmp_path / "cache"}
    with streamload.make_loader(folders["small"], words, **options) as loader:
        with pytest.raises(OptionError, match="none was yielded yet"):
            _ = loader.info
        next(iter(loader))
        assert loader.info.source.tolist() == [0] * 16
        assert len(loader.info.sources) == 1
        with pytest.raises(OptionError, match="with_keys=True"):
            _ = loader.info.keys
