"""Rows of samples in columns, through a loader: found wherever and however their shards come."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from streamload import Features
from streamload.cache.tier import Tier
from streamload.cli import main
from streamload.columns import catalog
from streamload.derived.store.row_store import close_stores
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat

COUNTS = (80, 70)
SAMPLES = sum(COUNTS)
IMAGES = ShardOptions(image_side=(16, 24))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(48, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.project(nn.functional.adaptive_avg_pool2d(images, 4).flatten(1))


class Growing(nn.Module):
    """Results whose shape depends on the first image of a batch."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        width = 2 + int(images.flatten(1).sum(1)[0] * 1000) % 2
        return images.mean((2, 3))[:, :width]


def small(image: Image.Image) -> torch.Tensor:
    levels = np.array(image.resize((8, 8)), dtype=np.float32)
    return torch.from_numpy(levels / 255).permute(2, 0, 1)


def tokenize(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[len(text), sum(map(ord, text)) % 1000] for text in texts])


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.EmbeddingBag(1000, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STREAMLOAD_CACHE_SIZE", "1GB")
    monkeypatch.setenv("STREAMLOAD_CACHE", "disk")
    close_stores()
    yield
    close_stores()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "data", COUNTS, options=IMAGES)
    with ShardServer(tmp_path / "data") as server:
        yield server


def urls_of(server: ShardServer) -> list[str]:
    return [f"{server.url}/{path.name}" for path in sorted(server.root.iterdir())]


def epoch(
    urls: Any, feature: Any, epochs: int = 1, tokenizer: Any = None, **options: Any
) -> tuple[dict[str, torch.Tensor], int, int]:
    """The rows by key, and how many were read and computed."""
    defaults: dict[str, Any] = {
        "preprocess": small, "output": "dict", "with_keys": True, "batch_size": 10,
        "num_workers": 0, "train": False, "features": {"f": feature},
    }  # fmt: skip
    rows: dict[str, torch.Tensor] = {}
    with flat.make_loader(urls, tokenizer, **{**defaults, **options}) as loader:
        for _ in range(epochs):
            for batch in loader:
                rows.update(zip(batch["__key__"], feature(batch), strict=True))
        stats = loader.stats()
    close_stores()
    return rows, stats.feature_rows_read, stats.feature_rows_computed


def columns_in(home: Path) -> int:
    return sum(held.rows for held in catalog.fingerprints(home))


def test_rows_outlive_their_shards_and_are_found_under_other_urls(
    server: ShardServer, tmp_path: Path
) -> None:
    rows, read, computed = epoch(urls_of(server), Features(Net().eval()))
    assert (read, computed) == (0, SAMPLES)
    assert SAMPLES - 2 * 16 <= columns_in(tmp_path / "cache") <= SAMPLES
    epoch(urls_of(server), Features(Net().eval()))  # those that came before their shards had a name
    for path in (tmp_path / "cache" / "shards").iterdir():
        shutil.rmtree(path)  # as when they are evicted
    for path in server.root.iterdir():
        path.rename(path.with_name(f"renamed-{path.name}"))
    again, read, computed = epoch(urls_of(server), Features(Net().eval(), check=False), 2)
    assert computed <= 2 * 16
    assert read + computed == 2 * SAMPLES
    assert all(torch.equal(rows[key], again[key]) for key in rows)


@pytest.mark.parametrize("inputs", ["image", "text"])
def test_rows_of_samples_that_come_before_the_name_of_their_shard_are_stored(
    server: ShardServer, tmp_path: Path, inputs: Any
) -> None:
    module = (Net() if inputs == "image" else Embedding()).eval()
    feature = Features(module, inputs=inputs, check=False)
    server.bytes_per_second_per_connection = 200_000  # a few samples at a time
    _, _, computed = epoch(urls_of(server), feature, tokenizer=tokenize, batch_size=40)
    assert computed == SAMPLES
    assert columns_in(tmp_path / "cache") == SAMPLES


def test_rows_that_a_shard_of_few_samples_got_as_it_arrived_are_found(tmp_path: Path) -> None:
    write_shards(tmp_path / "few", [30], options=IMAGES)
    feature = Features(Net().eval(), check=False)
    with ShardServer(tmp_path / "few") as server:
        server.bytes_per_second_per_connection = 60_000
        _, _, computed = epoch(f"{server.url}/00000.tar", feature, batch_size=20)
        assert computed == 30
        _, read, computed = epoch(f"{server.url}/00000.tar", feature, batch_size=20)
    assert (read, computed) == (30, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_a_cached_shard_are_computed_once(server: ShardServer, tmp_path: Path, workers: int) -> None:
    list(flat.make_loader(urls_of(server), None, preprocess=small, train=False, batch_size=10, num_workers=0))
    rows, read, computed = epoch(urls_of(server), Features(Net().eval()), 2, num_workers=workers)
    assert (read, computed) == (SAMPLES, SAMPLES)
    assert columns_in(tmp_path / "cache") == SAMPLES
    alone, _, _ = epoch(urls_of(server), Features(Net().eval()), cache_dir=str(tmp_path / "other"))
    assert all(torch.allclose(rows[key], alone[key]) for key in rows)


def test_rows_of_other_numbers_of_variants_leave_each_other_alone(
    server: ShardServer, tmp_path: Path
) -> None:
    def computed(variants: int) -> int:
        return epoch(urls_of(server), Features(Net().eval(), variants=variants), train=True)[2]

    assert [computed(variants) for variants in (1, 2, 3)] == [SAMPLES] * 3
    assert 3 * (SAMPLES - 2 * 16) <= columns_in(tmp_path / "cache") <= 3 * SAMPLES  # as above
    assert [computed(variants) for variants in (1, 2, 3)] == [0, 0, 0]


def test_rows_of_local_files_are_those_of_the_bytes_that_are_there(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "files", COUNTS, options=IMAGES)
    _, _, computed = epoch(list(map(str, paths)), Features(Net().eval()))
    assert computed == SAMPLES
    assert columns_in(tmp_path / "cache") == SAMPLES
    write_shards(tmp_path / "others", COUNTS, seed=9, options=IMAGES)
    shutil.copy(tmp_path / "others" / paths[0].name, paths[0])
    second, read, computed = epoch(list(map(str, paths)), Features(Net().eval(), check=False))
    assert (read, computed) == (COUNTS[1], COUNTS[0])
    alone, _, _ = epoch(list(map(str, paths)), Features(Net().eval()), cache_dir=str(tmp_path / "other"))
    assert all(torch.allclose(second[key], alone[key]) for key in second)


def test_rows_are_on_disk_where_shards_are_in_memory(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMLOAD_CACHE", "memory")
    monkeypatch.setenv("STREAMLOAD_MEMORY_SIZE", "20MB")
    epoch(urls_of(server), Features(Net().eval()), 2)
    assert columns_in(tmp_path / "cache") == SAMPLES


def test_texts_have_a_row_for_each_text_of_a_sample(server: ShardServer, tmp_path: Path) -> None:
    feature = Features(Embedding().eval(), inputs="text", check=False)
    rows, read, computed = epoch(urls_of(server), feature, 3, tokenizer=tokenize)
    assert read + computed == 3 * SAMPLES
    assert computed <= SAMPLES + 2 * 16
    assert columns_in(tmp_path / "cache") == SAMPLES
    again, read, computed = epoch(urls_of(server), feature, tokenizer=tokenize)
    assert (read, computed) == (SAMPLES, 0)
    assert all(torch.equal(rows[key], again[key]) for key in rows)


def test_results_of_several_shapes_have_rows(server: ShardServer, tmp_path: Path) -> None:
    feature = Features(Growing().eval(), check=False)
    list(flat.make_loader(urls_of(server), None, preprocess=small, train=False, batch_size=10, num_workers=0))
    rows, _, computed = epoch(urls_of(server), feature, batch_size=1)
    assert computed == SAMPLES
    assert {len(row) for row in rows.values()} == {2, 3}
    again, read, _ = epoch(urls_of(server), feature, batch_size=1)
    assert read == SAMPLES
    assert all(torch.equal(rows[key], again[key]) for key in rows)


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *given: str) -> Any:
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["streamload", *given, "--json"])
    with contextlib.suppress(SystemExit):
        main()
    return json.loads(capsys.readouterr().out)


def test_carry_gives_re_packed_shards_the_rows_of_their_samples(
    server: ShardServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    list(flat.make_loader(urls_of(server), None, preprocess=small, train=False, batch_size=10, num_workers=0))
    rows, _, computed = epoch(urls_of(server), Features(Net().eval()))
    assert computed == SAMPLES
    one, other = sorted(server.root.iterdir())
    data = one.read_bytes().rstrip(b"\0")
    data += bytes(-len(data) % 512)
    packed = server.root / "packed.tar"
    packed.write_bytes(data + data + other.read_bytes())
    count, url = SAMPLES + COUNTS[0], f"{server.url}/packed.tar"
    report = command(capsys, monkeypatch, "features", "carry", "::".join(urls_of(server)[:2]), url)
    assert report == {"samples": count, "shared": count, "rows": count}
    list(flat.make_loader(url, None, preprocess=small, train=False, batch_size=10, num_workers=0))
    again, read, computed = epoch(url, Features(Net().eval(), check=False))
    assert (read, computed) == (count, 0)
    assert all(torch.equal(rows[key], again[key]) for key in rows)


def test_rows_are_listed_verified_and_deleted(
    server: ShardServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch(urls_of(server), Features(Net().eval()), 2)
    listed = command(capsys, monkeypatch, "cache", "ls", "--kind", "columns")["rows"]
    (row,) = listed["fingerprints"]
    assert listed["used_bytes"] >= row["size_bytes"] > 0
    assert (row["label"], row["rows"]) == ("Net", SAMPLES)
    report = command(capsys, monkeypatch, "cache", "verify")
    assert (report["shards"], report["rows"]["rows"], report["rows"]["unproved"]) == (2, SAMPLES, 0)
    (path, *_) = (tmp_path / "cache" / "columns").glob("*/rows.*")
    data = bytearray(path.read_bytes())
    data[8192] ^= 1
    path.write_bytes(data)
    assert command(capsys, monkeypatch, "cache", "verify", "--kind", "columns")["rows"]["unproved"] == 1
    shards = command(capsys, monkeypatch, "cache", "ls", "--kind", "shards")
    assert (len(shards["shards"]), "rows" in shards) == (2, False)
    assert command(capsys, monkeypatch, "cache", "clear", "Net", "--yes")["rows"]["rows"] == SAMPLES
    assert columns_in(tmp_path / "cache") == 0
    assert Tier.open(tmp_path / "cache").count_of("shards") == 2
