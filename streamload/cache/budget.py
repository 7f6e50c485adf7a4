"""The byte budget of a tier: its limit, a floor of free disk, reservations and eviction (step F).

The limit is kept in `tier.json` for all processes and read again at each decision, so that running processes
follow a new one. eviction.py chooses what goes; every decision is made under the tier's lock. An upper bound
of the tier's size is stored with that lock (`Usage`), and each grant adds to it: all shards are scanned only
where something may have to be evicted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from streamload.cache import demand, eviction
from streamload.cache.directory import (
    BLOCK_BYTES,
    Directory,
    blocks_bytes,
    bytes_below,
    granted_bytes,
    is_unread,
    write_whole,
)
from streamload.cache.eviction import HeldShard
from streamload.cache.locks import FileLock, Usage, exclusive, usage_of
from streamload.descriptors import Descriptor
from streamload.errors import CacheError, CacheFull
from streamload.options import Eviction, FreeDisk

logger = logging.getLogger("streamload")

FORMAT = 1
ENFORCE_SECONDS = 2.0
_EVICTION_ROUNDS = 5
"""In the first of them shards may only be measured: once in a process, and not under the lock."""
LAST_BLOCKS_BYTES = 4 * BLOCK_BYTES
"""What a part takes beyond its bytes: its files end within blocks, and one notes what is reserved."""


def part_bytes(size_bytes: int) -> int:
    """What a part of this size is given room for."""
    return blocks_bytes(size_bytes) + LAST_BLOCKS_BYTES


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


class Budget:
    """The room of one tier, as one process sees it. Thread-safe and process-safe.

    Args:
        directory: whose room it is.
        limit_bytes: from now on, for all who use the tier; None: the limit that it has.
        free_disk: what this process leaves free on the disk, whatever the limit says.
        eviction: by which rule this process makes room.
        disk_usage: says how much of a path's disk is free.
        enforce_seconds: how often `enforce_limits` looks.

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
        enforce_seconds: float,
    ):
        self._directory = directory
        self._lock = directory.root / "lock"
        self._record = directory.root / "tier.json"
        self._free_disk = free_disk
        self._eviction: Eviction = eviction
        self._disk_usage = disk_usage
        self._enforcing = threading.Lock()
        self._enforce_seconds = enforce_seconds
        self._enforced_at = time.monotonic()
        self.limit_bytes = self._settle_limit(limit_bytes)

    @property
    def used_bytes(self) -> int:
        """No less than the tier takes now, as far as that is noted; else it is counted."""
        noted = self._noted_bytes()
        return self._directory.used_bytes if noted is None else noted

    @property
    def allowed_bytes(self) -> int:
        """The most that the tier may take now: its limit, or less where the disk is short."""
        return self._allowed_bytes(self.used_bytes)

    @property
    def bound(self) -> str:
        """In words, what it is that the tier can't take more than."""
        allowed = self.allowed_bytes
        if allowed < self._for_shards_bytes():
            return f"what the disk leaves to it ({allowed:,} bytes, with {self._free_disk} kept free)"
        return f"its limit of {self.limit_bytes:,} bytes"

    def set_limit(self, limit_bytes: int) -> None:
        """Give the tier another limit, which all who use it follow."""
        self.limit_bytes = self._settle_limit(limit_bytes)

    def reserve(self, part: Path, size_bytes: int, next_use: float) -> bool:
        """Make room for a part, evicting what the live runs need latest.

        Args:
            part: whose room it is; its reservation becomes `size_bytes`.
            size_bytes: all that will be written into the part.
            next_use: how many shard visits away its use is: only shards that are needed later go for it.

        Returns:
            False if not enough may go now: try again later.

        Raises:
            CacheFull: it doesn't fit even into the empty tier.
        """
        taken_bytes = part_bytes(size_bytes)
        self._follow_limit()
        if taken_bytes > self._for_shards_bytes():
            raise CacheFull(
                f"a shard takes {taken_bytes:,} bytes in the cache, whose limit is {self.limit_bytes:,}: "
                f"raise cache_size (STREAMLOAD_CACHE_SIZE)"
            )
        for _ in range(_EVICTION_ROUNDS):
            try:
                granted, leaving = self._decide(part, taken_bytes, next_use)
            except OSError as exc:
                if not is_no_space(exc) or not self.make_way(taken_bytes, next_use):
                    raise
                continue
            self._delete(leaving)
            if granted is not None:
                return granted
            self._directory.look()
        return False

    def make_way(self, size_bytes: int, next_use: float) -> bool:
        """Evict for a write that found the disk (or the user's quota) full, which no budget had foreseen.

        Args:
            size_bytes: how much to evict, at most by a shard more.
            next_use: only shards that are needed later than this go.

        Returns:
            Whether anything went, so that another attempt is worth it.
        """
        self._directory.look()
        with exclusive(self._lock) as usage:
            found = self._contents(usage)
            leaving = found.unread + self._push_out(self._giving_way(found.held, size_bytes, next_use))
        self._delete(leaving)
        return bool(leaving)

    @contextlib.contextmanager
    def leaving(self, part: Path, target: Path) -> Iterator[None]:
        """For the block in which a part becomes `target`, which takes what its files do."""
        with contextlib.ExitStack() as held:
            usage = None
            with contextlib.suppress(OSError):  # then the reservation counts until all is counted again
                usage = held.enter_context(exclusive(self._lock))
            granted = granted_bytes(part)
            yield
            if usage is not None and usage.at_most_bytes is not None:
                usage.note(usage.at_most_bytes - granted + bytes_below(target))

    def count(self) -> int:
        """What the tier takes, counted and noted."""
        self._directory.look()
        with exclusive(self._lock) as usage:
            return self._contents(usage).used_bytes

    def enforce_limits(self) -> None:
        """Keep to the limit and to the floor of free disk while nobody reserves. Call it often.

        It empties the trash, too, and looks every `enforce_seconds`, at little cost where all is well. Shards
        that are open stay.
        """
        if time.monotonic() - self._enforced_at < self._enforce_seconds or not self._enforcing.acquire(
            blocking=False
        ):
            return
        try:
            self._enforced_at = time.monotonic()
            with contextlib.suppress(OSError):  # whoever fills will say what is wrong with the tier
                self._follow_limit()
                self._directory.empty_trash()
                if not self._is_surely_small():
                    self._shrink()
        finally:
            self._enforcing.release()

    def excess(
        self, limit_bytes: int, may_go: Callable[[HeldShard], bool], without: Collection[Path]
    ) -> list[HeldShard]:
        """What would have to go for the tier to keep to a limit, as far as it may; nothing is changed.

        Args:
            limit_bytes: which limit.
            may_go: whether nobody uses it.
            without: what is taken for gone already.
        """
        self._directory.look()
        with exclusive(self._lock) as usage:
            found = self._contents(usage, without)
            return self._giving_way(found.held, found.used_bytes - limit_bytes, may_go=may_go)

    def _shrink(self) -> None:
        """Evict what is beyond the limit and what the floor of free disk asks for."""
        self._directory.look()
        with exclusive(self._lock) as usage:
            self._follow_limit()
            known = usage.at_most_bytes
            if known is not None and known <= self._allowed_bytes(known):
                return
            found = self._contents(usage)
            excess = found.used_bytes - self._allowed_bytes(found.used_bytes)
            if excess <= 0:
                return
            chosen = self._giving_way(found.held, excess - found.unread_bytes)
            leaving = found.unread + self._push_out(chosen)
        if chosen:
            logger.info(
                "cache %s: %d shards made way, %d bytes too many",
                *(self._directory.root, len(chosen), excess),
            )
        self._delete(leaving)

    def _decide(self, part: Path, size_bytes: int, next_use: float) -> tuple[bool | None, list[Path]]:
        """Note the reservation (True), refuse it (False), or say what has to be deleted first (None)."""
        with exclusive(self._lock) as usage:
            if usage.at_most_bytes is not None:
                wanted = usage.at_most_bytes + max(0, size_bytes - granted_bytes(part))
                if wanted <= self._allowed_bytes(usage.at_most_bytes):
                    self._grant(usage, wanted, part, size_bytes)
                    return True, []
            if not self._directory.has_looked:
                return None, []
            found = self._contents(usage)
            own = [shard for shard in found.held if shard.kind == "parts" and shard.path == part]
            mine = sum(shard.size_bytes for shard in own)
            excess = found.used_bytes - mine + size_bytes - self._allowed_bytes(found.used_bytes)
            if excess <= 0:
                self._grant(usage, found.used_bytes + max(0, size_bytes - mine), part, size_bytes)
                return True, []
            others = [shard for shard in found.held if shard not in own]
            chosen = eviction.victims(
                others,
                self._next_uses(others),
                newcomer_next_use=next_use,
                excess_bytes=excess - found.unread_bytes,
                may_go=_is_closed,
                eviction=self._eviction,
            )
            return (False, []) if chosen is None else (None, found.unread + self._push_out(chosen))

    def _grant(self, usage: Usage, at_most_bytes: int, part: Path, size_bytes: int) -> None:
        """Under the lock: note what the tier will take, and then what is reserved."""
        usage.note(at_most_bytes)
        write_whole(part / "reserved", str(size_bytes))

    def _contents(self, usage: Usage, without: Collection[Path] = ()) -> _Contents:
        """Under the lock: look at each shard, and note what all of them take."""
        held = [shard for shard in self._directory.shards() if not without or shard.path not in without]
        in_trash = [path for path in self._directory.own("trash") if path not in without]
        used_bytes = sum(shard.size_bytes for shard in held) + sum(map(bytes_below, in_trash))
        if not without:
            usage.note(used_bytes)
        unread = [path for path in in_trash if is_unread(path)]
        return _Contents(held, used_bytes, unread, sum(map(bytes_below, unread)))

    def _giving_way(
        self,
        held: list[HeldShard],
        excess_bytes: int,
        next_use: float = -1.0,
        may_go: Callable[[HeldShard], bool] | None = None,
    ) -> list[HeldShard]:
        """Under the lock: what goes, by the eviction rule; maybe less than was asked for."""
        return eviction.giving_way(
            held,
            self._next_uses(held),
            newcomer_next_use=next_use,
            excess_bytes=excess_bytes,
            may_go=may_go or _is_closed,
            eviction=self._eviction,
        )

    def _next_uses(self, held: list[HeldShard]) -> dict[str, float]:
        return demand.next_uses(self._directory.root / "runs", sorted({shard.digest for shard in held}))

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
        return eviction.allowed_bytes(self._for_shards_bytes(), stored, disk.free, floor)

    def _is_surely_small(self) -> bool:
        """Whether it is certain that nothing has to go, without the lock."""
        noted = self._noted_bytes()
        unwritten_bytes = self._directory.unwritten_bytes  # in this order, as above
        disk = self._disk_usage(self._directory.root)
        floor = self._free_disk.floor_bytes(disk.total, disk.total)
        is_within = noted is not None and noted <= self._for_shards_bytes()
        return is_within and disk.free - unwritten_bytes >= floor

    def _for_shards_bytes(self) -> int:
        """The limit, less what lies beside the shards: `tier.json` and its next one, the lock, `runs/`."""
        return max(0, self.limit_bytes - 3 * BLOCK_BYTES - bytes_below(self._directory.root / "runs"))

    def _noted_bytes(self) -> int | None:
        with contextlib.suppress(OSError), Descriptor.open(self._lock, os.O_RDONLY | os.O_NOFOLLOW) as file:
            return usage_of(file)
        return None

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
