"""A tier: a directory with a byte budget that all processes of a node share: claim, reserve, publish, evict.

directory.py has the layout, budget.py the sizes. A filler holds a lock on its part's `index`, and touches it
as a heartbeat: without the lock the part is an orphan, and another process may take it over; without the
heartbeat its filler is stopped, and another may start from a copy. A reader holds a shared lock on the
`names` of what it has open: such a shard isn't evicted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from streamload import limits
from streamload.cache import demand, memory
from streamload.cache.budget import ENFORCE_SECONDS, Budget
from streamload.cache.directory import BLOCK_BYTES, KINDS, SUPERSEDED_NS, Directory, check_owner
from streamload.cache.locks import FileLock
from streamload.cache.memory import DiskUsage
from streamload.cache.part import Orphan, Part
from streamload.errors import CacheError, is_shortage
from streamload.metrics import Counters, Counts
from streamload.options import DEFAULT_FREE_DISK, FreeDisk, Settings, file_system, nearest

logger = logging.getLogger("streamload")


class Tier(Directory):
    """A bounded directory of shards.

    Thread-safe and process-safe: every decision is made under one lock, from what is in the directory.

    Args:
        root: the directory; created with mode 0700 if it is missing.
        limit_bytes: a new budget of all files together, for all processes that use the tier: those that have
            it open follow within seconds. None keeps its limit.
        counts: where evictions, takeovers and damage are counted.
        free_disk: what this process leaves free on the disk, whatever the limit.
        disk_usage: total and free bytes of a path's disk; by default those of the file system, and in memory
            also what machine and container leave.
        enforce_seconds: the interval of `enforce_limits`.

    Raises:
        CacheError: the directory can't be used, or others can write there.
        LimitReached: this process has too many open files.
    """

    def __init__(
        self,
        root: Path | str,
        limit_bytes: int | None = None,
        counts: Counts | None = None,
        *,
        free_disk: FreeDisk = DEFAULT_FREE_DISK,
        disk_usage: Callable[[Path], DiskUsage] | None = None,
        enforce_seconds: float = ENFORCE_SECONDS,
    ):
        super().__init__(root, counts if counts is not None else Counters())
        try:
            self._prepare()
            self.budget = Budget(
                self,
                limit_bytes,
                free_disk=free_disk,
                disk_usage=disk_usage or _usage_of(self.root),
                enforce_seconds=enforce_seconds,
            )
        except CacheError:
            raise
        except OSError as exc:
            if is_shortage(exc):
                raise limits.reached(f"the cache directory {self.root} can't be used", exc) from exc
            raise CacheError(
                f"the cache directory {self.root} can't be used: {exc.strerror or exc}; "
                f"choose another with cache_dir= or STREAMLOAD_CACHE_DIR"
            ) from exc

    @classmethod
    def open(cls, root: Path | str, *, free_disk: FreeDisk = DEFAULT_FREE_DISK) -> Tier:
        """Open an existing tier, with its limit.

        Raises:
            CacheError: there is no tier at `root`.
        """
        if not (Path(root).expanduser() / "tier.json").is_file():
            raise CacheError(f"there is no streamload cache at {root}")
        return cls(root, free_disk=free_disk)

    @property
    def limit_bytes(self) -> int:
        """The budget of all files together."""
        return self.budget.limit.size_bytes

    def claim(self, digest: str, stopped: Collection[Path] = ()) -> Part | None:
        """Create a part to fill; None if the shard is here, was given up, or has a live filler.

        Args:
            stopped: parts whose fillers have sent no heartbeat for long; they aren't waited for.
        """
        with self.deciding() as usage:
            parts = self.parts(digest)  # listed first: if one is published meanwhile, that is seen below
            if self.has("shards", digest):
                return None
            if self.has("gone", digest) and self._stands(self.tombstone(digest)):
                return None
            orphans = self._orphans(parts, stopped)
            if orphans is None:
                return None
            orphan = max(orphans, key=lambda orphan: orphan.index_bytes, default=None)
            try:
                for other in orphans:
                    if other is not orphan:
                        other.remove(self)
                usage.add(BLOCK_BYTES)
                path = Path(self._kinds["parts"], f"{digest}.{secrets.token_hex(4)}")
                path.mkdir(mode=0o700)
                alive = FileLock.acquire(f"{path}/index", create=True, wait=True)
                if alive is None:
                    raise CacheError(f"{path} was taken by another process while it was made")
            except BaseException:  # a full disk, for example: leave the orphan to the next process
                if orphan is not None:
                    orphan.let_go()
                raise
            return Part(self, self.budget, digest, path, alive, orphan)

    def supersede(self, digest: str) -> None:
        """Mark a copy whose prepared form is published: it is evicted first, unless somebody opens it."""
        with contextlib.suppress(OSError):
            os.utime(self.published(digest), ns=(SUPERSEDED_NS, SUPERSEDED_NS))

    def _prepare(self) -> None:
        """Create the directory and its subdirectories, as far as they are missing.

        Raises:
            CacheError: others can write there.
        """
        check_owner(self.root)
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(self.root)  # what was put there meanwhile; from now on it can't be replaced
        for kind in (*KINDS, "runs"):
            (self.root / kind).mkdir(mode=0o700, exist_ok=True)
            if (self.root / kind).is_symlink():
                raise CacheError(f"{self.root / kind} is a symbolic link: a cache keeps to its own directory")

    def _orphans(self, parts: Iterable[Path], stopped: Collection[Path]) -> list[Orphan] | None:
        """Return the parts of a shard if none has a live filler, else None. Called under the lock.

        A part that has vanished since it was listed had a live filler: its shard may be published by now.
        """
        orphans: list[Orphan] = []
        with contextlib.ExitStack() as held:
            for path in parts:
                lock = FileLock.acquire(path / "index")
                if lock is None and path.exists() and not (path / "index").exists():
                    self.trash(path)  # its filler died before it began
                elif lock is not None or path in stopped:
                    orphans.append(Orphan(path, lock))
                    held.callback(orphans[-1].let_go)
                else:
                    return None
            held.pop_all()
        return orphans

    def sweep(self) -> None:
        """Remove what dead processes left: tombstones without a lock, parts of published shards, trash.

        Called when a run starts, so that it retries what an earlier run could not fetch.
        """
        with self.deciding():
            for tombstone in list(self.own("gone")):
                self._stands(tombstone)
            for part in list(self.own("parts")):
                self._drop_if_useless(part)
            demand.next_uses(self.root / "runs", ())
        self.empty_trash()

    def _drop_if_useless(self, part: Path) -> None:
        """Under the lock: remove an orphan whose shard is published, or whose filler never began."""
        lock = FileLock.acquire(part / "index")
        never_begun = lock is None and not (part / "index").exists()
        try:
            if never_begun or (lock is not None and self.published(part.name[:32]).exists()):
                with contextlib.suppress(FileNotFoundError):  # its filler was live, and has just moved it
                    self.move_to_trash(part)
        finally:
            if lock is not None:
                lock.close()

    def _stands(self, tombstone: Path) -> bool:
        """True if a tombstone still holds: a process that has acted on it is live. If not, it is removed."""
        if not tombstone.exists():
            return False
        lock = FileLock.acquire(tombstone / "names")
        if lock is None and (tombstone / "names").exists():
            return True
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            if lock is not None:
                held.callback(lock.close)
            tombstone = self.move_to_trash(tombstone)
        self.delete(tombstone)
        return False


def _usage_of(root: Path) -> Callable[[Path], DiskUsage]:
    return memory.usage if file_system(root).is_memory else _disk_usage


def _disk_usage(place: Path) -> DiskUsage:
    total, _, free = shutil.disk_usage(place)
    return DiskUsage(total, free)


def open_tier(settings: Settings) -> Tier:
    """Open the tier of a run that starts: with the limit that was asked for, else with the recorded one.

    Raises:
        CacheError: the directory can't be used, or others can write there.
    """
    root, size, held = settings.cache_dir, settings.cache_size, 0
    open_one = functools.partial(Tier, root, free_disk=settings.free_disk)
    if (root / "tier.json").is_file():
        tier = open_one()
        tier.sweep()
        if settings.sources["cache_size"] == "default":
            return tier
        held = 0 if size.share is None else tier.budget.count()
    return open_one(size.limit_bytes(shutil.disk_usage(nearest(root)).free, held))


def memory_root(settings: Settings) -> Path:
    """The directory of a tier in memory: `cache_dir` if that is in memory, else one per user in /dev/shm."""
    if settings.sources["cache_dir"] != "default" and file_system(settings.cache_dir).is_memory:
        return settings.cache_dir
    return memory.PLACE / f"streamload-{os.geteuid()}"


class Choice(NamedTuple):
    """The decision and its reason, for messages.

    Attributes:
        chosen: of a tier's place "disk" or "memory".
        why: with the numbers that it follows from.
    """

    chosen: str
    why: str


@dataclass(slots=True)
class Placed:
    """A run's tier, and where it is. `close()` when the run is over: then another run may decide again."""

    tier: Tier
    answer: Choice
    free_disk: FreeDisk
    """Bytes that stay free on its disk."""
    on_close: list[Callable[[], object]] = field(default_factory=list)
    """Release the decisions that hold as long as the run (placement.py)."""

    def close(self) -> None:
        """Release the decisions. Idempotent."""
        for release in self.on_close:
            release()


def placed_on_disk(settings: Settings, why: str) -> Placed:
    """Open the tier of a run in its directory; log where that is, and why.

    If the directory is in memory after all, the tier may take what memory there is.

    Raises:
        CacheError: as for `open_tier`.
    """
    tier = open_tier(settings)
    if file_system(tier.root).is_memory:
        most_bytes = int((memory.available().free_bytes + tier.used_bytes) * memory.MOST_SHARE)
        if tier.limit_bytes > most_bytes:
            tier = Tier(tier.root, most_bytes, free_disk=settings.free_disk)
    logger.info("cache on disk at %s (%s)", tier.root, why)
    return Placed(tier, Choice("disk", why), settings.free_disk)
