"""Forecast of a tier's use in a run, and sizes of shards.

`forecast` goes by what the tier holds now. `Measure` asks the tier, the shared cache or the origin for the
size of a shard and its samples, when a run starts whose cache may be too small (loader/order_spec.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from streamload.cache.backing import Backing
from streamload.cache.directory import bytes_below, reserved_for_rows
from streamload.cache.part import reserved_bytes
from streamload.cache.shard import LOOKED_THROUGH, Shard, spread
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt, StreamloadError
from streamload.metrics import Counters, format_bytes
from streamload.order.lanes import live_shards
from streamload.origins.origin import Origin, OriginOptions, has_ranges, open_origin
from streamload.shards.index import IndexReader
from streamload.shards.samples import ShardScanner, border

_SHARDS_LOOKED_INTO = 64
_SHARDS_MEASURED = 1000


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of a run's hit rates.

    Attributes:
        limit_bytes: the most that the tier may hold.
        used_bytes: what it holds.
        shards: how many the run reads on this node.
        data_bytes: what all of them would take; None if none has been seen.
        live_bytes: what has to be open at once; None if unknown.
        rows_bytes: the room of rows of modules, which isn't part of the limit.
    """

    limit_bytes: int
    used_bytes: int
    shards: int
    data_bytes: int | None = None
    live_bytes: int | None = None
    rows_bytes: int = 0

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
        if self.rows_bytes:
            used += f", beside {format_bytes(self.rows_bytes)} of rows of modules"
        if self.data_bytes is None or self.live_bytes is None or self.hit_rate is None:
            return f"{used}; {self.shards:,} shards, none of them seen yet"
        return (
            f"{used}; {self.shards:,} shards of about {format_bytes(self.data_bytes)}, of them "
            f"{format_bytes(self.live_bytes)} open at once: a warm epoch finds {self.hit_rate:.0%} here"
        )


def forecast(tier: Tier, shards: Sequence[Shard], lanes: int, window: int, nodes: int = 1) -> Forecast:
    """Forecast by the mean size of those shards that the tier holds.

    Of a long list only a sample is looked up in the tier, and nothing in an empty tier; duplicates are
    recognised only in a short list.

    Args:
        tier: is only read.
        lanes, window: of its order.
        nodes: that share the shards.
    """
    is_long = len(shards) > LOOKED_THROUGH
    used_bytes, allowed_bytes = tier.budget.used_bytes, tier.budget.allowed_bytes
    rows_bytes = reserved_for_rows(tier.root)
    has_any = next(tier.own("shards"), None) is not None
    looked_at = {shard.digest: shard for shard in spread(shards)} if has_any or not is_long else {}
    count = -(-(len(shards) if is_long else len(looked_at)) // nodes)
    digests = dict.fromkeys(digest for shard in looked_at.values() for digest in shard.digests)
    held = [path for path in map(tier.published, digests) if path.is_dir()]
    samples: list[int] = []
    for path in held[:_SHARDS_LOOKED_INTO]:
        with contextlib.suppress(OSError, CacheCorrupt), IndexReader(path) as index:
            samples.append(index.count)
    if not samples:
        return Forecast(allowed_bytes, used_bytes, count, rows_bytes=rows_bytes)
    measured = held[:: -(-len(held) // _SHARDS_MEASURED)]
    mean_bytes = sum(map(bytes_below, measured)) / len(measured)
    live = min(float(count), live_shards(lanes, window, sum(samples) / len(samples)))
    data_bytes, live_bytes = int(mean_bytes * count), int(mean_bytes * live)
    return Forecast(allowed_bytes, used_bytes, count, data_bytes, live_bytes, rows_bytes)


_HEAD_BYTES = 1 << 20
"""Bytes of a shard from which the size of its samples is estimated."""
_MOST_HEAD_BYTES = 16 << 20
_BRIEF = OriginOptions(
    connect_seconds=5.0,
    stall_seconds=5.0,
    attempts=2,
    first_get_bytes=_HEAD_BYTES,
    first_part_bytes=_HEAD_BYTES,
)


class Measure:
    """The sizes of shards and samples, equal from whichever place has them. Thread-safe.

    Args:
        tier: asked first, never changed.
        backing: a store that is asked before origins.
    """

    def __init__(self, tier: Tier, backing: Backing | None):
        self.tier = tier
        self._backing = None if backing is None else backing.open_read_only(Counters())
        self._stop = threading.Event()

    def __enter__(self) -> Measure:
        return self

    def __exit__(self, *_: object) -> None:
        if self._backing is not None:
            self._backing.close()

    def shard_bytes(self, shard: Shard) -> int:
        """The size of a shard in the tier.

        Returns:
            0 if that is unknown (the output of a command, an origin without an answer), or if only an index
            is kept (a local file).
        """
        if shard.local is not None or not has_ranges(shard.url):
            return 0
        for digest in shard.digests:
            if (size := self._published_bytes(digest)) is not None:
                return reserved_bytes(size)
        with contextlib.suppress(StreamloadError):
            return reserved_bytes(self._asked(shard) or 0)
        return 0

    def prepared_bytes(self, shard: Shard) -> int:
        """The size of a shard's prepared form in the tier or the shared cache; 0: neither has it."""
        form = shard.prepared
        if form is None:
            return 0
        size = self._published_bytes(form.digest)
        if size is None and self._backing is not None and shard.local is None:
            with contextlib.suppress(StreamloadError):
                size = self._backing.size(form)
        return 0 if size is None else reserved_bytes(size)

    def sample_bytes(self, shard: Shard) -> float:
        """The mean size of a shard's samples, judged by its first megabyte.

        Returns:
            A megabyte if no sample is complete in it, or if it can't be read (the reader will report why).
        """
        with contextlib.suppress(StreamloadError):
            head = self._held_head(shard) or self._head(shard)[:_HEAD_BYTES]
            entries = ShardScanner(checksums=False).feed(head)
            if entries:
                return border(entries[-1]) / len(entries)
        return float(_HEAD_BYTES)

    def head(self, shard: Shard, samples: int) -> bytes:
        """The first bytes of a shard at its origin, until so many samples are whole, or 16 MiB.

        Returns:
            Nothing from a command or a local file, or if they can't be read (the reader will report why).
        """
        with contextlib.suppress(StreamloadError):
            if shard.local is None and has_ranges(shard.url):
                return self._head(shard, samples)
        return b""

    def _asked(self, shard: Shard) -> int | None:
        """The size by the shared cache, else by the origin, of which one byte is requested."""
        if self._backing is not None:
            for form in filter(None, (shard.prepared, shard)):
                size = self._backing.size(form)
                if size is not None:
                    return size
        with contextlib.closing(self._origin(shard)) as origin:
            return origin.version().size

    def _published_bytes(self, digest: str) -> int | None:
        """The size of a published shard; None: there is none."""
        with contextlib.suppress(OSError, CacheCorrupt), IndexReader(self.tier.published(digest)) as index:
            return index.size or 0
        return None

    def _held_head(self, shard: Shard) -> bytes | None:
        for digest in shard.digests:
            with contextlib.suppress(OSError), (self.tier.published(digest) / "data").open("rb") as data:
                return data.read(_HEAD_BYTES)
        return None

    def _head(self, shard: Shard, samples: int = 0) -> bytes:
        """At least a megabyte, and until so many samples are whole."""
        origin, head, count = self._origin(shard), bytearray(), 0
        scanner = ShardScanner(checksums=False)
        if self._backing is not None:
            origin = self._backing.through(shard, origin, self._stop, single_flight=False)
        with contextlib.closing(origin), contextlib.closing(origin.open()) as stream:
            for chunk in stream.chunks():
                head += chunk
                count += len(scanner.feed(chunk)) if count < samples else 0
                if len(head) >= (_HEAD_BYTES if count >= samples else _MOST_HEAD_BYTES):
                    break
        return bytes(head)

    def _origin(self, shard: Shard) -> Origin:
        return open_origin(shard.url, shard.storage_options, _BRIEF, stop=self._stop)
