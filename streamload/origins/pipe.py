"""Shards from a shell command, ``pipe:curl … | …`` (step F).

The command runs under ``bash -o pipefail`` in its own session and process group, and never outlives its
reader: close() kills the group. If this process dies, a watcher in the group kills it: it waits on a pipe
that only this process holds open. (A parent-death signal would come when the thread that started the
command ends.) The shell that starts the command writes its exit status into a second pipe: if this process
was started with SIGCHLD ignored, as some supervisors do, the kernel forgets the status of its children.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from streamload import descriptors, limits
from streamload.errors import (
    DatasetChanged,
    OriginCut,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginTimeout,
)
from streamload.origins.protocol import Origin, ReadSize, Session, Version
from streamload.urls import redact, scrub

_WAKE_SECONDS = 0.1
_PIPE_BYTES = 1024 * 1024
_TAIL_BYTES = 4096
_SHOWN_CHARS = 600

# What common commands write if a retry can't help. The lookarounds exclude byte counts and progress meters.
_STATUS = r"(?<![\w.,-])(?:{})(?![\w-]|[.,]\d|\s+(?:\d|bytes))"
_NOT_FOUND = re.compile(
    _STATUS.format("404|410") + r"|\b(?:NoSuchKey|NoSuchBucket|No such file|not found|No URLs matched)\b",
    re.IGNORECASE,
)
_DENIED = re.compile(
    _STATUS.format("401|403")
    + r"|\b(?:AccessDenied|Access Denied|Forbidden|Permission denied|ExpiredToken|InvalidAccessKeyId"
    r"|SignatureDoesNotMatch|Unable to locate credentials)\b",
    re.IGNORECASE,
)


class PipeOrigin(Origin):
    """A shard that a command writes to its standard output, always from the first byte."""

    def __init__(self, url: str, session: Session) -> None:
        self.url = redact(url)
        self._command = url.removeprefix("pipe:")
        self._session = session

    def __repr__(self) -> str:
        return f"PipeOrigin({self.url!r})"

    def open(self, start: int = 0, expected: Version | None = None) -> _PipeStream:
        """Start the command."""
        self._session.check(self.url)
        self._session.count("origin_requests")
        try:
            process = _Process(self._command, self._session.secrets)
        except OSError as exc:
            raise OriginError(f"{self.url}: can't be started, bash is needed: {exc.strerror}") from exc
        return _PipeStream(self, process, start, expected or Version())

    def version(self) -> Version:
        """Return an empty version: only the bytes could tell, so the command isn't run."""
        return Version()


class _PipeStream:
    def __init__(self, origin: PipeOrigin, process: _Process, start: int, expected: Version) -> None:
        self.version = expected
        self._origin, self._session = origin, origin._session
        self._process = process
        self._start = start

    def chunks(self) -> Iterator[bytes]:
        """Yield the command's output; its exit status tells whether the output is complete."""
        position = 0
        for chunk in self._process.read(self._session, self._origin.url):
            self._session.count("origin_bytes", len(chunk))
            before, position = position, position + len(chunk)
            if position > self._start:
                yield chunk[max(0, self._start - before) :]
        self._check_end(position)

    def close(self) -> None:
        self._process.close()

    def _check_end(self, stop: int) -> None:
        status, stderr, shown = self._process.finish()
        if status != 0:
            message = f"{self._origin.url}: failed with status {status} after {stop} bytes{shown}"
            raise _failure(message, status, stderr)
        if stop < self._start:
            raise DatasetChanged(f"{self._origin.url}: wrote {stop} bytes, none from {self._start} on")
        if self.version.size is not None and stop != self.version.size:
            raise DatasetChanged(f"{self._origin.url}: wrote {stop} bytes instead of {self.version.size}")


class _Process:
    """A command in its process group, its output, and the tail of its stderr."""

    def __init__(self, command: str, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        watched, self._leash = descriptors.pipe()
        self._ended, status = descriptors.pipe()
        try:
            self._popen = subprocess.Popen(
                ["bash", "-c", _script(watched.number, status.number), "bash", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(watched.number, status.number),
                start_new_session=True,
                bufsize=0,
            )
        except BaseException as exc:
            self._leash.close()
            self._ended.close()
            if isinstance(exc, BlockingIOError):  # a fork was refused
                raise limits.reached("the process of a command can't be started", exc) from exc
            raise
        finally:
            watched.close()
            status.close()
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._out, self._err = self._popen.stdout, self._popen.stderr
        os.set_blocking(self._err.fileno(), False)
        with contextlib.suppress(OSError):  # the user's limit for pipe buffers
            fcntl.fcntl(self._out.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._said = b""
        self._status: int | None = None

    def read(self, session: Session, url: str) -> Iterator[bytes]:
        """Yield chunks up to the end of the output."""
        out, err = self._out.fileno(), self._err.fileno()
        poll = select.poll()
        poll.register(out, select.POLLIN)
        poll.register(err, select.POLLIN)
        size = ReadSize(min(session.options.chunk_bytes, _PIPE_BYTES))
        heard = time.monotonic()
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(_WAKE_SECONDS * 1000)]
            if err in ready and not self._listen():
                poll.unregister(err)
            if out in ready:
                chunk = os.read(out, size.bytes)
                if not chunk:
                    return
                size.came(len(chunk))
                yield chunk
                heard = time.monotonic()
                continue
            session.check(url)
            if time.monotonic() - heard >= session.options.stall_seconds:
                raise OriginTimeout(
                    f"{url}: wrote nothing for {session.options.stall_seconds:g} s{self._tail()}"
                )

    def finish(self) -> tuple[int, str, str]:
        """Return the exit status, and the tail of stderr raw and as shown; call after the output's end."""
        self._status = _exit_status(self._ended, seconds=5.0)
        self._listen()
        stderr, shown = self._said.decode("utf-8", "replace"), self._tail()
        self.close()
        return self._status, stderr, shown

    def close(self) -> None:
        """Kill what is left of the group, and reap; idempotent."""
        if self._popen.returncode is not None:
            return
        # Not reaped yet, or with the watcher still in it: the ID belongs to this group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._out.close()
        self._err.close()
        self._leash.close()
        self._ended.close()

    def _listen(self) -> bool:
        """Keep the tail of stderr. Return False at its end."""
        try:
            while piece := os.read(self._err.fileno(), 65536):
                self._said = (self._said + piece)[-_TAIL_BYTES:]
        except BlockingIOError:
            return True
        return False

    def _tail(self) -> str:
        tail = self._said
        if len(tail) == _TAIL_BYTES:  # may begin within a secret
            tail = re.sub(rb"\A[^\n]*\n|\A\S+", b"", tail, count=1)
        text = scrub(tail.decode("utf-8", "replace"), self._secrets)
        text = " ".join(text.split())
        return f"; stderr: {text[-_SHOWN_CHARS:]}" if text else ""


def _script(leash: int, status: int) -> str:
    """Return a script that starts a watcher in the group, and the command in a shell of its own.

    The watcher reads from the leash, which reaches its end when this process dies. The command's `wait` and
    `jobs` don't see the watcher. The script keeps none of the command's output open while it waits.
    """
    watcher = f"(read -r -u {leash}; kill -KILL 0) </dev/null >/dev/null 2>&1 {status}>&- &"
    command = f'bash -o pipefail -c "$1" {leash}<&- {status}>&- &'
    return f"{watcher} {command} exec {leash}<&- >&- 2>&-; wait $!; echo $? >&{status}"


def _exit_status(ended: descriptors.Descriptor, seconds: float) -> int:
    """Return the exit status that the script wrote; that of a killed command if it writes none."""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    text = b""
    while not text.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return 128 + signal.SIGKILL
        part = os.read(ended.number, 16)
        if not part:
            return 128 + signal.SIGKILL
        text += part
    return int(text)


def _failure(message: str, status: int, stderr: str) -> OriginError:
    if status in {126, 127}:
        return OriginError(message)  # not a command
    if _NOT_FOUND.search(stderr):
        return OriginNotFound(message)
    if _DENIED.search(stderr):
        return OriginDenied(message)
    return OriginCut(message)
