"""Features of a module on an accelerator: computed once, put back where the module is, never stale.

These need an accelerator (a GPU).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import streamload
from streamload import CacheLevel, Features, cache_info
from streamload.derived.store import row_store
from streamload.errors import FeatureNotCacheable
from streamload.testing.shards import ShardOptions, write_shards

DEVICE = torch.accelerator.current_accelerator(check_available=True)
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no accelerator")
KEYS = [f"key {at}" for at in range(8)]


class Net(nn.Module):
    """Convolution and normalisation, as towers have them."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Dropout(dropout), nn.Flatten())
        self.head = nn.Linear(8 * 4 * 4, 16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


Cached = streamload.cache_module(Net)
CachedInMemory = streamload.cache_module(cache_level=CacheLevel.MEMORY)(Net)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STREAMLOAD_CACHE_SIZE", "1GB")
    row_store.close_stores()
    yield
    row_store.close_stores()


def images(seed: int = 0) -> torch.Tensor:
    return torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def ready(cls: type[nn.Module], **options: float) -> nn.Module:
    """On the device, with the same weights each time."""
    torch.manual_seed(0)
    return cls(**options).eval().to(DEVICE)


@pytest.mark.parametrize("cls", [Cached, CachedInMemory])
def test_rows_come_back_to_the_device(cls: type[nn.Module]) -> None:
    module = ready(cls)
    with torch.no_grad():
        known = ready(Net)(images())
    first = module(images(), cache_key=KEYS)
    second = module(images(), cache_key=KEYS)
    assert (first.device.type, second.device.type) == (DEVICE.type, DEVICE.type)
    torch.testing.assert_close(first, known, rtol=1e-4, atol=1e-5)
    assert torch.equal(first, second)
    assert cache_info(module).rows_computed == 8


def test_hits_and_misses_mix_on_the_device() -> None:
    module = ready(Cached)
    some = module(images()[2:5], cache_key=KEYS[2:5])
    both = module(images(), cache_key=KEYS)
    assert cache_info(module).rows_computed == 8
    assert torch.equal(both[2:5], some)


def test_a_weight_changed_on_the_device_is_another_row() -> None:
    module = ready(Cached)
    first = module(images(), cache_key=KEYS)
    with torch.no_grad():
        module.head.bias += 1
    torch.testing.assert_close(module(images(), cache_key=KEYS), first + 1, rtol=1e-4, atol=1e-4)
    module.head.weight.data.mul_(2)  # unseen by torch's version counter
    changed = module(images(), cache_key=[f"{key} again" for key in KEYS])
    with torch.no_grad():
        torch.testing.assert_close(changed, Net.forward(module, images()), rtol=1e-4, atol=1e-4)
    fresh = ready(Cached)
    with torch.no_grad():
        fresh.head.bias += 1
        fresh.head.weight.mul_(2)
    assert torch.equal(fresh(images(), cache_key=[f"{key} again" for key in KEYS]), changed)


def test_autocast_is_another_row() -> None:
    module = ready(Cached)
    plain = module(images(), cache_key=KEYS)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        half = module(images(), cache_key=KEYS)
        again = module(images(), cache_key=KEYS)
    assert (plain.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(half, again)
    assert cache_info(module).rows_computed == 16


def test_chance_on_the_device_is_refused() -> None:
    module = ready(Cached, dropout=0.5)
    module.train()
    with pytest.raises(FeatureNotCacheable):
        module(images(), cache_key=KEYS)

    class Noisy(Net):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) + torch.rand((), device=images.device)

    with pytest.raises(FeatureNotCacheable, match="random"):
        ready(streamload.cache_module(Noisy))(images(), cache_key=KEYS)


def test_too_little_memory_on_the_device_leaves_nothing_half_stored() -> None:
    @streamload.cache_module
    class Hungry(Net):
        room = True

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if not self.room:
                torch.empty(1 << 50, dtype=torch.uint8, device=images.device)
            return super().forward(images)

    module = ready(Hungry)
    known = module(images()[:4], cache_key=KEYS[:4])
    Hungry.room = False
    try:
        with pytest.raises(RuntimeError, match=r"(?i)memory"):
            module(images(), cache_key=KEYS)
    finally:
        Hungry.room = True
    assert torch.equal(module(images(), cache_key=KEYS)[:4], known)


def small(image: Image.Image) -> torch.Tensor:
    levels = np.array(image.resize((16, 16)), dtype=np.float32)
    return torch.from_numpy(levels / 255).permute(2, 0, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_features_of_a_loader_lie_on_the_device(workers: int, tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [20, 13, 17], options=ShardOptions(image_side=(24, 40)))
    feature = Features(ready(Net), dtype=torch.float16)
    options = {"train": False, "batch_size": 8, "num_workers": workers, "device": DEVICE}
    with streamload.make_loader(
        str(tmp_path / "data"),
        None,
        preprocess=small,
        batches=streamload.Batches(features={"f": feature}),
        output="dict",
        **options,
    ) as loader:
        first, second = ([feature(batch) for batch in loader] for _ in range(2))
        stats = loader.stats()
    assert (stats.feature_rows_computed, stats.feature_rows_read) == (50, 50)
    with (
        streamload.make_loader(
            str(tmp_path / "data"), None, preprocess=small, output="dict", **options
        ) as loader,
        torch.no_grad(),
    ):
        known = [feature.module(batch["image"]).half() for batch in loader]
    for one, two, three in zip(first, second, known, strict=True):
        assert one.device.type == two.device.type == DEVICE.type
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three, rtol=1e-2, atol=1e-2)
