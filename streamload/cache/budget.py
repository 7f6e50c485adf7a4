"""The byte budget of a tier: its limit, the disk space that stays free, reservations and eviction.

Every decision reads the limit again and is made under the tier's lock; eviction.py chooses the victims. The
lock file also holds an upper bound of the tier's size (`Usage`) to which each grant adds, so that the shards
are scanned only when something may have to be evicted.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from streamload.cache import demand, eviction
from streamload.cache.directory import (
    BLOCK_BYTES,
    Directory,
    Limit,
    Reservation,
    blocks_bytes,
    bytes_below,
    granted_bytes,
    is_unread,
    reservation_of,
    reserved_for_rows,
    rows_bytes,
    write_reservation,
    write_whole,
)
from streamload.cache.eviction import HeldShard
from streamload.cache.locks import Usage, UsedBytes, is_locked, usage_of
from streamload.cache.memory import DiskUsage
from streamload.descriptors import Descriptor
from streamload.errors import CacheFull
from streamload.options import FreeDisk

logger = logging.getLogger("streamload")

ENFORCE_SECONDS = 2.0
_CLAIM_POLL_SECONDS = 0.01
_EVICTION_ROUNDS = 5
"""The first attempt may only scan the tier, once per process and outside the lock."""
_ROWS_BLOCK_BYTES, _ROWS_BLOCKS = 64 << 20, 64
"""Granularity of reservations for rows of calls; a small limit is divided into so many parts instead."""
_COLUMNS_AT_ONCE = 16
"""Columns are evicted a sixteenth at a time, because finding the oldest takes a listing of all."""
_LEAST_LISTED = 1000
_MEASURED_SHARE, _MEASURED_MILLISECONDS = 100, 3_600_000
"""A measurement of the columns is trusted for 100 times its duration, an hour at most: processes that ended
leave unused room in the recorded sum."""
_MEASURING_MILLISECONDS = 60_000
"""While one process measures, the others trust the record for this long."""
_JUST_NOW_SECONDS = 1.0
"""A process trusts its own measurement for at least this long, so that a retry doesn't measure again."""
LAST_BLOCKS_BYTES = 4 * BLOCK_BYTES
"""Disk space of a part beyond its bytes: partly filled last blocks, and the record of its reservation."""
PATIENCE_SECONDS = 1.0
"""How long a process leaves room for a claim after it first sees it."""


def allowed_bytes(limit_bytes: int, stored_bytes: int, free_bytes: int, floor_bytes: int) -> int:
    """The most that a tier may hold now: its limit, or less if the disk would become too full."""
    return min(limit_bytes, max(0, stored_bytes + free_bytes - floor_bytes))


class Claim(NamedTuple):
    """A live part of unknown size.

    Attributes:
        path: its directory.
        reserved_bytes: bytes that it has reserved so far.
    """

    path: Path
    reserved_bytes: int


class Claims:
    """Unsized claims: parts of live fillers that don't know yet how large their shards are.

    They have no reservation, or one that grows: shards that are prepared here, or come from a command. Else a
    shard needed later could take the last room, be evicted once the size is known, and be fetched again. So a
    new part leaves room for claims needed sooner, for at most a second each: an origin that doesn't answer
    holds up nobody else. One process's view; call the methods under the tier's lock.
    """

    def __init__(self, directory: Directory):
        self._directory = directory
        self._seen_at: dict[Path, float] = {}

    def unsized(self, part: Path | None) -> list[Claim]:
        """The unsized claims beside `part`; none if it already has a reservation."""
        if part is None or reservation_of(part) is not None:
            return []
        reservations = [(path, reservation_of(path)) for path in self._directory.own("parts") if path != part]
        claims = [
            Claim(path, reservation.size_bytes if reservation else 0)
            for path, reservation in reservations
            if (reservation is None or reservation.grows) and is_locked(path / "index")
        ]
        looked_at = time.monotonic()
        self._seen_at = {claim.path: self._seen_at.get(claim.path, looked_at) for claim in claims}
        return [claim for claim in claims if looked_at - self._seen_at[claim.path] < PATIENCE_SECONDS]

    def sooner(self, claims: list[Claim], part: Path, next_use: float) -> list[Claim]:
        """The claims that are needed before a part, by the plans of the live runs and its own."""
        digests = {path: path.name[:32] for path in (part, *(claim.path for claim in claims))}
        next_uses = demand.next_uses(self._directory.root / "runs", sorted(set(digests.values())))
        own_use = min(next_use, next_uses.get(digests[part], next_use))
        return [claim for claim in claims if next_uses.get(digests[claim.path], own_use) < own_use]


def lacking_bytes(claims: list[Claim], size_bytes: int) -> int:
    """Bytes that claims will still reserve, assuming that shards are about equally large."""
    return sum(max(0, size_bytes - claim.reserved_bytes) for claim in claims)


def part_bytes(size_bytes: int) -> int:
    """Bytes to reserve for a part of this size."""
    return blocks_bytes(size_bytes) + LAST_BLOCKS_BYTES


class _Decision(enum.Enum):
    """Decision on a reservation."""

    GRANT = enum.auto()
    REFUSE = enum.auto()
    RETRY = enum.auto()
    """Try again once the evicted shards are deleted, or the tier is scanned."""
    WAIT = enum.auto()
    """The room is kept for shards that are needed sooner and whose sizes will soon be known."""


class _Contents(NamedTuple):
    """Space taken in a tier while its lock is held."""

    held: list[HeldShard]
    """The shards, without columns."""
    used_bytes: int
    """Everything, columns and trash included."""
    columns_bytes: int
    unread: list[Path]
    """In the trash and open nowhere, so it may be deleted."""
    unread_bytes: int


class Budget:
    """The budget of one tier, as one process sees it. Thread-safe and process-safe.

    Args:
        limit_bytes: a new limit for all processes that use the tier; None keeps its limit.
        free_disk: disk space that this process leaves free, whatever the limit.
        disk_usage: total and free bytes of a path's disk.
        enforce_seconds: the interval of `enforce_limits`.

    Attributes:
        limit: of the tier, as this process last read it.

    Raises:
        CacheError: the tier is new and no limit is given, or its record can't be read.
    """

    def __init__(
        self,
        directory: Directory,
        limit_bytes: int | None,
        *,
        free_disk: FreeDisk,
        disk_usage: Callable[[Path], DiskUsage],
        enforce_seconds: float,
    ):
        self._directory = directory
        self._lock = directory.root / "lock"
        self._free_disk = free_disk
        self._disk_usage = disk_usage
        self._enforcing = threading.Lock()
        self._enforce_seconds = enforce_seconds
        self._enforced_at = time.monotonic()
        self._claims = Claims(directory)
        self._began_at = time.time()
        self._measured_at = -math.inf  # by this process
        self._next_columns: list[tuple[str, float]] = []  # to go next, the first first: digest and last use
        self.limit = Limit(directory.root, limit_bytes)

    @property
    def used_bytes(self) -> int:
        """Upper bound of the tier's present size, from the lock file; counted if none is recorded."""
        noted = self._noted_bytes()
        return self._directory.used_bytes if noted is None else noted

    @property
    def allowed_bytes(self) -> int:
        """The most that the tier may take now: its limit, or less if the disk is nearly full."""
        return self._allowed_bytes(self.used_bytes)

    @property
    def is_bound_by_disk(self) -> bool:
        """True if the disk is so full that the tier may take less than its limit."""
        return self.allowed_bytes < self._for_shards_bytes()

    @property
    def bound(self) -> str:
        """The bound on the tier's size, for messages."""
        if self.is_bound_by_disk:
            allowed = f"{self.allowed_bytes:,} bytes, with {self._free_disk} kept free"
            return f"the free space of its disk ({allowed})"
        return f"its limit of {self.limit.size_bytes:,} bytes"

    def reserve(self, part: Path, size_bytes: int, next_use: float, *, grows: bool = False) -> bool:
        """Reserve space for a part, evicting what the live runs need latest.

        Args:
            part: its directory; its reservation becomes `size_bytes`.
            size_bytes: all that will be written into the part.
            next_use: its next use, in shard visits: only shards that are needed later are evicted for it.
            grows: whether the size of its shard is still unknown, so that it may need more.

        Returns:
            False if not enough may be evicted now: try again later. A new part waits for a moment while the
            free space is kept for claims that are needed sooner (`Claims`).

        Raises:
            CacheFull: it would not even fit into the empty tier.
        """
        self.limit.follow()
        return self._reserve(part, Reservation(part_bytes(size_bytes), grows), next_use)

    def reserve_beside(self, size_bytes: int) -> bool:
        """Reserve space for more of a file in the directory of an open shard: never given back, but counted.

        Args:
            size_bytes: whole blocks.

        Returns:
            False if not enough may be evicted now.
        """
        self.limit.follow()
        reservation = Reservation(size_bytes, grows=False)
        return size_bytes <= self._for_shards_bytes() and self._reserve(None, reservation, 0.0)

    def reserve_rows(self, size_bytes: int) -> int:
        """Reserve room for the rows of modules beside the shards, in whole blocks; it is kept.

        Computing a row costs more than fetching its shard again. So shards that aren't open are evicted for
        rows, those needed last first, and rows never for shards. Rows get at most half of the limit, within
        which the least recently read are evicted.

        Args:
            size_bytes: size of all rows, their log included.

        Returns:
            the bytes that they may take.
        """
        self.limit.follow()
        most = self.limit.size_bytes // 2
        block = max(BLOCK_BYTES, min(_ROWS_BLOCK_BYTES, self.limit.size_bytes // _ROWS_BLOCKS))
        rows_bytes = min(-(-size_bytes // block) * block, most)
        reserved = reserved_for_rows(self._directory.root)
        if rows_bytes <= reserved:
            return min(reserved, most)
        self._directory.scan()
        for _ in range(_EVICTION_ROUNDS):
            with self._directory.deciding() as usage:
                contents = self._contents(usage)
                excess = (
                    contents.used_bytes - self._allowed_bytes(contents.used_bytes) + rows_bytes - reserved
                )
                if excess <= 0:
                    write_whole(self._directory.root / "rows" / "reserved", str(rows_bytes))
                    return rows_bytes
                chosen = self._victims(contents.held, excess - contents.unread_bytes)
                evicted = contents.unread + self._trash(chosen, usage)
            self._delete(evicted)
            if not evicted:
                break
        return min(reserved, most)

    def reserve_columns(self, size_bytes: int, most_bytes: int | None = None) -> bool:
        """Reserve room for more rows of columns; it counts as theirs until they are measured.

        Computing a row costs more than fetching its shard again. So where no room is free, shards that aren't
        open are evicted for rows, those needed last first, up to half of the limit; then the least recently
        used columns. Rows may take more than half only while no shard needs the space.

        Args:
            most_bytes: limit of all columns; None: the tier's limit alone.

        Returns:
            False if there is no room for now.
        """
        self.limit.follow()
        most = self.limit.size_bytes if most_bytes is None else min(most_bytes, self.limit.size_bytes)
        if size_bytes > most:
            return False
        for _ in range(_EVICTION_ROUNDS):
            evicted: list[Path] = []
            with self._directory.deciding() as usage:
                contents = None
                if self._is_measured(usage) and self._columns_excess(usage, size_bytes, most) > 0:
                    contents = self._contents(usage)
                excess = self._columns_excess(usage, size_bytes, most)
                if excess <= 0:
                    usage.add(size_bytes, columns=True)
                    return True
                if contents is not None:
                    excess -= contents.unread_bytes
                    is_within = contents.columns_bytes + size_bytes <= min(most, self._columns_share())
                    chosen = self._victims(contents.held, excess) if is_within else []
                    if _size_of(chosen) < excess:
                        part_bytes = contents.columns_bytes // _COLUMNS_AT_ONCE
                        chosen += self._oldest_columns(excess - _size_of(chosen) + part_bytes)
                    evicted = contents.unread + self._trash(chosen, usage)
                    if not evicted:
                        return False
            self._delete(evicted)
            self._measure()
        return False

    def _columns_excess(self, usage: Usage, size_bytes: int, most_bytes: int) -> int:
        """Bytes to evict before columns may grow by so many, according to the record."""
        if usage.at_most is None:
            return 1
        over = usage.at_most.total + size_bytes - self._allowed_bytes(usage.at_most.total)
        return max(over, usage.at_most.columns + size_bytes - most_bytes)

    def _columns_share(self) -> int:
        """The part of the limit that columns may take from shards."""
        return max(0, self.limit.size_bytes // 2 - reserved_for_rows(self._directory.root))

    def _oldest_columns(self, excess_bytes: int, without: Collection[Path] = ()) -> list[HeldShard]:
        """Under the lock: the next columns to evict, of so many bytes together.

        Lists a part of all columns and measures only these, so that memory and time don't grow with all.
        """
        chosen = self._still_unused(excess_bytes, without)
        if _size_of(chosen) >= excess_bytes:
            return chosen
        count = max(_LEAST_LISTED, self._directory.count_of("columns") // _COLUMNS_AT_ONCE)
        while True:
            self._next_columns = self._directory.oldest_columns(count, self._began_at)
            is_all = len(self._next_columns) < count
            chosen = self._still_unused(excess_bytes, without)
            if is_all or _size_of(chosen) >= excess_bytes:
                return chosen
            count *= 4

    def _still_unused(self, excess_bytes: int, without: Collection[Path]) -> list[HeldShard]:
        """Listed columns that weren't used or evicted since, up to so many bytes."""
        chosen: list[HeldShard] = []
        first = 0
        for number, (digest, used_at) in enumerate(self._next_columns):
            if excess_bytes <= 0:
                break
            column = None
            with contextlib.suppress(FileNotFoundError):
                column = self._directory.column(digest)
            if column is None or column.used_at != used_at:
                first += first == number
            elif column.path not in without:
                chosen.append(column)
                excess_bytes -= column.size_bytes
        del self._next_columns[:first]
        return chosen

    def _reserve(self, part: Path | None, reservation: Reservation, next_use: float) -> bool:
        deadline = time.monotonic() + PATIENCE_SECONDS
        rounds = 0
        while rounds < _EVICTION_ROUNDS:
            try:
                decision, evicted = self._decide(part, reservation, next_use)
            except OSError as exc:
                if not is_no_space(exc) or not self.evict(reservation.size_bytes, next_use):
                    raise
                rounds += 1
                continue
            self._delete(evicted)
            if decision is _Decision.WAIT and time.monotonic() < deadline:
                time.sleep(_CLAIM_POLL_SECONDS)
            elif decision is _Decision.RETRY:
                self._measure()
                rounds += 1
            else:
                return decision is _Decision.GRANT
        return False

    def evict(self, size_bytes: int, next_use: float) -> bool:
        """Evict for a write that found the disk (or the user's quota) full although the budget allowed it.

        Args:
            size_bytes: how much to evict, rounded up to whole shards.
            next_use: only shards that are needed later than this are evicted.

        Returns:
            Whether anything was evicted, so that a retry is worth it.
        """
        self._measure()
        with self._directory.deciding() as usage:
            contents = self._contents(usage)
            chosen = self._victims(contents.held, size_bytes, next_use)
            chosen = chosen or self._columns_beyond(contents, size_bytes)
            evicted = contents.unread + self._trash(chosen, usage)
        self._delete(evicted)
        return bool(evicted)

    @contextlib.contextmanager
    def settling(self, part: Path, target: Path) -> Iterator[None]:
        """Context for renaming a part to `target`: its real size replaces its reservation."""
        with contextlib.ExitStack() as held:
            usage = None
            with contextlib.suppress(OSError):  # then the reservation counts until the next full count
                usage = held.enter_context(self._directory.deciding())
            granted = granted_bytes(part)
            yield
            if usage is not None:
                usage.add(bytes_below(target) - granted)

    def count(self) -> int:
        """Measure the tier and record its size."""
        self._measure(now=True)
        with self._directory.deciding() as usage:
            return self._contents(usage).used_bytes

    def enforce_limits(self) -> None:
        """Enforce the limit and the free disk space while nobody reserves, and empty the trash.

        Call it often: it acts every `enforce_seconds`, and costs little if all is well. Open shards stay.
        """
        if time.monotonic() - self._enforced_at < self._enforce_seconds or not self._enforcing.acquire(
            blocking=False
        ):
            return
        try:
            self._enforced_at = time.monotonic()
            with contextlib.suppress(OSError):  # the next fill reports what is wrong with the tier
                self.limit.follow()
                self._directory.empty_trash()
                if not self._is_surely_within():
                    self._shrink()
        finally:
            self._enforcing.release()

    def excess(
        self, limit_bytes: int, may_go: Callable[[HeldShard], bool], without: Collection[Path]
    ) -> list[HeldShard]:
        """The shards that a limit would evict. Changes nothing.

        Args:
            without: paths to treat as already deleted.
        """
        self._measure(now=True)
        with self._directory.deciding() as usage:
            contents = self._contents(usage, without)
            return self._over_limit(contents, contents.used_bytes - limit_bytes, may_go, without)

    def _shrink(self) -> None:
        """Evict what exceeds the limit or the free disk space."""
        self._measure()
        with self._directory.deciding() as usage:
            self.limit.follow()
            noted_bytes = usage.at_most_bytes
            if noted_bytes is not None and noted_bytes <= self._allowed_bytes(noted_bytes):
                return
            contents = self._contents(usage)
            excess = contents.used_bytes - self._allowed_bytes(contents.used_bytes)
            if excess <= 0:
                return
            chosen = self._over_limit(contents, excess - contents.unread_bytes)
            evicted = contents.unread + self._trash(chosen, usage)
        if chosen:
            logger.info(
                "cache %s: %d shards evicted, %d bytes over the limit",
                *(self._directory.root, len(chosen), excess),
            )
        self._delete(evicted)

    def _decide(
        self, part: Path | None, reservation: Reservation, next_use: float
    ) -> tuple[_Decision, list[Path]]:
        """Decide on a reservation; also returns the evicted paths to delete before a retry."""
        size_bytes = reservation.size_bytes
        with self._directory.deciding() as usage:
            most_used = 0
            if usage.at_most_bytes is not None:
                most_used = usage.at_most_bytes + max(0, size_bytes - (granted_bytes(part) if part else 0))
                parts = self._directory.count_of("parts")
                if most_used + parts * size_bytes <= self._least_allowed_bytes():
                    self._grant(usage, most_used, part, reservation)  # whatever the parts will still take
                    return _Decision.GRANT, []
            if part is not None and size_bytes > self._for_shards_bytes():
                raise CacheFull(
                    f"a shard needs {size_bytes:,} bytes in the cache, whose limit is "
                    f"{self.limit.size_bytes:,}: raise cache_size (STREAMLOAD_CACHE_SIZE)"
                )
            unsized = self._claims.unsized(part)
            if usage.at_most_bytes is not None:
                claimed = lacking_bytes(unsized, size_bytes)
                if most_used + claimed <= self._allowed_bytes(usage.at_most_bytes):
                    self._grant(usage, most_used, part, reservation)
                    return _Decision.GRANT, []
            if not self._is_measured(usage):
                return _Decision.RETRY, []
            contents = self._contents(usage)
            other_shards = [shard for shard in contents.held if shard.path != part]
            mine = sum(shard.size_bytes for shard in contents.held if shard.path == part)
            excess = contents.used_bytes - mine + size_bytes - self._allowed_bytes(contents.used_bytes)
            # Shards are alike: what this one takes is the guess for those that will take their room first.
            sooner = self._claims.sooner(unsized, part, next_use) if part and unsized else []
            claimed = lacking_bytes(sooner, size_bytes)
            if claimed and excess + claimed > 0:
                lacks = excess + claimed - contents.unread_bytes
                lacks -= sum(shard.size_bytes for shard in self._victims(other_shards, lacks, next_use))
                if 0 < lacks <= claimed:
                    return _Decision.WAIT, []
            if excess <= 0:
                self._grant(usage, contents.used_bytes + max(0, size_bytes - mine), part, reservation)
                return _Decision.GRANT, []
            excess -= contents.unread_bytes
            chosen = self._columns_beyond(contents, excess)
            excess -= _size_of(chosen)
            shards = self._victims(other_shards, excess, next_use)
            if _size_of(shards) < excess:
                return _Decision.REFUSE, []
            return _Decision.RETRY, contents.unread + self._trash(chosen + shards, usage)

    def _grant(self, usage: Usage, at_most_bytes: int, part: Path | None, reservation: Reservation) -> None:
        """Under the lock: record the tier's new upper bound first, then a part's reservation."""
        if usage.at_most is not None:
            usage.note(usage.at_most._replace(total=at_most_bytes))
        if part is not None:
            write_reservation(part, reservation)

    def _contents(self, usage: Usage, without: Collection[Path] = ()) -> _Contents:
        """Under the lock: scan the tier and record its size, trusting the recorded sum of columns."""
        held = [shard for shard in self._directory.shards() if not without or shard.path not in without]
        in_trash = [path for path in self._directory.own("trash") if path not in without]
        at_most = usage.at_most
        if at_most is None:
            columns_bytes, measure_at = self._measured_columns()
            at_most = UsedBytes(0, columns_bytes, 0, measure_at)
        columns_bytes = at_most.columns
        columns_bytes -= sum(bytes_below(path) for path in without if path.parent.name == "columns")
        used_bytes = sum(shard.size_bytes for shard in held) + columns_bytes + sum(map(bytes_below, in_trash))
        if not without:
            usage.note(at_most._replace(total=used_bytes))
        unread = [path for path in in_trash if is_unread(path)]
        return _Contents(held, used_bytes, columns_bytes, unread, sum(map(bytes_below, unread)))

    def _is_measured(self, usage: Usage) -> bool:
        """True if this process has scanned the tier and the record of columns is recent."""
        is_new = usage.at_most is None or (
            0 < usage.at_most.measure_at - _milliseconds() <= _MEASURED_MILLISECONDS
        )
        is_new = is_new or time.monotonic() - self._measured_at < _JUST_NOW_SECONDS
        return self._directory.is_scanned and is_new

    def _measure(self, *, now: bool = False) -> None:
        """Scan the tier and measure its columns, if that is due; not under the lock, as it may take a while.

        Args:
            now: measure columns even if it isn't due.
        """
        self._directory.scan()
        with self._directory.deciding() as usage:
            before = usage.at_most
            if before is None or (self._is_measured(usage) and not now):
                return
            usage.note(before._replace(measure_at=_milliseconds() + _MEASURING_MILLISECONDS))
        there_bytes, measure_at = self._measured_columns()
        with self._directory.deciding() as usage:
            if (at_most := usage.at_most) is None:
                return
            # What was added meanwhile counts besides; what went meanwhile may have been measured before.
            columns_bytes = there_bytes + at_most.columns_added - before.columns_added
            if there_bytes <= before.columns:
                columns_bytes = min(columns_bytes, at_most.columns)
            total = at_most.total + columns_bytes - at_most.columns
            gone = at_most.columns_added - columns_bytes
            usage.note(UsedBytes(total, at_most.columns_added, gone, measure_at))

    def _measured_columns(self) -> tuple[int, int]:
        """The bytes of all columns, and when to measure them again."""
        began_at = time.monotonic()
        columns_bytes = sum(column.size_bytes for column in self._directory.columns())
        self._measured_at = time.monotonic()
        pause = int(1000 * _MEASURED_SHARE * (self._measured_at - began_at))
        return columns_bytes, _milliseconds() + min(pause, _MEASURED_MILLISECONDS)

    def _columns_beyond(
        self, contents: _Contents, excess_bytes: int, without: Collection[Path] = ()
    ) -> list[HeldShard]:
        """Under the lock: columns to evict for shards because all columns exceed their share."""
        beyond_bytes = contents.columns_bytes - self._columns_share()
        return self._oldest_columns(min(excess_bytes, beyond_bytes), without) if beyond_bytes > 0 else []

    def _over_limit(
        self,
        contents: _Contents,
        excess_bytes: int,
        may_go: Callable[[HeldShard], bool] | None = None,
        without: Collection[Path] = (),
    ) -> list[HeldShard]:
        """Under the lock: evict down to the limit: columns beyond their share, shards, other columns."""
        columns = self._columns_beyond(contents, excess_bytes, without)
        shards = self._victims(contents.held, excess_bytes - _size_of(columns), may_go=may_go)
        left_bytes = excess_bytes - _size_of(columns) - _size_of(shards)
        if left_bytes > 0:
            columns = self._oldest_columns(_size_of(columns) + left_bytes, without)
        return columns + shards

    def _victims(
        self,
        held: list[HeldShard],
        excess_bytes: int,
        next_use: float = -1.0,
        may_go: Callable[[HeldShard], bool] | None = None,
    ) -> list[HeldShard]:
        """Return what to evict, which may be less than was asked for. Call it under the lock."""
        digests = sorted({shard.digest for shard in held})
        return eviction.victims(
            held,
            demand.next_uses(self._directory.root / "runs", digests),
            newcomer_next_use=next_use,
            excess_bytes=excess_bytes,
            may_go=may_go or _is_closed,
        )

    def _trash(self, chosen: list[HeldShard], usage: Usage) -> list[Path]:
        """Move victims to the trash, and return their paths there. Call it under the lock."""
        self._directory.counts.add("shards_evicted", sum(shard.kind != "columns" for shard in chosen))
        trashed, columns_bytes = [], 0
        for shard in chosen:
            with contextlib.suppress(FileNotFoundError):  # its filler has just removed it
                trashed.append(self._directory.move_to_trash(shard.path))
                columns_bytes += shard.size_bytes * (shard.kind == "columns")
        if columns_bytes and usage.at_most is not None:  # in the trash they count until they are deleted
            gone = min(usage.at_most.columns_added, usage.at_most.columns_gone + columns_bytes)
            usage.note(usage.at_most._replace(columns_gone=gone))
        return trashed

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            self._directory.delete(path)

    def _allowed_bytes(self, used_bytes: int) -> int:
        # In this order: what is written in between counts twice, rather than as both free and written.
        stored = used_bytes - self._directory.unwritten_bytes
        disk = self._disk_usage(self._directory.root)
        floor = self._free_disk.floor_bytes(disk.total, disk.free + stored)
        root = self._directory.root
        floor += reserved_for_rows(root) - rows_bytes(root)
        return allowed_bytes(self._for_shards_bytes(), stored, disk.free, floor)

    def _least_allowed_bytes(self) -> int:
        """Lower bound of the space for shards, without reading what parts have written."""
        root = self._directory.root
        disk, rows = self._disk_usage(root), reserved_for_rows(root)
        floor = self._free_disk.floor_bytes(disk.total, disk.total) + rows
        return allowed_bytes(self._for_shards_bytes(rows), 0, disk.free, floor)

    def _is_surely_within(self) -> bool:
        """True if certainly nothing has to be evicted; takes no lock."""
        noted = self._noted_bytes()
        unwritten_bytes = self._directory.unwritten_bytes  # in this order, as above
        disk = self._disk_usage(self._directory.root)
        floor = self._free_disk.floor_bytes(disk.total, disk.total)
        is_within = noted is not None and noted <= self._for_shards_bytes()
        return is_within and disk.free - unwritten_bytes >= floor

    def _for_shards_bytes(self, rows: int | None = None) -> int:
        """The limit minus all else: `tier.json`, its replacement, the lock, `runs/`, `rows/`."""
        root = self._directory.root
        rows = reserved_for_rows(root) if rows is None else rows
        beside = 3 * BLOCK_BYTES + bytes_below(f"{root}/runs") + rows
        return max(0, self.limit.size_bytes - beside)

    def _noted_bytes(self) -> int | None:
        with contextlib.suppress(OSError), Descriptor.open(self._lock, os.O_RDONLY | os.O_NOFOLLOW) as file:
            used = usage_of(file)
            return None if used is None else used.total
        return None


def is_no_space(error: OSError) -> bool:
    """True if the disk, or the user's quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000


def _size_of(entries: Iterable[HeldShard]) -> int:
    return sum(entry.size_bytes for entry in entries)


def _is_closed(shard: HeldShard) -> bool:
    """True if a shard has no reader, or a part no filler, so that it may be evicted; False if it is gone."""
    return not is_locked(shard.path / ("index" if shard.kind == "parts" else "names")) and shard.path.exists()
