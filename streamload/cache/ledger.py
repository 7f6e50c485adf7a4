"""What has to go when room is needed: pure arithmetic over what a tier holds. It deletes nothing.

The rule (Belady's, made possible by a plan that is known): the shard goes whose next visit by the live runs
is farthest, never one that is open, and only if the newcomer is needed sooner than it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

NEVER = math.inf


@dataclass(frozen=True, slots=True)
class HeldShard:
    """Something in a tier that takes room: a published shard, a part, a bare index, or a verdict."""

    digest: str
    path: Path
    size_bytes: int
    """What it takes from the budget: its files, or what is reserved for it."""
    kind: str
    """The room of the tier it lies in: "shards", "parts", "bare" or "gone"."""
    used_at: float
    """When a reader last opened it, in seconds since the epoch."""


def victims(
    held: Iterable[HeldShard],
    waits: Mapping[str, float],
    *,
    newcomer_wait: float,
    excess_bytes: int,
    may_go: Callable[[HeldShard], bool],
) -> list[HeldShard] | None:
    """The shards to evict so that `excess_bytes` become free, or None if that can't be had now.

    Args:
        held: what is in the tier.
        waits: for each digest how many shard visits away its next use is; missing = never.
        newcomer_wait: the same for the shard that wants the room: what is needed sooner stays.
        excess_bytes: how much is missing.
        may_go: whether nobody has it open; asked only of those that would go.
    """
    later = [shard for shard in held if waits.get(shard.digest, NEVER) > newcomer_wait]
    later.sort(key=lambda shard: (-waits.get(shard.digest, NEVER), shard.used_at))
    chosen: list[HeldShard] = []
    for shard in later:
        if excess_bytes <= 0:
            break
        if may_go(shard):
            chosen.append(shard)
            excess_bytes -= shard.size_bytes
    return chosen if excess_bytes <= 0 else None
