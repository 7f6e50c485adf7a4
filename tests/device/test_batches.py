"""Batches on a device: bytes over the bus, normalised there to what a worker would have made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload import Patches, Workers
from streamload.device import feed_for
from streamload.ipc import own_empty
from streamload.shards.samples import Sample
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from streamload.transforms.plan import OPENAI
from tests.support import flat
from tests.support.photographs import clip_examples


def batch(path: Path, *, as_bytes: bool) -> dict[str, Any]:
    """The values of a shard's samples."""
    batch = clip_examples(as_bytes).batch_factory()(5, own_empty)
    for seed, (key, members) in enumerate(read_oracle(path)):
        sample = Sample(key, "", {name: memoryview(data) for name, data in members.items()})
        batch.add(batch.parse(sample, seed))
    return batch.finish()


def test_bytes_that_are_normalised_on_the_device_are_what_a_worker_normalises(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [4], seed=41)
    in_worker, as_bytes = batch(path, as_bytes=False), batch(path, as_bytes=True)
    assert as_bytes["image"].dtype == torch.uint8
    assert as_bytes["image"].shape == (4, 3, 224, 224)
    on_device = feed_for(torch.device("cpu"), OPENAI).send(as_bytes)()
    assert on_device["text"] == in_worker["text"]
    torch.testing.assert_close(on_device["image"], in_worker["image"], rtol=0, atol=1e-5)


def test_without_a_device_nothing_is_moved(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [2], seed=42)
    values = batch(path, as_bytes=True)
    assert feed_for(None, OPENAI).send(values)() is values


def test_a_loader_puts_its_batches_on_the_device(tmp_path: Path) -> None:
    """The meta device takes any tensor and needs no hardware."""
    paths = [str(path) for path in write_shards(tmp_path / "data", [10], seed=43)]
    with streamload.make_loader(
        paths,
        lambda texts: torch.zeros(len(texts), 7, dtype=torch.int64),
        batch_size=5,
        num_workers=1,
        workers=Workers(multiprocessing_context="fork"),
        device="meta",
        cache_dir=tmp_path / "cache",
        cache_size="1GB",
    ) as loader:
        batches = list(loader)
    assert len(batches) == 2
    for images, ids in batches:
        assert (images.device.type, images.dtype, images.shape) == ("meta", torch.float32, (5, 3, 224, 224))
        assert (ids.device.type, ids.shape) == ("meta", (5, 7))


def test_auto_is_this_processs_accelerator_or_host_memory(tmp_path: Path) -> None:
    paths = [str(path) for path in write_shards(tmp_path / "data", [10], seed=45)]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    expected = "cpu" if accelerator is None else accelerator.type
    options = {"num_workers": 1, "cache_dir": tmp_path / "cache", "cache_size": "1GB"}
    with flat.make_loader(paths, batch_size=5, device="auto", **options) as loader:
        assert loader.options.device == "auto"  # until it is used
        assert {images.device for images, _ in loader} == {loader.device}
        assert loader.device.type == expected


@pytest.mark.parametrize(
    "options",
    [{"dtype": "uint8"}, {"preprocess": lambda image: torch.zeros(3, 224, 224, dtype=torch.uint8)}],
)
def test_levels_that_were_asked_for_stay_levels_on_the_device(
    options: dict[str, Any], tmp_path: Path
) -> None:
    paths = [str(path) for path in write_shards(tmp_path / "data", [10], seed=44)]
    options = {"num_workers": 0, "cache_dir": tmp_path / "cache", "cache_size": "1GB", **options}
    with flat.make_loader(paths, batch_size=5, device="meta", **options) as loader:
        batches = list(loader)
    assert len(batches) == 2
    for images, _ in batches:
        assert (images.device.type, images.dtype, images.shape) == ("meta", torch.uint8, (5, 3, 224, 224))


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_patches_that_are_normalised_on_the_device_are_what_a_worker_normalises(
    device: str, tmp_path: Path
) -> None:
    sides = ShardOptions(image_side=(8, 40))
    paths = [str(path) for path in write_shards(tmp_path / "data", [10], seed=46, options=sides)]
    options: dict[str, Any] = {"batch_size": 5, "num_workers": 1, "output": "dict", "cache_size": "1GB"}
    options |= {"patches": Patches(8, seq_lens=(4, 16)), "cache_dir": tmp_path / "cache"}
    with flat.make_loader(paths, **options) as loader:
        in_worker = [batch["image"] for batch in loader]
    with flat.make_loader(paths, device=device, **options) as loader:
        on_device = [batch["image"] for batch in loader]
        assert {values["patches"].device for values in on_device} == {loader.device}
    assert len(on_device) == len(in_worker) == 2
    for values, expected in zip(on_device, in_worker, strict=True):
        assert values.keys() == expected.keys()
        assert values["patches"].dtype == torch.float32
        for name, tensor in expected.items():
            torch.testing.assert_close(
                torch.as_tensor(values[name]).cpu(), torch.as_tensor(tensor), rtol=0, atol=1e-5
            )
