"""Shards that are files (step F): those that are copied, unpacked or prepared; others are read in place.

A read of a network mount may wait in the kernel for as long as its server is away, and can't be interrupted.
So files are read by processes (file_reader.py), one for each transfer: one that doesn't answer in time is
abandoned, and holds up neither other transfers nor the end of this process.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

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
from streamload.origins.endpoints import forgets, is_remembering
from streamload.origins.protocol import Origin, Session, Version, same_version
from streamload.urls import local_path

_SCRIPT = Path(__file__).with_name("file_reader.py")
_ANSWER_BYTES = 32
_PIPE_BYTES = 1 << 20
_WAKE_SECONDS = 0.1
_MOST_IDLE = 8
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_NOT_FOUND = frozenset({errno.ENOENT, errno.ENOTDIR})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EKEYEXPIRED, errno.EKEYREVOKED})
_AWAY = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN ECONNABORTED ECONNREFUSED ECONNRESET EHOSTDOWN EHOSTUNREACH EINTR EIO ENETDOWN ENETUNREACH "
        "ENODEV ENOTCONN ENXIO EREMOTEIO ESHUTDOWN ESTALE ETIMEDOUT"
    ).split()
)
"""Errors of a mount whose server is away, after which a retry may succeed."""
_Result = TypeVar("_Result")


class LocalOrigin(Origin):
    """A shard that is a file. Its version is its size and mtime_ns: a FUSE mount has no lasting inodes."""

    def __init__(self, url: str, session: Session) -> None:
        self.url = url
        self._path = local_path(url)
        self._session = session

    def open(self, start: int = 0, expected: Version | None = None) -> _LocalStream:
        """Open the file, to be read from `start`."""
        self._session.check(self.url)
        self._session.count("origin_requests")
        reader = _FileReader.take()
        try:
            version = self._opened(reader)
            same_version(self.url, expected, version)
            if start > (version.size or 0):
                raise DatasetChanged(f"{self.url} has {version.size} bytes, none at {start}")
        except BaseException:
            reader.end()
            raise
        return _LocalStream(self.url, reader, self._session, version, start)

    def version(self) -> Version:
        """Return size and time of the file."""
        return self._at_once(self._opened)

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Read a range of the file."""

        def act(reader: _FileReader) -> bytes:
            same_version(self.url, version, self._opened(reader))
            reader.send(f"read {start} {stop - start}")
            return reader.answer(self._session, self.url).data

        data = self._at_once(act)
        self._session.count("origin_bytes", len(data))
        if len(data) < stop - start:
            raise OriginCut(f"{self.url}: ended at byte {start + len(data)}, before {stop}")
        return data

    def _opened(self, reader: _FileReader) -> Version:
        reader.send(f"open {os.fsencode(self._path).hex()}")
        return reader.answer(self._session, self.url).version

    def _at_once(self, act: Callable[[_FileReader], _Result]) -> _Result:
        """Do something with a reader that is free afterwards, unless it failed."""
        self._session.check(self.url)
        self._session.count("origin_requests")
        reader = _FileReader.take()
        try:
            result = act(reader)
        except BaseException:
            reader.end()
            raise
        reader.give_back()
        return result


class _LocalStream:
    """The bytes of an open file; the next chunk is read while one is used."""

    def __init__(self, url: str, reader: _FileReader, session: Session, version: Version, start: int) -> None:
        self.version = version
        self._url, self._session = url, session
        self._reader: _FileReader | None = reader
        self._position = start

    def chunks(self) -> Iterator[bytes]:
        reader, stop = self._reader, self.version.size or 0
        assert reader is not None
        self._request(reader, self._position, stop)
        while self._position < stop:
            data = reader.answer(self._session, self._url).data
            if not data:
                raise OriginCut(f"{self._url}: ended at byte {self._position} of {stop}")
            self._position += len(data)
            self._session.count("origin_bytes", len(data))
            self._request(reader, self._position, stop)
            yield data
        same_version(self._url, self.version, reader.answer(self._session, self._url).version)
        self._reader = None
        reader.give_back()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.end()
            self._reader = None

    def _request(self, reader: _FileReader, position: int, stop: int) -> None:
        count = min(self._session.options.chunk_bytes, _PIPE_BYTES - _ANSWER_BYTES, stop - position)
        reader.send(f"read {position} {count}" if count else "look")


class _Answer(NamedTuple):
    version: Version
    data: bytes


_idle: list[_FileReader] = []  # changed by single atomic operations
_ended: list[int] = []  # process IDs that are yet to be reaped


class _FileReader:
    """A process that reads files, one request at a time."""

    def __init__(self) -> None:
        _reap()
        requests, self._requests = descriptors.pipe()
        self._answers, answers = descriptors.pipe()
        try:
            with contextlib.suppress(OSError):  # the user's limit for pipe buffers
                fcntl.fcntl(self._answers.number, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", str(_SCRIPT)],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, requests.number, 0),
                    (os.POSIX_SPAWN_DUP2, answers.number, 1),
                ],
                setsid=True,
            )
        except BaseException as exc:
            self._requests.close()
            self._answers.close()
            if isinstance(exc, BlockingIOError):  # a fork was refused
                raise limits.reached("the process that reads a file can't be started", exc) from exc
            if isinstance(exc, OSError) and not is_shortage(exc):
                raise OriginError(f"{sys.executable or 'Python'} can't be started: {exc.strerror}") from exc
            raise
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
        """Keep a reader without an open request for the next transfer, while there may be one."""
        if is_remembering() and len(_idle) < _MOST_IDLE:
            self.send("close")
            _idle.append(self)
        else:
            self.end()

    def end(self) -> None:
        """End the process, without waiting for it: its file system may hold it up. Idempotent."""
        if self._requests.number < 0:
            return
        self._requests.close()
        self._answers.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        _ended.append(self._pid)
        _reap()

    def send(self, request: str) -> None:
        """Send a request; its answer has to be taken before the next."""
        with contextlib.suppress(BrokenPipeError):  # `answer` reports it
            os.write(self._requests.number, f"{request}\n".encode())

    def answer(self, session: Session, url: str) -> _Answer:
        """Wait for an answer.

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
        return _Answer(Version(size, None, str(mtime_ns)), self._read(count, session, url))

    def _read(self, count: int, session: Session, url: str) -> bytes:
        pieces: list[bytes] = []
        poll, heard = select.poll(), time.monotonic()
        poll.register(self._answers, select.POLLIN)
        while count:
            if poll.poll(_WAKE_SECONDS * 1000):
                piece = os.read(self._answers.number, count)
                if not piece:
                    raise OriginUnavailable(f"{url}: the process that reads it was killed")
                pieces.append(piece)
                count, heard = count - len(piece), time.monotonic()
                continue
            session.check(url)
            if time.monotonic() - heard >= session.options.stall_seconds:
                raise OriginTimeout(
                    f"{url}: its file system gave nothing for {session.options.stall_seconds:g} s"
                )
        return b"".join(pieces)


def _reap() -> None:
    for pid in _ended[:]:
        with contextlib.suppress(ChildProcessError, ValueError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                _ended.remove(pid)


def _end_idle() -> None:
    while _idle:
        with contextlib.suppress(IndexError):  # another thread took it
            _idle.pop().end()


forgets(_end_idle)


def _failure(url: str, code: int) -> OSError:
    """The error of a file for an errno."""
    message = f"{url}: {os.strerror(code)}"
    if code in _SHORT:
        return OSError(code, message)
    if code in _NOT_FOUND:
        return OriginNotFound(f"{url}: no such file")
    if code in _DENIED:
        return OriginDenied(message)
    if code == errno.EINVAL:
        return OriginError(f"{url} is not a regular file; read a stream by `pipe:cat …`")
    return OriginUnavailable(message) if code in _AWAY else OriginError(message)
