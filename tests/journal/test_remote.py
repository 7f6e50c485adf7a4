"""Steps whose shards are elsewhere are made again from ranges of them, once their indexes are here."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

import streamload
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.support import flat

COUNTS, BATCH, STEPS = (60, 50, 55, 65, 70, 60), 8, 40
PAYLOADS = ShardOptions(image_side=(250, 330))


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "data", COUNTS, seed=5, options=PAYLOADS)
    with ShardServer(tmp_path / "data") as server:
        yield server


def pixels(image: Image.Image) -> torch.Tensor:
    """A digest of the pixels, and a random number."""
    return torch.tensor([float(zlib.crc32(image.tobytes()) % (1 << 20)), random.random()])


def loader_of(origin: ShardServer, tmp_path: Path, cache: str) -> streamload.Loader:
    return flat.make_loader(
        f"{origin.url}/{{00000..00005}}.tar",
        preprocess=pixels,
        batch_size=BATCH,
        num_workers=0,
        num_batches=STEPS,
        shuffle=100,
        seed=3,
        output="dict",
        with_keys=True,
        order=streamload.Order(journal=tmp_path / "journal"),
        cache_dir=tmp_path / cache,
    )


def sent(origin: ShardServer) -> int:
    return sum(request.sent for request in origin.log)


def test_a_step_takes_the_bytes_of_its_rows(origin: ShardServer, tmp_path: Path) -> None:
    sizes = {
        key: sum(map(len, members.values()))
        for path in sorted((tmp_path / "data").glob("*.tar"))
        for key, members in read_oracle(path)
    }
    with loader_of(origin, tmp_path, "first") as loader:
        batches = list(loader)

    steps = random.Random(1).sample(range(STEPS), 6)
    with loader_of(origin, tmp_path, "second") as loader:
        for number, step in enumerate(steps):
            before = sent(origin)
            made = next(loader.at(step))
            taken = sent(origin) - before
            assert made["__key__"] == batches[step]["__key__"]
            assert torch.equal(made["image"], batches[step]["image"])
            rows = sum(sizes[key] for key in made["__key__"])
            if number:  # the first has made the indexes
                assert 0 < taken <= 1.2 * rows, (taken, rows)
    with loader_of(origin, tmp_path, "first") as loader:  # the cache has whole shards
        before = sent(origin)
        next(loader.at(steps[0]))
        assert sent(origin) == before


def test_an_origin_without_ranges_gives_whole_shards(origin: ShardServer, tmp_path: Path) -> None:
    with loader_of(origin, tmp_path, "first") as loader:
        batches = list(loader)
    origin.misbehave("*", Fault(ignore_range=True))
    with loader_of(origin, tmp_path, "second") as loader:
        for step in (7, 30):
            assert next(loader.at(step))["__key__"] == batches[step]["__key__"]
