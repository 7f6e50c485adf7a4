"""What a worker holds for itself, and whether it grows.

Question: how much memory has a worker of streamload for itself above one of a bare DataLoader, and how does
that change over 1.2 million samples?

Command: python -m benchmarks.flat

Two loaders in turn, each in a process of its own, with 2 workers and batches of 64: streamload over 16 shards
of photographs in its cache, endless, with its default transform; and a DataLoader whose workers give next to
nothing, in a process with the same imports, streamload's among them. Every 15,000 samples the private memory
of each worker is read (Private_Clean and Private_Dirty of its smaps: what would be free if it ended, but for
batches in shared memory).

- private_bytes: the mean of the workers, at the end. above_bytes: less that of the bare DataLoader's.
- slope: of a line through all points of the second half, bytes a thousand samples of one worker.
- grown_bytes: from the first point to the last, what a worker takes on the way there included.

Result: results/flat.json; docs/results/start-and-memory.md has it as a table.

Explanation: a worker keeps no samples, only references; threads that fill hold a chunk each; what a long run
could pile up (views of shards, connections, remembered words) is bounded. A forked worker comes to own what
it shared with its rank as it touches it, and the heap finds its shape: that is the first half.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, turns
from streamload.testing.server import ShardServer

NAMES = ("streamload", "bare DataLoader")
SAMPLES, EVERY = 1_200_000, 15_000
SHARDS, SAMPLES_PER_SHARD = 16, 128
ABOVE_BYTES, SLOPE_BYTES = 60e6, 10e3

Row = dict[str, Any]


def main() -> None:
    given = turns.arguments(__doc__, rounds=1, names=NAMES)
    samples, every, shards = (1_280, 128, 2) if given.quick else (SAMPLES, EVERY, SHARDS)
    rows: list[Row] = []
    with (
        turns.photographs(shards * SAMPLES_PER_SHARD, SAMPLES_PER_SHARD) as (directory, total_bytes),
        ShardServer.spawn(directory / "shards") as server,
    ):
        for round_ in range(given.rounds):
            for name in turns.rotated([name for name in NAMES if name in given.contenders], round_):
                with turns.empty_directory(directory) as cache:
                    job = {
                        "kind": name,
                        "urls": turns.pattern(server.url, shards),
                        "cache_dir": str(cache),
                        "seed": round_,
                        "samples": samples,
                        "every": every,
                    }
                    row = {"label": name, "contender": name, "round": round_, "load_before": machine.load()}
                    rows.append(row | measured(given.python, job))
    versions = turns.versions(rows)
    medians = turns.medians(rows)
    above = slope = None
    if medians.keys() == set(NAMES):
        own, bare = (medians[name] for name in NAMES)
        above, slope = own["private_bytes"] - bare["private_bytes"], own["slope"]
        own["above_bytes"] = above
    turns.write(
        given,
        "flat",
        {
            "settings": {"samples": samples, "every": every, "shards": shards, "bytes": total_bytes},
            "versions": versions,
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "targets": [
                turns.target("private memory of a worker above a bare one's, bytes", above, ABOVE_BYTES),
                turns.target("its growth in the second half, bytes a thousand samples", slope, SLOPE_BYTES),
            ],
        },
    )


def measured(python: Path, job: Row) -> Row:
    """Run one loader to its end, and what its workers held meanwhile."""
    points, versions = [], {}
    for said in lines_of([str(python), "-m", "benchmarks.flat_rank", json.dumps(job)]):
        if "versions" in said:
            versions = said["versions"]
        else:
            points.append((said["samples"], float(np.mean(said["private_bytes"]))))
    later = np.array(points[len(points) // 2 :])
    slope = float(np.polyfit(later[:, 0], later[:, 1], 1)[0])
    return {
        "private_bytes": points[-1][1],
        "grown_bytes": points[-1][1] - points[0][1],
        "slope": slope * 1000 * len(said["workers"]),
        "points": points,
        "versions": versions,
    }


def lines_of(command: list[str]) -> Iterator[Row]:
    """What a process says, line by line.

    Raises:
        CalledProcessError: it failed.
    """
    with subprocess.Popen(
        command, cwd=turns.ROOT, env=turns.environment(), stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        yield from map(json.loads, running.stdout)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)


if __name__ == "__main__":
    main()
