"""Random jobs on 2 to 4 nodes in trouble, stopped and resumed on others: `python -m tests.support.node_runs`.

What must hold: the global batches of both attempts together are those of one process that nothing happens to,
so each sample comes once, and a resumed run goes on exactly. A seed is a job: its nodes and ranks, the layout
that it is resumed on, and what happens in each attempt:

    kill     a node is killed; the others, which wait for it, then are, too, as by a launcher
    cut      nothing comes through to a node for one to three seconds
    clock    the processes of a node have a time of day that is an hour off
    full     the disk of a node's cache has no room left
    slow     a node's link has 3 Mbit/s
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed

from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support.disks import NotPossibleHere
from tests.support.jobs import FIRST_HOST, ROWS, expected_batches, in_switch, join, make, together
from tests.support.kills import Child
from tests.support.networks import Switch
from tests.support.nodes import Node, RankPlace, slow_link, start_node, why_no_nodes

FAULTS = ("kill", "cut", "clock", "full", "slow")
_LARGE = ShardOptions(padding_bytes=(3_000, 30_000))
_HOUR = 3600.0
_SECONDS = 240.0
_SLOW_KBIT = 3000
_ROOM_BYTES = 100_000
_RESIZES = 100

__all__ = ["FAULTS", "Attempt", "Job", "job_of", "run_job"]


class Attempt(NamedTuple):
    """A layout, and for each fault that happens in it the node that has it.

    Attributes:
        nodes: of the job.
        ranks: of each node.
        faults: by name, the number of the node.
        step: at which these happen, but for a clock and a slow link, which are so from the start.
    """

    nodes: int
    ranks: int
    faults: dict[str, int]
    step: int


class Job(NamedTuple):
    """A job of two attempts; the first one ends after its `steps`, or earlier where a node is killed."""

    seed: int
    shards: int
    first: Attempt
    steps: int
    second: Attempt


def job_of(seed: int) -> Job:
    """The job of a seed."""
    rng = random.Random(seed)
    shards = rng.randint(8, 16)
    steps = rng.randint(2, shards - 2)
    first = _attempt(rng, rng.randint(2, 4), rng.sample(FAULTS, rng.randint(1, 3)), steps)
    calm = [fault for fault in FAULTS if fault != "kill"]
    second = _attempt(rng, rng.randint(1, 4), rng.sample(calm, rng.randint(0, 2)), shards - steps)
    return Job(seed, shards, first, steps, second)


def _attempt(rng: random.Random, nodes: int, faults: list[str], steps: int) -> Attempt:
    ranks = rng.choice([count for count in (1, 2) if ROWS % (nodes * count) == 0])
    return Attempt(nodes, ranks, {fault: rng.randrange(nodes) for fault in faults}, rng.randrange(steps))


def run_job(job: Job, place: Path) -> str:
    """Run a job in a directory; returns why it failed, "" if all was as it must be."""
    write_shards(place / "data", [ROWS] * job.shards, seed=job.seed, options=_LARGE)
    try:
        expected, first, second = in_switch(lambda switch: _both(switch, job, place), _SECONDS)
    except AssertionError as exc:
        return str(exc).strip()
    if first != expected[: len(first)]:
        return f"the {len(first)} steps of the first attempt differ from those of one process"
    if second != expected[len(first) :]:
        return f"what was resumed after {len(first)} steps differs from the rest of one process's"
    if "kill" not in job.first.faults and len(first) != job.steps:
        return f"the first attempt ended after {len(first)} of {job.steps} steps"
    return ""


def _both(switch: Switch, job: Job, place: Path) -> list[list[list[str]]]:
    """The global batches of one process, and of both attempts; in the switch's process."""
    with ShardServer(place / "data", host=switch.address) as origin:
        urls = f"{origin.url}/{{00000..{job.shards - 1:05}}}.tar"
        samples = job.shards * ROWS
        expected = expected_batches(urls, place, samples)
        steps = _attempted(switch, job.first, place / "first", urls, samples, job.steps, [])
        if not steps:
            return [expected, [], expected]  # killed before its first step
        states = [state for _, state in steps[-1]]
        rest = _attempted(switch, job.second, place / "second", urls, samples, job.shards, states)
        return [expected, *(together(_by_rank(attempt)) for attempt in (steps, rest))]


def _by_rank(steps: list[list[Any]]) -> list[list[list[str]]]:
    return [[keys for keys, _ in rank] for rank in zip(*steps, strict=True)] if steps else [[]]


def _attempted(
    switch: Switch, attempt: Attempt, place: Path, urls: str, samples: int, steps: int, states: list[Any]
) -> list[list[Any]]:
    """Run an attempt: for each step that all ranks have done, the keys and the state of each rank."""
    place.mkdir()
    first_host = FIRST_HOST + (4 if states else 0)
    hosts = {fault: first_host + number for fault, number in attempt.faults.items()}
    options = {"shared_cache": str(place.parent / "shared"), "write_back": True, "num_samples": samples}
    ranks = attempt.nodes * attempt.ranks

    def work(rank_place: RankPlace) -> int:
        number = rank_place.node.number
        if attempt.faults.get("clock") == number:
            time_of_day, hour = time.time, _HOUR if number % 2 else -_HOUR
            time.time = lambda: time_of_day() + hour
        join(rank_place, first_host)
        with (place / f"{rank_place.rank}").open("w") as done:
            loader = make(urls, rank_place.disk, ranks, **options)
            if states:
                loader.load_state_dict(states)
            for step, batch in zip(range(steps), loader, strict=False):
                done.write(json.dumps([batch["key"], loader.state_dict()]) + "\n")
                done.flush()
                if step == attempt.step and attempt.faults.get("full") == number:
                    _fill_disk(rank_place)
                torch.distributed.barrier()
            torch.distributed.barrier()
            loader.close()
        torch.distributed.destroy_process_group()
        return 0

    with ExitStack() as stack:
        nodes: list[Child] = []
        for number in range(attempt.nodes):
            node = Node(number, attempt.nodes, attempt.ranks, first_host + number, place / f"node-{number}")
            nodes.append(stack.enter_context(start_node(switch, node, work)))
        if "slow" in hosts:
            _wait(lambda: f"port{hosts['slow']}" in [name for _, name in socket.if_nameindex()], nodes)
            slow_link(hosts["slow"], _SLOW_KBIT)
        if {"kill", "cut"} & hosts.keys():
            _wait(lambda: len(_done(place, ranks)) > attempt.step, nodes)
        if "cut" in hosts:
            switch.cut(hosts["cut"])
            time.sleep(1.0 + attempt.step % 3)
            switch.mend(hosts["cut"])
        if "kill" in hosts:
            nodes[attempt.faults["kill"]].kill()
            for node in nodes:
                node.kill()
        else:
            for node in nodes:
                node.finish(_SECONDS)
    return _done(place, ranks)


def _wait(holds: Any, nodes: list[Child]) -> None:
    """Wait until something holds, or a node has ended."""
    deadline = time.monotonic() + _SECONDS
    while not holds() and all(node.join(0.0) is None for node in nodes):
        assert time.monotonic() < deadline, "an attempt doesn't come to its step"
        time.sleep(0.02)


def _fill_disk(rank_place: RankPlace) -> None:
    """Leave little room on a node's disk, which the other ranks write to between two calls."""
    for attempts_left in reversed(range(_RESIZES)):
        try:
            rank_place.resize(shutil.disk_usage(rank_place.node.place).used + _ROOM_BYTES)
            return
        except NotPossibleHere:
            if not attempts_left:
                raise


def _done(place: Path, ranks: int) -> list[list[Any]]:
    """The steps that all ranks have written whole."""
    by_rank = []
    for rank in range(ranks):
        path = place / f"{rank}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        by_rank.append([json.loads(line) for line in lines])
    return [list(step) for step in zip(*by_rank, strict=False)]


def main() -> int:
    """Run the jobs of seeds; prints each, and returns 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:40", help="first:stop, or one seed; default 0:40")
    first, _, stop = parser.parse_args().seeds.partition(":")
    if reason := why_no_nodes():
        print(reason, file=sys.stderr)
        return 2
    failed = []
    for seed in range(int(first), int(stop or int(first) + 1)):
        job = job_of(seed)
        with tempfile.TemporaryDirectory(prefix="streamload-nodes-") as place:
            failure = run_job(job, Path(place))
        failed += [seed] if failure else []
        layout = " → ".join(f"{each.nodes}×{each.ranks} {_words(each)}" for each in (job.first, job.second))
        print(f"{seed}: {job.shards} shards, {layout}: {failure or 'exact'}", flush=True)
    print(f"{len(failed)} failed{f': {failed}' if failed else ''}")
    return 1 if failed else 0


def _words(attempt: Attempt) -> str:
    return ", ".join(f"{fault} node {node}" for fault, node in attempt.faults.items()) or "undisturbed"


if __name__ == "__main__":
    sys.exit(main())
