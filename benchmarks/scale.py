"""What a run of a million shards on a thousand ranks costs one of them at its start, and their store.

Question: for 10**6 shards given as one brace pattern, on 1,024 ranks of 128 nodes, how long does it take
until a rank and its workers have their order, and how much memory do they take for it? And what does
following the order cost a worker for each sample? What do the decisions and reports of all ranks cost the
process that has torch.distributed's store, and how does that grow?

Command: python -m benchmarks.scale (--contenders store: only the last question; the rest of the result stays)

The last of the ranks is stood in for: a process with the variables that torchrun would give rank 1,023, which
makes a loader and reads 24 batches of 64 from a server on loopback into an empty cache. That server has the
shards of the rank's group under their names, all of the same 1,000 small samples, and no others: whoever
asked for a shard of another group would get none. Nothing is decoded, so the memory of batches isn't in it.
num_samples is given; there is no sizes.json.

- start_seconds: from before make_loader() until each worker (without any, the rank itself) has its order: it
  has announced in the cache which shards it reads first, which is the first that it does with one.
  first_batch_seconds: until the first batch is in the training loop. import_seconds: what importing
  streamload's loader takes after torch, which is in neither.
  start_cpu_seconds: the CPU time of all of them from before make_loader() to the same moment, which a busy
  machine leaves as it is.
- above_bytes: PSS of the rank and its workers at that moment, less that of a process which has only imported
  torch and of as many idle children forked from it. Both trees are there all the time and looked at at the
  same moment, so that what they share with each other, or with anybody else, makes no difference.
  above_later_bytes: the same when the batches have been read: then there are open shards and their indexes,
  connections and fills, and Python has written to more of the pages that a worker shares with its rank.
  The row "idle DataLoader" is what torch's own DataLoader takes with workers that have nothing to do.
- above_peak_rss_bytes: the sum over the rank and its workers of the largest RSS that each ever had (VmHWM),
  less the same of the others: an upper bound, in which a page that n processes share is counted n times.
- order_us_per_sample: CPU time of one worker of 8 that follows its group (7,813 shards of 1,000 samples, all
  arrived, default lanes and window for 8 ranks of batch size 64), over all samples that it passes over, with
  taking its own batches' references and announcing its shards.

- store: *_cpu_seconds: what the store's process spends, by its CPU clock, on as many ranks as the row says:
  real clients, each a process forked after the imports, with one connection and no gloo mesh
  (scale_store.py). Start is the decision on lanes and window, outage the report of each rank that it waits
  and each rank's reading of all reports. *_slowest_seconds: of any rank, until it has the decision.
  extrapolated_*: the same for 1,024 ranks by a + b × ranks, which it must follow: each rank sends a few
  requests, and one rank reads the values of all. The line goes through the least and the most ranks;
  off_line is how far those between are off it.
- sockets_by_mixing: the most that a rank of 32 that gloo joins has more after three decisions of mixing=.

Result: results/scale.json; docs/results/many-nodes.md has it as a table.

Explanation: a pattern is kept as such and a URL made on use (urls/listing.py, cache/shard.py); what a tier
holds is looked up by a sample of the list; and what goes over all shards, which of them are this group's, is
computed once in the rank and handed to its workers.
"""

import argparse
import datetime
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, process_tree, turns
from benchmarks.contenders.job import versions
from streamload.cache import demand
from streamload.cache.shard import ShardList
from streamload.cache.tier import Tier
from streamload.order.group import GroupOrder
from streamload.order.lanes import default_lanes
from streamload.order.plan import OrderOptions, pieces
from streamload.order.shuffle import default_window
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from streamload.urls import expand_urls
from streamload.worker.reference_stream import ReferenceStream

RANKS, NODES, RANK, BATCH_SIZE = 1024, 128, 1023, 64
LOCAL = RANKS // NODES
SHARDS, SAMPLES_PER_SHARD, BATCHES = 1_000_000, 1_000, 24
WORKERS = (0, 2, 4, 8)
USUAL_WORKERS = 4  # OpenCLIP's default
LAUNCHED = {
    "RANK": RANK,
    "WORLD_SIZE": RANKS,
    "LOCAL_RANK": RANK % LOCAL,
    "LOCAL_WORLD_SIZE": LOCAL,
    "GROUP_RANK": RANK // LOCAL,
    "GROUP_WORLD_SIZE": NODES,
}
START_SECONDS, ABOVE_BYTES, ORDER_MICROSECONDS = 2.0, 100e6, 1.0
STORE_RANKS, GLOO_RANKS = (64, 128, 256), 32
STORE_SECONDS, STORE_SLOWEST_SECONDS, STORE_GROWTH, MIXING_SOCKETS = 0.15, 1.0, 5.0, 2
_STORE = ("start", "outage")
_FOLLOWED = 1_000_000
_LOOK_SECONDS = 0.005
_LIMIT_SECONDS = 300

Row = dict[str, Any]


def main() -> None:
    given = turns.arguments(__doc__, rounds=5, names=["streamload", "store"])
    if given.contenders == ["store"]:
        out = given.out or turns.RESULTS / "scale.json"
        content = json.loads(out.read_text()) if out.exists() else {}
        content |= {"store": measured_store(given)}
        out.write_text(json.dumps(content, indent=1) + "\n")
        print(json.dumps(content["store"]["targets"], indent=1))
        return
    shards, workers = (20_000, (0, USUAL_WORKERS)) if given.quick else (SHARDS, WORKERS)
    rows: list[Row] = []
    with turns.scratch() as directory:
        (original,) = write_shards(
            directory / "written", [SAMPLES_PER_SHARD], options=ShardOptions(image_side=(8, 8))
        )
        served = directory / "served"
        served.mkdir()
        with ShardServer.spawn(served) as server:
            urls = f"{server.url}/{{000000..{shards - 1:06d}}}.tar"
            for round_ in range(given.rounds):
                for shard in pieces(order_options(round_), shards, NODES - 1).shards.tolist():
                    link = served / f"{shard:06d}.tar"
                    if not link.exists():
                        link.hardlink_to(original)
                idle = {"label": f"idle DataLoader, {workers[-1]} workers", "contender": "torch"}
                rows.append(idle | {"round": round_} | idle_loader(given.python, workers[-1]))
                for number in turns.rotated(workers, round_):
                    with turns.empty_directory(directory) as cache:
                        row = {"label": f"{number} workers", "contender": "streamload", "round": round_}
                        row["load_before"] = machine.load()
                        rows.append(row | started(given.python, urls, number, round_, shards, cache))
        for round_ in range(given.rounds):
            count = _FOLLOWED // 10 if given.quick else _FOLLOWED
            with turns.empty_directory(directory) as cache:
                row = {"label": "following", "contender": "following", "round": round_}
                row["versions"] = versions("streamload", "numpy")
                rows.append(row | followed(order_options(round_), shards, count, cache))
    found_versions = turns.versions(rows)
    medians = turns.medians(rows)
    starts = [row["start_seconds"] for row in medians.values() if "start_seconds" in row]
    usual = medians[f"{USUAL_WORKERS} workers"]["above_bytes"]
    turns.write(
        given,
        "scale",
        {
            "settings": {
                "shards": shards,
                "ranks": RANKS,
                "nodes": NODES,
                "rank": RANK,
                "batch_size": BATCH_SIZE,
                "batches": BATCHES,
                "samples_per_shard": SAMPLES_PER_SHARD,
            },
            "versions": found_versions,
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            **({"store": measured_store(given)} if "store" in given.contenders else {}),
            "targets": [
                turns.target("start with any number of workers, s", max(starts), START_SECONDS),
                turns.target(f"memory above torch's, rank and {USUAL_WORKERS} workers", usual, ABOVE_BYTES),
                turns.target(
                    "following the order, CPU µs a sample",
                    medians["following"]["order_us_per_sample"],
                    ORDER_MICROSECONDS,
                ),
            ],
        },
    )


def measured_store(given: argparse.Namespace) -> Row:
    """What ranks cost their store, by how many there are; with its own date, as it may be measured alone."""
    numbers, gloo_ranks = ((4, 8), 2) if given.quick else (STORE_RANKS, GLOO_RANKS)
    rows = []
    for round_ in range(given.rounds):
        for number in turns.rotated(numbers, round_):
            row: Row = {"label": f"{number} ranks", "contender": "store", "round": round_}
            row |= {"load_before": machine.load()} | client_ranks(given.python, number)
            row["outage_cpu_seconds"] = row["report_cpu_seconds"] + row["read_cpu_seconds"]
            rows.append(row)
    gloo = client_ranks(given.python, gloo_ranks, "--gloo")
    found_versions = turns.versions(rows)
    medians = turns.medians(rows)
    first, *between, last = (medians[f"{number} ranks"] for number in numbers)
    lines: Row = {}
    for what in _STORE:
        metric = f"{what}_cpu_seconds"
        slope = (last[metric] - first[metric]) / (numbers[-1] - numbers[0])
        base = first[metric] - slope * numbers[0]
        off = [row[metric] / (base + slope * row["ranks"]) - 1 for row in between]
        lines[f"extrapolated_{what}"] = {
            "formula": "a + b × ranks",
            "a": base,
            "b": slope,
            "ranks": RANKS,
            "cpu_seconds": base + slope * RANKS,
            "off_line": max(off, key=abs, default=0.0),
            "growth": last[metric] / first[metric],
        }
    largest = f"{numbers[-1]} ranks"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": machine.commit(),
        "machine": machine.describe(),
        "versions": found_versions,
        "seeds": list(range(given.rounds)),
        "rounds": rows,
        "medians": medians,
        **lines,
        "gloo": {name: gloo[name] for name in ("ranks", "sockets_before", "sockets_by_mixing")},
        "targets": [
            turns.target(f"store at start, {largest}, CPU s", last["start_cpu_seconds"], STORE_SECONDS),
            turns.target(
                f"start, {largest}, slowest, s", last["start_slowest_seconds"], STORE_SLOWEST_SECONDS
            ),
            turns.target(f"store in an outage, {largest}, CPU s", last["outage_cpu_seconds"], STORE_SECONDS),
            *(
                turns.target(
                    f"store, {what}: {largest}, × {numbers[0]}",
                    lines[f"extrapolated_{what}"]["growth"],
                    STORE_GROWTH,
                )
                for what in _STORE
            ),
            turns.target(
                f"sockets a rank more by mixing=, {gloo_ranks} ranks",
                gloo["sockets_by_mixing"],
                MIXING_SOCKETS,
            ),
        ],
    }


def client_ranks(python: Path, number: int, *options: str) -> Row:
    """What scale_store.py says of so many ranks."""
    command = [str(python), "-m", "benchmarks.scale_store", str(number), *options]
    output = subprocess.check_output(command, cwd=turns.ROOT, env=turns.environment(), text=True)
    row: Row = json.loads(output.splitlines()[-1])
    return row


def order_options(seed: int) -> OrderOptions:
    """As the loader has them for these ranks."""
    slice_ = BATCH_SIZE * LOCAL
    return OrderOptions(seed, NODES, default_lanes(slice_), default_window(slice_))


def started(python: Path, urls: str, workers: int, seed: int, shards: int, cache: Path) -> Row:
    """Start the rank beside one that only has torch, and look at both until it has read its batches."""
    loader = {
        "num_workers": workers,
        "batch_size": BATCH_SIZE,
        "num_samples": shards * SAMPLES_PER_SHARD,
        "seed": seed,
        "cache_dir": str(cache),
        "cache_size": "1GB",
    }
    job = json.dumps({"urls": urls, "loader": loader, "batches": BATCHES})
    with (
        process(python, "only_torch", str(workers)) as (plain, plain_said),
        process(python, "scale_rank", job) as (rank, said),
    ):
        wait_until(lambda: "ready" in plain_said, plain)
        wait_until(lambda: has_order(cache / "runs") >= max(1, workers), rank)
        ready = time.monotonic()
        cpu_seconds = process_tree.cpu_seconds(rank.pid)
        above_at_start = process_tree.pss_bytes(rank.pid) - process_tree.pss_bytes(plain.pid)
        wait_until(lambda: "read" in said, rank)
        above = process_tree.pss_bytes(rank.pid) - process_tree.pss_bytes(plain.pid)
        above_high = process_tree.most_rss_bytes(rank.pid) - process_tree.most_rss_bytes(plain.pid)
        assert rank.stdin is not None
        rank.stdin.close()
        wait_until(lambda: "versions" in said, rank)
    return {
        "start_seconds": ready - said["imported"],
        "first_batch_seconds": said["first"] - said["imported"],
        "make_loader_seconds": said["made"] - said["imported"],
        "iter_seconds": said["iterated"] - said["made"],
        "import_seconds": said["imported"] - said["torch"],
        "start_cpu_seconds": cpu_seconds - said["imported_cpu"],
        "above_bytes": above_at_start,
        "above_later_bytes": above,
        "above_peak_rss_bytes": above_high,
        "versions": said["versions"],
    }


def idle_loader(python: Path, workers: int) -> Row:
    """What torch's own DataLoader takes above the same."""
    with (
        process(python, "only_torch", str(workers)) as (plain, plain_said),
        process(python, "only_torch", str(workers), "--loader") as (loader, said),
    ):
        wait_until(lambda: "ready" in plain_said, plain)
        wait_until(lambda: "ready" in said, loader)
        above = process_tree.pss_bytes(loader.pid) - process_tree.pss_bytes(plain.pid)
    return {"above_bytes": above, "versions": versions("torch")}


def has_order(directory: Path) -> int:
    """How many processes have announced which shards they read."""
    if not directory.is_dir():
        return 0
    return len({demand.pid_of(path) for path in demand.files(directory) if len(demand.visits_of(path))})


def followed(options: OrderOptions, shards: int, count: int, cache: Path) -> Row:
    """The CPU time of following a group where everything has arrived, as one worker of 8 does."""
    group, workers = NODES - 1, 8
    owned = pieces(options, shards, group)
    listed = ShardList(expand_urls(f"https://host/{{000000..{shards - 1:06d}}}.tar"), None)
    order = GroupOrder(options, shards, group, 0, pieces=owned)
    tier = Tier(cache / "tier", 10**9)
    arrivals: Any = _AllHere()
    stream = ReferenceStream(order, lambda: np.empty(0, np.int64), listed, 0, arrivals, tier)
    step = BATCH_SIZE * LOCAL
    before = time.process_time()
    for number, stop in enumerate(range(step, count + 1, step)):
        while not (stream.has(stop) or stream.is_over):
            stream.follow()
        if number % workers == 0:
            stream.take(stop - BATCH_SIZE, stop)
            order.mark_at(min(stop, order.position))
            stream.tell_progress()
    cpu_seconds = time.process_time() - before
    stream.close()
    return {"order_us_per_sample": cpu_seconds / count * 1e6, "samples": count}


class _AllHere:
    """All samples of all shards have arrived."""

    def __init__(self) -> None:
        self._numbers = np.arange(SAMPLES_PER_SHARD)

    def arrived(self, shard: int) -> tuple[np.ndarray, bool]:
        return self._numbers, True


@contextmanager
def process(
    python: Path, module: str, *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A process with the place of the rank, and what it has said by now; it is gone when the block ends."""
    environ = turns.environment() | {name: str(value) for name, value in LAUNCHED.items()}
    command = [str(python), "-m", f"benchmarks.{module}", *arguments]
    said: dict[str, Any] = {}
    with subprocess.Popen(
        command, cwd=turns.ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        output = running.stdout
        assert output is not None
        listener = threading.Thread(target=lambda: said.update(map(json.loads, output)), name="listener")
        listener.start()
        try:
            yield running, said
        except BaseException:
            running.kill()
            raise
        finally:
            assert running.stdin is not None
            running.stdin.close()
            listener.join()


def wait_until(holds: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    """Look again and again.

    Raises:
        RuntimeError: the process has ended, or it takes too long.
    """
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not holds():
        if running.poll() not in (None, 0):
            raise RuntimeError(f"{running.args} ended with {running.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{running.args} took longer than {_LIMIT_SECONDS} s")
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    main()
