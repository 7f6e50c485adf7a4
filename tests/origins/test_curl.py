"""Answers of web servers, and what curl and we make of each: the table in docs/failure-model.md."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from streamload.errors import StreamloadError
from streamload.origins.origin import OriginOptions, open_origin
from streamload.testing.server import Fault, ShardServer

SHARD = random.Random(1).randbytes(300_007)
OTHER = random.Random(2).randbytes(300_007)
CUT = Fault(first=1, cut_after_bytes=100_000)
BACKEND = Fault(headers={"ETag": '"b"', "Last-Modified": "Mon, 05 Jan 2026 00:00:00 GMT"})
PAGE = b"<html>please wait</html>"
OPTIONS = OriginOptions(attempts=4, backoff_seconds=0.01, stall_seconds=2.0)
DOCS = Path(__file__).parents[2] / "docs" / "failure-model.md"


class Row(NamedTuple):
    """An answer, what curl makes of it, and what we do."""

    answer: str
    faults: tuple[Fault, ...]
    curl: str
    ours: str


def always(answer: str, curl: str, ours: str, **fault: object) -> Row:
    return Row(answer, (Fault(**fault),), curl, ours)  # type: ignore[arg-type]


def once(answer: str, curl: str, ours: str, **fault: object) -> Row:
    return Row(f"{answer}, once", (Fault(first=1, **fault),), curl, ours)  # type: ignore[arg-type]


def encoded(name: str) -> dict[str, str]:
    return {"Content-Encoding": name}


ROWS = [
    always("102 and 103 before 200", "the shard", "the shard", informational=(102, 103)),
    *(
        always(f"`Content-Encoding: {name}`", "the shard", "the shard", headers=encoded(name))
        for name in ("identity", "none", "binary", "utf-8", "aws-chunked")
    ),
    always("`Content-Encoding: gzip`", "the body", "`ShardFormatError`", headers=encoded("gzip")),
    always("200 to a range", "the shard", "the shard", ignore_range=True),
    always("200, chunked", "the shard", "the shard", framing="chunked"),
    always("200, until the connection closes", "the shard", "the shard", framing="close"),
    always("200 with a page", "the body", "the body, which is no tar", body=PAGE),
    always("202 with a page", "the body", "`OriginUnavailable` after 4 requests", status=202, body=PAGE),
    always("203", "the shard", "the shard", status=203, body=SHARD),
    always("204", "nothing", "`OriginError`", status=204, framing="close"),
    *(
        once(
            f"{status} to another path",
            "the shard",
            "the shard",
            status=status,
            headers={"Location": "b.tar"},
        )
        for status in (301, 302, 303, 307, 308)
    ),
    always("300 without `Location`", "the body", "`OriginError`", status=300, body=PAGE),
    always("304", "nothing", "`OriginError`", status=304, framing="close"),
    always("a redirect to itself", "error 47", "`OriginError`", status=302, headers={"Location": "a.tar"}),
    always(
        "a redirect to a file", "error 1", "`OriginDenied`", status=302, headers={"Location": "file:///a"}
    ),
    *(always(str(status), "error 22", "`OriginError`", status=status) for status in (400, 451, 501, 505)),
    always(
        "400 with a store's code for an expired token",
        "error 22",
        "`OriginDenied`",
        status=400,
        body=b"<Error><Code>ExpiredToken</Code></Error>",
    ),
    *(always(str(status), "error 22", "`OriginDenied`", status=status) for status in (401, 402, 407)),
    always("403", "error 22", "`OriginDenied` after 3 requests", status=403),
    always("404", "error 22", "`OriginNotFound` after 3 requests", status=404),
    always(
        "404 with a store's code",
        "error 22",
        "`OriginNotFound`",
        status=404,
        body=b"<Error><Code>NoSuchKey</Code></Error>",
    ),
    always("410", "error 22", "`OriginNotFound`", status=410),
    always("412", "error 22", "`DatasetChanged`", status=412),
    always("408", "error 22", "`OriginTimeout` after 4 requests", status=408),
    *(
        always(str(status), "error 22", "`OriginUnavailable` after 4 requests", status=status)
        for status in (409, 421, 425, 429, 500, 502, 503, 504)
    ),
    *(
        once(str(status), "error 22", "the shard", status=status)
        for status in (403, 404, 408, 409, 421, 429, 500, 502, 503, 504)
    ),
    once("a body cut short of its length", "a part, error 18", "the shard", cut_after_bytes=100_000),
    once(
        "a chunked body cut short",
        "a part, error 18",
        "the shard",
        cut_after_bytes=100_000,
        framing="chunked",
    ),
    once("a body cut by a reset", "a part, error 56", "the shard", cut_after_bytes=100_000, reset=True),
    once("a head without a body", "error 18", "the shard", cut_after_bytes=0),
    Row(
        "a cut body, then a server without ranges",
        (CUT, Fault(ignore_range=True)),
        "a part, error 18",
        "the shard",
    ),
    Row(
        "a cut body, then a backend with another ETag and date",
        (CUT, BACKEND),
        "a part, error 18",
        "the shard",
    ),
    Row(
        "a cut body, then other bytes of the same size",
        (CUT, Fault(body=OTHER)),
        "a part, error 18",
        "`DatasetChanged`",
    ),
    Row(
        "a cut body, then another size", (CUT, Fault(body=OTHER[1:])), "a part, error 18", "`DatasetChanged`"
    ),
]


@pytest.fixture
def server(tmp_path: Path) -> ShardServer:  # type: ignore[misc]
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).write_bytes(SHARD)
    with ShardServer(tmp_path) as server:
        yield server  # type: ignore[misc]


def by_curl(url: str, page: bytes) -> str:
    """What ``curl -fL`` makes of an answer."""
    command = ["curl", "-q", "-sfL", "--noproxy", "*", url]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    error = f"error {done.returncode}" if done.returncode else ""
    kinds = {SHARD: "the shard", page: "the body", b"": "" if error else "nothing"}
    kind = kinds.get(done.stdout, "a part" if SHARD.startswith(done.stdout) else "other bytes")
    return ", ".join(filter(None, (kind, error)))


def by_us(url: str, page: bytes, server: ShardServer) -> str:
    """What an origin makes of it; the requests are counted from here on."""
    before = len(server.requests("a.tar"))
    try:
        with contextlib.closing(open_origin(url, options=OPTIONS).open()) as stream:
            data = b"".join(stream.chunks())
    except StreamloadError as exc:
        requests = len(server.requests("a.tar")) - before
        after = f" after {requests} requests" if "given up after" in str(exc) else ""
        return f"`{type(exc).__name__}`{after}"
    return "the shard" if data == SHARD else "the body, which is no tar" if data == page else "other bytes"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl isn't installed")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.answer)
def test_an_answer_means_to_us_and_to_curl_what_the_table_says(row: Row, server: ShardServer) -> None:
    url = f"{server.url}/a.tar"
    page = SHARD if "gzip" in row.answer else PAGE
    server.misbehave("a.tar", *row.faults)
    curl = by_curl(url, page)
    server.misbehave("a.tar", *row.faults)
    assert (curl, by_us(url, page, server)) == (row.curl, row.ours)


def test_the_table_in_the_docs_has_these_rows() -> None:
    lines = DOCS.read_text().splitlines()
    start = lines.index("| answer | `curl -fL` | streamload |") + 2
    stop = lines.index("", start)
    assert lines[start:stop] == [f"| {row.answer} | {row.curl} | {row.ours} |" for row in ROWS]
