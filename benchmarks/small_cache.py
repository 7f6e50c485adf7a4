"""Epochs with a cache that is smaller than the shards that have to be open at once.

Question: what do an epoch and its first batch take, and how much is fetched, where the cache has room for
fewer shards than lanes and window open?

Command: python -m benchmarks.small_cache

10 shards of 4,000 samples of 10 KB over a server on loopback that answers 20 ms late; the cache has room for
4.1 of them. One rank with 4 workers reads 2 epochs and computes nothing (rank.py).

- defaults: neither lanes nor shuffle are given (8 and 10,000, by which nearly all shards are open at once).
- given: the same numbers, given: a loader keeps to them, however little room there is.
- narrow: lanes=2, shuffle=2000, which fit.

- fetched: what the server sent in an epoch, by its own log, as a multiple of the data; requests: by the same
  log. range_reads: samples read from the origin, as the cache had no room for their shard.

Result: results/small_cache.json.
"""

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import hits, link, machine, turns
from streamload.testing.shards import ShardOptions, write_shards

SHARDS, SAMPLES_PER_SHARD, EPOCHS = 10, 4_000, 2
QUICK_SAMPLES_PER_SHARD, QUICK_BATCH_SIZE = 100, 4
ROOM_SHARDS = 4.1
LATENCY_SECONDS = 0.02
WORKERS = 4
OPTIONS = ShardOptions(image_side=(8, 8), padding_bytes=(7_000, 9_000))
CONTENDERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "given": {"lanes": 8, "shuffle": 10_000},
    "narrow": {"lanes": 2, "shuffle": 2_000},
}
_FAST = 1e12  # no limit on the link

Row = dict[str, Any]


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=list(CONTENDERS))
    per_shard = QUICK_SAMPLES_PER_SHARD if given.quick else SAMPLES_PER_SHARD
    rows: list[Row] = []
    with turns.scratch() as directory:
        paths = write_shards(directory / "shards", [per_shard] * SHARDS, seed=7, options=OPTIONS)
        total_bytes = sum(path.stat().st_size for path in paths)
        limit_bytes = int(total_bytes / SHARDS * ROOM_SHARDS)
        with link.serving(directory / "shards", _FAST, latency_seconds=LATENCY_SECONDS) as served:
            for round_ in range(given.rounds):
                for name in turns.rotated(given.contenders, round_):
                    loader = {"num_workers": WORKERS, "seed": round_, "cache_size": limit_bytes}
                    loader |= CONTENDERS[name] | ({"batch_size": QUICK_BATCH_SIZE} if given.quick else {})
                    job = {"urls": turns.pattern(served.url, SHARDS), "epochs": EPOCHS, "loader": loader}
                    with turns.empty_directory(directory) as cache:
                        found = measure(served, job, cache, given.python, total_bytes)
                    rows += [
                        {"label": f"{name}, epoch {row['epoch']}", "round": round_, **row} for row in found
                    ]
                    print("\n".join(map(said, rows[-EPOCHS:])), file=sys.stderr, flush=True)
    turns.write(
        given,
        "small_cache",
        {
            "settings": {
                "shards": SHARDS,
                "samples": SHARDS * per_shard,
                "bytes": total_bytes,
                "limit_bytes": limit_bytes,
                "latency_seconds": LATENCY_SECONDS,
                "workers": WORKERS,
                "epochs": EPOCHS,
                "contenders": CONTENDERS,
            },
            "versions": turns.versions(rows),
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": turns.medians(rows),
            "targets": [
                turns.target(
                    "defaults: the longest first batch, seconds",
                    max((row["first_batch_seconds"] for row in rows if is_of("defaults", row)), default=None),
                    at_most=2.0,
                ),
                turns.target(
                    "defaults: samples read from their origin one by one",
                    max((row["range_reads"] for row in rows if is_of("defaults", row)), default=None),
                    at_most=0,
                ),
            ],
        },
    )


def is_of(name: str, row: Row) -> bool:
    """Whether a row is of a contender."""
    return bool(row["label"].startswith(f"{name},"))


def said(row: Row) -> str:
    """A row in a line."""
    return (
        f"{row['label']}, round {row['round']}: {row['seconds']:.1f} s, first batch "
        f"{row['first_batch_seconds']:.2f} s, fetched {row['fetched']:.2f} x the data in {row['requests']:,} "
        f"requests, {row['range_reads']:,} samples read from the origin"
    )


def measure(served: link.Link, job: dict[str, Any], cache: Path, python: Path, total_bytes: int) -> list[Row]:
    """A row for each epoch of one run."""
    load, began = machine.load(), time.monotonic()
    job["loader"]["cache_dir"] = str(cache / "tier")
    (rank,) = hits.run_ranks(job, python, ranks=1)
    rows = []
    for number, epoch in enumerate(rank["epochs"], start=1):
        sent = served.requests(began, epoch["ended"])
        rows.append(
            {
                "contender": "streamload",
                "epoch": number,
                "load_before": load,
                "seconds": epoch["ended"] - epoch["began"],
                "first_batch_seconds": epoch["first_batch_seconds"],
                "fetched": sum(size for _, size in sent) / total_bytes,
                "requests": len(sent),
                "range_reads": epoch["range_reads"],
                "samples": epoch["samples"],
                "versions": rank["versions"],
            }
        )
        began = epoch["ended"]
    return rows


if __name__ == "__main__":
    main()
