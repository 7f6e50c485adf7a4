"""Lanes and window for a cache that is too small for the default ones: decided once, where a run begins.

The order of a run may not depend on a cache. So what is cut is agreed by all ranks, is in the state from then
on, and holds for the run, whatever room there is later. It follows from the limit of the cache and from the
size and the first megabyte of each source's first shard, not from what the cache holds or the disk has free.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from streamload.cache.forecast import (
    LARGE_SAMPLE_BYTES,
    LARGE_SHARD_BYTES,
    Measure,
    Width,
    fits,
    fitting,
)
from streamload.cache.shard import ShardList
from streamload.loader.distributed import agreed, can_compare
from streamload.loader.options import LoaderOptions
from streamload.loader.position import OrderSpec
from streamload.metrics import format_bytes
from streamload.topology import Topology

logger = logging.getLogger("streamload")

_Widths = list[list[int]]
"""Lanes and window of each source."""


def fitted(
    order: OrderSpec,
    options: LoaderOptions,
    here: Topology,
    shards: ShardList,
    measure: Measure,
) -> OrderSpec:
    """An order whose lanes and window were not all given, cut to what the caches of all nodes have room for.

    Args:
        order: as it would be with room for all.
        options: what was asked for: what was given isn't cut.
        here: this rank; the first of a node speaks for it.
        shards: of all sources.
        measure: tells how large some of them are, and has the tier of this node.
    """
    own = None
    if here.local_rank == 0:
        own = _of_node(order, options, here, shards, measure)
    if here.world_size > 1 and not can_compare(here.world_size):
        return replace(order, fitted=True)  # some might cut, and others not
    found = agreed(f"widths/{order.data}/{order.seed}", own, _least, here.world_size)
    asked = [list(source[1:]) for source in order.sources]
    if found is None or found == asked:
        return replace(order, fitted=True)
    if own != found and here.local_rank == 0:
        logger.warning("the cache of another node has room for less: %s", _said(asked, found))
    names = [name for name, *_ in order.sources]
    sources = tuple((name, lanes, window) for name, (lanes, window) in zip(names, found, strict=True))
    return replace(order, sources=sources, fitted=True)


def _of_node(
    order: OrderSpec,
    options: LoaderOptions,
    here: Topology,
    shards: ShardList,
    measure: Measure,
) -> _Widths | None:
    """The lanes and windows that fit on this node; None where all do, none would, or sizes aren't known."""
    counts = [len(source.urls) for source in options.sources]
    firsts = [shards[sum(counts[:place])] for place in range(len(counts))]
    limit_bytes = measure.tier.limit_bytes // -(-order.groups // here.nodes)
    asked = [
        Width(lanes, window, -(-count // order.groups), LARGE_SHARD_BYTES, LARGE_SAMPLE_BYTES)
        for (_, lanes, window), count in zip(order.sources, counts, strict=True)
    ]
    step = max(1, options.batch_size * here.world_size // order.groups)
    if fits(asked, limit_bytes, step):
        return None
    with ThreadPoolExecutor(len(firsts)) as pool:
        shard_bytes = pool.map(measure.shard_bytes, firsts)
        asked = [replace(w, shard_bytes=size) for w, size in zip(asked, shard_bytes, strict=True)]
        if fits(asked, limit_bytes, step):
            return None
        sample_bytes = pool.map(measure.sample_bytes, firsts)
        asked = [replace(w, sample_bytes=size) for w, size in zip(asked, sample_bytes, strict=True)]
    found = fitting(
        asked, limit_bytes, step, lanes=options.order.lanes is None, window=options.shuffle is None
    )
    if found == asked:
        return None
    needed, limit = format_bytes(sum(w.open_bytes for w in asked)), format_bytes(limit_bytes)
    shard = format_bytes(max(w.shard_bytes for w in asked))
    root = measure.tier.root
    why = f"cache {root}: about {needed} have to be open at once (shards of {shard}); it has {limit}"
    if found is None:
        logger.warning("%s, for which no lanes and window are narrow enough: raise cache_size", why)
        return None
    widths = [[width.lanes, width.window] for width in found]
    said = _said([[width.lanes, width.window] for width in asked], widths)
    if here.world_size > 1 and not can_compare(here.world_size):
        logger.warning("%s: give %s (torch.distributed doesn't join the ranks)", why, said)
    else:
        logger.warning(
            "%s: this run, and all that goes on from its states, reads with %s; raise cache_size, or give "
            "lanes= and shuffle= to keep to them",
            *(why, said),
        )
    return widths


def _least(said: Sequence[_Widths | None]) -> _Widths | None:
    """The least that any node has room for."""
    cut = [widths for widths in said if widths is not None]
    if not cut:
        return None
    return [[min(numbers) for numbers in zip(*source, strict=True)] for source in zip(*cut, strict=True)]


def _said(asked: _Widths, found: _Widths) -> str:
    """Lanes and window in words: of all sources together."""
    (lanes, window), (of_lanes, of_window) = (
        [sum(numbers) for numbers in zip(*widths, strict=True)] for widths in (found, asked)
    )
    return f"lanes={lanes} and shuffle={window:,}, not {of_lanes} and {of_window:,}"
