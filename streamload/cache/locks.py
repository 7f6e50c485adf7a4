"""Advisory locks on files of a tier (flock): who is alive, who is reading, who decides.

A lock ends with its process, so nothing has to be cleaned up after a kill. Locks only save bandwidth and
guard the budget: bytes are told right from wrong by checksums. POSIX record locks are no choice: they vanish
when any descriptor of the file is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from struct import Struct

from xxhash import xxh3_64_digest

from streamload.descriptors import Descriptor
from streamload.errors import CacheError
from streamload.shards.record import write_at

PATIENCE_SECONDS = 15.0
"""How long a decision of another process may take; they take milliseconds."""
_RETRY_SECONDS = 0.002
_STAMP_BYTES = 16
_NOTE = Struct(f"<{_STAMP_BYTES}sq")
"""Behind the stamp of who holds the lock: that stamp again, and bytes; a check of both follows."""
_CHECK_BYTES = 8


class FileLock:
    """One held lock on one file; `close()` gives it back. A forked child doesn't inherit it."""

    def __init__(self, file: Descriptor):
        self._file = file

    @classmethod
    def acquire(
        cls, path: Path, *, shared: bool = False, create: bool = False, wait: bool = False
    ) -> FileLock | None:
        """Lock `path`; None if somebody is in the way, or if the file isn't there.

        Args:
            path: the file; a symbolic link is never followed.
            shared: a lock that others may share.
            create: make the file if it is missing.
            wait: wait for whoever is in the way.
        """
        # What is read may be read-only; a FIFO that somebody has put there must not block.
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
        """Whether `path` is still the file that was locked, and this user's own, under no other name."""
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            is_own = status.st_uid == os.geteuid() and status.st_nlink == 1
            return is_own and self._file.number >= 0 and os.path.samestat(os.fstat(self._file.number), status)
        return False

    def close(self) -> None:
        """Give the lock back; once is enough."""
        self._file.close()


class Usage:
    """How much a tier takes at most: noted in its lock's file, for who decides next.

    Whoever grants room notes more before a byte is written, so a kill leaves it too high at worst. The note
    holds only with the stamp of the lock's last holder: a version of streamload that knows no notes leaves
    none behind.

    Attributes:
        at_most_bytes: no less than the tier takes now; None: it has to be counted.
    """

    __slots__ = ("_file", "_stamp", "at_most_bytes")

    def __init__(self, file: Descriptor):
        self._file = file
        self.at_most_bytes = usage_of(file)
        self._stamp = secrets.token_bytes(_STAMP_BYTES)
        with contextlib.suppress(OSError):  # a full disk: then all of the waiting counts
            self._write(self.at_most_bytes)

    def note(self, at_most_bytes: int) -> None:
        """Note another bound.

        Raises:
            OSError: the disk doesn't take it, and the one that stands there is too low.
        """
        try:
            self._write(at_most_bytes)
        except OSError:
            if self.at_most_bytes is not None and self.at_most_bytes < at_most_bytes:
                raise
        else:
            self.at_most_bytes = at_most_bytes

    def _write(self, at_most_bytes: int | None) -> None:
        content = self._stamp
        if at_most_bytes is not None:
            note = _NOTE.pack(self._stamp, at_most_bytes)
            content += note + xxh3_64_digest(note)
        write_at(self._file, content, 0)


def usage_of(file: Descriptor) -> int | None:
    """The bound that is noted in a lock's file; None if none is, or if it doesn't hold."""
    try:
        content = os.pread(file.number, _STAMP_BYTES + _NOTE.size + _CHECK_BYTES, 0)
    except OSError:  # a disk that can't be read may be written
        return None
    stamp, note, check = content[:_STAMP_BYTES], content[_STAMP_BYTES:-_CHECK_BYTES], content[-_CHECK_BYTES:]
    if len(note) != _NOTE.size or check != xxh3_64_digest(note):
        return None
    of, at_most_bytes = _NOTE.unpack(note)
    return int(at_most_bytes) if of == stamp else None


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[Usage]:
    """Wait for the lock on `path` and hold it for the block: for decisions, never for transfers.

    Who holds it writes a stamp into the file, by which those who wait see that it goes from one to another.

    Raises:
        CacheError: who holds it doesn't let go; a process that was stopped just there, say.
    """
    with Descriptor.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as file:
        _wait_for(file.number, path)
        yield Usage(file)


def _wait_for(descriptor: int, path: Path) -> None:
    stamp, since = b"", time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            now, before = time.monotonic(), stamp
            stamp = os.pread(descriptor, _STAMP_BYTES, 0)
            since = since if stamp == before else now
            if now - since >= PATIENCE_SECONDS:
                raise CacheError(
                    f"{path} has been locked for {PATIENCE_SECONDS:g} s by a process that doesn't go on"
                ) from None
            time.sleep(_RETRY_SECONDS)


def allow_many_files() -> None:
    """Let this process open as many files as it may: each shard that is read or was given up takes some.

    For processes that are ours; the limit that a shell sets, 1,024 mostly, is for those that use select().
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
