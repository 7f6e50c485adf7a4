"""Shards on a network mount, copied into the cache: the first epoch beside the same shards over HTTP.

Question: when does the first batch come, how much CPU time does an image take, and how often is each byte
read from the mount?

Command: python -m benchmarks.mount (as root, with /dev/fuse)

The mount is a FUSE file system in Python that counts what is read, and the web server is in Python, too; each
is a process of its own, on loopback and without a limit. "disk" has the same files copied from a local disk
(`copy="always"`), where no server takes a part of the processors. Runs take turns, each a process of its own
with 2 workers and an empty cache; the second epoch comes from the cache.

- first batch: seconds from iter(). Target: from disk ≤ 1.3 × HTTP's.
- CPU time until then: of the training and its workers, and of the server beside it. Target: from the mount
  ≤ 1.3 × HTTP's, without the servers, which differ.
- CPU time of an image in the first epoch: of the training and its workers. Target: ≤ 1.1 × HTTP's.
- read: bytes from the mount, times the data. Target: 1.00 in the first epoch, 0 in the second.

Result: results/mount.json; docs/results/fetching.md has it as a table.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import link, machine, process_tree, turns
from benchmarks.contenders.job import versions
from tests.support.mounts import CountingMount, why_not

NAMES = ("mount", "http", "disk")
SHARDS, SAMPLES_PER_SHARD = 16, 128
QUICK_SHARDS = 2
BATCH, WORKERS = 64, 2
FAST = 1e12  # no limit on the link
FIRST_BATCH_TIMES, CPU_TIMES, READ_TIMES = 1.3, 1.1, 1.005


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(epochs_of(sys.argv[2], Path(sys.argv[3]))))
        return
    given = turns.arguments(__doc__, rounds=5, names=list(NAMES))
    if why := why_not():
        print(f"left out: {why}", file=sys.stderr)
        return
    shards = QUICK_SHARDS if given.quick else SHARDS
    rows: list[turns.Row] = []
    with (
        turns.photographs(shards * SAMPLES_PER_SHARD, SAMPLES_PER_SHARD) as (directory, total_bytes),
        link.serving(directory / "shards", FAST) as line,
        CountingMount(directory / "shards", directory / "nas") as mount,
    ):
        places = {"mount": str(mount.path), "http": line.url, "disk": str(directory / "shards")}
        for round_ in range(given.rounds):
            for name in turns.rotated(given.contenders, round_):
                with turns.empty_directory(directory) as cache:
                    load, before = machine.load(), mount.read_bytes()
                    found = measured(given.python, name, turns.pattern(places[name], shards), cache)
                row = {"label": name, "contender": name, "round": round_, "load_before": load} | found
                row["read_times"] = (mount.read_bytes() - before) / total_bytes
                rows.append(row)
                print(
                    f"{name}: {found['first_batch_seconds']:.2f} s, {found['cpu_us']:,.0f} us",
                    file=sys.stderr,
                )
    medians = turns.medians(rows)
    turns.write(
        given,
        "mount",
        {
            "settings": {"shards": shards, "samples_per_shard": SAMPLES_PER_SHARD, "bytes": total_bytes}
            | {"batch": BATCH, "workers": WORKERS},
            "versions": turns.versions(rows),
            "seeds": [0],
            "rounds": rows,
            "medians": medians,
            "targets": [
                turns.target(
                    "first batch copied from a disk, times that over HTTP",
                    turns.ratio(medians, "first_batch_seconds", "disk", "http"),
                    at_most=FIRST_BATCH_TIMES,
                ),
                turns.target(
                    "CPU time until the first batch, without the server's, times that over HTTP",
                    turns.ratio(medians, "first_batch_cpu_seconds", "mount", "http"),
                    at_most=FIRST_BATCH_TIMES,
                ),
                turns.target(
                    "CPU time of an image in the first epoch, times that over HTTP",
                    turns.ratio(medians, "cpu_us", "mount", "http"),
                    at_most=CPU_TIMES,
                ),
                turns.target(
                    "bytes from the mount in two epochs, times the data",
                    medians["mount"]["read_times"] if "mount" in medians else None,
                    at_most=READ_TIMES,
                ),
            ],
        },
    )


def measured(python: Path, name: str, urls: str, cache: Path) -> dict[str, Any]:
    """What one run says of itself, and what the servers took until its first batch."""
    command = [str(python), "-m", "benchmarks.mount", "--run", urls, str(cache)]
    environment = turns.environment() | ({"STREAMLOAD_COPY": "always"} if name == "disk" else {})
    servers = psutil.Process().children()
    before = _cpu_seconds(servers)
    with subprocess.Popen(
        command, env=environment, cwd=turns.ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # at the first batch
        server_seconds = _cpu_seconds(servers) - before
        output, _ = process.communicate(timeout=turns.LIMIT_SECONDS)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found | {"first_batch_server_cpu_seconds": server_seconds}


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def epochs_of(urls: str, cache: Path) -> dict[str, Any]:
    """The first batch of an empty cache, the CPU time of an image in each of two epochs."""
    import streamload

    torch.set_num_threads(1)
    found: dict[str, Any] = {"versions": versions("streamload", "torch")}
    with streamload.make_loader(urls, None, num_workers=WORKERS, batch_size=BATCH, cache_dir=cache) as loader:
        for name in ("cpu_us", "warm_cpu_us"):
            began, cpu, images = time.monotonic(), process_tree.cpu_seconds(), 0
            for pixels, _ in loader:
                if "first_batch_seconds" not in found:
                    found["first_batch_seconds"] = time.monotonic() - began
                    found["first_batch_cpu_seconds"] = process_tree.cpu_seconds() - cpu
                    print("first batch", flush=True)
                images += len(pixels)
            found[name] = (process_tree.cpu_seconds() - cpu) / images * 1e6
    return found


if __name__ == "__main__":
    main()
