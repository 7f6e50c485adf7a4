"""Many small shards: samples a second and CPU time of a sample, by the number of shards and of their samples.

    python -m benchmarks.small_shards

Question: what does a shard cost beside its samples, and does a sample cost more the more shards there are?

Local shards of images of 16 x 16, by 2 workers, each run in a process of its own; runs take turns, with the
order rotated. streamload indexes the shards in epoch 1; webdataset (shuffles as its documentation has them)
reads them anew in each epoch. Both decode by the same function.

- seconds: of an epoch. cpu_us: CPU time of a sample, of all processes, from the epoch's start to its end.
- The price of a shard: how much more CPU time 8,000 samples take in 1,000 shards than in 100, by shard.

Result: results/small_shards.json.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine, process_tree, turns
from benchmarks.contenders.job import versions
from streamload.testing.shards import ShardOptions, write_shards

SIZES = [(8, 100), (8, 1_000), (8, 10_000), (80, 100), (80, 1_000), (800, 100)]
"""Samples of a shard, and shards."""
QUICK_SIZES = [(8, 20), (8, 60)]
OPTIONS = ShardOptions(image_side=(16, 16))
BATCH, WORKERS, EPOCHS = 16, 2, 2
MOST = 1.3
"""Times the CPU time of a sample with a tenth or less of the shards."""
PRICED = ((8, 1_000), (80, 100))
"""As many samples in many shards and in few."""
MOST_PRICE_MS = 2.0


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(CONTENDERS[sys.argv[2]](sys.argv[3], Path(sys.argv[4]))))
        return
    given = turns.arguments(__doc__, rounds=3, names=list(CONTENDERS))
    rows: list[dict[str, Any]] = []
    sizes = QUICK_SIZES if given.quick else SIZES
    with turns.scratch() as directory:
        for samples, shards in sizes:
            data = directory / f"{samples}-{shards}"
            write_shards(data, [samples] * shards, seed=1, options=OPTIONS)
        for round_ in range(given.rounds):
            for samples, shards in sizes:
                urls = turns.pattern(str(directory / f"{samples}-{shards}"), shards)
                for name in turns.rotated(given.contenders, round_):
                    with turns.empty_directory(directory) as cache:
                        rows += measured(given.python, name, urls, cache, samples, shards, round_)
    medians = turns.medians(rows)
    turns.write(
        given,
        "small_shards",
        {
            "settings": {"sizes": sizes, "batch": BATCH, "workers": WORKERS, "epochs": EPOCHS},
            "versions": turns.versions(rows),
            "seeds": [1],
            "rounds": rows,
            "medians": medians,
            "targets": [
                turns.target(
                    f"epoch {epoch}: CPU time of a sample in {sizes[most][1]:,} shards of 8, "
                    f"times that in {sizes[0][1]:,}",
                    turns.ratio(
                        medians,
                        "cpu_us",
                        *(label("streamload", *sizes[place], epoch) for place in (most, 0)),
                    ),
                    at_most=MOST,
                )
                for epoch in (1, 2)
                for most in (max(place for place, (samples, _) in enumerate(sizes) if samples == 8),)
            ]
            + [
                turns.target(
                    f"epoch {epoch}: CPU time of a shard beside its samples, ms",
                    price_ms(medians, epoch),
                    at_most=MOST_PRICE_MS,
                )
                for epoch in (1, 2)
                if set(PRICED) <= set(sizes)
            ],
        },
    )


def label(name: str, samples: int, shards: int, epoch: int) -> str:
    """The label of a row."""
    return f"{name}, {shards:,} shards of {samples}, epoch {epoch}"


def price_ms(medians: dict[str, turns.Row], epoch: int) -> float | None:
    """The CPU time of a shard beside its samples."""
    many, few = (medians.get(label("streamload", *size, epoch)) for size in PRICED)
    if many is None or few is None:
        return None
    more_us = float(many["cpu_us"] - few["cpu_us"]) * many["samples"] * many["shards"]
    return more_us / (many["shards"] - few["shards"]) / 1e3


def measured(
    python: Path, name: str, urls: str, cache: Path, samples: int, shards: int, round_: int
) -> list[dict[str, Any]]:
    """A row for each epoch of one run."""
    load = machine.load()
    command = [str(python), "-m", "benchmarks.small_shards", "--run", name, urls, str(cache)]
    output = subprocess.check_output(
        command, env=turns.environment(), cwd=turns.ROOT, text=True, timeout=turns.LIMIT_SECONDS
    )
    found = json.loads(output.splitlines()[-1])
    rows = []
    for epoch, (seconds, cpu_seconds, batches) in enumerate(found["epochs"], start=1):
        read = batches * BATCH
        assert read == samples * shards // BATCH * BATCH, f"{name} gave {read} samples"
        row = {"label": label(name, samples, shards, epoch), "contender": name, "round": round_}
        row |= {"samples": samples, "shards": shards, "epoch": epoch, "load_before": load}
        row |= {"seconds": seconds, "samples_per_second": read / seconds}
        row |= {"cpu_us": cpu_seconds / read * 1e6, "versions": found["versions"]}
        rows.append(row)
        print(f"{row['label']}: {row['samples_per_second']:,.0f}/s, {row['cpu_us']:,.0f} us", file=sys.stderr)
    return rows


def pixels(image: Any) -> torch.Tensor:
    """The work on an image: nearly none."""
    return torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1)


def first(values: Any) -> Any:
    """A caption as it is."""
    return values


def epochs_of(loader: Iterable[Any]) -> list[tuple[float, float, int]]:
    """Seconds, CPU seconds and batches of each epoch."""
    found = []
    for _ in range(EPOCHS):
        began, cpu = time.monotonic(), process_tree.cpu_seconds()
        batches = sum(1 for _ in loader)
        found.append((time.monotonic() - began, process_tree.cpu_seconds() - cpu, batches))
    return found


def streamload_(urls: str, cache: Path) -> dict[str, Any]:
    """Read by streamload."""
    import streamload

    with streamload.make_loader(
        urls, None, num_workers=WORKERS, batch_size=BATCH, preprocess=pixels, cache_dir=cache
    ) as loader:
        return {
            "epochs": epochs_of(loader),
            "versions": versions("streamload", "torch", "numpy"),
        }


def webdataset_(urls: str, cache: Path) -> dict[str, Any]:
    """Read by webdataset."""
    import webdataset as wds

    from benchmarks.contenders.webdataset_ import SAMPLE_SHUFFLE, SHARD_SHUFFLE

    dataset = wds.WebDataset(urls, shardshuffle=SHARD_SHUFFLE, seed=1).shuffle(SAMPLE_SHUFFLE)
    dataset = dataset.decode("pilrgb").to_tuple("jpg", "txt").map_tuple(pixels, first)
    loader = wds.WebLoader(dataset.batched(BATCH), batch_size=None, num_workers=WORKERS)
    return {"epochs": epochs_of(loader), "versions": versions("webdataset", "torch", "numpy")}


CONTENDERS = {"streamload": streamload_, "webdataset": webdataset_}


if __name__ == "__main__":
    main()
