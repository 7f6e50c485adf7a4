"""How well batches are mixed, by lanes and window, beside open_clip's own loader and a full permutation.

Question: how many samples of a batch are of one shard, how many shards do a batch and eight batches come
from, how far is a shard spread over the epoch, and how often do two samples meet again in the next epoch?
Which lanes and which window are at least as good as open_clip's loader, with how many shards open at once?
And what does it cost a worker to follow the order?

Command: python -m benchmarks.shuffle

No bytes are read: an order is a list of (shard, number). streamload's comes from the modules that ship (plan,
lanes, window, group, deal) with all shards arrived. open_clip's is made by its own pipeline with its own
constants and webdataset's filters (contenders/openclip_order.py): a buffer of 5,000 samples for each worker;
the workers' batches take turns. A permutation is a new one of all samples in each epoch. Each is followed for
two epochs; order_measures.py says what is measured. Numbers are medians over the rounds, each with a seed of
its own, except the worst batch: that is the worst of all rounds.

- open: the most shards that are open at once, as `GroupOrder.open_shards` has it, of one node.
- first batch, next batch: how many samples lanes have to have given before the first global batch of a run is
  certain, and before the second one, in batches. That is what has to arrive for them.
- at the end: the share of the samples of a run's first pass that come only when its last one has arrived.
- held: the most samples that a worker's shuffle buffer holds in memory, × the workers of all ranks.
- cost: CPU time of a process that follows a pass of a whole group, as each worker does, and deals it out; the
  least of three times, since a busy machine can only add to it.

Targets: on 8 ranks × 8 workers the defaults are at least as good as open_clip's loader in every measure, and
following them costs at most 1 µs a sample and worker.

Result: results/shuffle.json; docs/results/order.md has it as tables.

Explanation: a batch of open_clip's loader comes from one worker, so from 5,000 samples, and in the beginning
of each epoch from 1,000. Lanes and window are those of the whole node: each batch of each worker comes from
all of them, and they hold references, no samples. So they win within a batch. What they don't give is what
many buffers of their own do: the next batch comes from other shards, and a sample may stay in a buffer for
long. The buffers of 64 workers hold 320,000 samples.
"""

import json
import os
import random
import subprocess
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks import turns
from benchmarks.contenders.job import versions
from benchmarks.following import epoch_of, seconds_of
from benchmarks.order_measures import Epoch, measures
from streamload.order.hashing import DUE, key
from streamload.order.lanes import default_lanes
from streamload.order.plan import OrderOptions
from streamload.order.shuffle import default_window, due_times

CONTENDERS = ("permutation", "open_clip", "streamload", "cost")
EPOCHS = 2
SEED_STEP = 1000  # open_clip adds the epoch to its seed
COST_LIMIT_US = 1.0
COST_SAMPLES, COST_TIMES = 400_000, 3
DEFAULT = "streamload, default"
BESIDE = "open_clip, 64 workers"
SMALL = ("4 × 500", "20 × 100", "10 × 1,000", "200 × 1,000")
"""Of these the first epoch is compared with the second."""


@dataclass(frozen=True)
class Data:
    """Shards, and the training that reads them: the samples of each shard, those of a rank's batch."""

    name: str
    sizes: tuple[int, ...]
    ranks: int = 1
    batch: int = 256


@dataclass(frozen=True)
class Ours:
    """An order of streamload's; None is the default for the slice. No window: as listed.

    The first pass is that over remote shards, or over local ones (order/plan.py, `opens_slowly`).
    """

    lanes: int | None = None
    window: int | None = None
    groups: int = 1
    opens: Literal["", "local"] = ""

    def options(self, data: Data, seed: int) -> OrderOptions:
        if self.window == 0:
            return OrderOptions(seed, self.groups, lanes=1, window=0, shuffle_shards=False)
        slice_ = data.ranks * data.batch // self.groups
        lanes = default_lanes(slice_) if self.lanes is None else self.lanes
        window = default_window(slice_) if self.window is None else self.window
        return OrderOptions(seed, self.groups, lanes, window, opens_slowly=not self.opens)

    @property
    def name(self) -> str:
        nodes = "" if self.groups == 1 else f", {self.groups} nodes"
        if self.window == 0:
            return f"streamload, shuffle=0{nodes}"
        if self.opens:
            return f"{DEFAULT}, {self.opens}"
        if self.lanes is None:
            return f"{DEFAULT}{nodes}"
        return f"streamload, lanes {self.lanes}, window {self.window:,}{nodes}"


Plan = list[tuple[Data, list[int], list[Ours]]]  # data, workers of a rank, orders of ours


def plan(quick: bool) -> Plan:
    opened = [Ours(), Ours(opens="local")]
    if quick:
        return [
            (Data("8 ranks", (300,) * 16, 2, 32), [8], [Ours(), Ours(4, 500), Ours(window=0)]),
            (Data(SMALL[0], (50,) * 4, batch=8), [], opened),
        ]
    grid = [Ours(lanes, window) for lanes in (1, 4, 8, 16) for window in (1000, 5000, 10_000, 100_000)]
    draws = random.Random(0)
    uneven = tuple(draws.randint(300, 3000) for _ in range(200))
    wide = [Ours(8, 10_000), Ours(64, 10_000), Ours(16, 81_920), Ours(32, 81_920)]
    wide += [Ours(64, 200_000), Ours(64, 400_000), Ours(64, 800_000), Ours(groups=8), Ours(window=0)]
    return [
        (
            Data("1 rank", (1000,) * 200),
            [1, 8],
            [Ours(), *grid, Ours(8, 20_000), Ours(8, 50_000), Ours(window=0)],
        ),
        (Data("8 ranks", (1000,) * 800, ranks=8), [8], [Ours(), *wide]),
        (Data("large shards, 1 rank", (10_000,) * 40), [1, 8], [Ours(), Ours(16, 10_000), Ours(16, 100_000)]),
        (Data("large shards, 8 ranks", (10_000,) * 80, ranks=8), [8], [Ours(), Ours(64, 400_000)]),
        (Data("uneven shards", uneven), [1, 8], [Ours(), Ours(16, 10_000)]),
        (Data("few shards", (10_000,) * 8), [1, 8], [Ours(), Ours(8, 40_000)]),
        *(
            # open_clip refuses more workers than shards
            (Data(name, sizes, batch=batch), [1, min(8, len(sizes))] if batch == 64 else [], opened)
            for name, sizes, batch in zip(
                SMALL, ((500,) * 4, (100,) * 20, (1000,) * 10, (1000,) * 200), (64, 64, 64, 256), strict=True
            )
        ),
    ]


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=CONTENDERS)
    open_clip = turns.interpreters(given).open_clip if "open_clip" in given.contenders else None
    seeds = [round_ * SEED_STEP for round_ in range(given.rounds)]
    rows: list[dict[str, Any]] = []
    found_versions = {"streamload": versions("streamload", "numpy")}
    with turns.scratch() as directory:
        for seed in seeds:
            for data, workers, orders in plan(given.quick):
                if "permutation" in given.contenders:
                    rows.append(permuted(data, seed))
                for number in workers if open_clip else ():
                    row = stock(data, number, seed, open_clip, directory / "order.npz")
                    found_versions["open_clip"] = row.pop("versions")
                    rows.append(row)
                rows += [ours(data, order, seed) for order in orders if "streamload" in given.contenders]
            if "cost" in given.contenders:
                rows += list(costs(seed, given.quick))
    result(given, rows, found_versions, seeds)


def result(given: Namespace, rows: list[dict[str, Any]], versions_: dict[str, Any], seeds: list[int]) -> None:
    medians = turns.medians(rows)
    for label, row in medians.items():
        for worst in (name for name in row if name.startswith("worst_")):
            row[worst] = max(row_[worst] for row_ in rows if row_["label"] == label)
    turns.write(
        given,
        "shuffle",
        {
            "settings": [
                {
                    "data": data.name,
                    "shards": len(data.sizes),
                    "samples": sum(data.sizes),
                    "ranks": data.ranks,
                    "batch": data.batch,
                }
                for data, _, _ in plan(given.quick)
            ],
            "versions": versions_,
            "seeds": seeds,
            "rounds": rows,
            "medians": medians,
            "targets": targets(medians),
        },
    )


def targets(medians: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """At least open_clip's quality where 64 of its workers run, and what following costs."""
    found = []
    own, theirs = (medians.get(f"8 ranks: {name}") for name in (DEFAULT, BESIDE))
    smaller = {
        "rank_pairs": "pairs of one shard in a rank's batch",
        "worst_rank_pairs": "pairs of one shard in the worst batch of a rank",
        "first_epoch_rank_pairs": "pairs of one shard in a rank's batch, first epoch",
        "pairs": "pairs of one shard in a global batch",
        "worst_pairs": "pairs of one shard in the worst global batch",
        "first_epoch_pairs": "pairs of one shard in a global batch, first epoch",
        "again": "pairs together again in the next epoch",
    }
    larger = {
        "shards_in_1": "shards in a step",
        "shards_in_8": "shards in 8 steps",
        "gap": "gap between samples inside a shard",
        "span": "from a shard's first sample to its last",
    }
    for names, limit in ((smaller, "at_most"), (larger, "at_least")):
        for name, claim in names.items():
            value = own[name] / theirs[name] if own and theirs else None
            found.append(turns.target(f"{claim}, × open_clip's", value, **{limit: 1.0}))
    costs_ = [row["us_per_sample"] for label, row in medians.items() if label.startswith("cost, default")]
    found.append(
        turns.target(
            "following the order, µs a sample and worker", max(costs_, default=None), at_most=COST_LIMIT_US
        )
    )
    return found


def permuted(data: Data, seed: int) -> dict[str, Any]:
    """A new permutation of all samples in each epoch."""
    draws = np.random.default_rng(seed)
    steps = sum(data.sizes) // (data.batch * data.ranks)
    shards, samples = listed(data.sizes)
    epochs = []
    for _ in range(EPOCHS):
        order = draws.permutation(shards.size)[: steps * data.batch * data.ranks].reshape(steps, -1)
        epochs.append(Epoch(shards[order], samples[order]))
    return {**head(data, "permutation", seed), **measures(*epochs, data.sizes, data.ranks)}


def stock(data: Data, workers: int, seed: int, python: Path | None, out: Path) -> dict[str, Any]:
    """open_clip's own order, made by its own code in its own environment."""
    job = {
        "sizes": data.sizes,
        "ranks": data.ranks,
        "batch": data.batch,
        "workers": workers,
        "epochs": EPOCHS,
        "seed": seed,
        "out": str(out),
    }
    said = subprocess.run(
        [str(python), "-m", "benchmarks.contenders.openclip_order", json.dumps(job)],
        cwd=turns.ROOT,
        env={**os.environ, "PYTHONPATH": str(turns.ROOT), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    with np.load(out) as arrays:
        epochs = [Epoch(*pair) for pair in zip(arrays["shards"], arrays["samples"], strict=True)]
    total = workers * data.ranks
    return {
        **head(data, f"open_clip, {total} worker{'s' if total > 1 else ''}", seed),
        **measures(*epochs, data.sizes, data.ranks),
        **json.loads(said.stdout),
    }


def ours(data: Data, order: Ours, seed: int) -> dict[str, Any]:
    """streamload's order, by the modules that ship."""
    options = order.options(data, seed)
    followed = [epoch_of(options, data.sizes, epoch, data.batch * data.ranks) for epoch in range(EPOCHS)]
    epochs, opened = zip(*followed, strict=True)
    return {
        **head(data, order.name, seed),
        "lanes": options.lanes,
        "window": options.window,
        **measures(*epochs, data.sizes, data.ranks),
        "open": max(opened),
        **_cold(data, options),
    }


def _cold(data: Data, options: OrderOptions) -> dict[str, float]:
    """What a run's first pass needs to have arrived: for its first batches, in batches, and at its end."""
    batch = data.batch * data.ranks
    given, at_the_end = [0, 0], 0
    for group in range(options.groups):
        numbers = np.arange(sum(data.sizes) // options.groups)
        due_key = key(options.seed, DUE, 0, group, 0)
        due = due_times(due_key, numbers, options.window, options.opens_slowly)
        due = np.sort(due) >> 16
        for step in (1, 2):
            given[step - 1] += min(int(due[step * batch // options.groups - 1]) + 1, numbers.size)
        at_the_end += int(np.count_nonzero(due >= numbers.size))
    return {
        "first_batch": round(given[0] / batch, 2),
        "next_batch": round(given[1] / batch, 2),
        "at_the_end": round(at_the_end / sum(data.sizes), 3),
    }


def costs(seed: int, quick: bool) -> Iterator[dict[str, Any]]:
    """CPU time of following and dealing, over one pass of a group."""
    total = 20_000 if quick else COST_SAMPLES
    cases = [(8, window, 256, "") for window in (1000, 10_000, 100_000)]
    cases += [(default_lanes(slice_), default_window(slice_), slice_, "default, ") for slice_ in (256, 2048)]
    for lanes, window, slice_, which in cases:
        for size in (100, 1000, 10_000):
            options = OrderOptions(seed, 1, lanes, window)
            times = [seconds_of(options, (size,) * (total // size), slice_) for _ in range(COST_TIMES)]
            yield {
                "label": f"cost, {which}lanes {lanes}, window {window:,}, shards of {size:,}",
                "contender": "cost",
                "data": f"shards of {size:,}",
                "round": seed,
                "lanes": lanes,
                "window": window,
                "shard_samples": size,
                "us_per_sample": round(min(times) / total * 1e6, 3),
            }


def listed(sizes: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All samples as listed: their shards, and their numbers in them."""
    shards = np.repeat(np.arange(len(sizes)), sizes)
    return shards, np.arange(shards.size) - np.cumsum([0, *sizes])[shards]


def head(data: Data, contender: str, seed: int) -> dict[str, Any]:
    return {
        "label": f"{data.name}: {contender}",
        "contender": contender,
        "data": data.name,
        "round": seed,
    }


if __name__ == "__main__":
    main()
