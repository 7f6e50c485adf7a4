"""Shards on web servers: one streaming GET from a byte to the end, every answer checked (step F).

Only requests what it needs: no HEAD (a signed URL refuses it), a Range only to resume. Retries nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

import urllib3
from urllib3.exceptions import (
    HTTPError,
    ProtocolError,
    ProxyError,
    SSLError,
)
from urllib3.exceptions import (
    TimeoutError as Urllib3Timeout,
)

from streamload.errors import (
    DatasetChanged,
    OriginCut,
    OriginDenied,
    OriginError,
    OriginTimeout,
    OriginUnavailable,
    ShardFormatError,
)
from streamload.origins.failures import of_status
from streamload.origins.protocol import Session, Version, same_version, strong
from streamload.origins.sockets import WAKE_SECONDS, close_pools, open_pools, refuse_metadata_host, unlogged
from streamload.urls import redact, redact_text

REDIRECTS = 10
_REDIRECTING = {301, 302, 303, 307, 308}
_CONTENT_RANGE = re.compile(r"bytes\s+(?:(\d+)-(\d+)|\*)/(\d+|\*)", re.IGNORECASE)


class HttpOrigin:
    """A shard at an http:// or https:// URL.

    Args:
        url: with user and password in it, if there are any.
        headers: sent to the URL's own host; a redirect to another host doesn't get them.
        common_headers: sent to every host, in place of our own User-Agent for one.
        redirects: how many are followed.
    """

    def __init__(
        self,
        url: str,
        session: Session,
        headers: Mapping[str, str] | None = None,
        *,
        common_headers: Mapping[str, str] | None = None,
        redirects: int = REDIRECTS,
    ) -> None:
        self.url = redact(url)
        self._session = session
        self._common, self._redirects = dict(common_headers or {}), redirects
        self._target, self._headers = _without_user(url, headers or {})

    def __repr__(self) -> str:
        return f"HttpOrigin({self.url!r})"

    def open(self, start: int = 0, expected: Version | None = None) -> _HttpStream:
        """Send the request and check the answer's head; the body is read by the stream's chunks()."""
        pools = open_pools(self._session, self._target)
        response = None
        try:
            response = self._request(pools, self._range(start, expected))
            if response.status == 416:
                return self._nothing_left(pools, response, start, expected)
            self._refuse(response)
            found, first, stop = self._place(response, start)
            same_version(self.url, expected, found)
            return _HttpStream(self, self._session, pools, response, found, (first, start, stop))
        except BaseException as exc:
            if response is not None:
                response.close()
            close_pools(pools)
            if isinstance(exc, HTTPError):
                raise self._translated(exc, "no answer") from exc
            raise

    def _range(self, start: int, expected: Version | None) -> dict[str, str]:
        if start == 0:
            return {}
        condition = {"If-Range": expected.etag} if expected is not None and expected.etag else {}
        return {"Range": f"bytes={start}-", **condition}

    def _request(self, pools: urllib3.PoolManager, what: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        """Follow redirects, within http(s) only; what proves who asks stays with the URL's host."""
        target, headers = self._target, self._with_headers(what, self._headers)
        timeout = urllib3.Timeout(connect=self._session.options.connect_seconds, read=WAKE_SECONDS)
        for _ in range(self._redirects + 1):
            self._session.check(self.url)
            self._session.count("origin_requests")
            with unlogged():
                response = pools.request(
                    "GET",
                    target,
                    headers=headers,
                    timeout=timeout,
                    preload_content=False,
                    redirect=False,
                    retries=False,
                )
            place = response.headers.get("Location")
            if response.status not in _REDIRECTING or not place:
                return response
            response.close()
            before, target = target, self._redirected(target, place)
            if not _is_same_host(before, target):
                headers = self._with_headers(what, {})
        if self._redirects == 0:
            raise OriginError(
                f"{self.url} redirects to {redact(target)}, and the command doesn't follow: give curl -L"
            )
        raise OriginError(f"{self.url} redirects more than {self._redirects} times, last to {redact(target)}")

    def _with_headers(self, what: Mapping[str, str], own: Mapping[str, str]) -> urllib3.HTTPHeaderDict:
        """All headers of a request; of two with the same name the user's counts."""
        headers = urllib3.HTTPHeaderDict({"Accept-Encoding": "identity", "User-Agent": "streamload"})
        for some in (self._common, own, what):
            headers.update(some)
        return headers

    def _redirected(self, target: str, place: str) -> str:
        """Where an answer from `target` sends us; refused if it isn't http(s), or where credentials are."""
        try:
            target = urljoin(target, place)
            parts = urlsplit(target)
            host, _port = parts.hostname, parts.port  # a port that is no number raises here
        except ValueError:
            raise OriginError(f"{self.url} redirects to what is no URL") from None
        if parts.scheme not in {"http", "https"} or not host:
            raise OriginDenied(f"{self.url} redirects to {redact(target)}: only http and https are followed")
        try:
            refuse_metadata_host(host)  # also where a proxy would go there for us
        except OriginDenied as exc:
            raise OriginDenied(f"{self.url} redirects elsewhere: {exc}") from None
        return target

    def _refuse(self, response: urllib3.BaseHTTPResponse) -> None:
        if response.status not in {200, 206}:
            detail = _said(response)
            raise of_status(f"{self.url}: {detail}", response.status, response.headers.get("Retry-After"))
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in {"", "identity"}:
            raise ShardFormatError(
                f"{self.url} comes with Content-Encoding {encoding!r} although identity was asked for: "
                "its bytes and ranges would not be the tar's; store it without an encoding"
            )

    def _place(self, response: urllib3.BaseHTTPResponse, start: int) -> tuple[Version, int, int | None]:
        """The version that answers, its body's first byte and the byte after its last, if that is stated."""
        etag, modified = strong(response.headers.get("ETag")), response.headers.get("Last-Modified")
        stated = response.headers.get("Content-Length", "")
        length = int(stated) if stated.isdigit() else None
        if response.status == 200:
            if length is not None and length < start:
                raise DatasetChanged(f"{self.url} has {length} bytes now, of which {start} had been read")
            return Version(length, etag, modified), 0, length
        given = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(given.strip())
        if match is None or match[1] is None or int(match[1]) != start or int(match[2]) < start:
            raise OriginError(f"{self.url} was asked for bytes from {start} and answers {given!r}")
        stop = int(match[2]) + 1
        size = None if match[3] == "*" else int(match[3])
        if (size is not None and stop > size) or (length is not None and length != stop - start):
            raise OriginError(f"{self.url} contradicts itself: {given!r} with a Content-Length of {length}")
        return Version(size, etag, modified), start, stop

    def _nothing_left(
        self,
        pools: urllib3.PoolManager,
        response: urllib3.BaseHTTPResponse,
        start: int,
        expected: Version | None,
    ) -> _HttpStream:
        """416: right where the shard ends at `start`, and else another version."""
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
        total = int(match[3]) if match is not None and match[3] != "*" else None
        if total is None and expected is not None:
            total = expected.size
        if total != start:
            size = "an unknown number of" if total is None else total
            raise DatasetChanged(f"{self.url} has no byte {start} (416): it has {size} bytes now")
        found = Version(start, strong(response.headers.get("ETag")), response.headers.get("Last-Modified"))
        same_version(self.url, expected, found)
        response.close()
        return _HttpStream(self, self._session, pools, None, found, (start, start, start))

    def _translated(self, exc: HTTPError, what: str) -> OriginError:
        """An error of urllib3 as ours. What is our own already (from connecting) comes back with the URL."""
        self._session.check(self.url)
        for inner in (exc, *exc.args, exc.__cause__):
            if isinstance(inner, OriginError):
                return type(inner)(f"{self.url}: {inner}")
        if isinstance(exc, Urllib3Timeout):
            return OriginTimeout(f"{self.url}: {what} for {self._session.options.stall_seconds:g} s")
        reason = redact_text(str(exc.args[-1] if exc.args else exc))
        if isinstance(exc, SSLError) and "CERTIFICATE" in reason:
            return OriginError(f"{self.url}: its certificate is refused: {reason}")
        if isinstance(exc, ProtocolError | ProxyError | SSLError):
            return OriginUnavailable(f"{self.url}: {what}: {reason}")
        return OriginError(f"{self.url}: {reason}")


class _HttpStream:
    """The body of one answer; what stands before the byte asked for is read and dropped."""

    def __init__(
        self,
        origin: HttpOrigin,
        session: Session,
        pools: urllib3.PoolManager,
        response: urllib3.BaseHTTPResponse | None,
        version: Version,
        place: tuple[int, int, int | None],
    ) -> None:
        self.version = version
        self._origin, self._session = origin, session
        self._pools, self._response = pools, response
        self._position, self._start, self._stop = place

    def chunks(self) -> Iterator[bytes]:
        """Give the bytes as they come off the socket, up to `chunk_bytes` at once."""
        while self._response is not None:
            begin = self._position
            yield from self._body(self._response)
            if self._is_end(self._response) or not self._goes_on(begin):
                return

    def _body(self, response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        read1, size = response.read1, self._session.options.chunk_bytes
        while True:
            try:
                chunk = read1(size, decode_content=False)
            except HTTPError as exc:
                raise self._broken(exc) from exc
            if not chunk:
                return
            before, self._position = self._position, self._position + len(chunk)
            self._session.count("origin_bytes", len(chunk))
            if before >= self._start:
                yield chunk
            elif self._position > self._start:
                yield chunk[self._start - before :]

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self._response is not None:
            self._response.close()
        close_pools(self._pools)

    def _broken(self, exc: HTTPError) -> OriginError:
        error = self._origin._translated(exc, "no byte")
        if isinstance(error, OriginUnavailable):
            return OriginCut(
                f"{self._origin.url}: the connection broke at byte {self._position} of {self._of}"
            )
        return error

    def _is_end(self, response: urllib3.BaseHTTPResponse) -> bool:
        """The body is over; is the shard? A body that ends with its connection proves nothing."""
        size, stop = self.version.size, self._stop
        if (stop is not None and self._position < stop) or (size is not None and self._position < size):
            raise OriginCut(f"{self._origin.url}: ended at byte {self._position} of {self._of}")
        return stop is not None or "chunked" in response.headers.get("Transfer-Encoding", "").lower()

    def _goes_on(self, begin: int) -> bool:
        """Ask for what stands behind the body's end, and if there is something, read on from there."""
        self.close()
        more = self._origin.open(self._position, self.version)
        if more._position == self._position and more._stop != self._position and self._position > begin:
            self._pools, self._response = more._pools, more._response
            self._stop, self.version = more._stop, more.version
            return True
        more.close()
        size = more.version.size
        if more._position == self._position != more._stop or (size is not None and size != self._position):
            raise OriginCut(f"{self._origin.url}: ended at byte {self._position}, but goes on there")
        return False

    @property
    def _of(self) -> str:
        return "unknown" if self.version.size is None else str(self.version.size)


def _said(response: urllib3.BaseHTTPResponse) -> str:
    """The status, and the error code that object stores put into the body."""
    said = f"the server answers {response.status} {response.reason or ''}".rstrip()
    try:
        body = response.read1(2048, decode_content=False) or b""
    except HTTPError:
        body = b""
    code = re.search(rb"<Code>(\w{1,60})</Code>", body)
    return f"{said} ({code[1].decode()})" if code else said


def _is_same_host(before: str, target: str) -> bool:
    """Whether credentials for one URL may go to the other: not on the way from https to http."""
    one, other = urlsplit(before), urlsplit(target)
    return one.netloc == other.netloc and (one.scheme == other.scheme or other.scheme == "https")


def _without_user(url: str, headers: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Move a URL's user and password into a header."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    sent = {str(name): str(value) for name, value in headers.items()}
    if user:
        sent.update(urllib3.make_headers(basic_auth=unquote(user)))
    return urlunsplit(parts._replace(netloc=host, fragment="")), sent
