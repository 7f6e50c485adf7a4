"""The pages of a node's live runs in `runs/`: what each rank publishes about itself, beside its demand file.

A rank holds a lock on its page's file and writes it in place, about once a second. Readers show no page whose
lock is gone, so what a killed rank published vanishes with it; the next run deletes the file. What a page
says is page.py's.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from streamload.cache import demand
from streamload.cache.locks import FileLock, is_locked
from streamload.descriptors import Descriptor
from streamload.observe.page import MOST_BYTES, Clock, RunPage

logger = logging.getLogger("streamload")

_ATTEMPTS = 100
_RESERVED_BYTES = 8 << 10
"""Taken at once, so that a disk that fills up later still takes the page."""
_LOOKS, _LOOK_SECONDS = 5, 0.002
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class PageFile:
    """The file of a page, which lives as long as its process; a forked child doesn't have it.

    A disk that doesn't take it is logged once, and nothing is published; that harms nothing else.

    Args:
        root: of the tier.
    """

    def __init__(self, root: Path):
        self._lock: FileLock | None = None
        self._path = root / "runs"
        self._is_logged = False
        try:
            for path in files(root):
                _remove_if_dead(path)
            for _ in range(_ATTEMPTS):
                self._path = root / "runs" / f"{os.getpid()}.{secrets.token_hex(4)}.metrics"
                self._lock = FileLock.acquire(self._path, create=True)
                if self._lock is not None and self._lock.is_of(self._path):
                    _reserve(self._lock.file.number)
                    return
                self._unlock()  # deleted as a dead process's before it was locked: make another
        except OSError as exc:
            self.close()
            self._log(exc)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._path

    def write(self, page: RunPage) -> None:
        """Publish a page in place of the last one."""
        if self._lock is None:
            return
        content = page.encode()
        try:
            if len(content) <= MOST_BYTES and os.pwrite(self._lock.file.number, content, 0) == len(content):
                self._is_logged = False
        except OSError as exc:
            self._log(exc)

    def close(self) -> None:
        """Delete the file. Idempotent."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _log(self, error: OSError) -> None:
        if not self._is_logged:
            self._is_logged = True
            logger.warning(
                "this run can't be seen by `streamload top` and exporters, as its page can't be written: "
                "%s: %s; the training goes on",
                *(self._path, error.strerror or error),
            )


def read_runs(roots: Iterable[Path | str]) -> list[RunPage]:
    """The pages of all live ranks, by run and rank; about 0.1 ms each.

    A page says how old it is (`age_seconds`). Pages of killed processes aren't among them.

    Args:
        roots: of tiers: cache directories, and the one in memory (placement.memory_root). Those that don't
            exist, or aren't tiers, have none.
    """
    found = [page for root in dict.fromkeys(map(Path, roots)) for page in _read(root)]
    return sorted(found, key=lambda page: (page.run, page.rank, page.pid))


def files(root: Path) -> list[Path]:
    """The files of pages in a tier, of live or dead processes."""
    try:
        return sorted(demand.pages(root / "runs"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def lives(path: Path) -> bool:
    """True if the process that writes a page is alive: it holds the lock."""
    return is_locked(path, shared=True)


def now() -> Clock:
    """This moment, on this machine."""
    return Clock(_boot(), time.monotonic_ns(), time.time())


@functools.cache
def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _read(root: Path) -> Iterator[RunPage]:
    for path in files(root):
        with contextlib.suppress(OSError):  # deleted meanwhile, or another user's
            if lives(path):
                page = _page(path)
                if page is not None:
                    yield page


def _page(path: Path) -> RunPage | None:
    """The page in a file; looks again while it is being written. None: it isn't written yet."""
    with Descriptor.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
        for _ in range(_LOOKS):
            page = RunPage.decode(os.pread(file.number, MOST_BYTES, 0), now())
            if page is not None:
                return page
            time.sleep(_LOOK_SECONDS)
    return None


def _reserve(file: int) -> None:
    """Take the page's space, where the file system can."""
    try:
        os.posix_fallocate(file, 0, _RESERVED_BYTES)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _remove_if_dead(path: Path) -> None:
    """Delete a file that no process has locked."""
    with contextlib.suppress(OSError):
        dead = FileLock.acquire(path)
        if dead is not None:
            path.unlink(missing_ok=True)
            dead.close()
