"""`streamload warm --ray … --into local`: every node of a Ray cluster fills its own cache, once.

Each node runs one task, `warm` as it is on one machine; where a shared cache is given, nodes read through it.
Nodes that join later are left out.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

from streamload import limits
from streamload.daemon.ray_executor import connect, first_line, last_line
from streamload.daemon.ray_task import own_version
from streamload.daemon.warm import WarmReport, warm
from streamload.errors import ClusterError, StreamloadError


def warm_nodes(
    address: str, options: Mapping[str, Any], cpus: float = 1.0
) -> Iterator[tuple[str, WarmReport | str]]:
    """Warm up the caches of all nodes that have processors.

    Args:
        address: of the cluster, see `connect`.
        options: the arguments of `warm`.
        cpus: the CPUs that the task of a node takes, as Ray counts them.

    Yields:
        The name of each node whose task has ended, and its report, or why it has none.

    Raises:
        ClusterError: the cluster can't be reached, or none of its nodes has so many CPUs.
    """
    packed = pickle.dumps(dict(options))
    ray = connect(address)
    try:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = ray.remote(num_cpus=cpus, max_retries=0)(warm_here)
        names: dict[Any, str] = {}  # of nodes, by Ray's references to their results
        for node in ray.nodes():
            if node["Alive"] and node["Resources"].get("CPU", 0.0) >= max(cpus, 1.0):
                here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task = remote.options(scheduling_strategy=here, name="streamload warm")
                names[task.remote(own_version(), packed)] = node["NodeManagerHostname"]
        if not names:
            raise ClusterError(f"no node of the Ray cluster at {address} has {cpus:g} CPUs")
        while names:
            (ended, *_), _ = ray.wait(list(names), num_returns=1)
            try:
                result = ray.get(ended)
            except ray.exceptions.RayTaskError as exc:  # streamload itself failed there
                result = last_line(exc)
            except ray.exceptions.RayError as exc:  # the node or the task's process was lost
                result = first_line(exc)
            yield names.pop(ended), result
    finally:
        ray.shutdown()


def warm_here(version: str, options: bytes) -> WarmReport | str:
    """Warm up the cache of this node; returns why that can't be done, where it can't.

    Args:
        version: of the caller's streamload.
        options: pickled arguments of `warm`.
    """
    if (mine := own_version()) != version:
        return f"it has streamload {mine}, and {version} is wanted"
    limits.allow_many_files()
    try:
        return warm(**pickle.loads(options))
    except StreamloadError as exc:
        return str(exc)
