"""Batches on a device with streams: copied without waiting, whole whenever their memory is used again.

These need an accelerator that has streams and pinned memory (a GPU, or a simulated one).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamload.device import feed_for
from streamload.device.streams import Streamed
from streamload.testing.shards import write_shards
from streamload.transforms.normalise import normalise_batch
from streamload.transforms.plan import OPENAI
from tests.support import flat

DEVICE = torch.accelerator.current_accelerator(check_available=True)
pytestmark = pytest.mark.skipif(
    DEVICE is None or not isinstance(feed_for(DEVICE), Streamed), reason="no accelerator with streams"
)
SHAPE = (16, 3, 64, 64)


@pytest.fixture
def feed(request: pytest.FixtureRequest) -> Iterator[Streamed]:
    feed = feed_for(DEVICE, getattr(request, "param", None))
    assert isinstance(feed, Streamed)
    yield feed
    feed.close()


def levels(seed: int) -> torch.Tensor:
    """uint8[16, 3, 64, 64] in channels-last memory, others for each seed."""
    drawn = torch.randint(0, 256, SHAPE, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return drawn.contiguous(memory_format=torch.channels_last)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """One number on the tensor's device that depends on each element and its place."""
    places = torch.arange(tensor.numel(), device=tensor.device) % 65_521
    return (tensor.reshape(-1).long() * places).sum()


def test_batches_are_whole_whatever_is_sent_behind_them(feed: Streamed) -> None:
    """Nobody waits, and each one's references are dropped while the device may still be reading from it."""
    count = 40
    expected = [int(digest(levels(seed))) for seed in range(count)]
    copies = []
    ahead: Callable[[], Any] = feed.send({"image": levels(0)})
    for seed in range(1, count + 1):
        batch = ahead()
        ahead = feed.send({"image": levels(seed)})
        copies.append(batch.pop("image").clone())
    assert [int(digest(copy)) for copy in copies] == expected


def test_a_batch_is_whole_when_it_is_first_looked_at(feed: Streamed) -> None:
    for seed in range(10):
        assert int(digest(feed.send({"image": levels(seed)})()["image"])) == int(digest(levels(seed)))


@pytest.mark.parametrize("feed", [OPENAI], indirect=True)
def test_images_are_normalised_before_they_are_seen(feed: Streamed) -> None:
    for seed in range(10):
        images = feed.send({"image": levels(seed)})()["image"]
        assert images.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(
            images.clone().cpu(), normalise_batch(levels(seed), *OPENAI), rtol=0, atol=1e-6
        )


def test_a_batch_may_be_of_any_tensors(feed: Streamed) -> None:
    values = {
        "image": levels(1)[:, :, ::2],
        "ids": torch.arange(77 * 16).view(16, 77),
        "mask": torch.ones(16, 3, dtype=torch.bool),
        "half": torch.rand(5, 7).half().t(),
        "number": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
        "weight": torch.ones(3, requires_grad=True),
        "__key__": ["a", "b"],
    }
    for _ in range(4):
        moved = feed.send(values)()
        assert moved["__key__"] == ["a", "b"]
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                assert (moved[name].device.type, moved[name].dtype) == (DEVICE.type, value.dtype), name
                assert torch.equal(moved[name].detach().cpu(), value.detach()), name


def test_what_cannot_be_moved_is_an_error_where_it_is_asked_for(feed: Streamed) -> None:
    broken = feed_for(DEVICE, OPENAI)
    with contextlib.closing(broken):
        ready = broken.send({"image": torch.zeros(2, 5, 4, 4, dtype=torch.uint8)})
        with pytest.raises(RuntimeError, match="must match"):
            ready()
        assert torch.equal(broken.send({"text": torch.ones(1)})()["text"].cpu(), torch.ones(1))


def test_a_closed_feed_leaves_nothing(no_leaks: Callable[..., Any]) -> None:
    feed = feed_for(DEVICE)
    feed.send({"image": levels(1)})()
    feed.close()
    with no_leaks():
        feed = feed_for(DEVICE)
        for seed in range(3):
            feed.send({"image": levels(seed)})
        feed.close()
        feed.close()


def test_pinned_memory_is_where_a_batch_goes_that_others_copy() -> None:
    feed = feed_for(None, is_pinned=True)
    with contextlib.closing(feed):
        batches = [feed.send({"image": levels(seed), "__key__": ["a"]})() for seed in range(5)]
        for seed, batch in enumerate(batches):  # all of them are kept, and none is written over
            assert batch["image"].is_pinned()
            assert batch["image"].pin_memory() is batch["image"]
            assert torch.equal(batch["image"], levels(seed))
            assert batch["__key__"] == ["a"]


@pytest.mark.skipif(DEVICE is None or DEVICE.type != "cuda", reason="it fills the memory of a CUDA device")
def test_a_batch_without_room_ahead_comes_when_it_is_asked_for(
    feed: Streamed, caplog: pytest.LogCaptureFixture
) -> None:
    large = torch.arange(1 << 24).repeat(8)  # 1 GiB
    torch.cuda.empty_cache()
    filler = torch.empty(torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device=DEVICE)
    sent = feed.send({"ids": large})
    feed._thread.submit(int).result()  # the copy has failed
    del filler
    assert torch.equal(sent()["ids"].cpu(), large)
    for seed in range(5):
        assert int(digest(feed.send({"image": levels(seed)})()["image"])) == int(digest(levels(seed)))
    assert len([record for record in caplog.records if "memory is full" in record.message]) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_gives_a_device_what_it_gives_the_processor(num_workers: int, tmp_path: Path) -> None:
    paths = [str(path) for path in write_shards(tmp_path / "data", [30, 25, 20], seed=43)]

    def batches(device: torch.device | None) -> list[Any]:
        options = {"cache_dir": tmp_path / "cache", "cache_size": "1GB", "num_workers": num_workers}
        with flat.make_loader(
            paths, batch_size=5, device=device, with_keys=True, output="dict", **options
        ) as loader:
            return [
                {**batch, "image": batch["image"].cpu(), "state": loader.state_dict()}
                for _ in range(2)
                for batch in loader
            ]

    expected, found = batches(None), batches(DEVICE)
    assert len(found) == 30
    for one, other in zip(found, expected, strict=True):
        assert (one["__key__"], one["text"]) == (other["__key__"], other["text"])
        assert one["state"] == other["state"]
        torch.testing.assert_close(one["image"], other["image"], rtol=0, atol=1e-5)
