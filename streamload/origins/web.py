"""Shards on web servers (step F).

A shard begins with one request. If that answer came quickly, the same connection reads the rest. If it was
slow, as over a link with a limit for each connection, the rest comes in parallel ranges, which start small
and grow (parallel.py). Retries nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import urllib3
from urllib3.exceptions import HTTPError

from streamload.errors import OriginCut, OriginError, OriginUnavailable
from streamload.origins.endpoints import abilities
from streamload.origins.protocol import Origin, ReadSize, Unproven, Version, no_crawl
from streamload.origins.sockets import Pools, pools_for, receive, waited_seconds
from streamload.origins.web_client import HttpClient, NoRanges, RangeIgnored, WebAnswer

if TYPE_CHECKING:
    from streamload.origins.parallel import ParallelRanges


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
        self._parallel: ParallelRanges | None = None

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
                    from streamload.origins.parallel import ParallelRanges

                    self._parallel = ParallelRanges(self._client, self._position, self.version)
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
