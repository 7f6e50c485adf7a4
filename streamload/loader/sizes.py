"""The number of samples in each shard: from the sizes.json files beside the shards, or estimated."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from streamload import limits, urls
from streamload.errors import DataError, OrderDiverged, OriginDenied, OriginNotFound, StreamloadError
from streamload.loader.options import LoaderOptions
from streamload.origins.origin import OriginOptions, open_origin
from streamload.ranks.distributed import can_compare, first_value, first_with_details
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


class ShardSizes:
    """The samples of each shard of a loader's sources, read once; ranks that are joined agree on them.

    Args:
        options: of the loader.
        digest: makes a digest of its data.

    Attributes:
        are_used: whether weights of sources were multiplied by them.
    """

    def __init__(self, options: LoaderOptions, digest: Callable[[], str]):
        self._options, self._digest = options, digest
        self._sizes: list[list[int] | None] | None = None
        self._are_agreed = False  # with the other ranks
        self.are_used = False
        self._units: list[int] | None = None

    def read(self, topology: Topology, groups: int) -> list[list[int] | None]:
        """The samples of each shard of each source, by sizes.json.

        Joined ranks agree on what they found. Others can't, so with more than one group an unclear answer is
        an error: no node may miss a file.

        Args:
            topology: of this rank.
            groups: of the run.

        Raises:
            OrderDiverged: another rank found other sizes.
        """
        options, is_joined = self._options, can_compare(topology.world_size)
        if self._sizes is None:
            strict = groups > 1 and not is_joined
            storage = options.storage_options
            self._sizes = [read_sizes(source.urls, storage, strict) for source in options.sources]
        if is_joined and not self._are_agreed:
            name = f"sizes {self._digest()} {options.seed} {options.train}"
            self._sizes = agree_on_sizes(self._sizes, name, topology, are_used=self.are_used)
            self._are_agreed = True
        return self._sizes

    def units(self, topology: Topology, groups: int) -> list[int]:
        """The units that upsampling factors multiply: samples of each source, listed or estimated; or shards.

        OpenCLIP draws shards by their factors, so that each sample comes in proportion to its factor. Ranks
        that nothing joins don't estimate: a server that fails one of them would give it other shares.

        Args:
            topology: of this rank.
            groups: of the run.
        """
        if self._units is None:
            self._units, self.are_used = self._find_units(topology, groups), True
        return self._units

    def _find_units(self, topology: Topology, groups: int) -> list[int]:
        sources, sizes = self._options.sources, self.read(topology, groups)
        if all(sizes) or len(sources) == 1:
            return [sum(shard_sizes or (1,)) for shard_sizes in sizes]
        storage, world_size = self._options.storage_options, topology.world_size
        may_estimate = world_size == 1 or can_compare(world_size)
        samples = [
            sum(counts) if counts else estimate_samples(source.urls, storage) if may_estimate else None
            for counts, source in zip(sizes, sources, strict=True)
        ]
        units = [count for count in samples if count]
        if len(units) < len(sources):
            units = [len(source.urls) for source in sources]
        name = f"factors {self._options.urls.fingerprint()} {self._options.seed}"
        agreed: list[int] = json.loads(first_value(name, json.dumps(units), world_size))
        if topology.rank == 0:
            _log_units([source.name for source in sources], samples, agreed)
        return agreed


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


def _log_units(names: Sequence[str], samples: Sequence[int | None], units: Sequence[int]) -> None:
    """Log what upsampling factors are multiplied by where there is no sizes.json."""
    advice = "put a sizes.json beside the shards ({shard name: samples}) for exact shares"
    unknown = [name for name, count in zip(names, samples, strict=True) if not count]
    if unknown:
        logger.warning(
            "upsampling factors are multiplied by shards, as the number of samples of source %s is unknown: "
            "OpenCLIP's shares only if all shards have equally many. Otherwise %s, or mix Sources",
            *(", ".join(unknown), advice),
        )
        return
    counts = ", ".join(f"{count:,} in source {name}" for name, count in zip(names, units, strict=True))
    logger.info("upsampling factors are multiplied by about these samples: %s; %s", counts, advice)
