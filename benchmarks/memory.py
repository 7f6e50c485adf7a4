"""Memory with a large shuffle window.

Question: how much memory does the whole loader take (all processes, each shared page counted once) at 2
workers with shuffle=10_000?

Command: python -m benchmarks.memory

An epoch of 20,736 samples of about 112 KB, 2.3 GB in 54 shards, all of them different, from a local server
without a limit, with empty caches, so that filling and reading are in it. PSS is the sum of
/proc/PID/smaps_rollup over the process tree, the training's own process with torch in it included; sampled
every 50 ms. Peak: from iter() to the epoch's end. Steady: the median of the epoch's second half. Before:
what the process takes at iter(), with its imports. The kernel's page cache is not in it: the kernel takes
it back when anyone wants the memory.

Contenders: streamload with shuffle=10_000 (over all workers); open_clip's loader with its windows, 5,000
samples per worker, so the same number in all; it fetches by pipe:curl. Captions to ids by a word tokenizer.

Result: results/memory.json; docs/results/start-and-memory.md has it as a table.

Explanation: open_clip's window holds the samples' bytes. streamload's holds references, 24 bytes a sample,
and the bytes stay in the tier's files until their batch is made.
"""

from pathlib import Path
from typing import Any

from benchmarks import machine, turns
from benchmarks.contenders.job import Job
from benchmarks.peers import OPEN_CLIP, STREAMLOAD
from benchmarks.turns import Contender
from streamload.testing.server import ShardServer

CONTENDERS = [STREAMLOAD, OPEN_CLIP]
SHARDS = 54
SAMPLES_PER_SHARD = 384
SHUFFLE = 10_000
LIMIT_BYTES = 1e9


def main() -> None:
    given = turns.arguments(__doc__, rounds=2, names=[contender.name for contender in CONTENDERS])
    shards, per_shard = (2, 128) if given.quick else (SHARDS, SAMPLES_PER_SHARD)
    places = turns.interpreters(given)
    contenders = turns.chosen(given, CONTENDERS)
    rows: list[dict[str, Any]] = []
    with (
        turns.photographs(shards * per_shard, per_shard) as (directory, total_bytes),
        ShardServer.spawn(directory / "shards") as server,
    ):
        for round_ in range(given.rounds):
            for contender in turns.rotated(contenders, round_):
                url = turns.pattern(server.url, shards)
                job = {
                    "urls": f"pipe:curl -f -s -L {url}" if contender.adapter == "openclip" else url,
                    "samples": shards * per_shard,
                    "epochs": 1,
                    "seed": round_,
                    "shuffle": SHUFFLE,
                    "packages": places.packages() if contender.needs_open_clip else None,
                    **contender.job,
                }
                rows.append(measure(contender, job, places.of(contender), directory))
    versions = turns.versions(rows)
    medians = turns.medians(rows)
    peak = max((row["peak_bytes"] for row in rows if row["contender"] == "streamload"), default=None)
    turns.write(
        given,
        "memory",
        {
            "settings": {
                "samples": shards * per_shard,
                "shards": shards,
                "bytes": total_bytes,
                "batch_size": Job.batch_size,
                "workers": Job.workers,
                "tokenizer": Job.tokenizer,
                "shuffle": SHUFFLE,
            },
            "versions": versions,
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "ratios": {
                "peak against open_clip": turns.ratio(medians, "peak_bytes", "streamload", "open_clip")
            },
            "targets": [turns.target("peak of the process tree's PSS, bytes", peak, at_most=LIMIT_BYTES)],
        },
    )


def measure(contender: Contender, job: dict[str, Any], python: Path, directory: Path) -> dict[str, Any]:
    load = machine.load()
    with turns.empty_directory(directory) as cache:
        ran = turns.run(contender, Job(cache_dir=str(cache), **job), python, watch_memory=True)
    epoch, memory = ran.epochs[0], ran.memory
    assert memory is not None
    return {
        "label": contender.name,
        "contender": contender.name,
        "round": job["seed"],
        "load_before": load,
        "before_bytes": memory.last_bytes(epoch.began),
        "peak_bytes": memory.peak_bytes(epoch.began, epoch.ended),
        "steady_bytes": memory.steady_bytes(epoch.began, epoch.ended),
        "samples_of_memory": len(memory.samples),
        "images": epoch.images,
        "seconds": epoch.ended - epoch.began,
        "versions": ran.result.versions,
    }


if __name__ == "__main__":
    main()
