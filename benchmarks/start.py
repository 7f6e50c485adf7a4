"""Starting: a loader's first batch with the bytes near, and the command's first words.

Question: how long after a training makes its loader does the first batch come, when every shard is in the
cache, compared with a DataLoader of torch that does the same work; and how long do `streamload --help` and
the first request of `streamload warm` take?

Command: python -m benchmarks.start

Contenders: streamload with its default transform, its shards in a cache on disk that was filled before; and
a bare DataLoader (contenders/bare.py) that reads the same shards with the floor's reader
(streamload/profile/floor.py), makes the same batches of them and has imported the same modules, but has no
cache, no order and no state. Both with 2 workers that are forked, with 2 that are spawned, and with 2 of a
forkserver, as Python 3.14 starts them unless told otherwise.

- from making: from before the loader is made, all imports done, to the first batch. Target: ≤ 1.3 × the bare
  DataLoader's.
- from iter: the same from iter().
- the command: wall time of a process from its start, `streamload --help` to its end, `streamload warm
  http://…` to the first request that the server sees, with an empty cache. Target: < 0.5 s each.

Result: results/start.json; docs/results/start-and-memory.md has it as a table.

Explanation: a forked worker begins in milliseconds, so most of the time is the batch itself, decoded by one
worker while the other makes the second one. A worker that isn't forked from the training imports torch and
all else first (from Python 3.14 on, a forkserver has imported once what the script's own module does). What
streamload does beyond that is to open the cache and agree on an order; the command line imports no torch.
"""

import subprocess
import sys
import time
from pathlib import Path

from benchmarks import link, machine, near, turns
from benchmarks.contenders.job import Job
from benchmarks.turns import ROOT, Contender, Row
from streamload.daemon.warm import warm

METHODS = ("fork", "spawn", "forkserver")
OWN = {"preprocess": "default"}
PAIRS = [
    (
        Contender(f"streamload, {method}", "streamload_", {**OWN, "start_method": method}),
        Contender(f"bare DataLoader, {method}", "bare", {**OWN, "start_method": method}, reads="path"),
    )
    for method in METHODS
]
HELP, WARM = "streamload --help", "streamload warm, to its first request"
COMMANDS = (HELP, WARM)
SHARDS, SAMPLES_PER_SHARD = 8, 64
QUICK_SHARDS = 2
FAST = 1e12  # no limit on the link
AT_MOST_TIMES, AT_MOST_SECONDS = 1.3, 0.5


def main() -> None:
    contenders = [contender for pair in PAIRS for contender in pair]
    given = turns.arguments(
        __doc__, rounds=9, names=[*(contender.name for contender in contenders), *COMMANDS]
    )
    shards = QUICK_SHARDS if given.quick else SHARDS
    samples = shards * SAMPLES_PER_SHARD
    all_of_them = [*turns.chosen(given, contenders), *(name for name in COMMANDS if name in given.contenders)]
    rows: list[Row] = []
    with turns.photographs(samples, SAMPLES_PER_SHARD) as (directory, total_bytes):
        cache = directory / "cache"
        with link.serving(directory / "shards", FAST) as line:
            report = warm(turns.pattern(line.url, shards), cache_dir=cache, cache="disk")
            assert not report.failures, report.failures
            for round_ in range(given.rounds):
                for contender in turns.rotated(all_of_them, round_):
                    if isinstance(contender, str):
                        rows.append(command(contender, given.python, directory, shards, round_))
                        continue
                    base = line.url if contender.reads == "url" else str(directory / "shards")
                    job = Job(
                        contender.data(base, shards),
                        samples=samples,
                        epochs=1,
                        seed=round_,
                        cache_dir=str(cache),
                        **contender.job,
                    )
                    rows.append(first_batch(contender, job, given.python, line))
    content = turns.content(given, near.settings(samples, shards, total_bytes), rows)
    medians = content["medians"]
    against = {
        method: {
            metric: turns.ratio(medians, metric, own.name, bare.name)
            for metric in ("making_to_first_batch_seconds", "iter_to_first_batch_seconds")
        }
        for method, (own, bare) in zip(METHODS, PAIRS, strict=True)
    }
    turns.write(
        given,
        "start",
        {
            **content,
            "ratios": against,
            "targets": [
                *(
                    turns.target(
                        f"workers by {method}: first batch, × the time of a bare DataLoader",
                        found["making_to_first_batch_seconds"],
                        at_most=AT_MOST_TIMES,
                    )
                    for method, found in against.items()
                ),
                *(
                    turns.target(f"{name}, s", medians.get(name, {}).get("seconds"), at_most=AT_MOST_SECONDS)
                    for name in COMMANDS
                ),
            ],
        },
    )


def first_batch(contender: Contender, job: Job, python: Path, line: link.Link) -> Row:
    load = machine.load()
    ran = turns.run(contender, job, python)
    (epoch,) = ran.epochs
    return {
        "label": contender.name,
        "contender": contender.name,
        "round": job.seed,
        "load_before": load,
        "images": epoch.images,
        "making_to_first_batch_seconds": epoch.first_batch - ran.result.making,
        "iter_to_first_batch_seconds": epoch.first_batch - epoch.began,
        "fetched_bytes": line.fetched_bytes(ran.started, float("inf")),
        "limits": ran.result.limits,
        "versions": ran.result.versions,
    }


def command(name: str, python: Path, directory: Path, shards: int, round_: int) -> Row:
    """The wall time of a command's start; the interpreter's own is in it."""
    load = machine.load()
    seconds = help_seconds(python) if name == HELP else warm_seconds(python, directory, shards)
    return {
        "label": name,
        "contender": name,
        "round": round_,
        "load_before": load,
        "seconds": seconds,
        "limits": (),
        "versions": {"python": sys.version.split()[0]},
    }


def help_seconds(python: Path) -> float:
    began = time.monotonic()
    subprocess.run([python, "-m", "streamload", "--help"], **_AROUND)
    return time.monotonic() - began


def warm_seconds(python: Path, directory: Path, shards: int) -> float:
    with (
        link.serving(directory / "shards", FAST) as line,
        turns.empty_directory(directory) as cache,
    ):
        arguments = ["warm", turns.pattern(line.url, shards), "--cache-dir", str(cache), "--cache", "disk"]
        began = time.monotonic()
        subprocess.run([python, "-m", "streamload", *arguments], **_AROUND)
        asked = line.first_request()
    assert asked is not None
    return asked - began


_AROUND = {"cwd": ROOT, "env": turns.environment(), "check": True, "stdout": subprocess.DEVNULL}


if __name__ == "__main__":
    main()
