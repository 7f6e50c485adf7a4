"""Shards that the order waits for and that find no room: when to go on without storing them (step F)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from streamload.cache.directory import BLOCK_BYTES, bytes_below, granted_bytes
from streamload.cache.forecast import LARGE_SAMPLE_BYTES, Width, fitting
from streamload.cache.part import reserved_bytes
from streamload.cache.shard import Shard
from streamload.cache.shard_cache import ShardCache
from streamload.cache.tier import Tier
from streamload.errors import CacheFull
from streamload.ipc import ControlBlock
from streamload.prefetch.prefetcher import Prefetcher
from streamload.worker.messages import WorkerConfig

logger = logging.getLogger("streamload")

_NO_ROOM_SECONDS = 10.0
_NO_ROOM_AGAIN_SECONDS = 1.0
_STANDOFF_SECONDS = 2.0
"""Used where no arriving shard may make way once it is read: the processes that have some open wait, too."""
_LOOK_SECONDS = 0.1


class Shortage:
    """The decision of one process about its shards that find no room.

    Args:
        config: what is read.
        control: tells whether the training loop waits.
        tier: which has too little room.
        cache: the process's views of shards.
        ahead: its fills.
    """

    def __init__(
        self, config: WorkerConfig, control: ControlBlock, tier: Tier, cache: ShardCache, ahead: Prefetcher
    ):
        self._config = config
        self._control = control
        self._tier = tier
        self._cache = cache
        self._prefetcher = ahead
        self._patience_seconds = _NO_ROOM_SECONDS
        self._look_at = 0.0

    def make_do(self, blocked: Sequence[int], in_use: set[int], waited_seconds: float) -> None:
        """Go on without room for the shards that the order waits for, where waiting won't help.

        It is certain not to come where so much is open that the order needs before it can go on. Else what
        others have open may make way, above all while the training loop does something else.

        Args:
            blocked: the shards that the order waits for, the most urgent first.
            in_use: those that have to stay readable until it goes on.
            waited_seconds: for how long it has been waiting.

        Raises:
            CacheFull: a shard has to be stored, and can't be.
        """
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_SECONDS
        shards = [self._config.shards[shard] for shard in blocked]
        digests = {digest for shard in in_use for digest in self._config.shards[shard].digests}
        try:
            tier = self._tier
            parts = {part.name[:32]: granted_bytes(part) for part in tier.own("parts")}
            # Those of indexes alone give back most of what they were granted.
            arriving = {digest: size for digest, size in parts.items() if size > reserved_bytes(0)}
            whole = (path for digest in digests for path in (tier.published(digest), tier.index_only(digest)))
            held_bytes = sum(map(bytes_below, whole))
            held_bytes += sum(size for digest, size in arriving.items() if digest in digests)
            free_bytes = tier.budget.allowed_bytes - held_bytes
        except OSError:
            return  # whoever fills says what is wrong with the tier, and goes on without it
        for shard in shards:
            if self._prefetcher.lacks_bytes(shard) > free_bytes:
                self._do_without(shard, is_certain=True)
        some_arrive = max(parts.values(), default=0) > BLOCK_BYTES  # more than a claim
        patience_seconds = min(self._patience_seconds, math.inf if some_arrive else _STANDOFF_SECONDS)
        refused_seconds = self._prefetcher.refused_seconds(shards[0])
        if min(waited_seconds, refused_seconds, self._control.wanted_seconds()) > patience_seconds:
            self._do_without(shards[0], is_certain=False)

    def _do_without(self, shard: Shard, *, is_certain: bool) -> None:
        """Store a shard index-only, or in the fallback tier.

        Raises:
            CacheFull: its origin gives no ranges, or not even its index has room; and memory has none either.
        """
        if not self._prefetcher.store_index_only(shard):
            if not self._prefetcher.store_in_fallback(shard):
                raise CacheFull(self._no_room(shard, is_certain))
            return
        if self._patience_seconds == _NO_ROOM_SECONDS:
            logger.warning(
                "%s. Until then only its index is kept, and its samples, like those of others that have no "
                "room, are read from where they come from",
                self._no_room(shard, is_certain),
            )
        self._patience_seconds = _NO_ROOM_AGAIN_SECONDS

    def _no_room(self, shard: Shard, is_certain: bool) -> str:
        room = f"no room for {shard.name} in the cache at {self._tier.root}: {self._tier.budget.bound}"
        shard_bytes = reserved_bytes(int(self._cache.mean_bytes()))
        sizes = shard_bytes, self._cache.mean_sample_bytes() or LARGE_SAMPLE_BYTES
        orders = [(-(-source.count // source.order.groups), source.order) for source in self._config.sources]
        asked = [Width(order.lanes, order.window, count, *sizes) for count, order in orders]
        step = max(1, self._config.split.batch // self._config.split.groups)
        found = fitting(asked, self._tier.budget.allowed_bytes, step, lanes=True, window=True)
        fits = "none would fit" if found is None else f"{_widths(found)} would fit"
        why = (
            "is less than the shards that have to be open at once"
            if is_certain
            else "is taken by what this run and others have open"
        )
        return (
            f"{room} {why} ({_widths(asked)}{'' if found == asked else f'; {fits}'}); raise cache_size, make "
            f"room on the disk, or begin anew with fewer lanes and a smaller window"
        )


def _widths(widths: Sequence[Width]) -> str:
    lanes, window = sum(width.lanes for width in widths), sum(width.window for width in widths)
    return f"lanes={lanes} and shuffle={window:,}"
