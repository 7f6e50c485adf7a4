"""The leases of a daemon's tasks, in the process that runs them: its own, or a worker of a Ray cluster."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from pathlib import Path

from streamload.cache.demand import DemandFile
from streamload.cache.locks import is_locked
from streamload.cache.shared.leases import DAEMONS, Leases
from streamload.cache.shared.objects import Objects
from streamload.cache.tier import Tier

_RUN_FILE = re.compile(r"[0-9]+\.[0-9a-f]{8}")
_FIRST_BEAT_SECONDS, _BEAT_SECONDS = 1.0, 5.0
"""Heartbeats of a task's lease at first, and then: a killed daemon's tasks are taken over within 15 s."""


def open_leases(objects: Objects, tier: Tier, demand_file: DemandFile, lease_seconds: float) -> Leases:
    """The leases of this process among all daemons with the same shared tier.

    Args:
        objects: of the shared tier.
        tier: of this node.
        demand_file: of this process: whose lock is free has ended.
        lease_seconds: see Leases.
    """
    node = _node(tier)
    return Leases(
        objects,
        lease_seconds=lease_seconds,
        address=f"{node}.{demand_file.path.name}",
        has_gone=lambda address: _has_gone(tier, node, address),
        attempt=DAEMONS,
        first_beat_seconds=_FIRST_BEAT_SECONDS,
        beat_seconds=_BEAT_SECONDS,
    )


def _node(tier: Tier) -> str:
    """A name for this node's cache, valid until the machine is rebooted."""
    status = tier.root.stat()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        identity = repr([boot, str(tier.root), status.st_dev, status.st_ino])
        return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    return secrets.token_hex(16)


def _has_gone(tier: Tier, node: str, address: str) -> bool:
    """True if a daemon of this node has ended, by the lock on its demand file."""
    run_node, _, name = address.partition(".")
    if run_node != node or not _RUN_FILE.fullmatch(name):
        return False
    with contextlib.suppress(OSError):
        return not is_locked(tier.root / "runs" / name)
    return False
