"""What bucketing meets in real data: EXIF, wrong sizes, prepared shards, captions longer than anything."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import streamload
from streamload import Batches, Cache, Images, Order, Patches
from streamload.shards import samples
from tests.support.commands import run_forked

LENGTH, MOST = 48, 120


def tokenize(texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """A token a letter, cut at LENGTH."""
    ids = torch.zeros(len(texts), LENGTH, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = 1
    return {"input_ids": ids, "attention_mask": ids.clone()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of many sizes and formats, some with an EXIF rotation; captions of up to 10,000 letters."""
    directory = tmp_path_factory.mktemp("hostile") / "data"
    directory.mkdir()
    draw = np.random.default_rng(3)
    for shard in range(4):
        with tarfile.open(directory / f"{shard}.tar", "w") as tar:
            for number in range(32):
                width, height = draw.integers(8, 90, 2).tolist()
                image, file = Image.new("RGB", (width, height), (number, shard, 9)), io.BytesIO()
                exif = Image.Exif()
                if number % 4 == 1:
                    exif[0x0112] = 6  # turned by a quarter
                kind = ("JPEG", "PNG", "WEBP")[number % 3]
                image.save(file, kind, exif=exif)
                letters = 10_000 if number == 5 else int(draw.integers(1, 30))
                for name, payload in (("jpg", file.getvalue()), ("txt", b"a" * letters)):
                    info = tarfile.TarInfo(f"{shard}{number:02d}.{name}")
                    info.size = len(payload)
                    tar.addfile(info, io.BytesIO(payload))
    return directory


def loaders(data: Path, cache: Path, ranks: int = 2, prepare: str | None = None, **batches: Any) -> list[Any]:
    patches = Patches(8, seq_lens=(24, 60), max_ratio=1.0)
    given = {"text_padding": "longest", "text_pad_multiple": 4, "bucketing": 64, **batches}
    return [
        streamload.make_loader(
            str(data), tokenize, batch_size=16 // ranks, num_workers=0, seed=2, output="dict",
            cache_dir=cache, cache_size="1GB", images=Images(patches=patches, prepare=prepare),
            order=Order(rank=rank, world_size=ranks, groups=1), batches=Batches(with_keys=True, **given),
            cache=Cache(),
        )
        for rank in range(ranks)
    ]  # fmt: skip


def steps_of(made: list[Any]) -> list[tuple[list[list[str]], list[Any]]]:
    """Of each step the keys by rank, and the shapes of the parts, the same on all ranks."""
    found = []
    for batches in zip(*made, strict=True):
        parts = [
            [(*part["text"].shape, part["image"]["patches"].shape[1]) for part in loader.microbatches(batch)]
            for loader, batch in zip(made, batches, strict=True)
        ]
        assert all(own == parts[0] for own in parts), parts
        assert len({batch["text"].shape for batch in batches}) == 1
        found.append(([batch["__key__"] for batch in batches], parts[0]))
    for loader in made:
        loader.close()
    return found


def keys_in(steps: list[tuple[list[list[str]], list[Any]]]) -> list[str]:
    return [key for keys, _ in steps for own in keys for key in own]


@pytest.mark.parametrize("prepare", ["raw", "raw-24"])
def test_prepared_and_original_shards_are_planned_alike(data: Path, tmp_path: Path, prepare: str) -> None:
    expected = steps_of(loaders(data, tmp_path / "plain", prepare=prepare))
    shards = [str(path) for path in sorted(data.iterdir())]
    command = ["warm", *shards, "--prepare", prepare]
    run_forked(
        [*command, "--cache-dir", str(tmp_path / "prepared"), "--cache-size", "1GB"]
    ).check_returncode()
    assert steps_of(loaders(data, tmp_path / "prepared", prepare=prepare)) == expected
    keys = keys_in(expected)
    assert len(keys) == len(set(keys)) == 128


@pytest.mark.parametrize("size", [(0, 0), (1, 60_000), (60_000, 60_000)])
def test_sizes_in_the_index_that_are_missing_or_wrong_lose_no_sample_and_no_equal_step(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    class Lying(samples.ImageLook):
        def look(self, payload: memoryview) -> bool:
            done = super().look(payload)
            self.size = size
            return done

    monkeypatch.setattr(samples, "ImageLook", Lying)
    made = loaders(data, tmp_path, microbatch=4)
    keys, rows = [], []
    for batches in zip(*made, strict=True):
        assert len({batch["text"].shape for batch in batches}) == 1
        rows.append([len(batch["__key__"]) for batch in batches])
        keys += [key for batch in batches for key in batch["__key__"]]
    for loader in made:
        loader.close()
    assert rows == [[8, 8]] * 8
    assert len(keys) == len(set(keys)) == 128


@pytest.mark.parametrize("bucketing", ["step", 64])
def test_a_caption_longer_than_anything_is_cut_and_its_part_stays_within_max_tokens(
    data: Path, tmp_path: Path, bucketing: Any
) -> None:
    steps = steps_of(loaders(data, tmp_path, bucketing=bucketing, max_tokens=MOST))
    keys = keys_in(steps)
    assert len(keys) == len(set(keys)) == 128
    shapes = [shape for _, parts in steps for shape in parts]
    assert max(rows * (tokens + patches) for rows, tokens, patches in shapes) <= MOST
    assert max(tokens for _, tokens, _ in shapes) == LENGTH
    assert sum(rows for rows, _, _ in shapes) == 64


def test_a_run_has_few_shapes(data: Path, tmp_path: Path) -> None:
    shapes = set()
    for seed in range(3):
        steps = steps_of(loaders(data, tmp_path / str(seed), bucketing=32, microbatch=4))
        shapes |= set(itertools.chain.from_iterable(parts for _, parts in steps))
    assert len(shapes) <= 32
