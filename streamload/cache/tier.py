"""A directory with a byte budget that all processes of a node share: claim, reserve, publish, evict (step F).

    tier.json                 format of the directory, its limit
    lock                      held while something is decided, never while bytes move
    parts/<digest>.<nonce>/   a shard on its way: data, index, names, reserved
    shards/<digest>/          a published shard: the same directory, renamed
    bare/<digest>/            the index alone of one that had no room: its samples are read from the origin
    gone/<digest>/            a shard that was given up: the verdict, and the samples it gave before
    runs/                     who reads what (cache/runs.py)
    trash/                    being deleted

A filler holds a lock on its part's `index`, and touches it: without the lock the part is an orphan that
another may take up, and without the touch its filler is stopped, and another may begin from a copy. A reader
holds a shared lock on `names` of what it has open: such a shard isn't evicted. What isn't named as
above was not made here and is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import math
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from streamload.cache import ledger, runs
from streamload.cache.ledger import HeldShard
from streamload.cache.locks import FileLock, exclusive
from streamload.errors import CacheError, CacheFull
from streamload.metrics import Counters, Counts
from streamload.settings import DEFAULT_FREE_DISK, Eviction, FreeDisk, Settings

logger = logging.getLogger("streamload")

FORMAT = 1
_DIGEST = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"([0-9a-f]{32})\.[0-9a-f]{8}")
ROOMS: Mapping[str, re.Pattern[str]] = {
    "parts": _PART,
    "shards": _DIGEST,
    "bare": _DIGEST,
    "gone": _DIGEST,
    "trash": _PART,
}
"""How the directories are named that the tier makes in each of its rooms; all else there isn't its own."""
_BLOCK = 4096
_EVICTION_ROUNDS = 4
TEND_SECONDS = 2.0
_LAST_BLOCKS_BYTES = 4 * _BLOCK
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


class Part:
    """A shard that this process is filling: a directory, alive while its index is locked."""

    def __init__(self, tier: Tier, digest: str, path: Path, alive: FileLock, orphan: Orphan | None):
        self.tier = tier
        self.digest = digest
        self.path = path
        self.orphan = orphan
        self.reserved_bytes = 0
        self._alive = alive

    def reserve(self, size_bytes: int, wait: float) -> bool:
        """Make room for `size_bytes` in all; see `Tier.reserve`."""
        if self.tier.reserve(self, size_bytes, wait):
            return True
        if self.orphan is None:
            return False
        self.forget_orphan()  # no room for both: begin anew
        return self.tier.reserve(self, size_bytes, wait)

    def touch(self) -> None:
        """Show that this process is not stopped; to be done again and again."""
        with contextlib.suppress(FileNotFoundError):  # published, or taken away
            os.utime(self.path / "index")

    def make_way(self, wait: float) -> bool:
        """The disk is full although there was room: see `Tier.make_way`."""
        return self.tier.make_way(max(self.reserved_bytes, _LAST_BLOCKS_BYTES), wait)

    def publish(self) -> None:
        """Hand the finished part over to the readers, by one rename."""
        self._move("shards")
        self.tier.trash(self.tier.bare(self.digest))

    def publish_bare(self) -> None:
        """Hand a finished index over, without data."""
        self._move("bare")

    def give_up(self) -> FileLock | None:
        """Leave a verdict in place of the shard; it stands while the lock that is returned is held."""
        verdict = FileLock.acquire(self.path / "names", shared=True, create=True)
        self._move("gone")
        return verdict

    def leave(self) -> None:
        """Stop here; what was filled stays for whoever takes it up, unless the shard is published."""
        if self.tier.published(self.digest).exists():
            self.tier.trash(self.path)
        self._let_go()

    def discard(self) -> None:
        """Stop here and remove what was filled."""
        self.tier.trash(self.path)
        self._let_go()

    def forget_orphan(self) -> None:
        """Remove the dead filler's part, not a stopped one's; what was of use in it has been copied."""
        if self.orphan is not None:
            self.orphan.remove(self.tier)
            self.orphan = None

    def _move(self, room: str) -> None:
        target = self.tier.root / room / self.digest
        (self.path / "reserved").unlink(missing_ok=True)
        try:
            self.path.rename(target)
        except OSError as exc:
            if not target.exists() and not self._was_taken_away():
                raise CacheError(f"could not publish a shard as {target}: {exc}") from exc
            self.tier.trash(self.path)  # somebody was first: theirs is as good
        self._let_go()

    def _let_go(self) -> None:
        self.forget_orphan()
        self._alive.close()

    def _was_taken_away(self) -> bool:
        """Whether somebody cleared the tier while this part was being filled."""
        return self.tier.root.is_dir() and not self.path.exists()


class Orphan(NamedTuple):
    """A part that nobody goes on with: its filler is dead, or stopped."""

    path: Path
    lock: FileLock | None
    """Of a dead filler, held by whoever looks at the part; a stopped one has it still."""

    @property
    def index_bytes(self) -> int:
        """How much there is of it, measured by its entries."""
        with contextlib.suppress(FileNotFoundError):
            return (self.path / "index").stat().st_size
        return 0

    def remove(self, tier: Tier) -> None:
        """Take it away, unless it is a stopped filler's, who may go on with it."""
        if self.lock is not None:
            tier.trash(self.path)
            self.lock.close()


class Tier:
    """A bounded directory of shards.

    Thread-safe and process-safe: every decision is made under one lock, from what is in the directory.

    Args:
        root: the directory; made with mode 0700 if it is missing.
        limit_bytes: the budget of all files together, from now on and for all who use the tier: processes
            that have it open follow within seconds. None: the limit it has.
        counts: where evictions, take-overs and damage are counted.
        free_disk: what this process leaves free on the disk, whatever the limit says.
        eviction: by which rule this process makes room.
        disk_usage: says how much of a path's disk is free.
        tend_seconds: how often `tend` looks.

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
        disk_usage: Callable[[Path], DiskUsage] = shutil.disk_usage,
        tend_seconds: float = TEND_SECONDS,
    ):
        self.counts = counts if counts is not None else Counters()
        self.root = Path(root).expanduser().absolute()
        self.free_disk = free_disk
        self.eviction: Eviction = eviction
        self._disk_usage = disk_usage
        self._tending = threading.Lock()
        self._tend_seconds = tend_seconds
        self._tended_at = time.monotonic()
        self._within_bytes = math.inf  # the lowest limit that it is known to keep to
        self._published_bytes: dict[Path, int] = {}
        try:
            self._prepare()
            self.limit_bytes = self._settle_limit(limit_bytes)
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

    def published(self, digest: str) -> Path:
        """Where a shard is when it is whole."""
        return self.root / "shards" / digest

    def bare(self, digest: str) -> Path:
        """Where the index of a shard is whose bytes had no room."""
        return self.root / "bare" / digest

    def verdict(self, digest: str) -> Path:
        """Where the record of a shard is that was given up."""
        return self.root / "gone" / digest

    def parts(self, digest: str) -> list[Path]:
        """The parts of a shard, live or orphaned."""
        found = sorted((self.root / "parts").glob(f"{digest}.*"))
        return [path for path in found if _PART.fullmatch(path.name) and not path.is_symlink()]

    def own(self, room: str) -> Iterator[Path]:
        """What the tier made in one of its rooms: real directories, by its names; the rest isn't touched."""
        with os.scandir(self.root / room) as entries:
            for entry in entries:
                if ROOMS[room].fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)

    def shards(self) -> Iterator[HeldShard]:
        """All that takes room: published shards, parts, bare indexes and verdicts."""
        for kind in ("shards", "parts", "bare", "gone"):
            for path in self.own(kind):
                with contextlib.suppress(FileNotFoundError):
                    used_at = path.stat().st_mtime
                    yield HeldShard(path.name[:32], path, self._size(path, kind), kind, used_at)

    @property
    def used_bytes(self) -> int:
        """What the tier takes now: published shards, verdicts, reservations, and what is being deleted."""
        return sum(shard.size_bytes for shard in self.shards()) + sum(map(bytes_below, self.own("trash")))

    def claim(self, digest: str, stopped: Collection[Path] = ()) -> Part | None:
        """A new part to fill; None if the shard is here, was given up, or has a filler that is at work.

        Args:
            digest: of the shard.
            stopped: parts whose fillers have shown no life for long; they aren't waited for.
        """
        with exclusive(self.root / "lock"):
            parts = self.parts(digest)  # listed first: one that is published meanwhile is seen below
            if self.published(digest).exists() or self._stands(self.verdict(digest)):
                return None
            found = self._orphans(parts, stopped)
            if found is None:
                return None
            orphan = max(found, key=lambda orphan: orphan.index_bytes, default=None)
            for other in found:
                if other is not orphan:
                    other.remove(self)
            path = self.root / "parts" / f"{digest}.{secrets.token_hex(4)}"
            path.mkdir(mode=0o700)
            alive = FileLock.acquire(path / "index", create=True, wait=True)
            if alive is None:
                raise CacheError(f"{path} was taken by another process while it was made")
            return Part(self, digest, path, alive, orphan)

    def _orphans(self, parts: Iterable[Path], stopped: Collection[Path]) -> list[Orphan] | None:
        """Those of a shard's parts that nobody goes on with; None if somebody is at work. Under the lock.

        A part that has gone since it was listed was at work: by now its shard may be published.
        """
        found: list[Orphan] = []
        for path in parts:
            lock = FileLock.acquire(path / "index")
            if lock is None and path.exists() and not (path / "index").exists():
                self.trash(path)  # its filler died before it had begun
            elif lock is not None or path in stopped:
                found.append(Orphan(path, lock))
            else:
                for orphan in found:
                    if orphan.lock is not None:
                        orphan.lock.close()
                return None
        return found

    def reserve(self, part: Part, size_bytes: int, wait: float) -> bool:
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
        taken_bytes = _blocks(size_bytes) + _LAST_BLOCKS_BYTES
        self._follow_limit()
        if taken_bytes > self.limit_bytes:
            raise CacheFull(
                f"a shard takes {taken_bytes:,} bytes in the cache, whose limit is {self.limit_bytes:,}: "
                f"raise cache_size (STREAMLOAD_CACHE_SIZE)"
            )
        for _ in range(_EVICTION_ROUNDS):
            try:
                leaving = self._decide(part, taken_bytes, wait)
            except OSError as exc:
                if not is_no_space(exc) or not self.make_way(taken_bytes, wait):
                    raise
                continue
            if leaving is None:
                return False
            if not leaving:
                part.reserved_bytes = size_bytes
                return True
            self._delete(leaving)
        return False

    def make_way(self, size_bytes: int, wait: float) -> bool:
        """Evict for a write that found the disk (or the user's quota) full, which no budget had foreseen.

        Args:
            size_bytes: how much to evict, at most by a shard more.
            wait: only shards that are needed later than this go.

        Returns:
            Whether anything went, so that another attempt is worth it.
        """
        with exclusive(self.root / "lock"):
            leaving = [path for path in self.own("trash") if _is_unread(path)]
            leaving += self._push_out(list(self.shards()), size_bytes, wait)[0]
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
                if not self._is_surely_small() and not self.shrink():
                    return
                self._within_bytes = self.limit_bytes
        finally:
            self._tending.release()

    def shrink(self) -> bool:
        """Evict what is beyond the limit and what the floor of free disk asks for; whether it was enough."""
        with exclusive(self.root / "lock"):
            self._follow_limit()
            held, in_trash = list(self.shards()), list(self.own("trash"))
            leaving = [path for path in in_trash if _is_unread(path)]
            leaving_bytes = sum(map(bytes_below, leaving))
            used = sum(shard.size_bytes for shard in held) + sum(map(bytes_below, in_trash))
            excess = used - self._allowed_bytes(used)
            if excess <= 0:
                return True
            pushed, pushed_bytes = self._push_out(held, excess - leaving_bytes, wait=-1.0)
        if pushed:
            logger.info("cache %s: %d shards made way, %d bytes too many", self.root, len(pushed), excess)
        self._delete(leaving + pushed)
        return leaving_bytes + pushed_bytes >= excess

    @property
    def allowed_bytes(self) -> int:
        """The most that it may take now: its limit, or less where the disk is short."""
        return self._allowed_bytes(self.used_bytes)

    @property
    def bound(self) -> str:
        """In words, what it is that it can't take more than."""
        allowed = self.allowed_bytes
        if allowed < self.limit_bytes:
            return f"what the disk leaves to it ({allowed:,} bytes, with {self.free_disk} kept free)"
        return f"its limit of {self.limit_bytes:,} bytes"

    def sweep(self) -> None:
        """Remove what dead processes left.

        That is: verdicts that nobody stands by, parts of shards that somebody else has published, and what
        was being deleted.

        To be called when a run begins, so that it asks again for what an earlier one could not have.
        """
        with exclusive(self.root / "lock"):
            for verdict in list(self.own("gone")):
                self._stands(verdict)
            for part in list(self.own("parts")):
                self._drop_if_useless(part)
            runs.waits(self.root / "runs", ())
            leaving = list(self.own("trash"))
        for path in leaving:
            self.delete(path)

    def out_of_sight(self, path: Path) -> Path:
        """Take a directory of the tier away by one rename; where it is now, for its files to be deleted."""
        target = self.root / "trash" / f"{path.name[:32]}.{secrets.token_hex(4)}"
        path.rename(target)
        return target

    def trash(self, path: Path) -> bool:
        """Take a directory of the tier away: first out of sight, by one rename, then its files.

        What somebody still reads stays in the trash, so that it counts, until he is through.

        Returns:
            False if the disk doesn't allow it.
        """
        try:
            self.delete(self.out_of_sight(path))
        except FileNotFoundError:
            return not path.exists()
        except OSError:
            return False
        return True

    def condemn(self, path: Path) -> bool:
        """Take away a shard whose bytes can't be trusted; False if the disk doesn't allow it."""
        self.counts.add("checksum_failures", 1)
        return self.trash(path)

    def _decide(self, part: Part, size_bytes: int, wait: float) -> list[Path] | None:
        """Under the lock: note the reservation ([]), or say what has to be deleted first (None: can't be)."""
        with exclusive(self.root / "lock"):
            everything, in_trash = list(self.shards()), list(self.own("trash"))
            leaving = [path for path in in_trash if _is_unread(path)]
            leaving_bytes = sum(map(bytes_below, leaving))
            used = sum(shard.size_bytes for shard in everything) + sum(map(bytes_below, in_trash))
            held = [shard for shard in everything if shard.path != part.path]
            others = used - sum(shard.size_bytes for shard in everything if shard.path == part.path)
            excess = others + size_bytes - self._allowed_bytes(used)
            if excess <= 0:
                write_whole(part.path / "reserved", str(size_bytes))
                return []
            victims = ledger.victims(
                held,
                runs.waits(self.root / "runs", sorted({shard.digest for shard in held})),
                newcomer_wait=wait,
                excess_bytes=excess - leaving_bytes,
                may_go=_is_closed,
                eviction=self.eviction,
            )
            if victims is None:
                return None
            self.counts.add("shards_evicted", len(victims))
            return leaving + [self._evicted(victim.path) for victim in victims]

    def _evicted(self, path: Path) -> Path:
        """As out_of_sight; in this moment whoever filled it may have taken it away."""
        try:
            return self.out_of_sight(path)
        except FileNotFoundError:
            return self.root / "trash" / path.name

    def _push_out(self, held: list[HeldShard], excess_bytes: int, wait: float) -> tuple[list[Path], int]:
        """Under the lock: put out of sight as much as may go. What has to be deleted, and its bytes."""
        gone = ledger.giving_way(
            held,
            runs.waits(self.root / "runs", sorted({shard.digest for shard in held})),
            newcomer_wait=wait,
            excess_bytes=excess_bytes,
            may_go=_is_closed,
            eviction=self.eviction,
        )
        self.counts.add("shards_evicted", len(gone))
        return [self._evicted(shard.path) for shard in gone], sum(shard.size_bytes for shard in gone)

    def _allowed_bytes(self, used_bytes: int) -> int:
        disk = self._disk_usage(self.root)
        stored = used_bytes - self._unwritten_bytes()
        floor = self.free_disk.floor_bytes(disk.total, disk.free + stored)
        return ledger.allowed_bytes(self.limit_bytes, stored, disk.free, floor)

    def _unwritten_bytes(self) -> int:
        """What is reserved and not yet on the disk."""
        return sum(self._size(path, "parts") - bytes_below(path) for path in self.own("parts"))

    def _is_surely_small(self) -> bool:
        """Whether it is certain that nothing has to go, without a look at every shard."""
        disk = self._disk_usage(self.root)
        floor = self.free_disk.floor_bytes(disk.total, disk.total)
        return self.limit_bytes >= self._within_bytes and disk.free - self._unwritten_bytes() >= floor

    def delete(self, path: Path) -> None:
        """Delete what is out of sight, unless somebody still reads it: until then it takes its room."""
        if _is_unread(path):
            shutil.rmtree(path, ignore_errors=True)

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            self.delete(path)

    def _drop_if_useless(self, part: Path) -> None:
        """Under the lock: take an orphan away whose shard is published, or whose filler never began."""
        lock = FileLock.acquire(part / "index")
        never_begun = lock is None and not (part / "index").exists()
        if never_begun or (lock is not None and self.published(part.name[:32]).exists()):
            with contextlib.suppress(FileNotFoundError):  # its filler lived, and has just moved it
                self.out_of_sight(part)
        if lock is not None:
            lock.close()

    def _stands(self, verdict: Path) -> bool:
        """Whether a verdict still holds: somebody who has acted on it is alive. If not, it is removed."""
        if not verdict.exists():
            return False
        lock = FileLock.acquire(verdict / "names")
        if lock is None:
            return True
        with contextlib.suppress(OSError), contextlib.closing(lock):
            verdict = self.out_of_sight(verdict)
        self.delete(verdict)
        return False

    def _size(self, path: Path, kind: str) -> int:
        if kind == "parts":
            with contextlib.suppress(FileNotFoundError, ValueError):
                return max(int((path / "reserved").read_text()), bytes_below(path))
            return bytes_below(path)
        if path not in self._published_bytes:  # a published shard doesn't change any more
            self._published_bytes[path] = bytes_below(path)
        return self._published_bytes[path]

    def _prepare(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.root.stat()
        if status.st_uid != os.geteuid():
            raise CacheError(f"the cache directory {self.root} belongs to another user (uid {status.st_uid})")
        if stat.S_IMODE(status.st_mode) & 0o022:
            raise CacheError(
                f"others may write into the cache directory {self.root} "
                f"(mode {stat.S_IMODE(status.st_mode):o}): chmod go-w it, or choose another"
            )
        for room in ("parts", "shards", "bare", "gone", "runs", "trash"):
            (self.root / room).mkdir(mode=0o700, exist_ok=True)
            if (self.root / room).is_symlink():
                raise CacheError(f"{self.root / room} is a symbolic link: a cache keeps to its own directory")

    def _follow_limit(self) -> None:
        """Take up the limit that another run may have given to the tier."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self.limit_bytes = int(json.loads((self.root / "tier.json").read_text())["limit_bytes"])

    def _settle_limit(self, limit_bytes: int | None) -> int:
        record = self.root / "tier.json"
        if record.exists() and not record.is_file():
            raise CacheError(f"{record} is not a regular file: remove it, or choose another directory")
        with exclusive(self.root / "lock"):
            try:
                known = json.loads(record.read_text())
                if known["format"] != FORMAT:
                    raise CacheError(
                        f"{self.root} is a cache of format {known['format']}, this streamload writes "
                        f"{FORMAT}: choose another directory, or clear it"
                    )
                known_limit = int(known["limit_bytes"])
            except FileNotFoundError:
                known_limit = None
            except (ValueError, KeyError, TypeError) as exc:
                raise CacheError(f"{record} is not a record of a streamload cache: {exc}") from exc
            if limit_bytes is None and known_limit is None:
                raise CacheError(f"{self.root} is a new cache: give it a limit")
            limit = known_limit if limit_bytes is None else limit_bytes
            assert limit is not None
            if limit != known_limit:
                if known_limit is not None:
                    logger.info(
                        "cache %s: its limit is %d bytes now, for all who use it; it was %d",
                        *(self.root, limit, known_limit),
                    )
                write_whole(record, json.dumps({"format": FORMAT, "limit_bytes": limit}))
            return limit


def open_tier(settings: Settings) -> Tier:
    """The tier of a run at its beginning: with the limit that was asked for, else with the one it has.

    Raises:
        CacheError: the directory can't be used, or isn't ours.
    """
    root, held = settings.cache_dir, 0
    open_one = functools.partial(Tier, root, free_disk=settings.free_disk, eviction=settings.eviction)
    if (root / "tier.json").is_file():
        tier = open_one()
        tier.sweep()
        if settings.sources["cache_size"] == "default":
            return tier
        held = tier.used_bytes
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    return open_one(settings.cache_size.limit_bytes(shutil.disk_usage(existing).free, held))


def write_whole(path: Path, text: str) -> None:
    """Replace a small file at once: readers see the old or the new text, never a half. Under the lock.

    The new text always has the same name, so that a kill leaves at most one, and the next call takes it.
    """
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.write_text(text)
        fresh.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


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


def _is_unread(path: Path) -> bool:
    """Whether nobody reads a directory that is out of sight: nobody can begin to any more."""
    lock = FileLock.acquire(path / "names")
    if lock is not None:
        lock.close()
        return True
    return not (path / "names").exists()


def bytes_below(path: Path) -> int:
    """What a directory of files takes on disk, at least a block for each."""
    total = 0
    with contextlib.suppress(FileNotFoundError, PermissionError):
        for entry in os.scandir(path):
            with contextlib.suppress(FileNotFoundError):
                total += max(_BLOCK, _blocks(entry.stat(follow_symlinks=False).st_size))
    return total


def _blocks(size_bytes: int) -> int:
    return -(-size_bytes // _BLOCK) * _BLOCK
