"""Shards on web servers (step F).

A shard begins with one request. If that answer came quickly, the same connection reads the rest. If it was
slow, as over a link with a limit for each connection, the rest comes in parallel ranges, which start small
and grow; object stores are read in such ranges, too (stores.py). Retries nothing.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Protocol

import urllib3
from urllib3.exceptions import HTTPError

from streamload import limits
from streamload.errors import OriginCut, OriginError, OriginStopped, OriginUnavailable
from streamload.origins.endpoints import abilities
from streamload.origins.protocol import Origin, OriginOptions, ReadSize, Unproven, Version, no_crawl
from streamload.origins.sockets import WAKE_SECONDS, Pools, pools_for, receive, waited_seconds
from streamload.origins.web_client import HttpClient, NoRanges, RangeIgnored, WebAnswer

_QUICK_SECONDS = 1.0
_SMALLEST_SHARE = 8


class HttpOrigin(Origin):
    """A shard at the http:// or https:// URL of a client."""

    def __init__(self, client: HttpClient) -> None:
        self._client, self._session = client, client.session
        self.url = self._client.url
        self._pools: Pools | None = None  # kept between reads

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def open(self, start: int = 0, expected: Version | None = None) -> HttpStream:
        """Send the request and check the head of the answer; the stream's chunks() read the body."""
        pools = pools_for(self._session)
        try:
            answer = self._first_answer(pools, start, expected)
            return HttpStream(self._client, pools, self._client.continued(answer))
        except BaseException:
            pools.close()
            raise

    def version(self) -> Version:
        """Request one byte and read only the head of the answer."""
        with contextlib.closing(Pools(self._session)) as pools:
            return self._client.version(pools)

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Request a range over a kept connection; from a server without ranges, as a stream."""
        self._pools = self._pools or Pools(self._session)
        if self._client.has_backends:
            version = version.only_size()  # the bytes are checked by their checksums
        if abilities(self.url).ranges is False:
            return self.streamed(0, start, stop, version)
        chunks = self._client.read_range(self._pools, start, stop, version, is_proven=True)
        try:
            data = b"".join(no_crawl(self.url, chunks, self._session.options))
        except OriginCut as exc:
            with contextlib.suppress(Unproven):
                if not isinstance(exc, RangeIgnored):
                    return super().read(start, stop, version)  # works, or says why not
            return self.streamed(0, start, stop, version)
        self._session.count("origin_bytes", len(data))
        return data

    def close(self) -> None:
        """Close the kept connection."""
        pools, self._pools = self._pools, None
        if pools is not None:
            pools.close()

    def _first_answer(self, pools: Pools, start: int, expected: Version | None) -> WebAnswer:
        if self._client.parallel_ranges and not abilities(self.url).refuses_ranges:
            with contextlib.suppress(NoRanges):
                return self._client.ask(pools, start, expected, self._session.options.first_get_bytes)
            self._client.parallel_ranges = False
        return self._client.ask(pools, start, expected)


class HttpStream:
    """The bodies of consecutive answers. Bytes before the one that was asked for are dropped."""

    def __init__(self, client: HttpClient, pools: Pools, answer: WebAnswer) -> None:
        self.version = answer.version
        self._client, self._session = client, client.session
        self._pools, self._answer = pools, answer
        self._position, self._start = answer.first, answer.start
        self._waited_seconds, self._read_bytes = 0.0, 0
        self._parallel: _ParallelRanges | None = None

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes as they arrive, up to `chunk_bytes` at once."""
        while (response := self._answer.response) is not None:
            begin = self._position
            yield from self._body(response)
            if self._answer.is_part and self._position == self._answer.stop:
                size = self.version.size
                if size == self._position:
                    return
                if size is not None and not self._is_quick():
                    self._pools.close()  # no more connections than `parts`
                    self._parallel = _ParallelRanges(self._client, self._position, self.version)
                    yield from self._parallel.chunks()
                    return
                self._take(self._client.ask(self._pools, self._position, self.version))
            elif self._is_end(response) or not self._goes_on(begin):
                return

    def close(self) -> None:
        """Close the connections, unless they are kept for the next shard; idempotent."""
        if self._parallel is not None:
            self._parallel.close()
        if self._answer.response is not None:
            self._answer.response.close()
        self._pools.end()

    def _body(self, response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        size = ReadSize(self._session.options.chunk_bytes)
        while True:
            before_seconds = waited_seconds()
            try:
                chunk = receive(response, size.bytes, self._session)
            except HTTPError as exc:
                raise self._broken(exc) from exc
            if not chunk:
                return
            size.came(len(chunk))
            self._waited_seconds += waited_seconds() - before_seconds
            self._read_bytes += len(chunk)
            before, self._position = self._position, self._position + len(chunk)
            self._session.count("origin_bytes", len(chunk))
            if before >= self._start:
                yield chunk
            elif self._position > self._start:
                yield chunk[self._start - before :]

    def _take(self, answer: WebAnswer) -> None:
        self._answer = self._client.continued(answer)
        self.version = self.version.completed(answer.version)
        self._position, self._start = answer.first, answer.start

    def _is_quick(self) -> bool:
        """Return whether one connection is fast enough to read the rest."""
        return self._read_bytes >= self._waited_seconds * self._session.options.quick_bytes_per_second

    def _broken(self, exc: HTTPError) -> OriginError:
        error = self._client.translated(exc, "no byte")
        if isinstance(error, OriginUnavailable):
            return OriginCut(
                f"{self._client.url}: the connection broke at byte {self._position} of {self._of}"
            )
        return error

    def _is_end(self, response: urllib3.BaseHTTPResponse) -> bool:
        """Return whether the end of the body is the shard's; a connection that closes proves nothing."""
        size, stop = self.version.size, self._answer.stop
        if (stop is not None and self._position < stop) or (size is not None and self._position < size):
            raise OriginCut(f"{self._client.url}: ended at byte {self._position} of {self._of}")
        return stop is not None or "chunked" in response.headers.get("Transfer-Encoding", "").lower()

    def _goes_on(self, begin: int) -> bool:
        """Request what follows the end of the body. If there is anything, read on from there."""
        more = self._client.ask(self._pools, self._position, self.version)
        if more.first == self._position != more.stop and self._position > begin:
            self._take(more)
            return True
        if more.response is not None:
            more.response.close()
        size = more.version.size
        if more.first == self._position != more.stop or (size is not None and size != self._position):
            raise OriginCut(f"{self._client.url}: ended at byte {self._position}, but goes on there")
        return False

    @property
    def _of(self) -> str:
        return "unknown" if self.version.size is None else str(self.version.size)


class RangePart(Protocol):
    """One requested range. Yields exactly its bytes, or raises.

    Attributes:
        size_bytes: of the range.
        seconds: time that the origin took to bring it; None until its last byte has come.
    """

    size_bytes: int
    seconds: float | None

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in order, once."""
        ...

    def cancel(self) -> None:
        """Cancel the request; idempotent."""
        ...


class OrderedParts:
    """The parts from `start` to `stop`, requested in parallel and given in order.

    Args:
        ask: requests the range from one byte up to another.
        at_once: how many requests run in parallel. Parts that have arrived and wait for their turn hold at
            most `at_once` × `part_limit_bytes`.
    """

    def __init__(
        self,
        ask: Callable[[int, int], RangePart],
        start: int,
        stop: int,
        at_once: int,
        options: OriginOptions,
    ) -> None:
        self._ask, self._asked, self._stop = ask, start, stop
        self._at_once, self._options = at_once, options
        self._part_bytes = options.first_part_bytes
        self._parts: deque[RangePart] = deque()

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in order. However it ends, no request is left running."""
        try:
            while self._parts or self._asked < self._stop:
                self._ask_more()
                for chunk in self._parts[0].chunks():
                    yield chunk
                    self._ask_more()
                self._grow(self._parts.popleft().seconds or 0.0)
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the running requests; idempotent."""
        while self._parts:
            self._parts.pop().cancel()

    def _ask_more(self) -> None:
        limit = self._at_once * self._options.part_limit_bytes
        while self._asked < self._stop:
            under_way = sum(part.seconds is None for part in self._parts)
            held = sum(part.size_bytes for part in self._parts)
            size = self._next_bytes()
            if under_way >= self._at_once or (self._parts and held + size > limit):
                return
            start, self._asked = self._asked, self._asked + size
            self._parts.append(self._ask(start, self._asked))

    def _next_bytes(self) -> int:
        """Return the size of the next part: smaller towards the end, to keep all connections busy."""
        left = self._stop - self._asked
        share = max(
            left // self._at_once, self._part_bytes // _SMALLEST_SHARE, self._options.first_part_bytes
        )
        return min(left, self._part_bytes, share)

    def _grow(self, seconds: float) -> None:
        """Double the next parts while they arrive quickly, halve them when they are slow."""
        if seconds < _QUICK_SECONDS:
            self._part_bytes = min(self._options.part_limit_bytes, self._part_bytes * 2)
        elif seconds > 2 * _QUICK_SECONDS:
            self._part_bytes = max(self._options.first_part_bytes, self._part_bytes // 2)


class _ParallelRanges:
    """The rest of a shard in parallel ranges, each read by a thread over a kept connection."""

    def __init__(self, client: HttpClient, start: int, version: Version) -> None:
        self._client, self._version = client, version
        session, options = client.session, client.session.options
        self._closed = _Either(session.stop)
        self._pools = Pools(replace(session, stop=self._closed), connections=options.parts)
        self._parts = OrderedParts(self._ask, start, version.size or 0, options.parts, options)

    def chunks(self) -> Iterator[bytes]:
        for chunk in self._parts.chunks():
            self._client.session.count("origin_bytes", len(chunk))
            yield chunk

    def close(self) -> None:
        self._closed.set()
        self._parts.close()
        self._pools.close()

    def _ask(self, start: int, stop: int) -> _Range:
        chunks = self._client.read_range(self._pools, start, stop, self._version)
        return _Range(self._client, chunks, stop - start, self._closed)


class _Range:
    """One range. A thread reads it until its turn comes; then the caller reads the rest."""

    def __init__(
        self,
        client: HttpClient,
        chunks: Generator[bytes, None, None],
        size_bytes: int,
        closed: threading.Event,
    ) -> None:
        self.size_bytes = size_bytes
        self.seconds: float | None = None
        self._client, self._session, self._closed = client, client.session, closed
        self._waited_seconds = 0.0
        self._is_its_turn = False
        self._rest = chunks
        self._came: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="streamload-range", daemon=True)
        limits.start(self._thread)

    def chunks(self) -> Iterator[bytes]:
        """Yield what has come, joined into pieces of about `chunk_bytes`; then read the rest."""
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
            before_seconds = waited_seconds()
            yield from self._rest
            self._waited_seconds += waited_seconds() - before_seconds
        except Exception:
            self._client.parallel_ranges = False
            raise
        self.seconds = self._waited_seconds

    def cancel(self) -> None:
        self._closed.set()  # one failure ends all ranges: the retry starts again at its byte
        self._thread.join()
        self._rest.close()

    def _next(self) -> bytes | BaseException | None:
        """Wait for a piece, an error, or None (the thread has stopped)."""
        while True:
            try:
                return self._came.get(timeout=WAKE_SECONDS)
            except queue.Empty:
                self._session.check(self._client.url)

    def _work(self) -> None:
        try:
            for chunk in self._rest:
                self._came.put(chunk)
                if self._is_its_turn:  # the caller reads on: the queue would double the cost
                    break
                if self._closed.is_set():
                    raise OriginStopped(f"{self._client.url}: this range isn't needed any more")
            else:
                self.seconds = waited_seconds()
            self._waited_seconds = waited_seconds()  # of this thread, which has read nothing else
            self._came.put(None)
        except BaseException as exc:
            self._came.put(exc)


class _Either(threading.Event):
    """Set when it or another event is set."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or self._other.is_set()
