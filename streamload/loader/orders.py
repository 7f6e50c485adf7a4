"""The order of a run: how many sequences, how widely shuffled, how they are dealt to ranks (B to E)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import xxhash

from streamload import urls
from streamload.errors import OptionError
from streamload.loader.options import LoaderOptions
from streamload.loader.position import OrderSpec
from streamload.order.hashing import SOURCE, key
from streamload.order.mixing import UNIT
from streamload.order.plan import OrderOptions
from streamload.order.split import Split, default_lanes, default_window
from streamload.topology import Topology

_LEAST_PART = 0.1
"""So much of the lanes and the window a source has at least: its weight may grow."""
SHARDS_NAMED = 2_000
"""A data set is told from others by so many of its shards, at equal distances."""


def order_spec_of(
    options: LoaderOptions, here: Topology, groups: int, shares: Sequence[int], digest: str
) -> OrderSpec:
    """What the order of a run depends on.

    Args:
        options: what was asked for.
        here: this rank among those that share the data out.
        groups: how many sequences there are.
        shares: of the sources at the beginning; by these they share lanes and window.
        digest: of the data.
    """
    listed = options.shuffle == 0 or not options.train
    slice_ = max(1, options.batch_size * here.world_size // groups)
    lanes = options.order.lanes if options.order.lanes is not None else default_lanes(slice_)
    window = options.shuffle if options.shuffle is not None else default_window(slice_)
    sources: list[tuple[str, int, int]] = []
    opens_after: list[int] = []
    for source, share in zip(options.sources, shares, strict=True):
        part = max(share / UNIT, _LEAST_PART)
        widths = (1, 0) if listed else (math.ceil(lanes * part), math.ceil(window * part))
        sources.append((source.name, *widths))
        is_here = listed or all(urls.is_local(url) for url in source.urls.kinds())
        opens_after.append(0 if is_here else math.ceil(slice_ * part))
    shards = tuple(len(source.urls) for source in options.sources)
    return OrderSpec(
        digest,
        options.choice,
        options.train,
        options.seed,
        groups,
        tuple(sources),
        tuple(opens_after),
        shards,
        fitted=listed or None not in (options.order.lanes, options.shuffle),
    )


def orders_of(order: OrderSpec, sizes: Sequence[Sequence[int] | None]) -> list[OrderOptions]:
    """The same for each source's own sequence.

    Args:
        order: of the run.
        sizes: of each source the samples of each shard, the same list on all ranks, by which its groups are
            cut evenly; None where they aren't known.
    """
    several = len(order.sources) > 1
    return [
        OrderOptions(
            key(order.seed, SOURCE, xxhash.xxh3_64_intdigest(name.encode())) if several else order.seed,
            order.groups,
            lanes,
            window,
            shuffle_shards=window > 0,
            hints=None if own is None else np.array(own, np.int64),
            opens_after=opens_after,
        )
        for (name, lanes, window), opens_after, own in zip(
            order.sources, order.opens_after, sizes, strict=True
        )
    ]


def split_of(options: LoaderOptions, here: Topology, groups: int) -> Split:
    """How steps are dealt; in evaluation each rank has a group, and steps, of its own."""
    if not options.train:
        return Split(options.batch_size, groups=1, ranks=1)
    return Split(options.batch_size * here.world_size, groups, here.world_size)


def sizes_digest(sizes: Sequence[Sequence[int] | None]) -> str:
    """A digest of what sizes.json says of the shards of each source."""
    said = xxhash.xxh3_64()
    for own in sizes:
        said.update(b"unknown" if own is None else np.array(own, "<i8").tobytes())
        said.update(b"|")
    return said.hexdigest()


def data_digest(
    options: LoaderOptions,
    moved: Mapping[str, str] = MappingProxyType({}),
    counts: Sequence[int] | None = None,
) -> str:
    """Which shards the sources have, however they were listed.

    Args:
        options: they name the shards.
        moved: where these were before → where they are now: the digest is the former one.
        counts: of each source, how many of its shards are looked at; None: all.

    Raises:
        OptionError: none of them is where one was moved to.
    """
    storage = dict(options.shards.storage_options) if options.shards.storage_options else None
    said = xxhash.xxh3_128()
    is_met = not moved
    for place, source in enumerate(options.sources):
        count = len(source.urls) if counts is None else counts[place]
        step = max(1, -(-count // SHARDS_NAMED))
        named = [source.urls[number] for number in range(0, count, step)]
        former = [urls.former_digest(url, moved, storage) if moved else None for url in named]
        is_met = is_met or any(former)
        names = [before or urls.digest(url, storage) for before, url in zip(former, named, strict=True)]
        said.update(repr((count, names)).encode())
    if not is_met:
        shown = {urls.redact(old): urls.redact(new) for old, new in moved.items()}
        raise OptionError(f"moved={shown!r}: no shard has a URL that begins with {[*shown.values()]}")
    return said.hexdigest()
