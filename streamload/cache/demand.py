"""The files of a node's runs in `runs/`: what each will read next, and which versions it has chosen.

A demand file lists the digests of the shards that a process has open, then of those that it will open, in
order. The files of all live processes give the next use of each shard, which is what eviction needs. A
version log (freshness.py) is shared by the processes of a run. Writers hold a lock on their files; a file
without a lock belongs to dead processes and is deleted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamload.cache.locks import FileLock, exclusive, live_file, remove_if_unlocked, remove_live_file
from streamload.descriptors import Descriptor
from streamload.origins.origin import Version

_HEADER_BYTES = 8  # the number of visits
_NAME = re.compile(r"([0-9]+)\.[0-9a-f]{8}")
_VERSION_LOG = re.compile(r"\w+(\.[0-9-]+)?\.page")
_PAGE = re.compile(r"([0-9]+)\.[0-9a-f]{8}\.metrics")
_NO_VISITS = bytes(8)
"""A version log starts with this: read as a demand file it has no visits."""
VISITS_KEPT = 4096
"""Visits in a file, 32 KiB; later ones count as never."""


def short(digest: str) -> int:
    """The 64 bits of a digest that identify a shard in a demand file."""
    return int(digest[:16], 16)


class DemandFile:
    """The demand file of this process: the shards that it will visit.

    It is advice for eviction: if the disk doesn't take it, nothing is announced.
    """

    def __init__(self, directory: Path):
        self._path = directory
        self._lock: FileLock | None = None
        with contextlib.suppress(OSError):
            self._path, self._lock = live_file(directory)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._path

    def announce(self, digests: Iterable[str]) -> None:
        """Announce the open shards and the next ones, in order; a shard may occur again."""
        self.tell(np.fromiter((short(d) for d in itertools.islice(digests, VISITS_KEPT)), dtype="<u8"))

    def tell(self, names: npt.NDArray[np.uint64]) -> None:
        """Announce `short` names."""
        if self._lock is None:
            return
        visits = names[:VISITS_KEPT].astype("<u8", copy=False)
        with contextlib.suppress(OSError):
            os.pwrite(self._lock.file.number, np.uint64(len(visits)).tobytes() + visits.tobytes(), 0)

    def close(self) -> None:
        """Delete the file. Idempotent."""
        if self._lock is not None:
            remove_live_file(self._path, self._lock)
            self._lock = None


class VersionLog:
    """The version log of a run, as one process has it open: which version of each shard the run uses.

    One line per shard, appended and read by all processes of the run; the first line of a shard counts.
    """

    def __init__(self, root: Path, name: str):
        self._versions: dict[str, Version] = {}
        self._read_bytes = len(_NO_VISITS)
        self._lock_path = root / "lock"
        self._path = root / "runs" / f"{name}.page"
        self._pin: FileLock | None = None
        self._file: Descriptor | None = None
        with contextlib.suppress(OSError):  # if the disk takes no log, each process decides for itself
            self._open()

    def _open(self) -> None:
        with exclusive(self._lock_path):  # only under it are the files of dead processes removed
            alone = FileLock.acquire(self._path, create=True)
            if alone is not None:  # new, or of a run without live processes
                self._path.write_bytes(_NO_VISITS)
                alone.close()
            self._pin = FileLock.acquire(self._path, shared=True)
            if self._pin is not None:
                self._file = Descriptor.open(self._path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)

    def version(self, digest: str) -> Version | None:
        """The version chosen for a shard; reads the file only while it isn't known."""
        if digest not in self._versions:
            with contextlib.suppress(OSError):
                self._read()
        return self._versions.get(digest)

    def write(self, digest: str, version: Version) -> None:
        """Choose a version; an earlier choice of another process stands."""
        line = json.dumps([digest, *astuple(version)]) + "\n"
        with contextlib.suppress(OSError):  # a full disk: then the others ask by themselves
            if self._file is not None:
                os.write(self._file.number, line.encode())
                self._read()
        self._versions.setdefault(digest, version)

    def close(self) -> None:
        """Close it; the last process of the run deletes it."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._pin is None:
            return
        self._pin.close()
        self._pin = None
        with contextlib.suppress(OSError), exclusive(self._lock_path):
            remove_if_unlocked(self._path)

    def _read(self) -> None:
        """Read the new complete lines; the first of a shard counts."""
        if self._file is None:
            return
        size = os.fstat(self._file.number).st_size
        text = os.pread(self._file.number, max(0, size - self._read_bytes), self._read_bytes)
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, TypeError):  # cut by a full disk
                digest, *facts = json.loads(line)
                self._versions.setdefault(digest, Version(*facts))


def next_uses(directory: Path, digests: Sequence[str]) -> dict[str, float]:
    """The next use of each shard over all live runs, in visits from now; absent: no run will visit it.

    Deletes the files of dead processes. Call it under the tier's lock.
    """
    shorts = np.fromiter(map(short, digests), "<u8", len(digests))
    names, places_of = np.unique(shorts, return_inverse=True)  # a shard and its prepared forms have one
    nearest = np.full(names.size, np.inf)
    for path in sorted([*files(directory), *version_logs(directory)]):
        if remove_if_unlocked(path):
            continue
        coming = visits_of(path)
        places = np.searchsorted(names, coming)
        is_known = places < names.size
        is_known[is_known] = names[places[is_known]] == coming[is_known]
        np.minimum.at(nearest, places[is_known], np.flatnonzero(is_known))
    by_digest = zip(digests, nearest[places_of].tolist(), strict=True)
    return {digest: next_use for digest, next_use in by_digest if next_use < np.inf}


def files(directory: Path) -> list[Path]:
    """The demand files, of live or dead processes; other files are never touched."""
    return _matching(directory, _NAME)


def version_logs(directory: Path) -> list[Path]:
    """The version logs of runs (freshness.py), live or dead."""
    return _matching(directory, _VERSION_LOG)


def pages(directory: Path) -> list[Path]:
    """The pages that ranks publish (observe/page.py), of live or dead processes."""
    return _matching(directory, _PAGE)


def run_files(directory: Path) -> list[Path]:
    """All files of live or dead runs."""
    return [*files(directory), *version_logs(directory), *pages(directory)]


def _matching(directory: Path, name: re.Pattern[str]) -> list[Path]:
    with os.scandir(directory) as entries:
        return [Path(e.path) for e in entries if name.fullmatch(e.name) and e.is_file(follow_symlinks=False)]


def pid_of(path: Path) -> int:
    """The process that wrote a demand file."""
    return int(path.name.partition(".")[0])


def visits_of(path: Path) -> npt.NDArray[np.uint64]:
    """The visits in a demand file, by `short` name: the open shards, then the next ones."""
    try:
        with Descriptor.open(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
            count = int.from_bytes(os.pread(file.number, _HEADER_BYTES, 0), "little")
            content = os.pread(file.number, 8 * min(count, VISITS_KEPT), _HEADER_BYTES)
    except FileNotFoundError:
        return np.empty(0, dtype="<u8")
    return np.frombuffer(content, dtype="<u8", count=len(content) // 8)
