"""How much a tier may take, and what goes when it takes more: its limit, and a floor of free disk (step F).

The limit stands in `tier.json`, for all processes; it is read again at each decision, so that running ones
follow a new one. Which shards go is the ledger's rule; every decision is made under the tier's lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, Protocol

from streamload.cache import ledger, runs
from streamload.cache.directory import (
    BLOCK_BYTES,
    Directory,
    blocks_bytes,
    bytes_below,
    is_unread,
    write_whole,
)
from streamload.cache.ledger import HeldShard
from streamload.cache.locks import FileLock, exclusive
from streamload.errors import CacheError, CacheFull
from streamload.settings import Eviction, FreeDisk

logger = logging.getLogger("streamload")

FORMAT = 1
TEND_SECONDS = 2.0
_EVICTION_ROUNDS = 4
LAST_BLOCKS_BYTES = 4 * BLOCK_BYTES
"""What a part takes beyond its bytes: its files end within blocks, and one notes what is reserved."""


class DiskUsage(Protocol):
    """What `shutil.disk_usage` says of a disk, in bytes."""

    @property
    def total(self) -> int:
        """Its size."""
        ...

    @property
    def free(self) -> int:
        """What of it may still be written by this user."""
        ...


class _Contents(NamedTuple):
    """What takes room in a tier, at a moment when the lock is held."""

    held: list[HeldShard]
    used_bytes: int
    """Of all of it, what is being deleted included."""
    unread: list[Path]
    """What is being deleted and read by nobody any more."""
    unread_bytes: int


class Room:
    """The room of one tier, as one process sees it. Thread-safe and process-safe.

    Args:
        directory: whose room it is.
        limit_bytes: from now on, for all who use the tier; None: the limit that it has.
        free_disk: what this process leaves free on the disk, whatever the limit says.
        eviction: by which rule this process makes room.
        disk_usage: says how much of a path's disk is free.
        tend_seconds: how often `tend` looks.

    Raises:
        CacheError: the tier has no limit yet and none is given, or its record can't be read.
    """

    def __init__(
        self,
        directory: Directory,
        limit_bytes: int | None,
        *,
        free_disk: FreeDisk,
        eviction: Eviction,
        disk_usage: Callable[[Path], DiskUsage],
        tend_seconds: float,
    ):
        self._directory = directory
        self._lock = directory.root / "lock"
        self._record = directory.root / "tier.json"
        self._free_disk = free_disk
        self._eviction: Eviction = eviction
        self._disk_usage = disk_usage
        self._tending = threading.Lock()
        self._tend_seconds = tend_seconds
        self._tended_at = time.monotonic()
        self._within_bytes = math.inf  # the lowest limit that the tier is known to keep to
        self.limit_bytes = self._settle_limit(limit_bytes)

    @property
    def allowed_bytes(self) -> int:
        """The most that the tier may take now: its limit, or less where the disk is short."""
        return self._allowed_bytes(self._directory.used_bytes)

    @property
    def bound(self) -> str:
        """In words, what it is that the tier can't take more than."""
        allowed = self.allowed_bytes
        if allowed < self.limit_bytes:
            return f"what the disk leaves to it ({allowed:,} bytes, with {self._free_disk} kept free)"
        return f"its limit of {self.limit_bytes:,} bytes"

    def set_limit(self, limit_bytes: int) -> None:
        """Give the tier another limit, which all who use it follow."""
        self.limit_bytes = self._settle_limit(limit_bytes)

    def reserve(self, part: Path, size_bytes: int, wait: float) -> bool:
        """Make room for a part, evicting what the live runs need latest.

        Args:
            part: whose room it is; its reservation becomes `size_bytes`.
            size_bytes: all that will be written into the part.
            wait: how many shard visits away its use is: only shards that are needed later go for it.

        Returns:
            False if not enough may go now: try again later.

        Raises:
            CacheFull: it doesn't fit even into the empty tier.
        """
        taken_bytes = blocks_bytes(size_bytes) + LAST_BLOCKS_BYTES
        self._follow_limit()
        if taken_bytes > self.limit_bytes:
            raise CacheFull(
                f"a shard takes {taken_bytes:,} bytes in the cache, whose limit is {self.limit_bytes:,}: "
                f"raise cache_size (STREAMLOAD_CACHE_SIZE)"
            )
        for _ in range(_EVICTION_ROUNDS):
            try:
                granted, leaving = self._decide(part, taken_bytes, wait)
            except OSError as exc:
                if not is_no_space(exc) or not self.make_way(taken_bytes, wait):
                    raise
                continue
            self._delete(leaving)
            if granted is not None:
                return granted
        return False

    def make_way(self, size_bytes: int, wait: float) -> bool:
        """Evict for a write that found the disk (or the user's quota) full, which no budget had foreseen.

        Args:
            size_bytes: how much to evict, at most by a shard more.
            wait: only shards that are needed later than this go.

        Returns:
            Whether anything went, so that another attempt is worth it.
        """
        with exclusive(self._lock):
            found = self._contents()
            leaving = found.unread + self._push_out(self._giving_way(found.held, size_bytes, wait))
        self._delete(leaving)
        return bool(leaving)

    def tend(self) -> None:
        """Keep to the limit and to the floor of free disk when nobody reserves. Call it often.

        It looks every `tend_seconds`, at little cost where all is well. What is open stays in any case.
        """
        if time.monotonic() - self._tended_at < self._tend_seconds or not self._tending.acquire(
            blocking=False
        ):
            return
        try:
            self._tended_at = time.monotonic()
            with contextlib.suppress(OSError):  # whoever fills will say what is wrong with the tier
                self._follow_limit()
                if not self._is_surely_small() and not self._shrink():
                    return
                self._within_bytes = self.limit_bytes
        finally:
            self._tending.release()

    def excess(
        self, limit_bytes: int, may_go: Callable[[HeldShard], bool], without: Collection[Path]
    ) -> list[HeldShard]:
        """What would have to go for the tier to keep to a limit, as far as it may; nothing is changed.

        Args:
            limit_bytes: which limit.
            may_go: whether nobody uses it.
            without: what is taken for gone already.
        """
        with exclusive(self._lock):
            found = self._contents(without)
            return self._giving_way(found.held, found.used_bytes - limit_bytes, may_go=may_go)

    def _shrink(self) -> bool:
        """Evict what is beyond the limit and what the floor of free disk asks for; whether it was enough."""
        with exclusive(self._lock):
            self._follow_limit()
            found = self._contents()
            excess = found.used_bytes - self._allowed_bytes(found.used_bytes)
            if excess <= 0:
                return True
            chosen = self._giving_way(found.held, excess - found.unread_bytes)
            leaving = found.unread + self._push_out(chosen)
        if chosen:
            logger.info(
                "cache %s: %d shards made way, %d bytes too many",
                *(self._directory.root, len(chosen), excess),
            )
        self._delete(leaving)
        return found.unread_bytes + sum(shard.size_bytes for shard in chosen) >= excess

    def _decide(self, part: Path, size_bytes: int, wait: float) -> tuple[bool | None, list[Path]]:
        """Note the reservation (True), refuse it (False), or say what has to be deleted first (None)."""
        with exclusive(self._lock):
            found = self._contents()
            own = [shard for shard in found.held if shard.kind == "parts" and shard.path == part]
            mine = sum(shard.size_bytes for shard in own)
            excess = found.used_bytes - mine + size_bytes - self._allowed_bytes(found.used_bytes)
            if excess <= 0:
                write_whole(part / "reserved", str(size_bytes))
                return True, []
            others = [shard for shard in found.held if shard not in own]
            chosen = ledger.victims(
                others,
                self._waits(others),
                newcomer_wait=wait,
                excess_bytes=excess - found.unread_bytes,
                may_go=_is_closed,
                eviction=self._eviction,
            )
            return (False, []) if chosen is None else (None, found.unread + self._push_out(chosen))

    def _contents(self, without: Collection[Path] = ()) -> _Contents:
        """Under the lock."""
        held = [shard for shard in self._directory.shards() if not without or shard.path not in without]
        in_trash = [path for path in self._directory.own("trash") if path not in without]
        used_bytes = sum(shard.size_bytes for shard in held) + sum(map(bytes_below, in_trash))
        unread = [path for path in in_trash if is_unread(path)]
        return _Contents(held, used_bytes, unread, sum(map(bytes_below, unread)))

    def _giving_way(
        self,
        held: list[HeldShard],
        excess_bytes: int,
        wait: float = -1.0,
        may_go: Callable[[HeldShard], bool] | None = None,
    ) -> list[HeldShard]:
        """Under the lock: what goes, by the ledger's rule; maybe less than was asked for."""
        return ledger.giving_way(
            held,
            self._waits(held),
            newcomer_wait=wait,
            excess_bytes=excess_bytes,
            may_go=may_go or _is_closed,
            eviction=self._eviction,
        )

    def _waits(self, held: list[HeldShard]) -> dict[str, float]:
        return runs.waits(self._directory.root / "runs", sorted({shard.digest for shard in held}))

    def _push_out(self, chosen: list[HeldShard]) -> list[Path]:
        """Under the lock: put out of sight what goes; where it is to be deleted."""
        self._directory.counts.add("shards_evicted", len(chosen))
        leaving = []
        for shard in chosen:
            with contextlib.suppress(FileNotFoundError):  # whoever filled it has just taken it away
                leaving.append(self._directory.out_of_sight(shard.path))
        return leaving

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            self._directory.delete(path)

    def _allowed_bytes(self, used_bytes: int) -> int:
        # In this order: what is written in between is counted twice, and not as free and written at once.
        stored = used_bytes - self._directory.unwritten_bytes
        disk = self._disk_usage(self._directory.root)
        floor = self._free_disk.floor_bytes(disk.total, disk.free + stored)
        return ledger.allowed_bytes(self.limit_bytes, stored, disk.free, floor)

    def _is_surely_small(self) -> bool:
        """Whether it is certain that nothing has to go, without a look at every shard."""
        unwritten_bytes = self._directory.unwritten_bytes  # in this order, as above
        disk = self._disk_usage(self._directory.root)
        floor = self._free_disk.floor_bytes(disk.total, disk.total)
        return self.limit_bytes >= self._within_bytes and disk.free - unwritten_bytes >= floor

    def _follow_limit(self) -> None:
        """Take up the limit that another run may have given to the tier."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self.limit_bytes = int(json.loads(self._record.read_text())["limit_bytes"])

    def _settle_limit(self, limit_bytes: int | None) -> int:
        if self._record.exists() and not self._record.is_file():
            raise CacheError(f"{self._record} is not a regular file: remove it, or choose another directory")
        with exclusive(self._lock):
            known = self._known_limit()
            limit = known if limit_bytes is None else limit_bytes
            if limit is None:
                raise CacheError(f"{self._directory.root} is a new cache: give it a limit")
            if limit != known:
                if known is not None:
                    logger.info(
                        "cache %s: its limit is %d bytes now, for all who use it; it was %d",
                        *(self._directory.root, limit, known),
                    )
                write_whole(self._record, json.dumps({"format": FORMAT, "limit_bytes": limit}))
            return limit

    def _known_limit(self) -> int | None:
        """The limit that the tier has; None of a new one."""
        try:
            known = json.loads(self._record.read_text())
            if known["format"] != FORMAT:
                raise CacheError(
                    f"{self._directory.root} is a cache of format {known['format']}, this streamload writes "
                    f"{FORMAT}: choose another directory, or clear it"
                )
            return int(known["limit_bytes"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as exc:
            raise CacheError(f"{self._record} is not a record of a streamload cache: {exc}") from exc


def is_no_space(error: OSError) -> bool:
    """Whether the disk, or what a user may have of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_closed(shard: HeldShard) -> bool:
    """Whether nobody reads it (fills it, if it is a part), so that it may go."""
    lock = FileLock.acquire(shard.path / ("index" if shard.kind == "parts" else "names"))
    if lock is None:
        return False
    lock.close()
    return True
