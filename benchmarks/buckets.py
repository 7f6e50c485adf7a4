"""What bucketing saves: padding, and ranks that wait for the slowest; and what it costs.

Question: of what the ranks of a training compute on padded captions and images, how much is useful, if
batches come in the order of the run, by OpenCLIP's length bucketing, and by blocks? And what do blocks cost
in planning, in a worker's memory, and until the first batch?

Command: python -m benchmarks.buckets

"padding" and "rate" are computed, not timed: 200,000 samples, half of them with short captions (alternative
texts of web pages) and half long ones (written by a model), all drawn with a seed; 8 ranks × 64 rows. Of
"captions" a row costs its tokens, padded to the longest of the rank's batch (of each quarter of it: "4
microbatches"); a step takes as long as its slowest rank. The rate is the useful share, × that of the order of
the run. Of "captions and images" a row also costs the patches of its image, of which there are at most 1,024:
what the plan does where images vary, too.

- "OpenCLIP's bucketing, …" does what `--length-bucketing` of its main branch does: each worker of each rank
  sorts a pool of 2,048 samples, by caption or by all they cost, cuts it into runs of 128, and gives these
  out in a random order. Its code isn't run: here a sample is a pair of lengths.
- "step", "blocks of …" are `Batches(bucketing=…)`, by the modules that ship (order/buckets.py).

"planning" is CPU time a sample and worker, of a process that plans 2,000,000 samples and deals them to one of
8 ranks. "memory" is what a worker has to itself (USS) with blocks of 16,384, beside the same without: the
median of the second half of an epoch of 40,000 samples with tiny images from the cache. "first batch" is
measured on a link of 20 MB/s with an empty cache.

Result: results/buckets.json
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

import streamload
from benchmarks import machine, turns
from benchmarks.turns import Row
from streamload.batching.cells import cells, dealt
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards

RANKS, ROWS, WORKERS = 8, 64, 4
SAMPLES, QUICK_SAMPLES = 200_000, 70_000
POOL, RUN = 2048, 128
BLOCKS = (4096, 16_384, 65_536)
BYTES_PER_SECOND = 20e6
AT_LEAST_RANDOM, AT_LEAST_OPENCLIP, AT_MOST_US, AT_MOST_MB, AT_MOST_FIRST = 1.28, 1.18, 1.0, 5.0, 1.10

Costs = NDArray[np.float64]
Step = NDArray[np.int64]
"""int64[RANKS, ROWS]: the rows of each rank."""


def main() -> None:
    given = turns.arguments(__doc__, rounds=5, names=["simulated", "planning", "memory", "first"])
    rows: list[Row] = []
    for round_ in range(given.rounds):
        if "simulated" in given.contenders:
            rows += simulated(QUICK_SAMPLES if given.quick else SAMPLES, round_)
        if "planning" in given.contenders:
            rows.append(planning(100_000 if given.quick else 2_000_000, round_))
        if "memory" in given.contenders:
            rows += memory(1000 if given.quick else 40_000, round_)
        if "first" in given.contenders:
            rows += first_batches(256 if given.quick else 2048, round_)
        print(f"round {round_} is done", file=sys.stderr, flush=True)
    turns.write(given, "buckets", content(given, rows))


def web(samples: int, seed: int) -> Costs:
    """Tokens and patches of samples as they are on the web."""
    draw = np.random.default_rng(seed)
    short, long = np.exp(draw.normal(2.6, 0.6, samples)), np.exp(draw.normal(4.6, 0.4, samples))
    texts = np.where(draw.random(samples) < 0.5, np.clip(short, 4, 77), np.clip(long, 8, 256))
    images = np.clip(np.exp(draw.normal(5.8, 0.8, samples)), 4, 1024)
    return np.stack([texts.astype(int), images.astype(int)], axis=1).astype(float)


def simulated(samples: int, seed: int) -> Iterator[Row]:
    """The padding and rate of each way to make steps."""
    both = web(samples, seed)
    for kind, costs in (("captions", both * (1, 0)), ("captions and images", both)):
        for way, steps in ways_of(costs, seed).items():
            made = list(steps)
            for parts in (1, 4):
                padding, slowest, useful = measured(costs, made, parts)
                yield {
                    "label": f"{kind}; {way}; {parts}", "round": seed, "padding": padding,
                    "slowest_against_mean": slowest, "useful": useful,
                }  # fmt: skip


def ways_of(costs: Costs, seed: int) -> dict[str, Iterator[Step]]:
    """Of each way, its steps."""
    return {
        "in the order of the run": ordered_steps(len(costs)),
        "OpenCLIP's bucketing, by caption": pooled_steps(costs, costs[:, 0], seed),
        "OpenCLIP's bucketing, by all": pooled_steps(costs, costs.sum(axis=1), seed),
        "step": blocks_steps(costs, RANKS * ROWS),
        **{f"blocks of {size:,}": blocks_steps(costs, size) for size in BLOCKS},
    }


def ordered_steps(samples: int) -> Iterator[Step]:
    size = RANKS * ROWS
    for begin in range(0, samples - size + 1, size):
        yield np.arange(begin, begin + size).reshape(RANKS, ROWS)


def pooled_steps(costs: Costs, lengths: NDArray[np.float64], seed: int) -> Iterator[Step]:
    """Each worker of each rank sorts its own pools; a rank's batches come from its workers in turn."""
    draw = np.random.default_rng(seed)
    streams = []
    for own in np.array_split(np.arange(len(costs)), RANKS * WORKERS):
        found = []
        for begin in range(0, len(own), POOL):
            pool = own[begin : begin + POOL]
            pool = pool[np.argsort(lengths[pool], kind="stable")]
            runs = [pool[at : at + RUN] for at in range(0, len(pool), RUN)]
            found += [runs[place] for place in draw.permutation(len(runs))]
        streams.append(np.concatenate(found))
    batches = min(len(stream) for stream in streams) // ROWS
    for at in range(batches):
        for worker in range(WORKERS):
            yield np.stack([
                streams[rank * WORKERS + worker][at * ROWS : (at + 1) * ROWS] for rank in range(RANKS)
            ])  # fmt: skip


def blocks_steps(costs: Costs, block: int) -> Iterator[Step]:
    size, steps = RANKS * ROWS, block // (RANKS * ROWS)
    sizes = np.full(RANKS, ROWS)
    for begin in range(0, len(costs) - block + 1, block):
        for cell in cells(costs[begin : begin + block], steps, begin) + begin:
            yield np.stack([cell[dealt(costs[cell], sizes, rank)[0]] for rank in range(RANKS)])
    assert size * steps == block


def measured(costs: Costs, steps: list[Step], parts: int) -> tuple[float, float, float]:
    """The share of padding; the slowest rank ÷ the mean; the useful share of what the slowest have to do."""
    own = costs[np.stack(steps)].reshape(len(steps), RANKS, parts, -1, 2)
    padded = (own.max(axis=3).sum(axis=-1) * own.shape[3]).sum(axis=2)  # [steps, RANKS]
    slowest = padded.max(axis=1).sum() * RANKS
    useful, done = float(own.sum()), float(padded.sum())
    return 1 - useful / done, float(slowest) / done, useful / float(slowest)


def planning(samples: int, seed: int) -> Row:
    costs, block, sizes = web(16_384, seed), 16_384, np.full(RANKS, ROWS)
    began = time.process_time()
    for number in range(samples // block):
        for cell in cells(costs, block // (RANKS * ROWS), number):
            dealt(costs[cell], sizes, number % RANKS)
    seconds = time.process_time() - began
    us_a_sample = seconds / (samples // block) / block * 1e6
    return {"label": "planning", "round": seed, "us_a_sample": us_a_sample}


def tokenize(texts: list[str]) -> dict[str, torch.Tensor]:
    """Ids of many lengths, up to 76, by the text."""
    ids = torch.zeros(len(texts), 77, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: 1 + hash_of(text) % 76] = 1
    return {"input_ids": ids, "attention_mask": ids.clone()}


def hash_of(text: str) -> int:
    return sum(map(ord, text)) * 2_654_435_761 >> 7


def loader(urls: str, cache: Path, bucketing: int | None, seed: int, **options: Any) -> streamload.Loader:
    batches = streamload.Batches(text_padding="longest", bucketing=bucketing)
    return streamload.make_loader(
        urls, tokenize, batch_size=RANKS * ROWS // 4, num_workers=1, seed=seed, batches=batches,
        cache_dir=cache, cache_size="2GB", **options,
    )  # fmt: skip


def memory(samples: int, seed: int) -> Iterator[Row]:
    """What a worker has of its own at the end of an epoch."""
    with tempfile.TemporaryDirectory() as directory:
        shards = write_shards(
            Path(directory) / "shards", [1000] * (samples // 1000), options=ShardOptions(image_side=(8, 9))
        )
        for _ in loader(str(shards[0].parent), Path(directory) / "cache", None, seed):
            pass  # the cache has all of it from now on
        for label, bucketing in turns.rotated([("memory, none", None), ("memory, blocks", 16_384)], seed):
            with loader(str(shards[0].parent), Path(directory) / "cache", bucketing, seed) as batches:
                found = []
                for number, _ in enumerate(batches):
                    if number % 8 == 0:
                        (worker,) = psutil.Process().children()
                        found.append(worker.memory_full_info().uss)
            yield {"label": label, "round": seed, "worker_bytes": statistics.median(found[len(found) // 2 :])}


def first_batches(samples: int, seed: int) -> Iterator[Row]:
    with turns.photographs(samples, 128) as (directory, _):
        for label, bucketing in turns.rotated([("first, none", None), ("first, blocks", 16_384)], seed):
            with (
                ShardServer.spawn(directory / "shards", bytes_per_second=BYTES_PER_SECOND) as server,
                turns.empty_directory(directory) as cache,
                loader(turns.pattern(server.url, samples // 128), cache, bucketing, seed) as batches,
            ):
                load, began = machine.load(), time.monotonic()
                next(iter(batches))
                seconds = time.monotonic() - began
            yield {"label": label, "round": seed, "load_before": load, "first_batch_seconds": seconds}


def content(given: Any, rows: list[Row]) -> Row:
    medians = turns.medians(rows)

    def rate(label: str, to: str = "in the order of the run") -> float | None:
        kind, _, parts = label.split("; ")
        return turns.ratio(medians, "useful", label, f"{kind}; {to}; {parts}")

    rates = {label: rate(label) for label, row in medians.items() if "useful" in row}
    own = [
        statistics.median(row["worker_bytes"] for row in rows if row["label"] == f"memory, {kind}")
        for kind in ("blocks", "none")
        if f"memory, {kind}" in medians
    ]
    more_mb = (own[0] - own[1]) / 1e6 if len(own) == 2 else None
    first = turns.ratio(medians, "first_batch_seconds", "first, blocks", "first, none")
    planned = medians.get("planning", {}).get("us_a_sample")
    block = "captions and images; blocks of 16,384; 1"
    theirs = "OpenCLIP's bucketing, by caption"
    return {
        "settings": {
            "ranks": RANKS, "rows": ROWS, "pool": POOL, "run": RUN,
            "bytes_per_second": BYTES_PER_SECOND,
        },
        "seeds": list(range(given.rounds)),
        "rounds": rows,
        "medians": medians,
        "ratios": {"rate against the order of the run": rates, "first batch": first},
        "worker_more_mb": more_mb,
        "targets": [
            turns.target(f"{block}: rate, × the order of the run", rate(block), at_least=AT_LEAST_RANDOM),
            turns.target(f"{block}: rate, × {theirs}", rate(block, theirs), at_least=AT_LEAST_OPENCLIP),
            turns.target("planning, µs a sample and worker", planned, at_most=AT_MOST_US),
            turns.target("a worker's memory with blocks of 16,384, MB more", more_mb, at_most=AT_MOST_MB),
            turns.target("first batch cold, × without blocks", first, at_most=AT_MOST_FIRST),
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()
