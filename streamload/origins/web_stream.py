"""The bytes of one shard on a web server: a streaming answer, and what is read behind it (step F).

A shard begins with one answer. Where that came quickly, the same connection goes on with all the rest; where
it came slowly, as over a link that gives each connection only so much, the rest comes in ranges side by side.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from typing import NamedTuple, Protocol

import urllib3
from urllib3.exceptions import HTTPError

from streamload.errors import OriginCut, OriginError, OriginStopped, OriginUnavailable
from streamload.origins.protocol import ReadSize, Session, Version
from streamload.origins.ranged import OrderedParts
from streamload.origins.sockets import WAKE_SECONDS, Pools, receive


class Answer(NamedTuple):
    """An answer whose head has been found good.

    Attributes:
        response: its body is still to be read; None where there is none.
        first, stop: the body's first byte, and the one behind its last (None: not stated).
        start: the byte that was asked for.
        is_part: a range of a stated length was asked for and is given, so the shard may go on behind it.
        is_unproven: it doesn't begin at `start`, or nothing says that it is of the version that was expected.
    """

    response: urllib3.BaseHTTPResponse | None
    version: Version
    first: int
    start: int
    stop: int | None
    is_part: bool = False
    is_unproven: bool = False


class Asked(Protocol):
    """The part of an origin that its streams use: requests, checked answers (web.HttpOrigin)."""

    url: str

    def ask(self, pools: Pools, start: int, expected: Version | None) -> Answer:
        """Request the shard from byte `start` on, of the expected version."""
        ...

    def read_range(
        self, pools: Pools, start: int, stop: int, version: Version, *, is_proven: bool = False
    ) -> Generator[bytes, None, None]:
        """The bytes of a range, from where the first answer came from. For any thread."""
        ...

    def continued(self, answer: Answer) -> Answer:
        """Check that an answer may follow those before it."""
        ...

    def translated(self, exc: HTTPError, what: str) -> OriginError:
        """The error of this package for one of urllib3's."""
        ...

    def keep_to_one_connection(self) -> None:
        """Request no parallel ranges from now on."""
        ...


class HttpStream:
    """The bodies of answers, one behind the other; what stands before the byte asked for is dropped."""

    def __init__(self, origin: Asked, session: Session, pools: Pools, answer: Answer) -> None:
        self.version = answer.version
        self._origin, self._session = origin, session
        self._pools, self._answer = pools, answer
        self._position, self._start = answer.first, answer.start
        self._waited_seconds, self._read_bytes = 0.0, 0
        self._parts: _Parts | None = None

    def chunks(self) -> Iterator[bytes]:
        """Give the bytes as they come off the socket, up to `chunk_bytes` at once."""
        while (response := self._answer.response) is not None:
            begin = self._position
            yield from self._body(response)
            if self._answer.is_part and self._position == self._answer.stop:
                size = self.version.size
                if size == self._position:
                    return
                if size is not None and not self._is_quick():
                    self._pools.close()  # not one connection more than parts
                    self._parts = _Parts(self._origin, self._session, self._position, self.version)
                    yield from self._parts.chunks()
                    return
                self._take(self._origin.ask(self._pools, self._position, self.version))
            elif self._is_end(response) or not self._goes_on(begin):
                return

    def close(self) -> None:
        """Close the connections; idempotent."""
        if self._parts is not None:
            self._parts.close()
        if self._answer.response is not None:
            self._answer.response.close()
        self._pools.close()

    def _body(self, response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        size = ReadSize(self._session.options.chunk_bytes)
        while True:
            began = time.monotonic()
            try:
                chunk = receive(response, size.bytes, self._session)
            except HTTPError as exc:
                raise self._broken(exc) from exc
            if not chunk:
                return
            size.came(len(chunk))
            self._waited_seconds += time.monotonic() - began
            self._read_bytes += len(chunk)
            before, self._position = self._position, self._position + len(chunk)
            self._session.count("origin_bytes", len(chunk))
            if before >= self._start:
                yield chunk
            elif self._position > self._start:
                yield chunk[self._start - before :]

    def _take(self, answer: Answer) -> None:
        self._answer = self._origin.continued(answer)
        self.version = self.version.completed(answer.version)
        self._position, self._start = answer.first, answer.start

    def _is_quick(self) -> bool:
        """Whether one connection has brought so much in the time spent waiting for it that it may go on."""
        return self._read_bytes >= self._waited_seconds * self._session.options.quick_bytes_per_second

    def _broken(self, exc: HTTPError) -> OriginError:
        error = self._origin.translated(exc, "no byte")
        if isinstance(error, OriginUnavailable):
            return OriginCut(
                f"{self._origin.url}: the connection broke at byte {self._position} of {self._of}"
            )
        return error

    def _is_end(self, response: urllib3.BaseHTTPResponse) -> bool:
        """The body is over; is the shard? A body that ends with its connection proves nothing."""
        size, stop = self.version.size, self._answer.stop
        if (stop is not None and self._position < stop) or (size is not None and self._position < size):
            raise OriginCut(f"{self._origin.url}: ended at byte {self._position} of {self._of}")
        return stop is not None or "chunked" in response.headers.get("Transfer-Encoding", "").lower()

    def _goes_on(self, begin: int) -> bool:
        """Ask for what stands behind the body's end, and if there is something, read on from there."""
        more = self._origin.ask(self._pools, self._position, self.version)
        if more.first == self._position != more.stop and self._position > begin:
            self._take(more)
            return True
        if more.response is not None:
            more.response.close()
        size = more.version.size
        if more.first == self._position != more.stop or (size is not None and size != self._position):
            raise OriginCut(f"{self._origin.url}: ended at byte {self._position}, but goes on there")
        return False

    @property
    def _of(self) -> str:
        return "unknown" if self.version.size is None else str(self.version.size)


class _Parts:
    """The rest of a shard in ranges side by side, each read by a thread over a connection that is kept."""

    def __init__(self, origin: Asked, session: Session, start: int, version: Version) -> None:
        self._origin, self._session, self._version = origin, session, version
        self._closed = _Either(session.stop)
        own = Session(session.options, session.counts, self._closed)
        self._pools = Pools(own, connections=session.options.parts)
        self._parts = OrderedParts(
            self._ask, start, version.size or 0, session.options.parts, session.options
        )

    def chunks(self) -> Iterator[bytes]:
        for chunk in self._parts.chunks():
            self._session.count("origin_bytes", len(chunk))
            yield chunk

    def close(self) -> None:
        self._closed.set()
        self._parts.close()
        self._pools.close()

    def _ask(self, start: int, stop: int) -> _RangePart:
        return _RangePart(
            self._origin, self._session, self._pools, (start, stop), self._version, self._closed
        )


class _RangePart:
    """One range, given in order by whose turn it is; until then a thread of its own reads it."""

    def __init__(
        self,
        origin: Asked,
        session: Session,
        pools: Pools,
        place: tuple[int, int],
        version: Version,
        closed: threading.Event,
    ) -> None:
        self.size_bytes = place[1] - place[0]
        self.seconds: float | None = None
        self._origin, self._session, self._closed = origin, session, closed
        self._began = time.monotonic()
        self._is_its_turn = False
        self._rest = origin.read_range(pools, *place, version)
        self._came: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="streamload-range", daemon=True)
        self._thread.start()

    def chunks(self) -> Iterator[bytes]:
        """Give what has come, many pieces as one of about `chunk_bytes`; then read the rest."""
        self._is_its_turn = True
        pieces: list[bytes] = []
        lacking = self._session.options.chunk_bytes
        while True:
            came = self._next()
            if isinstance(came, bytes):
                pieces.append(came)
                lacking -= len(came)
                if lacking > 0 and not self._came.empty():
                    continue
            if pieces:
                yield b"".join(pieces)
                pieces.clear()
                lacking = self._session.options.chunk_bytes
            if not isinstance(came, bytes):
                break
        self._thread.join()
        try:
            if came is not None:
                raise came
            yield from self._rest
        except Exception:
            self._origin.keep_to_one_connection()
            raise
        self._note_seconds()

    def cancel(self) -> None:
        self._closed.set()  # one that fails ends all: who comes next begins anew at the byte
        self._thread.join()
        self._rest.close()

    def _next(self) -> bytes | BaseException | None:
        """Wait for a piece, for why there is none, or for the thread to have no more to give."""
        while True:
            try:
                return self._came.get(timeout=WAKE_SECONDS)
            except queue.Empty:
                self._session.check(self._origin.url)

    def _work(self) -> None:
        try:
            for chunk in self._rest:
                self._came.put(chunk)
                if self._is_its_turn:  # who wants them reads on: the way through a queue costs as much again
                    break
                if self._closed.is_set():
                    raise OriginStopped(f"{self._origin.url}: this range isn't needed any more")
            else:
                self._note_seconds()
            self._came.put(None)
        except BaseException as exc:
            self._came.put(exc)

    def _note_seconds(self) -> None:
        self.seconds = self.seconds or time.monotonic() - self._began


class _Either(threading.Event):
    """Set when it is set, or when another one is."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or self._other.is_set()
