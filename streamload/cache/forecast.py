"""How far a tier will go for a run: what has to be open at once, and the share of hits of a warm epoch.

The arithmetic is pure; `forecast` joins it with what the tier holds of the run's shards by now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from streamload.cache.directory import bytes_below
from streamload.cache.shard import LOOKED_THROUGH, Shard, spread
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt
from streamload.metrics import format_bytes
from streamload.shards.index import IndexReader

_SHARDS_LOOKED_INTO = 64
_SHARDS_MEASURED = 1000


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run may expect of its tier.

    Attributes:
        limit_bytes: the most that the tier may hold.
        used_bytes: what it holds.
        shards: how many the run reads on this node.
        data_bytes: what all of them would take; None where none has been seen.
        live_bytes: what has to be open at once; None where that isn't known either.
    """

    limit_bytes: int
    used_bytes: int
    shards: int
    data_bytes: int | None = None
    live_bytes: int | None = None

    @property
    def hit_rate(self) -> float | None:
        """The share of shards that a warm epoch finds in the tier: (limit − live) / data, at most 1."""
        if self.data_bytes is None or self.live_bytes is None:
            return None
        if self.data_bytes <= self.limit_bytes:
            return 1.0
        return max(0.0, (self.limit_bytes - self.live_bytes) / self.data_bytes)

    def __str__(self) -> str:
        used = f"{format_bytes(self.used_bytes)} of at most {format_bytes(self.limit_bytes)} used"
        if self.data_bytes is None or self.live_bytes is None or self.hit_rate is None:
            return f"{used}; {self.shards:,} shards, none of them seen yet"
        return (
            f"{used}; {self.shards:,} shards of about {format_bytes(self.data_bytes)}, of them "
            f"{format_bytes(self.live_bytes)} open at once: a warm epoch finds {self.hit_rate:.0%} here"
        )


def live_shards(lanes: int, window: int, samples_per_shard: float) -> float:
    """How many shards have to be open at once: those in lanes, those of a window, and some more."""
    return 1.2 * (lanes + window / max(1.0, samples_per_shard)) + 1


def forecast(tier: Tier, shards: Sequence[Shard], lanes: int, window: int, nodes: int = 1) -> Forecast:
    """What a run may expect, by the mean of those of its shards that the tier holds.

    Of a long list only some are looked for in the tier, and none in an empty one; shards that are listed more
    than once are counted once only in a short one.

    Args:
        tier: it is looked into, and stays as it is.
        shards: all that the run reads.
        lanes, window: of its order.
        nodes: among which the shards are dealt.
    """
    is_long = len(shards) > LOOKED_THROUGH
    used_bytes, allowed_bytes = tier.room.used_bytes, tier.room.allowed_bytes
    has_any = next(tier.own("shards"), None) is not None
    looked_at = {shard.digest: shard for shard in spread(shards)} if has_any or not is_long else {}
    count = -(-(len(shards) if is_long else len(looked_at)) // nodes)
    held = tier.published_of(
        dict.fromkeys(digest for shard in looked_at.values() for digest in shard.digests)
    )
    samples: list[int] = []
    for path in held[:_SHARDS_LOOKED_INTO]:
        with contextlib.suppress(OSError, CacheCorrupt), IndexReader(path) as index:
            samples.append(index.count)
    if not samples:
        return Forecast(allowed_bytes, used_bytes, count)
    measured = held[:: -(-len(held) // _SHARDS_MEASURED)]
    mean_bytes = sum(map(bytes_below, measured)) / len(measured)
    live = min(float(count), live_shards(lanes, window, sum(samples) / len(samples)))
    return Forecast(allowed_bytes, used_bytes, count, int(mean_bytes * count), int(mean_bytes * live))
