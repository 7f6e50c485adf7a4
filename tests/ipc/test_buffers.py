"""Slots: a batch stays as it is for as long as anything of it is held, and its memory is used again after."""

from __future__ import annotations

import gc
import os
import pickle
import zlib
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload import Workers
from streamload.ipc.buffers import BufferPool
from streamload.metrics import Counters
from streamload.testing.shards import write_shards
from tests.support import flat

NUMBERS = 5000


def numbers_of(key: str) -> torch.Tensor:
    return torch.full((NUMBERS,), zlib.crc32(key.encode()) % 100_003, dtype=torch.int32)


def as_numbers(sample: dict[str, Any]) -> dict[str, Any]:
    return {"numbers": numbers_of(sample["__key__"]), "length": len(sample["__key__"])}


def is_intact(numbers: torch.Tensor, keys: list[str]) -> bool:
    return torch.equal(numbers, torch.stack([numbers_of(key) for key in keys]))


def mapped_regions() -> set[str]:
    """The parts of slots' files that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[2] + line.split()[4] for line in lines if "/memfd:streamload" in line}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("slots"), [60] * 5, seed=8)[0].parent


@pytest.fixture(params=["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def loader(directory: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[streamload.Loader]:
    options = {"batch_size": 4, "num_workers": 2, "shuffle": 50, "map_sample": as_numbers, "with_keys": True}
    urls = str(directory / "{00000..00004}.tar")
    with flat.make_loader(
        urls,
        cache_dir=tmp_path,
        cache_size="1GB",
        workers=Workers(multiprocessing_context=request.param),
        **options,
    ) as loader:
        yield loader


def test_batches_that_are_all_kept_stay_as_they_are(loader: streamload.Loader) -> None:
    batches = list(loader)
    assert len(batches) == 75
    for batch in batches:
        assert is_intact(batch["numbers"], batch["__key__"])
        assert batch["length"].tolist() == [len(key) for key in batch["__key__"]]
    assert loader.stats().fresh_tensors > 0  # more than there are slots


@pytest.mark.parametrize(
    "part", [lambda t: t[2, 7:], lambda t: t.numpy()[2, 7:], lambda t: t.view(-1)[10007:15000]]
)
@pytest.mark.parametrize("loader", ["fork"], indirect=True)
def test_a_part_of_a_batch_stays_as_it_is_when_the_batch_is_gone(
    loader: streamload.Loader, part: Any
) -> None:
    held = []
    for batch in loader:
        held.append((part(batch["numbers"]), batch["__key__"][2]))
        del batch
    assert len(held) == 75
    for numbers, key in held:
        assert set(numbers.tolist()) == {int(numbers_of(key)[0])}


def test_memory_is_used_again_once_nobody_has_it(loader: streamload.Loader) -> None:
    before, batches = mapped_regions(), 0
    for _ in range(3):
        for batch in loader:
            assert is_intact(batch["numbers"], batch["__key__"])
            batches += 1
    assert batches == 225
    regions = mapped_regions() - before
    assert len(regions) <= 2 * 2 * 5  # workers, tensors of a batch, batches
    assert loader.stats().fresh_tensors == 0


@pytest.mark.deep
@pytest.mark.parametrize("loader", ["fork"], indirect=True)
def test_slots_that_were_all_held_are_used_again_when_they_are_let_go(loader: streamload.Loader) -> None:
    kept = list(loader)
    fresh = loader.stats().fresh_tensors
    assert fresh > 0
    kept.clear()
    gc.collect()
    for batch in loader:
        assert is_intact(batch["numbers"], batch["__key__"])
    assert loader.stats().fresh_tensors == fresh


@pytest.mark.deep
@pytest.mark.parametrize("loader", ["fork"], indirect=True)
def test_a_process_forked_from_the_rank_lets_nothing_go(loader: streamload.Loader) -> None:
    batches = iter(loader)
    first = next(batches)
    child = os.fork()
    if child == 0:
        del first, batches
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    for batch in batches:
        assert is_intact(batch["numbers"], batch["__key__"])
    assert is_intact(first["numbers"], first["__key__"])


@pytest.mark.parametrize("loader", ["fork"], indirect=True)
def test_batches_outlive_their_loader(loader: streamload.Loader) -> None:
    batches = iter(loader)
    kept = [next(batches) for _ in range(6)]
    del batches
    loader.close()
    for batch in kept:
        assert is_intact(batch["numbers"], batch["__key__"])
        batch["numbers"].zero_()  # it is the user's own to write to


def sent(slots: BufferPool, counts: Counters, **values: Any) -> dict[str, Any]:
    """What comes out at the other end."""
    received: dict[str, Any] = pickle.loads(ForkingPickler.dumps(slots.hand_over(values, counts)))
    return received


def test_a_tensor_arrives_with_its_strides_its_type_and_what_is_around_it_unseen() -> None:
    slots, counts = BufferPool(batches=2), Counters()
    taken = slots.empty((3, 4, 5), torch.float32)
    assert taken is not None
    taken.copy_(torch.arange(60).view(3, 4, 5))
    part = taken.permute(2, 0, 1)[1:4, :2]
    got = sent(slots, counts, part=part, text=["a", "b"], plain=torch.arange(3), empty=torch.zeros(0, 3))
    assert torch.equal(got["part"], part)
    assert (got["part"].stride(), got["part"].dtype) == (part.stride(), torch.float32)
    assert got["text"] == ["a", "b"]
    assert got["plain"].tolist() == [0, 1, 2]
    assert got["empty"].shape == (0, 3)
    assert counts.snapshot().fresh_tensors == 0


def test_an_empty_batch_leaves_its_memory_to_those_that_come_after_it() -> None:
    slots, counts = BufferPool(batches=1), Counters()
    for count in (4, 0, 4, 0, 3):  # of an evaluation, where none of some batches' samples can be used
        taken = slots.empty((4, 1000), torch.uint8)
        assert taken is not None
        taken.fill_(count)
        image = sent(slots, counts, image=taken[:count])["image"]
        assert image.shape == (count, 1000)
        assert (image == count).all()
        del image


def test_a_second_view_of_a_slot_for_which_there_is_no_other_leaves_the_slot_to_later_batches() -> None:
    slots, counts = BufferPool(batches=1), Counters()
    held = []
    for number in range(3):
        taken = slots.empty((1000,), torch.uint8)
        assert taken is not None
        taken.fill_(number)
        batch = sent(slots, counts, image=taken, crop=taken[10:])
        assert (batch["image"] == number).all()
        held.append(batch.pop("crop"))
        del batch
    assert [crop.unique().tolist() for crop in held] == [[0], [1], [2]]
    assert counts.snapshot().fresh_tensors == 2


def test_what_is_taken_and_not_handed_over_is_free_again() -> None:
    slots, counts = BufferPool(batches=1), Counters()
    taken = slots.empty((1000,), torch.uint8)
    assert taken is not None
    address = taken.data_ptr()
    sent(slots, counts)
    again = slots.empty((1000,), torch.uint8)
    assert again is not None
    assert again.data_ptr() == address
    slots.take_back()
    once_more = slots.empty((1000,), torch.uint8)
    assert once_more is not None
    assert once_more.data_ptr() == address


def test_memory_that_is_used_again_is_the_same_tensor_as_long_as_it_has_the_same_form() -> None:
    slots = BufferPool(2)
    levels = slots.empty((4, 6), torch.uint8)
    assert levels is not None
    slots.take_back()
    assert slots.empty((4, 6), torch.uint8) is levels
    slots.take_back()
    for shape, dtype in (((6, 4), torch.uint8), ((4, 5), torch.uint8), ((3,), torch.int64)):
        other = slots.empty(shape, dtype)
        assert other is not None
        assert (tuple(other.shape), other.dtype, other.data_ptr()) == (shape, dtype, levels.data_ptr())
        slots.take_back()


def test_two_values_of_one_memory_are_let_go_one_by_one() -> None:
    slots, counts = BufferPool(batches=3), Counters()
    taken = slots.empty((1000,), torch.uint8)
    assert taken is not None
    taken.fill_(7)
    got = sent(slots, counts, one=taken, other=taken[10:])
    del got["one"]
    for _ in range(5):
        more = slots.empty((1000,), torch.uint8)
        if more is not None:
            more.zero_()
    assert (got["other"] == 7).all()


def test_what_is_kept_is_bounded_by_the_largest_batches() -> None:
    slots, counts = BufferPool(batches=2), Counters()
    held = [sent(slots, counts, x=torch.zeros(100_000)) for _ in range(4)]
    assert counts.snapshot().fresh_tensors == 2
    held.clear()
    gc.collect()
    # A free slot that is too small makes room for a larger one.
    for size in (120_000, 150_000, 200_000, 100_000):
        got = sent(slots, counts, x=torch.full((size,), float(size)))
        assert (got["x"] == size).all()
        del got
    assert counts.snapshot().fresh_tensors == 2


def test_tensors_of_other_kinds_travel_as_torch_sends_them() -> None:
    slots, counts = BufferPool(batches=2), Counters()
    needing, parameter = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))
    got = sent(slots, counts, needing=needing, parameter=parameter)
    assert torch.equal(got["needing"], needing)
    assert got["needing"].requires_grad
    assert isinstance(got["parameter"], torch.nn.Parameter)
