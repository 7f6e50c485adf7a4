"""The demand of a node's runs: each reading process announces its next shards in a small file (`runs/`).

A file holds the digests of the shards that the process has open, then of those that it will open, in order.
The files of all live processes give the next use of each shard, which is all that eviction needs. The writer
holds a lock on its file; a file without one belongs to no live process and is deleted. Version logs
(freshness.py) lie here, too, to follow the same rule.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamload.cache.locks import FileLock
from streamload.descriptors import Descriptor

_HEADER_BYTES = 8  # the number of visits
_NAME = re.compile(r"([0-9]+)\.[0-9a-f]{8}")
_VERSION_LOG = re.compile(r"\w+(\.[0-9-]+)?\.page")
_ATTEMPTS = 100
VISITS_KEPT = 4096
"""Visits in a file, 32 KiB; later ones count as never."""


def short(digest: str) -> int:
    """The 64 bits of a digest that stand for a shard in a run's file."""
    return int(digest[:16], 16)


class DemandFile:
    """The demand file of this process: the shards that it will visit.

    It is advice for eviction: on a disk that doesn't take it, nothing is announced.
    """

    def __init__(self, directory: Path):
        self._file: Descriptor | None = None
        self._lock: FileLock | None = None
        self._path = directory
        with contextlib.suppress(OSError):
            for _ in range(_ATTEMPTS):
                self._path = directory / f"{os.getpid()}.{secrets.token_hex(4)}"
                self._file = Descriptor.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                self._lock = FileLock.acquire(self._path)
                if self._lock is not None and self._path.exists():
                    return
                self.close()  # it was taken for a dead process's before it was locked: make another

    @property
    def path(self) -> Path:
        """Its file."""
        return self._path

    def announce(self, digests: Iterable[str]) -> None:
        """Announce the open shards and the next ones, in order (a shard may come again)."""
        self.tell(np.fromiter((short(d) for d in itertools.islice(digests, VISITS_KEPT)), dtype="<u8"))

    def tell(self, names: npt.NDArray[np.uint64]) -> None:
        """Announce the same by `short` names."""
        if self._file is None:
            return
        visits = names[:VISITS_KEPT].astype("<u8", copy=False)
        with contextlib.suppress(OSError):
            os.pwrite(self._file.number, np.uint64(len(visits)).tobytes() + visits.tobytes(), 0)

    def close(self) -> None:
        """Delete the file. Idempotent."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        if self._lock is not None:
            self._lock.close()
        if self._file is not None:
            self._file.close()
            self._file = None


def next_uses(directory: Path, digests: Sequence[str]) -> dict[str, float]:
    """The next use of each shard over all live runs, in visits from now; absent: no run will visit it.

    Deletes the files of dead processes. Call it under the tier's lock.
    """
    names = np.fromiter(map(short, digests), "<u8", len(digests))
    order = np.argsort(names)
    known, nearest = names[order], np.full(names.size, np.inf)
    for path in sorted([*own(directory), *version_logs(directory)]):
        dead = FileLock.acquire(path)
        if dead is not None:
            path.unlink(missing_ok=True)
            dead.close()
            continue
        coming = visits_of(path)
        at = np.searchsorted(known, coming)  # of equal names the first
        is_known = at < known.size
        is_known[is_known] = known[at[is_known]] == coming[is_known]
        np.minimum.at(nearest, at[is_known], np.flatnonzero(is_known))
    nearest = nearest[np.searchsorted(known, known)]  # a shard and its prepared forms are needed alike
    found = zip(order.tolist(), nearest.tolist(), strict=True)
    return {digests[place]: next_use for place, next_use in found if next_use < np.inf}


def lives(path: Path) -> bool:
    """Whether the process of a run's file lives: it holds the lock."""
    lock = FileLock.acquire(path)
    if lock is None:
        return path.exists()
    lock.close()
    return False


def own(directory: Path) -> list[Path]:
    """The files of runs, live or dead; what else lies there wasn't made by a run and is never touched."""
    with os.scandir(directory) as entries:
        return [Path(e.path) for e in entries if _NAME.fullmatch(e.name) and e.is_file(follow_symlinks=False)]


def version_logs(directory: Path) -> list[Path]:
    """The pages of runs (cache/freshness.py), live or dead."""
    with os.scandir(directory) as entries:
        return [
            Path(e.path)
            for e in entries
            if _VERSION_LOG.fullmatch(e.name) and e.is_file(follow_symlinks=False)
        ]


def pid_of(path: Path) -> int:
    """The process that made a run's file."""
    return int(path.name.partition(".")[0])


def visits_of(path: Path) -> npt.NDArray[np.uint64]:
    """The shards that a run's file tells of, by `short` name: those that are open, then the next ones."""
    try:
        with Descriptor.open(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
            count = int.from_bytes(os.pread(file.number, _HEADER_BYTES, 0), "little")
            content = os.pread(file.number, 8 * min(count, VISITS_KEPT), _HEADER_BYTES)
    except FileNotFoundError:
        return np.empty(0, dtype="<u8")
    return np.frombuffer(content, dtype="<u8", count=len(content) // 8)
