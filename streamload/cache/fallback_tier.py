"""The fallback tier: a small tier in memory for shards while the tier on disk fails (full, read-only, gone).

All processes of a node that use one tier share one fallback tier, whose path is derived from the tier's. The
last of them deletes it; if all of them were killed, the next run does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
from pathlib import Path

import xxhash

from streamload.cache import memory
from streamload.cache.locks import FileLock
from streamload.cache.tier import Tier
from streamload.metrics import Counts
from streamload.options import FreeDisk

_MEMORY = memory.PLACE
_SHARE = 4
"""It may take a quarter of the free memory of machine and container."""
_NO_FLOOR = FreeDisk(size_bytes=0)  # its limit, a share of what is free, leaves enough
_LEAST_BYTES = 1 << 20
"""The smallest fallback tier of any use."""


class FallbackTier:
    """The fallback tier of a tier, made when it is first needed. Thread-safe.

    Args:
        root: of the tier that it replaces.
        counts: of that tier.
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
    if fallback_tier is None or not _is_ours(fallback_tier):
        return
    with contextlib.suppress(OSError):
        lock = FileLock.acquire(fallback_tier / "users")
        if lock is not None:
            with contextlib.closing(lock):
                shutil.rmtree(fallback_tier, ignore_errors=True)


def place(root: Path) -> Path | None:
    """The directory of a tier's fallback tier; None if the tier is in memory itself."""
    if not _MEMORY.is_dir() or root.is_relative_to(_MEMORY):
        return None
    return _MEMORY / f"streamload-{os.geteuid()}-{xxhash.xxh3_64_hexdigest(os.fsencode(root))}"


def _is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _limit_bytes() -> int:
    """Share of the memory that the fallback tier may take: the training needs memory, too."""
    return memory.free_memory(_MEMORY).free_bytes // _SHARE
