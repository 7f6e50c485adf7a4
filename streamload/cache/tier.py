"""A directory with a byte budget that all processes of a node share: claim, reserve, publish, evict (step F).

What lies where is told in directory.py, how much it may be in budget.py. A filler holds a lock on its part's
`index`, and touches it: without the lock the part is an orphan that another may take up, and without the
touch its filler is stopped, and another may begin from a copy. A reader holds a shared lock on `names` of
what it has open: such a shard isn't evicted.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from streamload.cache import demand, memory
from streamload.cache.budget import ENFORCE_SECONDS, Budget, DiskUsage
from streamload.cache.directory import BLOCK_BYTES, Directory
from streamload.cache.locks import FileLock, exclusive
from streamload.cache.part import Orphan, Part
from streamload.errors import CacheError
from streamload.metrics import Counters, Counts
from streamload.options import DEFAULT_FREE_DISK, Eviction, FreeDisk, Settings, file_system


class Tier(Directory):
    """A bounded directory of shards.

    Thread-safe and process-safe: every decision is made under one lock, from what is in the directory.

    Args:
        root: the directory; made with mode 0700 if it is missing.
        limit_bytes: the budget of all files together, from now on and for all who use the tier: processes
            that have it open follow within seconds. None: the limit it has.
        counts: where evictions, take-overs and damage are counted.
        free_disk: what this process leaves free on the disk, whatever the limit says.
        eviction: by which rule this process makes room.
        disk_usage: says how much of a path's disk is free; by default the file system, and in memory what
            machine and container leave as well.
        enforce_seconds: how often `enforce_limits` looks.

    Raises:
        CacheError: the directory can't be used, or isn't ours.
    """

    def __init__(
        self,
        root: Path | str,
        limit_bytes: int | None = None,
        counts: Counts | None = None,
        *,
        free_disk: FreeDisk = DEFAULT_FREE_DISK,
        eviction: Eviction = "plan",
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
                eviction=eviction,
                disk_usage=disk_usage or _usage_of(self.root),
                enforce_seconds=enforce_seconds,
            )
        except CacheError:
            raise
        except OSError as exc:
            raise CacheError(
                f"the cache directory {self.root} can't be used: {exc.strerror or exc}; "
                f"choose another with cache_dir= or STREAMLOAD_CACHE_DIR"
            ) from exc

    @classmethod
    def open(cls, root: Path | str, *, free_disk: FreeDisk = DEFAULT_FREE_DISK) -> Tier:
        """An existing tier, with the limit that it has.

        Raises:
            CacheError: there is no tier at `root`.
        """
        if not (Path(root).expanduser() / "tier.json").is_file():
            raise CacheError(f"there is no streamload cache at {root}")
        return cls(root, free_disk=free_disk)

    @property
    def limit_bytes(self) -> int:
        """The budget of all files together."""
        return self.budget.limit_bytes

    def claim(self, digest: str, stopped: Collection[Path] = ()) -> Part | None:
        """A new part to fill; None if the shard is here, was given up, or has a filler that is at work.

        Args:
            digest: of the shard.
            stopped: parts whose fillers have shown no life for long; they aren't waited for.
        """
        with exclusive(self.root / "lock") as usage:
            parts = self.parts(digest)  # listed first: one that is published meanwhile is seen below
            if self.published(digest).exists() or self._stands(self.tombstone(digest)):
                return None
            found = self._orphans(parts, stopped)
            if found is None:
                return None
            orphan = max(found, key=lambda orphan: orphan.index_bytes, default=None)
            try:
                for other in found:
                    if other is not orphan:
                        other.remove(self)
                if usage.at_most_bytes is not None:
                    usage.note(usage.at_most_bytes + BLOCK_BYTES)
                path = self.root / "parts" / f"{digest}.{secrets.token_hex(4)}"
                path.mkdir(mode=0o700)
                alive = FileLock.acquire(path / "index", create=True, wait=True)
                if alive is None:
                    raise CacheError(f"{path} was taken by another process while it was made")
            except BaseException:  # a disk that takes nothing, say: the orphan is for whoever comes next
                if orphan is not None:
                    orphan.let_go()
                raise
            return Part(self, self.budget, digest, path, alive, orphan)

    def _orphans(self, parts: Iterable[Path], stopped: Collection[Path]) -> list[Orphan] | None:
        """Those of a shard's parts that nobody goes on with; None if somebody is at work. Under the lock.

        A part that has gone since it was listed was at work: by now its shard may be published.
        """
        found: list[Orphan] = []
        with contextlib.ExitStack() as held:
            for path in parts:
                lock = FileLock.acquire(path / "index")
                if lock is None and path.exists() and not (path / "index").exists():
                    self.trash(path)  # its filler died before it had begun
                elif lock is not None or path in stopped:
                    found.append(Orphan(path, lock))
                    held.callback(found[-1].let_go)
                else:
                    return None
            held.pop_all()
        return found

    def sweep(self) -> None:
        """Remove what dead processes left.

        That is: tombstones that nobody stands by, parts of shards that somebody else has published, and what
        was being deleted.

        To be called when a run begins, so that it asks again for what an earlier one could not have.
        """
        with exclusive(self.root / "lock"):
            for tombstone in list(self.own("gone")):
                self._stands(tombstone)
            for part in list(self.own("parts")):
                self._drop_if_useless(part)
            demand.next_uses(self.root / "runs", ())
        self.empty_trash()

    def _drop_if_useless(self, part: Path) -> None:
        """Under the lock: take an orphan away whose shard is published, or whose filler never began."""
        lock = FileLock.acquire(part / "index")
        never_begun = lock is None and not (part / "index").exists()
        try:
            if never_begun or (lock is not None and self.published(part.name[:32]).exists()):
                with contextlib.suppress(FileNotFoundError):  # its filler lived, and has just moved it
                    self.out_of_sight(part)
        finally:
            if lock is not None:
                lock.close()

    def _stands(self, tombstone: Path) -> bool:
        """Whether a tombstone still holds: somebody who has acted on it is alive. If not, it is removed."""
        if not tombstone.exists():
            return False
        lock = FileLock.acquire(tombstone / "names")
        if lock is None and (tombstone / "names").exists():
            return True
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            if lock is not None:
                held.callback(lock.close)
            tombstone = self.out_of_sight(tombstone)
        self.delete(tombstone)
        return False


def _usage_of(root: Path) -> Callable[[Path], DiskUsage]:
    return memory.usage if file_system(root).is_memory else shutil.disk_usage


def open_tier(settings: Settings) -> Tier:
    """The tier of a run at its beginning: with the limit that was asked for, else with the one it has.

    Raises:
        CacheError: the directory can't be used, or isn't ours.
    """
    root, size, held = settings.cache_dir, settings.cache_size, 0
    open_one = functools.partial(Tier, root, free_disk=settings.free_disk, eviction=settings.eviction)
    if (root / "tier.json").is_file():
        tier = open_one()
        tier.sweep()
        if settings.sources["cache_size"] == "default":
            return tier
        held = 0 if size.share is None else tier.budget.count()
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    return open_one(size.limit_bytes(shutil.disk_usage(existing).free, held))
