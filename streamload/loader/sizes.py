"""The number of samples in each shard: from the sizes.json files beside the shards, or estimated."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from streamload import limits, urls
from streamload.errors import DataError, OrderDiverged, OriginDenied, OriginNotFound, StreamloadError
from streamload.origins.origin import OriginOptions, open_origin
from streamload.ranks.distributed import first_with_details
from streamload.shards.samples import ShardScanner, border
from streamload.topology import Topology

logger = logging.getLogger("streamload")

_LIMIT_BYTES = 64 << 20
_LIMIT_SAMPLES = 1 << 40
_SHARDS_ESTIMATED, _HEAD_BYTES = 8, 2 << 20
_BRIEF = OriginOptions(connect_seconds=5.0, stall_seconds=5.0, attempts=3)
_STRICT = (
    ". sizes.json decides how samples are divided among nodes, and no node may miss it: make it readable, "
    "have the server answer 404, or initialise torch.distributed first, so that ranks compare what they found"
)


def read_sizes(
    shards: Sequence[str], storage_options: dict[str, Any] | None, strict: bool = False
) -> list[int] | None:
    """The number of samples in each shard; None if one isn't listed, or can't be (a pipe).

    A sizes.json is `{shard's base name: samples}`, in the folder of the shards, as OpenCLIP reads it.

    Args:
        shards: their URLs.
        storage_options: for their origins.
        strict: only a missing file counts as no sizes.json; otherwise an unreadable one does, too.

    Raises:
        OriginError: reading a sizes.json failed; a missing one is no failure.
        DataError: strict, and it isn't JSON.
    """
    files: dict[str, dict[str, Any]] = {}
    sizes = []
    for shard in shards:
        if urls.scheme(shard) == "pipe":
            return None
        url = _url_beside(shard)
        if url not in files:
            files[url] = _read(url, storage_options, strict)
        samples = files[url].get(urls.basename(shard))
        if type(samples) is not int or not 0 <= samples < _LIMIT_SAMPLES:
            return None
        sizes.append(samples)
    return sizes


def estimate_samples(shards: Sequence[str], storage_options: dict[str, Any] | None) -> int | None:
    """About how many samples shards have, by the sizes and first 2 MiB of up to eight of them.

    Exact if there are no more than eight, none of them larger.

    Args:
        shards: their URLs.
        storage_options: for their origins.

    Returns:
        None: the size of a shard is known only at its end (most commands, compressed shards), or none of them
        can be read.
    """
    looked_at = shards[:: -(-len(shards) // _SHARDS_ESTIMATED) or 1]
    with limits.Threads(len(looked_at), "streamload-sizes") as pool:
        counts = list(pool.map(lambda url: _estimated(url, storage_options), looked_at))
    readable = [count for count in counts if count is not None]
    return round(sum(readable) / len(readable) * len(shards)) if readable else None


def _estimated(shard: str, storage_options: dict[str, Any] | None) -> float | None:
    """About how many samples one shard has; None if its size isn't known, or it can't be read."""
    scanner = ShardScanner(checksums=False)
    with (
        contextlib.suppress(StreamloadError, OSError),  # the reader of the shard will report it
        contextlib.closing(open_origin(shard, storage_options, _BRIEF)) as origin,
    ):
        version = origin.version()
        if version.size is None:
            return None
        entries = scanner.feed(origin.read(0, min(version.size, _HEAD_BYTES), version))
        if version.size <= _HEAD_BYTES:
            return len(entries) + len(scanner.finish()[0])
        return version.size * len(entries) / border(entries[-1]) if entries else None
    return None


def sizes_digest(sizes: Sequence[Sequence[int] | None]) -> str:
    """A digest of the samples of each shard of each source."""
    digest = xxhash.xxh3_64()
    for shard_sizes in sizes:
        digest.update(b"unknown" if shard_sizes is None else np.array(shard_sizes, "<i8").tobytes())
        digest.update(b"|")
    return digest.hexdigest()


def agree_on_sizes(
    sizes: Sequence[list[int] | None], name: str, topology: Topology, *, are_used: bool = False
) -> list[list[int] | None]:
    """Compare the sizes of all sources with those of the first rank that calls this; return what all use.

    A rank that found no sizes.json where the first one did (its server answers 404) uses the first one's. No
    rank waits for a later one.

    Args:
        sizes: what this rank found.
        name: of what is compared, the same on all ranks.
        topology: of this rank.
        are_used: this rank has used its sizes already, so it can't use others.

    Raises:
        OrderDiverged: the first rank found others, or none where this rank found some.
        RankFailed: the first rank has ended.
    """
    counts = ", ".join(
        "none" if shard_sizes is None else f"{len(shard_sizes)} shards, {sum(shard_sizes):,} samples"
        for shard_sizes in sizes
    )
    summary = f"rank {topology.rank} found {counts} ({sizes_digest(sizes)})"
    first, details = first_with_details(name, summary, lambda: json.dumps(sizes), topology.world_size)
    if first.rpartition(" found ")[2] == summary.rpartition(" found ")[2]:
        return [*sizes]
    lacks_some = None in sizes and not are_used
    shared: list[list[int] | None] = json.loads(details()) if lacks_some else [None] * len(sizes)
    if any(ours not in (None, theirs) for ours, theirs in zip(sizes, shared, strict=True)) or not lacks_some:
        raise OrderDiverged(
            f"the ranks found different sizes.json files, which decide how long an epoch is and how samples "
            f"are divided among them: {first}, {summary}. All nodes have to see the same file, or none"
        )
    logger.warning("%s, and uses the numbers of samples that %s", summary, first)
    return shared


def _url_beside(shard: str) -> str:
    """The URL of the sizes.json in a shard's folder."""
    if urls.is_local(shard):
        return str(urls.local_path(shard).parent / "sizes.json")
    return f"{shard.partition('?')[0].rpartition('/')[0]}/sizes.json"


def _read(url: str, storage_options: dict[str, Any] | None, strict: bool) -> dict[str, Any]:
    """The content of a sizes.json; empty if there is none, or if it isn't one."""
    try:
        text = urls.local_path(url).read_bytes() if urls.is_local(url) else _fetch(url, storage_options)
        sizes = json.loads(text)
        if not isinstance(sizes, dict):
            raise ValueError(f"a {type(sizes).__name__}")  # noqa: TRY004
    except (FileNotFoundError, OriginNotFound):
        return {}
    except OriginDenied as exc:
        # Some stores answer "denied" for a missing object.
        if strict:
            raise OriginDenied(f"{exc}{_STRICT}") from exc
        return {}
    except (ValueError, RecursionError) as exc:
        problem = f"{urls.redact(url)} is not a JSON object ({exc})"
        if strict:
            raise DataError(f"{problem}{_STRICT}") from exc
        logger.warning("%s: the number of samples is unknown", problem)
        return {}
    return sizes


def _fetch(url: str, storage_options: dict[str, Any] | None) -> bytes:
    content = bytearray()
    stream = open_origin(url, storage_options).open()
    try:
        for chunk in stream.chunks():
            content += chunk
            if len(content) > _LIMIT_BYTES:
                raise ValueError(f"more than {_LIMIT_BYTES:,} bytes")
    finally:
        stream.close()
    return bytes(content)
