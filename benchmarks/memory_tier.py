"""What a tier in memory gains over one on the disk.

Question: the data is in the tier; how many images a second, and how much CPU time for each, does streamload
give from a tier on the disk whose pages are in the kernel's page cache, from one on the disk whose pages have
just been dropped from it, and from one in memory (tmpfs)?

Command: python -m benchmarks.memory_tier

"train" decodes, resizes and normalises as in warm.py. "read" does nothing but look at how many bytes a
sample has, so that what is measured is the tier: reading, verifying the checksum, handing over. Each run is a
process of its own with 2 workers; the tiers are filled once, by the first run of each, and an epoch goes
before those that are measured (one of training, six of reading). Pages are dropped right before each
(`posix_fadvise`, after `fsync`); "disk bytes" is what the kernel counted as read from the disk by all
processes, so it shows whether that worked.

Result: results/memory_tier.json; docs/results/cache.md has it as a table.

Explanation: a page of the page cache and a page of tmpfs are the same thing to `pread`, and both are a copy
from memory to memory. What the disk costs is waiting for what isn't in the page cache: where the disk keeps
up with the training it is hidden by readahead, and where it doesn't, memory gains what it lacks.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import machine, turns
from benchmarks.contenders.job import Job
from benchmarks.turns import Contender
from streamload.testing.server import ShardServer

MEMORY = Path("/dev/shm")
TIERS = {
    "disk, pages cached": {"cache_dir": "disk"},
    "disk, pages dropped": {"cache_dir": "disk", "drop_pages": True},
    "memory": {"cache_dir": "memory"},
}
WORKS = {"train": {"preprocess": "default", "epochs": 2}, "read": {"preprocess": "none", "epochs": 7}}
CONTENDERS = [
    Contender(f"{work}: {tier}", "streamload_", {**there, **done})
    for work, done in WORKS.items()
    for tier, there in TIERS.items()
]
SHARDS = 8
SAMPLES_PER_SHARD = 192


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=[contender.name for contender in CONTENDERS])
    shards, per_shard = (2, 64) if given.quick else (SHARDS, SAMPLES_PER_SHARD)
    contenders = turns.chosen(given, CONTENDERS)
    rows: list[dict[str, Any]] = []
    with (
        turns.photographs(shards * per_shard, per_shard) as (directory, total_bytes),
        tiers(directory) as places,
        ShardServer.spawn(directory / "shards") as server,
    ):
        for round_ in range(given.rounds):
            for contender in turns.rotated(contenders, round_):
                job = {
                    "urls": turns.pattern(server.url, shards),
                    "samples": shards * per_shard,
                    "seed": round_,
                    **contender.job,
                    "cache_dir": str(places[contender.job["cache_dir"]]),
                }
                rows.append(measure(contender, Job(**job), given.python))
    versions = turns.versions(rows)
    medians = turns.medians(rows)
    turns.write(
        given,
        "memory_tier",
        {
            "settings": {
                "samples": shards * per_shard,
                "shards": shards,
                "bytes": total_bytes,
                "batch_size": Job.batch_size,
                "workers": Job.workers,
            },
            "versions": versions,
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "ratios": {
                f"{metric} in memory against the disk": {
                    f"{work}: {tier}": turns.ratio(medians, metric, f"{work}: memory", f"{work}: {tier}")
                    for work in WORKS
                    for tier in ("disk, pages cached", "disk, pages dropped")
                }
                for metric in ("images_per_second", "cpu_us_per_image")
            },
            "targets": [],
        },
    )


@contextmanager
def tiers(directory: Path) -> Iterator[dict[str, Path]]:
    """A place for a tier on the disk and one in memory."""
    in_memory = Path(tempfile.mkdtemp(prefix="streamload-bench-", dir=MEMORY))
    try:
        yield {"disk": directory / "tier", "memory": in_memory}
    finally:
        shutil.rmtree(in_memory, ignore_errors=True)


def measure(contender: Contender, job: Job, python: Path) -> dict[str, Any]:
    os.sync()  # what a fill has written isn't on its way to the disk any more
    load = machine.load()
    ran = turns.run(contender, job, python)
    measured = ran.epochs[1:]
    images = sum(epoch.images for epoch in measured)
    seconds = sum(epoch.ended - epoch.began for epoch in measured)
    return {
        "label": contender.name,
        "contender": contender.name,
        "round": job.seed,
        "load_before": load,
        "images": images,
        "seconds": seconds,
        "images_per_second": images / seconds,
        "cpu_us_per_image": sum(epoch.cpu_seconds for epoch in measured) / images * 1e6,
        "disk_bytes_per_image": sum(epoch.disk_bytes for epoch in measured) / images,
        "versions": ran.result.versions,
    }


if __name__ == "__main__":
    main()
