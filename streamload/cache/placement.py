"""On disk or in memory: where a run's tier is (`cache=`), one for all processes that read the same shards.

A tier in memory is a tier like any other, in a tmpfs. With "auto" it is chosen if the data is known to fit,
or if there is no usable disk. What fits now may not fit a second later, when the next rank asks: so the first
process writes the decision into a file and holds a shared lock on it, as do all that follow it; the last one
deletes the file, and the next run decides again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import xxhash

from streamload import limits
from streamload.cache import demand, memory
from streamload.cache.directory import check_owner
from streamload.cache.locks import FileLock, exclusive, remove_if_unlocked
from streamload.cache.shard import Shard, fingerprint, spread
from streamload.cache.tier import Choice, Placed, Tier, memory_root, placed_on_disk
from streamload.errors import CacheError, OriginError, StreamloadError
from streamload.metrics import format_bytes
from streamload.options import DEFAULT_FREE_DISK, Settings, nearest
from streamload.origins.origin import OriginOptions, open_origin

logger = logging.getLogger("streamload")

T = TypeVar("T")
SizeOf = Callable[[Shard], int | None]
"""The size of a shard in bytes, from its origin; None if it doesn't tell."""

_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.02
_LEAST_MEMORY_BYTES = 64 << 20
_LEAST_DISK_BYTES = 1_000_000_000
_INDEX_SHARE = 64
_INDEX_BYTES = 32 << 10
_SHARDS_ASKED = 16
_MARGIN = 1.1
"""Factor by which the data may exceed the estimate from the shards whose size was asked."""


def place_tier(settings: Settings, shards: Sequence[Shard], nodes: int = 1) -> Placed:
    """Open the tier of a run where `settings.cache` says; log where that is, and why.

    Args:
        nodes: that share the shards.

    Raises:
        CacheError: the directory can't be used, or others can write there; or there is too little memory for
            cache="memory".
    """
    agreement, answer = None, Choice(settings.cache, settings.sources["cache"])
    if settings.cache == "auto":
        agreement = agreement_on(settings, shards)
        ask = origin_size
        answer = agreement.join(lambda: decide(settings, shards, ask, nodes))
    try:
        if answer.chosen == "disk":
            placed = placed_on_disk(settings, answer.why)
        else:
            placed = Placed(open_memory(settings), answer, DEFAULT_FREE_DISK)
            logger.info("cache in memory at %s (%s)", placed.tier.root, answer.why)
    except BaseException:
        if agreement is not None:
            agreement.close()
        raise
    if agreement is not None:
        placed.on_close.append(agreement.close)
    return placed


def agreement_on(settings: Settings, shards: Sequence[Shard]) -> SharedDecision:
    """The agreement of all processes that read the same shards with the same settings."""
    return SharedDecision(memory_root(settings), [str(settings.cache_dir), fingerprint(shards)])


def decide(settings: Settings, shards: Sequence[Shard], ask: SizeOf, nodes: int = 1) -> Choice:
    """Choice of "auto" now. Of a long list some shards stand for all."""
    try:
        budget_bytes = memory_budget(settings)
    except CacheError as exc:
        return Choice("disk", f"auto: {exc}")
    if memory_root(settings) == settings.cache_dir:
        return Choice("memory", "auto: cache_dir is in memory")
    no_disk = why_no_disk(settings.cache_dir)
    if no_disk:
        return Choice("memory", f"auto: {no_disk}")
    probed = spread(shards)
    digests = {digest for shard in probed for digest in shard.digests}
    on_disk, in_memory = _published(settings.cache_dir), _published(memory_root(settings))
    count_on_disk = len(digests & on_disk.keys())
    if count_on_disk > len(digests & in_memory.keys()):
        return Choice("disk", f"auto: {count_on_disk} of {len(probed)} shards are on disk")
    probed_bytes = _data_bytes(probed, {**on_disk, **in_memory}, ask)
    if probed_bytes is None:
        return Choice("disk", "auto: the size of the data is unknown")
    data_bytes = probed_bytes * len(shards) // len(probed)
    free_bytes = budget_bytes - _needed_by_others(memory_root(settings), digests)
    sizes = (
        f"{format_bytes(data_bytes // nodes)} of data, {format_bytes(max(0, free_bytes))} of memory for it"
    )
    return Choice("memory" if data_bytes <= free_bytes * nodes else "disk", f"auto: {sizes}")


def open_memory(settings: Settings) -> Tier:
    """Open the tier in memory.

    Raises:
        CacheError: the directory can't be used, or others can write there; or there is too little memory.
    """
    limit_bytes = memory_budget(settings)
    root = memory_root(settings)
    if _existing(root) is not None:
        Tier(root).sweep()
    return Tier(root, limit_bytes, free_disk=DEFAULT_FREE_DISK)


def memory_budget(settings: Settings) -> int:
    """Number of bytes that the tier in memory may hold.

    That is what was asked for, by default the limit that the tier has, but at most nine tenths of what is
    free or its own.

    Raises:
        CacheError: it is too little to be of use.
    """
    root = memory_root(settings)
    check_owner(root)
    try:
        tier = _existing(root)
        free = memory.free_memory(root)
    except OSError as exc:
        raise CacheError(f"{root} can't be used: {exc.strerror or exc}") from exc
    held_bytes = tier.used_bytes if tier is not None else 0
    asked_bytes = settings.memory_size.limit_bytes(free.free_bytes, held_bytes)
    if tier is not None and settings.sources["memory_size"] == "default":
        asked_bytes = tier.limit_bytes
    budget_bytes = min(asked_bytes, int((free.free_bytes + held_bytes) * memory.MOST_SHARE))
    least_bytes = min(settings.memory_size.size_bytes or _LEAST_MEMORY_BYTES, _LEAST_MEMORY_BYTES)
    if budget_bytes < least_bytes:
        raise CacheError(
            f"there is too little memory for a cache at {root}: {format_bytes(budget_bytes)}, as "
            f"{free.bound} has {format_bytes(free.free_bytes)} free and memory_size is "
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
    """Return the reason why nothing can be stored there, or "". Probes with a temporary directory."""
    there = nearest(directory)
    if not there.is_dir():
        return f"{there} is not a directory"
    try:
        check_owner(directory)
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


def _existing(root: Path) -> Tier | None:
    return Tier(root) if (root / "tier.json").is_file() else None


def _published(root: Path) -> dict[str, int]:
    """The published shards of a tier and their sizes; empty if there is no tier."""
    tier = _existing(root)
    held = tier.shards() if tier is not None else ()
    return {shard.digest: shard.size_bytes for shard in held if shard.kind == "shards"}


def _needed_by_others(root: Path, digests: set[str]) -> int:
    """The size of what live runs will read from a tier, except these shards."""
    tier = _existing(root)
    if tier is None:
        return 0
    other_shards = [shard for shard in tier.shards() if shard.digest not in digests]
    with exclusive(tier.root / "lock"):
        next_uses = demand.next_uses(tier.root / "runs", [shard.digest for shard in other_shards])
    return sum(shard.size_bytes for shard in other_shards if shard.digest in next_uses)


def _data_bytes(shards: Sequence[Shard], held: dict[str, int], ask: SizeOf) -> int | None:
    """The size of the shards in a tier; None if too little is known.

    Args:
        shards: of local ones only the index is kept.
        held: by digest, the sizes of those that are in a tier.
        ask: asks for the sizes of some of the others, spread over the list; the rest is assumed to be as
            large.
    """
    different = {shard.digest: shard for shard in shards}
    held_as = {digest: set(shard.digests) & held.keys() for digest, shard in different.items()}
    held_sizes = [held[name] for names in held_as.values() for name in names]
    absent = [shard for digest, shard in different.items() if not held_as[digest]]
    far = [shard for shard in absent if shard.in_place is None]
    near_bytes = (len(absent) - len(far)) * _INDEX_BYTES
    probes = far[:: -(-len(far) // _SHARDS_ASKED) or 1]
    with limits.Threads(max(1, len(probes)), "streamload-sizes") as pool:
        answers = list(pool.map(ask, probes))
    sizes = [_taken_bytes(size) for size in answers if size is not None]
    if len(sizes) < len(probes):
        return None
    unprobed = len(far) - len(probes)
    rest_bytes = _MARGIN * unprobed * sum(sizes) / len(sizes) if unprobed else 0.0
    return near_bytes + sum(held_sizes) + sum(sizes) + int(rest_bytes)


def _taken_bytes(size_bytes: int) -> int:
    return size_bytes + size_bytes // _INDEX_SHARE + _INDEX_BYTES


def origin_size(shard: Shard) -> int | None:
    """The size of a shard by its origin; None if that gives no quick answer."""
    options = OriginOptions(connect_seconds=5.0, stall_seconds=5.0, attempts=2)
    with contextlib.suppress(OriginError):  # the reader of the shard will report it
        return open_origin(shard.url, shard.storage_options, options).version().size
    return None


class SharedDecision:
    """A decision that all processes that ask the same share, as long as one of them lives.

    Args:
        beside: the decision is kept in a file beside this path.
        names: what identifies the question, in a fixed order.
    """

    def __init__(self, beside: Path, names: Iterable[str]):
        self._beside = beside
        name = f"{beside.name}.{xxhash.xxh3_64_hexdigest(os.fsencode(chr(10).join(names)))}"
        self._path = beside.with_name(name)
        self._lock: FileLock | None = None

    def join(self, decide: Callable[[], Choice]) -> Choice:
        """The decision in force; if there is none, `decide` makes it now."""
        return self.share(
            decide,
            lambda choice: json.dumps(choice._asdict()).encode(),
            lambda path: Choice(**json.loads(path.read_text())),
        )

    def share(self, decide: Callable[[], T], written: Callable[[T], bytes], read: Callable[[Path], T]) -> T:
        """The value in force; if there is none, `decide` makes it now.

        If it can't be written down, or the deciding process makes no progress, this process decides for
        itself.

        Args:
            written: the content of the file of a value.
            read: reads a value from its file.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline and not self._is_foreign():
            try:
                self._write_if_first(lambda: written(decide()))
                self._lock = FileLock.acquire(self._path, shared=True)
                if self._lock is not None and self._lock.is_of(self._path):
                    return read(self._path)
            except StreamloadError:
                raise
            except (OSError, ValueError, TypeError):
                break
            self._release()
            time.sleep(_POLL_SECONDS)
        self._release()
        return decide()

    def close(self) -> None:
        """Release the decision, and delete it if no other process holds it. Idempotent."""
        if self._lock is not None:
            self._release()
            with contextlib.suppress(OSError):
                remove_if_unlocked(self._path)

    def _write_if_first(self, make: Callable[[], bytes]) -> None:
        for other in self._beside.parent.glob(f"{self._beside.name}.{'[0-9a-f]' * 16}"):
            if other != self._path:
                with contextlib.suppress(OSError):
                    remove_if_unlocked(other)  # of a run that was killed
        first = FileLock.acquire(self._path, create=True)
        if first is not None:
            with contextlib.closing(first):
                if first.is_of(self._path):
                    self._path.write_bytes(make())

    def _is_foreign(self) -> bool:
        """True if another user has put something where the decision would be: anybody may write there."""
        with contextlib.suppress(OSError):
            return self._path.lstat().st_uid != os.geteuid()
        return False

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
