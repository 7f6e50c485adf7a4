"""Nodes of a job on one machine: each with a network, processes, mounts and a name of its own.

A node is a `Child` of the process that has the `Switch` (networks.py). In it a boot id, /dev/shm and a disk
for its cache are its own as well, so nothing can be seen of the processes of other nodes but what they send
or store. Its ranks are processes of it, with torchrun's variables. A killed node takes them along. Linux
only, as root; elsewhere `why_no_nodes` says why not.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from streamload.node import machine
from tests.support.disks import NotPossibleHere, resize_disk, shown_instead, small_disk
from tests.support.kills import Child, Stage
from tests.support.networks import Switch, why_no_network

_NEW_NAMES, _NEW_PROCESSES = 0x04000000, 0x20000000
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_PROCESSES = Path("/proc")
_BOOT_ID = _PROCESSES / "sys/kernel/random/boot_id"
_SHARED_MEMORY = Path("/dev/shm")
_SECONDS = 150.0
_MB = 1_000_000

__all__ = ["Node", "RankPlace", "slow_link", "start_node", "why_no_nodes"]


class Node(NamedTuple):
    """Where a node is to be, and what it has.

    Attributes:
        number: of the node among those of the job, from 0.
        nodes: of the job.
        ranks: of each node.
        host: its number on the switch; another one for a node that takes another's place.
        place: a directory of its own for its disk; made.
        disk_bytes: the size of that disk.
    """

    number: int
    nodes: int
    ranks: int
    host: int
    place: Path
    disk_bytes: int = 200 * _MB


class RankPlace(NamedTuple):
    """What a rank's work is called with.

    Attributes:
        rank: of the job.
        node: its node.
        stage: to say what it does; the node's own, for a node's only rank.
        disk: the directory of its node's disk.
        resize: gives that disk another size.
    """

    rank: int
    node: Node
    stage: Stage
    disk: Path
    resize: Callable[[int], None]


def start_node(switch: Switch, node: Node, work: Callable[[RankPlace], Any]) -> Child:
    """Start a node, in the switch's process; its result is the list of what its ranks returned."""

    def outside(stage: Stage) -> Any:
        switch.join(node.host)
        _call("unshare", _NEW_NAMES | _NEW_PROCESSES)
        socket.sethostname(f"node-{node.number}")
        with Child(lambda _: _in_node(stage, node, work), limit_seconds=_SECONDS) as first:
            return first.finish(_SECONDS)

    return Child(outside, limit_seconds=_SECONDS)


def slow_link(host: int, kbit_per_second: int) -> None:
    """Limit what a host gets over its link from now on; in the switch's process."""
    rate = ["rate", f"{kbit_per_second}kbit", "burst", "16kb", "latency", "400ms"]
    _run("tc", "qdisc", "add", "dev", f"port{host}", "root", "tbf", *rate)


@functools.cache
def why_no_nodes() -> str:
    """Why nodes can't be had here; empty if they can."""
    if os.geteuid() != 0:
        return "only root may make nodes"
    if shutil.which("tc") is None:
        return "iproute2 isn't installed (the command tc)"
    if reason := why_no_network():
        return reason

    def tried(stage: Stage) -> None:
        switch = Switch()
        with start_node(switch, Node(0, 1, 1, 2, Path("/tmp/node")), lambda place: place.rank) as node:
            node.finish(10.0)

    with Child(tried) as child:
        child.join(20.0)
        if child.status == 0:
            return ""
        return f"a node can't be made here: {child.error.strip().rpartition(': ')[2] or 'no answer'}"


def _in_node(stage: Stage, node: Node, work: Callable[[RankPlace], Any]) -> list[Any]:
    """The first process of a node: makes the rest of it, and starts its ranks."""
    _call("prctl", _DIES_WITH_PARENT, signal.SIGKILL)
    small_disk(node.place, node.disk_bytes)
    small_disk(_SHARED_MEMORY, 64 * _MB)
    _run("mount", "-t", "proc", "proc", str(_PROCESSES))
    boot_id = node.place / "boot_id"
    boot_id.write_text(f"{secrets.token_hex(16)}\n")
    shown_instead(boot_id, _BOOT_ID)
    machine.cache_clear()  # a forked process has its parent's

    def as_rank(local_rank: int) -> Callable[[Stage], Any]:
        def ranked(own_stage: Stage) -> Any:
            rank = node.number * node.ranks + local_rank
            os.environ.update(_launched(node, rank, local_rank))
            shown = stage if node.ranks == 1 else own_stage
            disk = node.place / "cache"
            return work(RankPlace(rank, node, shown, disk, lambda size: resize_disk(node.place, size)))

        return ranked

    with ExitStack() as stack:
        ranks = [stack.enter_context(Child(as_rank(local))) for local in range(node.ranks)]
        return [rank.finish(_SECONDS) for rank in ranks]


def _launched(node: Node, rank: int, local_rank: int) -> dict[str, str]:
    """The variables that torchrun sets, and the device for gloo."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(node.nodes * node.ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(node.ranks),
        "GROUP_RANK": str(node.number),
        "GROUP_WORLD_SIZE": str(node.nodes),
        "GLOO_SOCKET_IFNAME": f"host{node.host}",
    }


def _call(function: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        raise NotPossibleHere(f"{function}: {os.strerror(ctypes.get_errno())}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode:
        raise NotPossibleHere(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
