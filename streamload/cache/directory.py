"""What lies where in a tier's directory, what it takes, and how it leaves (step F): by one rename.

    tier.json                 format of the directory, its limit
    lock                      held while something is decided, never while bytes move; a stamp of who did last
    parts/<digest>.<nonce>/   a shard on its way: data, index, names, reserved
    shards/<digest>/          a published shard: the same directory, renamed
    bare/<digest>/            the index alone of one that had no room: its samples are read from the origin
    gone/<digest>/            a shard that was given up: the tombstone, and the samples it gave before
    runs/                     who reads what (cache/demand.py)
    trash/                    being deleted

What isn't named as above was not made here and is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from streamload.cache.eviction import HeldShard
from streamload.cache.locks import FileLock
from streamload.cache.shard import Shard
from streamload.descriptors import Descriptor
from streamload.errors import CacheError
from streamload.metrics import Counts
from streamload.shards.record import write_at

_DIGEST = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"([0-9a-f]{32})\.[0-9a-f]{8}")
KINDS: Mapping[str, re.Pattern[str]] = {
    "parts": _PART,
    "shards": _DIGEST,
    "bare": _DIGEST,
    "gone": _DIGEST,
    "trash": _PART,
}
"""How the directories are named that the tier makes in each of its rooms; all else there isn't its own."""
_FORGOTTEN = 1000
"""So many, and as many as there are, may be remembered that are gone."""
_LINKS_LIMIT = 40
BLOCK_BYTES = 4096
"""In which a disk gives out its room."""


class Directory:
    """The directory of a tier, whatever its limit.

    Args:
        root: where it is.
        counts: where damage is counted.
    """

    def __init__(self, root: Path | str, counts: Counts):
        self.root = Path(root).expanduser().absolute()
        self.counts = counts
        self._measured: dict[str, tuple[tuple[int, int], HeldShard]] = {}
        self.has_looked = False
        """Whether this process has measured what is there, so that to look again takes milliseconds."""

    def published(self, digest: str) -> Path:
        """Where a shard is when it is whole."""
        return self.root / "shards" / digest

    def has_whole(self, shard: Shard) -> bool:
        """Whether all of a shard is here, as its origin has it or prepared as the run wants it."""
        return any(self.published(digest).exists() for digest in shard.digests)

    def index_only(self, digest: str) -> Path:
        """Where the index of a shard is whose bytes had no room."""
        return self.root / "bare" / digest

    def tombstone(self, digest: str) -> Path:
        """Where the record of a shard is that was given up."""
        return self.root / "gone" / digest

    def parts(self, digest: str) -> list[Path]:
        """The parts of a shard, live or orphaned."""
        found = sorted((self.root / "parts").glob(f"{digest}.*"))
        return [path for path in found if _PART.fullmatch(path.name) and not path.is_symlink()]

    def own(self, kind: str) -> Iterator[Path]:
        """What the tier made in one of its rooms: real directories, by its names; the rest isn't touched."""
        return (Path(entry.path) for entry in self._own(kind))

    def shards(self) -> Iterator[HeldShard]:
        """All that takes room: parts, published shards, index-only copies and tombstones.

        Parts come first: one that is published meanwhile is seen twice then, and not never.
        """
        count = 0
        for kind in ("parts", "shards", "bare", "gone"):
            for entry in self._own(kind):
                with contextlib.suppress(FileNotFoundError):
                    yield self._held(kind, entry)
                    count += 1
        if len(self._measured) > 2 * count + _FORGOTTEN:
            self._measured = {}
        self.has_looked = True

    def look(self) -> None:
        """Measure what is there, the first time; not under the lock, as it may take a while."""
        if not self.has_looked:
            for _ in self.shards():
                pass

    def published_of(self, digests: Iterable[str]) -> list[Path]:
        """Where those of some shards are that are whole; no others are looked at."""
        return [path for path in map(self.published, digests) if path.is_dir()]

    @property
    def used_bytes(self) -> int:
        """What the tier takes now: published shards, tombstones, reservations, and what is being deleted.

        It is counted, file by file; `Budget.used_bytes` is what is known without.
        """
        return sum(shard.size_bytes for shard in self.shards()) + sum(map(bytes_below, self.own("trash")))

    @property
    def unwritten_bytes(self) -> int:
        """What of that is reserved and not yet on the disk."""
        return sum(_part_bytes(path) - bytes_below(path) for path in self.own("parts"))

    def out_of_sight(self, path: Path) -> Path:
        """Take a directory of the tier away by one rename; where it is now, for its files to be deleted."""
        target = self.root / "trash" / f"{path.name[:32]}.{secrets.token_hex(4)}"
        path.rename(target)
        return target

    def delete(self, path: Path) -> None:
        """Delete what is out of sight, unless somebody still reads it: until then it takes its room."""
        if is_unread(path):
            shutil.rmtree(path, ignore_errors=True)

    def empty_trash(self) -> None:
        """Delete what is out of sight and read by nobody: who put it there may have been killed since."""
        for path in list(self.own("trash")):
            self.delete(path)

    def trash(self, path: Path) -> bool:
        """Take a directory of the tier away: first out of sight, by one rename, then its files.

        What somebody still reads stays in the trash, so that it counts, until some process finds it unread.

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

    def quarantine(self, path: Path) -> bool:
        """Take away a shard whose bytes can't be trusted; False if the disk doesn't allow it."""
        self.counts.add("checksum_failures", 1)
        return self.trash(path)

    def _own(self, kind: str) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.root / kind) as entries:
            for entry in entries:
                if KINDS[kind].fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield entry

    def _held(self, kind: str, entry: os.DirEntry[str]) -> HeldShard:
        """What is known of something in a room; measured anew when it was used or replaced.

        All of a tier is looked at under its lock where something may have to go: thousands of shards take
        milliseconds.
        """
        status = entry.stat(follow_symlinks=False)
        which = (status.st_ino, status.st_mtime_ns)
        before, known = self._measured.get(entry.path, (None, None))
        if known is not None and before == which:
            return known
        path = Path(entry.path)
        size = _part_bytes(path) if kind == "parts" else bytes_below(path)
        found = HeldShard(entry.name[:32], path, size, kind, status.st_mtime)
        if kind != "parts":  # they grow
            self._measured[entry.path] = (which, found)
        return found

    def _prepare(self) -> None:
        """Make what is missing of it.

        Raises:
            CacheError: it isn't ours alone.
        """
        refuse_what_is_not_ours(self.root)
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_what_is_not_ours(self.root)  # what was put there meanwhile; ours can't be replaced any more
        for kind in (*KINDS, "runs"):
            (self.root / kind).mkdir(mode=0o700, exist_ok=True)
            if (self.root / kind).is_symlink():
                raise CacheError(f"{self.root / kind} is a symbolic link: a cache keeps to its own directory")


def refuse_what_is_not_ours(root: Path) -> None:
    """Whether a cache may be at `root`, where there may be nothing yet; it is only looked at.

    Raises:
        CacheError: it isn't this user's alone, or another user has planted a link on the way.
    """
    link = _planted_link(root)
    if link is not None:
        raise CacheError(
            f"{link} is a symbolic link of another user's (uid {link.lstat().st_uid}) in a directory where "
            f"others may write: remove it, or choose another cache_dir (STREAMLOAD_CACHE_DIR)"
        )
    try:
        status = root.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if status.st_uid != os.geteuid():
        raise CacheError(f"the cache directory {root} belongs to another user (uid {status.st_uid})")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise CacheError(
            f"others may write into the cache directory {root} "
            f"(mode {stat.S_IMODE(status.st_mode):o}): chmod go-w it, or choose another"
        )


def _planted_link(path: Path) -> Path | None:
    """The first link on the way to a file that is neither ours nor root's, where others may make links.

    A directory of a name that anybody can guess is looked for in /var/tmp and /dev/shm: a link there could
    have us write into any directory of ours. Linux refuses to follow such links only where it is told so
    (fs.protected_symlinks), and only in sticky directories.
    """
    followed, at, rest = 0, Path("/"), [*reversed(path.absolute().parts[1:])]
    while rest and followed < _LINKS_LIMIT:
        part = rest.pop()
        if part == "..":
            at = at.parent
            continue
        try:
            target = (at / part).readlink()
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # nothing is there; or it can't be looked at, nor used then
                return None
            at = at / part  # it is no link
            continue
        if (at / part).lstat().st_uid not in (0, os.geteuid()) and at.stat().st_mode & 0o022:
            return at / part
        followed += 1
        at = Path("/") if target.is_absolute() else at
        rest += reversed(target.parts[target.is_absolute() :])
    return None


def write_whole(path: Path, text: str) -> None:
    """Replace a small file at once: readers see the old or the new text, never a half. Under the lock.

    The new text always has the same name, so that a kill leaves at most one, and the next call takes it.
    """
    fresh = path.with_name(f"{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        try:
            file = Descriptor.open(fresh, flags)
        except FileExistsError:
            fresh.unlink()
            file = Descriptor.open(fresh, flags)
        with file:
            write_at(file, text.encode(), 0)
        fresh.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def is_unread(path: Path) -> bool:
    """Whether nobody reads a directory that is out of sight: nobody can begin to any more."""
    lock = FileLock.acquire(path / "names")
    if lock is not None:
        lock.close()
        return True
    return not (path / "names").exists()


def bytes_below(path: Path) -> int:
    """What a directory of files takes on disk, at least a block for each."""
    total = 0
    with contextlib.suppress(FileNotFoundError, PermissionError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += max(BLOCK_BYTES, blocks_bytes(entry.stat(follow_symlinks=False).st_size))
    return total


def granted_bytes(part: Path) -> int:
    """What a part was granted: what is reserved for it, or the one block of a claim."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int((part / "reserved").read_text())
    return BLOCK_BYTES


def _part_bytes(path: Path) -> int:
    """What a part takes, or will take: what is reserved for it."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return max(int((path / "reserved").read_text()), bytes_below(path))
    return bytes_below(path)


def blocks_bytes(size_bytes: int) -> int:
    """What a file of this size takes on disk."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
