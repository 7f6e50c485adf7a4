"""The reader of a process: samples that have arrived, and the fills that fetch the others (F, G, H)."""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from streamload.batches.assembly import Sample
from streamload.cache.checkpoint import CheckedArrivals
from streamload.cache.fallback_tier import FallbackTier
from streamload.cache.forecast import KNOWN_PART
from streamload.cache.freshness import Freshness, asker
from streamload.cache.shard import Shard
from streamload.cache.shard_cache import Numbers, ShardCache
from streamload.cache.shard_copy import ReadMemory
from streamload.cache.shard_view import Found
from streamload.cache.shared.sharing import Sharing
from streamload.cache.tier import Tier
from streamload.daemon.plan_file import PlannedSource, Progress, plan_of
from streamload.daemon.publisher import Publisher
from streamload.derived.prepared import PreparedOrigin
from streamload.ipc import ControlBlock
from streamload.metrics import Counters
from streamload.order.group import GroupOrder
from streamload.order.mixing import Change
from streamload.order.plan import pass_order
from streamload.origins.origin import Origin, Version, open_origin
from streamload.origins.outages import listen, outages
from streamload.prefetch.prefetcher import FillResult, Prefetcher, PrefetchOptions
from streamload.prefetch.ranges import Range, Ranges
from streamload.prefetch.scheduler import FillRequest
from streamload.worker.messages import EpochStart, WorkerConfig
from streamload.worker.reference_stream import ReferenceStream
from streamload.worker.shortage import Shortage

logger = logging.getLogger("streamload")

_POLL_SECONDS = (0.004, 0.05)
_POLL_SHARE = 0.02
"""A worker sleeps for this share of the time it has waited, within those bounds, before it looks again: each
look costs processor time that the fills need."""
_SLOW_SECONDS = 30.0
_BLOCKED_SECONDS = 5.0
_WITHOUT_SAMPLES = (
    "group %d of %d has no usable sample in its own shards: it reads those of all groups, so their samples "
    "come more often. See which shards are missing, or give fewer groups (by default: as many as nodes)"
)
_FEWEST_KNOWN = 16


class Superseded(Exception):
    """The rank has started another epoch, or has died."""


class Reader:
    """The tier, its views and fills, and the sequences that a process follows. It lasts from epoch to epoch.

    Args:
        config: what is read.
        control: tells whether the training loop waits, and whether it has given another order.
        counts: of this process.
        worker, workers: which of how many this process is; 0 workers: the rank itself.
    """

    def __init__(
        self, config: WorkerConfig, control: ControlBlock, counts: Counters, worker: int, workers: int
    ):
        self._parent = os.getppid() if workers else None
        self._config = config
        self._control = control
        self._counts = counts
        self._closing = threading.Event()
        self._tier = _open_tier(config, counts)
        self._fallback_tier = FallbackTier(config.tier_root, counts)
        ask = None if config.revalidate == "never" else asker(config.storage_options, config.origin, counts)
        self._sharing = Sharing(config.shared, counts, ask)
        each_epoch = config.revalidate != "start"
        self._freshness = Freshness(self._tier, config.run, each_epoch=each_epoch, ask=ask, counts=counts)
        self._cache = ShardCache(
            functools.partial(self._fallback_tier.beside, self._tier),
            config.shards,
            config.selection,
            skip=config.skip,
            counts=counts,
            counted=lambda shard: shard % max(1, workers) == worker,
            fetch=self._fetch,
            freshness=self._freshness,
        )
        self._prefetcher = Prefetcher(
            self._tier,
            self._open_origin,
            PrefetchOptions(threads=config.fills, index_only=True),
            counts=counts,
            sink=self._after_fill,
            has_prepared=self._sharing.has_prepared,
            fallback_tier=self._fallback_tier,
            freshness=self._freshness,
        )
        self._publisher = _publisher(config) if worker == 0 else None
        self._told_groups = config.split.groups_told_by(config.rank)
        preparation = config.assembly.preparation
        self._prepared_by = "" if preparation is None else preparation.name
        self._start: EpochStart | None = None
        self._row = worker + 1 if workers else 0  # of this process, in the control block
        self._streams: dict[tuple[int, int], ReferenceStream] = {}
        self._idle: set[int] = set()  # the sources without a share
        self._without_samples: set[tuple[int, int]] = set()  # groups and sources of which that was logged
        self._ranges = Ranges(lambda shard: self._open_origin(shard, self._closing))
        self.reads_ranges = False  # whether samples have had to be read from their origin
        self._shortage = Shortage(config, control, self._tier, self._cache, self._prefetcher)
        self._fills_ahead = False
        self._known_ahead: int | None = None  # about how many references, by the first samples that were seen
        self._asked: tuple[list[int], list[int]] = [], []
        self._blocked_ns: dict[int, int] = {}
        self._blocked_by: str | None = None  # a shard that holds up a batch for long
        self._telling = threading.Lock()
        self._end_listening = listen(self._tell)

    def begin(self, start: EpochStart) -> None:
        """Begin an epoch."""
        self._forget_streams()
        self._cache.keep_open(())
        self._start = start
        self._blocked_ns.clear()
        self._blocked_by = None
        self._tell()
        self._freshness.begin(f"{start.epoch}-{start.position}-{start.generation}")
        self._prefetcher.look_again()

    def references(self, group: int, source: int) -> ReferenceStream:
        """The sequence of a group and source from where the epoch began."""
        found = self._streams.get((group, source))
        if found is None:
            assert self._start is not None
            found = self._streams[group, source] = self._begin(self._start, group, source)
        return found

    def has(self, group: int, source: int, position: int, waiting: Waiting) -> bool:
        """Wait until all references before a position are known; False if there are fewer."""
        stream = self.references(group, source)
        while not stream.reaches(position):
            if not stream.follow(self._known_ahead):
                if stream.reads_everything and (group, source) not in self._without_samples:
                    self._without_samples.add((group, source))
                    logger.warning(_WITHOUT_SAMPLES, group, self._config.split.groups)
                blocked = stream.blocked()
                if self._are_refused(blocked):  # what the batch has read by now may make way
                    self._cache.keep_open(self._in_use().union(blocked))
                self._pause(waiting, blocked, source)
        return stream.has(position)

    def arrived(self, shard: int) -> Numbers:
        """The usable sample numbers of a shard that have arrived, ascending."""
        return self._cache.arrived(shard)[0]

    def next_usable(self, shard: int, after: int) -> int:
        """Wait for the first usable sample of a shard after number `after`; -1 if there is none."""
        waiting = Waiting()
        while True:
            usable, ended = self._cache.arrived(shard)
            later = usable[usable > after]
            if len(later):
                return int(later[0])
            if ended:
                return -1
            self._pause(waiting, [shard], self._source_of(shard))

    def find(self, shards: Sequence[int], numbers: Sequence[int]) -> list[Found | None]:
        """The entries of samples, by shard and number; None for what has to be fetched again."""
        places: dict[int, list[int]] = {}
        for place, shard in enumerate(shards):
            places.setdefault(shard, []).append(place)
        found: list[Found | None] = [None] * len(shards)
        if self.reads_ranges:
            self.want_ranges(list(zip(shards, numbers, strict=True)))
        for shard, own in places.items():
            for place, one in zip(own, self._cache.find(shard, [numbers[n] for n in own]), strict=True):
                found[place] = one
        return found

    def peek(self, group: int, source: int, first: int, stop: int) -> npt.NDArray[np.int64]:
        """References that are known without waiting, and not taken yet."""
        stream = self.references(group, source)
        while not stream.reaches(stop) and stream.follow(self._known_ahead):
            pass
        return stream.peek(first, stop)

    def want_ranges(self, samples: Sequence[tuple[int, int]]) -> None:
        """Request from the origins the samples, by shard and number, that have to be read there."""
        by_shard: dict[int, list[int]] = {}
        for shard, number in samples:
            by_shard.setdefault(shard, []).append(number)
        self._ranges.want(
            Range(self._config.shards[shard], *place)
            for shard, numbers in by_shard.items()
            for place in self._cache.ranges(shard, numbers)
        )

    def sample(
        self, shard: int, number: int, memory: ReadMemory | None = None, found: Found | None = None
    ) -> Sample:
        """A sample's bytes, in `memory` if given; waits where they have to be fetched again."""
        read = self._cache.read(shard, number, memory, found)
        if read is None:
            waiting = Waiting()
            while (read := self._cache.read(shard, number, memory)) is None:
                self._pause(waiting, [shard], self._source_of(shard))
        entry, data = read
        first = entry.start
        members = {extension: data[at - first : at - first + size] for extension, at, size in entry.members}
        prepared = entry.prepared[0] if entry.prepared is not None else ""
        return Sample(entry.key, self._config.shards[shard].name, members, prepared)

    def raise_if_unusable(self) -> None:
        """Raise NoValidSamples if no usable sample has been seen: no more will come."""
        self._cache.raise_if_unusable()

    def give_shares(self, changes: Sequence[Change]) -> None:
        """Prefetch only for the sources that have a share in one of these."""
        shares = zip(*(change.shares for change in changes), strict=True)
        self._idle = {source for source, own in enumerate(shares) if not any(own)}

    def fill_ahead(self) -> None:
        """Prefetch later shards from now on: the first batch had the link to itself."""
        self._fills_ahead = True

    def blocked(self) -> tuple[tuple[int, int], ...]:
        """The shards that held up the training loop since the last call, with nanoseconds."""
        blocked = tuple(self._blocked_ns.items())
        self._blocked_ns.clear()
        if self._blocked_by is not None:
            self._blocked_by = None
            self._tell()
        return blocked

    def let_go(self) -> None:
        """Close the shards that no known reference needs, and announce the demand."""
        mean_bytes = 0.0 if self._known_ahead else self._cache.mean_sample_bytes()
        if mean_bytes:
            self._known_ahead = max(_FEWEST_KNOWN, int(self._tier.limit_bytes / KNOWN_PART / mean_bytes))
        self._cache.keep_open(self._in_use())
        for stream in self._streams.values():
            stream.tell_progress()
        if self._publisher is not None:
            self._publish(self._publisher)

    def close(self) -> None:
        """Stop the fills and let go of the tier; once is enough."""
        self._closing.set()
        self._end_listening()
        if self._publisher is not None:
            self._publisher.close()
        self._sharing.close()
        self._prefetcher.close()
        self._forget_streams()
        self._ranges.close()
        self._cache.close()
        self._freshness.close()
        self._fallback_tier.close()

    def _publish(self, publisher: Publisher) -> None:
        """Publish the progress of this process's groups for daemons."""
        assert self._start is not None
        sources = range(len(self._config.sources))
        for group in self._told_groups:
            followed = [self._streams.get((group, source)) for source in sources]
            fronts = tuple((0, 0) if one is None else one.front for one in followed)
            ahead, mean_bytes = self._shards_ahead(), self._cache.mean_bytes()
            prepared = self._prepared_by
            publisher.tell(Progress(group, self._start.epoch, fronts, ahead, mean_bytes, prepared=prepared))

    def _forget_streams(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams = {}

    def _begin(self, start: EpochStart, group: int, source: int) -> ReferenceStream:
        config, own = self._config, self._config.sources[source]
        number = config.first_group + group
        pieces = own.pieces[number]
        state = start.groups[number].sources[source] if number in start.groups else None
        order = GroupOrder(
            own.order,
            own.count,
            number,
            start.epoch,
            start=None if state is None else state.cursor,
            passes=1 if config.one_pass else None,
            pieces=pieces,
        )

        def next_pass() -> npt.NDArray[np.int64]:
            """The shards that are read after this pass: where an epoch is one pass, the next epoch's."""
            if not config.one_pass or not config.train:
                return np.empty(0, np.int64)
            return pass_order(own.order, pieces.shards, number, start.epoch + 1, 0)

        begun, begun_in = ({} if state is None else state.begun), order.pass_
        arrivals = CheckedArrivals(self._cache, own.first, begun, lambda: order.pass_ == begun_in)
        return ReferenceStream(order, next_pass, config.shards, own.first, arrivals, self._tier)

    def _source_of(self, shard: int) -> int:
        """The source of a shard."""
        return bisect.bisect_right(self._config.sources, shard, key=lambda source: source.first) - 1

    def _pause(self, waiting: Waiting, blocked: list[int], source: int) -> None:
        """Wait a moment for bytes of a source, after making sure that they are being fetched."""
        assert self._start is not None
        orphaned = self._parent is not None and os.getppid() != self._parent
        if orphaned or self._control.order.generation != self._start.generation:
            raise Superseded
        self.want(blocked)
        self._prefetcher.check()
        if blocked:
            first = self._config.shards[blocked[0]]
            if self._cache.view(blocked[0]).is_stuck:
                self._prefetcher.store_in_fallback(first)
            if self._are_refused(blocked):
                self._shortage.make_do(blocked, self._in_use(), waiting.seconds())
            if waiting.seconds() > _BLOCKED_SECONDS and self._blocked_by != first.name:
                self._blocked_by = first.name
                self._tell()
            if waiting.is_due():
                view = self._cache.view(blocked[0])
                who = "this process" if self._prefetcher.filling(first) else "another process, or nobody yet"
                logger.warning("a batch has waited %.0f s for %r, filled by %s", waiting.seconds(), view, who)
        began = time.monotonic_ns()
        least, most = _POLL_SECONDS
        time.sleep(min(most, max(least, _POLL_SHARE * waiting.seconds())))
        waited_ns = time.monotonic_ns() - began
        self._counts.add("bytes_wait_ns", waited_ns)
        self._control.by_source[self._row, source, 1] += waited_ns
        if blocked and self._control.wanted_seconds():
            self._blocked_ns[blocked[0]] = self._blocked_ns.get(blocked[0], 0) + waited_ns

    def _tell(self) -> None:
        """Report to the rank what holds up this process: a shard, and servers that are away."""
        with self._telling:
            away = [[name, outage.cause[:500], outage.until] for name, outage in outages().items()]
            told = {"shard": self._blocked_by, "away": away[:4]}
            self._control.block(self._row, told if self._blocked_by or away else None)

    def _fetch(self, shard: Shard, version: Version, start: int, stop: int) -> bytes:
        """Bytes of an index-only shard, from its origin."""
        self._counts.add("range_reads")
        self.reads_ranges = True
        return self._ranges.read(Range(shard, version, start, stop))

    def _open_origin(self, shard: Shard, stop: threading.Event) -> Origin:
        """The origin of a shard, behind the shared cache."""
        config = self._config
        origin = open_origin(shard.url, config.storage_options, config.origin, self._counts, stop)
        preparation = config.assembly.preparation
        if shard.recipe and preparation is not None:  # what the shared cache doesn't give is made here
            origin = PreparedOrigin(origin, preparation)
        return self._sharing.through(shard, origin, stop)

    def want(self, blocked: Iterable[int] = ()) -> None:
        """Give the prefetcher the shards to fill, in order of need."""
        needed = dict.fromkeys(blocked)
        later: dict[int, None] = {}
        most_open = 0
        for (_, source), stream in self._streams.items():
            in_use = stream.shards_in_use()
            most_open = max(most_open, len(in_use))
            needed.update(dict.fromkeys(in_use))
            if self._fills_ahead and source not in self._idle:
                later.update(dict.fromkeys(stream.coming(self._shards_ahead()).tolist()))
        asked = [*needed], [shard for shard in later if shard not in needed]
        if asked != self._asked:
            self._asked = asked
            self._prefetcher.want(self._requests(most_open, *asked))

    def _requests(self, most_open: int, needed: list[int], later: list[int]) -> list[FillRequest]:
        """Requests with the next use of each shard as `DemandFile` announces it: open ones come first.

        A lane that has read its shard waits for the next one, which is needed and not open.
        """
        shards, in_use, position = self._config.shards, self._in_use(), itertools.count(most_open)
        return [
            *(
                FillRequest(
                    shards[shard],
                    float(max(0, most_open - 1) if shard in in_use else next(position)),
                    is_needed=True,
                )
                for shard in needed
            ),
            *(FillRequest(shards[shard], float(next(position))) for shard in later),
        ]

    def _after_fill(self, result: FillResult) -> None:
        """Store a shard that this process has filled in the shared cache, too."""
        if result.filled is not None and result.directory is not None:
            self._sharing.published(result.filled, result.directory)

    def _are_refused(self, shards: Iterable[int]) -> bool:
        """Whether one of these shards has found no room."""
        return any(self._prefetcher.refused_seconds(self._config.shards[shard]) for shard in shards)

    def _in_use(self) -> set[int]:
        """The shards that have to stay readable."""
        return {shard for stream in self._streams.values() for shard in stream.shards_in_use()}

    def _shards_ahead(self) -> int:
        mean = self._cache.mean_bytes()
        if not mean:
            return 1
        room = self._tier.limit_bytes / 4
        return max(1, int(min(self._config.ahead_bytes, room) / mean))


def _open_tier(config: WorkerConfig, counts: Counters) -> Tier:
    """The tier with its current limit: another run may have changed it since this one started."""
    is_there = (config.tier_root / "tier.json").is_file()
    return Tier(
        config.tier_root,
        None if is_there else config.tier_limit_bytes,
        counts,
        free_disk=config.free_disk,
        eviction=config.eviction,
    )


def _publisher(config: WorkerConfig) -> Publisher | None:
    """The publisher of plan files for daemons; None without a shared cache."""
    if config.shared is None or not config.train:
        return None
    sources = [PlannedSource(source.count, source.order) for source in config.sources]
    shards, storage = config.shards.urls, config.storage_options
    prepare = "" if config.assembly.preparation is None else str(config.assembly.preparation)
    return Publisher(
        config.shared.open_objects(),
        lambda: plan_of(sources, config.one_pass, shards, storage, prepare),
    )


class Waiting:
    """How long a worker has waited for one thing, and when to log it again."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told = 0

    def seconds(self) -> float:
        """How long, so far."""
        return time.monotonic() - self._began

    def is_due(self) -> bool:
        """Whether a line should be logged: after each half minute once."""
        if self.seconds() < _SLOW_SECONDS * (self._told + 1):
            return False
        self._told += 1
        return True
