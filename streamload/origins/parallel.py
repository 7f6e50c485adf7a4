"""A shard in parallel ranges, which start small and grow: of slow web servers and object stores (step F)."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Protocol

from streamload import limits
from streamload.errors import OriginStopped
from streamload.origins.protocol import OriginOptions, Version
from streamload.origins.sockets import WAKE_SECONDS, Pools, waited_seconds
from streamload.origins.web_client import HttpClient

_QUICK_SECONDS = 1.0
_SMALLEST_SHARE = 8


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


class ParallelRanges:
    """The rest of a shard in parallel ranges, each read by a thread over a kept connection."""

    def __init__(self, client: HttpClient, start: int, version: Version) -> None:
        self._client, self._version = client, version
        session, options = client.session, client.session.options
        self._closed = _Either(session.stop)
        self._pools = Pools(replace(session, stop=self._closed), connections=options.parts)
        self._parts = OrderedParts(self._ask, start, version.size or 0, options.parts, options)

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in order."""
        for chunk in self._parts.chunks():
            self._client.session.count("origin_bytes", len(chunk))
            yield chunk

    def close(self) -> None:
        """Cancel the running requests, and close the connections. Idempotent."""
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
