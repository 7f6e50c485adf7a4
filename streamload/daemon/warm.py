"""Fill a tier once with a list of shards, as far as its limit goes: for `streamload warm`."""

from __future__ import annotations

import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamload.cache.demand import VISITS_KEPT, DemandFile
from streamload.cache.fill import Filled
from streamload.cache.freshness import Freshness, asker
from streamload.cache.placement import place_tier
from streamload.cache.shard import Shard, ShardList, by_name, prepared_form
from streamload.cache.shard_cache import tombstone_cause
from streamload.cache.shared.sharing import SharedOptions, Sharing
from streamload.cache.tier import Tier
from streamload.derived.prepared import PreparedOrigin, Recipe
from streamload.metrics import Counters
from streamload.options import file_system, read_settings
from streamload.origins.access import warn_of_shared_headers
from streamload.origins.origin import Origin, OriginOptions, open_origin
from streamload.prefetch.prefetcher import FillResult, Prefetcher, PrefetchOptions
from streamload.prefetch.scheduler import FillRequest
from streamload.urls import expand_urls

if TYPE_CHECKING:
    from streamload.cache.shared.write_back import WriteBack

_TICK_SECONDS = 0.1
_IN_SIGHT = 4
"""Shards that are looked at in advance, for each thread."""
_REFUSALS = 2
"""So often a shard is refused the room while nothing is on its way that may give some back."""
_WITHOUT_ROOM = 8
"""After so many in a row that have no room, smaller ones aren't looked for any more."""


@dataclass(frozen=True, slots=True)
class WarmProgress:
    """How far a warm-up is; bytes from origins and from the shared cache."""

    shards: int
    shards_complete: int
    bytes_arrived: int


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What a warm-up did.

    Attributes:
        shards: how many were asked for.
        shards_complete: how many of them are in the tier now.
        shards_found_complete: how many of those were there before.
        shards_local: how many are local files of which only the index is in the tier.
        bytes_arrived: received from origins.
        bytes_shared: received from the shared cache.
        shared_stored: shards that were stored there.
        failures: for each shard that can't be had, or not be kept, by its name: why.
        no_room: the names of those among them that the tier has no room for.
        shared_failures: for each that was to be stored in the shared cache and isn't there: why.
    """

    cache_dir: Path
    shards: int
    shards_complete: int
    shards_found_complete: int
    shards_local: int
    bytes_arrived: int
    bytes_shared: int
    shared_stored: int
    failures: Mapping[str, str]
    no_room: Sequence[str]
    shared_failures: Mapping[str, str]


@dataclass(slots=True)
class _Tally:
    """What the filling threads have reported; guarded by its condition."""

    change: threading.Condition = field(default_factory=threading.Condition)
    settled: dict[str, Filled] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    """How often there was no room for a shard, since something last came or went."""

    def report(self, shard: Shard, result: Filled) -> None:
        if result is Filled.OUTDATED:
            return  # it is filled anew
        with self.change:
            if result is Filled.NO_ROOM:
                self.refused[shard.digest] += 1
            else:
                self.settled[shard.digest] = result
            self.change.notify_all()


class _Kept:
    """Says to all who use a tier which shards are to stay, so that none of them goes for a later one.

    Args:
        tier: the tier.
        shards: all that are filled; so many that they are announced as if by several runs.
    """

    def __init__(self, tier: Tier, shards: Sequence[Shard]):
        self.count = 0
        self._demand_files = [DemandFile(tier.root / "runs") for _ in range(0, len(shards), VISITS_KEPT)]
        self.say(shards)

    def say(self, shards: Sequence[Shard]) -> None:
        """These are to stay, and no others; they are some of those that were said at first."""
        self.count = len(shards)
        for k, run in enumerate(self._demand_files):
            run.announce(shard.digest for shard in shards[k * VISITS_KEPT : (k + 1) * VISITS_KEPT])

    def close(self) -> None:
        """All may go; once is enough."""
        for run in self._demand_files:
            run.close()


class _Storing:
    """Shards of the tier on their way to the shared cache, if they are to be stored there."""

    def __init__(self, tier: Tier, write_back: WriteBack | None):
        self._tier = tier
        self._write_back = write_back
        self._next: deque[Shard] = deque()

    @property
    def is_asked_for(self) -> bool:
        return self._write_back is not None

    @property
    def is_done(self) -> bool:
        return not self._next and (self._write_back is None or self._write_back.wait(0))

    @property
    def failures(self) -> Mapping[str, str]:
        return {} if self._write_back is None else self._write_back.failures

    def take(self, published: Iterable[Shard]) -> None:
        """Take more, and hand on what has room."""
        if self._write_back is None:
            return
        self._next.extend(published)
        while self._next and self._write_back.has_room():
            shard = self._next.popleft()
            self._write_back.add(shard, self._tier.published(shard.digest))


class _Warming:
    """Goes over a list of shards until each is filled, has failed, or is known to have no room.

    Args:
        shards: all of them, in order.
        ahead: fills them.
        tally: what it reports.
        storing: what becomes of them then.
        kept: says that they stay.
        in_sight: so many are looked at in advance.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        ahead: Prefetcher,
        tally: _Tally,
        storing: _Storing,
        kept: _Kept,
        in_sight: int,
    ):
        self._pending = list(shards)
        self._prefetcher, self._tally, self._storing, self._kept = ahead, tally, storing, kept
        self._in_sight = in_sight
        self._in_a_row = 0
        self.no_room: set[str] = set()  # by digest

    @property
    def is_over(self) -> bool:
        return not self._pending and self._storing.is_done

    def go_on(self) -> None:
        """Wait a moment, and take up what has become of the shards since.

        Raises:
            CacheError: the tier can't be used any more.
        """
        in_sight = self._pending[: self._in_sight]
        # Nothing that is announced is evicted for them.
        self._prefetcher.want([FillRequest(shard, float(VISITS_KEPT)) for shard in in_sight])
        with self._tally.change:
            self._tally.change.wait(_TICK_SECONDS)
            settled = dict(self._tally.settled)
            full = {digest for digest, times in self._tally.refused.items() if times >= _REFUSALS}
            full -= self.no_room
        self._prefetcher.check()
        published = [shard for shard in in_sight if settled.get(shard.digest) is Filled.PUBLISHED]
        self._storing.take(published)
        self._pending = [shard for shard in self._pending if shard.digest not in settled]
        if published:
            self._in_a_row = 0
        if published or self._prefetcher.holds_room() or not self._storing.is_done:
            self._forget_refusals()  # some room may come of it
        elif full and self._storing.is_asked_for and self._kept.count > len(self._pending):
            self._kept.say(self._pending)  # all others are stored, and may go for them
            self._forget_refusals()
        elif full:
            self._do_without(full)

    def _do_without(self, full: set[str]) -> None:
        """There is no room for some, nor will there be."""
        self._in_a_row += len(full)
        if self._in_a_row >= _WITHOUT_ROOM:
            full = {shard.digest for shard in self._pending if not self._prefetcher.tier.has_whole(shard)}
        self.no_room |= full
        self._pending = [shard for shard in self._pending if shard.digest not in full]

    def _forget_refusals(self) -> None:
        with self._tally.change:
            self._tally.refused.clear()


def warm(
    urls: str | Sequence[str],
    *,
    cache_dir: str | Path | None = None,
    cache_size: str | int | None = None,
    cache: str | None = None,
    memory_size: str | int | None = None,
    shared_cache: str | Path | None = None,
    shared_cache_options: Mapping[str, Any] | None = None,
    write_back: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    concurrency: int = 8,
    prepare: Recipe | None = None,
    on_progress: Callable[[WarmProgress], None] = lambda progress: None,
) -> WarmReport:
    """Fill a tier with shards, each once; what is there stays, what was begun is taken up.

    What live runs have said that they will read stays as well. Where there is no room for more the rest is
    left, unless all that is held is stored in the shared cache, too: then that makes way for the rest.

    Args:
        urls: as for make_loader.
        cache_dir: the directory of the tier.
        cache_size: the most that it may hold.
        cache: "disk", "memory" or "auto", as for make_loader.
        memory_size: the most that a tier in memory may hold.
        shared_cache: what is asked for shards before their origins, as for make_loader.
        shared_cache_options: for its file system.
        write_back: store there all of the shards that it hasn't got, those that were in the tier among them.
        storage_options: for fsspec.
        concurrency: how many shards are filled at once.
        prepare: keep them prepared by this recipe, and not as they are.
        on_progress: called some times a second.

    Raises:
        UrlError: a URL that can't be used.
        CacheError: the tier can't be used.
    """
    storage = dict(storage_options) if storage_options else None
    settings = read_settings(
        cache_dir=cache_dir,
        cache_size=cache_size,
        cache=cache,
        memory_size=memory_size,
        shared_cache=shared_cache,
        write_back=write_back,
    )
    shared = SharedOptions.of(settings, shared_cache_options)
    listed = ShardList(expand_urls(urls), storage)
    warn_of_shared_headers(listed.urls, storage)
    placed = place_tier(settings, listed, storage)
    tier = placed.tier
    sources = {(shard if prepare is None else prepared_form(shard, prepare.name)): shard for shard in listed}
    shards = list({shard.digest: shard for shard in sources}.values())
    before = sum(tier.published(shard.digest).exists() for shard in shards)
    tally, counts = _Tally(), Counters()
    ask = asker(storage, OriginOptions(), counts)
    is_asked = settings.revalidate != "never"
    patience = OriginOptions(outage_seconds=settings.origin_wait)
    sharing = Sharing(shared, counts, ask if is_asked else None, uploads=min(4, concurrency))
    freshness = Freshness(tier, secrets.token_hex(16), each_epoch=False, ask=ask, counts=counts)

    def origin(shard: Shard, stop: threading.Event) -> Origin:
        source = sources[shard]
        far = open_origin(source.url, storage, patience, counts, stop)
        if prepare is None:
            return sharing.through(source, far, stop)
        near = sharing.through(source, far, stop, single_flight=False)  # of what isn't stored itself
        return sharing.through(shard, PreparedOrigin(near, prepare), stop)

    def filled(result: FillResult) -> None:
        if result.filled is not None:
            sharing.kept(result.filled)
        tally.report(result.shard, result.outcome)

    with (
        closing(placed),
        closing(_Kept(tier, shards)) as kept,
        closing(freshness),
        closing(sharing),
        closing(
            Prefetcher(
                tier,
                origin,
                PrefetchOptions(concurrency),
                counts=counts,
                sink=filled,
                freshness=freshness if is_asked else None,
            )
        ) as ahead,
    ):
        if is_asked:
            freshness.begin("")
        storing = _Storing(tier, sharing.write_back)
        warming = _Warming(shards, ahead, tally, storing, kept, _IN_SIGHT * concurrency)
        while not warming.is_over:
            warming.go_on()
            now = counts.snapshot()
            on_progress(WarmProgress(len(shards), _complete(tally), now.origin_bytes + now.shared_bytes))
        left = [shard for shard in shards if shard.digest in warming.no_room]
        asked = (shard for shard in shards if shard.digest not in warming.no_room)
        gave_up = [shard for shard in asked if tally.settled.get(shard.digest) is Filled.GAVE_UP]
        no_room = _no_room(tier)
        failures = by_name([*((s.name, _why(tier, s)) for s in gave_up), *((s.name, no_room) for s in left)])
        shared_failures = storing.failures
        complete = sum(tier.has_whole(shard) for shard in shards)
    done = counts.snapshot()
    return WarmReport(
        cache_dir=tier.root,
        shards=len(shards),
        shards_complete=complete,
        shards_found_complete=before,
        shards_local=sum(shard.in_place is not None for shard in shards),
        bytes_arrived=done.origin_bytes,
        bytes_shared=done.shared_bytes,
        shared_stored=done.shared_stored,
        failures=failures,
        no_room=list(failures)[len(gave_up) :],
        shared_failures=shared_failures,
    )


def _complete(tally: _Tally) -> int:
    with tally.change:
        return sum(result is Filled.PUBLISHED for result in tally.settled.values())


def _why(tier: Tier, shard: Shard) -> str:
    """Why a shard was given up."""
    return tombstone_cause(tier.tombstone(shard.digest))


def _no_room(tier: Tier) -> str:
    option = "memory_size" if file_system(tier.root).is_memory else "cache_size"
    return f"no room: the cache can't take more than {tier.budget.bound}; raise {option}"
