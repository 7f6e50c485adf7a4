"""Sizes of parts on a CUDA device, by its own allocator, and steps that begin again where it has no memory.

For a GPU with 2 GiB, in at most three minutes: python -m pytest -q tests/device/test_microbatches.py
The tests of attempts haven't run on one yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import streamload
from streamload import Batches
from streamload.device import DeviceMemory
from streamload.testing.shards import ShardOptions, write_shards

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ROWS = 128


def tokenize(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[1 + sum(map(ord, text)) % 900] * 16 for text in texts])


class Tower(nn.Module):
    """A transformer over the patches of images."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 256, 16, 16)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(self.patches(images).flatten(2).transpose(1, 2)).mean(1)


class Training:
    """Of a tower towards embeddings of the captions."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tower, self.texts = Tower().cuda(), nn.EmbeddingBag(1000, 256).cuda()
        parameters = [*self.tower.parameters(), *self.texts.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def compute(self, images: torch.Tensor, ids: torch.Tensor, fraction: float) -> None:
        loss = nn.functional.mse_loss(self.tower(images), self.texts(ids))
        (loss * fraction).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def peak_of(training: Training, images: torch.Tensor, ids: torch.Tensor, rows: int) -> int:
    """What the device has at most in a step with parts of so many rows."""
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        training.compute(images[:rows], ids[:rows], 1.0)
    training.update()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("limit_mb", [700, 1400])
def test_parts_stay_within_the_limit_and_use_most_of_it(
    limit_mb: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path / "data", [ROWS], options=ShardOptions(image_side=(24, 40)))
    limit = limit_mb << 20
    monkeypatch.setattr(DeviceMemory, "limit_bytes", lambda _: limit)
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    torch.cuda.empty_cache()
    training, sizes, peaks = Training(), [], []
    with streamload.make_loader(
        str(tmp_path / "data"), tokenize, batch_size=ROWS, num_workers=2, device="cuda",
        order=streamload.Order(num_batches=12), batches=Batches(microbatch="auto"),
    ) as loader:  # fmt: skip
        for batch in loader:
            torch.cuda.reset_peak_memory_stats()
            sizes.append([])
            for part in loader.microbatches(batch):
                images, ids = part
                training.compute(images, ids, part.fraction)
                sizes[-1].append(len(ids))
                peaks.append(torch.cuda.max_memory_allocated())
            training.update()
            images, ids = batch
    assert all(sum(step) == ROWS for step in sizes)
    assert max(peaks) <= limit
    ahead = torch.empty_like(images)  # as in a training: the next batch is there, too
    fits = [rows for rows in range(4, ROWS + 1, 4) if peak_of(training, images, ids, rows) <= limit]
    del ahead
    # Room is kept for a batch ahead though one has arrived: of limits as small as these a tenth.
    assert max(sizes[2]) >= 0.7 * max(fits)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Bytes that this process can have of the device, by torch's allocator."""
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + (1400 << 20)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(limit / total)
    monkeypatch.setattr(DeviceMemory, "limit_bytes", lambda _: limit)
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def by_attempts(
    training: Training, place: Path, before_step: Callable[[int], object], autocast: bool
) -> list[list[list[int]]]:
    """Train twelve steps by attempts; the rows of the parts of each attempt of each step."""
    write_shards(place / "data", [ROWS], options=ShardOptions(image_side=(24, 40)))
    tried: list[list[list[int]]] = []
    with streamload.make_loader(
        str(place / "data"), tokenize, batch_size=ROWS, num_workers=2, device="cuda",
        order=streamload.Order(num_batches=12), batches=Batches(microbatch="auto"), cache_dir=place / "cache",
    ) as loader:  # fmt: skip
        for step, batch in enumerate(loader):
            before_step(step)
            tried.append([])
            for parts in loader.microbatches(batch).attempts(training.optimizer.zero_grad):
                tried[-1].append([])
                with parts:
                    for images, ids in parts:
                        tried[-1][-1].append(len(ids))
                        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                            training.compute(images, ids, len(ids) / ROWS)
            training.optimizer.step()
    assert all(sum(step[-1]) == ROWS for step in tried)
    return tried


def test_with_autocast_no_part_is_too_large(limited: int, tmp_path: Path) -> None:
    tried = by_attempts(Training(), tmp_path, lambda step: None, autocast=True)
    assert [len(step) for step in tried] == [1] * 12


def test_a_step_begins_again_where_something_else_takes_memory(limited: int, tmp_path: Path) -> None:
    """Seven tenths of what a step took are left: enough for halves, once the failed part is gone."""
    training, ballast, before = Training(), list[torch.Tensor](), [0]

    def take(step: int) -> None:
        training.optimizer.zero_grad()
        if step == 7:
            torch.cuda.reset_peak_memory_stats()
            before[0] = torch.cuda.memory_allocated()
        elif step == 8:
            left = 7 * (torch.cuda.max_memory_allocated() - before[0]) // 10
            torch.cuda.empty_cache()
            size = limited - torch.cuda.memory_allocated() - left
            ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))

    tried = by_attempts(training, tmp_path, take, autocast=False)
    assert [len(step) for step in tried] == [1] * 8 + [2] + [1] * 3
    first, second = tried[8]
    assert max(second) <= first[-1] // 2
    assert all(max(step[0]) <= first[-1] // 2 for step in tried[9:])
    for parameter in training.tower.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
