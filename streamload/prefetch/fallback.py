"""Ways to store a shard (step F): whole in the tier, index-only, or in the fallback tier.

The fallback tier is a small tier in memory for shards while the tier on disk fails (full, read-only, gone).
All processes of a node that use one tier share one fallback tier, whose path is derived from the tier's. The
last of them deletes it; if all of them were killed, the user's next run does, whichever tier that uses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import xxhash

from streamload.cache import memory
from streamload.cache.budget import part_bytes
from streamload.cache.locks import PATIENCE_SECONDS, FileLock
from streamload.cache.part import index_bytes, reserved_bytes
from streamload.cache.shard import Shard
from streamload.cache.tier import Tier
from streamload.errors import CacheError, CacheFull, LimitReached, is_shortage
from streamload.metrics import Counts
from streamload.options import FreeDisk
from streamload.origins.origin import has_ranges, serves_ranges

logger = logging.getLogger("streamload")

_MOST_FAILURES = 3
"""After this many disk failures all shards go to the fallback tier."""
_MEMORY = memory.PLACE
_SHARE = 4
"""The fallback tier may take a quarter of the free memory of machine and container."""
_NO_FLOOR = FreeDisk(size_bytes=0)  # its limit, a share of what is free, leaves enough
_LEAST_BYTES = 1 << 20
"""The smallest fallback tier of any use."""
_DELETED = ".gone"
"""The suffix of one that is being deleted."""


class FallbackTier:
    """The fallback tier of a tier, made when it is first needed. Thread-safe.

    Args:
        root: of the tier that it replaces.
    """

    def __init__(self, root: Path, counts: Counts):
        self._of = root
        self._counts = counts
        self._change = threading.Lock()
        self._user: FileLock | None = None
        self.tier: Tier | None = None
        """Holds shards; None while nothing is wrong."""

    def open(self) -> Tier | None:
        """Open the fallback tier; None if there is no memory for one."""
        with self._change:
            if self.tier is None:
                with contextlib.suppress(OSError):
                    self.tier = self._make()
            return self.tier

    def beside(self, tier: Tier) -> tuple[Tier, ...]:
        """The tiers that may hold shards: a tier, and the fallback tier once it is open."""
        fallback_tier = self.tier
        return (tier,) if fallback_tier is None else (tier, fallback_tier)

    def close(self) -> None:
        """Stop using it; the last process deletes it. Idempotent."""
        with self._change:
            if self._user is None:
                return
            self._user.close()
            self._user = self.tier = None
            remove_unused(self._of)

    def _make(self) -> Tier | None:
        root = place(self._of)
        if root is None:
            return None
        limit = _limit_bytes()
        if limit < _LEAST_BYTES:
            return None
        while True:
            tier = Tier(root, limit, self._counts, free_disk=_NO_FLOOR)
            self._user = FileLock.acquire(root / "users", shared=True, create=True)
            if self._user is not None and (root / "tier.json").exists():
                return tier
            if self._user is not None:  # another process is deleting the tier: retry
                self._user.close()


def remove_unused(root: Path) -> None:
    """Delete the fallback tier of a tier if no process uses it."""
    fallback_tier = place(root)
    if fallback_tier is not None:
        _remove_if_unused(fallback_tier)


def remove_all_unused() -> None:
    """Delete all fallback tiers of this user that no process uses: those that did were killed."""
    for path in _MEMORY.glob(f"{_prefix()}*"):
        if path.suffix == _DELETED and _is_ours(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            _remove_if_unused(path)


def _remove_if_unused(fallback_tier: Path) -> None:
    if not _is_ours(fallback_tier):
        return
    with contextlib.suppress(OSError):
        lock = FileLock.acquire(fallback_tier / "users")
        if lock is not None:
            with contextlib.closing(lock):
                # Whoever opens it meanwhile makes another one, instead of losing files of this one.
                deleted = fallback_tier.with_name(f"{fallback_tier.name}.{os.getpid()}{_DELETED}")
                shutil.rmtree(fallback_tier.rename(deleted), ignore_errors=True)


def place(root: Path) -> Path | None:
    """The directory of a tier's fallback tier; None if the tier is in memory itself."""
    if not _MEMORY.is_dir() or root.is_relative_to(_MEMORY):
        return None
    return _MEMORY / f"{_prefix()}{xxhash.xxh3_64_hexdigest(os.fsencode(root))}"


def _prefix() -> str:
    return f"streamload-{os.geteuid()}-"


def _is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _limit_bytes() -> int:
    """Share of the memory that the fallback tier may take: the training needs memory, too."""
    return memory.free_memory(_MEMORY).free_bytes // _SHARE


class StorageMode(NamedTuple):
    """Way to store a shard."""

    tier: Tier
    index_only: bool
    """Samples are read from the origin, by range."""


class FallbackPolicy:
    """Decides the storage mode of shards that found no room, or whose tier failed. Thread-safe.

    Args:
        tier: where shards are stored by default.
        fallback_tier: where shards go that the tier can't take.
        index_only: whether shards may be stored index-only, if their origin has ranges.
        by_range: whether all are by default, whose origin has ranges.
    """

    def __init__(
        self, tier: Tier, fallback_tier: FallbackTier | None, *, index_only: bool, by_range: bool = False
    ):
        self._tier = tier
        self._fallback_tier = fallback_tier
        self._allows_index_only = index_only
        self._by_range = by_range
        self._lock = threading.Lock()
        # Guarded by _lock; shards by their digests:
        self._index_only: set[str] = set()
        self._in_fallback: set[str] = set()
        self._refused_since: dict[str, float] = {}
        self._sizes: dict[str, int] = {}  # of refused shards: their origin isn't asked for it again
        self._failures = 0
        self._short_since: dict[str, float] = {}  # of descriptors or memory
        self._has_logged = False

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that may hold shards: the tier, and the fallback tier once there is one."""
        return (self._tier,) if self._fallback_tier is None else self._fallback_tier.beside(self._tier)

    def mode(self, shard: Shard) -> StorageMode:
        """The current storage mode of a shard."""
        with self._lock:
            return self._mode(shard)

    def only(self, needed: Iterable[Shard], requested: Iterable[Shard]) -> None:
        """Return all but the needed shards to the default mode; forget shortages of those not requested."""
        digests = {shard.digest for shard in needed}
        requested_digests = {shard.digest for shard in requested}
        with self._lock:
            self._index_only &= digests
            self._in_fallback &= digests
            for digest in self._short_since.keys() - requested_digests:
                del self._short_since[digest]

    def store_index_only(self, shard: Shard) -> bool:
        """Store a shard index-only; False if its origin has no ranges, or it is already.

        A server without ranges gives all of a shard for each sample: the fallback tier comes before that. Of
        a file that is read in place there is no more than an index.
        """
        if shard.local is not None:
            return False
        if not serves_ranges(shard.url) and self._may_use_fallback(shard):
            return False
        with self._lock:
            is_index_only = shard.digest in self._index_only
            if is_index_only or not self._allows_index_only or not has_ranges(shard.url):
                return False
            self._index_only.add(shard.digest)
            self._refused_since.pop(shard.digest, None)
        return True

    def store_in_fallback(self, shard: Shard, error: Exception | None = None) -> bool:
        """Store a shard in the fallback tier; False if there is none, or it is already.

        Args:
            error: why the tier doesn't take it, if that is known.
        """
        fallback_tier = self._fallback_tier.open() if self._fallback_tier is not None else None
        with self._lock:
            if fallback_tier is None or shard.digest in self._in_fallback:
                return False
            if not self._has_logged:
                self._has_logged = True
                why = error or ("" if serves_ranges(shard.url) else "its origin gives no byte ranges")
                logger.warning(
                    "the cache at %s doesn't take %s%s: such shards are kept in memory at %s, up to %d bytes "
                    "beside the cache's limit",
                    *(self._tier.root, shard.name, f" ({why})" if why else ""),
                    *(fallback_tier.root, fallback_tier.limit_bytes),
                )
            self._failures += error is not None and not isinstance(error, CacheFull)
            self._in_fallback.add(shard.digest)
            self._index_only.discard(shard.digest)
            self._sizes.pop(shard.digest, None)
            self._refused_since.pop(shard.digest, None)
        return True

    def refuse(self, shard: Shard, size_bytes: int = 0) -> None:
        """Note that there is no room for a shard, with its size where known."""
        with self._lock:
            self._refused_since.setdefault(shard.digest, time.monotonic())
            if size_bytes:
                self._sizes[shard.digest] = size_bytes

    def accept(self, shard: Shard) -> None:
        """Note that a shard has room or needs none."""
        with self._lock:
            self._refused_since.pop(shard.digest, None)

    def note(self, shard: Shard, mode: StorageMode, is_refused: bool) -> bool:
        """Note whether a running fill has no room.

        Args:
            mode: the storage mode it is filled in.

        Returns:
            Whether the shard's mode has changed since, so that the fill has to start again.
        """
        with self._lock:
            is_outdated = self._mode(shard) != mode
            if is_refused and not is_outdated:
                self._refused_since.setdefault(shard.digest, time.monotonic())
            else:
                self._refused_since.pop(shard.digest, None)
            return is_outdated

    @property
    def has_refused(self) -> bool:
        """True if there was no room for a shard."""
        with self._lock:
            return bool(self._refused_since)

    def is_refused(self, shard: Shard) -> bool:
        """True if there was no room for a shard."""
        with self._lock:
            return shard.digest in self._refused_since

    def refused_seconds(self, shard: Shard) -> float:
        """Time since there was room for a shard (0: there is)."""
        with self._lock:
            since = self._refused_since.get(shard.digest)
        return 0.0 if since is None else time.monotonic() - since

    def size_bytes(self, shard: Shard) -> int:
        """The size of a refused shard; 0: unknown."""
        with self._lock:
            return self._sizes.get(shard.digest, 0)

    def lacks_bytes(self, shard: Shard) -> int:
        """The least that a refused shard takes in its storage mode; 0: it isn't refused."""
        with self._lock:
            mode = self._mode(shard)
            if shard.digest not in self._refused_since or mode.tier is not self._tier:
                return 0
            size = self._sizes.get(shard.digest, 0)
            return part_bytes(index_bytes(size) if mode.index_only else reserved_bytes(size))

    def may_pass(self, shard: Shard, error: OSError) -> bool:
        """True if an error is a shortage of files or memory that may pass: the disk is all right.

        Counted for each shard: a look at another one, which is there, takes fewer files than this one lacks.
        """
        cause = error.__cause__ if isinstance(error, CacheError) else error
        if not isinstance(cause, OSError) or not is_shortage(cause) or isinstance(cause, LimitReached):
            return False
        with self._lock:
            now_seconds = time.monotonic()
            return now_seconds - self._short_since.setdefault(shard.digest, now_seconds) < PATIENCE_SECONDS

    def went_well(self, shard: Shard) -> None:
        """Note that a shard's shortage has passed."""
        with self._lock:
            self._short_since.pop(shard.digest, None)

    def _may_use_fallback(self, shard: Shard) -> bool:
        """True if there is a fallback tier that hasn't refused a shard."""
        with self._lock:
            is_in_fallback = shard.digest in self._in_fallback
        return (
            not is_in_fallback and self._fallback_tier is not None and self._fallback_tier.open() is not None
        )

    def _mode(self, shard: Shard) -> StorageMode:
        fallback_tier = self._fallback_tier.tier if self._fallback_tier is not None else None
        fails = shard.digest in self._in_fallback or self._failures >= _MOST_FAILURES
        tier = fallback_tier if fallback_tier is not None and fails else self._tier
        by_range = (
            self._by_range and shard.local is None and has_ranges(shard.url) and serves_ranges(shard.url)
        )
        return StorageMode(tier, by_range or shard.digest in self._index_only)
