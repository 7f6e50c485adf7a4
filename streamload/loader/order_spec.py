"""Inputs of the order of a run: the shards, the seed, lanes and shuffle windows, groups (steps B to E).

An OrderSpec follows from the options and is part of every state. Lanes and windows that weren't given are
narrowed once, at the start of a run, to what the caches can hold: by the cache's limit and by the size and
first megabyte of each source's first shard, not by what the cache holds or the disk has free. All ranks agree
on them, and the run keeps them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import xxhash

from streamload import urls
from streamload.errors import OptionError, OrderDiverged
from streamload.loader.options import LoaderOptions
from streamload.order.events import UNIT
from streamload.order.hashing import SOURCE, key
from streamload.order.lanes import (
    LARGE_SAMPLE_BYTES,
    LARGE_SHARD_BYTES,
    Width,
    default_lanes,
    fits,
    live_shards,
)
from streamload.order.plan import OrderOptions
from streamload.order.shuffle import default_window
from streamload.order.steps import MIXED, SourceDraws, SourcesName, Split
from streamload.ranks.distributed import agree, can_compare, first_value
from streamload.topology import Topology

if TYPE_CHECKING:
    from streamload.cache.forecast import Measure
    from streamload.cache.shard import ShardList
    from streamload.loader.sizes import Sizes

logger = logging.getLogger("streamload")

CELLS = "cells"
"""In place of a digest of steps, where positions count cells."""
_LEAST_PART = 0.1
"""The smallest part of the lanes and the window that a source gets: its weight may grow later."""
SHARDS_DIGESTED = 2_000
"""The digest of the data covers at most this many shards of a source, evenly spaced."""

Widths = list[list[int]]
"""Lanes and window of each source."""


@dataclass(frozen=True, slots=True)
class OrderSpec:
    """Inputs of the order of a run; fixed by the run's first state.

    Attributes:
        data: a digest of the shards, source by source.
        choice: the members that are image, caption and label, and the digests of facts.
        train: whether samples are shuffled.
        seed: the seed of the run.
        groups: the number of sequences that the samples are split into.
        sources: the name, lanes and window of each source.
        opens_slowly: for each source, whether the window opens slowly in a run's first pass, as
            `OrderOptions` has it: False for files that no node copies, True for others.
        shards: the number of shards of each source.
        sizes: a digest of the samples of each shard, by which groups were cut; "" for a single group, None
            if unknown.
        fitted: whether lanes, windows and openings are final. They are after the first epoch has started.
        blocks: the steps of a block and the samples of a step, if steps are planned by block.
        table: a digest of the steps of an epoch, if these differ in size; "cells": steps count cells.
        multiple: a step takes a multiple of this many rows from each source of a group: the ranks of the
            group if sources differ in modality, so that all have equally many rows; else 1.
        sources_of: which rows are of one of several sources: those of a "step" or of a "rank"; "mixed": none.
        parts: how many of these a step has; 0: none.
        given: the weight and floor that each of several sources was given; empty for a single one.
    """

    data: str
    choice: tuple[str, ...]
    train: bool
    seed: int
    groups: int
    sources: tuple[tuple[str, int, int], ...]
    opens_slowly: tuple[bool, ...]
    shards: tuple[int, ...]
    sizes: str | None = None
    fitted: bool = True
    blocks: tuple[int, int] | None = None
    table: str | None = None
    multiple: int = 1
    sources_of: SourcesName = "mixed"
    parts: int = 0
    given: tuple[tuple[float, float], ...] = ()

    def live_shards(self, nodes: int, samples: float) -> float:
        """How many shards each of so many nodes has open at once, given the samples of a shard."""
        lanes, window = (sum(widths) for widths in list(zip(*self.sources, strict=True))[1:])
        return -(-self.groups // nodes) * live_shards(lanes, window, samples)


def make_order_spec(
    options: LoaderOptions, topology: Topology, groups: int, shares: Sequence[int], digest: str
) -> OrderSpec:
    """The order that options ask for, with lanes and windows for caches of any size.

    Args:
        options: the loader's.
        topology: this rank among those that share the data.
        groups: the number of sequences.
        shares: of the sources at the start of the run; they divide lanes and window.
        digest: of the data.
    """
    draws = SourceDraws(options.batches.sources) if len(options.sources) > 1 else MIXED
    is_listed, listed = options.shuffle == 0 or not options.train, options.listed_steps
    samples = max(1, options.batch_size * topology.world_size // groups)
    lanes = options.order.lanes if options.order.lanes is not None else default_lanes(samples)
    window = options.shuffle if options.shuffle is not None else default_window(samples)
    sources: list[tuple[str, int, int]] = []
    opens_slowly: list[bool] = []
    for source, share in zip(options.sources, shares, strict=True):
        part = max(share / UNIT, _LEAST_PART)
        widths = (1, 0) if is_listed else (math.ceil(lanes * part), math.ceil(window * part))
        sources.append((source.name, *widths))
        opens_at_once = is_listed or all(
            urls.is_local(url) and not urls.compression(url) for url in source.urls.kinds()
        )
        opens_slowly.append(not opens_at_once)
    return OrderSpec(
        digest,
        options.choice,
        options.train,
        options.seed,
        groups,
        tuple(sources),
        tuple(opens_slowly),
        tuple(len(source.urls) for source in options.sources),
        fitted=is_listed or (None not in (options.order.lanes, options.shuffle) and all(opens_slowly)),
        blocks=_blocks(options, topology, groups),
        table=CELLS if options.has_cells else None if listed is None else listed.digest,
        multiple=_multiple(options, topology, groups),
        sources_of=draws.sources,
        parts=draws.of_step(split_for(options, topology, groups)),
        given=tuple((float(source.weight), float(source.floor)) for source in options.sources)
        if len(options.sources) > 1
        else (),
    )


def _multiple(options: LoaderOptions, topology: Topology, groups: int) -> int:
    if not options.has_modalities or topology.world_size % groups:
        return 1
    return topology.world_size // groups


def _blocks(options: LoaderOptions, topology: Topology, groups: int) -> tuple[int, int] | None:
    """The steps of a block and the samples of a step; None: steps aren't planned together.

    Raises:
        OptionError: ranks and groups can't share steps as an extension needs it.
    """
    split = split_for(options, topology, groups)
    for extension in options.extensions:
        extension.refuse_split(split)
    steps = options.block_steps(split.batch)
    return None if steps is None else (steps, split.batch)


def source_orders(order: OrderSpec, sizes: Sequence[Sizes]) -> list[OrderOptions]:
    """The order of each source's own sequence.

    Args:
        order: of the run.
        sizes: the samples of each shard of each source, the same on all ranks, by which groups are cut to
            equal sizes; None where they are unknown.
    """
    is_mixed = len(order.sources) > 1
    return [
        OrderOptions(
            key(order.seed, SOURCE, xxhash.xxh3_64_intdigest(name.encode())) if is_mixed else order.seed,
            order.groups,
            lanes,
            window,
            shuffle_shards=window > 0,
            hints=shard_sizes,
            opens_slowly=opens_slowly,
        )
        for (name, lanes, window), opens_slowly, shard_sizes in zip(
            order.sources, order.opens_slowly, sizes, strict=True
        )
    ]


def split_for(options: LoaderOptions, topology: Topology, groups: int) -> Split:
    """Split of steps among ranks; in evaluation each rank has a group and steps of its own."""
    if not options.train:
        return Split(options.batch_size, groups=1, ranks=1)
    return Split(options.batch_size * topology.world_size, groups, topology.world_size)


def own_groups(options: LoaderOptions, topology: Topology, groups: int) -> list[int]:
    """The numbers of the groups that this rank reads."""
    first, rank = (0, topology.rank) if options.train else (topology.rank, 0)
    return [first + group for group in split_for(options, topology, groups).groups_of(rank)]


def compare_groups(order: OrderSpec, topology: Topology) -> None:
    """Compare the number of groups with that of the other ranks; in evaluation each rank has its own.

    Raises:
        OrderDiverged: the first rank that called this has another one.
    """
    if not order.train or topology.world_size == 1:
        return
    summary = f"{order.groups} groups on rank {topology.rank} ({topology.nodes} nodes)"
    first = first_value(f"groups {order.data} {order.seed}", summary, topology.world_size)
    if first.partition(" ")[0] != summary.partition(" ")[0]:
        raise OrderDiverged(
            f"the ranks divide the samples differently: into {first} and {summary}. Set LOCAL_RANK and "
            f"LOCAL_WORLD_SIZE on all of them or on none, or give Order(groups=…)"
        )


def data_digest(
    options: LoaderOptions,
    moved: Mapping[str, str] = MappingProxyType({}),
    counts: Sequence[int] | None = None,
) -> str:
    """A digest of the sources' shards, however their URLs were given.

    Args:
        options: with the shards' URLs.
        moved: old → new URL prefixes of shards that were moved; the digest is the one from before the move.
        counts: the number of shards of each source to cover; None: all.

    Raises:
        OptionError: no shard has one of the new prefixes.
    """
    storage = options.storage_options
    digest = xxhash.xxh3_128()
    has_moved = not moved
    for place, source in enumerate(options.sources):
        count = len(source.urls) if counts is None else counts[place]
        step = max(1, -(-count // SHARDS_DIGESTED))
        covered = [source.urls[number] for number in range(0, count, step)]
        former = [urls.former_digest(url, moved, storage) if moved else None for url in covered]
        has_moved = has_moved or any(former)
        names = [old or urls.digest(url, storage) for old, url in zip(former, covered, strict=True)]
        digest.update(repr((count, names)).encode())
    if not has_moved:
        shown = {urls.redact(old): urls.redact(new) for old, new in moved.items()}
        raise OptionError(f"moved={shown!r}: no shard has a URL that begins with {[*shown.values()]}")
    return digest.hexdigest()


def settle_opening(
    order: OrderSpec, options: LoaderOptions, topology: Topology, shards: ShardList
) -> OrderSpec:
    """Open the window slowly over sources of which any node copies files, as over remote ones.

    All ranks of several nodes have to call it at the start of a run: nodes may differ in what they copy. The
    ranks of a node share its decision.
    """
    if all(order.opens_slowly):
        return order
    kinds = [source.urls.kinds() for source in options.sources]
    copies = [any(urls.folder_of(url, shards.copied) for url in source_kinds) for source_kinds in kinds]
    if topology.nodes > 1:
        if not can_compare(topology.world_size):
            return order  # the ranks might open it differently
        name = f"copies/{order.data} {order.seed} {order.train}"
        copies = agree(name, copies, _of_any_rank, topology.world_size)
    openings = zip(order.opens_slowly, copies, strict=True)
    return replace(order, opens_slowly=tuple(map(any, openings)))


def _of_any_rank(copies_by_rank: Sequence[list[bool]]) -> list[bool]:
    return [*map(any, zip(*copies_by_rank, strict=True))]


def fit_to_cache(
    order: OrderSpec,
    options: LoaderOptions,
    topology: Topology,
    shards: ShardList,
    limit_bytes: int,
    measure: Callable[[], Measure],
) -> OrderSpec:
    """Narrow lanes and windows that weren't given to what the caches of all nodes can hold.

    All ranks have to call it: they agree on the least of all nodes.

    Args:
        order: for caches of any size.
        options: the loader's; what they give isn't narrowed.
        topology: of this rank; the first rank of a node measures.
        shards: of all sources.
        limit_bytes: of this node's tier.
        measure: opens what gives sizes of shards and samples.
    """
    widths = None
    if None not in (options.order.lanes, options.shuffle):
        return replace(order, fitted=True)
    if topology.local_rank == 0:
        widths = _widths_of_node(order, options, topology, shards, limit_bytes, measure)
    agreed = widths
    if topology.world_size > 1:
        if not can_compare(topology.world_size):
            return replace(order, fitted=True)  # the ranks might narrow it differently
        agreed = agree(f"widths/{order.shards}", widths, _narrowest, topology.world_size)
    needed = [list(source[1:]) for source in order.sources]
    if agreed is None or agreed == needed:
        return replace(order, fitted=True)
    if widths != agreed and topology.local_rank == 0:
        from streamload.loader.narrowing import in_words

        logger.warning("the cache of another node has room for less: %s", in_words(needed, agreed))
    names = [name for name, *_ in order.sources]
    sources = tuple((name, lanes, window) for name, (lanes, window) in zip(names, agreed, strict=True))
    return replace(order, sources=sources, fitted=True)


def _widths_of_node(
    order: OrderSpec,
    options: LoaderOptions,
    topology: Topology,
    shards: ShardList,
    limit_bytes: int,
    measure: Callable[[], Measure],
) -> Widths | None:
    """The lanes and windows that fit on this node; None if all do, none would, or sizes are unknown."""
    counts = [len(source.urls) for source in options.sources]
    limit_bytes //= -(-order.groups // topology.nodes)
    asked = [
        Width(lanes, window, -(-count // order.groups), LARGE_SHARD_BYTES, LARGE_SAMPLE_BYTES)
        for (_, lanes, window), count in zip(order.sources, counts, strict=True)
    ]
    step = max(1, options.batch_size * topology.world_size // order.groups)
    if fits(asked, limit_bytes, step):
        return None
    from streamload.loader.narrowing import narrowed_widths

    firsts = [shards[sum(counts[:place])] for place in range(len(counts))]
    return narrowed_widths(options, topology, asked, firsts, (limit_bytes, step), measure)


def _narrowest(widths_by_node: Sequence[Widths | None]) -> Widths | None:
    """The least lanes and windows of any node."""
    cut = [widths for widths in widths_by_node if widths is not None]
    if not cut:
        return None
    return [[min(numbers) for numbers in zip(*source, strict=True)] for source in zip(*cut, strict=True)]
