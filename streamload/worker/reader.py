"""The reader of a process: samples that have arrived, and the shards that it needs next (F, G, H)."""

from __future__ import annotations

import bisect
import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamload.batches.in_progress import Unread
from streamload.cache.selection import Numbers, with_facts
from streamload.cache.shard import ShardRange
from streamload.cache.shard_cache import Facts, ShardCache
from streamload.cache.shard_copy import ReadMemory
from streamload.cache.shard_view import Found, OpenFiles
from streamload.extension import ReadProgress
from streamload.ipc import ControlBlock
from streamload.metrics import Counters
from streamload.order.events import Event
from streamload.order.group import GroupOrder
from streamload.order.lanes import KNOWN_PART
from streamload.order.left_out import LeftOutOf, Tally
from streamload.order.plan import pass_order
from streamload.origins.endpoints import listen, outages
from streamload.shards.index import IndexReader
from streamload.shards.samples import Entry, Sample
from streamload.worker.arrivals import CheckedArrivals
from streamload.worker.blocked import Action, Blocked, Superseded, Wait, decide, poll_seconds
from streamload.worker.fills import Fills
from streamload.worker.messages import EpochStart, WorkerConfig
from streamload.worker.reference_stream import ReferenceStream
from streamload.worker.stages import Spans, Stages
from streamload.worker.states import CheckpointShard

if TYPE_CHECKING:
    from streamload.worker.shortage import Shortage

logger = logging.getLogger("streamload")

_WITHOUT_SAMPLES = (
    "group %d of %d has no usable sample in its own shards: it reads those of all groups, so their samples "
    "come more often. See which shards are missing, or give fewer groups (by default: as many as nodes)"
)
ENDED_COLUMNS = 5 + len(CheckpointShard._fields)
"""Of the rows that `Reader.ended` returns."""
_FEWEST_KNOWN = 16
_MOST_AHEAD = 1024
"""The most shards to fill ahead."""
_PARTS = 16
"""Wanted, used and announced shards are published again once a sixteenth has changed, so that this costs time
per shard, not per batch."""


class Reader:
    """The shards and sequences that a process reads. It lasts from epoch to epoch.

    Args:
        config: what is read.
        control: shows whether the training loop waits, and whether another epoch was started.
        counts: of this process.
        spans: of this process, while a trace runs.
        stages: of this process, which its waits interrupt.
        worker, workers: the index of this process among how many; 0 workers: the rank itself.

    Attributes:
        config: what is read.
        counts: of this process.
        shards: of the run.
        files: of the thread that reads.
        fills: of this process.
        uses_members: whether batches have values of samples' members.
    """

    def __init__(
        self,
        config: WorkerConfig,
        control: ControlBlock,
        counts: Counters,
        spans: Spans,
        stages: Stages,
        worker: int,
        workers: int,
    ):
        self._parent = os.getppid() if workers else None
        self.config = config
        self._control = control
        self._counts = counts
        self._spans, self._stages = spans, stages
        self.counts, self.shards, self.files = counts, config.shards, OpenFiles()
        self.uses_members = config.assembly.uses_members
        self.fills = Fills(config, counts, spans, lambda: not control.wanted_seconds())
        self._is_lazy = False
        self._tier, self._limit = self.fills.tier, self.fills.tier.budget.limit
        self._cache = ShardCache(
            functools.partial(self.fills.fallback_tier.beside, self._tier),
            config.shards,
            config.selection,
            skip=config.skip,
            counts=counts,
            counted=lambda shard: shard % max(1, workers) == worker,
            fetch=self.fills.read_range,
            freshness=self.fills.freshness,
            files=self.files,
        )
        if self.fills.backing is not None:
            self._cache.carrier = self.fills.backing.facts
        self._wait: Wait | None = None  # of the current batch, from its first pause on
        self._shortage: Shortage | None = None  # of room, for the first shard that is refused
        self._start: EpochStart | None = None
        self._row = worker + 1 if workers else 0  # of this process, in the control block
        self._streams: dict[tuple[int, int], ReferenceStream] = {}
        self._idle: set[int] = set()  # the sources without a share
        self._without_samples: set[tuple[int, int]] = set()  # groups and sources that were logged as such
        self._fills_ahead = False
        self._known_ahead: int | None = None  # about how many references to know ahead
        self._wanted: _Told | None = None
        self._kept: _Told | None = None  # open shards, and the demand that was announced
        self._blocked_ns: dict[int, int] = {}
        self._blocked_by: str | None = None  # the shard that was reported as blocking a batch
        self._away: frozenset[str] = frozenset()  # the servers that are down
        self._reporting = threading.Lock()
        self._end_listening = listen(self._report)

    def begin(self, start: EpochStart) -> None:
        """Begin an epoch."""
        self._forget_streams()
        self._cache.keep_open(())
        self._start = start
        self._blocked_ns.clear()
        self._blocked_by = None
        self._report()
        if start.position:
            self._cache.expect_usable()
        self.fills.begin(start)

    def references(self, group: int, source: int) -> ReferenceStream:
        """The reference stream of a group and source, from the start of the epoch."""
        stream = self._streams.get((group, source))
        if stream is None:
            assert self._start is not None
            stream = self._streams[group, source] = self._begin(self._start, group, source)
        return stream

    def has(self, group: int, source: int, position: int) -> bool:
        """Wait until all references before a position are known; False if there are fewer."""
        stream = self.references(group, source)
        while not stream.has(position):
            if stream.is_over:
                return False
            looked_ns = time.monotonic_ns()
            if not stream.follow(self._known_ahead):
                if stream.reads_everything and (group, source) not in self._without_samples:
                    self._without_samples.add((group, source))
                    logger.warning(_WITHOUT_SAMPLES, group, self.config.split.groups)
                needed = stream.blocked()
                if self.fills.are_refused(needed):  # shards that the batch has read by now may be evicted
                    self._cache.keep_open(self._in_use().union(needed))
                    self._tell_progress()  # else others' fills would take them for needed sooner
                wait = self._wait = self._wait or Wait()
                is_held_back = wait.is_held_back((group, source), *stream.progress)
                self._pause(needed, source, is_held_back, looked_ns)
        return True

    def due(self) -> int:
        """References of a pass to all groups, by the indexes of their shards, at its end."""
        return sum(stream.due for stream in self._streams.values())

    def left_out(self) -> dict[int, dict[str, int]]:
        """The samples left out of each group in the sequence, at its end, by what left them out."""
        tallies: dict[int, Tally] = {}
        for (group, _), stream in self._streams.items() if self.config.selection.names else ():
            number = self.config.first_group + group
            tallies[number] = tallies.get(number, Counter()) + stream.left_out_in_all
        return {number: dict(tally) for number, tally in tallies.items()}

    @functools.cached_property
    def _told_groups(self) -> tuple[int, ...]:
        return self.config.told_groups

    def ended(self) -> npt.NDArray[np.int64]:
        """Shards that have ended since the last call, of groups that this rank counts.

        int64[N, 11]: the group's number among all, the source, and what `ReferenceStream.ended` has.
        """
        first = self.config.first_group
        rows = [
            (first + group, source, *ended)
            for (group, source), stream in self._streams.items()
            if first + group in self._told_groups
            for ended in stream.ended()
        ]
        return np.array(rows, np.int64).reshape(-1, ENDED_COLUMNS)

    def arrived(self, shard: int) -> Numbers:
        """The usable sample numbers of a shard that have arrived, ascending."""
        return self._cache.arrived(shard)[0]

    def next_usable(self, shard: int, after: int) -> int:
        """Wait for the first usable sample of a shard after number `after`; -1 if there is none."""
        while True:
            usable, ended = self._cache.arrived(shard)
            later = usable[usable > after]
            if len(later):
                return int(later[0])
            if ended:
                return -1
            self._pause([shard], self._source_of(shard))

    def facts(self, shard: int, numbers: Sequence[int] | Numbers, names: Sequence[str]) -> Facts:
        """Facts of samples that have arrived, by name; waits where they have to be fetched again.

        See `ShardCache.facts`.
        """
        while (facts := self._cache.facts(shard, numbers, names)) is None:
            self._pause([shard], self._source_of(shard))
        return facts

    def entries(self, shard: int, numbers: Sequence[int]) -> list[Entry]:
        """The index entries of samples that have arrived, with the facts of the user's columns.

        Waits where they have to be fetched again.
        """
        while None in (entries := self._cache.view(shard).find(numbers)):
            self._pause([shard], self._source_of(shard))
        names = self.config.selection.of_entries
        facts = self.facts(shard, numbers, names) if names else {}
        return [
            with_facts(entry[1], names, facts, place)
            for place, entry in enumerate(entries)
            if entry is not None
        ]

    def find(self, shards: Sequence[int], numbers: Sequence[int]) -> list[Found | None]:
        """The entries of samples, by shard and number; None for those that have to be fetched again."""
        places: dict[int, list[int]] = {}
        for place, shard in enumerate(shards):
            places.setdefault(shard, []).append(place)
        entries: list[Found | None] = [None] * len(shards)
        if self.fills.reads_ranges:
            self.want_ranges(zip(shards, numbers, strict=True))
        for shard, own_places in places.items():
            own_entries = self._cache.view(shard).find([numbers[place] for place in own_places])
            for place, entry in zip(own_places, own_entries, strict=True):
                entries[place] = entry
        return entries

    def peek(self, group: int, source: int, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Known references that aren't taken yet; doesn't wait."""
        stream = self.references(group, source)
        while not stream.has(stop) and stream.follow(self._known_ahead):
            pass
        return stream.peek(first, stop)

    def want_ranges(self, samples: Iterable[tuple[int, int]]) -> None:
        """Request those samples, by shard and number, that have to be read from their origin."""
        by_shard: dict[int, list[int]] = {}
        for shard, number in samples:
            by_shard.setdefault(shard, []).append(number)
        self.fills.want_ranges(
            ShardRange(self.config.shards[shard], *place)
            for shard, numbers in by_shard.items()
            for place in self._cache.ranges(shard, numbers)
        )

    def sample(
        self, shard: int, number: int, memory: ReadMemory | None = None, found: Found | None = None
    ) -> Sample:
        """A sample's bytes, in `memory` if given; waits where they have to be fetched again.

        Where its values come from elsewhere, its bytes are read only if they are used nevertheless.
        """
        if self._is_lazy and found is not None and found[1].checksum is not None:
            entry = found[1]
            names = [name for name, _, _ in entry.members]
            unread = Unread(names, lambda: self.sample(shard, number).members)
            prepared = "" if entry.prepared is None else entry.prepared[0]
            url = self.config.shards[shard].name
            return Sample(entry.key, url, unread, prepared, entry.checksum, shard, number)
        sample = self._cache.sample(shard, number, memory, found)
        while sample is None:
            self._pause([shard], self._source_of(shard))
            sample = self._cache.sample(shard, number, memory)
        return sample

    def index(self, shard: int) -> IndexReader | None:
        """The index of a shard that is open, so far; None: no copy is open."""
        return self._cache.view(shard).reader

    def read_lazily(self) -> None:
        """Read samples when their bytes are first used, where the index has their checksums."""
        self._is_lazy = True

    def raise_if_unusable(self) -> None:
        """Raise NoValidSamples if no usable sample has been seen: no more will come."""
        self._cache.raise_if_unusable()

    def give_shares(self, changes: Sequence[Event]) -> None:
        """Prefetch only for the sources that have a share by one of these."""
        shares = zip(*(change.value["shares"] for change in changes), strict=True)
        idle = {source for source, source_shares in enumerate(shares) if not any(source_shares)}
        if idle != self._idle:
            self._idle, self._wanted = idle, None

    def begin_batch(self) -> None:
        """Begin a batch: it hasn't waited, and the prefetcher learns which shards it needs."""
        self._wait = None
        self._want()

    def blocked(self) -> tuple[tuple[int, int], ...]:
        """The shards that held up the training loop since the last call, with nanoseconds."""
        blocked = tuple(self._blocked_ns.items())
        self._blocked_ns.clear()
        if self._blocked_by is not None:
            self._blocked_by = None
            self._report()
        return blocked

    def end_batch(self) -> None:
        """End a batch: close the shards that no known reference needs, and announce the progress.

        Both once enough changed. Later shards are prefetched from now on: the first batch had the link to
        itself.
        """
        if not self._fills_ahead:
            self._fills_ahead, self._wanted = True, None
        if self._kept is not None and self._kept.holds(self._streams):
            return
        mean_bytes = 0.0 if self._known_ahead else self._cache.mean_sample_bytes()
        if mean_bytes:
            self._known_ahead = max(_FEWEST_KNOWN, int(self._limit.size_bytes / KNOWN_PART / mean_bytes))
        in_use = self._in_use()
        most = len(in_use) // _PARTS
        self._kept = _Told(self._streams, most) if most else None
        self._cache.keep_open(in_use)
        self._tell_progress()

    def _tell_progress(self) -> None:
        for stream in self._streams.values():
            stream.tell_progress()

    def progress(self) -> ReadProgress:
        """Progress of the groups."""
        assert self._start is not None
        fronts = {key: stream.front for key, stream in self._streams.items()}
        return ReadProgress(self._start.epoch, fronts, self._shards_ahead(), self._cache.mean_bytes())

    def close(self) -> None:
        """Stop the fills and release the tier. Idempotent."""
        self._end_listening()
        self.fills.stop()
        self._forget_streams()
        self._cache.close()
        self.fills.close()

    def _forget_streams(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams = {}
        self._wanted = self._kept = None

    def _begin(self, start: EpochStart, group: int, source: int) -> ReferenceStream:
        config, source_order = self.config, self.config.sources[source]
        number = config.first_group + group
        pieces = source_order.pieces[number]
        state = start.groups[number].sources[source] if number in start.groups else None
        left_out = None
        if names := config.selection.names:
            saved = None if state is None else state.cursor.left_out
            before = [] if saved is None else saved.names  # functions of before are among these
            left_out = LeftOutOf([*dict.fromkeys([*names, *before])], lambda shard: arrivals.left_out(shard))
        order = GroupOrder(
            source_order.order,
            source_order.count,
            number,
            start.epoch,
            start=None if state is None else state.cursor,
            passes=1 if config.one_pass else None,
            pieces=pieces,
            left_out=left_out,
        )

        def next_pass() -> npt.NDArray[np.int64]:
            """The shards that are read after this pass: where an epoch is one pass, the next epoch's."""
            if not config.one_pass or not config.train:
                return np.empty(0, np.int64)
            return pass_order(source_order.order, pieces.shards, number, start.epoch + 1, 0)

        begun = {} if state is None else state.begun
        arrivals = CheckedArrivals(self._cache, source_order.first, begun, order.pass_, lambda: order.pass_)
        repeated = None
        if config.selection.repeat is not None:
            repeated = config.selection.repeat.arrivals(
                arrivals,
                lambda shard: self._cache.rates(source_order.first + shard),
                lambda: order.pass_,
                source_order.order.seed,
                start.epoch,
            )
        return ReferenceStream(
            order, next_pass, config.shards, source_order.first, arrivals, self._tier, repeated
        )

    def _source_of(self, shard: int) -> int:
        """The source of a shard."""
        return bisect.bisect_right(self.config.sources, shard, key=lambda source: source.first) - 1

    def _pause(
        self,
        needed: list[int],
        source: int,
        is_held_back: bool = False,
        looked_ns: int | None = None,
    ) -> None:
        """Wait a moment for bytes of a source, after making sure that they are being fetched.

        Args:
            needed: the shards that the batch waits for, the most urgent first.
            source: of these shards.
            is_held_back: whether the shuffle window is why it waits.
            looked_ns: when the look began that didn't find them, by the monotonic clock; None: now.
        """
        start_ns = time.monotonic_ns() if looked_ns is None else looked_ns
        wait = self._wait = self._wait or Wait()
        self.stop_if_superseded()
        if not self.fills.are_requested(needed):
            self._wanted = None
        self._want(needed)
        self.fills.prefetcher.check()
        blocked = self._blocked(wait, needed)
        for action in decide(blocked):
            self._act(action, blocked, wait)
        time.sleep(poll_seconds(blocked))
        if self._control.while_waiting is not None:
            self._control.while_waiting()
        waited_ns = time.monotonic_ns() - start_ns
        if self._spans.is_on:
            now_ns, shard = time.time_ns(), self.config.shards[needed[0]].name if needed else ""
            self._spans.add("wait for bytes", now_ns - waited_ns, now_ns, shard=shard)
        self._stages.waited_ns += waited_ns
        self._counts.add("shuffle_wait_ns" if is_held_back else "bytes_wait_ns", waited_ns)
        self._control.by_source[self._row, source, 1] += waited_ns
        if needed and self._control.wanted_seconds():
            self._blocked_ns[needed[0]] = self._blocked_ns.get(needed[0], 0) + waited_ns

    def stop_if_superseded(self) -> None:
        """Raise Superseded if the rank has started another epoch, or has died."""
        assert self._start is not None
        is_orphan = self._parent is not None and os.getppid() != self._parent
        if is_orphan or self._control.order.generation != self._start.generation:
            raise Superseded

    def _blocked(self, wait: Wait, needed: Sequence[int]) -> Blocked:
        """The reason why a batch is blocked now."""
        if not needed:
            return Blocked((), wait.seconds())
        return Blocked(
            tuple(needed),
            wait.seconds(),
            is_stuck=self._cache.view(needed[0]).is_stuck,
            is_refused=self.fills.are_refused(needed),
            is_reported=self._blocked_by == self.config.shards[needed[0]].name,
            warnings=wait.warnings,
        )

    def _act(self, action: Action, blocked: Blocked, wait: Wait) -> None:
        """Do what the policy has decided about a blocked batch."""
        prefetcher, first = self.fills.prefetcher, self.config.shards[blocked.shards[0]]
        if action is Action.USE_FALLBACK:
            prefetcher.store_in_fallback(first)
        elif action is Action.FIND_ROOM:
            if self._shortage is None:
                from streamload.worker.shortage import Shortage

                self._shortage = Shortage(self.config, self._control, self.fills, self._cache)
            self._shortage.find_room(blocked, self._in_use())
        elif action is Action.REPORT:
            self._blocked_by = first.name
            self._report()
        elif action is Action.WARN:
            wait.warnings += 1
            filler = "this process" if prefetcher.filling(first) else "another process, or nobody yet"
            view = self._cache.view(blocked.shards[0])
            logger.warning("a batch has waited %.0f s for %r, filled by %s", blocked.seconds, view, filler)

    def _report(self) -> None:
        """Tell the rank what blocks this process: a shard, and servers that are away."""
        with self._reporting:
            by_server = outages()
            self._counts.add("origin_outages", len(by_server.keys() - self._away))
            self._away = frozenset(by_server)
            away = [[name, outage.cause[:500], outage.until] for name, outage in by_server.items()]
            report = {"shard": self._blocked_by, "away": away[:4]}
            self._control.block(self._row, report if self._blocked_by or away else None)

    def _want(self, blocked: Iterable[int] = ()) -> None:
        """Give the prefetcher the shards to fill, in order of need, once enough changed."""
        if self._wanted is not None and self._wanted.holds(self._streams):
            return
        in_use: set[int] = set()
        needed = dict.fromkeys(blocked)
        later: dict[int, None] = {}
        most_open = 0
        for (_, source), stream in self._streams.items():
            open_shards = stream.shards_in_use()
            most_open = max(most_open, len(open_shards))
            in_use.update(open_shards)
            needed.update(dict.fromkeys(open_shards))
            if self._fills_ahead and source not in self._idle:
                later.update(dict.fromkeys(stream.coming(min(self._shards_ahead(), _MOST_AHEAD)).tolist()))
        most = max(most_open, len(later)) // _PARTS
        self._wanted = _Told(self._streams, most) if most else None
        self.fills.want(needed, later, in_use, most_open)

    def _in_use(self) -> set[int]:
        """The shards that have to stay readable."""
        return {shard for stream in self._streams.values() for shard in stream.shards_in_use()}

    def _shards_ahead(self) -> int:
        mean = self._cache.mean_bytes()
        if not mean:
            return 1
        room = self._limit.size_bytes / 4
        return max(1, int(min(self.config.ahead.bytes, room) / mean))


class _Told:
    """What was told of the shards of streams, until more than some have been opened or left.

    Args:
        streams: of the reader.
        most: how many shards may be opened or left before it is outdated; with few shards none is kept.
    """

    def __init__(self, streams: Mapping[tuple[int, int], ReferenceStream], most: int):
        self._most = most
        self._visits = {key: stream.visits for key, stream in streams.items()}

    def holds(self, streams: Mapping[tuple[int, int], ReferenceStream]) -> bool:
        """True if it isn't outdated."""
        if streams.keys() != self._visits.keys():
            return False
        return sum(abs(stream.visits - self._visits[key]) for key, stream in streams.items()) <= self._most
