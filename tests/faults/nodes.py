"""Row 22: a node of a Ray cluster that fills a shared tier is lost in work, and another joins."""

import importlib.util
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from streamload.cache.shared.objects import Objects
from streamload.cache.shared.tier import SharedTier
from streamload.metrics import Counters
from tests.faults.data import Data
from tests.faults.oracle import Attempt
from tests.faults.rows import Row
from tests.support.ray_cluster import RayCluster

_SHARDS = 12
_CPUS = 2
_BYTES_PER_SECOND = 1e5
"""Of each connection: a shard takes a second, so that a node is met at work."""
_END_SECONDS = 240.0
_RECOVERY_SECONDS = 20.0
"""A lease counts as left 10 s after the last heartbeat that was seen; then a worker takes the task."""
_QUICK = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""What docs/guides/prefetch-daemon.md advises for the head of a cluster whose nodes may be taken away."""


def lost(attempt: Attempt) -> None:
    """One of two nodes is lost while both have work; a third joins; all units are done in the end."""
    data = attempt.borrow(
        attempt.seed,
        spawn=True,
        counts=[24] * _SHARDS,
        bytes_per_second_per_connection=_BYTES_PER_SECOND,
    )
    earlier = len(data.server.log)
    objects = Objects(str(attempt.place / "shared"))

    def asked() -> Counter[str]:
        return Counter(request.path.strip("/") for request in data.server.log[earlier:])

    def held() -> set[str]:
        there = set(objects.names("shards"))
        return {s.name.rpartition("/")[2] for s in data.shards if f"shards/{s.digest}/index" in there}

    with ExitStack() as stack:
        cluster = stack.enter_context(RayCluster(_QUICK))
        nodes = [_add(cluster, attempt, name) for name in ("first", "second")]
        command = [sys.executable, "-m", "streamload", "warm", *data.urls, "--ray", cluster.address]
        command += ["--shared-cache", str(attempt.place / "shared")]
        driver = stack.enter_context(_started(command))
        _until(lambda: len(asked().keys() - held()) > _CPUS)  # so both nodes are at work
        time.sleep(attempt.rng.uniform(0, 0.5))
        when = time.monotonic()
        if attempt.variant == "raylet":
            cluster.kill_raylet(nodes[1])
        else:
            cluster.lose_node(nodes[1])
        before = asked()
        under_way = before.keys() - held()
        attempt.happened["nodes lost in work"] += bool(under_way)
        _add(cluster, attempt, "third")
        _until(lambda: all(asked()[name] > before[name] for name in under_way - held()))
        recovered = time.monotonic() - when
        attempt.happened["nodes added"] += 1
        output, error = driver.communicate(timeout=_END_SECONDS)
        attempt.check("L", driver.returncode == 0, f"it ended with {driver.returncode}: {error[-400:]}")
        attempt.check("N", f"{_SHARDS} of {_SHARDS} shards are held" in output, output[-400:])
    attempt.check_seconds(recovered, _RECOVERY_SECONDS, "until what was lost had been begun again it took")
    _check(attempt, data, objects)


def _check(attempt: Attempt, data: Data, objects: Objects) -> None:
    """N, B, C: all is there, and is the origin's; T: nothing else is."""
    tier = SharedTier(objects, Counters())
    for shard in data.shards:
        held = tier.look(shard)
        found = None if held is None else tier.read(shard, held, 0, held.size)
        attempt.check("N", found is not None, f"{shard.name} isn't there")
        attempt.check("B", found == data.content[shard.digest], f"{shard.name} has other bytes")
    left = [*objects.names("probes"), *objects.names("leases")]
    attempt.check("T", not left, f"left: {left}")


def _add(cluster: RayCluster, attempt: Attempt, name: str) -> int:
    return cluster.add_node({"STREAMLOAD_CACHE_DIR": str(attempt.place / name)}, cpus=_CPUS)


@contextmanager
def _started(command: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    """A command that doesn't outlive the block."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {_END_SECONDS:.0f} s")
        time.sleep(0.02)


def _why_not() -> str:
    return "" if importlib.util.find_spec("ray") else "Ray isn't installed: pip install 'streamload[ray]'"


ROWS = [
    Row(
        22,
        "node lost",
        "the raylet of a Ray node, or all of a node, killed in work; another node joins",
        "NBTCL",
        "Every unit is done; work goes on in 20 s, on the nodes that are left and on the new one",
        lost,
        count=20,
        short=1,
        variants=("raylet", "node"),
        needs=_why_not,
    ),
]
