"""Lanes and windows narrowed to a tier that is too small for them: imported where it may be (step E)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from streamload import limits
from streamload.loader.options import LoaderOptions
from streamload.metrics import format_bytes
from streamload.order.lanes import Width, fits, fitting
from streamload.ranks.distributed import can_compare
from streamload.topology import Topology

if TYPE_CHECKING:
    from streamload.cache.forecast import Measure
    from streamload.cache.shard import Shard

logger = logging.getLogger("streamload")


def narrowed_widths(
    options: LoaderOptions,
    topology: Topology,
    asked: list[Width],
    firsts: Sequence[Shard],
    room: tuple[int, int],
    measure: Callable[[], Measure],
) -> list[list[int]] | None:
    """The lanes and windows that fit on this node, by the sizes of shards and samples.

    Args:
        options: the loader's; what they give isn't narrowed.
        topology: of this rank.
        asked: those of each source, for caches of any size.
        firsts: the first shard of each source.
        room: the bytes of a group, and the samples that a step takes of it.
        measure: opens what gives sizes of shards and samples.

    Returns:
        Those of each source; None if all fit, none would, or sizes are unknown.
    """
    limit_bytes, step = room
    with measure() as sizes, limits.Threads(len(firsts), "streamload-sizes") as pool:
        shard_bytes = pool.map(sizes.shard_bytes, firsts)
        asked = [replace(w, shard_bytes=size) for w, size in zip(asked, shard_bytes, strict=True)]
        if fits(asked, limit_bytes, step):
            return None
        sample_bytes = pool.map(sizes.sample_bytes, firsts)
        asked = [replace(w, sample_bytes=size) for w, size in zip(asked, sample_bytes, strict=True)]
    narrower = fitting(
        asked, limit_bytes, step, lanes=options.order.lanes is None, window=options.shuffle is None
    )
    if narrower == asked:
        return None
    needed, limit = format_bytes(sum(w.open_bytes for w in asked)), format_bytes(limit_bytes)
    shard = format_bytes(max(w.shard_bytes for w in asked))
    problem = (
        f"cache {sizes.tier.root}: about {needed} have to be open at once (shards of {shard}); its limit "
        f"is {limit}"
    )
    if narrower is None:
        logger.warning("%s, too little for any lanes and window: raise cache_size", problem)
        return None
    widths = [[width.lanes, width.window] for width in narrower]
    narrowed = in_words([[width.lanes, width.window] for width in asked], widths)
    if topology.world_size > 1 and not can_compare(topology.world_size):
        logger.warning("%s: give %s (torch.distributed isn't initialised)", problem, narrowed)
    else:
        logger.warning(
            "%s: this run, and each run resumed from it, reads with %s; to prevent that, raise cache_size or "
            "give lanes= and shuffle=",
            *(problem, narrowed),
        )
    return widths


def in_words(needed: list[list[int]], narrower: list[list[int]]) -> str:
    """Lanes and window, added up over the sources."""
    (lanes, window), (asked_lanes, asked_window) = (
        [sum(numbers) for numbers in zip(*widths, strict=True)] for widths in (narrower, needed)
    )
    return f"lanes={lanes} and shuffle={window:,}, not {asked_lanes} and {asked_window:,}"
