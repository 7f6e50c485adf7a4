"""What daemons on nodes of their own gain a training whose data is far away, and what leaves the origin.

Question: how long is an epoch from nothing, and how much of it is spent waiting, with 0, 1 and 2 daemons
beside the training, at several speeds of a node's link to the origin? And how much leaves the origin if
several trainings share a cache?

Command: python -m benchmarks.daemons

Photographs on an origin that is far away: each node, the trainer's and each daemon's, has a link of its own
to it that carries R bytes a second, shared by all of the node's connections; the origin itself has enough for
all. So more nodes bring more, as on spot machines, each of which has a network of its own. (A link is a
server of the same files in a process of its own with a token bucket, which the node has as its HTTP proxy.)
The shared cache is a folder, fast and near as a file system in the trainers' zone.

A training is a process with the default transform and one worker, whose step of 8 images takes 0.32 s,
asleep as for a device: it consumes 25 images a second, some 2.7 MB/s. R is a quarter of that, half of it, or
all. The data is 22 MB, and what is proportioned to data of terabytes is made as much smaller: shards of 540
KB, 4 lanes, a shuffle window of 40 samples, 2 MB that the trainer fetches ahead by itself, 2 shards at a time
for a daemon.

Every run begins from nothing: empty caches, an empty shared one. The daemons (`streamload daemon
--shared-cache …`) are there first and wait for a run; the trainer publishes its own when it begins, and
stores in the shared cache what it fetches itself (`write_back`). All orders of a round are of one seed. As
nodes wait nearly all of the time, for links or steps, what is compared runs side by side, each variant with
nodes, links and a shared cache of its own: what the machine does falls on all of them at the same time.

- epoch: from iter() to the end of the epoch. It can't be shorter than "least": the steps, or the data over as
  many links as there are nodes.
- waiting: the share of the epoch in which the training waited for a batch, by loader.stats().
- from the origin: bytes of shards that went out on all links until all had ended, over the bytes of the data.

Several trainers: each on a node of its own, all of one seed and begun at once, so that they want the same
shards at the same moment, the worst case; with one daemon, R half of what one of them consumes; the longest
of their epochs, the mean of the rest. "Filled before": a daemon brings all by `--once` first, then the
trainers begin; what it fetched is counted with them.

Result: results/daemons.json; docs/results/many-nodes.md has it as tables.

Explanation: a daemon looks every 5 s for what is wanted, by what a trainer tells every 10 s, and works in the
order of need, as the trainer does: until it is far enough in front, both want the same shards at the same
time. These epochs take less than a minute where real ones take hours, so the start weighs more here.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import machine, turns
from benchmarks.daemons_nodes import CONCURRENCY, LOADER, STEP_SECONDS, Data, Variant, World
from benchmarks.turns import Row

SHARDS, SAMPLES_PER_SHARD = 40, 5
QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD = 8, 4
SHARES = (0.25, 0.5, 1.0)
SIDE_BY_SIDE = [
    *([Variant(daemons, share=share) for daemons in (0, 1, 2)] for share in SHARES),
    [Variant(1, trainers=2)],
    [Variant(1, trainers=3)],
    [Variant(trainers=3, filled=True)],
]
QUICK = [[Variant(1, share=1.0), Variant(trainers=2, share=1.0, filled=True)]]


def main() -> None:
    names = list(dict.fromkeys(v.name for variants in SIDE_BY_SIDE + QUICK for v in variants))
    given = turns.arguments(__doc__, rounds=2, names=names)
    shards, per_shard = (
        (QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD) if given.quick else (SHARDS, SAMPLES_PER_SHARD)
    )
    rows: list[Row] = []
    with turns.photographs(shards * per_shard, per_shard) as (directory, total_bytes):
        data = Data(directory / "shards", shards, shards * per_shard, total_bytes)
        for round_ in range(given.rounds):
            found: list[Row] = []
            for variants in turns.rotated(QUICK if given.quick else SIDE_BY_SIDE, round_):
                variants = [variant for variant in variants if variant.name in given.contenders]
                with turns.empty_directory(directory) as place:
                    found += side_by_side(data, variants, place, given.python, round_)
            rows += compared(found)
    turns.write(given, "daemons", content(given, data, rows))


def content(given: argparse.Namespace, data: Data, rows: list[Row]) -> Row:
    return {
        "settings": {
            "samples": data.samples,
            "shards": data.shards,
            "bytes": data.total_bytes,
            **LOADER,
            "step_seconds": STEP_SECONDS,
            "consumed_bytes_per_second": data.consumed_bytes_per_second,
            "daemon_concurrency": CONCURRENCY,
        },
        "versions": turns.versions(rows),
        "seeds": list(range(given.rounds)),
        "rounds": rows,
        "medians": turns.medians(rows),
        "targets": targets(rows),
    }


def targets(rows: Sequence[Row]) -> list[Row]:
    several = [row for row in rows if row["trainers"] > 1]
    filled = [row["from_origin"] for row in several if row["filled"]]
    at_once = [row["from_origin"] for row in several if not row["filled"]]
    return [
        turns.target(
            "batches that differ between the runs of a round",
            sum(row["other_batches"] for row in rows),
            at_most=0,
        ),
        turns.target(
            "several trainers, filled before: bytes from the origin, × the data's, the most of all rounds",
            max(filled, default=None),
            at_most=1.0,
        ),
        turns.target(
            "several trainers and a daemon, begun at once from nothing: the same",
            max(at_once, default=None),
            at_most=1.0,
        ),
    ]


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows of a round, with how many batches of each differ from those of the first trainer of all."""
    first = rows[0]["digests"][0]
    done = []
    for row in rows:
        differ = sum(
            found != expected
            for digests in row["digests"]
            for found, expected in zip(digests, first, strict=True)
        )
        done.append(
            {key: value for key, value in row.items() if key != "digests"} | {"other_batches": differ}
        )
    return done


def said(row: Row) -> str:
    """A row in a line."""
    return (
        f"{row['label']}, round {row['round']}: {row['seconds']:.1f} s (least {row['least_seconds']:.1f}), "
        f"waiting {row['waited_share']:.0%}, {row['from_origin']:.2f} × from the origin, "
        f"{row['shared_hits']:.0f} shards from the shared cache"
    )


def side_by_side(data: Data, variants: Sequence[Variant], place: Path, python: Path, seed: int) -> list[Row]:
    """Run variants at the same time, each as a world of its own; a row of each."""
    load = machine.load()
    with contextlib.ExitStack() as stack:
        worlds = []
        for number, variant in enumerate(variants):
            world = World(data, variant, place / str(number), python, seed)
            worlds.append(stack.enter_context(world))
        for world in worlds:
            world.prepare()
        for world in worlds:
            world.begin()
        with ThreadPoolExecutor(max(1, len(worlds))) as pool:
            rows = [{**row, "load_before": load} for row in pool.map(World.finish, worlds)]
    for row in rows:
        print(said(row), file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
