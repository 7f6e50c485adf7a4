"""The fills of one process: tier, shared cache, versions and prefetcher, and what it is to fill (step F).

It moves bytes for the reader, which decides which shards it needs; the reader follows what arrives by itself.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import TYPE_CHECKING

from streamload.cache.freshness import Freshness, asker
from streamload.cache.shard import Shard, ShardRange, shard_of
from streamload.cache.tier import Tier
from streamload.metrics import Counters
from streamload.origins.origin import KeptConnections, Origin, Version, open_origin
from streamload.prefetch.fallback import FallbackTier
from streamload.prefetch.prefetcher import FillResult, Prefetcher, PrefetchOptions
from streamload.prefetch.scheduler import FillRequest
from streamload.worker.messages import EpochStart, WorkerConfig
from streamload.worker.stages import Spans

if TYPE_CHECKING:
    from streamload.prefetch.idle import IdlePreparer
    from streamload.prefetch.ranges import Ranges


class Fills:
    """Fills of a process. They last from epoch to epoch.

    Args:
        config: what is read.
        counts: of this process.
        spans: of its fills, while a trace runs.
        is_idle: whether the training loop doesn't wait for data now.

    Attributes:
        backing: the backing store; None: there is none.
        reads_ranges: whether samples have had to be read from their origin by range.
    """

    def __init__(
        self,
        config: WorkerConfig,
        counts: Counters,
        spans: Spans,
        is_idle: Callable[[], bool],
    ):
        self._config = config
        self._counts = counts
        self._spans = spans
        self._closing = threading.Event()
        self._connections = KeptConnections()
        self.tier = _open_tier(config, counts)
        self.fallback_tier = FallbackTier(config.tier.root, counts)
        # Files that are copied are asked in any case, as they are replaced in place.
        self._asks_remote = config.tier.revalidate != "never"
        ask = asker(config.origin, counts) if self._asks_remote or config.shards.copied else None
        self.backing = None if config.shared is None else config.shared.open(counts, ask)
        each_epoch = config.tier.revalidate != "start"
        self.freshness = Freshness(
            self.tier,
            config.run,
            each_epoch=each_epoch,
            ask=ask,
            counts=counts,
            asks_remote=self._asks_remote,
        )
        self.prefetcher = Prefetcher(
            self.tier,
            self._open_origin,
            PrefetchOptions(
                threads=config.ahead.fills,
                index_only=True,
                by_range=config.ahead.by_range,
                prepares=config.ahead.prepare_share > 0,
            ),
            counts=counts,
            sink=self._after_fill,
            has_prepared=_has_none if self.backing is None else self.backing.has_prepared,
            fallback_tier=self.fallback_tier,
            freshness=self.freshness,
        )
        preparation = config.assembly.preparation
        self._idle_preparer: IdlePreparer | None = None
        if config.ahead.prepare_share and preparation is not None:
            from streamload.prefetch.idle import IdlePreparer

            self._idle_preparer = IdlePreparer(
                self.tier,
                config.shards,
                preparation.derive,
                self.freshness,
                counts=counts,
                share=config.ahead.prepare_share,
                is_idle=is_idle,
            )
        self._ranges: Ranges | None = None
        self.reads_ranges = False
        self._wanted: tuple[list[int], list[int]] = [], []
        self._shards: dict[int, Shard] = {}  # of these

    def begin(self, start: EpochStart) -> None:
        """Begin an epoch: what is known of shards may be outdated."""
        self.freshness.begin(f"{start.epoch}-{start.position}-{start.generation}")
        self.prefetcher.look_again()
        self._wanted = [], []

    def want(
        self, needed: Collection[int], later: Iterable[int], in_use: Container[int], most_open: int
    ) -> None:
        """Set the shards to fill, in order of need.

        Args:
            needed: those that readers wait for or have open.
            later: those to fill ahead.
            in_use: the needed ones that are open.
            most_open: how many are open at once, at most.
        """
        by_urgency = [*needed], [shard for shard in later if shard not in needed]
        if by_urgency == self._wanted:
            return
        self._wanted, position, before = by_urgency, itertools.count(most_open), self._shards
        shards = self._shards = {
            shard: before.get(shard) or self._config.shards[shard] for shard in itertools.chain(*by_urgency)
        }
        # Next uses as `DemandFile` announces them, open shards first. A lane that has read its shard waits
        # for the next one, which is needed and not open.
        open_use = max(0, most_open - 1)
        requests = [
            FillRequest(shards[shard], float(open_use if shard in in_use else next(position)), is_needed=True)
            for shard in by_urgency[0]
        ]
        requests += [FillRequest(shards[shard], float(next(position))) for shard in by_urgency[1]]
        self.prefetcher.want(requests)

    def are_requested(self, shards: Sequence[int]) -> bool:
        """True if shards that a batch waits for are requested; they are looked at soon."""
        if self.prefetcher.has_refused or not self._shards.keys() >= set(shards):
            return False  # where room is short, needed ones come first
        self.prefetcher.look_soon([self._shards[shard] for shard in shards])
        return True

    def want_ranges(self, ranges: Iterable[ShardRange]) -> None:
        """Request ranges of index-only shards that will be read soon."""
        self._open_ranges().want(ranges)

    def read_range(self, shard: Shard, version: Version, start: int, stop: int) -> bytes:
        """Bytes of an index-only shard, from its origin."""
        self._counts.add("range_reads")
        self.reads_ranges = True
        return self._open_ranges().read(ShardRange(shard, version, start, stop))

    def _open_ranges(self) -> Ranges:
        if self._ranges is None:
            from streamload.prefetch.ranges import Ranges

            self._ranges = Ranges(lambda shard: self._open_origin(shard, self._closing))
        return self._ranges

    def are_refused(self, shards: Iterable[int]) -> bool:
        """True if there is no room for one of these shards."""
        return any(self.prefetcher.refused_seconds(self._config.shards[shard]) for shard in shards)

    def stop(self) -> None:
        """Stop all transfers where they are. Idempotent."""
        self._closing.set()
        if self._idle_preparer is not None:
            self._idle_preparer.close()
        if self.backing is not None:
            self.backing.close()
        self.prefetcher.close()
        if self._ranges is not None:
            self._ranges.close()
        self._connections.close()

    def close(self) -> None:
        """Release the tier, once `stop` was called and no reader uses it. Idempotent."""
        self.freshness.close()
        self.fallback_tier.close()

    def _after_fill(self, result: FillResult) -> None:
        """Store a shard that this process has filled in the shared cache, too."""
        if result.began_ns:
            self._spans.add("fill", result.began_ns, time.time_ns(), shard=result.shard.name)
        if self.backing is not None and result.filled is not None and result.directory is not None:
            self.backing.published(result.filled, result.directory)

    def _open_origin(self, shard: Shard, stop: threading.Event) -> Origin:
        """The origin of a shard, behind the shared cache."""
        config, backing = self._config, self.backing
        kept = self._connections
        origin = open_origin(shard.url, shard.storage_options, config.origin, self._counts, stop, kept=kept)
        preparation, revalidates = config.assembly.preparation, self._asks_remote or shard.is_copied
        if shard.recipe and preparation is not None:  # what the shared cache lacks is prepared here
            if backing is not None:
                source = shard_of(shard.url, shard.storage_options, is_copied=shard.is_copied)
                origin = backing.through(source, origin, stop, single_flight=False, revalidates=revalidates)
            origin = preparation.derive(origin)
        return origin if backing is None else backing.through(shard, origin, stop, revalidates=revalidates)


def _has_none(form: Shard) -> bool:
    """Without a backing store no prepared shard can be fetched as it is."""
    return False


def _open_tier(config: WorkerConfig, counts: Counters) -> Tier:
    """The tier with its current limit: another run may have changed it since this one started."""
    exists = (config.tier.root / "tier.json").is_file()
    return Tier(
        config.tier.root,
        None if exists else config.tier.limit_bytes,
        counts,
        free_disk=config.tier.free_disk,
    )
