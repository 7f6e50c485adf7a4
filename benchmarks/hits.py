"""How much of an epoch comes from the cache when it holds half of the data.

Question: with room for a half of the data, what share of it does a warm epoch not have to fetch? And with
room for all?

Command: python -m benchmarks.hits

640 small shards over a server on loopback; 2 ranks with 2 workers each share one tier, as torchrun would
start them, and read 3 epochs in step (rank.py). First the limit has room for all, which tells what the data
takes in the tier (data, names, index); then it is half of that. Warm are the second and the third epoch.

- hits: the share of the data's bytes that the server was not asked for in an epoch, by the server's own log.
  An epoch of the log goes from the end of the one before to its own end: what is fetched ahead for the next
  one counts in this one. hits_counted is what the loaders count: shards that were whole when they were first
  needed.
- live_bytes: what had to be there whatever is kept: shards and parts that any process of the ranks has open,
  parts being filled, and what waits to be deleted until its readers are through. Looked at four times a
  second; the mean over the epoch.
- expected: (limit - live) / data. A pass reads each shard once, so only what lay there before can hit; hits
  may be more than that, as some of what is open when an epoch begins is of use in it, too.

Result: results/hits.json; docs/results/cache.md has it as a table.

Explanation: the shard goes whose next visit is farthest by the plan that all runs of the node announce
(cache/demand.py, cache/eviction.py), and one that is needed later than all that is kept isn't fetched early.
With the least recently used going first, a shard would go nearly always just before it is needed: 15 % hits.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import link, machine, process_tree, turns
from benchmarks.watch import Watch
from streamload.cache.directory import bytes_below
from streamload.cache.tier import Tier
from streamload.testing.shards import ShardOptions, write_shards

SHARDS, SAMPLES_PER_SHARD = 640, 24
RANKS, WORKERS, EPOCHS = 2, 2, 3
LOADER = {"batch_size": 64, "num_workers": WORKERS, "lanes": 8, "shuffle": 500, "ahead": "2MB"}
OPTIONS = ShardOptions(image_side=(8, 8), padding_bytes=(10_000, 30_000))
_EVERY_SECONDS = 0.25
_FAST = 1e12  # no limit on the link
_LIMIT_SECONDS = 900

Row = dict[str, Any]


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=["streamload"])
    shards = 32 if given.quick else SHARDS
    loader = LOADER | ({"batch_size": 16, "lanes": 4, "shuffle": 50, "ahead": "200KB"} if given.quick else {})
    rows: list[Row] = []
    with turns.scratch() as directory:
        paths = write_shards(directory / "shards", [SAMPLES_PER_SHARD] * shards, seed=5, options=OPTIONS)
        total_bytes = sum(path.stat().st_size for path in paths)
        with link.serving(directory / "shards", _FAST) as served:
            for round_ in range(given.rounds):
                room = 4 * total_bytes
                for label in ("all fits", "half fits"):
                    job = {"urls": turns.pattern(served.url, shards), "epochs": EPOCHS}
                    job["loader"] = loader | {"seed": round_, "cache_size": room}
                    with turns.empty_directory(directory) as cache:
                        found, data_bytes = measure(served, job, cache, given.python, total_bytes)
                    rows += [{"label": label, "round": round_, **row} for row in found]
                    print("\n".join(map(said, rows[-EPOCHS:])), file=sys.stderr, flush=True)
                    room = data_bytes // 2
    versions = turns.versions(rows)
    warm = [row for row in rows if row["epoch"] > 1]
    turns.write(
        given,
        "hits",
        {
            "settings": {
                "shards": shards,
                "samples": shards * SAMPLES_PER_SHARD,
                "bytes": total_bytes,
                "ranks": RANKS,
                "epochs": EPOCHS,
                **loader,
            },
            "versions": versions,
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": turns.medians([row | {"label": f"{row['label']}, warm epochs"} for row in warm]),
            "targets": [
                turns.target(
                    "half fits: hits / ((limit − live) / data), the least of all warm epochs",
                    min(row["hits"] / row["expected"] for row in warm if row["label"] == "half fits"),
                    at_least=0.95,
                ),
                turns.target(
                    "all fits: hits, the least of all warm epochs",
                    min(row["hits"] for row in warm if row["label"] == "all fits"),
                    at_least=0.98,
                ),
            ],
        },
    )


def said(row: Row) -> str:
    """A row in a line."""
    return (
        f"{row['label']}, round {row['round']}, epoch {row['epoch']}: hits {row['hits']:.1%} "
        f"(counted {row['hits_counted']:.1%}), limit {row['limit_bytes']:,}, live {row['live_bytes']:,}, "
        f"data {row['data_bytes']:,}, expected {row['expected']:.1%}; {row['seconds']:.1f} s"
    )


def measure(
    served: link.Link, job: dict[str, Any], cache: Path, python: Path, total_bytes: int
) -> tuple[list[Row], int]:
    """Run the ranks; a row for each epoch, and what all that the tier holds at the end takes."""
    load, began = machine.load(), time.monotonic()
    job["loader"]["cache_dir"] = str(cache / "tier")
    with live_watch(cache / "tier") as watch:
        ranks = run_ranks(job, python)
    used_bytes, limit_bytes = Tier.open(cache / "tier").used_bytes, job["loader"]["cache_size"]
    data_bytes = used_bytes if used_bytes < limit_bytes / 2 else 2 * limit_bytes
    rows = []
    for number, epoch in enumerate(zip(*(rank["epochs"] for rank in ranks), strict=True), start=1):
        ended = max(part["ended"] for part in epoch)
        fetched = served.fetched_bytes(began, ended)
        live_bytes = watch.mean_bytes(began, ended)
        hits, misses = (sum(part[f"tier_{what}"] for part in epoch) for what in ("hits", "misses"))
        rows.append(
            {
                "contender": "streamload",
                "epoch": number,
                "load_before": load,
                "hits": 1 - fetched / total_bytes,
                "hits_counted": hits / (hits + misses),
                "expected": min(1.0, (limit_bytes - live_bytes) / data_bytes),
                "limit_bytes": limit_bytes,
                "live_bytes": live_bytes,
                "data_bytes": data_bytes,
                "fetched_bytes": fetched,
                "samples": sum(part["samples"] for part in epoch),
                "range_reads": sum(part["range_reads"] for part in epoch),
                "shards_evicted": sum(part["shards_evicted"] for part in epoch),
                "seconds": ended - began,
                "versions": ranks[0]["versions"],
            }
        )
        began = ended
    return rows, data_bytes


def run_ranks(job: dict[str, Any], python: Path, ranks: int = RANKS) -> list[dict[str, Any]]:
    """Start the ranks as torchrun would; what each says.

    Raises:
        RuntimeError: one failed, or they took longer than a quarter of an hour.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {name: value for name, value in os.environ.items() if not name.startswith("STREAMLOAD_")}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(turns.ROOT), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [str(python), "-m", "benchmarks.rank", json.dumps(job)],
            cwd=turns.ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + _LIMIT_SECONDS
    try:
        outputs = [process.communicate(timeout=deadline - time.monotonic())[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"the ranks ended with {[process.returncode for process in processes]}")
    return [json.loads(output) for output in outputs]


def live_watch(root: Path) -> Watch:
    """Looks at what of a tier is in use by the descendants of this process, once the tier is there."""
    root = root.resolve()
    return Watch(
        lambda: live_bytes(Tier.open(root)) if (root / "tier.json").is_file() else None, _EVERY_SECONDS
    )


def live_bytes(tier: Tier) -> int:
    """What of a tier can't go now: open in a descendant of this process, being filled, or being deleted."""
    open_now = open_directories(tier.root, process_tree.pids())
    in_use = sum(held.size_bytes for held in tier.shards() if held.kind == "parts" or held.path in open_now)
    return in_use + sum(map(bytes_below, tier.own("trash")))


def open_directories(root: Path, pids: list[int]) -> set[Path]:
    """The directories two levels below `root` that processes have files open in."""
    found = set()
    for pid in pids:
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue  # it has ended
        for descriptor in descriptors:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue  # it was closed
            if target.startswith(f"{root}/"):
                found.add(root.joinpath(*Path(target).relative_to(root).parts[:2]))
    return found


if __name__ == "__main__":
    main()
