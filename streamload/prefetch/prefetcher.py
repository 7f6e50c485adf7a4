"""The prefetcher: threads that fill the shards a run needs, in order of need (step F).

Every worker of a node runs one with the same requests: the first to claim a shard fills it, the others go on
to the next (scheduler.py). A shard without room is stored index-only or in the fallback tier (fallback.py).
A filler touches its parts as a heartbeat; without one for some seconds another process takes over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamload import limits
from streamload.cache.backing import WaitingOrigin
from streamload.cache.fill import Filled, FillOptions, Outcome, fill
from streamload.cache.freshness import Freshness
from streamload.cache.locks import FileLock
from streamload.cache.part import Part
from streamload.cache.shard import Shard
from streamload.cache.tier import Tier
from streamload.errors import (
    CacheError,
    CacheFull,
    FeatureError,
    LimitReached,
    OriginError,
    ShardError,
    StreamloadError,
)
from streamload.metrics import Counts
from streamload.origins.endpoints import remember
from streamload.origins.origin import Origin
from streamload.prefetch.fallback import FallbackPolicy, FallbackTier, StorageMode
from streamload.prefetch.scheduler import FillRequest, FillScheduler

_ELSEWHERE_SECONDS = 0.1
"""Between two looks at a shard that another process fills."""
_NO_ROOM_SECONDS = 0.2
STOPPED_SECONDS = 5.0
_FILES_PER_FILL = 48
"""Fewer shards are fetched at once where a process may have few open files; one by a command takes 12."""

OpenOrigin = Callable[[Shard, threading.Event], Origin]
"""Opens the origin of a shard; the event ends its waits. It is closed after the fill and its result."""
_WATCHED = 1024
"""Number of recently examined shards for which the times of other processes' parts are remembered."""
_TOUCHES = 5
"""Heartbeats within the timeout after which a filler counts as stopped."""


class Heartbeat:
    """Touches the parts that this process fills, in a thread, and watches the touches of others.

    Args:
        stopped_seconds: after how long without a heartbeat a filler, of any process, is taken over from.
    """

    def __init__(self, stopped_seconds: float):
        self._stopped_seconds = stopped_seconds
        self._closing = threading.Event()
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._parts: set[Part] = set()
        self._touched: dict[str, dict[Path, tuple[int, float]]] = {}
        # By digest, of others' parts: the last touch, and when it was seen first.
        self._thread = threading.Thread(target=self._beat, name="streamload-heartbeat", daemon=True)
        limits.start(self._thread)

    def __repr__(self) -> str:
        with self._lock:
            return f"<Heartbeat of {len(self._parts)} parts, others' of {len(self._touched)} shards watched>"

    @contextlib.contextmanager
    def of(self, part: Part, digest: str) -> Iterator[None]:
        """Touch a part regularly while the block runs."""
        with self._lock:
            self._parts.add(part)
            self._touched.pop(digest, None)
        try:
            yield
        finally:
            with self._lock:
                self._parts.discard(part)

    def holds_room(self) -> bool:
        """True if a running fill of this process holds a reservation, which it may give back."""
        with self._lock:
            return any(part.reserved_bytes for part in self._parts)

    def stopped(self, tier: Tier, digest: str) -> list[Path]:
        """The parts of a shard whose heartbeats have stopped.

        A touch's time is compared with the last one seen, never with a clock: those of two machines differ.
        """
        now_seconds = time.monotonic()
        with self._lock:
            before = self._touched.get(digest, {})
        parts: dict[Path, tuple[int, float]] = {}
        for path in tier.parts(digest):
            with contextlib.suppress(FileNotFoundError):
                touched = (path / "index").stat().st_mtime_ns
                last, since = before.get(path, (touched, now_seconds))
                parts[path] = (touched, since if touched == last else now_seconds)
        with self._lock:
            self._touched.pop(digest, None)
            if parts:
                self._touched[digest] = parts  # the last one
            if len(self._touched) > _WATCHED:
                del self._touched[next(iter(self._touched))]
        return [path for path, (_, since) in parts.items() if now_seconds - since >= self._stopped_seconds]

    def close(self) -> None:
        """Stop the heartbeats. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._closing.wait(self._stopped_seconds / _TOUCHES):
            with self._lock:
                parts = list(self._parts)
            for part in parts:
                part.touch()


@dataclass(frozen=True, slots=True)
class PrefetchOptions:
    """Options of a prefetcher.

    Attributes:
        threads: shards that this process fills at once, not counting those that wait for another node.
        index_only: whether a shard without room is stored index-only, if its origin can be read by range.
        by_range: whether each shard is stored so that the tier lacks.
        prepares: whether prepared forms that can't be fetched are made here, as long as there is room.
        tombstones: whether a shard that can't be fetched is given up by a tombstone, for all readers of the
            tier. If not, it is retried as long as it is requested.
        retry_seconds: until such a retry.
        stopped_seconds: after how long without a heartbeat a filler, of any process, is taken over from.
    """

    threads: int
    index_only: bool = False
    by_range: bool = False
    prepares: bool = False
    tombstones: bool = True
    retry_seconds: float = 1.0
    stopped_seconds: float = STOPPED_SECONDS


@dataclass(frozen=True, slots=True)
class FillResult:
    """Result of a look at a requested shard.

    Attributes:
        shard: the requested shard.
        outcome: PUBLISHED if the shard is there, whoever filled it; GAVE_UP if it can't be had.
        filled: what this look has filled and published: the shard, or its prepared form. None: nothing.
        directory: where that is.
        error: why the shard can't be fetched, if no tombstone says so.
        began_ns: when the transfer began, since the epoch; 0: there was none.
    """

    shard: Shard
    outcome: Filled
    filled: Shard | None = None
    directory: Path | None = None
    error: StreamloadError | None = None
    began_ns: int = 0


class Prefetcher:
    """Threads that fill shards ahead of the readers.

    Args:
        sink: called from a filling thread with the result of each look at a shard that ended in one.
        has_prepared: whether a prepared shard can be fetched as it is; then it is filled in place of the
            shard that it stands for.
        fallback_tier: where shards go that the tier can't take.
        freshness: the versions that the run reads; None takes what is published as it is.
    """

    def __init__(
        self,
        tier: Tier,
        open_origin: OpenOrigin,
        options: PrefetchOptions,
        *,
        counts: Counts,
        sink: Callable[[FillResult], object] = lambda result: None,
        has_prepared: Callable[[Shard], bool] = lambda form: False,
        fallback_tier: FallbackTier | None = None,
        freshness: Freshness | None = None,
    ):
        self.tier = tier
        self._open_origin = open_origin
        self._options = options
        self._counts = counts
        self._sink = sink
        self._has_prepared = has_prepared
        self._freshness = freshness
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._tombstones: list[FileLock] = []
        self._unprepared: set[str] = set()  # prepared forms without room, by digest
        self._end_remembering = remember()
        self._heartbeat = Heartbeat(options.stopped_seconds)
        self._fallback = FallbackPolicy(
            tier, fallback_tier, index_only=options.index_only, by_range=options.by_range
        )
        most_fills = max(1, limits.most_files() // _FILES_PER_FILL)
        self._scheduler = FillScheduler(min(options.threads, most_fills), self._work, self._stop)
        self._scheduler.start()

    def __repr__(self) -> str:
        return f"<Prefetcher {self._scheduler!r}>"

    def want(self, requests: Sequence[FillRequest]) -> None:
        """Set the shards to fill, the most urgent first; replaces those set before."""
        needed = [request.shard for request in requests if request.is_needed]
        self._fallback.only(needed, [request.shard for request in requests])
        self._scheduler.want(requests)

    def look_again(self) -> None:
        """Look at all shards again now: what is known about them may be outdated."""
        self._scheduler.look_again()

    def look_soon(self, shards: Iterable[Shard]) -> None:
        """Look at shards within a second, whatever the last look found: a reader waits for them."""
        self._scheduler.look_soon(shards)

    def check(self) -> None:
        """Raise the error of a filling thread: a cache that can't be used.

        Raises:
            CacheError: no tier can take a shard that is needed.
        """
        if self._error is not None:
            raise self._error

    @property
    def has_refused(self) -> bool:
        """True if there was no room for a shard."""
        return self._fallback.has_refused

    def refused_seconds(self, shard: Shard) -> float:
        """Time since there was room for a shard (0: there is)."""
        return self._fallback.refused_seconds(shard)

    def lacks_bytes(self, shard: Shard) -> int:
        """The least that a refused shard takes in its storage mode; 0: it isn't refused."""
        return self._fallback.lacks_bytes(shard)

    def store_unprepared(self, shard: Shard) -> bool:
        """Store a shard as it is, its prepared form finds no room; False if it isn't prepared here."""
        form = shard.prepared
        if not self._options.prepares or form is None or form.digest in self._unprepared:
            return False
        self._unprepared.add(form.digest)
        self._scheduler.look_again(shard)
        return True

    def store_index_only(self, shard: Shard) -> bool:
        """Store a shard index-only as long as it is needed; its samples are read from the origin.

        Returns:
            False if the origin has no ranges, or the shard is index-only already.
        """
        has_changed = self._fallback.store_index_only(shard)
        if has_changed:
            self._scheduler.look_again(shard)
        return has_changed

    def store_in_fallback(self, shard: Shard) -> bool:
        """Store a shard in the fallback tier as long as it is needed.

        Returns:
            False if there is none, or the shard is stored there already.
        """
        has_changed = self._fallback.store_in_fallback(shard)
        if has_changed:
            self._scheduler.look_again(shard)
        return has_changed

    def filling(self, shard: Shard) -> bool:
        """True if a thread of this process is filling it."""
        return self._scheduler.is_busy_with(shard)

    def holds_room(self) -> bool:
        """True if a running fill of this process holds a reservation, which it may give back."""
        return self._heartbeat.holds_room()

    def close(self) -> None:
        """Stop all fills where they are; partial fills stay, to be taken over."""
        self._scheduler.close()
        self._end_remembering()
        self._heartbeat.close()
        for tombstone in self._tombstones:
            tombstone.close()
        self._tombstones.clear()

    def _work(self) -> None:
        """Run a filling thread."""
        while self._scheduler.keeps_thread():
            self.tier.budget.enforce_limits()
            shard = self._scheduler.take()
            if shard is not None:
                pause_seconds = self._look(shard)
                self._scheduler.settle(shard, pause_seconds, is_refused=self._fallback.is_refused(shard))

    def _look(self, shard: Shard) -> float:
        """Fill a shard if possible; returns the seconds until the next look at it, as all below do."""
        try:
            pause_seconds = self._fill(shard)
        except BaseException as exc:
            pause_seconds = _NO_ROOM_SECONDS
            self._error = exc
            self._stop.set()
        if self._freshness is not None:
            self._freshness.filled(shard)
        return pause_seconds

    def _fill(self, shard: Shard) -> float:
        try:
            pause_seconds = self._fill_as(self._fallback.mode(shard), shard)
        except OSError as error:  # the tier's: an origin's have become results
            may_pass = self._fallback.may_pass(shard, error)
            return _NO_ROOM_SECONDS if may_pass else self._after_failure(shard, error)
        self._fallback.went_well(shard)
        return pause_seconds

    def _after_failure(self, shard: Shard, error: OSError) -> float:
        """After a tier failed: go index-only, use the fallback tier, or wait until the shard is needed.

        Raises:
            LimitReached: not the tier has failed: a limit of this process or machine has lasted for long.
            CacheError: no tier can take a shard that is needed.
        """
        shortage = limits.shortage_in(error)
        if isinstance(shortage, LimitReached):
            raise shortage
        if shortage is not None:
            raise limits.reached(f"{shard.name} can't be stored in the cache", shortage) from error
        if self.store_unprepared(shard):
            return 0.0
        if not self._scheduler.is_needed(shard):
            self._fallback.refuse(shard)
            if isinstance(error, CacheFull):
                self._sink(FillResult(shard, Filled.NO_ROOM))
            return _NO_ROOM_SECONDS
        if isinstance(error, CacheFull) and self._fallback.store_index_only(shard):
            return 0.0
        if self._fallback.store_in_fallback(shard, error):
            return 0.0
        if isinstance(error, CacheError):
            raise error
        raise CacheError(f"the cache at {self.tier.root} can't be used any more: {error}") from error

    def _fill_as(self, mode: StorageMode, shard: Shard) -> float:
        """Fill a shard in its storage mode."""
        tier = mode.tier
        if self._freshness is not None and self._freshness.has_to_ask(shard, self._fallback.tiers):
            is_settled = self._freshness.check(shard, self._stop, self._fallback.tiers)
            return 0.0 if is_settled else _ELSEWHERE_SECONDS
        if self._has_whole(mode, shard) or (mode.index_only and tier.has("bare", shard.digest)):
            self._fallback.accept(shard)
            self._sink(FillResult(shard, Filled.PUBLISHED))
            return self._scheduler.held_seconds()
        form = self._form(mode, shard)
        part = tier.claim(form.digest)
        if part is None and (stopped := self._heartbeat.stopped(tier, form.digest)):
            part = tier.claim(form.digest, stopped)
        if part is None:
            self._fallback.accept(shard)
            if tier.has("gone", shard.digest):
                self._sink(FillResult(shard, Filled.GAVE_UP))
            return _ELSEWHERE_SECONDS
        with contextlib.ExitStack() as opened:
            return self._fill_part(mode, shard, form, part, opened)

    def _fill_part(
        self, mode: StorageMode, shard: Shard, form: Shard, part: Part, opened: contextlib.ExitStack
    ) -> float:
        """Fill a claimed part; the caller closes what it opens."""
        began_ns = time.time_ns()
        try:
            with self._heartbeat.of(part, form.digest):
                outcome = fill(
                    part,
                    form,
                    lambda: self._origin(mode, shard, form, opened),
                    FillOptions(
                        self._fallback.size_bytes(shard),
                        mode.index_only,
                        leave_tombstone=self._options.tombstones,
                    ),
                    next_use=lambda: self._scheduler.next_use(shard),
                    stop=self._stop,
                    refused=lambda waits: self._is_refused(mode, shard, form, waits),
                )
        except (OriginError, ShardError, FeatureError) as error:  # only fills of derived shards have the last
            if self._options.tombstones and not isinstance(error, FeatureError):
                raise
            self._sink(FillResult(shard, Filled.GAVE_UP, error=error))
            return self._options.retry_seconds
        return self._after_fill(mode, shard, form, outcome, began_ns)

    def _is_refused(self, mode: StorageMode, shard: Shard, form: Shard, waits: bool) -> bool:
        """Note whether a fill waits for room; True: it is to end, and start again in another way."""
        if waits and form is not shard:
            self.store_unprepared(shard)  # rather than wait: what it takes more isn't needed
        return self._fallback.note(shard, mode, waits) or form.digest in self._unprepared

    def _after_fill(
        self, mode: StorageMode, shard: Shard, form: Shard, outcome: Outcome, began_ns: int
    ) -> float:
        """Note and report how a fill ended."""
        if outcome.tombstone is not None:
            self._tombstones.append(outcome.tombstone)
        is_refused = outcome.result is Filled.NO_ROOM
        if is_refused and form is not shard and self.store_unprepared(shard):
            return 0.0
        if self._fallback.note(shard, mode, is_refused):
            return 0.0  # it is to be stored in another mode
        if is_refused:
            self._fallback.refuse(shard, outcome.size_bytes)
        if outcome.result is Filled.GAVE_UP and form is not shard:
            return 0.0  # the shard itself may be had
        filled = directory = None
        if outcome.result is Filled.PUBLISHED and not mode.index_only:
            self._counts.add("shards_published")
            filled, directory = form, mode.tier.published(form.digest)
        self._sink(FillResult(shard, outcome.result, filled, directory, began_ns=began_ns))
        return _NO_ROOM_SECONDS if is_refused else self._scheduler.held_seconds()

    def _form(self, mode: StorageMode, shard: Shard) -> Shard:
        """The form to fill: the prepared shard where there is one, else the shard itself."""
        form = shard.prepared
        if form is None or mode.index_only or mode.tier.has("gone", form.digest):
            return shard
        is_made = self._options.prepares and form.digest not in self._unprepared
        return form if is_made or self._has_prepared(form) else shard

    def _has_whole(self, mode: StorageMode, shard: Shard) -> bool:
        """True if nothing is left to fill. Of a local file that is to be prepared an index isn't enough."""
        form = self._form(mode, shard) if shard.local is not None and self._options.prepares else shard
        return mode.tier.has_whole(shard) if form is shard else mode.tier.has("shards", form.digest)

    def _origin(self, mode: StorageMode, shard: Shard, form: Shard, opened: contextlib.ExitStack) -> Origin:
        origin = self._open_origin(form, self._stop)
        opened.callback(origin.close)
        if isinstance(origin, WaitingOrigin):
            origin.is_kept, origin.yield_slot = not mode.index_only, self._scheduler.yield_slot
        return origin if self._freshness is None else self._freshness.watched(shard, origin)
