"""Who is reading what, and how far: one small file for each reading process, in the tier's `runs/`.

A file holds the digests of the shards in the order in which the process will visit them, and how many of
those visits are over. From the files of all live processes follows how soon each shard is needed, which is
all that eviction asks. The writer holds a lock on its file; a file without one belongs to nobody and goes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamload.cache.locks import FileLock

_HEADER = 16  # bytes: visits done, number of visits
VISITS_KEPT = 1 << 16
"""How many visits ahead a file tells of: 512 KiB. What comes later counts as never."""


def short(digest: str) -> int:
    """The 64 bits of a digest that stand for a shard in a run's file."""
    return int(digest[:16], 16)


class Run:
    """This process's own file: what it will visit, and how far it is."""

    def __init__(self, directory: Path):
        self._path = directory / f"{os.getpid()}.{secrets.token_hex(4)}"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.pwrite(self._descriptor, bytes(_HEADER), 0)
        lock = FileLock.acquire(self._path)
        if lock is None:
            raise FileNotFoundError(f"{self._path.name} was taken away while it was made")
        self._lock = lock

    def announce(self, digests: Iterable[str]) -> None:
        """Say which shards will be visited from here on, in order (a shard may come again)."""
        visits = np.fromiter((short(d) for d in digests), dtype="<u8")[:VISITS_KEPT]
        header = np.array([0, len(visits)], dtype="<u8")
        os.pwrite(self._descriptor, header.tobytes() + visits.tobytes(), 0)

    def advance(self, visits_done: int) -> None:
        """Say how many of the announced visits are over."""
        os.pwrite(self._descriptor, np.uint64(visits_done).tobytes(), 0)

    def close(self) -> None:
        """Take the file away; once is enough."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._lock.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def waits(directory: Path, digests: Sequence[str]) -> dict[str, float]:
    """How many visits away each shard's next use is, over all live runs; absent = no run will visit it.

    Files of processes that are gone are removed on the way. Call it while deciding.
    """
    wanted = {short(digest): digest for digest in digests}
    found: dict[str, float] = {}
    for path in sorted(directory.iterdir()):
        dead = FileLock.acquire(path)
        if dead is not None:
            path.unlink(missing_ok=True)
            dead.close()
            continue
        coming = _coming(path)
        for at in np.flatnonzero(np.isin(coming, np.fromiter(wanted, dtype="<u8", count=len(wanted)))):
            digest = wanted[int(coming[at])]
            found[digest] = min(found.get(digest, np.inf), float(at))
    return found


def _coming(path: Path) -> npt.NDArray[np.uint64]:
    """The visits of a run's file that are not over yet."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return np.empty(0, dtype="<u8")
    if len(content) < _HEADER:
        return np.empty(0, dtype="<u8")
    done, count = np.frombuffer(content, dtype="<u8", count=2)
    visits = np.frombuffer(content, dtype="<u8", offset=_HEADER, count=(len(content) - _HEADER) // 8)
    return visits[int(done) : int(count)]
