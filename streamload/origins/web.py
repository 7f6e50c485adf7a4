"""Shards on web servers: what is asked of them, and the check of every answer (step F).

No HEAD (a signed URL refuses it): the size is told with the first range. Retries nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit, urlunsplit

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
from streamload.origins.access import refuse_host
from streamload.origins.protocol import (
    Origin,
    ReadSize,
    Session,
    Unproven,
    Version,
    http_error,
    no_crawl,
    same_version,
    strong,
)
from streamload.origins.sockets import Pools, basic, receive
from streamload.origins.web_stream import Answer, HttpStream
from streamload.urls import redact, redact_text
from streamload.urls.identity import DEFAULT_PORTS

REDIRECTS = 10
_REDIRECTING = {301, 302, 303, 307, 308}
_NUMBER = "[0-9]{1,18}"  # none is larger that a file could have
_CONTENT_RANGE = re.compile(rf"bytes\s+(?:({_NUMBER})-({_NUMBER})|\*)/({_NUMBER}|\*)", re.IGNORECASE)
_HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_HEADER_VALUE = re.compile(r"[^\0\r\n\u0100-\U0010ffff]*")


class _Place(NamedTuple):
    url: str
    is_own: bool  # it gets the headers that are for the listed URL's host alone


class _NoRanges(Exception):
    """A request for a first range was answered in a way that one for all of it may not be."""


class _All(OriginCut):
    """A range is answered with 200."""


class HttpOrigin(Origin):
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
        self._answered: _Place | None = None
        self._at_once = session.options.parts
        self._pools: Pools | None = None  # kept from one read to the next

    def __repr__(self) -> str:
        return f"HttpOrigin({self.url!r})"

    def open(self, start: int = 0, expected: Version | None = None) -> HttpStream:
        """Send the request and check the answer's head; the body is read by the stream's chunks()."""
        pools = Pools(self._session)
        try:
            if self._at_once > 1:
                with contextlib.suppress(_NoRanges):
                    answer = self._ask(pools, start, expected, self._session.options.first_get_bytes)
                    return HttpStream(self, self._session, pools, self.continued(answer))
                self.keep_to_one_connection()
            answer = self.ask(pools, start, expected)
            return HttpStream(self, self._session, pools, self.continued(answer))
        except BaseException:
            pools.close()
            raise

    def version(self) -> Version:
        """Ask for one byte and read the answer's head only: a signed URL refuses HEAD."""
        pools = Pools(self._session)
        response = None
        try:
            response = self._request(pools, self._range(0, None, 1))
            if response.status == 416:  # it has no byte
                return Version(0, strong(response.headers.get("ETag")), response.headers.get("Last-Modified"))
            self._refuse(response)
            found = self._place(response, 0)[0]
            return Version(None, found.etag, found.last_modified) if _is_as_long(response, 1) else found
        except HTTPError as exc:
            raise self.translated(exc, "no answer") from exc
        finally:
            if response is not None:
                response.close()
            pools.close()

    def ask(self, pools: Pools, start: int, expected: Version | None) -> Answer:
        """Ask for all from a byte to the end; the answer's head is checked."""
        return self._ask(pools, start, expected, None)

    def continued(self, answer: Answer) -> Answer:
        """Return an answer that may follow the bytes before it.

        Raises:
            Unproven: it begins elsewhere, or nothing says that it is of their version.
        """
        if answer.is_unproven:
            self.keep_to_one_connection()
            if answer.response is not None:
                answer.response.close()
            raise Unproven("its server answers with all of it, or names another version or none")
        return answer

    def keep_to_one_connection(self) -> None:
        """Don't ask for ranges side by side again: this server doesn't do well with them."""
        self._at_once = 1

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Ask for a range over a connection that is kept; as a stream from a server that gives no ranges."""
        self._pools = self._pools or Pools(self._session)
        # Not by ETag: another backend's range is as good, and its bytes are compared with their checksums.
        chunks = self.read_range(self._pools, start, stop, version.without_etag(), is_proven=True)
        try:
            data = b"".join(no_crawl(self.url, chunks, self._session.options))
        except _All:  # ranges mean nothing to it
            return self.streamed(0, start, stop, version)
        except OriginCut:
            return super().read(start, stop, version)  # or it says why not
        self._session.count("origin_bytes", len(data))
        return data

    def close(self) -> None:
        """Close the connection that is kept."""
        pools, self._pools = self._pools, None
        if pools is not None:
            pools.close()

    def read_range(
        self, pools: Pools, start: int, stop: int, version: Version, *, is_proven: bool = False
    ) -> Generator[bytes, None, None]:
        """Give exactly the bytes of a range, from where the first answer came from. For any thread.

        Args:
            is_proven: something else than the answer's head proves that they are of this version.

        Raises:
            OriginCut: they didn't come, or not as asked; a request over one connection finds out why.
            DatasetChanged: they are of another version.
            Unproven: nothing says that they are of this one.
        """
        what = {"Range": f"bytes={start}-{stop - 1}"}
        if version.etag:
            what["If-Match"] = version.etag
        response, position = None, start
        try:
            response = self._request(pools, what, self._answered)
            if response.status == 412:
                raise Unproven("a range of it has another ETag")
            if response.status != 206:
                kind = _All if response.status == 200 else OriginCut
                raise kind(f"{self.url}: a range of it is answered with {response.status}")
            self._refuse(response)
            found, _, end = self._place(response, start, stop - start)
            self._compare(version, found, start)
            if not is_proven and not version.proves(found):
                raise Unproven("a range of it has another ETag, or none")
            if end != stop or found.size != version.size:
                raise _NoRanges
            size = ReadSize(self._session.options.chunk_bytes)
            while chunk := receive(response, size.bytes, self._session):
                size.came(len(chunk))
                position += len(chunk)
                if position > stop:
                    break
                yield chunk
            if position != stop:
                raise OriginCut(f"{self.url}: a range ended at byte {position} instead of {stop}")
        except _NoRanges:
            raise OriginCut(f"{self.url} was asked for {start}-{stop - 1} and answers other bytes") from None
        except HTTPError as exc:
            raise OriginCut(str(self.translated(exc, "no byte"))) from exc
        finally:
            if response is not None and position != stop:
                response.close()

    def _ask(self, pools: Pools, start: int, expected: Version | None, most: int | None) -> Answer:
        response = None
        try:
            response = self._request(pools, self._range(start, expected, most))
            if response.status == 416:
                return self._nothing_left(response, start, expected, most)
            self._refuse(response)
            if start and expected is not None and _is_as_long(response, (expected.size or 0) - start):
                raise Unproven("its server answers a range with 200")
            found, first, stop = self._place(response, start, most)
            self._compare(expected, found, start)
            is_part = response.status == 206 and most is not None
            if is_part and not found.is_traceable and stop != found.size:
                raise _NoRanges  # nothing would tell whether what comes next belongs to it
            continues = first == start and (expected is None or expected.proves(found))
            is_unproven = start > 0 and expected is not None and not continues
            return Answer(response, found, first, start, stop, is_part, is_unproven)
        except BaseException as exc:
            if response is not None:
                response.close()
            if isinstance(exc, HTTPError):
                raise self.translated(exc, "no answer") from exc
            raise

    def _range(self, start: int, expected: Version | None, most: int | None) -> dict[str, str]:
        if start == 0 and most is None:
            return {}
        stop = "" if most is None else start + most - 1
        condition = {"If-Range": expected.etag} if expected is not None and expected.etag else {}
        return {"Range": f"bytes={start}-{stop}", **condition}

    def _request(
        self, pools: Pools, what: Mapping[str, str], at: _Place | None = None
    ) -> urllib3.BaseHTTPResponse:
        """Follow redirects, within http(s) only; what proves who asks stays with the URL's host.

        Args:
            at: where an earlier request was led to, so that this one needn't be.
        """
        target, is_own = at or _Place(self._target, True)
        headers = self._with_headers(what, self._headers if is_own else {})
        for _ in range(self._redirects + 1):
            self._session.check(self.url)
            self._session.count("origin_requests")
            response = pools.request(target, headers)
            place = response.headers.get("Location")
            if response.status not in _REDIRECTING or not place:
                if at is None:
                    self._answered = _Place(target, is_own)
                return response
            response.close()
            before, target = target, self._redirected(target, place)
            if not _is_same_host(before, target):
                is_own, headers = False, self._with_headers(what, {})
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
        for name, value in headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                shown = name.partition(":")[0]
                raise OriginError(
                    f"{self.url}: the header {shown!r} can't be sent: names have ASCII's letters, digits "
                    "and dashes, values all of Latin-1 but line breaks"
                )
        return headers

    def _redirected(self, target: str, place: str) -> str:
        """Where an answer from `target` sends us; refused if it isn't http(s), or where credentials are."""
        try:
            target = urljoin(target, place)
            parts = urlsplit(target)
            host, port = parts.hostname, parts.port  # a port that is no number raises here
        except ValueError:
            raise OriginError(f"{self.url} redirects to what is no URL") from None
        if parts.scheme not in {"http", "https"} or not host:
            raise OriginDenied(f"{self.url} redirects to {redact(target)}: only http and https are followed")
        try:
            refuse_host(host, port or DEFAULT_PORTS[parts.scheme], self._session.named)  # or a proxy would go
        except OriginDenied as exc:
            raise OriginDenied(f"{self.url} redirects elsewhere: {exc}") from None
        return target

    def _refuse(self, response: urllib3.BaseHTTPResponse) -> None:
        if response.status not in {200, 206}:
            detail = self._said(response)
            raise http_error(f"{self.url}: {detail}", response.status, response.headers.get("Retry-After"))
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in {"", "identity"}:
            raise ShardFormatError(
                f"{self.url} comes with Content-Encoding {encoding!r} although identity was asked for: "
                "its bytes and ranges would not be the tar's; store it without an encoding"
            )

    def _place(
        self, response: urllib3.BaseHTTPResponse, start: int, most: int | None = None
    ) -> tuple[Version, int, int | None]:
        """The version that answers, its body's first byte and the byte after its last, if that is stated."""
        etag, modified = strong(response.headers.get("ETag")), response.headers.get("Last-Modified")
        stated = response.headers.get("Content-Length", "")
        length = int(stated) if re.fullmatch(_NUMBER, stated) else None
        if response.status == 200:
            if length is not None and length == most:  # it may be the range, with a status that isn't its own
                raise _NoRanges
            if length is not None and length < start:
                raise DatasetChanged(f"{self.url} has {length} bytes now, of which {start} had been read")
            return Version(length, etag, modified), 0, length
        given = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(given.strip())
        if match is None or match[1] is None or int(match[1]) != start or int(match[2]) < start:
            if most is not None:
                raise _NoRanges
            raise OriginError(f"{self.url} was asked for bytes from {start} and answers {given[:80]!r}")
        stop = int(match[2]) + 1
        size = None if match[3] == "*" else int(match[3])
        if (size is not None and stop > size) or (length is not None and length != stop - start):
            if most is not None:
                raise _NoRanges
            raise OriginError(f"{self.url} contradicts itself: {given!r} with a Content-Length of {length}")
        return Version(size, etag, modified), start, stop

    def _compare(self, expected: Version | None, found: Version, start: int) -> None:
        """Refuse another size or date; of another ETag alone (a load balancer's) the bytes have to tell."""
        if expected is not None and not expected.proves(found):
            is_dated = expected.last_modified is not None and found.last_modified is not None
            same_version(self.url, expected.without_etag() if start or is_dated else expected, found)

    def _nothing_left(
        self, response: urllib3.BaseHTTPResponse, start: int, expected: Version | None, most: int | None
    ) -> Answer:
        """416: right where the shard ends at `start`, and else another version."""
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
        total = int(match[3]) if match is not None and match[3] != "*" else None
        if total is None and expected is not None:
            total = expected.size
        if total != start:
            if most is not None:
                raise _NoRanges
            size = "an unknown number of" if total is None else total
            raise DatasetChanged(f"{self.url} has no byte {start} (416): it has {size} bytes now")
        found = Version(start, strong(response.headers.get("ETag")), response.headers.get("Last-Modified"))
        self._compare(expected, found, start)
        response.close()
        return Answer(None, found, start, start, start)

    def _said(self, response: urllib3.BaseHTTPResponse) -> str:
        """The status, and the error code that object stores put into the body."""
        said = f"the server answers {response.status} {response.reason or ''}".rstrip()
        try:
            body = receive(response, 2048, self._session)
        except HTTPError:
            body = b""
        code = re.search(rb"<Code>(\w{1,60})</Code>", body)
        return f"{said} ({code[1].decode()})" if code else said

    def translated(self, exc: HTTPError, what: str) -> OriginError:
        """Return an error of urllib3 as ours; what is our own already (from connecting) gets the URL."""
        self._session.check(self.url)
        for inner in (exc, *exc.args, exc.__cause__):
            if isinstance(inner, OriginError):
                error = type(inner)(f"{self.url}: {inner}")
                if isinstance(error, OriginUnavailable):
                    error.is_unreachable = getattr(inner, "is_unreachable", None)
                return error
        if isinstance(exc, Urllib3Timeout):
            return OriginTimeout(f"{self.url}: {what} for {self._session.options.stall_seconds:g} s")
        reason = redact_text(str(exc.args[-1] if exc.args else exc))
        if "Tunnel connection failed: 407" in reason:
            return OriginDenied(f"{self.url}: its proxy wants another user and password: {reason}")
        if isinstance(exc, SSLError) and "CERTIFICATE" in reason:
            return OriginError(f"{self.url}: its certificate is refused: {reason}")
        if isinstance(exc, ProtocolError | ProxyError | SSLError):
            return OriginUnavailable(f"{self.url}: {what}: {reason}")
        return OriginError(f"{self.url}: {reason}")


def _is_as_long(response: urllib3.BaseHTTPResponse, range_bytes: int) -> bool:
    """Whether an answer with status 200 may have a range of so many bytes, and not all of the shard."""
    return response.status == 200 and response.headers.get("Content-Length") == str(range_bytes)


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
        sent["Authorization"] = basic(user)
    return urlunsplit(parts._replace(netloc=host, fragment="")), sent
