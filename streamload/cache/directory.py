"""The layout of a tier's directory, the size of what is in it, and its removal by one rename.

    tier.json                 format of the directory, its limit
    lock                      held for decisions, never while bytes move; stamped by its last holder
    parts/<digest>.<nonce>/   a shard that arrives: data, index, names, reserved
    shards/<digest>/          a published shard: the same directory, renamed
    bare/<digest>/            index-only: the data had no space, its samples are read from the origin
    gone/<digest>/            the tombstone of a shard that was given up, with the samples before the failure
    columns/<name>/           values of the samples of a shard, a file for each definition (columns/)
    runs/                     what the live runs will read (demand.py); their metrics (observe/page.py)
    rows/                     what modules computed in calls (derived/store/); `reserved`: its room
    trash/                    being deleted

Anything with another name was not made here and is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import json
import logging
import os
import random
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from streamload.cache.eviction import HeldShard
from streamload.cache.locks import PATIENCE_SECONDS, Usage, exclusive, is_locked
from streamload.cache.shard import Shard
from streamload.descriptors import Descriptor, opening
from streamload.errors import CacheError
from streamload.metrics import Counts
from streamload.shards.record import write_at

logger = logging.getLogger("streamload")

FORMAT = 1
_DIGEST = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"([0-9a-f]{32})\.[0-9a-f]{8}")
KINDS: Mapping[str, re.Pattern[str]] = {
    "parts": _PART,
    "shards": _DIGEST,
    "bare": _DIGEST,
    "gone": _DIGEST,
    "columns": _DIGEST,
    "trash": _PART,
}
"""The names that the tier gives to directories in each subdirectory; anything else there is foreign."""
_FORGOTTEN = 1000
"""Cached sizes of deleted directories that are tolerated, beyond one for each that exists."""
_LINKS_LIMIT = 40
_ATTEMPTS = 100
WITHOUT_TEMPORARY = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})
"""A file system without files that have no name yet."""
BLOCK_BYTES = 4096
"""The block size of the disk, by which space is accounted."""


SUPERSEDED_NS = 0
"""The time of a copy whose prepared form has come; opening it sets another."""


class Directory:
    """The directory of a tier, whatever its limit.

    Args:
        counts: where damage is counted.
    """

    def __init__(self, root: Path | str, counts: Counts):
        self.root = Path(root).expanduser().absolute()
        self.counts = counts
        self._kinds = {kind: str(self.root / kind) for kind in KINDS}
        self._lock = f"{self.root}/lock"
        self._turn = threading.Lock()
        self._measured: dict[str, tuple[tuple[int, int], HeldShard]] = {}
        self.is_scanned = False
        """True if this process has measured the contents, so that another scan takes milliseconds."""

    def published(self, digest: str) -> Path:
        """The path of a published shard."""
        return Path(self._kinds["shards"], digest)

    def has(self, kind: str, digest: str) -> bool:
        """True if a shard is in one of the subdirectories; quicker than by its path."""
        return os.path.exists(f"{self._kinds[kind]}/{digest}")  # noqa: PTH110  (four for each shard)

    def has_whole(self, shard: Shard) -> bool:
        """True if a shard is published here, as its origin has it or in the form prepared for the run."""
        return any(self.has("shards", digest) for digest in shard.digests)

    def index_only(self, digest: str) -> Path:
        """The path of an index-only copy."""
        return Path(self._kinds["bare"], digest)

    def tombstone(self, digest: str) -> Path:
        """The path of the tombstone of a shard."""
        return Path(self._kinds["gone"], digest)

    def parts(self, digest: str) -> list[Path]:
        """The parts of a shard, live or orphaned."""
        return opening(lambda: sorted(Path(entry.path) for entry in self._own("parts", digest)))

    @contextlib.contextmanager
    def deciding(self) -> Iterator[Usage]:
        """Hold the tier's lock for the block: for decisions, never for transfers.

        Threads of this process take turns: polling for the lock of a file would cost each of them more than
        its decision.

        Raises:
            CacheError: as `exclusive`.
        """
        has_turn = self._turn.acquire(timeout=PATIENCE_SECONDS)
        try:
            with exclusive(self._lock) as usage:
                yield usage
        finally:
            if has_turn:
                self._turn.release()

    def own(self, kind: str) -> Iterator[Path]:
        """The directories that the tier made in one of its subdirectories, recognised by their names."""
        return (Path(entry.path) for entry in self._own(kind))

    def count_of(self, kind: str) -> int:
        """The number of directories that the tier made in one of its subdirectories."""
        return sum(1 for _ in self._own(kind))

    def shards(self) -> Iterator[HeldShard]:
        """All shards that take space: parts, published ones, index-only copies and tombstones.

        Parts come first, so that one that is published meanwhile is seen twice rather than never.
        """
        count = 0
        for kind in ("parts", "shards", "bare", "gone"):
            for entry in self._own(kind):
                with contextlib.suppress(FileNotFoundError):
                    yield self._held(kind, entry)
                    count += 1
        if len(self._measured) > 2 * count + _FORGOTTEN:
            self._measured = {}
        self.is_scanned = True

    def columns(self) -> Iterator[HeldShard]:
        """The directories of columns, measured anew; not under the lock, as there may be very many."""
        for entry in self._own("columns"):
            with contextlib.suppress(FileNotFoundError):
                yield self.column(entry.name)

    def column(self, digest: str) -> HeldShard:
        """The columns of one shard, measured anew.

        Raises:
            FileNotFoundError: they are gone.
        """
        path = Path(self._kinds["columns"], digest)
        return HeldShard(digest, path, bytes_below(path), "columns", path.stat().st_mtime)

    def oldest_columns(self, count: int, began_at: float) -> list[tuple[str, float]]:
        """So many columns that weren't used for longest, in the order in which they go: digest and last use.

        Among those that were used since `began_at` it is chance: by age a run over more than there is room
        for would lose each of them right before it reads it again.
        """
        listed = heapq.nsmallest(count, self._columns_by_use(began_at))
        return [(digest, used_at) for _, _, digest, used_at in listed]

    def _columns_by_use(self, began_at: float) -> Iterator[tuple[float, float, str, float]]:
        for entry in self._own("columns"):
            with contextlib.suppress(FileNotFoundError):
                used_at = entry.stat(follow_symlinks=False).st_mtime
                yield min(used_at, began_at), random.random(), entry.name, used_at

    def scan(self) -> None:
        """Measure the contents, the first time; not under the lock, as it may take a while."""
        if not self.is_scanned:
            for _ in self.shards():
                pass

    @property
    def used_bytes(self) -> int:
        """Bytes that the tier takes now: published shards, tombstones, reservations, columns and trash.

        Counted file by file; `Budget.used_bytes` is the recorded upper bound.
        """
        held = itertools.chain(self.shards(), self.columns())
        return sum(shard.size_bytes for shard in held) + sum(map(bytes_below, self.own("trash")))

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of that which are reserved and not yet on the disk."""
        return sum(_part_bytes(path) - bytes_below(path) for path in self.own("parts"))

    def move_to_trash(self, path: Path) -> Path:
        """Take a directory of the tier away by one rename; returns its path in the trash."""
        target = self.root / "trash" / f"{path.name[:32]}.{secrets.token_hex(4)}"
        path.rename(target)
        return target

    def delete(self, path: Path) -> None:
        """Delete a directory in the trash, unless somebody still reads it: until then it counts."""
        if is_unread(path):
            shutil.rmtree(path, ignore_errors=True)

    def empty_trash(self) -> None:
        """Delete all of the trash that nobody reads: the process that put it there may have been killed."""
        for path in list(self.own("trash")):
            self.delete(path)

    def trash(self, path: Path) -> bool:
        """Remove a directory of the tier: move it to the trash, then delete its files.

        What somebody still reads stays in the trash, and counts, until some process finds it unread.

        Returns:
            False if the disk doesn't allow it.
        """
        try:
            self.delete(self.move_to_trash(path))
        except FileNotFoundError:
            return not path.exists()
        except OSError:
            return False
        return True

    def quarantine(self, path: Path) -> bool:
        """Remove a shard with damaged bytes; False if the disk doesn't allow it."""
        self.counts.add("checksum_failures", 1)
        return self.trash(path)

    def _own(self, kind: str, start: str = "") -> Iterator[os.DirEntry[str]]:
        with os.scandir(self._kinds[kind]) as entries:
            for entry in entries:
                is_named = entry.name.startswith(start) and KINDS[kind].fullmatch(entry.name)
                if is_named and entry.is_dir(follow_symlinks=False):
                    yield entry

    def _held(self, kind: str, entry: os.DirEntry[str]) -> HeldShard:
        """Measure a directory; cached until it is used or replaced, so that rescans are quick."""
        status = entry.stat(follow_symlinks=False)
        which = (status.st_ino, status.st_mtime_ns)
        before, measured = self._measured.get(entry.path, (None, None))
        if measured is not None and before == which:
            return measured
        path = Path(entry.path)
        size = _part_bytes(path) if kind == "parts" else bytes_below(path)
        is_superseded = status.st_mtime_ns == SUPERSEDED_NS
        held = HeldShard(entry.name[:32], path, size, kind, status.st_mtime, is_superseded)
        if kind != "parts":  # they grow
            self._measured[entry.path] = (which, held)
        return held


class Limit:
    """The limit of a tier in `tier.json`, for all processes that use the tier.

    Args:
        limit_bytes: a new limit; None keeps the recorded one.

    Raises:
        CacheError: the tier is new and no limit is given, or its record can't be read.
    """

    def __init__(self, root: Path, limit_bytes: int | None):
        self._root = root
        self._record = root / "tier.json"
        if self._record.exists() and not self._record.is_file():
            raise CacheError(f"{self._record} is not a regular file: remove it, or choose another directory")
        self.size_bytes = 0
        self.set(limit_bytes)

    def set(self, limit_bytes: int | None) -> None:
        """Record a limit; None adopts the recorded one."""
        with exclusive(self._root / "lock"):
            recorded = self._recorded()
            limit = recorded if limit_bytes is None else limit_bytes
            if limit is None:
                raise CacheError(f"{self._root} is a new cache: give it a limit")
            if limit != recorded:
                if recorded is not None:
                    logger.info(
                        "cache %s: limit changed from %d to %d bytes, for all processes that use it",
                        *(self._root, recorded, limit),
                    )
                write_whole(self._record, json.dumps({"format": FORMAT, "limit_bytes": limit}))
            self.size_bytes = limit

    def follow(self) -> None:
        """Adopt the limit that another process may have set."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self.size_bytes = int(json.loads(_text_of(self._record))["limit_bytes"])

    def _recorded(self) -> int | None:
        try:
            record = json.loads(self._record.read_text())
            if record["format"] != FORMAT:
                raise CacheError(
                    f"{self._root} is a cache of format {record['format']}, this version of streamload "
                    f"writes {FORMAT}: choose another directory, or clear it"
                )
            return int(record["limit_bytes"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as exc:
            raise CacheError(f"{self._record} is not a record of a streamload cache: {exc}") from exc


def check_owner(root: Path) -> None:
    """Check that a cache may be at `root`, which need not exist. Changes nothing.

    Raises:
        CacheError: others own it or can write there, or another user has planted a link on the way.
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
    except PermissionError as exc:
        raise CacheError(
            f"the cache directory {root} can't be reached by uid {os.geteuid()}: {exc.strerror}"
        ) from exc
    if status.st_uid != os.geteuid():
        raise CacheError(f"the cache directory {root} belongs to another user (uid {status.st_uid})")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise CacheError(
            f"others may write into the cache directory {root} "
            f"(mode {stat.S_IMODE(status.st_mode):o}): chmod go-w it, or choose another"
        )


def _planted_link(path: Path) -> Path | None:
    """The first link in a path that neither this user nor root owns, where others may create links.

    The default names in /var/tmp and /dev/shm can be guessed: a link there could redirect our writes into any
    directory of ours. Linux refuses such links only with fs.protected_symlinks, and only in sticky
    directories.
    """
    followed, place, left_parts = 0, Path("/"), [*reversed(path.absolute().parts[1:])]
    while left_parts and followed < _LINKS_LIMIT:
        part = left_parts.pop()
        if part == "..":
            place = place.parent
            continue
        try:
            target = (place / part).readlink()
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # it doesn't exist, or can't be accessed at all
                return None
            place = place / part  # not a link
            continue
        if (place / part).lstat().st_uid not in (0, os.geteuid()) and place.stat().st_mode & 0o022:
            return place / part
        followed += 1
        place = Path("/") if target.is_absolute() else place
        left_parts += reversed(target.parts[target.is_absolute() :])
    return None


def write_whole(path: Path, text: str) -> None:
    """Replace a small file atomically, under the lock: readers see the old or the new text.

    The temporary file always has the same name: a kill leaves at most one, which the next call reuses. It has
    its name only once it is whole, so that nobody sees a part even where locks do nothing.
    """
    fresh = path.with_name(f"{path.name}.new")
    for _ in range(_ATTEMPTS):
        try:
            _write_new(fresh, text.encode())
            fresh.rename(path)
        except FileExistsError:
            fresh.unlink(missing_ok=True)
        except FileNotFoundError:  # another process has renamed it
            if not path.parent.is_dir():
                raise
        else:
            return
    raise CacheError(f"{path} can't be written: others write it all the time, as if there were no locks")


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that isn't there yet; where the file system allows that it appears whole."""
    try:
        file = Descriptor.open(path.parent, os.O_WRONLY | os.O_TMPFILE)
    except OSError as exc:
        if exc.errno not in WITHOUT_TEMPORARY:
            raise
        with Descriptor.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            try:
                write_at(file, content, 0)
            except BaseException:
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
        return
    with file:
        write_at(file, content, 0)
        os.link(f"/proc/self/fd/{file.number}", path, src_dir_fd=0)


def is_unread(path: Path) -> bool:
    """True if nobody reads a directory in the trash; nobody can open it any more."""
    return not is_locked(path / "names")


def inode_of(path: Path) -> tuple[int, int] | None:
    """The device and inode of a directory, which a rename keeps; None if there is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def bytes_below(path: str | Path) -> int:
    """The disk space of a directory of files, at least a block for each."""
    total = 0
    with contextlib.suppress(FileNotFoundError, PermissionError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                size_bytes = blocks_bytes(status.st_size)
                if entry.name.startswith("rows."):  # a column has holes
                    size_bytes = min(size_bytes, status.st_blocks * 512)
                total += max(BLOCK_BYTES, size_bytes)
    return total


class Reservation(NamedTuple):
    """Reservation of a part.

    Attributes:
        grows: whether the size of its shard isn't known, so that it may need more.
    """

    size_bytes: int
    grows: bool


def write_reservation(part: Path, reservation: Reservation) -> None:
    """Record the reservation of a part: a number, with a plus sign if it grows.

    The first one is written in place: a kill within it leaves a part without a filler, which needs none.
    """
    text = ("+" if reservation.grows else "") + str(reservation.size_bytes)
    try:
        file = Descriptor.open(f"{part}/reserved", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        write_whole(part / "reserved", text)
    else:
        with file:
            write_at(file, text.encode(), 0)


def reservation_of(part: Path) -> Reservation | None:
    """The reservation of a part; None: it is a new claim, or gone."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        text = _text_of(f"{part}/reserved")
        return Reservation(int(text), text.startswith("+"))
    return None


def _text_of(path: str | Path) -> str:
    """The text of a small file, read at once: a file object would cost as much as the decision."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, BLOCK_BYTES).decode()
    finally:
        os.close(descriptor)


def granted_bytes(part: Path) -> int:
    """The reservation of a part, or the one block of a new claim."""
    reservation = reservation_of(part)
    return BLOCK_BYTES if reservation is None else reservation.size_bytes


def _part_bytes(path: Path) -> int:
    """The larger of a part's reservation and its size."""
    reservation = reservation_of(path)
    return max(0 if reservation is None else reservation.size_bytes, bytes_below(path))


def rows_bytes(root: Path) -> int:
    """Bytes that the rows of modules take in a tier's directory: the files of their table."""
    return bytes_below(f"{root}/rows")


def reserved_for_rows(root: Path) -> int:
    """The room of rows in a tier's directory: what is reserved, or what they take if that is more."""
    reserved = 0
    with contextlib.suppress(OSError, ValueError):
        reserved = int(_text_of(f"{root}/rows/reserved"))
    return max(reserved, rows_bytes(root))


def blocks_bytes(size_bytes: int) -> int:
    """The disk space of a file of this size."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
