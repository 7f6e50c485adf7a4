"""HTTP requests for one shard, and the check of every answer (step F).

No HEAD requests (signed URLs refuse them): the first range tells the size. Retries nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit, urlunsplit

import urllib3
from urllib3.exceptions import HTTPError, ProtocolError, ProxyError, SSLError
from urllib3.exceptions import TimeoutError as Urllib3Timeout

from streamload.errors import (
    DatasetChanged,
    OriginCut,
    OriginDenied,
    OriginError,
    OriginTimeout,
    OriginUnavailable,
    ShardFormatError,
)
from streamload.origins.access import REFUSALS, Access, WebCredentials, refuse_host
from streamload.origins.endpoints import abilities, learn_ranges, learn_refusal, learn_version
from streamload.origins.protocol import (
    ENDED,
    ReadSize,
    Session,
    Unproven,
    Version,
    clock_hint,
    http_error,
    same_version,
    strong,
)
from streamload.origins.sockets import Pools, basic, receive
from streamload.urls import compression, redact, redact_text
from streamload.urls.identity import DEFAULT_PORTS

REDIRECTS = 10
_REDIRECTING = {300, 301, 302, 303, 307, 308}
_NO_RANGE = {400, 405, 406, 501, 505}
"""Statuses by which a server may refuse a request because of its Range: nothing else in it is unusual."""
_PERHAPS_NO_RANGE = {403, 500}
"""Statuses that more often refuse the shard: the next attempt finds out."""
_HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_HEADER_VALUE = re.compile(r"[^\0\r\n\u0100-\U0010ffff]*")
_NUMBER = "[0-9]{1,18}"  # enough for the size of any file
_PLAIN = frozenset(("", "identity", "none", "binary", "utf-8", "utf8", "aws-chunked"))
"""Content encodings that leave a body as it is: uploads by SDKs and tools leave them behind."""
WHOLE = frozenset((200, 203))
"""The status of an answer with all of a shard: 203 comes through a proxy that changed headers."""
_ELEMENT = re.compile(rb"<(\w{1,60})>([\w-]{1,60})</")
_CONTENT_RANGE = re.compile(rf"bytes\s+(?:({_NUMBER})-({_NUMBER})|\*)/({_NUMBER}|\*)", re.IGNORECASE)


class NoRanges(Exception):
    """The answer to a request for the first range is unusable; a request for the whole shard may work."""


class BadRange(NoRanges):
    """The server refuses a range or contradicts itself about it, as it may for every shard."""


class RangeIgnored(OriginCut):
    """A range request was answered with all of the shard."""


class WebAnswer(NamedTuple):
    """An answer whose head has been checked.

    Attributes:
        response: its body is still to be read; None if there is none.
        first, stop: the first byte of the body and the byte after the last (None: not stated).
        start: the byte that was asked for.
        is_part: a bounded range was asked for and given, so the shard may continue after it.
        is_unproven: it doesn't begin at `start`, or nothing shows that it is of the expected version.
    """

    response: urllib3.BaseHTTPResponse | None
    version: Version
    first: int
    start: int
    stop: int | None
    is_part: bool = False
    is_unproven: bool = False


def may_be_range(response: urllib3.BaseHTTPResponse, range_bytes: int) -> bool:
    """Return whether an answer with status 200 may be a range of this size instead of the whole shard."""
    return response.status in WHOLE and response.headers.get("Content-Length") == str(range_bytes)


def check_status(url: str, response: urllib3.BaseHTTPResponse, session: Session) -> None:
    """Raise the error that a status or a content encoding means."""
    if response.status not in {*WHOLE, 206}:
        reason, code = _said(response, session)
        status = 403 if code in ENDED else response.status  # a store answers 400 to a token in the URL
        error = http_error(f"{url}: {reason}", status, response.headers.get("Retry-After"))
        if isinstance(error, OriginError):  # a store that gives a code has looked
            error.may_pass = response.status in {403, 404} and not code
        if isinstance(error, OriginDenied):
            error.have_ended = code in ENDED
        raise error
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if compression(url) == "gzip" and encoding in {"gzip", "x-gzip"}:  # Apache says so of a .tgz as it is
        return
    if not _PLAIN.issuperset(part.strip() for part in encoding.split(",")):
        raise ShardFormatError(
            f"{url} comes with Content-Encoding {encoding!r} although identity was asked for: "
            "its bytes and ranges would not be the tar's; store it without an encoding"
        )


def body_range(
    url: str, response: urllib3.BaseHTTPResponse, start: int, most: int | None = None
) -> tuple[Version, int, int | None]:
    """Return the version, the first byte of the body, and the byte after the last if stated."""
    etag, modified = strong(response.headers.get("ETag")), response.headers.get("Last-Modified")
    stated = response.headers.get("Content-Length", "")
    length = int(stated) if re.fullmatch(_NUMBER, stated) else None
    content_range = response.headers.get("Content-Range", "").strip()
    match = _CONTENT_RANGE.fullmatch(content_range)
    is_whole = start == 0 and most is None and match is None  # 206 to a request without a Range
    if response.status in WHOLE or is_whole:
        if length is not None and length == most:  # perhaps the range, with the wrong status
            raise NoRanges
        if length is not None and length < start:
            raise DatasetChanged(f"{url} has {length} bytes now, of which {start} had been read")
        return Version(length, etag, modified), 0, length
    stop = 0 if match is None or match[1] is None else int(match[2]) + 1
    size = None if match is None or match[3] == "*" else int(match[3])
    is_right = match is not None and match[1] is not None and start == int(match[1]) < stop
    is_right = is_right and (size is None or stop <= size) and length in {None, stop - start}
    if most is not None and (not is_right or stop > start + most):
        raise BadRange
    if not is_right and start:
        raise Unproven(f"it was asked for bytes from {start} and answers {content_range[:80]!r}")
    if not is_right:
        raise OriginError(f"{url} was asked for all of it and answers {content_range[:80]!r}")
    return Version(size, etag, modified), start, stop


def check_version(url: str, expected: Version | None, current: Version, start: int) -> None:
    """Refuse another version.

    After the first byte only another size is refused. Another ETag or date may be another backend's of a load
    balancer: such an answer is unproven, and bytes are compared.
    """
    if expected is not None and not expected.proves(current):
        same_version(url, expected.only_size() if start else expected, current)


def answer_at_end(
    url: str,
    response: urllib3.BaseHTTPResponse,
    start: int,
    expected: Version | None,
    most: int | None,
) -> WebAnswer:
    """Handle 416: correct if the shard ends at `start`, otherwise another version."""
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
    total = int(match[3]) if match is not None and match[3] != "*" else None
    if total is None and expected is not None:
        total = expected.size
    if total != start:
        if most is not None:
            raise BadRange
        if start and match is None:
            raise Unproven("its server refuses to go on there (416)")
        size = "an unknown number of" if total is None else total
        raise DatasetChanged(f"{url} has no byte {start} (416): it has {size} bytes now")
    current = Version(start, strong(response.headers.get("ETag")), response.headers.get("Last-Modified"))
    check_version(url, expected, current, start)
    response.close()
    return WebAnswer(None, current, start, start, start)


def error_facts(response: urllib3.BaseHTTPResponse, session: Session) -> dict[str, str]:
    """Return the elements of the error that object stores put in the body, such as its Code."""
    try:
        body = receive(response, 2048, session)
    except HTTPError:
        body = b""
    return {name.decode(): value.decode() for name, value in _ELEMENT.findall(body)}


def _said(response: urllib3.BaseHTTPResponse, session: Session) -> tuple[str, str]:
    """Return the status with the error code that object stores put in the body, and the code or ""."""
    reason = f"the server answers {response.status} {response.reason or ''}".rstrip()
    code = error_facts(response, session).get("Code", "")
    if not code:
        return reason, ""
    meaning = f": {ENDED[code]}" if code in ENDED else clock_hint(code, response.headers.get("Date"))
    return f"{reason} ({code}){meaning}", code


def translated(url: str, session: Session, exc: HTTPError, action: str) -> OriginError:
    """Return our error for one of urllib3's. An error of ours inside (from connecting) gets the URL."""
    session.check(url)
    for inner in (exc, *exc.args, exc.__cause__):
        if isinstance(inner, OriginError):
            error = type(inner)(f"{url}: {inner}")
            error.is_unreachable = inner.is_unreachable
            return error
    if isinstance(exc, Urllib3Timeout) or any(isinstance(inner, TimeoutError) for inner in exc.args):
        return OriginTimeout(f"{url}: {action} for {session.options.stall_seconds:g} s")
    reason = redact_text(str(exc.args[-1] if exc.args else exc))
    if "Tunnel connection failed: 407" in reason:
        return OriginDenied(f"{url}: its proxy wants another user and password: {reason}")
    if isinstance(exc, SSLError) and "CERTIFICATE" in reason:
        return OriginError(f"{url}: its certificate is refused: {reason}")
    if isinstance(exc, ProtocolError | ProxyError | SSLError):
        return OriginUnavailable(f"{url}: {action}: {reason}")
    return OriginError(f"{url}: {reason}")


class _Target(NamedTuple):
    url: str
    is_own: bool  # whether it gets the headers meant for the listed URL's host alone
    access: Access  # with which it was found


class HttpClient:
    """Requests for the shard at one http:// or https:// URL.

    Args:
        url: may contain user and password.
        credentials: their headers are sent to the URL's own host, not to other hosts after a redirect.
        common_headers: sent to every host; may replace our User-Agent.

    Attributes:
        url: as it may be shown.
        parallel_ranges: whether to request ranges in parallel; False once the server handled them badly.
        has_backends: whether each backend of the server may have an ETag of its own for the same bytes.
    """

    has_backends = True

    def __init__(
        self,
        url: str,
        session: Session,
        credentials: WebCredentials,
        *,
        common_headers: Mapping[str, str] | None = None,
        redirects: int = REDIRECTS,
    ) -> None:
        self.url, self.session = redact(url), session
        self.parallel_ranges = session.options.parts > 1
        self._common, self._redirects = dict(common_headers or {}), redirects
        self._credentials = credentials
        self._answered: _Target | None = None
        self._is_refused = False  # a range, and the whole shard hasn't come yet
        self._refusals = 0  # of ranges after the first one

    def version(self, pools: Pools) -> Version:
        """Request one byte, or all of a shard without ranges, and read only the head of the answer."""
        with contextlib.suppress(NoRanges):
            return self._version(pools, 1)
        return self._version(pools, None)

    def _version(self, pools: Pools, most: int | None) -> Version:
        response = None
        try:
            response = self._request(pools, _range(0, None, most))
            if response.status == 416:
                return answer_at_end(self.url, response, 0, None, most).version
            self._check_status(response, 0, most)
            current = body_range(self.url, response, 0, most)[0]
            if current.size == most == 1:
                raise BadRange  # perhaps the total of the range
            self._learn(response, current, most)
            return current
        except HTTPError as exc:
            raise self.translated(exc, "no answer") from exc
        finally:
            if response is not None:
                response.close()

    def ask(self, pools: Pools, start: int, expected: Version | None, most: int | None = None) -> WebAnswer:
        """Request the bytes from `start` to the end, or `most` of them, and check the head of the answer.

        Raises:
            NoRanges: `most` is given, and the server doesn't answer it properly.
        """
        response = None
        try:
            response = self._request(pools, _range(start, expected, most))
            if response.status == 416:
                return answer_at_end(self.url, response, start, expected, most)
            self._check_status(response, start, most)
            if start and expected is not None and may_be_range(response, (expected.size or 0) - start):
                raise Unproven("its server answers a range with 200")
            current, first, stop = body_range(self.url, response, start, most)
            self._learn(response, current, start or most, expected)
            check_version(self.url, expected, current, start)
            is_part = response.status == 206 and most is not None
            if is_part and start == 0 and stop == most == current.size:
                raise BadRange  # perhaps the total of the range
            if is_part and not current.is_traceable and stop != current.size:
                raise NoRanges  # nothing would prove that the next range is of the same version
            continues = first == start and (expected is None or expected.proves(current))
            is_unproven = start > 0 and expected is not None and not continues
            return WebAnswer(response, current, first, start, stop, is_part, is_unproven)
        except BaseException as exc:
            if response is not None:
                response.close()
            self._is_refused |= isinstance(exc, BadRange)
            self.parallel_ranges &= not isinstance(exc, Unproven)
            if isinstance(exc, HTTPError):
                raise self.translated(exc, "no answer") from exc
            raise

    def continued(self, answer: WebAnswer) -> WebAnswer:
        """Return an answer that may be appended to the bytes before it.

        Raises:
            Unproven: it begins elsewhere, or nothing shows that it is of the same version.
        """
        if answer.is_unproven:
            self.parallel_ranges = False
            if answer.response is not None:
                answer.response.close()
            raise Unproven("its server answers with all of it, or names another version or none")
        return answer

    def read_range(
        self, pools: Pools, start: int, stop: int, version: Version, *, is_proven: bool = False
    ) -> Generator[bytes, None, None]:
        """Yield exactly the bytes of a range, from the host that gave the first answer. Thread-safe.

        Args:
            is_proven: something other than the answer's head proves the version.

        Raises:
            OriginCut: they didn't come, or not as requested; a request over one connection tells why.
            DatasetChanged: they are of another version.
            Unproven: nothing shows that they are of this one.
        """
        request_headers = {"Range": f"bytes={start}-{stop - 1}"}
        if version.etag:
            request_headers["If-Match"] = version.etag
        response, position = None, start
        try:
            response = self._request(pools, request_headers, self._answered)
            if response.status == 412:
                raise Unproven("a range of it has another ETag")
            if response.status in {*WHOLE, 206}:
                learn_ranges(self.url, response.status == 206)
            if response.status != 206:
                kind = RangeIgnored if response.status in WHOLE else OriginCut
                raise kind(f"{self.url}: a range of it is answered with {response.status}")
            check_status(self.url, response, self.session)
            current, _, end = body_range(self.url, response, start, stop - start)
            check_version(self.url, version, current, start)
            if not is_proven and not version.proves(current):
                raise Unproven("a range of it has another ETag, or none")
            if end != stop or current.size != version.size:
                raise NoRanges
            size = ReadSize(self.session.options.chunk_bytes)
            while chunk := receive(response, size.bytes, self.session):
                size.came(len(chunk))
                position += len(chunk)
                if position > stop:
                    break
                yield chunk
            if position != stop:
                raise OriginCut(f"{self.url}: a range ended at byte {position} instead of {stop}")
        except NoRanges:
            raise OriginCut(f"{self.url} was asked for {start}-{stop - 1} and answers other bytes") from None
        except HTTPError as exc:
            raise OriginCut(str(self.translated(exc, "no byte"))) from exc
        finally:
            if response is not None and position != stop:
                response.close()

    def translated(self, exc: HTTPError, action: str) -> OriginError:
        """Return our error for one of urllib3's."""
        return translated(self.url, self.session, exc, action)

    def _learn(
        self,
        response: urllib3.BaseHTTPResponse,
        current: Version,
        range_bytes: int | None,
        expected: Version | None = None,
    ) -> None:
        """Note what an answer shows.

        All of another version, or of an empty shard, shows nothing about ranges.

        Args:
            range_bytes: None or 0 if the whole shard was asked for.
        """
        if not range_bytes:
            if self._is_refused:
                self._is_refused = False
                learn_refusal(self.url)
            return
        learn_version(self.url, current)
        is_same = current.size != 0 and (expected is None or expected.difference(current) is None)
        if response.status == 206 or is_same:
            learn_ranges(self.url, response.status == 206)

    def _check_status(self, response: urllib3.BaseHTTPResponse, start: int, most: int | None) -> None:
        """Raise the error that a status means.

        Raises:
            BadRange: perhaps only the first range was refused, and the whole shard isn't.
            Unproven: the same of a range after it.
        """
        try:
            try:
                check_status(self.url, response, self.session)
            except OriginDenied as exc:
                raise self._credentials.denied(exc) from None
        except OriginError as exc:
            is_sure = response.status in _NO_RANGE
            if exc.have_ended or not (is_sure or response.status in _PERHAPS_NO_RANGE):
                raise
            if start:
                self._refusals += 1
                if is_sure or self._refusals > 1:
                    raise Unproven(f"its server refuses to go on there ({response.status})") from None
            elif most is not None and not abilities(self.url).ranges:
                self._is_refused, self.parallel_ranges = True, False  # the next attempt is without
                if is_sure:
                    raise BadRange from None
            raise

    def _request(
        self, pools: Pools, request_headers: Mapping[str, str], target: _Target | None = None
    ) -> urllib3.BaseHTTPResponse:
        """Send a GET and follow redirects; if it is refused and there are other credentials, repeat it once.

        Args:
            target: where an earlier request was redirected to, to skip the redirects.
        """
        access = self._credentials.access()
        response = self._sent(
            pools, request_headers, access, target if target is not None and target.access is access else None
        )
        if response.status in REFUSALS and self._credentials.renews(access):
            response.close()
            response = self._sent(pools, request_headers, self._credentials.access(), None)
        return response

    def _sent(
        self, pools: Pools, request_headers: Mapping[str, str], access: Access, redirect: _Target | None
    ) -> urllib3.BaseHTTPResponse:
        """Send a GET and follow redirects, within http(s) only. Credentials stay with the URL's host."""
        own_url, own_headers = _without_user(*access)
        target, is_own, _ = redirect or _Target(own_url, True, access)
        headers = self._with_headers(request_headers, own_headers if is_own else {})
        for _ in range(self._redirects + 1):
            self.session.check(self.url)
            self.session.count("origin_requests")
            response = pools.request(target, headers)
            location = response.headers.get("Location")
            if response.status not in _REDIRECTING or not location:
                if redirect is None:
                    self._answered = _Target(target, is_own, access)
                return response
            response.close()
            before, target = target, self._redirected(target, location)
            if not _is_same_host(before, target):
                is_own, headers = False, self._with_headers(request_headers, {})
        if self._redirects == 0:
            raise OriginError(
                f"{self.url} redirects to {redact(target)}, and the command doesn't follow: give curl -L"
            )
        raise OriginError(f"{self.url} redirects more than {self._redirects} times, last to {redact(target)}")

    def _with_headers(
        self, request_headers: Mapping[str, str], user_headers: Mapping[str, str]
    ) -> urllib3.HTTPHeaderDict:
        """Return all headers of a request; the user's replace ours."""
        headers = urllib3.HTTPHeaderDict({"Accept-Encoding": "identity", "User-Agent": "streamload"})
        for group in (self._common, user_headers, request_headers):
            headers.update(group)
        for name, value in headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                shown = name.partition(":")[0]
                raise OriginError(
                    f"{self.url}: the header {shown!r} can't be sent: names have ASCII letters, digits and "
                    "dashes, values are Latin-1 without line breaks"
                )
        return headers

    def _redirected(self, target: str, location: str) -> str:
        """Return the target of a redirect. Refuse other schemes and addresses of metadata services."""
        try:
            # The bytes as they came: http.client gives each of them as one character.
            location = re.sub("[^\0-\x7f]", lambda match: f"%{ord(match[0]):02X}", location)
            target = urljoin(target, location)
            parts = urlsplit(target)
            host, port = parts.hostname, parts.port  # raises if the port is no number
        except ValueError:
            raise OriginError(f"{self.url} redirects to an invalid URL") from None
        if parts.scheme not in {"http", "https"} or not host:
            raise OriginDenied(f"{self.url} redirects to {redact(target)}: only http and https are followed")
        try:  # here too, because a proxy would connect
            refuse_host(host, port or DEFAULT_PORTS[parts.scheme], self.session.named)
        except OriginDenied as exc:
            raise OriginDenied(f"{self.url} redirects elsewhere: {exc}") from None
        return target


def _range(start: int, expected: Version | None, most: int | None) -> dict[str, str]:
    if start == 0 and most is None:
        return {}
    stop = "" if most is None else start + most - 1
    condition = {"If-Range": expected.etag} if expected is not None and expected.etag else {}
    return {"Range": f"bytes={start}-{stop}", **condition}


def _is_same_host(before: str, target: str) -> bool:
    """Return whether credentials for one URL may go to the other: not from https to http."""
    first, other = urlsplit(before), urlsplit(target)
    return first.netloc == other.netloc and (first.scheme == other.scheme or other.scheme == "https")


def _without_user(url: str, headers: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Move a URL's user and password into a header."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    sent = {str(name): str(value) for name, value in headers.items()}
    if user:
        sent["Authorization"] = basic(user)
    return urlunsplit(parts._replace(netloc=host, fragment="")), sent
