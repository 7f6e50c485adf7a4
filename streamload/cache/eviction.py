"""What has to go when room is needed: pure arithmetic over what a tier holds. It deletes nothing.

The rule (Belady's, made possible by a plan that is known): the shard goes whose next visit by the live runs
is farthest, never one that is open, and only if the newcomer is needed sooner than it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from streamload.options import Eviction

NEVER = math.inf


@dataclass(frozen=True, slots=True)
class HeldShard:
    """Something in a tier that takes room: a published shard, a part, an index-only copy, or a tombstone."""

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
    next_uses: Mapping[str, float],
    *,
    newcomer_next_use: float,
    excess_bytes: int,
    may_go: Callable[[HeldShard], bool],
    eviction: Eviction = "plan",
) -> list[HeldShard] | None:
    """The shards to evict so that `excess_bytes` become free, or None if that can't be had now.

    Args:
        held: what is in the tier.
        next_uses: for each digest how many shard visits away its next use is; missing = never.
        newcomer_next_use: the same for the shard that wants the room: what is needed sooner stays.
        excess_bytes: how much is missing.
        may_go: whether nobody has it open; asked only of those that would go.
        eviction: "plan" is the rule above; under "lru" the one goes that was opened longest ago, whatever
            the runs have announced.
    """
    chosen = giving_way(
        held,
        next_uses,
        newcomer_next_use=newcomer_next_use,
        excess_bytes=excess_bytes,
        may_go=may_go,
        eviction=eviction,
    )
    return chosen if sum(shard.size_bytes for shard in chosen) >= excess_bytes else None


def giving_way(
    held: Iterable[HeldShard],
    next_uses: Mapping[str, float],
    *,
    newcomer_next_use: float = -1.0,
    excess_bytes: int,
    may_go: Callable[[HeldShard], bool],
    eviction: Eviction = "plan",
) -> list[HeldShard]:
    """The same, but as many as may go where that isn't enough: for a tier that itself has to shrink."""
    if eviction == "lru":
        ranked = sorted(held, key=lambda shard: shard.used_at)
    else:
        ranked = [shard for shard in held if next_uses.get(shard.digest, NEVER) > newcomer_next_use]
        ranked.sort(key=lambda shard: (-next_uses.get(shard.digest, NEVER), shard.used_at))
    chosen: list[HeldShard] = []
    for shard in ranked:
        if excess_bytes <= 0:
            break
        if may_go(shard):
            chosen.append(shard)
            excess_bytes -= shard.size_bytes
    return chosen


def allowed_bytes(limit_bytes: int, stored_bytes: int, free_bytes: int, floor_bytes: int) -> int:
    """The most that a tier may take now: its limit, or less where that would leave too little free.

    Args:
        limit_bytes: of the tier.
        stored_bytes: what it has on the disk.
        free_bytes: what is free there.
        floor_bytes: what has to stay free.
    """
    return min(limit_bytes, max(0, stored_bytes + free_bytes - floor_bytes))
