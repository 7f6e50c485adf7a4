"""Shards that the order waits for and that find no room: when to go on without storing them (step F)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from streamload.cache.directory import BLOCK_BYTES, bytes_below, granted_bytes
from streamload.cache.part import reserved_bytes
from streamload.cache.shard import Shard
from streamload.cache.shard_cache import ShardCache
from streamload.errors import CacheFull
from streamload.ipc import ControlBlock
from streamload.order.lanes import LARGE_SAMPLE_BYTES, Width, fitting
from streamload.worker.blocked import Blocked
from streamload.worker.fills import Fills
from streamload.worker.messages import WorkerConfig

logger = logging.getLogger("streamload")

_NO_ROOM_SECONDS = 10.0
_NO_ROOM_AGAIN_SECONDS = 1.0
_STANDOFF_SECONDS = 2.0
"""The patience where no arriving shard will become evictable: the other processes of the node wait, too."""
_LOOK_SECONDS = 0.1


class _Room(NamedTuple):
    """The room for shards in the tier, at one moment.

    Attributes:
        free_bytes: what evicting all that isn't in use would leave for the blocked shards.
        some_arrive: whether a fill is under way that holds more than a claim.
    """

    free_bytes: int
    some_arrive: bool


class Shortage:
    """Decides for one process about its shards that find no room.

    Args:
        config: what is read.
        control: shows whether the training loop waits.
        fills: of this process.
        cache: its views of shards.
    """

    def __init__(self, config: WorkerConfig, control: ControlBlock, fills: Fills, cache: ShardCache):
        self._config = config
        self._control = control
        self._tier = fills.tier
        self._prefetcher = fills.prefetcher
        self._cache = cache
        self._patience_seconds = _NO_ROOM_SECONDS
        self._look_at = 0.0

    def find_room(self, blocked: Blocked, in_use: Iterable[int]) -> None:
        """Go on without storing the shards that a batch waits for, if waiting for room won't help.

        1. It can't help where the shards in use leave too little: then they are stored index-only at once.
        2. Else shards that others have open may become evictable. That is waited for, as long as the training
           loop doesn't wait itself.

        Args:
            blocked: the batch.
            in_use: the shards that have to stay readable until it goes on.

        Raises:
            CacheFull: a shard has to be stored, and can't be.
        """
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_SECONDS
        shards = [self._config.shards[shard] for shard in blocked.shards]
        try:
            room = self._room({digest for shard in in_use for digest in self._config.shards[shard].digests})
        except OSError:
            return  # the filling threads see the same error, and use the fallback tier
        for shard in shards:
            if self._prefetcher.lacks_bytes(shard) > room.free_bytes:
                self._do_without(shard, is_certain=True)
        patience_seconds = min(self._patience_seconds, math.inf if room.some_arrive else _STANDOFF_SECONDS)
        refused_seconds = self._prefetcher.refused_seconds(shards[0])
        if min(blocked.seconds, refused_seconds, self._control.wanted_seconds()) > patience_seconds:
            self._do_without(shards[0], is_certain=False)

    def _room(self, digests: set[str]) -> _Room:
        """Measure the room beside the shards with these digests."""
        tier = self._tier
        parts = {part.name[:32]: granted_bytes(part) for part in tier.own("parts")}
        # An index-only part gives back most of what it was granted.
        arriving = {digest: size for digest, size in parts.items() if size > reserved_bytes(0)}
        held_bytes = 0
        for digest in digests:
            stored_bytes = bytes_below(tier.published(digest)) + bytes_below(tier.index_only(digest))
            # Not both: a part that was published since it was listed would count twice.
            held_bytes += max(stored_bytes, arriving.get(digest, 0))
        free_bytes = tier.budget.allowed_bytes - held_bytes
        return _Room(free_bytes, some_arrive=max(parts.values(), default=0) > BLOCK_BYTES)

    def _do_without(self, shard: Shard, *, is_certain: bool) -> None:
        """Store a shard unprepared, index-only, or in the fallback tier.

        Raises:
            CacheFull: neither is possible: its origin has no ranges, or its index finds no room, and there is
                no fallback tier.
        """
        if self._prefetcher.store_unprepared(shard):
            return
        if not self._prefetcher.store_index_only(shard):
            if not self._prefetcher.store_in_fallback(shard):
                raise CacheFull(self._no_room(shard, is_certain))
            return
        if self._patience_seconds == _NO_ROOM_SECONDS:
            logger.warning(
                "%s. Until then only its index is stored, and its samples, like those of other shards "
                "without room, are read from the origin",
                self._no_room(shard, is_certain),
            )
        self._patience_seconds = _NO_ROOM_AGAIN_SECONDS

    def _no_room(self, shard: Shard, is_certain: bool) -> str:
        room = f"no room for {shard.name} in the cache at {self._tier.root}: {self._tier.budget.bound}"
        shard_bytes = reserved_bytes(int(self._cache.mean_bytes()))
        sizes = shard_bytes, self._cache.mean_sample_bytes() or LARGE_SAMPLE_BYTES
        orders = [(-(-source.count // source.order.groups), source.order) for source in self._config.sources]
        needed = [Width(order.lanes, order.window, count, *sizes) for count, order in orders]
        step = max(1, self._config.split.batch // self._config.split.groups)
        narrower = fitting(needed, self._tier.budget.allowed_bytes, step, lanes=True, window=True)
        fits = "none would fit" if narrower is None else f"{_widths(narrower)} would fit"
        why = (
            "is less than the shards that have to be open at once"
            if is_certain
            else "is taken by what this run and others have open"
        )
        return (
            f"{room} {why} ({_widths(needed)}{'' if narrower == needed else f'; {fits}'}); raise cache_size, "
            f"make room on the disk, or start again with fewer lanes and a smaller window"
        )


def _widths(widths: Sequence[Width]) -> str:
    lanes, window = sum(width.lanes for width in widths), sum(width.window for width in widths)
    return f"lanes={lanes} and shuffle={window:,}"
