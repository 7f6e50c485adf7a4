"""The prefetcher: threads that fill the shards a run needs, in order of need (step F).

Every worker of a node runs one with the same list: the first to claim a shard fills it, the others go on to
the next (scheduler.py). A shard without room is stored index-only or in the fallback tier (fallback.py).
A filler touches its parts as a heartbeat; without one for some seconds another process takes over
(heartbeat.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from streamload.cache.fallback_tier import FallbackTier
from streamload.cache.fill import Filled, FillOptions, fill
from streamload.cache.freshness import Freshness
from streamload.cache.locks import FileLock
from streamload.cache.part import Part
from streamload.cache.shard import Shard
from streamload.cache.shared.sharing import ReadThrough
from streamload.cache.tier import Tier
from streamload.errors import CacheError, CacheFull, OriginError, ShardError, StreamloadError
from streamload.metrics import Counts
from streamload.origins.origin import Origin
from streamload.prefetch.fallback import FallbackPolicy, StorageMode
from streamload.prefetch.heartbeat import Heartbeat
from streamload.prefetch.scheduler import FillScheduler

_HELD_SECONDS = 1.0  # how long a shard that is here is taken to stay
_ELSEWHERE_SECONDS = 0.1  # until a shard that another process fills is looked at again
_NO_ROOM_SECONDS = 0.2
STOPPED_SECONDS = 5.0

OpenOrigin = Callable[[Shard, threading.Event], Origin]


class Prefetcher:
    """Threads that fill shards ahead of the readers.

    Args:
        tier: where shards are filled into.
        open_origin: opens the origin of a shard, which is closed after the fill and the call of `published`;
            the event ends its waits.
        threads: shards that this process fills at once, not counting those that wait for another node.
        counts: where fills are counted.
        report: called from a filling thread with the result of each look at a shard; PUBLISHED if held.
        may_be_index_only: whether a shard's samples can be read from its origin, by range, where the shard
            itself can't be kept.
        fallback_tier: where shards go that the tier can't take.
        stopped_seconds: after how long without a heartbeat a filler, of any process, is taken over from.
        freshness: by which versions the run goes; None takes what is published as it is.
        published: called from a filling thread with each shard that was filled here, and its directory.
        next_use_of: the next use of a shard, in shard visits, as announced; None: its position in the list.
        failed: called from a filling thread when a shard can't be fetched; returns the seconds until it is
            retried. None: the shard is given up by a tombstone, for all readers of the tier.
        is_prepared: whether a prepared shard can be had as it is; then it is filled in place of the shard
            that it stands for.
    """

    def __init__(
        self,
        tier: Tier,
        open_origin: OpenOrigin,
        *,
        threads: int,
        counts: Counts,
        report: Callable[[Shard, Filled], None] = lambda shard, result: None,
        may_be_index_only: Callable[[Shard], bool] = lambda shard: False,
        fallback_tier: FallbackTier | None = None,
        stopped_seconds: float = STOPPED_SECONDS,
        freshness: Freshness | None = None,
        published: Callable[[Shard, Path], None] = lambda shard, directory: None,
        next_use_of: Callable[[Shard], float] | None = None,
        failed: Callable[[Shard, StreamloadError], float] | None = None,
        is_prepared: Callable[[Shard], bool] = lambda form: False,
    ):
        self.tier = tier
        self._open_origin = open_origin
        self._counts = counts
        self._report = report
        self._freshness = freshness
        self._published = published
        self._failed = failed
        self._is_prepared = is_prepared
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._tombstones: list[FileLock] = []
        self._heartbeat = Heartbeat(stopped_seconds)
        self._fallback = FallbackPolicy(
            tier, fallback_tier, may_be_index_only, changed=lambda shard: self._scheduler.look_again(shard)
        )
        self._scheduler = FillScheduler(
            threads,
            self._look,
            enforce_limits=tier.budget.enforce_limits,
            is_refused=self._fallback.is_refused,
            stop=self._stop,
        )
        self._next_use_of = next_use_of or self._scheduler.place_of
        self._scheduler.start()

    def __repr__(self) -> str:
        return f"<Prefetcher {self._scheduler!r}>"

    def want(self, needed: Sequence[Shard], later: Sequence[Shard] = ()) -> None:
        """Set the shards to fill, in order of need; replaces those set before.

        Args:
            needed: shards that readers have open: anything that isn't open may be evicted for them.
            later: shards to fill while only shards with a later next use have to go for them.
        """
        self._fallback.only(needed)
        self._scheduler.want(needed, later)

    def look_again(self) -> None:
        """Look at all shards again now: what is known about them may be outdated."""
        self._scheduler.look_again()

    def check(self) -> None:
        """Raise the error of a filling thread: a cache that can't be used.

        Raises:
            CacheError: no tier can take a shard that is needed.
        """
        if self._error is not None:
            raise self._error

    def refused_seconds(self, shard: Shard) -> float:
        """How long there has been no room for a shard (0: there is)."""
        return self._fallback.refused_seconds(shard)

    def lacks_bytes(self, shard: Shard) -> int:
        """The least that a shard takes for which there was no room, as it is kept now; 0: there is."""
        return self._fallback.lacks_bytes(shard)

    def do_without(self, shard: Shard) -> bool:
        """Store a shard index-only as long as it is wanted; its samples are read from the origin.

        Returns:
            False if the origin has no ranges, or the shard is index-only already.
        """
        return self._fallback.index_only(shard)

    def do_elsewhere(self, shard: Shard) -> bool:
        """Fill a shard into the fallback tier as long as it is wanted.

        Returns:
            False if there is none, or the shard is there already.
        """
        return self._fallback.elsewhere(shard)

    def filling(self, shard: Shard) -> bool:
        """Whether a thread of this process is filling it."""
        return self._scheduler.is_busy_with(shard)

    def holds_room(self) -> bool:
        """Whether a running fill of this process holds a reservation, which it may give back."""
        return self._heartbeat.holds_room()

    def close(self) -> None:
        """Stop all fills where they are; partial fills stay, to be taken over."""
        self._scheduler.close()
        self._heartbeat.close()
        for tombstone in self._tombstones:
            tombstone.close()
        self._tombstones.clear()

    def _look(self, shard: Shard) -> float:
        """Fill a shard if necessary and possible; returns the seconds until the next look at it."""
        try:
            pause = self._fill(shard)
        except BaseException as exc:
            pause = _NO_ROOM_SECONDS
            self._error = exc
            self._stop.set()
        if self._freshness is not None:
            self._freshness.filled(shard)
        return pause

    def _fill(self, shard: Shard) -> float:
        try:
            pause = self._fill_as(self._fallback.mode(shard), shard)
        except OSError as trouble:  # an origin's are settled where they come up
            return _NO_ROOM_SECONDS if self._fallback.may_pass(trouble) else self._make_do(shard, trouble)
        self._fallback.went_well()
        return pause

    def _make_do(self, shard: Shard, trouble: OSError) -> float:
        """After a tier failed: go index-only, use the fallback tier, or wait until the shard is needed."""
        if not self._scheduler.is_needed(shard):
            self._fallback.refuse(shard)
            if isinstance(trouble, CacheFull):
                self._report(shard, Filled.NO_ROOM)
            return _NO_ROOM_SECONDS
        if isinstance(trouble, CacheFull) and self._fallback.index_only(shard):
            return 0.0
        if self._fallback.elsewhere(shard, trouble):
            return 0.0
        if isinstance(trouble, CacheError):
            raise trouble
        raise CacheError(f"the cache at {self.tier.root} can't be used any more: {trouble}") from trouble

    def _fill_as(self, mode: StorageMode, shard: Shard) -> float:
        """Fill a shard in its storage mode."""
        tier = mode.tier
        if self._freshness is not None and self._freshness.has_to_ask(shard, self._fallback.tiers):
            is_settled = self._freshness.check(shard, self._stop, self._fallback.tiers)
            return 0.0 if is_settled else _ELSEWHERE_SECONDS
        if tier.has_whole(shard) or (mode.index_only and tier.index_only(shard.digest).exists()):
            self._fallback.accept(shard)
            self._report(shard, Filled.PUBLISHED)
            return _HELD_SECONDS
        job = self._job(mode, shard)
        part = tier.claim(job.digest, self._heartbeat.stopped(tier, job.digest))
        if part is None:
            self._fallback.accept(shard)
            if tier.tombstone(shard.digest).exists():
                self._report(shard, Filled.GAVE_UP)
            return _ELSEWHERE_SECONDS
        with contextlib.ExitStack() as opened:
            return self._fill_part(mode, shard, job, part, opened)

    def _fill_part(
        self, mode: StorageMode, shard: Shard, job: Shard, part: Part, opened: contextlib.ExitStack
    ) -> float:
        """Fill a claimed part; the caller closes what it opens."""
        try:
            with self._heartbeat.of(part, job.digest):
                outcome = fill(
                    part,
                    job,
                    lambda: self._origin(mode, shard, job, opened),
                    FillOptions(
                        self._fallback.size_bytes(shard),
                        mode.index_only,
                        leave_tombstone=self._failed is None,
                    ),
                    next_use=lambda: self._next_use_of(shard),
                    stop=self._stop,
                    refused=lambda waits: self._fallback.note(shard, mode, waits),
                )
        except (OriginError, ShardError) as why:
            if self._failed is None:
                raise
            return self._failed(shard, why)
        if outcome.tombstone is not None:
            self._tombstones.append(outcome.tombstone)
        is_refused = outcome.result is Filled.NO_ROOM
        if self._fallback.note(shard, mode, is_refused):
            return 0.0
        if is_refused:
            self._fallback.refuse(shard, outcome.size_bytes)
        if outcome.result is Filled.PUBLISHED and not mode.index_only:
            self._counts.add("shards_published")
            self._published(job, mode.tier.published(job.digest))
        if outcome.result is Filled.GAVE_UP and job is not shard:
            return 0.0  # the shard itself may be had
        self._report(shard, outcome.result)
        return _NO_ROOM_SECONDS if is_refused else _HELD_SECONDS

    def _job(self, mode: StorageMode, shard: Shard) -> Shard:
        """The shard to fill: the prepared form where there is one, else the shard itself."""
        form = shard.prepared
        if (
            form is None
            or mode.index_only
            or mode.tier.tombstone(form.digest).exists()
            or not self._is_prepared(form)
        ):
            return shard
        return form

    def _origin(self, mode: StorageMode, shard: Shard, job: Shard, opened: contextlib.ExitStack) -> Origin:
        origin = self._open_origin(job, self._stop)
        opened.callback(origin.close)
        if isinstance(origin, ReadThrough):
            origin.is_kept, origin.yield_slot = not mode.index_only, self._scheduler.yield_slot
        return origin if self._freshness is None else self._freshness.watched(shard, origin)
