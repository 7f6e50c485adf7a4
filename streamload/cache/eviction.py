"""Which shards to evict when space is needed: pure arithmetic over what a tier holds. It deletes nothing.

Belady's rule, possible because the plan is known: evict the shard whose next use by the live runs is farthest
away, never an open one, and only if the newcomer is needed sooner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

NEVER = math.inf


@dataclass(frozen=True, slots=True)
class HeldShard:
    """An entry of a tier that takes space: a published shard, a part, an index-only copy, a tombstone, or the
    columns of a shard."""

    digest: str
    path: Path
    size_bytes: int
    """Its share of the budget: the size of its files, or its reservation if that is larger."""
    kind: str
    """The subdirectory that holds it: "shards", "parts", "bare" (index-only), "gone" (tombstones) or
    "columns"."""
    used_at: float
    """When a reader last opened it, in seconds since the epoch."""
    is_superseded: bool = False
    """True if its prepared form is here, and nobody has opened it since that came."""


def victims(
    held: Iterable[HeldShard],
    next_uses: Mapping[str, float],
    *,
    excess_bytes: int,
    may_go: Callable[[HeldShard], bool],
    newcomer_next_use: float = -1.0,
) -> list[HeldShard]:
    """The shards to evict, in order, so that `excess_bytes` become free; fewer if no more may go.

    Args:
        next_uses: the next use of each digest, in shard visits from now; missing = never.
        may_go: whether nobody has a shard open; called only for candidates, in order.
        newcomer_next_use: the next use of the shard that needs the space: what is needed sooner stays.
    """

    def next_use(shard: HeldShard) -> float:
        return NEVER if shard.is_superseded else next_uses.get(shard.digest, NEVER)

    ranked = [shard for shard in held if next_use(shard) > newcomer_next_use]
    ranked.sort(key=lambda shard: (-next_use(shard), shard.used_at))
    chosen: list[HeldShard] = []
    for shard in ranked:
        if excess_bytes <= 0:
            break
        if may_go(shard):
            chosen.append(shard)
            excess_bytes -= shard.size_bytes
    return chosen
