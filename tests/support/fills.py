"""Requests of fills, as the readers of a run make them."""

from __future__ import annotations

from collections.abc import Sequence

from streamload.cache.shard import Shard
from streamload.prefetch.scheduler import FillRequest


def requests_for(needed: Sequence[Shard], later: Sequence[Shard] = ()) -> list[FillRequest]:
    """Requests whose next uses are their positions; open shards are used alike."""
    last_open = float(len(needed) - 1)
    return [
        *(FillRequest(shard, last_open, is_needed=True) for shard in needed),
        *(FillRequest(shard, float(len(needed) + k)) for k, shard in enumerate(later)),
    ]
