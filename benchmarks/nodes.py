"""How long jobs on several nodes wait for their first batch when a node was lost, or is slow.

Question: when does a job have its first batch that lost one of its 4 nodes while shards arrived, and starts
again on the 3 that are left from its last state? And a node whose neighbour, which has the lease of the shard
that both need, has a link a hundred times slower?

Command: python -m benchmarks.nodes (as root; Linux)

Each node is a network, processes, mounts and a name of its own, with a boot id and a disk, on one machine
(tests/support/nodes.py). The origin and the shared cache, a folder, are outside of them.

- after losing a node: each of 4 nodes takes a batch and saves a state. Then the origin stands still in the
  middle of shards, each node has a lease, and one node is killed, and the others, as by a launcher. The
  origin goes on, and 3 new nodes load the states. first_batch_seconds: from before make_loader() to the
  first batch, of the slowest of them. waits: fills that waited for another's.
- beside a slow node: two nodes, links of 300 and 3 Mbit/s, shards of 5 MB that both need. The slow one
  begins, and has the lease of the first shard. first_batch_seconds: from then on, of the fast one.
  overtakes: shards that it fetched as well.

Result: results/nodes.json; docs/results/many-nodes.md has it as a table.

Explanation: a lease names its run and attempt, and has its holder's progress (docs/guides/shared-cache.md).
"""

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed

from benchmarks import machine, turns
from benchmarks.contenders.job import versions
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support.jobs import FIRST_HOST, ROWS, in_switch, join, make
from tests.support.kills import Child
from tests.support.networks import Switch
from tests.support.nodes import Node, RankPlace, slow_link, start_node, why_no_nodes

NODES, NODES_LEFT = 4, 3
FAST_KBIT, SLOW_KBIT = 300_000, 3_000
FIRST_BATCH_SECONDS = 3.0
_ARRIVING = ShardOptions(padding_bytes=(3_000, 30_000))
_LARGE = ShardOptions(padding_bytes=(180_000, 240_000))
_LIMIT_SECONDS = 140.0

Row = dict[str, Any]


def main() -> None:
    given = turns.arguments(__doc__, rounds=5, names=["streamload"])
    if reason := why_no_nodes():
        raise SystemExit(reason)
    rows: list[Row] = []
    for round_ in range(given.rounds):
        for label, measured in (("after losing a node", after_loss), ("beside a slow node", beside_slow)):
            row: Row = {"label": label, "contender": "streamload", "round": round_}
            with turns.scratch() as place:
                row["load_before"] = machine.load()
                rows.append(row | measured(place, round_) | {"versions": versions("streamload", "torch")})
    found_versions = turns.versions(rows)
    medians = turns.medians(rows)
    turns.write(
        given,
        "nodes",
        {
            "settings": {"nodes": NODES, "nodes_left": NODES_LEFT, "kbit": [FAST_KBIT, SLOW_KBIT]},
            "versions": found_versions,
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "targets": [
                turns.target(f"first batch {label}, s", row["first_batch_seconds"], FIRST_BATCH_SECONDS)
                for label, row in medians.items()
            ],
        },
    )


def after_loss(place: Path, seed: int) -> Row:
    """The first batch of a job that has lost a node."""
    shards = 4 * NODES
    write_shards(place / "data", [ROWS] * shards, seed=seed, options=_ARRIVING)
    shared = place / "shared"
    options = {"shared_cache": str(shared), "write_back": True, "num_samples": shards * ROWS}

    def first_attempt(rank: RankPlace, urls: str) -> None:
        join(rank, FIRST_HOST)
        loader = make(urls, rank.disk, NODES, **options)
        batches = iter(loader)
        next(batches)
        (place / f"state-{rank.rank}").write_text(json.dumps(loader.state_dict()))
        rank.stage.enter("saved")
        wait_until((place / "stopped").exists)
        for _ in batches:
            pass

    def second_attempt(rank: RankPlace, urls: str) -> list[float]:
        join(rank, FIRST_HOST + NODES)
        states = [json.loads((place / f"state-{number}").read_text()) for number in range(NODES)]
        began = time.perf_counter()
        with make(urls, rank.disk, NODES_LEFT, **options) as loader:
            loader.load_state_dict(states)
            next(iter(loader))
            seconds = time.perf_counter() - began
            torch.distributed.barrier()
            return [seconds, loader.stats().shared_waits]

    def run(switch: Switch) -> list[list[float]]:
        with ShardServer(place / "data", host=switch.address) as origin, ExitStack() as stack:
            urls = f"{origin.url}/{{00000..{shards - 1:05}}}.tar"
            nodes = started(stack, switch, place, NODES, FIRST_HOST, lambda rank: first_attempt(rank, urls))
            for node in nodes:
                assert node.stage.wait_for("saved", _LIMIT_SECONDS)
            origin.stop_after(0.5)
            (place / "stopped").touch()
            wait_until(lambda: len([*shared.glob("leases/*")]) >= NODES)
            for node in reversed(nodes):
                node.kill()
            origin.go_on()
            host = FIRST_HOST + NODES
            again = started(stack, switch, place, NODES_LEFT, host, lambda rank: second_attempt(rank, urls))
            return [node.finish(_LIMIT_SECONDS)[0] for node in again]

    results = in_switch(run)
    return {
        "first_batch_seconds": max(seconds for seconds, _ in results),
        "waits": int(sum(waits for _, waits in results)),
    }


def beside_slow(place: Path, seed: int) -> Row:
    """The first batch of a node whose neighbour is slow."""
    shards = 4
    write_shards(place / "data", [ROWS] * shards, seed=seed, options=_LARGE)
    shared = place / "shared"
    options = {"shared_cache": str(shared), "write_back": True, "num_samples": shards * ROWS, "groups": 1}

    def work(rank: RankPlace, urls: str) -> list[float]:
        join(rank, FIRST_HOST)
        wait_until((place / "limited").exists)
        if rank.rank == 0:
            wait_until(lambda: [*shared.glob("leases/*")])
        began = time.perf_counter()
        loader = make(urls, rank.disk, 2, **options)
        next(iter(loader))
        seconds = time.perf_counter() - began
        overtakes = loader.stats().shared_overtakes
        if rank.rank == 0:
            (place / "measured").touch()
        wait_until((place / "measured").exists)
        return [seconds, overtakes]

    def run(switch: Switch) -> list[float]:
        with ShardServer(place / "data", host=switch.address) as origin, ExitStack() as stack:
            urls = f"{origin.url}/{{00000..{shards - 1:05}}}.tar"
            nodes = started(stack, switch, place, 2, FIRST_HOST, lambda rank: work(rank, urls))
            for host, rate in ((FIRST_HOST, FAST_KBIT), (FIRST_HOST + 1, SLOW_KBIT)):
                wait_until(lambda host=host: f"port{host}" in [name for _, name in socket.if_nameindex()])
                slow_link(host, rate)
            (place / "limited").touch()
            fast: list[float] = nodes[0].finish(_LIMIT_SECONDS)[0]
            return fast

    seconds, overtakes = in_switch(run)
    return {"first_batch_seconds": seconds, "overtakes": int(overtakes)}


def started(
    stack: ExitStack, switch: Switch, place: Path, count: int, host: int, work: Callable[[RankPlace], Any]
) -> list[Child]:
    """Nodes of one rank each, from a host on; killed when the stack ends."""
    nodes = [
        Node(number, count, 1, host + number, place / f"node-{host + number}") for number in range(count)
    ]
    return [stack.enter_context(start_node(switch, node, work)) for node in nodes]


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until something holds.

    Raises:
        RuntimeError: it takes too long.
    """
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError("a node doesn't come to its next step")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
