"""The samples of a pass, counted by the indexes in the cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from streamload.batches.images import by_workers
from streamload.cache.shard import ShardList
from streamload.cache.shard_cache import ShardCache
from streamload.cache.tier import Tier, memory_root
from streamload.errors import StreamloadError, as_failure
from streamload.loader.options import LoaderOptions
from streamload.loader.worker_config import listed, selection_of, transform_of
from streamload.metrics import Counters


def counted_samples(options: LoaderOptions, counts: Counters, epoch: int) -> int | None:
    """The samples of one pass over all shards, by the indexes in the cache; None if one is incomplete.

    Args:
        options: the loader's.
        counts: where damage found in the cache is counted.
        epoch: of the pass; with `repeat=` each has another number.
    """
    drawn = None if options.repeat is None else (options.seed, epoch)
    for cache in indexes(options, counts):
        with contextlib.suppress(StreamloadError):
            samples = _count_samples(cache, drawn)
            if samples is not None:
                return samples
    return None


def indexes(options: LoaderOptions, counts: Counters) -> Iterator[ShardCache]:
    """What the caches of a loader have of its shards: the ways in which they may lie there."""
    settings = options.settings()
    plain = ShardList(options.urls, options.storage_options)
    both_ways = dict.fromkeys([(), listed(options, settings).copied])
    lists = [plain.copied_below(copied) for copied in both_ways]
    if options.images.prepare is not None:
        from streamload.derived.prepare.decision import possible_preparations

        transform = transform_of(options) if options.images.prepare == "auto" else None
        possible = possible_preparations(options.images.prepare, settings, by_workers(transform))
        lists = [part.of(shards) for shards in lists for part in possible]
    roots = {"disk": [settings.cache_dir], "memory": [memory_root(settings)]}
    for root in roots.get(settings.cache, [*roots["memory"], *roots["disk"]]):
        if not (root / "tier.json").is_file():
            continue
        for shards in lists:
            with contextlib.suppress(StreamloadError):
                tier, selection = Tier(root, None, counts), selection_of(options)
                yield ShardCache(tier, shards, selection, skip=True, counts=counts, counted=lambda _: False)


def _count_samples(cache: ShardCache, drawn: tuple[int, int] | None) -> int | None:
    """The samples of all shards; None if an index is incomplete.

    Args:
        cache: has the indexes.
        drawn: the seed and the epoch by which samples are repeated; None: each comes once.
    """
    samples = 0
    with contextlib.closing(cache):
        for place in range(len(cache.shards)):
            try:
                numbers, ended = cache.arrived(place)
            except StopIteration as exc:  # of a user's function: list() asks for the length first
                raise as_failure(exc) from exc
            if not ended:
                return None
            count = len(numbers)
            if drawn is not None:
                from streamload.facts.repeats import uses, visit_key

                seed, epoch = drawn
                count = int(uses(visit_key(seed, epoch, 0, place), numbers, cache.rates(place)).sum())
            samples += count
            cache.keep_open(())
    return samples
