"""Local files, for commands that treat all URLs alike (step F); the loader reads them in place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from streamload.errors import DatasetChanged, OriginCut, OriginDenied, OriginError, OriginNotFound
from streamload.origins.protocol import Origin, Session, Version, same_version
from streamload.urls import local_path


class LocalOrigin(Origin):
    """A shard that is a file."""

    def __init__(self, url: str, session: Session) -> None:
        self.url = url
        self._path: Path = local_path(url)
        self._session = session

    def open(self, start: int = 0, expected: Version | None = None) -> _LocalStream:
        """Open the file and seek to `start`."""
        self._session.count("origin_requests")
        try:
            file = self._path.open("rb", buffering=0)
        except FileNotFoundError as exc:
            raise OriginNotFound(f"{self.url}: no such file") from exc
        except PermissionError as exc:
            raise OriginDenied(f"{self.url}: {exc.strerror}") from exc
        except OSError as exc:
            raise OriginError(f"{self.url}: {exc.strerror}") from exc
        stream = _LocalStream(self.url, file, self._session, start)
        try:
            same_version(self.url, expected, stream.version)
            if stream.version.size is not None and start > stream.version.size:
                raise DatasetChanged(f"{self.url} has {stream.version.size} bytes, none at {start}")
        except BaseException:
            stream.close()
            raise
        return stream

    def version(self) -> Version:
        """Return size, times and inode of the file."""
        stream = self.open()
        stream.close()
        return stream.version


def stamp(status: os.stat_result) -> str:
    """Return times and inode: a copy may keep size and mtime, but not the rest."""
    return f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


class _LocalStream:
    def __init__(self, url: str, file: BinaryIO, session: Session, start: int) -> None:
        status = os.fstat(file.fileno())
        self.version = Version(status.st_size, None, stamp(status))
        self._url, self._file, self._session = url, file, session
        self._file.seek(start)

    def chunks(self) -> Iterator[bytes]:
        size = self.version.size or 0
        while chunk := self._read():
            self._session.count("origin_bytes", len(chunk))
            yield chunk
        if self._file.tell() != size:
            raise OriginCut(f"{self._url}: ended at byte {self._file.tell()} of {size}")

    def close(self) -> None:
        self._file.close()

    def _read(self) -> bytes:
        try:
            return self._file.read(self._session.options.chunk_bytes)
        except OSError as exc:
            raise OriginError(f"{self._url}: {exc.strerror}") from exc
