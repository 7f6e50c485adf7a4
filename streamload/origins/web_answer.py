"""The head of an answer from a web server: which version of a shard it has, and which bytes (step F)."""

from __future__ import annotations

import re
from typing import NamedTuple

import urllib3
from urllib3.exceptions import HTTPError

from streamload.errors import DatasetChanged, OriginCut, OriginDenied, OriginError, ShardFormatError
from streamload.origins.protocol import ENDED, Session, Version, http_error, same_version, strong
from streamload.origins.sockets import receive
from streamload.urls import compression

_NUMBER = "[0-9]{1,18}"  # enough for the size of any file
_PLAIN = frozenset(("", "identity", "none", "binary", "utf-8", "utf8", "aws-chunked"))
"""Content encodings that leave a body as it is: uploads by SDKs and tools leave them behind."""
WHOLE = frozenset((200, 203))
"""The status of an answer with all of a shard: 203 comes through a proxy that changed headers."""
_ELEMENT = re.compile(rb"<(\w{1,60})>([\w-]{1,60})</")
_CONTENT_RANGE = re.compile(rf"bytes\s+(?:({_NUMBER})-({_NUMBER})|\*)/({_NUMBER}|\*)", re.IGNORECASE)


class NoRanges(Exception):
    """The answer to a request for the first range is unusable; a request for the whole shard may work."""


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
    if response.status in WHOLE:
        if length is not None and length == most:  # perhaps the range, with the wrong status
            raise NoRanges
        if length is not None and length < start:
            raise DatasetChanged(f"{url} has {length} bytes now, of which {start} had been read")
        return Version(length, etag, modified), 0, length
    content_range = response.headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(content_range.strip())
    if match is None or match[1] is None or int(match[1]) != start or int(match[2]) < start:
        if most is not None:
            raise NoRanges
        raise OriginError(f"{url} was asked for bytes from {start} and answers {content_range[:80]!r}")
    stop = int(match[2]) + 1
    size = None if match[3] == "*" else int(match[3])
    if (size is not None and stop > size) or (length is not None and length != stop - start):
        if most is not None:
            raise NoRanges
        raise OriginError(f"{url} contradicts itself: {content_range!r} with a Content-Length of {length}")
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
            raise NoRanges
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
    return f"{reason} ({code})" + (f": {ENDED[code]}" if code in ENDED else ""), code
