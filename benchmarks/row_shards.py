"""Derived shards of feature rows: their bytes, opening and reading one, and a row through a loader.

Question: how much of a derived shard is payload, how long does it take to open one of 100,000 rows and to
read them, and how much CPU time does a row take on its way through a loader?

Command: python -m benchmarks.row_shards

Rows of 3 KB (768 float32). 100,000 of them go into the tier as one derived shard, which is opened, and read
in batches of 64 in random order. Then loaders without workers go three times over 20,480 samples in shards of
2,048, in batches of 64; the CPU time is that of the last pass. "derived" has the feature and nothing else,
and calls the module with each batch. "order" has no feature: by map_sample, which returns a number, so that
what is left is index, order and the bytes of the samples, about 1 KB each. "derived" doesn't read those.

Result: results/row_shards.json
"""

import argparse
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import streamload
from benchmarks import turns
from streamload.cache.shard import shard_of
from streamload.cache.tier import open_tier
from streamload.daemon.warm import warm
from streamload.derived.store.results import Result
from streamload.derived.store.row_store import close_stores
from streamload.derived.store.shard import RowShard, RowShardWriter, rows_form, rows_recipe
from streamload.features.named import NamedFeatures
from streamload.loader.feature_recipe import make_recipe
from streamload.options import read_settings
from streamload.origins.origin import Origin, Stream, Version
from streamload.testing.shards import ShardOptions, write_shards

ROWS, QUICK_ROWS, WIDTH = 100_000, 2_000, 768
SHARDS, QUICK_SHARDS, OF_A_SHARD, QUICK_OF_A_SHARD = 10, 2, 2_048, 128
BATCH = 64
FINGERPRINT = "0" * 32


@streamload.cache_module
class Wide(nn.Module):
    """Rows of 3 KB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(192, WIDTH)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """float32[N, 3, 8, 8] → float32[N, 768]."""
        found: torch.Tensor = self.project(images.flatten(1))
        return found


def feature() -> streamload.Features:
    """What is made ahead."""
    return streamload.Features(Wide().eval(), preprocess=small)


def small(image: Any) -> torch.Tensor:
    """8 × 8 pixels."""
    levels = np.array(image.resize((8, 8)), dtype=np.float32)
    return torch.from_numpy(levels / 255).permute(2, 0, 1)


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=["derived"])
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for round_ in range(given.rounds):
        with turns.scratch() as directory:
            os.environ["STREAMLOAD_CACHE_DIR"] = str(directory / "cache")
            os.environ["STREAMLOAD_CACHE_SIZE"] = "50GB"
            measured = {**of_a_shard(given, directory, round_), **of_a_loader(given, directory)}
            rows.append({"label": "derived", "round": round_, **measured})
            close_stores()
    medians = turns.medians(rows)
    found = medians["derived"]
    turns.write(
        given,
        "row_shards",
        {
            "settings": {"rows": QUICK_ROWS if given.quick else ROWS, "row_bytes": 4 * WIDTH, "batch": BATCH},
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "targets": [
                turns.target("bytes on disk ÷ payload, rows of 3 KB", found["disk_ratio"], at_most=1.05),
                turns.target("100,000 rows of 3 KB: open, s", found["open_seconds"], at_most=0.2),
                turns.target("100,000 rows of 3 KB: read all, s", found["read_seconds"], at_most=0.5),
                turns.target(
                    "a row through the loader: derived - order, CPU µs", found["above_us"], at_most=10
                ),
            ],
        },
    )


class _Drawn:
    """The recipe of a derived shard with so many drawn rows, whatever it is made from."""

    name = rows_recipe(FINGERPRINT)

    def __init__(self, rows: int, seed: int):
        self.keys = [(f"{row:08d}", row) for row in range(rows)]
        self._result = Result(
            torch.from_numpy(np.random.default_rng(seed).random((rows, WIDTH), np.float32)), rows
        )

    def derive(self, origin: Origin) -> Origin:
        return _DrawnOrigin(origin, self)

    def chunks(self) -> Iterator[bytes]:
        with RowShardWriter() as writer:
            writer.add(self._result.layout, self.keys, self._result.bodies())
            yield from writer.chunks({"fingerprint": FINGERPRINT})


class _DrawnOrigin(Origin):
    def __init__(self, origin: Origin, recipe: _Drawn):
        self.url, self._origin, self._recipe = origin.url, origin, recipe

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        return _DrawnStream(self._origin.version(), self._recipe)

    def version(self) -> Version:
        return self._origin.version()

    def close(self) -> None:
        self._origin.close()


class _DrawnStream:
    def __init__(self, version: Version, recipe: _Drawn):
        self.version, self._recipe = version, recipe

    def chunks(self) -> Iterator[bytes]:
        return self._recipe.chunks()

    def close(self) -> None:
        pass


def of_a_shard(given: argparse.Namespace, directory: Path, seed: int) -> dict[str, float]:
    """One large derived shard: its bytes, and what it takes to open and to read it."""
    (path,) = write_shards(directory / "source", [1], options=ShardOptions(image_side=(16, 16)))
    recipe = _Drawn(QUICK_ROWS if given.quick else ROWS, seed)
    report = warm(str(path), prepare=recipe)
    assert not report.failures, report.failures
    form = rows_form(shard_of(str(path), None), FINGERPRINT)
    place = open_tier(read_settings()).published(form.digest)
    began = time.perf_counter()
    rows = RowShard.open(place, form)
    assert rows is not None
    opened = time.perf_counter()
    keys = list(recipe.keys)
    random.Random(seed).shuffle(keys)
    batches = [keys[at : at + BATCH] for at in range(0, len(keys), BATCH)]
    start = time.perf_counter()
    for batch in batches:
        assert None not in rows.read(batch)
    read_seconds = time.perf_counter() - start
    rows.close()
    taken = sum(file.stat().st_blocks * 512 for file in place.iterdir())
    return {
        "disk_ratio": taken / (len(keys) * 4 * WIDTH),
        "open_seconds": opened - began,
        "read_seconds": read_seconds,
    }


def of_a_loader(given: argparse.Namespace, directory: Path) -> dict[str, float]:
    """The CPU time of a sample of a pass: with rows from derived shards, and without features."""
    counts = [QUICK_OF_A_SHARD] * QUICK_SHARDS if given.quick else [OF_A_SHARD] * SHARDS
    paths = write_shards(directory / "shards", counts, options=ShardOptions(image_side=(16, 24)))
    urls = [str(path) for path in paths]
    report = warm(urls, prepare=make_recipe(NamedFeatures("benchmarks.row_shards:feature")))
    assert not report.failures, report.failures
    close_stores()
    (directory / "cache" / "rows").rename(directory / "rows")  # so that a training has only derived shards
    made = feature()
    batches = streamload.Batches(features={"wide": made})
    options = {"batches": batches, "shards": streamload.Shards(text_key=None)}
    derived_us, read = _pass_us(urls, made, **options)
    assert read == 3 * sum(counts), read
    order_us, _ = _pass_us(urls, None, workers=streamload.Workers(map_sample=number_of))
    return {"derived_us": derived_us, "order_us": order_us, "above_us": derived_us - order_us}


def _pass_us(urls: list[str], made: streamload.Features | None, **options: Any) -> tuple[float, int]:
    with streamload.make_loader(urls, batch_size=BATCH, num_workers=0, output="dict", **options) as loader:
        for _ in range(3):
            began, batches = time.process_time(), 0
            for batch in loader:
                batches += 1
                if made is not None:
                    made(batch)
            took = time.process_time() - began
        return took / (batches * BATCH) * 1e6, loader.stats().feature_rows_read


def number_of(sample: dict[str, Any]) -> dict[str, Any]:
    """Nothing of a sample."""
    return {"number": 0}


if __name__ == "__main__":
    main()
