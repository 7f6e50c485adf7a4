"""Fill a tier once with a list of shards, as far as its limit goes: for `streamload warm`."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamload.cache.fill import Filled
from streamload.cache.freshness import Freshness, asker
from streamload.cache.placement import place_tier
from streamload.cache.runs import Run
from streamload.cache.shard import Shard, ShardList, prepared_form
from streamload.cache.shard_cache import verdict_cause
from streamload.cache.shared.sharing import SharedOptions, Sharing
from streamload.cache.shared.write_back import WriteBack
from streamload.cache.tier import Tier
from streamload.metrics import Counters
from streamload.origins.origin import Origin, OriginOptions, open_origin
from streamload.prefetch.ahead import Ahead
from streamload.prefetch.prepared import PreparedOrigin, Recipe
from streamload.settings import file_system, read_settings
from streamload.urls import expand_urls

_TICK_SECONDS = 0.1
_IN_SIGHT = 4
"""Shards that are looked at in advance, for each thread."""


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
        bytes_arrived: received from origins.
        bytes_shared: received from the shared cache.
        shared_stored: shards that were stored there.
        failures: for each shard that isn't there, by its name: why.
        shared_failures: for each that was to be stored in the shared cache and isn't there: why.
    """

    cache_dir: Path
    shards: int
    shards_complete: int
    shards_found_complete: int
    bytes_arrived: int
    bytes_shared: int
    shared_stored: int
    failures: Mapping[str, str]
    shared_failures: Mapping[str, str]


@dataclass(slots=True)
class _Tally:
    """What the filling threads have reported; guarded by its condition."""

    change: threading.Condition = field(default_factory=threading.Condition)
    settled: dict[str, Filled] = field(default_factory=dict)

    def report(self, shard: Shard, result: Filled) -> None:
        if result is Filled.OUTDATED:
            return  # it is filled anew
        with self.change:
            self.settled[shard.digest] = result
            self.change.notify_all()


class _Storing:
    """Shards of the tier on their way to the shared cache, if they are to be stored there."""

    def __init__(self, tier: Tier, write_back: WriteBack | None):
        self._tier = tier
        self._write_back = write_back
        self._next: deque[Shard] = deque()

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

    Args:
        urls: as for make_loader.
        cache_dir: the directory of the tier.
        cache_size: the most that it may hold; shards that don't fit any more are reported as failures.
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
        cache_dir,
        cache_size,
        cache=cache,
        memory_size=memory_size,
        shared_cache=shared_cache,
        write_back=write_back,
    )
    shared = SharedOptions.of(settings, shared_cache_options)
    listed = ShardList(expand_urls(urls), storage)
    placed = place_tier(settings, listed, storage)
    tier = placed.tier
    sources = {(shard if prepare is None else prepared_form(shard, prepare.name)): shard for shard in listed}
    shards = list({shard.digest: shard for shard in sources}.values())
    before = sum(tier.published(shard.digest).exists() for shard in shards)
    tally, counts = _Tally(), Counters()
    ask = asker(storage, OriginOptions(), counts)
    is_asked = settings.revalidate != "never"
    sharing = Sharing(shared, counts, ask if is_asked else None, uploads=min(4, concurrency))
    freshness = Freshness(tier, secrets.token_hex(16), each_epoch=False, ask=ask, counts=counts)

    def origin(shard: Shard, stop: threading.Event) -> Origin:
        source = sources[shard]
        far = open_origin(source.url, storage, counters=counts, stop=stop)
        if prepare is None:
            return sharing.through(source, far, stop)
        near = sharing.through(source, far, stop, in_turn=False)  # of what isn't stored itself
        return sharing.through(shard, PreparedOrigin(near, prepare), stop)

    with (
        closing(placed),
        closing(Run(tier.root / "runs")) as run,
        closing(freshness),
        closing(sharing),
        closing(
            Ahead(
                tier,
                origin,
                threads=concurrency,
                counts=counts,
                report=tally.report,
                freshness=freshness if is_asked else None,
                published=lambda shard, directory: sharing.kept(shard),
            )
        ) as ahead,
    ):
        if is_asked:
            freshness.begin("")
        run.announce(shard.digest for shard in shards)  # so that none of them goes for a later one
        pending, storing = shards, _Storing(tier, sharing.write_back)
        while pending or not storing.is_done:
            ahead.want((), pending[: _IN_SIGHT * concurrency])
            with tally.change:
                tally.change.wait(_TICK_SECONDS)
                settled = dict(tally.settled)
            storing.take(shard for shard in pending if settled.get(shard.digest) is Filled.PUBLISHED)
            pending = [shard for shard in pending if shard.digest not in settled]
            ahead.check()
            now = counts.snapshot()
            on_progress(WarmProgress(len(shards), _complete(tally), now.origin_bytes + now.shared_bytes))
        failures = {shard.name: _why(tier, shard, tally) for shard in shards}
        shared_failures = storing.failures
    done = counts.snapshot()
    return WarmReport(
        cache_dir=tier.root,
        shards=len(shards),
        shards_complete=_complete(tally),
        shards_found_complete=before,
        bytes_arrived=done.origin_bytes,
        bytes_shared=done.shared_bytes,
        shared_stored=done.shared_stored,
        failures={name: why for name, why in failures.items() if why},
        shared_failures=shared_failures,
    )


def _complete(tally: _Tally) -> int:
    with tally.change:
        return sum(result is Filled.PUBLISHED for result in tally.settled.values())


def _why(tier: Tier, shard: Shard, tally: _Tally) -> str:
    """Why a shard isn't in the tier; empty if it is."""
    result = tally.settled[shard.digest]
    if result is Filled.PUBLISHED:
        return ""
    if result is Filled.NO_ROOM:
        option = "memory_size" if file_system(tier.root).is_memory else "cache_size"
        return f"no room: the cache's limit is {tier.limit_bytes:,} bytes; raise {option}"
    return verdict_cause(tier.verdict(shard.digest))
