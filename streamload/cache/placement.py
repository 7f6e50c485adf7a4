"""On disk or in memory: the tier that a run reads from (`cache=`), one for all of a node that read the same.

The tier in memory is a tier like any other, in a tmpfs. With "auto" the data goes there if it is known to
fit, or if there is no disk; who begins first decides for all (agreement.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamload.cache import demand, memory
from streamload.cache.agreement import Agreement, Answer
from streamload.cache.directory import refuse_what_is_not_ours
from streamload.cache.locks import exclusive
from streamload.cache.shard import Shard, fingerprint, spread
from streamload.cache.tier import Tier, open_tier
from streamload.errors import CacheError, OriginError
from streamload.metrics import format_bytes
from streamload.options import DEFAULT_FREE_DISK, FreeDisk, Settings, file_system
from streamload.origins.origin import OriginOptions, open_origin

logger = logging.getLogger("streamload")

Ask = Callable[[Shard], int | None]
"""A shard → its size in bytes, by its origin; None where that doesn't know."""

_LEAST_MEMORY_BYTES = 64 << 20
_LEAST_DISK_BYTES = 1_000_000_000
_INDEX_SHARE = 64
_INDEX_BYTES = 32 << 10
_SHARDS_ASKED = 16
_MARGIN = 1.1
"""By so much the data may be larger than the shards whose size was asked let expect."""
_MOST_SHARE = 0.9
"""Of what memory is free a tier is given no more than this, whatever is asked for."""


@dataclass(slots=True)
class Placed:
    """A run's tier, and where it is. `close()` when the run is over: then another may decide anew."""

    tier: Tier
    answer: Answer
    free_disk: FreeDisk
    """What stays free where it is."""
    agreement: Agreement | None = None

    def close(self) -> None:
        """Go by the answer no more; once is enough."""
        if self.agreement is not None:
            self.agreement.close()


def place_tier(
    settings: Settings, shards: Sequence[Shard], storage_options: dict[str, Any] | None, nodes: int = 1
) -> Placed:
    """Open the tier of a run where `settings.cache` says; log where that is, and why.

    Args:
        settings: what was asked for.
        shards: all that the run reads.
        storage_options: for their origins, which under "auto" some are asked for their sizes.
        nodes: among which the shards are dealt.

    Raises:
        CacheError: the directory can't be used, or isn't ours; or memory was asked for, of which there is too
            little.
    """
    agreement = None
    if settings.cache == "auto":
        agreement = agreement_on(settings, shards)
        ask = _asker(storage_options)
        answer = agreement.join(lambda: decide(settings, shards, ask, nodes))
    else:
        answer = Answer(settings.cache, settings.sources["cache"])
    try:
        tier = open_memory(settings) if answer.where == "memory" else _bounded(open_tier(settings), settings)
    except BaseException:
        if agreement is not None:
            agreement.close()
        raise
    place = "in memory" if answer.where == "memory" else "on disk"
    logger.info("cache %s at %s (%s)", place, tier.root, answer.why)
    free_disk = DEFAULT_FREE_DISK if answer.where == "memory" else settings.free_disk
    return Placed(tier, answer, free_disk, agreement)


def agreement_on(settings: Settings, shards: Sequence[Shard]) -> Agreement:
    """What all go by that read the same shards by the same settings."""
    return Agreement(memory_root(settings), [str(settings.cache_dir), fingerprint(shards)])


def decide(settings: Settings, shards: Sequence[Shard], ask: Ask, nodes: int = 1) -> Answer:
    """What "auto" comes to now. Of a long list only some shards are looked at, and taken for the others."""
    try:
        budget_bytes = memory_budget(settings)
    except CacheError as exc:
        return Answer("disk", f"auto: {exc}")
    if memory_root(settings) == settings.cache_dir:
        return Answer("memory", "auto: cache_dir is in memory")
    no_disk = why_no_disk(settings.cache_dir)
    if no_disk:
        return Answer("memory", f"auto: {no_disk}")
    looked_at = spread(shards)
    digests = {digest for shard in looked_at for digest in shard.digests}
    on_disk, in_memory = _published(settings.cache_dir), _published(memory_root(settings))
    found = len(digests & on_disk.keys())
    if found > len(digests & in_memory.keys()):
        return Answer("disk", f"auto: {found} of {len(looked_at)} shards are there")
    looked_at_bytes = _data_bytes(looked_at, {**on_disk, **in_memory}, ask)
    if looked_at_bytes is None:
        return Answer("disk", "auto: the size of the data isn't known")
    data_bytes = looked_at_bytes * len(shards) // len(looked_at)
    free_bytes = budget_bytes - _needed_by_others(memory_root(settings), digests)
    sizes = (
        f"{format_bytes(data_bytes // nodes)} of data, {format_bytes(max(0, free_bytes))} of memory for it"
    )
    return Answer("memory" if data_bytes <= free_bytes * nodes else "disk", f"auto: {sizes}")


def memory_root(settings: Settings) -> Path:
    """Where the tier in memory is: `cache_dir` if that is in memory, else one for each user in /dev/shm."""
    if settings.sources["cache_dir"] != "default" and file_system(settings.cache_dir).is_memory:
        return settings.cache_dir
    return memory.PLACE / f"streamload-{os.geteuid()}"


def open_memory(settings: Settings) -> Tier:
    """The tier in memory.

    Raises:
        CacheError: the directory can't be used, or isn't ours; or there is too little memory.
    """
    limit_bytes = memory_budget(settings)
    root = memory_root(settings)
    if _existing(root) is not None:
        Tier(root).sweep()
    return Tier(root, limit_bytes, free_disk=DEFAULT_FREE_DISK, eviction=settings.eviction)


def memory_budget(settings: Settings) -> int:
    """How many bytes the tier in memory may hold.

    That is what was asked for, or the limit that the tier has where nothing was, but never more than nine
    tenths of what is free or its own.

    Raises:
        CacheError: it is too little to be of use; says of what.
    """
    root = memory_root(settings)
    refuse_what_is_not_ours(root)
    try:
        tier = _existing(root)
        room = memory.free_memory(root)
    except OSError as exc:
        raise CacheError(f"{root} can't be used: {exc.strerror or exc}") from exc
    held_bytes = tier.used_bytes if tier is not None else 0
    asked_bytes = settings.memory_size.limit_bytes(room.free_bytes, held_bytes)
    if tier is not None and settings.sources["memory_size"] == "default":
        asked_bytes = tier.limit_bytes
    budget_bytes = min(asked_bytes, int((room.free_bytes + held_bytes) * _MOST_SHARE))
    least_bytes = min(settings.memory_size.size_bytes or _LEAST_MEMORY_BYTES, _LEAST_MEMORY_BYTES)
    if budget_bytes < least_bytes:
        raise CacheError(
            f"there is too little memory for a cache at {root}: {format_bytes(budget_bytes)}, as "
            f"{room.bound} has {format_bytes(room.free_bytes)} free and memory_size is "
            f"{settings.memory_size}; give the container more (docker run --shm-size=8g), name a larger "
            f'tmpfs by cache_dir=, or keep the cache on disk with cache="disk"'
        )
    return budget_bytes


def why_no_disk(directory: Path) -> str:
    """Return the reason why the disk is unusable, or "". Probes it with a temporary directory."""
    refused = why_not_writable(directory)
    if refused:
        return refused
    tier = _existing(directory)
    free_bytes = shutil.disk_usage(nearest(directory)).free + (tier.used_bytes if tier is not None else 0)
    return f"only {format_bytes(free_bytes)} free at {directory}" if free_bytes < _LEAST_DISK_BYTES else ""


def why_not_writable(directory: Path) -> str:
    """Why nothing can be stored there, or "". Tries it, and takes away all that it made."""
    there = nearest(directory)
    if not there.is_dir():
        return f"{there} is not a directory"
    try:
        refuse_what_is_not_ours(directory)
        _existing(directory)
    except CacheError as exc:
        return str(exc)
    probe = there / f".streamload-probe-{os.getpid()}"
    try:
        probe.mkdir(mode=0o700)
        (probe / "file").write_bytes(bytes(4096))
    except OSError as exc:
        return f"{there} can't be written: {exc.strerror}"
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(probe)
    return ""


def nearest(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    return next(path for path in (directory, *directory.absolute().parents) if path.exists())


def _bounded(tier: Tier, settings: Settings) -> Tier:
    """A tier that is taken for one on disk, and whose directory is in memory, isn't given more of it."""
    if not file_system(tier.root).is_memory:
        return tier
    most_bytes = int((memory.available().free_bytes + tier.used_bytes) * _MOST_SHARE)
    if tier.limit_bytes <= most_bytes:
        return tier
    return Tier(tier.root, most_bytes, free_disk=settings.free_disk, eviction=settings.eviction)


def _existing(root: Path) -> Tier | None:
    return Tier(root) if (root / "tier.json").is_file() else None


def _published(root: Path) -> dict[str, int]:
    """The whole shards of a tier and what they take; none where there is no tier."""
    tier = _existing(root)
    held = tier.shards() if tier is not None else ()
    return {shard.digest: shard.size_bytes for shard in held if shard.kind == "shards"}


def _needed_by_others(root: Path, digests: set[str]) -> int:
    """What live runs will read from a tier beside these shards."""
    tier = _existing(root)
    if tier is None:
        return 0
    others = [shard for shard in tier.shards() if shard.digest not in digests]
    with exclusive(tier.root / "lock"):
        next_uses = demand.next_uses(tier.root / "runs", [shard.digest for shard in others])
    return sum(shard.size_bytes for shard in others if shard.digest in next_uses)


def _data_bytes(shards: Sequence[Shard], held: dict[str, int], ask: Ask) -> int | None:
    """What the shards would take in a tier; None where too little of that is known.

    Args:
        shards: of local ones only the index is kept.
        held: by digest, what those take that are in a tier.
        ask: of the others some are asked, spread over the list; the rest is taken to be as large.
    """
    different = {shard.digest: shard for shard in shards}
    held_as = {digest: set(shard.digests) & held.keys() for digest, shard in different.items()}
    known = [held[name] for names in held_as.values() for name in names]
    others = [shard for digest, shard in different.items() if not held_as[digest]]
    far = [shard for shard in others if shard.local is None]
    near_bytes = (len(others) - len(far)) * _INDEX_BYTES
    asked = far[:: -(-len(far) // _SHARDS_ASKED) or 1]
    with ThreadPoolExecutor(max(1, len(asked))) as pool:
        answers = list(pool.map(ask, asked))
    sizes = [_taken_bytes(size) for size in answers if size is not None]
    if len(sizes) < len(asked):
        return None
    rest = len(far) - len(asked)
    rest_bytes = _MARGIN * rest * sum(sizes) / len(sizes) if rest else 0.0
    return near_bytes + sum(known) + sum(sizes) + int(rest_bytes)


def _taken_bytes(size_bytes: int) -> int:
    return size_bytes + size_bytes // _INDEX_SHARE + _INDEX_BYTES


def _asker(storage_options: dict[str, Any] | None) -> Ask:
    options = OriginOptions(connect_seconds=5.0, stall_seconds=5.0, attempts=2)

    def ask(shard: Shard) -> int | None:
        try:
            return open_origin(shard.url, storage_options, options).version().size
        except OriginError:
            return None  # whoever reads it will say what is wrong

    return ask
