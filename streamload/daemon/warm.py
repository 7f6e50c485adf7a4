"""`streamload warm`: a daemon that runs once over a list of shards, and a report of what it did."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamload.cache import demand
from streamload.cache.companion import FactsCarrier
from streamload.cache.copying import folders_to_copy, settled
from streamload.cache.demand import DemandFile
from streamload.cache.freshness import Freshness, asker
from streamload.cache.placement import place_tier
from streamload.cache.shard import Shard, ShardList, by_name
from streamload.cache.shard_view import ShardView
from streamload.cache.shared.sharing import SharedOptions, Sharing
from streamload.cache.tier import Tier
from streamload.daemon.daemon import Daemon
from streamload.daemon.demand import ListDemand, PrefetchWindow, Sizes
from streamload.daemon.executor import LocalExecutor, LocalOptions
from streamload.daemon.options import DaemonOptions
from streamload.daemon.preemption import Notice
from streamload.daemon.recipes import Recipes
from streamload.daemon.targets import LocalTarget
from streamload.daemon.task_origins import TaskOrigins, Throttle
from streamload.errors import StreamloadError
from streamload.facts.shard_facts import ShardFacts
from streamload.metrics import Counters
from streamload.options import Settings, read_settings
from streamload.options.storage import copy_options
from streamload.origins.access import warn_of_shared_headers
from streamload.origins.origin import Origin, OriginOptions, Recipe
from streamload.shards.columns import Column
from streamload.urls import UrlList, expand_urls

_TICK_SECONDS = 0.1
_ROOM_SECONDS = 0.05
_QUEUED = 4
"""Tasks for each thread, so that none waits for its next one."""
_REFUSALS = 8
"""After this many tasks in a row without room, stop looking for smaller shards."""


@dataclass(frozen=True, slots=True)
class WarmProgress:
    """The progress of a warm-up; bytes from origins and from the shared cache."""

    shards: int
    shards_complete: int
    bytes_arrived: int


@dataclass(frozen=True, slots=True)
class WarmReport:
    """Result of a warm-up.

    Attributes:
        shards: listed shards.
        shards_complete: those that are in the tier now.
        shards_found_complete: those that were there before.
        shards_local: those that are local files, of which only the index is in the tier.
        bytes_arrived: received from origins.
        bytes_shared: received from the shared cache.
        shared_stored: shards that were stored there.
        failures: why shards couldn't be fetched or stored in the tier, by their names.
        no_room: the names of those among them for which the tier has no room.
        shared_failures: why shards couldn't be stored in the shared cache, by their names.
        shards_with_facts: those of whose samples the facts are in the tier.
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
    shards_with_facts: int


class _NodeTarget(LocalTarget):
    """The tier of this node, and the shared cache where shards are to be stored there, too.

    Each shard is delivered once, so that those in the tier are checked and stored as well.
    """

    def __init__(self, tier: Tier, sharing: Sharing):
        super().__init__(tier)
        self._tier = tier
        self._sharing = sharing
        self._write_back = sharing.write_back
        self.facts = sharing.facts
        self.has_copies = self._write_back is not None

    def missing(self, shards: Sequence[Shard]) -> list[Shard]:
        """All shards, in the order given, as there is one look."""
        return list(shards)

    def holds(self, shard: Shard) -> bool:
        return self._tier.has_whole(shard)

    def deliver(self, shard: Shard, directory: Path) -> None:
        if self._write_back is None:
            return
        self._sharing.kept(shard)
        while not self._write_back.has_room():
            time.sleep(_ROOM_SECONDS)
        self._write_back.add(shard, directory)

    def is_busy(self) -> bool:
        return self._write_back is not None and not self._write_back.wait(0)

    @property
    def failures(self) -> Mapping[str, str]:
        """Why shards weren't stored in the shared cache, by their names."""
        return {} if self._write_back is None else self._write_back.failures


class _DemandFiles:
    """Announces more shards than one demand file holds, as if several runs would read them."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: list[DemandFile] = []

    def announce(self, digests: Iterable[str]) -> None:
        remaining, count = iter(digests), 0
        chunks = iter(lambda: list(itertools.islice(remaining, demand.VISITS_KEPT)), [])
        for place, chunk in enumerate(chunks):
            if place == len(self._files):
                self._files.append(DemandFile(self._directory))
            self._files[place].announce(chunk)
            count = place + 1
        for file in self._files[count:]:
            file.announce(())

    def close(self) -> None:
        for file in self._files:
            file.close()


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
    facts: Sequence[Column] = (),
    on_progress: Callable[[WarmProgress], None] = lambda progress: None,
) -> WarmReport:
    """Fill a tier with shards once; takes up partial fills.

    Nothing is evicted that a live run has announced, nor a listed shard: once the tier is full the rest is
    left. With `write_back` shards that are stored in the shared cache are evicted for the rest.

    Args:
        urls: as for make_loader.
        cache_dir: the directory of the tier.
        cache_size: its limit.
        cache: "disk", "memory" or "auto", as for make_loader.
        memory_size: the limit of a tier in memory.
        shared_cache: is read before the origins, as for make_loader.
        shared_cache_options: for its file system.
        write_back: store all shards in the shared cache that it lacks, those found in the tier among them.
        storage_options: for fsspec.
        concurrency: shards that are filled at once.
        prepare: store the shards prepared by this recipe.
        facts: columns to make of their samples, once they are in the tier.
        on_progress: called several times a second.

    Raises:
        UrlError: a URL that can't be used.
        CacheError: the tier can't be used.
    """
    storage = copy_options(storage_options) or None
    settings = read_settings(
        cache_dir=cache_dir,
        cache_size=cache_size,
        cache=cache,
        memory_size=memory_size,
        shared_cache=shared_cache,
        write_back=write_back,
    )
    shared = SharedOptions.of(settings, shared_cache_options)
    listed = expand_urls(urls, storage)
    warn_of_shared_headers(listed, storage)
    with _WarmUp(listed, settings, shared, storage, concurrency, prepare) as run:
        run.work(on_progress)
        report = run.report(run.make_facts(facts) if facts else 0)
    done = run.counts.snapshot()
    return replace(
        report,
        bytes_arrived=done.origin_bytes,
        bytes_shared=done.shared_bytes,
        shared_stored=done.shared_stored,
    )


def make_facts(tier: Tier, shard: Shard, columns: Sequence[Column], shared: FactsCarrier) -> bool:
    """Make the facts of a shard in a tier, and offer them to the shared cache; False if it isn't whole there.

    Raises:
        StreamloadError: they can't be made.
    """
    with closing(ShardView(tier, shard)) as view:
        facts = ShardFacts(shared)
        is_made = view.ended and not view.gave_up and facts.extend(view, columns, view.count)
        if is_made:
            facts.share(columns, with_found=True)
        return is_made


class _WarmUp:
    """The daemon of one warm-up, with its surroundings; a context manager."""

    def __init__(
        self,
        listed: UrlList,
        settings: Settings,
        shared: SharedOptions | None,
        storage: dict[str, Any] | None,
        concurrency: int,
        prepare: Recipe | None,
    ):
        self.counts = counts = Counters()
        shards = ShardList(listed, storage, copied=folders_to_copy(listed, settings.copy))
        with ExitStack() as stack:
            placed = stack.enter_context(closing(place_tier(settings, shards)))
            self._tier = tier = placed.tier
            shards = settled(settings, shards, placed, nodes=1, logs=True)
            listed_demand = ListDemand(shards.prepared_by(prepare.name if prepare else ""), PrefetchWindow())
            self._shards = listed_demand.look(Sizes().of)
            self._before = sum(tier.published(shard.digest).exists() for shard in self._shards)
            demand_files = stack.enter_context(closing(_DemandFiles(tier.root / "runs")))
            patience = OriginOptions(outage_seconds=settings.origin_wait, mounts=shards.copied)
            asks_remote = settings.revalidate != "never"
            ask = asker(OriginOptions(), counts) if asks_remote or shards.copied else None
            freshness = Freshness(
                tier,
                secrets.token_hex(16),
                each_epoch=False,
                ask=ask,
                counts=counts,
                asks_remote=asks_remote,
            )
            stack.callback(freshness.close)
            if ask is not None:
                freshness.begin("")
            sharing = stack.enter_context(closing(Sharing(shared, counts, ask, uploads=min(4, concurrency))))
            self._target = _NodeTarget(tier, sharing)

            def through(
                shard: Shard, origin: Origin, stop: threading.Event, *, single_flight: bool = True
            ) -> Origin:
                revalidates = asks_remote or shard.is_copied
                return sharing.through(
                    shard, origin, stop, single_flight=single_flight, revalidates=revalidates
                )

            origins = TaskOrigins(
                counts,
                storage,
                patience,
                Throttle(None),
                Recipes(prepare),
                through=through,
                through_source=functools.partial(through, single_flight=False),  # it isn't stored itself
            )
            executor = LocalExecutor(
                tier,
                self._target,
                origins.open,
                LocalOptions(concurrency, queued=_QUEUED, no_room_seconds=None, tombstones=True),
                counts=counts,
                freshness=None if ask is None else freshness,
            )
            stack.callback(executor.close)
            options = DaemonOptions(
                concurrency,
                once=True,
                look_seconds=math.inf,
                retry_seconds=math.inf,
                refusals=_REFUSALS,
                evicts_announced=False,
            )
            self._daemon = Daemon(
                listed_demand, self._target, executor, options=options, announce=demand_files.announce
            )
            self._stack = stack.pop_all()

    def __enter__(self) -> _WarmUp:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def work(self, on_progress: Callable[[WarmProgress], None]) -> None:
        """Fill the tier, and wait until the shared cache has what it is to have."""
        with closing(self._daemon.rounds(Notice())) as rounds:
            for _ in rounds:
                on_progress(self._progress())
        while self._target.is_busy():
            on_progress(self._progress())
            time.sleep(_TICK_SECONDS)
        on_progress(self._progress())

    def make_facts(self, columns: Sequence[Column]) -> int:
        """Make the facts of the shards in the tier; return the number of these.

        With write-back the shared cache has them then, too.
        """
        count, shared = 0, self._target.facts
        for shard in self._shards:
            with contextlib.suppress(StreamloadError):
                count += make_facts(self._tier, shard, columns, shared)
            shared.wait()
        return count

    def report(self, shards_with_facts: int) -> WarmReport:
        """Result of the warm-up so far, without its transfers."""
        failed = self._daemon.failures.by_key()
        ordered = [(shard.name, failed[shard.digest]) for shard in self._shards if shard.digest in failed]
        gave_up = [(name, failure.why) for name, failure in ordered if not failure.is_refused]
        no_room = [(name, failure.why) for name, failure in ordered if failure.is_refused]
        failures = by_name([*gave_up, *no_room])
        return WarmReport(
            cache_dir=self._tier.root,
            shards=len(self._shards),
            shards_complete=sum(map(self._tier.has_whole, self._shards)),
            shards_found_complete=self._before,
            shards_local=sum(shard.in_place is not None for shard in self._shards),
            bytes_arrived=0,
            bytes_shared=0,
            shared_stored=0,
            failures=failures,
            no_room=list(failures)[len(gave_up) :],
            shared_failures=self._target.failures,
            shards_with_facts=shards_with_facts,
        )

    def _progress(self) -> WarmProgress:
        counts = self.counts.snapshot()
        return WarmProgress(
            len(self._shards), self._daemon.status().done, counts.origin_bytes + counts.shared_bytes
        )
