"""Odd servers, as raw answers, beside curl: where curl gets the shard so do we, or the row says why not."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import random
import shutil
import subprocess
from collections.abc import Callable
from typing import NamedTuple

import pytest

from streamload.errors import StreamloadError
from streamload.origins.endpoints import abilities
from streamload.origins.origin import OriginOptions, open_origin
from tests.support.raw_server import Asked, RawServer

SHARD = random.Random(1).randbytes(300_007)
SIZE = len(SHARD)
OPTIONS = OriginOptions(attempts=4, backoff_seconds=0.01, stall_seconds=5.0, first_get_bytes=100_000)
ETAG = 'ETag: "e"'


def head(status: str, *lines: str | bytes, end: bytes = b"\r\n") -> bytes:
    texts = (line if isinstance(line, bytes) else line.encode("latin-1") for line in (status, *lines))
    return end.join([*texts, b"", b""])


def whole(
    *lines: str | bytes, status: str = "200 OK", body: bytes = SHARD, has_length: bool = True, **more: bytes
) -> bytes:
    length = [f"Content-Length: {len(body)}"] if has_length else []
    status = status if "/" in status or status.startswith("ICY") else f"HTTP/1.1 {status}"
    return head(status, *lines, *length, **more) + body


def sound(asked: Asked, *lines: str | bytes, etag: str = ETAG, content_range: str | None = None) -> bytes:
    """Return a right answer with more header lines."""
    shown = [line for line in (*lines, etag) if line]
    if asked.span is None or (etag and asked.headers.get("if-range", etag[6:]) != etag[6:]):
        return whole(*shown)
    first, last = asked.span
    last = SIZE - 1 if last is None else min(last, SIZE - 1)
    if first >= SIZE:
        return head("HTTP/1.1 416 No", f"Content-Range: bytes */{SIZE}", "Content-Length: 0")
    content_range = "bytes {first}-{last}/{size}" if content_range is None else content_range
    stated = content_range.format(first=first, last=last, size=SIZE, count=last - first + 1)
    shown += [f"Content-Range: {stated}"] if stated else []
    return whole(*shown, status="206 Part", body=SHARD[first : last + 1])


def chunked(
    *lines: str,
    size: Callable[[int], bytes] = lambda n: b"%x" % n,
    coding: str = "chunked",
    after: bytes = b"\r\n",
    end: bytes = b"0\r\n\r\n",
    version: str = "HTTP/1.1",
    body: bytes = SHARD,
) -> bytes:
    pieces = [body[start : start + 50_000] for start in range(0, len(body), 50_000)]
    framed = (size(len(piece)) + b"\r\n" + piece + after for piece in pieces)
    return b"".join([head(f"{version} 200 OK", *lines, f"Transfer-Encoding: {coding}"), *framed, end])


def refusal(status: int, *lines: str) -> bytes:
    return head(f"HTTP/1.1 {status} No", *lines, "Content-Length: 0")


Answer = Callable[[Asked], bytes]


def moved(location: str | bytes, target: str, *lines: str, status: int = 302) -> Answer:
    """Return the answers of a server that has the shard only at another target."""
    header = b"Location: " + (location if isinstance(location, bytes) else location.encode())

    def answer(asked: Asked) -> bytes:
        if asked.target == target:
            return sound(asked)
        if asked.target != "/a.tar":
            return refusal(410)
        return head(
            f"HTTP/1.1 {status} Moved", header.replace(b"HOST", asked.headers["host"].encode()), *lines
        )

    return answer


class Row(NamedTuple):
    """A kind of server, what we make of it, and why that is less than curl's."""

    kind: str
    answer: Answer
    ours: str = "the shard"
    why: str = ""


def refuses(status: int, ours: str = "the shard", why: str = "") -> Row:
    return Row(f"ranges get {status}", lambda a: refusal(status) if a.span else sound(a), ours, why)


def states(content_range: str) -> Row:
    return Row(f"Content-Range: {content_range!r}", lambda a: sound(a, content_range=content_range))


def later(kind: str, answer: Callable[[Asked], bytes], ours: str = "the shard", why: str = "") -> Row:
    """Return a row of a server whose first range is right, and no later one."""
    return Row(kind, lambda a: answer(a) if a.span and a.span[0] else sound(a), ours, why)


HEADS = [
    Row("150 headers", lambda a: sound(a, *(f"X-Debug-{i}: v" for i in range(150)))),
    Row("4,000 headers", lambda a: sound(a, *(f"X-Debug-{i}: v" for i in range(4_000)))),
    Row("150 headers in 103", lambda a: head("HTTP/1.1 103 E", *["Link: <a>"] * 150) + sound(a)),
    Row("a header of 99 KB", lambda a: sound(a, "X-A: " + "v" * 99_000)),
    Row(
        "headers of 400 KB",
        lambda a: sound(a, *["X-A: " + "v" * 9_990] * 40),
        "OriginUnavailable",
        "no server has them",
    ),
    Row("100, bare", lambda a: b"HTTP/1.1 100 Continue\r\n\r\n" + sound(a)),
    Row(
        "100 without a reason, with a length", lambda a: head("HTTP/1.1 100", "Content-Length: 0") + sound(a)
    ),
    Row("101", lambda a: head("HTTP/1.1 101 S", "Upgrade: x") + sound(a), "OriginError"),
    Row("a folded header", lambda a: sound(a, "X-A: v\r\n  w\r\n\tx")),
    Row("a folded Content-Range", lambda a: sound(a, content_range="bytes\r\n {first}-{last}/{size}")),
    Row("a line that is no header", lambda a: sound(a, "nonsense")),
    Row("a blank before the colon", lambda a: sound(a, "X-A : v")),
    Row(
        "a blank before the colon of the length",
        lambda _: whole(f"Content-Length : {SIZE}", has_length=False),
    ),
    Row("a header without a name", lambda a: sound(a, ": v")),
    Row("UTF-8 with a C1 control in a value", lambda a: sound(a, "X-Amz-Meta-Place: \u00c5land".encode())),
    Row("Latin-1 in a value and a name", lambda a: sound(a, "X-\u00e9: \u00e9")),
    Row("controls in a value", lambda a: sound(a, "X-A: a\x0bb\x0cc\x1cd")),
    Row("a carriage return in a value", lambda a: sound(a, "X-A: a\rb")),
    Row("NUL in a value", lambda a: sound(a, "X-A: a\0b")),
    Row("names in odd case", lambda a: sound(a, etag='eTAG: "e"').replace(b"Content-", b"cONTENT-")),
    Row("headers twice", lambda a: sound(a, ETAG, *["Content-Encoding: identity"] * 2)),
    Row("line feeds alone", lambda _: whole(end=b"\n")),
    Row("no reason phrase", lambda _: whole(status="200")),
    Row("two blanks before the status", lambda _: whole(status="HTTP/1.1  200 OK")),
    Row("a reason that isn't ASCII", lambda _: whole(status="200 \u00c5\x85")),
    Row("http in lower case", lambda _: whole(status="http/1.1 200 OK")),
    Row("HTTP/2 in the status line", lambda _: whole(status="HTTP/2 200")),
    Row("HTTP/0.9", lambda _: SHARD, "OriginUnavailable"),
    Row("ICY", lambda _: whole(status="ICY 200 OK"), "OriginUnavailable"),
    Row("no answer", lambda _: b"", "OriginUnavailable"),
    Row("no headers", lambda _: whole(has_length=False)),
    Row("HTTP/1.0", lambda a: sound(a).replace(b"HTTP/1.1", b"HTTP/1.0")),
    Row("HTTP/1.0 without a length", lambda _: whole(status="HTTP/1.0 200 OK", has_length=False)),
    Row(
        "HTTP/1.0, keep-alive, no length",
        lambda _: whole("Connection: keep-alive", status="HTTP/1.0 200 OK", has_length=False),
    ),
    Row("Upgrade: h2c", lambda a: sound(a, "Upgrade: h2,h2c", "Connection: Upgrade")),
]
TWO_LENGTHS = "which of the two frames the body isn't known"
LENGTHS = [
    Row("the length twice", lambda _: whole(f"Content-Length: {SIZE}")),
    Row("the length as a list", lambda _: whole(f"Content-Length: {SIZE}, {SIZE}", has_length=False)),
    Row("two lengths", lambda _: whole("Content-Length: 5"), "OriginError", TWO_LENGTHS),
    Row(
        "two lengths, the right one first",
        lambda _: whole(f"Content-Length: {SIZE}", "Content-Length: 5", has_length=False),
        "OriginError",
        TWO_LENGTHS,
    ),
    Row(
        "a length with commas", lambda _: whole(f"Content-Length: {SIZE:,}", has_length=False), "OriginError"
    ),
    *(
        Row(
            f"Content-Length: {text}", lambda _, text=text: whole(f"Content-Length: {text}", has_length=False)
        )
        for text in ("", "-1", f"+{SIZE}", f"000{SIZE}", "unknown", f"{SIZE} bytes", f"\t{SIZE} \t")
    ),
    Row(
        "a length that is too large",
        lambda _: whole(f"Content-Length: {SIZE + 10}", has_length=False),
        "OriginCut",
    ),
    Row(
        "a length that is too small",
        lambda _: whole(f"Content-Length: {SIZE - 7}", has_length=False),
        "a part",
    ),
    Row("bytes after the body", lambda a: sound(a) + b"garbage"),
    Row("chunks", lambda _: chunked()),
    Row("chunks and the length", lambda _: chunked(f"Content-Length: {SIZE}")),
    Row("chunks and a smaller length", lambda _: chunked("Content-Length: 5")),
    Row("chunks and a larger length", lambda _: chunked("Content-Length: 9999999", ETAG)),
    Row("chunks of HTTP/1.0", lambda _: chunked(version="HTTP/1.0")),
    Row("chunked twice", lambda _: chunked("Transfer-Encoding: chunked")),
    Row("identity, Chunked", lambda _: chunked(coding="identity, Chunked")),
    Row("identity", lambda _: whole("Transfer-Encoding: identity")),
    Row("chunked, and it isn't", lambda _: whole("Transfer-Encoding: chunked"), "OriginCut"),
    Row(
        "gzip, chunked",
        lambda _: chunked(coding="gzip, chunked", body=gzip.compress(SHARD)),
        "ShardFormatError",
        "nothing asks for a coding (TE), and none does it but by mistake",
    ),
    Row("chunks with extensions", lambda _: chunked(size=lambda n: b"%x;a=b" % n)),
    Row("chunks with empty extensions", lambda _: chunked(size=lambda n: b"%X;" % n)),
    Row("sizes with leading zeros", lambda _: chunked(size=lambda n: b"0000%x" % n)),
    Row("sizes with blanks", lambda _: chunked(size=lambda n: b"%x   " % n)),
    Row("chunks ended by line feeds", lambda _: chunked(after=b"\n")),
    Row("trailers", lambda _: chunked(end=b"0\r\nX-A: b\r\nContent-Length: 3\r\n\r\n")),
    Row("no last chunk", lambda _: chunked(end=b""), "OriginCut"),
    Row("sizes that are no numbers", lambda _: chunked(size=lambda _: b"zz"), "OriginCut"),
    Row("negative sizes", lambda _: chunked(size=lambda _: b"-5"), "OriginCut"),
]
FLAKY = "that is how a busy or broken server answers, too: it is retried as such"
RANGES = [
    *(refuses(status) for status in (400, 403, 405, 406, 416, 500, 501, 505)),
    refuses(404, "OriginNotFound", "404 is taken at its word"),
    refuses(502, "OriginUnavailable", FLAKY),
    refuses(503, "OriginUnavailable", FLAKY),
    Row("ranges get no answer", lambda a: b"" if a.span else sound(a), "OriginUnavailable", FLAKY),
    Row("all is refused, 400", lambda _: refusal(400), "OriginError"),
    Row("all is refused, 403", lambda _: refusal(403), "OriginDenied"),
    Row("all is refused, 416", lambda _: refusal(416), "DatasetChanged"),
    later("later ranges get 400", lambda _: refusal(400)),
    later("later ranges get 403", lambda _: refusal(403)),
    later("later ranges get 416", lambda _: refusal(416)),
    later("later ranges get another one", lambda a: sound(a, content_range="bytes 0-9/300007")),
    later("later ranges get no answer", lambda _: b"", "OriginUnavailable", FLAKY),
    Row("If-Range gets 400", lambda a: refusal(400) if "if-range" in a.headers else sound(a)),
    Row("open ranges get 400", lambda a: refusal(400) if a.span and a.span[1] is None else sound(a)),
    Row("206 unasked", lambda _: whole(status="206 Part")),
    Row(
        "206 with all of it", lambda _: whole(ETAG, f"Content-Range: bytes 0-{SIZE - 1}/*", status="206 Part")
    ),
    Row("200 with a range", lambda a: sound(a).replace(b"206 Part", b"200 OK")),
    Row("200 and a Content-Range of all of it", lambda _: whole(f"Content-Range: bytes 0-{SIZE - 1}/{SIZE}")),
    *map(
        states,
        (
            "bytes {first}-{last}/{count}",
            "bytes {first}-{last}/*",
            "bytes {first}-{last}/0",
            "bytes {first}-{last}",
            "bytes {first}-{count}/{size}",
            "bytes={first}-{last}/{size}",
            "bytes: {first}-{last}/{size}",
            "bytes {first} - {last} / {size}",
            "Bytes  {first}-{last}/{size}",
            "items {first}-{last}/{size}",
            "{first}-{last}/{size}",
            "nonsense",
            "",
        ),
    ),
    Row(
        "Content-Range twice",
        lambda a: sound(a, content_range="bytes 0-1/2\r\nContent-Range: bytes {first}-{last}/{size}"),
    ),
    Row(
        "multipart/byteranges",
        lambda a: (
            whole(
                ETAG,
                "Content-Type: multipart/byteranges; boundary=x",
                status="206 Part",
                body=b"--x\r\n\r\n" + SHARD[:9] + b"\r\n--x--",
            )
            if a.span
            else sound(a)
        ),
    ),
    Row(
        "ranges of 40 KB at most",
        lambda a: (
            sound(
                a._replace(
                    headers=a.headers
                    | {"range": f"bytes={a.span[0]}-{min(a.span[0] + 39_999, a.span[1] or SIZE)}"}
                )
            )
            if a.span
            else sound(a)
        ),
    ),
    Row("Accept-Ranges: none, and there are", lambda a: sound(a, "Accept-Ranges: none")),
    Row("Accept-Ranges: none", lambda _: whole(ETAG, "Accept-Ranges: none")),
]
VERSIONS = [
    *(
        Row(f"{text or 'no ETag'}", lambda a, text=text: sound(a, etag=text))
        for text in ("", 'ETag: W/"e"', 'ETag: w/"e"', "ETag: e", 'ETag: ""')
    ),
    Row("another ETag each time", lambda a: sound(a, etag=f'ETag: "{a.before}"')),
    Row("another date each time", lambda a: sound(a, f"Last-Modified: {a.before}", etag="")),
    *(
        Row(f"Last-Modified: {text}", lambda a, text=text: sound(a, f"Last-Modified: {text}", etag=""))
        for text in ("0", "-1", "yesterday, 12 o'clock", "")
    ),
    Row(
        "gzip unasked",
        lambda _: whole("Content-Encoding: gzip", body=gzip.compress(SHARD)),
        "ShardFormatError",
    ),
    Row(
        "gzip, and it isn't",
        lambda a: sound(a, "Content-Encoding: gzip"),
        "ShardFormatError",
        "the bytes may be the tar's or a gzip's by the request",
    ),
]
REDIRECTS = [
    *(
        Row(f"to {location}", moved(location, target))
        for location, target in [
            ("/b.tar", "/b.tar"),
            ("b.tar", "/b.tar"),
            ("./x/../b.tar", "/b.tar"),
            ("?x=1", "/a.tar?x=1"),
            ("/b.tar#fragment", "/b.tar"),
            ("/b c.tar", "/b%20c.tar"),
            ("   /b.tar  ", "/b.tar"),
            ("//HOST/b.tar", "/b.tar"),
            ("HTTP://HOST/b.tar", "/b.tar"),
            ("http://user:password@HOST/b.tar", "/b.tar"),
            ("http://HOST?x=1", "/?x=1"),
        ]
    ),
    Row(
        "to a path in UTF-8",
        lambda a: moved("/\u00e9.tar".encode(), a.target if a.target.lower() == "/%c3%a9.tar" else "-")(a),
    ),
    Row(
        "to a path in Latin-1",
        lambda a: moved("/\u00e9.tar".encode("latin-1"), a.target if a.target.lower() == "/%e9.tar" else "-")(
            a
        ),
    ),
    Row("to two places", moved("/b.tar", "/b.tar", "Location: /c.tar")),
    Row("with a body without a length", moved("/b.tar", "/b.tar", "X-A: b\r\n\r\n<html>moved</html>")),
    Row("300", moved("/b.tar", "/b.tar", status=300)),
    Row(
        "304",
        moved("/b.tar", "/b.tar", status=304),
        "OriginError",
        "it answers a condition, and there was none",
    ),
    Row(
        "305",
        moved("/b.tar", "/b.tar", status=305),
        "OriginError",
        "it names a proxy to use, which is deprecated",
    ),
    Row("without a place", moved("", "-"), "OriginError"),
    Row("to ftp", moved("ftp://127.0.0.1:1/b.tar", "-"), "OriginDenied"),
    Row("to itself", moved("/a.tar", "-"), "OriginError"),
]
STATUSES = [
    *(
        Row(str(status), lambda _, status=status: refusal(status), "OriginError")
        for status in (204, 205, 299)
    ),
    Row(
        "201 with all of it",
        lambda _: whole(status="201 Created"),
        "OriginError",
        "it answers a request that creates",
    ),
    Row(
        "401 with a challenge",
        lambda _: refusal(401, 'WWW-Authenticate: Basic realm="x"', "WWW-Authenticate: NTLM"),
        "OriginDenied",
    ),
    Row(
        "429 with a page",
        lambda _: whole("Retry-After: soon", status="429 Slow", body=b"<html>"),
        "OriginUnavailable",
    ),
    Row(
        "503 with a page and a date, once",
        lambda a: (
            sound(a)
            if a.before % 2
            else whole("Retry-After: Fri, 31 Dec 1999 23:59:59 GMT", status="503 No", body=b"<html>")
        ),
    ),
    Row("999", lambda _: refusal(999), "OriginUnavailable"),
    Row("20", lambda _: whole(status="20 OK"), "OriginUnavailable"),
]
EMPTY = [
    Row("200", lambda _: whole(body=b"")),
    Row("416", lambda a: refusal(416, "Content-Range: bytes */0") if a.span else whole(body=b"")),
    Row("416 without a size", lambda a: refusal(416) if a.span else whole(body=b"")),
    Row(
        "bytes 0--1/0",
        lambda a: (
            whole("Content-Range: bytes 0--1/0", status="206 Part", body=b"") if a.span else whole(body=b"")
        ),
    ),
    Row(
        "no length",
        lambda _: whole(body=b"", has_length=False),
        "OriginCut",
        "a connection that broke before the first byte looks like this",
    ),
]


def verdict(data: bytes, expected: bytes) -> str:
    return "the shard" if data == expected else "a part" if expected.startswith(data) else "other bytes"


def by_curl(url: str, expected: bytes) -> str:
    command = ["curl", "-q", "-sfL", "--noproxy", "*", url]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    return f"error {done.returncode}" if done.returncode else verdict(done.stdout, expected)


def by_us(url: str, expected: bytes) -> str:
    try:
        with contextlib.closing(open_origin(url, options=OPTIONS).open()) as stream:
            return verdict(b"".join(stream.chunks()), expected)
    except StreamloadError as exc:
        return type(exc).__name__


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl isn't installed")
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        *((row, SHARD) for row in (*HEADS, *LENGTHS, *RANGES, *VERSIONS, *REDIRECTS, *STATUSES)),
        *((row, b"") for row in EMPTY),
    ],
    ids=lambda value: value.kind if isinstance(value, Row) else f"{len(value)} bytes",
)
def test_where_curl_gets_the_shard_we_do_or_the_row_says_why_not(row: Row, expected: bytes) -> None:
    with RawServer(row.answer) as server:
        curl = by_curl(f"{server.url}/a.tar", expected)
    with RawServer(row.answer) as server:
        ours = by_us(f"{server.url}/a.tar", expected)
        assert len(server.log) <= 11
    assert ours == row.ours
    assert curl != "the shard" or ours == curl or row.why


def test_a_server_by_an_ipv6_address_is_read() -> None:
    with RawServer(sound, address="::1") as server:
        assert by_us(f"{server.url}/a.tar", SHARD) == "the shard"


def test_a_connection_that_closes_between_two_requests_is_opened_again() -> None:
    with RawServer(lambda a: sound(a, "Connection: keep-alive"), keeps=False) as server:
        assert by_us(f"{server.url}/a.tar", SHARD) == "the shard"
        spans = [asked.span for asked in server.log if asked.span is not None]
        assert len(spans) == len(server.log) >= 2
        ends = [-1, *(end for _, end in spans)]  # a slow machine asks for a second piece of this length
        assert [start for start, _ in spans] == [end + 1 for end in ends[:-1] if end is not None]
        assert ends[-1] is None


@pytest.mark.parametrize("status", [400, 403, 416, 500])
def test_a_server_that_refuses_ranges_is_soon_asked_for_none(status: int) -> None:
    with RawServer(lambda a: refusal(status) if a.span else sound(a)) as server:
        for number in range(4):
            assert by_us(f"{server.url}/{number}.tar", SHARD) == "the shard"
        assert [bool(asked.span) for asked in server.log] == [True, False, True, False, False, False]
        assert abilities(server.url).ranges is False


@pytest.mark.parametrize(("status", "requests"), [(400, 2), (401, 1), (403, 3), (404, 3), (501, 2)])
def test_a_real_refusal_takes_few_requests(status: int, requests: int) -> None:
    with RawServer(lambda _: refusal(status)) as server:
        assert by_us(f"{server.url}/a.tar", SHARD).startswith("Origin")
        assert len(server.log) == requests
        assert abilities(server.url).refusals == 0


@pytest.mark.parametrize("row", [refuses(400), refuses(416), states("bytes {first}-{last}/{count}")])
def test_version_and_samples_of_a_server_with_bad_ranges_are_right(row: Row) -> None:
    with (
        RawServer(row.answer) as server,
        contextlib.closing(open_origin(f"{server.url}/a.tar", options=OPTIONS)) as origin,
    ):
        version = origin.version()
        assert version.size == SIZE
        assert origin.read(200_000, 200_100, version) == SHARD[200_000:200_100]


def test_a_parallel_range_that_ends_early_by_its_own_framing_is_read_again() -> None:
    spoilt = list[int]()

    def answer(asked: Asked) -> bytes:
        first, last = asked.span or (0, None)
        if first < 100_000 or last is None or spoilt:
            return sound(asked)
        spoilt.append(first)
        body = SHARD[first:last]
        lines = (ETAG, f"Content-Range: bytes {first}-{last}/{SIZE}", "Transfer-Encoding: chunked")
        framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        return whole(*lines, status="206 Part", body=framed, has_length=False)

    side_by_side = dataclasses.replace(
        OPTIONS, quick_bytes_per_second=float("inf"), first_part_bytes=50_000, parts=2
    )
    with (
        RawServer(answer) as server,
        contextlib.closing(open_origin(f"{server.url}/a.tar", options=side_by_side).open()) as stream,
    ):
        assert b"".join(stream.chunks()) == SHARD
        assert len(spoilt) == 1
