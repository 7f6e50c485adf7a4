"""The description of a loader, which ranks compare: what decides on the samples of each of its batches.

Shards are described by their names in order, below their common folder: each rank may read a mirror or mount
of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import xxhash

from streamload import urls
from streamload.loader.options import LoaderOptions
from streamload.loader.order_spec import SHARDS_DIGESTED, OrderSpec
from streamload.loader.position import Position


def described(options: LoaderOptions, order: OrderSpec, position: Position) -> dict[str, Any]:
    """The description of a training loader at its first epoch, or the first after a state; JSON-able.

    Args:
        options: the loader's.
        order: of the run, before it is fitted to a cache.
        position: of the first batch.
    """
    batches, shards, images = options.batches, options.shards, options.images
    return {
        "shards": [_described_shards(source.urls) for source in options.sources],
        "seed": order.seed,
        "batch_size": options.batch_size,
        "epoch": position.epoch,
        "position": position.position,
        "sizes of set_batch_size": [size.value["batch"] for size in position.batch_sizes],
        "sources": [source.name for source in options.sources],
        "weights and floors": [[source.weight, source.floor] for source in options.sources],
        "shuffle": [window for _, _, window in order.sources],
        "lanes": [lanes for _, lanes, _ in order.sources],
        "groups": order.groups,
        "num_samples": options.num_samples,
        "num_batches": options.num_batches,
        "endless": options.order.endless,
        "mixing": _kind(options.mixing),
        "keys, facts and repeat": order.choice,
        "rows of join=": None if options.join is None else options.join.table.version,
        "blank_captions": shards.blank_captions,
        "keep": [*options.keeps],
        "leave_out": options.leave_out_file is not None,
        "bucketing": batches.bucketing,
        "cost": [cost if isinstance(cost, str) else "a function" for cost in batches.costs],
        "sizes": None if images.sizes is None else [images.sizes, images.sizes_by, batches.microbatch],
        "sources of a batch": batches.sources,
        "batch_policy": _kind(batches.batch_policy),
        "steps": order.table,
        "a window that opens slowly, as for remote shards": order.opens_slowly,
    }


def _described_shards(shards: Sequence[str]) -> str:
    covered = range(0, len(shards), max(1, -(-len(shards) // SHARDS_DIGESTED)))
    paths = [_path(shards[number]).split("/") for number in covered]
    first, last = min(paths), max(paths)  # what these two begin with, all do
    folders = zip(first[:-1], last[:-1], strict=False)
    depth = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], folders))
    names = ["/".join(path[depth:]) for path in paths]
    digest = xxhash.xxh3_64_hexdigest(repr(names).encode())
    return f"{len(shards):,} from {names[0]} to {names[-1]}, {digest[:8]} by their order"


def _path(url: str) -> str:
    """The path of a shard, without its server; that of a command's first tar."""
    kind = urls.scheme(url)
    if kind == "pipe":
        name = urls.basename(url)
        return next((word for word in url.replace("=", " ").split() if name in word), name).strip("'\"")
    if kind == "file":
        return str(urls.local_path(url))
    return unquote(urlsplit(url).path) if kind in ("http", "https") else url.partition("://")[2]


def _kind(value: object) -> str | None:
    return None if value is None else type(value).__name__
