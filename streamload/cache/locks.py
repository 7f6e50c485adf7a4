"""Advisory locks (flock) on files of a tier: which process is live, reads, or decides.

A lock ends with its process, so nothing has to be cleaned up after a kill. Locks only save bandwidth and
guard the budget: checksums tell right bytes from wrong ones. POSIX record locks are unsuitable: they vanish
when any descriptor of the file is closed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_digest

from streamload.descriptors import Descriptor
from streamload.errors import CacheError
from streamload.shards.record import write_at

PATIENCE_SECONDS = 15.0
"""Longest time for a decision of another process; usually milliseconds."""
_RETRY_SECONDS = 0.002
_ATTEMPTS = 100
_STAMP_BYTES = 16
_NOTE = Struct(f"<{_STAMP_BYTES}s4q")
"""After the stamp of the lock's holder: that stamp again, the values of UsedBytes; then a checksum."""
_CHECK_BYTES = 8


class FileLock:
    """One held lock on one file; `close()` releases it. Forked children don't inherit it."""

    def __init__(self, file: Descriptor):
        self._file = file

    @property
    def file(self) -> Descriptor:
        """The locked file: open for writing, unless the lock is shared."""
        return self._file

    @classmethod
    def acquire(
        cls, path: str | Path, *, shared: bool = False, create: bool = False, wait: bool = False
    ) -> FileLock | None:
        """Lock `path`; None if another process has it locked, or if there is no such file.

        Args:
            path: the file; symbolic links are never followed.
            shared: take a lock that others may share.
            create: create the file if it is missing.
        """
        # Files to read may be read-only; a planted FIFO must not block.
        access = os.O_RDONLY if shared and not create else os.O_RDWR
        flags = access | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            file = Descriptor.open(path, flags)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fcntl.flock(file.number, kind)
        except BlockingIOError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        return cls(file)

    def is_of(self, path: Path) -> bool:
        """True if `path` is still the locked file, owned by this user and without other hard links."""
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            is_own = status.st_uid == os.geteuid() and status.st_nlink == 1
            return is_own and self._file.number >= 0 and os.path.samestat(os.fstat(self._file.number), status)
        return False

    def close(self) -> None:
        """Release the lock. Idempotent."""
        self._file.close()


def is_locked(path: Path, *, shared: bool = False) -> bool:
    """True if another process's lock conflicts with one of ours (see `FileLock.acquire`)."""
    lock = FileLock.acquire(path, shared=shared)
    if lock is None:
        return path.exists()
    lock.close()
    return False


def live_file(directory: Path, suffix: str = "") -> tuple[Path, FileLock]:
    """Make a file that lives as long as this process: `<pid>.<8 hex characters><suffix>`, locked.

    Raises:
        OSError: the disk doesn't take it.
    """
    for _ in range(_ATTEMPTS):
        path = directory / f"{os.getpid()}.{secrets.token_hex(4)}{suffix}"
        lock = FileLock.acquire(path, create=True)
        if lock is not None and lock.is_of(path):
            return path, lock
        if lock is not None:  # deleted as a dead process's before it was locked: make another
            lock.close()
    raise FileExistsError(errno.EEXIST, "no name is free", str(directory))


def remove_live_file(path: Path, lock: FileLock) -> None:
    """Delete a file of `live_file`; a fork of the process that made it leaves it alone."""
    if lock.file.number >= 0:
        with contextlib.suppress(OSError):
            path.unlink()
    lock.close()


def remove_if_unlocked(path: Path) -> bool:
    """Delete a file that no live process has locked; False if one has, or if there is none."""
    lock = FileLock.acquire(path)
    if lock is None:
        return False
    with contextlib.closing(lock):
        if lock.is_of(path):
            path.unlink(missing_ok=True)
    return True


class UsedBytes(NamedTuple):
    """Upper bounds of what a tier takes: all of it, and its columns alone.

    Attributes:
        total: all of it.
        columns_added: the bytes that were granted to columns so far.
        columns_gone: those of them that columns don't take: evicted, or not there when they were measured.
        measure_at: when columns are to be measured again, in milliseconds since the epoch.
    """

    total: int
    columns_added: int
    columns_gone: int
    measure_at: int

    @property
    def columns(self) -> int:
        """The columns alone."""
        return self.columns_added - self.columns_gone


class Usage:
    """Upper bounds of what a tier takes, recorded in its lock file for the next decision.

    They are raised before a byte is written, so a kill leaves them too high at worst. They are valid only
    with the stamp of the lock's last holder: a version of streamload that doesn't record them leaves none.

    Attributes:
        at_most: the upper bounds; None: unknown, count.
    """

    __slots__ = ("_file", "_stamp", "at_most")

    def __init__(self, file: Descriptor):
        self._file = file
        self.at_most = usage_of(file)
        self._stamp = secrets.token_bytes(_STAMP_BYTES)
        with contextlib.suppress(OSError):  # a full disk: waiting processes then don't see a change
            self._write(self.at_most)

    @property
    def at_most_bytes(self) -> int | None:
        """The upper bound of all that the tier takes; None: unknown, count."""
        return None if self.at_most is None else self.at_most.total

    def add(self, size_bytes: int, *, columns: bool = False) -> None:
        """Raise the recorded bounds, if there are any.

        Raises:
            OSError: they can't be written, and the recorded ones are too low.
        """
        if (before := self.at_most) is not None:
            added = before.columns_added + size_bytes * columns
            self.note(before._replace(total=before.total + size_bytes, columns_added=added))

    def note(self, at_most: UsedBytes) -> None:
        """Record other bounds.

        Raises:
            OSError: they can't be written, and a recorded one is too low.
        """
        try:
            self._write(at_most)
        except OSError:
            before = self.at_most
            if before is not None and (before.total < at_most.total or before.columns < at_most.columns):
                raise
        else:
            self.at_most = at_most

    def _write(self, at_most: UsedBytes | None) -> None:
        content = self._stamp
        if at_most is not None:
            note = _NOTE.pack(self._stamp, *at_most)
            content += note + xxh3_64_digest(note)
        write_at(self._file, content, 0)


def usage_of(file: Descriptor) -> UsedBytes | None:
    """The bounds recorded in a lock file; None if there are none, or if they aren't valid."""
    try:
        content = os.pread(file.number, _STAMP_BYTES + _NOTE.size + _CHECK_BYTES, 0)
    except OSError:  # a disk that fails to read may still take writes
        return None
    stamp, note, check = content[:_STAMP_BYTES], content[_STAMP_BYTES:-_CHECK_BYTES], content[-_CHECK_BYTES:]
    if len(note) != _NOTE.size or check != xxh3_64_digest(note):
        return None
    noted_stamp, *values = _NOTE.unpack(note)
    return UsedBytes(*values) if noted_stamp == stamp else None


@contextlib.contextmanager
def exclusive(path: str | Path) -> Iterator[Usage]:
    """Wait for the lock on `path` and hold it for the block: for decisions, never for transfers.

    The holder writes a stamp into the file, so that waiting processes see that the lock changes hands.

    Raises:
        CacheError: the holder doesn't release it, for example because it was stopped.
    """
    with Descriptor.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as file:
        _wait_for(file.number, path)
        yield Usage(file)


def _wait_for(descriptor: int, path: str | Path) -> None:
    stamp, since = b"", time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            tried_at, before = time.monotonic(), stamp
            stamp = os.pread(descriptor, _STAMP_BYTES, 0)
            since = since if stamp == before else tried_at
            if tried_at - since >= PATIENCE_SECONDS:
                raise CacheError(
                    f"{path} has been locked for {PATIENCE_SECONDS:g} s by a process that makes no progress"
                ) from None
            time.sleep(_RETRY_SECONDS)
