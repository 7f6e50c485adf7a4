"""webdataset's pipelines on streamload's cache: `wds.` becomes `cached.` where a pipeline reads tars.

    import streamload.integrations.webdataset as cached

    wds.DataPipeline(wds.SimpleShardList(urls), wds.split_by_worker, cached.tarfile_to_samples(), …)
    cached.WebDataset(urls, shardshuffle=100)

webdataset lists, splits and shuffles the shards. This stage reads samples of the shards that it is given,
while they arrive; all processes of a node share the copies. Nothing is ordered or decoded here.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import webdataset

from streamload.cache.demand import DemandFile
from streamload.cache.shard import Shard, ShardRange, shard_of
from streamload.cache.shard_cache import tombstone_error
from streamload.cache.shard_copy import Members
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import open_tier
from streamload.errors import (
    CacheError,
    CacheFull,
    DatasetChanged,
    LimitReached,
    OptionError,
    StateMismatch,
    UrlError,
)
from streamload.options import Settings, read_settings
from streamload.options.storage import copy_options
from streamload.origins.origin import KeptConnections, Origin, OriginOptions, Version, open_origin
from streamload.prefetch.fallback import FallbackTier
from streamload.prefetch.prefetcher import Prefetcher, PrefetchOptions
from streamload.prefetch.ranges import Ranges
from streamload.prefetch.scheduler import FillRequest
from streamload.shards.samples import Entry
from streamload.urls.checks import check
from streamload.worker.blocked import Action, Blocked, Wait, decide, poll_seconds

logger = logging.getLogger("streamload")

Handler = Callable[[Exception], bool]
_AHEAD = 2
"""Shards that a process fills ahead of the one that it reads."""
_ENTRIES = 64
"""Entries that are looked up at once."""
_NO_ROOM_SECONDS = 2.0
"""After this long without room in the cache a shard isn't stored whole any more."""
_READS = {"StreamingOpen", "FileCache", "tarfile_samples", "cached_tarfile_samples"}
"""The stages of webdataset that open tars: classes, and functions within a stage."""


_OURS = ("select_files", "cache_dir", "cache_size", "storage_options", "done")
_END = 1 << 40
"""The number after the last sample of a shard."""


class SamplesDone:
    """The samples that a training has used: a pipeline's state, exact whatever comes after the reading.

    Add the `__sample__` values of each batch after its step. What `wds.shuffle` and DataLoader workers hold
    isn't used yet: a resumed pipeline yields these samples again and no others, on any number of ranks and
    workers.

        done = SamplesDone()
        reading = cached.tarfile_to_samples(done=done)
        pipeline = wds.DataPipeline(…, reading, …, wds.to_tuple("jpg", "__sample__"))
        for epoch in range(done.epoch, epochs):
            done.set_epoch(epoch)
            for images, samples in wds.WebLoader(pipeline, …):
                …
                done.add(samples)

    A shard is known by its URL and a sample by its number, so neither may change. Shards that are drawn with
    replacement (`resampled=True`) have no such state.

    Attributes:
        epoch: the earliest one that isn't over.
    """

    def __init__(self) -> None:
        self.epoch = self._next_epoch = 0
        self._ranges: dict[int, dict[str, list[int]]] = {}  # by epoch and shard: start, stop, start, stop, …
        self._has_added = False  # since set_epoch

    def __repr__(self) -> str:
        return f"<SamplesDone from epoch {self.epoch}, {sum(map(len, self._ranges.values()))} shards>"

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, the pass that the next iteration begins; earlier ones are over."""
        self.epoch = self._next_epoch = epoch
        self._has_added = False
        self._ranges = {number: shards for number, shards in self._ranges.items() if number >= epoch}

    def add(self, samples: Iterable[str]) -> None:
        """Note samples as used, by the `__sample__` values of a batch, or that of one sample."""
        self._has_added = True
        for sample in [samples] if isinstance(samples, str) else samples:
            epoch, shard, start, stop = sample.split()
            self._add(int(epoch), shard, int(start), int(stop))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, of JSON-able values; about 60 bytes for each finished shard."""
        return cast("dict[str, Any]", json.loads(json.dumps({"epoch": self.epoch, "done": self._ranges})))

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Continue after the states of all ranks: each rank loads all of them.

        Raises:
            StateMismatch: they are of several epochs, or not of this class.
        """
        try:
            (epoch,) = {int(state["epoch"]) for state in states}
            ranges = [
                (int(number), shard, start, stop)
                for state in states
                for number, shards in state["done"].items()
                for shard, places in shards.items()
                for start, stop in zip(places[::2], places[1::2], strict=True)
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise StateMismatch(
                f"not the states of all ranks at one time ({exc!r}): give what their state_dict() returned"
            ) from exc
        self._ranges = {}
        self.set_epoch(epoch)
        for part in ranges:
            self._add(*part)

    def begin(self) -> int:
        """Return the epoch of the pass that a pipeline begins.

        Raises:
            StateMismatch: workers begin an epoch anew that was used already, and would yield nothing of it.
        """
        if self._has_added and self._next_epoch == self.epoch:
            raise StateMismatch(
                f"a second pass over epoch {self.epoch}: before it, call set_epoch({self.epoch + 1}) of "
                f"SamplesDone, or set_epoch({self.epoch}) to go through that epoch's rest"
            )
        self._next_epoch += 1
        return self._next_epoch - 1

    def of(self, epoch: int, shard: str) -> list[int]:
        """Return the used sample numbers of a shard as ranges, in order: start, stop, start, stop, …"""
        return list(self._ranges.get(epoch, {}).get(shard, ()))

    def _add(self, epoch: int, shard: str, start: int, stop: int) -> None:
        ranges = self._ranges.setdefault(epoch, {}).setdefault(shard, [])
        left, right = bisect_left(ranges, start), bisect_right(ranges, stop)
        ranges[left:right] = [start] * (left % 2 == 0) + [stop] * (right % 2 == 0)


def tarfile_to_samples(
    handler: Handler = webdataset.reraise_exception,
    select_files: Callable[[str], bool] | None = None,
    *,
    cache_dir: str | Path | None = None,
    cache_size: str | int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    done: SamplesDone | None = None,
) -> _SampleStage:
    """Make a stage that reads samples as `wds.tarfile_to_samples` does, by way of the cache.

    The samples are webdataset's: `__key__`, `__url__` and the bytes of each member by extension, in order.
    But a link has the bytes of what it links to, `._name` files of macOS are left out, and a member that
    comes twice begins another sample, where webdataset raises.
    After the whole samples of a damaged shard, or of one that can't be fetched, `handler` gets the error. A
    sample that is cut off isn't yielded.

    Args:
        handler: called with the error of a shard; True goes on with the next shard, False ends the pass.
            Errors of the cache itself are raised.
        select_files: keeps the members with these names; extensions are in lower case.
        cache_dir: the directory of the cache, as for make_loader.
        cache_size: its limit; None: that of an earlier run, or streamload's default.
        storage_options: for fsspec.
        done: the samples to leave out; each sample then has a `__sample__`.

    Raises:
        OptionError: a limit or directory that can't be used.
    """
    settings = read_settings(cache_dir=cache_dir, cache_size=cache_size)
    return _SampleStage(handler, select_files, settings, copy_options(storage_options) or None, done)


class WebDataset(webdataset.WebDataset):  # type: ignore[misc]
    """`wds.WebDataset` with streamload's cache.

    Args:
        urls: as for `wds.WebDataset`.
        handler: see `tarfile_to_samples`.
        options: the other arguments of both; `cache_dir` and `cache_size` are of `tarfile_to_samples`.

    Raises:
        OptionError: as for `tarfile_to_samples`, and for `rename_files`.
    """

    def __init__(self, urls: Any, handler: Handler = webdataset.reraise_exception, **options: Any):
        if options.pop("rename_files", None) is not None:
            raise OptionError("rename_files isn't supported: rename members of samples by .rename_keys(…)")
        ours = {name: options.pop(name) for name in _OURS if name in options}
        super().__init__(urls, handler=handler, **options)
        names = [getattr(getattr(part, "f", part), "__name__", type(part).__name__) for part in self.pipeline]
        first = next(place for place, name in enumerate(names) if name in _READS)
        checks = [part for part, name in zip(self.pipeline, names, strict=True) if name == "check_empty"]
        self.pipeline[first:] = [tarfile_to_samples(handler, **ours), *checks]


@dataclass(frozen=True)
class _SampleStage:
    """A stage of a pipeline: shards in, samples out; see `tarfile_to_samples`."""

    handler: Handler
    select: Callable[[str], bool] | None
    settings: Settings
    storage_options: dict[str, Any] | None = field(repr=False)
    done: SamplesDone | None

    def __call__(self, source: Iterable[Mapping[str, Any] | str]) -> Iterator[dict[str, Any]]:
        """Yield the samples of the shards of a source, in turn."""
        epoch = 0 if self.done is None else self.done.begin()
        urls = (shard if isinstance(shard, str) else shard["url"] for shard in source)
        ahead = deque(itertools.islice(urls, 1 + _AHEAD))
        with _Reader(self.settings, self.storage_options) as reader:
            while ahead:
                try:
                    yield from self._samples(reader, [*ahead], epoch)
                except (CacheError, LimitReached):
                    raise  # not the shard's fault: the next one would fail, too
                except Exception as exc:
                    if not self.handler(exc):
                        return
                ahead.popleft()
                ahead.extend(itertools.islice(urls, 1))

    def _samples(self, reader: _Reader, urls: Sequence[str], epoch: int) -> Iterator[dict[str, Any]]:
        """Yield the samples of the first shard, and fill the others."""
        shard, select = reader.shard(urls[0]), self.select
        skipped = [] if self.done is None else self.done.of(epoch, shard.digest)
        if skipped == [0, _END]:
            return
        for stop, entry, members in reader.samples(shard, urls[1:], skipped):
            sample: dict[str, Any] = {"__key__": entry.key, "__url__": urls[0]}
            for extension, payload in members.items():
                if select is None or select(f"{entry.key}.{extension}"):
                    sample[extension] = bytes(payload)
            if len(sample) > 2:
                if self.done is not None:
                    sample["__sample__"] = f"{epoch} {shard.digest} {entry.number} {stop}"
                yield sample


class _Reader:
    """Reads the shards of one process in turn, and fills the next ones; a context manager."""

    def __init__(self, settings: Settings, storage_options: dict[str, Any] | None):
        self._storage_options = storage_options
        self._patience = OriginOptions(outage_seconds=settings.origin_wait)
        self._valid_places: set[str] = set()
        self._tier = tier = open_tier(settings)
        stop = threading.Event()
        with ExitStack() as stack:
            self._connections = stack.enter_context(closing(KeptConnections()))
            self._fallback = stack.enter_context(closing(FallbackTier(tier.root, tier.counts)))
            self._demand = stack.enter_context(closing(DemandFile(tier.root / "runs")))
            self._ranges = stack.enter_context(closing(Ranges(lambda shard: self._open(shard, stop))))
            options = PrefetchOptions(1 + _AHEAD, index_only=True)
            self._prefetcher = Prefetcher(
                tier, self._open, options, counts=tier.counts, fallback_tier=self._fallback
            )
            stack.enter_context(closing(self._prefetcher))
            stack.callback(stop.set)
            self._opened = stack.pop_all()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def shard(self, url: str) -> Shard:
        """Return the shard of a URL; raises UrlError if it can't be opened."""
        check(url, self._valid_places)
        return shard_of(url, self._storage_options)

    def samples(
        self, shard: Shard, later: Iterable[str], skipped: list[int]
    ) -> Iterator[tuple[int, Entry, Members]]:
        """Yield the samples of a shard as they arrive, each with the number after it (the last: _END).

        Args:
            shard: the shard.
            later: URLs of the shards to fill ahead.
            skipped: ranges of sample numbers to leave out; see `SamplesDone.of`.

        Raises:
            OriginError, ShardError: the shard can't be fetched, or not to its end.
            CacheError, LimitReached: the cache can't be used.
        """
        shards = [shard]
        for url in later:
            with suppress(UrlError):  # raised when its turn comes
                shards.append(self.shard(url))
        requests = [FillRequest(shards[place], place, is_needed=not place) for place in range(len(shards))]
        self._prefetcher.want(requests)
        self._demand.announce(request.shard.digest for request in requests)
        tiers = functools.partial(self._fallback.beside, self._tier)
        with closing(ShardView(tiers, shard, self._read_range)) as view:
            number, wait = 0, Wait()
            while not (view.ended and number >= view.count):
                view.refresh()
                stop = view.count - (not view.ended)  # whether the last one is the shard's last isn't known
                before, numbers = number, range(number, min(stop, number + _ENTRIES))
                self._ranges.want(ShardRange(shard, *place) for place in view.ranges(numbers))
                for entry in view.find(numbers) if numbers else ():
                    if bisect_right(skipped, number) % 2 == 0:
                        sample = None if entry is None else view.read(number, entry_place=entry)
                        if sample is None:  # its copy was damaged, and is fetched again
                            break
                        is_last = view.ended and not view.gave_up and number + 1 == view.count
                        yield _END if is_last else number + 1, *sample
                    number += 1
                if number > before:
                    wait = Wait()
                elif not view.ended or number < view.count:
                    self._pause(shard, view, wait)
            if view.gave_up and view.reader is not None:
                raise tombstone_error(view.reader.status, view.reader.cause)
            if number > view.count:
                raise DatasetChanged(f"{shard.name} has {view.count} samples; {number} had been read of it")

    def _pause(self, shard: Shard, view: ShardView, wait: Wait) -> None:
        """Wait a moment for bytes of a shard; store it in another way if it finds no room."""
        prefetcher = self._prefetcher
        prefetcher.check()
        is_refused = prefetcher.refused_seconds(shard) > _NO_ROOM_SECONDS
        blocked = Blocked((0,), wait.seconds(), view.is_stuck, is_refused, True, wait.warnings)
        for action in decide(blocked):
            if action is Action.WARN:
                wait.warnings += 1
                logger.warning("a pipeline has waited %.0f s for %r", blocked.seconds, view)
            elif action is Action.USE_FALLBACK:
                prefetcher.store_in_fallback(shard)
            elif not (prefetcher.store_index_only(shard) or prefetcher.store_in_fallback(shard)):
                raise CacheFull(
                    f"no room for {shard.name} in the cache at {self._tier.root}: {self._tier.budget.bound}; "
                    f"raise cache_size, or make room on the disk"
                )
        prefetcher.look_soon([shard])
        time.sleep(poll_seconds(blocked))

    def _open(self, shard: Shard, stop: threading.Event) -> Origin:
        options, kept = shard.storage_options, self._connections
        return open_origin(shard.url, options, self._patience, self._tier.counts, stop, kept=kept)

    def _read_range(self, shard: Shard, version: Version, start: int, stop: int) -> bytes:
        return self._ranges.read(ShardRange(shard, version, start, stop))
