"""The version log of a run: which version of each shard all its processes use; a file in the tier's `runs/`.

One line per shard, appended and read by all processes of the run; the first line of a shard counts.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import astuple

from streamload.cache.directory import Directory
from streamload.cache.locks import FileLock, exclusive
from streamload.descriptors import Descriptor
from streamload.origins.origin import Version

_NO_VISITS = bytes(8)
"""The log lies among the demand files, and reads as one without visits."""


class VersionLog:
    """The log as one process of the run has it open."""

    def __init__(self, tier: Directory, name: str):
        self._versions: dict[str, Version] = {}
        self._read_bytes = len(_NO_VISITS)
        self._lock_path = tier.root / "lock"
        self._path = tier.root / "runs" / f"{name}.page"
        self._pin: FileLock | None = None
        self._file: Descriptor | None = None
        with contextlib.suppress(OSError):  # on a disk that takes no log, each process decides for itself
            self._open()

    def _open(self) -> None:
        with exclusive(self._lock_path):  # under it alone files of the dead are removed
            alone = FileLock.acquire(self._path, create=True)
            if alone is not None:  # new, or of a run of which nobody is left
                self._path.write_bytes(_NO_VISITS)
                alone.close()
            self._pin = FileLock.acquire(self._path, shared=True)
            if self._pin is not None:
                self._file = Descriptor.open(self._path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)

    def version(self, digest: str) -> Version | None:
        """The version that was chosen for a shard; reads the file only while it isn't known."""
        if digest not in self._versions:
            with contextlib.suppress(OSError):
                self._read()
        return self._versions.get(digest)

    def write(self, digest: str, version: Version) -> None:
        """Choose a version; one that another process has chosen before stands."""
        line = json.dumps([digest, *astuple(version)]) + "\n"
        with contextlib.suppress(OSError):  # a full disk: then the others ask for themselves
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
            alone = FileLock.acquire(self._path)
            if alone is not None:
                self._path.unlink(missing_ok=True)
                alone.close()

    def _read(self) -> None:
        """Read the new whole lines; the first of a shard counts."""
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
