"""Shards that are files (step F): those that are copied, unpacked or prepared; others are read in place.

A read of a network mount waits in the kernel while its server is away, and can't be interrupted. So files
are read by processes (file_reader.py), one for each transfer: one that doesn't answer in time is abandoned,
and holds up neither other transfers nor the end of this process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from streamload import descriptors, limits
from streamload.errors import (
    DatasetChanged,
    OriginCut,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginTimeout,
    OriginUnavailable,
    is_shortage,
)
from streamload.origins.endpoints import at_end, is_remembering
from streamload.origins.protocol import Origin, Session, Version, same_version
from streamload.urls import local_path

_SCRIPT = Path(__file__).with_name("file_reader.py")
_ANSWER_BYTES = 32
_PIPE_BYTES = 256 << 10
_WAKE_SECONDS = 0.1
_MOST_IDLE = 8
_AWAY = (
    "EAGAIN ECONNABORTED ECONNREFUSED ECONNRESET EHOSTDOWN EHOSTUNREACH EINTR EIO ENETDOWN ENETUNREACH "
    "ENODEV ENOTCONN ENXIO EREMOTEIO ESHUTDOWN ESTALE ETIMEDOUT"
)
"""Errors of a mount whose server is away, after which a retry may succeed."""


class LocalOrigin(Origin):
    """A shard that is a file. Its version is its size and mtime_ns: a FUSE mount has no lasting inodes."""

    def __init__(self, url: str, session: Session) -> None:
        self.url = url
        self._path = local_path(url)
        self._session = session

    def open(self, start: int = 0, expected: Version | None = None) -> _LocalStream:
        """Open the file, to be read from `start`."""
        with self._reader() as reader:
            version = self._opened(reader)
            same_version(self.url, expected, version)
            if start > (version.size or 0):
                raise DatasetChanged(f"{self.url} has {version.size} bytes, none at {start}")
            return _LocalStream(self.url, reader, self._session, version, start)

    def version(self) -> Version:
        """Return size and time of the file."""
        with self._reader() as reader:
            version = self._opened(reader)
            reader.give_back()
            return version

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Read a range of the file."""
        with self._reader() as reader:
            same_version(self.url, version, self._opened(reader))
            reader.send(f"read {start} {stop - start}")
            _, data = reader.answer(self._session, self.url)
            reader.give_back()
        self._session.count("origin_bytes", len(data))
        if len(data) < stop - start:
            raise OriginCut(f"{self.url}: ended at byte {start + len(data)}, before {stop}")
        return data

    @contextlib.contextmanager
    def _reader(self) -> Iterator[_FileReader]:
        """A reader for a request, which ends if that fails."""
        self._session.check(self.url)
        self._session.count("origin_requests")
        reader = _FileReader.take()
        try:
            yield reader
        except BaseException:
            reader.end()
            raise

    def _opened(self, reader: _FileReader) -> Version:
        reader.send(f"open {os.fsencode(self._path).hex()}")
        return reader.answer(self._session, self.url)[0]


class _LocalStream:
    """The bytes of an open file; the next chunk is read while one is used."""

    def __init__(self, url: str, reader: _FileReader, session: Session, version: Version, start: int) -> None:
        self.version, self._position = version, start
        self._url, self._session = url, session
        self._reader: _FileReader | None = reader

    def chunks(self) -> Iterator[bytes]:
        reader, stop = self._reader, self.version.size or 0
        assert reader is not None
        self._request(reader, stop)
        while self._position < stop:
            _, data = reader.answer(self._session, self._url)
            if not data:
                raise OriginCut(f"{self._url}: ended at byte {self._position} of {stop}")
            self._position += len(data)
            self._session.count("origin_bytes", len(data))
            self._request(reader, stop)
            yield data
        same_version(self._url, self.version, reader.answer(self._session, self._url)[0])
        self._reader = None
        reader.give_back()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.end()

    def _request(self, reader: _FileReader, stop: int) -> None:
        count = min(self._session.options.chunk_bytes, _PIPE_BYTES - _ANSWER_BYTES, stop - self._position)
        reader.send(f"read {self._position} {count}" if count else "look")


_idle: list[_FileReader] = []  # changed by single atomic operations
_ended: list[int] = []  # process IDs, yet to be reaped


class _FileReader:
    """A process that reads files, one request at a time."""

    def __init__(self) -> None:
        requests, self._requests = descriptors.pipe()
        self._answers, answers = descriptors.pipe()
        command = [sys.executable, "-I", "-S", str(_SCRIPT)]
        try:
            with contextlib.suppress(OSError):  # the user's limit for pipe buffers
                fcntl.fcntl(self._answers, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            pipes = [
                (os.POSIX_SPAWN_DUP2, end.number, number) for number, end in enumerate((requests, answers))
            ]
            self._pid = os.posix_spawn(command[0], command, os.environ, file_actions=pipes, setsid=True)
        except OSError as exc:
            self._requests.close()
            self._answers.close()
            if isinstance(exc, BlockingIOError):  # a fork was refused
                raise limits.reached("the process that reads a file can't be started", exc) from exc
            raise OriginError(f"{command[0] or 'Python'} can't be started: {exc.strerror}") from exc
        finally:
            requests.close()
            answers.close()

    @classmethod
    def take(cls) -> _FileReader:
        """Return a reader that is free; a new one if there is none."""
        while _idle:
            with contextlib.suppress(IndexError):  # another thread took it
                reader = _idle.pop()
                if reader._requests.number >= 0:  # else it is the parent's of this forked process
                    return reader
        return cls()

    def give_back(self) -> None:
        """Keep a reader that owes no answer for the next transfer, while there may be one."""
        if is_remembering() and len(_idle) < _MOST_IDLE:
            self.send("close")
            _idle.append(self)
        else:
            self.end()

    def end(self) -> None:
        """End the process, without waiting for one that its file system holds up. Idempotent."""
        if self._requests.number < 0:
            return
        self._requests.close()
        self._answers.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        _ended.append(self._pid)
        for pid in _ended[:]:
            with contextlib.suppress(ValueError):  # another thread reaped it
                if _has_ended(pid):
                    _ended.remove(pid)

    def send(self, request: str) -> None:
        """Send a request; its answer has to be taken before the next."""
        with contextlib.suppress(BrokenPipeError):  # `answer` reports it
            os.write(self._requests.number, f"{request}\n".encode())

    def answer(self, session: Session, url: str) -> tuple[Version, bytes]:
        """Wait for an answer: the version of the open file, or its bytes.

        Raises:
            OriginError: by subclass: the file can't be read, or no answer came in time.
            OSError: this machine has too few files or too little memory.
        """
        head = self._read(_ANSWER_BYTES, session, url)
        code, size, mtime_ns, count = (
            int.from_bytes(head[at : at + 8], "little", signed=True) for at in range(0, _ANSWER_BYTES, 8)
        )
        if code:
            raise _failure(url, code)
        return Version(size, None, str(mtime_ns)), self._read(count, session, url)

    def _read(self, count: int, session: Session, url: str) -> bytes:
        pieces, poll, heard = list[bytes](), select.poll(), time.monotonic()
        poll.register(self._answers, select.POLLIN)
        limit_seconds = session.options.stall_seconds
        while count:
            if poll.poll(_WAKE_SECONDS * 1000):
                piece = os.read(self._answers.number, count)
                if not piece:
                    raise OriginUnavailable(f"{url}: the process that reads it was killed")
                pieces.append(piece)
                count, heard = count - len(piece), time.monotonic()
                continue
            session.check(url)
            if time.monotonic() - heard >= limit_seconds:
                raise OriginTimeout(f"{url}: its file system gave nothing for {limit_seconds:g} s")
        return b"".join(pieces)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # a child of this forked process's parent, or one that nobody has to reap
        return True


def _end_idle() -> None:
    while _idle:
        with contextlib.suppress(IndexError):  # another thread took it
            _idle.pop().end()


at_end.append(_end_idle)


def _failure(url: str, code: int) -> OSError:
    """The error of a file for an errno."""
    error = OSError(code, f"{url}: {os.strerror(code)}")  # of the class that the errno stands for
    if is_shortage(error):
        return error
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return OriginNotFound(f"{url}: no such file")
    if isinstance(error, PermissionError) or code == errno.EKEYEXPIRED:
        return OriginDenied(error.strerror)
    if code == errno.EINVAL:
        return OriginError(f"{url} is not a regular file; read a stream by `pipe:cat …`")
    is_away = errno.errorcode.get(code) in _AWAY.split()
    return OriginUnavailable(error.strerror) if is_away else OriginError(error.strerror)
