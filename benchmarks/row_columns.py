"""Rows of samples in columns: what one costs to store and to read, by the size of its shard, and in a loader.

Question: how much CPU time does a row of 3 KB take to be stored and read in shards of 1,000, 100 and 8
samples, how much room, and on its way through a loader?

Command: python -m benchmarks.row_columns

20,000 rows of 3 KB (768 float32) are stored and read in batches of 256, each batch of neighbours in as many
shards as it takes, in random order. Shards of 8 are too small for columns: their rows lie in the database of
calls. Then loaders without workers go three times over 20,480 samples in shards of 2,048, in batches of 64;
the CPU time is that of the last pass. "columns" has the feature and nothing else, and calls the module with
each batch. "order" has no feature: by map_sample, which returns a number, so that what is left is index,
order and the bytes of the samples, about 1 KB each.

Result: results/row_columns.json
"""

import argparse
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from xxhash import xxh3_128_digest

import streamload
from benchmarks import turns
from streamload.columns.columns import FIRST
from streamload.derived.store.keys import Naming, SampleKey
from streamload.derived.store.queue import ComputedRows, Material
from streamload.derived.store.results import Result
from streamload.derived.store.row_store import RowPlace, RowStore, close_stores
from streamload.testing.shards import ShardOptions, write_shards

ROWS, QUICK_ROWS, WIDTH = 20_000, 1_000, 768
SIZES = (1_000, 100, 8)
SHARDS, QUICK_SHARDS, OF_A_SHARD, QUICK_OF_A_SHARD = 10, 2, 2_048, 128
AT_ONCE, BATCH = 256, 64
FINGERPRINT = bytes(16)


@streamload.cache_module
class Wide(nn.Module):
    """Rows of 3 KB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(192, WIDTH)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """float32[N, 3, 8, 8] → float32[N, 768]."""
        projected: torch.Tensor = self.project(images.flatten(1))
        return projected


def small(image: Any) -> torch.Tensor:
    """8 × 8 pixels."""
    levels = np.array(image.resize((8, 8)), dtype=np.float32)
    return torch.from_numpy(levels / 255).permute(2, 0, 1)


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=["columns"])
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for round_ in range(given.rounds):
        with turns.scratch() as directory:
            os.environ["STREAMLOAD_CACHE_DIR"] = str(directory / "cache")
            os.environ["STREAMLOAD_CACHE_SIZE"] = "50GB"
            measured = {**of_shards(given, directory, round_), **of_a_loader(given, directory)}
            rows.append({"label": "columns", "round": round_, **measured})
            close_stores()
    medians = turns.medians(rows)
    median = medians["columns"]
    turns.write(
        given,
        "row_columns",
        {
            "settings": {
                "rows": QUICK_ROWS if given.quick else ROWS,
                "row_bytes": 4 * WIDTH,
                "batch": AT_ONCE,
            },
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "targets": [
                turns.target("shards of 1,000: a row read, CPU µs", median["read_1000_us"], at_most=6),
                turns.target("shards of 1,000: a row stored, CPU µs", median["store_1000_us"], at_most=9),
                turns.target("shards of 100: a row read, CPU µs", median["read_100_us"], at_most=10),
                turns.target("shards of 100: a row stored, CPU µs", median["store_100_us"], at_most=15),
                turns.target("bytes on disk ÷ payload, shards of 1,000", median["disk_ratio"], at_most=1.05),
                turns.target(
                    "a row through the loader: columns - order, CPU µs", median["above_us"], at_most=10
                ),
            ],
        },
    )


def of_shards(given: argparse.Namespace, directory: Path, seed: int) -> dict[str, float]:
    """The CPU time of a row, and the room of those of the largest shards."""
    count, rng = QUICK_ROWS if given.quick else ROWS, random.Random(seed)
    drawn = torch.from_numpy(np.random.default_rng(seed).random((AT_ONCE, WIDTH), np.float32))
    measured: dict[str, float] = {}
    for size in SIZES:
        place = RowPlace(str(directory / str(size)), cache_size="50GB")
        store, naming = RowStore(place), Naming(FINGERPRINT, b"", is_row=True)
        keys = [key_of(number, size) for number in range(count)]
        batches = [keys[start : start + AT_ONCE] for start in range(0, count, AT_ONCE)]
        rng.shuffle(batches)
        began = time.process_time()
        for batch in batches:
            result = Result(drawn[: len(batch)], len(batch))
            names, material = [naming.name(key) for key in batch], (result.copied()(), [0] * len(batch))
            store.queue.add(_computed(names, result.layout, material))
        store.flush()
        stored = time.process_time()
        for batch in batches:
            assert len(store.read([naming.name(key) for key in batch], "it")) == len(batch)
        read = time.process_time()
        store.close()
        measured |= {
            f"store_{size}_us": (stored - began) / count * 1e6,
            f"read_{size}_us": (read - stored) / count * 1e6,
        }
    files = (directory / str(SIZES[0]) / "columns").rglob("rows.*")
    taken = sum(file.stat().st_blocks * 512 for file in files)
    return {**measured, "disk_ratio": taken / (count * 4 * WIDTH)}


def _computed(names: list[bytes], layout: bytes, material: Material) -> ComputedRows:
    return ComputedRows(names, layout, lambda: material, material[0].nbytes, False, "it", None)


def key_of(number: int, size: int) -> SampleKey:
    """The key of a sample of a shard of so many."""
    shard, place = divmod(number, size)
    name = b"" if size < FIRST else xxh3_128_digest(b"%d" % shard)
    return SampleKey(f"{number:08d}", number + 1, name, place)


def of_a_loader(given: argparse.Namespace, directory: Path) -> dict[str, float]:
    """The CPU time of a sample of a pass: with rows from columns, and without features."""
    counts = [QUICK_OF_A_SHARD] * QUICK_SHARDS if given.quick else [OF_A_SHARD] * SHARDS
    paths = write_shards(directory / "shards", counts, options=ShardOptions(image_side=(16, 24)))
    urls = [str(path) for path in paths]
    feature = streamload.Features(Wide().eval(), preprocess=small)
    batches = streamload.Batches(features={"wide": feature})
    options = {"batches": batches, "shards": streamload.Shards(text_key=None)}
    columns_us, read = _pass_us(urls, feature, **options)
    assert read == 2 * sum(counts), read
    order_us, _ = _pass_us(urls, None, workers=streamload.Workers(map_sample=number_of))
    return {"columns_us": columns_us, "order_us": order_us, "above_us": columns_us - order_us}


def _pass_us(urls: list[str], feature: streamload.Features | None, **options: Any) -> tuple[float, int]:
    with streamload.make_loader(
        urls, batch_size=BATCH, num_workers=0, output="dict", train=False, **options
    ) as loader:
        for _ in range(3):
            began, samples = time.process_time(), 0
            for batch in loader:
                samples += BATCH
                if feature is not None:
                    feature(batch)
            took = time.process_time() - began
        return took / samples * 1e6, loader.stats().feature_rows_read


def number_of(sample: dict[str, Any]) -> dict[str, Any]:
    """Nothing of a sample."""
    return {"number": 0}


if __name__ == "__main__":
    main()
