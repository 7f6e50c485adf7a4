"""How large a shard and its samples are: the same whether the tier has it, or its origin has to be asked.

It is asked where a run begins whose cache may be too small (loader/widths.py); nothing of it is kept.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from streamload.cache.fill import reserved_bytes
from streamload.cache.shard import Shard
from streamload.cache.shared.sharing import SharedOptions
from streamload.cache.shared.through import ReadThrough
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt, StreamloadError
from streamload.metrics import Counters
from streamload.origins.origin import Origin, OriginOptions, has_ranges, open_origin
from streamload.shards.index import IndexReader
from streamload.shards.samples import ShardScanner, border

if TYPE_CHECKING:
    from streamload.cache.shared.tier import SharedTier

_HEAD_BYTES = 1 << 20
"""So much of a shard tells how large its samples are."""
_BRIEF = OriginOptions(
    connect_seconds=5.0,
    stall_seconds=5.0,
    attempts=2,
    first_get_bytes=_HEAD_BYTES,
    first_part_bytes=_HEAD_BYTES,
)


class Measure:
    """Looks at shards; for some threads at a time.

    Args:
        tier: asked first, and never changed.
        storage_options: for origins.
        shared: asked before them.
    """

    def __init__(self, tier: Tier, storage_options: dict[str, Any] | None, shared: SharedOptions | None):
        self.tier = tier
        self._storage_options = storage_options
        self._options = shared
        self._shared: SharedTier | None = None  # opened when it is first asked
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> Measure:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shared is not None:
            self._shared.close()

    def shard_bytes(self, shard: Shard) -> int:
        """What a shard takes in the tier.

        Returns:
            0 where that can't be known (a command's output, an origin without an answer), or where only an
            index is kept (a local file).
        """
        if shard.local is not None or not has_ranges(shard.url):
            return 0
        for digest in shard.digests:
            with (
                contextlib.suppress(OSError, CacheCorrupt),
                IndexReader(self.tier.published(digest)) as index,
            ):
                return reserved_bytes(index.size or 0)
        with contextlib.suppress(StreamloadError):
            return reserved_bytes(self._asked(shard) or 0)
        return 0

    def sample_bytes(self, shard: Shard) -> float:
        """The mean of a shard's samples, by its first megabyte.

        Returns:
            A megabyte where no sample is whole in it, or it can't be had: whoever reads the shard says why.
        """
        with contextlib.suppress(StreamloadError):
            entries = ShardScanner(checksums=False).feed(self._held_head(shard) or self._head(shard))
            if entries:
                return border(entries[-1]) / len(entries)
        return float(_HEAD_BYTES)

    def _asked(self, shard: Shard) -> int | None:
        """The size by the shared cache, else by the origin, which is asked for a byte."""
        shared = self._shared_tier()
        if shared is not None:
            for form in filter(None, (shard.prepared, shard)):
                held = shared.held(form)
                if held is not None:
                    return held.size
        with contextlib.closing(self._origin(shard)) as origin:
            return origin.version().size

    def _held_head(self, shard: Shard) -> bytes | None:
        for digest in shard.digests:
            with contextlib.suppress(OSError), (self.tier.published(digest) / "data").open("rb") as data:
                return data.read(_HEAD_BYTES)
        return None

    def _head(self, shard: Shard) -> bytes:
        origin, shared, head = self._origin(shard), self._shared_tier(), bytearray()
        if shared is not None:
            origin = ReadThrough(shard, shared, origin, self._stop)
        with contextlib.closing(origin), contextlib.closing(origin.open()) as stream:
            for chunk in stream.chunks():
                head += chunk
                if len(head) >= _HEAD_BYTES:
                    break
        return bytes(head[:_HEAD_BYTES])

    def _shared_tier(self) -> SharedTier | None:
        with self._lock:
            if self._shared is None and self._options is not None:
                self._shared = self._options.open_tier(Counters())
            return self._shared

    def _origin(self, shard: Shard) -> Origin:
        return open_origin(shard.url, self._storage_options, _BRIEF, stop=self._stop)
