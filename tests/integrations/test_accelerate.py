"""Accelerate's own Accelerator on a loader: it is used as it is, and its epochs end when they end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch.utils.data import DataLoader

import streamload
from streamload.testing.shards import write_shards
from tests.support import flat

COUNTS = [12, 11]


@pytest.fixture
def accelerator() -> Iterator[accelerate.Accelerator]:
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return [str(path) for path in write_shards(tmp_path / "data", COUNTS, seed=3)]


def make(paths: list[str], tmp_path: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 4, "cache_dir": tmp_path / "cache", "cache_size": "1GB", "with_keys": True}
    return flat.make_loader(paths, **{**defaults, **options})


def keys_of(batches: Any) -> list[str]:
    return [key for _, _, origin in batches for key in origin["__key__"]]


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 0, "num_samples": 20}])
def test_prepare_leaves_a_loader_as_it_is_and_learns_where_its_epochs_end(
    options: dict[str, Any], paths: list[str], tmp_path: Path, accelerator: accelerate.Accelerator
) -> None:
    model = torch.nn.Linear(1, 1)
    with make(paths, tmp_path, **options) as loader, make(paths, tmp_path, **options) as other:
        expected = [keys_of(other) for _ in range(2)]
        prepared, model = accelerator.prepare(loader, model)
        assert prepared is loader
        for epoch in range(2):
            synced, found = [], []
            for batch in prepared:
                with accelerator.accumulate(model):
                    synced.append(accelerator.sync_gradients)
                    assert batch[0].device == accelerator.device
                    found += keys_of([batch])
            assert found == expected[epoch]
            assert synced == [False, True, False, True, True]  # the fifth is the last
            assert not accelerator.gradient_state.in_dataloader


def test_save_state_and_load_state_have_the_loaders_place(
    paths: list[str], tmp_path: Path, accelerator: accelerate.Accelerator
) -> None:
    with make(paths, tmp_path, num_workers=2, num_samples=20) as loader:
        prepared = accelerator.prepare(loader)
        batches = iter(prepared)
        next(batches), next(batches)
        accelerator.save_state(str(tmp_path / "state"))
        rest = keys_of(batches)
        keys_of(prepared)
        accelerator.load_state(str(tmp_path / "state"))
        assert keys_of(prepared) == rest != []


def test_a_dataloader_goes_around_the_batches_but_not_around_the_samples(
    paths: list[str], tmp_path: Path
) -> None:
    with make(paths, tmp_path, num_workers=0, with_keys=False) as loader:
        expected = [images for images, _ in loader]
        loader.set_epoch(0)
        found = [images for images, _ in DataLoader(loader.as_dataset(), batch_size=None)]
        assert all(map(torch.equal, found, expected))
        with pytest.raises(streamload.errors.OptionError, match="num_workers=0"):
            next(iter(DataLoader(loader.as_dataset(), batch_size=None, num_workers=1)))
        with pytest.raises(TypeError, match="as_dataset"):
            next(iter(DataLoader(loader, batch_size=2, sampler=[0, 1])))
        with pytest.raises(TypeError, match=r"skip_first_batches.*load_state_dict\(\)"):
            next(iter(accelerate.skip_first_batches(loader, 1)))
        assert isinstance(loader, DataLoader)
        facts = (loader.batch_size, loader.num_workers, loader.sampler, loader.drop_last, loader.pin_memory)
        assert facts == (4, 0, None, True, False)


def test_skipping_batches_of_a_loader_with_workers_fails_naming_load_state_dict(
    paths: list[str], tmp_path: Path, accelerator: accelerate.Accelerator
) -> None:
    with make(paths, tmp_path, num_workers=1) as loader:
        prepared = accelerator.prepare(loader)
        with pytest.raises(TypeError, match=r"load_state_dict\(\)"):
            next(iter(accelerator.skip_first_batches(prepared, 1)))
