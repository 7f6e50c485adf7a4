"""HTTP origins against a server that misbehaves in each way that real ones do."""

from __future__ import annotations

import base64
import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamload.errors import (
    DatasetChanged,
    OriginCut,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginStopped,
    OriginTimeout,
    OriginUnavailable,
    ShardFormatError,
)
from streamload.origins import sockets
from streamload.origins.origin import OriginOptions, open_origin, serves_ranges
from streamload.origins.protocol import ReadSize
from streamload.testing.faults import EMPTY_PAGE, Fault
from streamload.testing.server import ShardServer
from tests.support.tally import Tally

BODY = random.Random(1).randbytes(1_000_003)
OTHER = random.Random(2).randbytes(1_000_003)
BIG = 1 << 30
QUICK = OriginOptions(
    attempts=4, backoff_seconds=0.01, stall_seconds=0.4, connect_seconds=2.0, chunk_bytes=64 * 1024
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    (tmp_path / "a.tar").write_bytes(BODY)
    (tmp_path / "b.tar").write_bytes(OTHER)
    with ShardServer(tmp_path) as server:
        yield server


def read(
    server: ShardServer, path: str = "a.tar", start: int = 0, tally: Tally | None = None, **options: Any
) -> bytes:
    url = path if "://" in path else f"{server.url}/{path}"
    given = OriginOptions(**{**{name: getattr(QUICK, name) for name in QUICK.__slots__}, **options})
    stream = open_origin(url, options=given, counters=tally).open(start)
    try:
        return b"".join(stream.chunks())
    finally:
        stream.close()


# --- mended by another attempt, each byte asked for once ---


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(first=1, cut_after_bytes=300_000)],
        [Fault(first=1, cut_after_bytes=300_000, reset=True)],
        [Fault(first=1, cut_after_bytes=300_000, framing="chunked")],
        [Fault(first=1, cut_after_bytes=300_000, framing="close")],
        [Fault(first=1, stall_after_bytes=300_000)],
        [Fault(first=1, cut_after_bytes=300_000), Fault(first=1, cut_after_bytes=100_000, reset=True)],
        [Fault(first=1, cut_after_bytes=100_000)] * 8,  # more than there are attempts, but with progress
    ],
    ids=["cut", "reset", "cut chunked", "cut by closing", "stalled", "twice", "eight times"],
)
def test_a_broken_body_is_resumed_at_its_byte(server: ShardServer, faults: list[Fault]) -> None:
    server.misbehave("a.tar", *faults)
    tally = Tally()
    assert read(server, tally=tally) == BODY
    assert tally["origin_bytes"] == len(BODY)
    sent = sorted(server.ranges("a.tar"))
    assert max(stop for _, stop in sent) == len(BODY)
    if not any(fault.reset for fault in faults):  # a reset takes back what was under way
        assert [start for start, _ in sent] == [0, *(stop for _, stop in sent[:-1])]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(first=2, status=503, headers={"Retry-After": "0"}),
        Fault(first=2, status=429),
        Fault(first=2, status=500),
        Fault(first=2, status=502),
        Fault(first=2, status=504),
        Fault(first=2, status=404),
        Fault(first=2, status=403),
        Fault(first=2, status=409),
        Fault(first=2, status=421),
        Fault(first=2, status=202),
        Fault(first=1, silent=True),
        Fault(first=2, cut_after_bytes=0, reset=True),
    ],
    ids=["503", "429", "500", "502", "504", "404", "403", "409", "421", "202", "silent", "reset"],
)
def test_a_request_in_vain_is_sent_again(server: ShardServer, fault: Fault) -> None:
    server.misbehave("a.tar", fault)
    tally = Tally()
    assert read(server, tally=tally) == BODY
    assert tally["origin_retries"] == fault.first
    assert tally["origin_requests"] == len(server.log) == 1 + (fault.first or 0)


def test_a_refusal_in_the_middle_of_a_shard_is_asked_about_again(server: ShardServer) -> None:
    cut = Fault(first=1, cut_after_bytes=300_000)
    server.misbehave("a.tar", cut, Fault(first=2, status=404), cut, Fault(first=2, status=403))
    assert read(server, attempts=9) == BODY


def test_after_421_another_connection_is_used(server: ShardServer) -> None:
    with contextlib.closing(open_origin(f"{server.url}/a.tar", options=QUICK)) as origin:
        version = origin.version()
        origin.read(0, 10, version)
        server.misbehave("a.tar", Fault(first=1, status=421))
        assert origin.read(10, 20, version) == BODY[10:20]
    peers = [request.peer for request in server.log]
    assert peers[-1] not in peers[:-1]


def test_a_slow_trickle_is_a_stall(server: ShardServer) -> None:
    server.misbehave("a.tar", Fault(first=1, bytes_per_second=1000))
    assert read(server, slow_seconds=0.5, slow_bytes=100_000) == BODY
    assert len(server.log) == 2


def test_retry_after_is_obeyed(server: ShardServer) -> None:
    server.misbehave("a.tar", Fault(first=1, status=503, headers={"Retry-After": "1"}))
    assert read(server) == BODY
    first, second = server.log
    assert second.seconds - first.seconds >= 1.0


def test_retry_after_is_obeyed_only_so_far(server: ShardServer) -> None:
    server.misbehave("a.tar", Fault(first=1, status=503, headers={"Retry-After": "86400"}))
    assert read(server, retry_after_limit_seconds=0.1) == BODY


@pytest.mark.parametrize(
    "text", ["\xb2", "9" * 5000, "9" * 30, "-5", "", "Mon, 01 Jan 0001 00:00:00 -0000", "Mon, 99 Jan 2026"]
)
def test_a_retry_after_that_says_nothing_counts_as_none(server: ShardServer, text: str) -> None:
    server.misbehave("a.tar", Fault(first=1, status=503, headers={"Retry-After": text}))
    assert read(server) == BODY


@pytest.mark.parametrize("length", ["\xb2", "9" * 5000, "9" * 30, "-5"])
def test_a_length_that_is_no_number_counts_as_none(server: ShardServer, length: str) -> None:
    server.misbehave("a.tar", Fault(framing="close", headers={"Content-Length": length}))
    assert read(server) == BODY


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_a_body_without_a_length_is_read_to_its_end(server: ShardServer, framing: Any) -> None:
    server.misbehave("a.tar", Fault(framing=framing))
    assert read(server) == BODY
    assert sum(request.sent for request in server.log) == len(BODY)


def test_a_server_that_ignores_ranges_sends_what_was_read_again(server: ShardServer) -> None:
    tally = Tally()
    server.misbehave("a.tar", Fault(first=1, cut_after_bytes=300_000), Fault(ignore_range=True))
    assert read(server, tally=tally) == BODY
    assert tally["origin_bytes"] == len(BODY) + 300_000


def test_an_empty_file_has_no_bytes(server: ShardServer) -> None:
    server.misbehave("a.tar", Fault(body=b""))
    assert read(server) == b""


def test_a_page_instead_of_a_shard_is_handed_on_as_it_is(server: ShardServer) -> None:
    server.misbehave("a.tar", Fault(body=EMPTY_PAGE, headers={"Content-Type": "text/html"}))
    assert read(server) == EMPTY_PAGE


# --- errors, each of its type, and none of them repeated in vain ---


@pytest.mark.parametrize(
    ("fault", "error", "requests"),
    [
        (Fault(status=404), OriginNotFound, 3),
        (Fault(status=403), OriginDenied, 3),
        (Fault(status=404, body=b"<Error><Code>NoSuchKey</Code></Error>"), OriginNotFound, 1),
        (Fault(status=410), OriginNotFound, 1),
        (Fault(status=403, body=b"<Error><Code>ExpiredToken</Code></Error>"), OriginDenied, 1),
        (Fault(status=401), OriginDenied, 1),
        (Fault(status=400), OriginError, 2),  # without a range, too
        (Fault(status=501), OriginError, 2),
        (Fault(status=204), OriginError, 1),
        (Fault(status=409), OriginUnavailable, 4),
        (Fault(status=421), OriginUnavailable, 4),
        (Fault(status=503), OriginUnavailable, 4),
        (Fault(silent=True), OriginTimeout, 4),
        (Fault(stall_after_bytes=0), OriginTimeout, 4),
        (Fault(cut_after_bytes=100), OriginCut, 4),
        (Fault(cut_after_bytes=100, framing="chunked"), OriginCut, 4),
        (Fault(headers={"Content-Encoding": "gzip"}), ShardFormatError, 1),
        (Fault(status=302, headers={"Location": "file:///etc/passwd"}), OriginDenied, 1),
        (Fault(status=302, headers={"Location": "a.tar"}), OriginError, 11),
        (Fault(status=302, headers={"Location": "http://169.254.169.254/latest"}), OriginDenied, 1),
    ],
)
def test_a_refusal_has_its_type(
    server: ShardServer, fault: Fault, error: type[OriginError], requests: int
) -> None:
    server.misbehave("a.tar", fault)
    with pytest.raises(error, match=r"a\.tar") as caught:
        read(server)
    assert type(caught.value) is error
    assert len(server.requests("a.tar")) == requests
    assert str(type(caught.value)(str(caught.value))) == str(caught.value)  # survives a worker's border


def test_a_refusal_says_what_the_store_said(server: ShardServer) -> None:
    server.misbehave("a.tar", Fault(status=403, body=b"<Error><Code>ExpiredToken</Code></Error>"))
    with pytest.raises(OriginDenied, match=r"403 Forbidden \(ExpiredToken\)"):
        read(server)


@pytest.mark.parametrize(
    "content_range",
    [
        "bytes 0-99/1000003",
        "bytes 400000-1000002/1000003",
        "bytes 300000-1000002/5",
        "nonsense",
        "bytes */7",
        f"bytes 300000-1000002/{'9' * 5000}",
        "bytes 300000-100000\xb2/1000003",
    ],
    ids=range(7),
)
def test_after_a_wrong_content_range_the_shard_is_read_whole(server: ShardServer, content_range: str) -> None:
    wrong = Fault(headers={"Content-Range": content_range})
    server.misbehave("a.tar", Fault(first=1, cut_after_bytes=300_000), wrong)
    assert read(server) == BODY
    assert [request.start for request in server.log] == [0, 300_000, 300_000, None]


@pytest.mark.parametrize(
    "after",
    [
        Fault(body=OTHER),
        Fault(body=OTHER, ignore_range=True),
        Fault(body=OTHER[:-1], ignore_range=True, headers={"ETag": "", "Last-Modified": ""}),
        Fault(body=OTHER[:1000]),
        Fault(body=OTHER, headers={"ETag": "", "Last-Modified": ""}),
        Fault(body=OTHER, headers={"ETag": 'W/"a"', "Last-Modified": ""}),
        Fault(body=OTHER, headers={"ETag": '"other"', "Last-Modified": ""}),
    ],
    ids=[
        "If-Range",
        "ranges ignored",
        "only its size tells",
        "much shorter",
        "no validators",
        "a weak ETag",
        "no date",
    ],
)
def test_an_overwritten_object_is_an_error_and_never_a_mix(server: ShardServer, after: Fault) -> None:
    server.misbehave("a.tar", Fault(first=1, cut_after_bytes=300_000), after)
    got: list[bytes] = []
    with pytest.raises(DatasetChanged, match=r"a\.tar"):
        got.extend(open_origin(f"{server.url}/a.tar", options=QUICK).open().chunks())
    assert BODY.startswith(b"".join(got))


NOTHING = {"ETag": "", "Last-Modified": ""}
WEAK = {"ETag": 'W/"a"', "Last-Modified": ""}


@pytest.mark.parametrize("headers", [NOTHING, WEAK], ids=["no validators", "a weak ETag"])
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_what_proves_no_version_is_read_again_from_its_first_byte_and_compared(
    server: ShardServer, headers: dict[str, str], framing: Any
) -> None:
    cut = Fault(first=1, cut_after_bytes=300_000, headers=headers, framing=framing)
    server.misbehave("a.tar", cut, cut, Fault(headers=headers))
    assert read(server, first_get_bytes=BIG) == BODY
    server.misbehave("a.tar", cut, Fault(body=OTHER, headers=headers))
    got: list[bytes] = []
    with pytest.raises(DatasetChanged, match="other bytes than it did before"):
        got.extend(open_origin(f"{server.url}/a.tar", options=QUICK).open().chunks())
    assert BODY.startswith(b"".join(got))


@pytest.mark.parametrize("headers", [NOTHING, WEAK], ids=["no validators", "a weak ETag"])
def test_what_proves_no_version_is_one_answer_and_no_ranges(
    server: ShardServer, headers: dict[str, str]
) -> None:
    server.misbehave("a.tar", Fault(headers=headers))
    assert read(server, first_get_bytes=100_000) == BODY
    assert [request.start for request in server.log] == [0, None]


def backend(number: int, *, has_date: bool = True, **fault: Any) -> Fault:
    """One of two backends of a load balancer, each with its own ETag, and maybe its own date."""
    date = {"Last-Modified": f"Mon, 05 Jan 2026 00:00:0{number % 2} GMT"} if has_date else {}
    return Fault(first=1, headers={"ETag": f'"backend-{number % 2}"', **date}, **fault)


@pytest.mark.parametrize("has_date", [False, True], ids=["ETags", "ETags and dates"])
@pytest.mark.parametrize("quick", [0.0, float("inf")], ids=["one connection", "ranges side by side"])
def test_backends_with_etags_of_their_own_give_one_answer_whole(
    server: ShardServer, quick: float, has_date: bool
) -> None:
    server.misbehave("a.tar", *(backend(number, has_date=has_date) for number in range(9)))
    tally = Tally()
    assert read(server, tally=tally, first_get_bytes=100_000, quick_bytes_per_second=quick) == BODY
    assert None in [request.start for request in server.log]
    assert tally["origin_retries"] == 1


def test_backends_with_dates_of_their_own_resume_a_cut_body_by_comparing_it(server: ShardServer) -> None:
    cuts = [backend(number, cut_after_bytes=300_000 + 200_000 * number) for number in range(3)]
    server.misbehave("a.tar", *cuts, *map(backend, range(3, 9)))
    assert read(server, first_get_bytes=BIG) == BODY


def test_a_backend_with_another_size_is_a_changed_shard(server: ShardServer) -> None:
    longer = Fault(body=BODY + b"x", headers={"ETag": '"b"'})
    server.misbehave("a.tar", Fault(first=1, cut_after_bytes=300_000), longer)
    with pytest.raises(DatasetChanged, match="its size was 1000003 and is 1000004"):
        read(server)


def test_backends_that_hold_different_bytes_are_never_mixed(server: ShardServer) -> None:
    date = {"Last-Modified": "Mon, 05 Jan 2026 00:00:00 GMT"}
    server.misbehave("a.tar", Fault(first=1, headers=date), Fault(body=OTHER, headers=date))
    got: list[bytes] = []
    options = replace(QUICK, first_get_bytes=100_000)
    with pytest.raises(DatasetChanged, match="other bytes than it did before"):
        got.extend(open_origin(f"{server.url}/a.tar", options=options).open().chunks())
    assert BODY.startswith(b"".join(got))


def test_a_range_is_taken_from_whichever_backend(server: ShardServer) -> None:
    origin = open_origin(f"{server.url}/a.tar", options=QUICK)
    version = origin.version()
    server.misbehave("a.tar", backend(1))
    assert origin.read(700_000, 720_000, version) == BODY[700_000:720_000]
    assert len(server.log) == 2
    origin.close()


@pytest.mark.parametrize("cut", [None, 400_000], ids=["whole", "cut"])
def test_a_range_with_the_status_of_all_of_it_is_no_end(server: ShardServer, cut: int | None) -> None:
    """Some servers answer ranges rightly but for the status: the shard isn't over with its first range."""

    def ranged(start: int, stop: int, **more: Any) -> Fault:
        return Fault(first=1, body=BODY[start:stop], ignore_range=True, **more)

    version = {"ETag": '"1"', "Last-Modified": ""}
    whole = Fault(first=1, headers=version, ignore_range=True, cut_after_bytes=cut)
    resumed = [] if cut is None else [ranged(cut, BIG, headers=version)]
    server.misbehave("a.tar", ranged(0, 100_000, headers=version), whole, *resumed)
    assert read(server, first_get_bytes=100_000) == BODY


@pytest.mark.parametrize("fault", [Fault(ignore_range=True), Fault(body=BODY[:20_000], ignore_range=True)])
def test_a_read_by_range_is_read_from_the_first_byte_where_ranges_get_200(
    server: ShardServer, fault: Fault
) -> None:
    origin = open_origin(f"{server.url}/a.tar", options=replace(QUICK, first_get_bytes=20_000))
    version = replace(origin.version(), last_modified=None)
    server.misbehave("a.tar", replace(fault, first=2), Fault(ignore_range=True))
    assert origin.read(300_000, 320_000, version) == BODY[300_000:320_000]
    origin.close()


def test_a_server_without_ranges_is_asked_for_one_only_once(server: ShardServer) -> None:
    server.misbehave("*", Fault(ignore_range=True))
    with contextlib.closing(open_origin(f"{server.url}/a.tar", options=QUICK)) as origin:
        version = origin.version()
        assert not serves_ranges(f"{server.url}/b.tar")
        assert not serves_ranges(f"pipe:curl -s {server.url}/b.tar")
        assert origin.read(300_000, 320_000, version) == BODY[300_000:320_000]
        assert len(server.log) == 2
        server.misbehave("*")
        assert origin.read(300_000, 320_000, version) == BODY[300_000:320_000]  # learns better
        assert origin.read(300_000, 320_000, version) == BODY[300_000:320_000]
    assert serves_ranges(f"{server.url}/b.tar")
    assert server.log[-1].sent == 20_000


def test_another_version_given_whole_does_not_count_as_a_lack_of_ranges(server: ShardServer) -> None:
    server.misbehave("a.tar", Fault(first=1, cut_after_bytes=300_000), Fault(body=OTHER))
    with pytest.raises(DatasetChanged):
        read(server)
    assert serves_ranges(f"{server.url}/a.tar")


DRIPS = [
    Fault(drip="header"),
    Fault(drip="continue"),
    Fault(drip="chunk size", framing="chunked"),
    Fault(drip="trailers", framing="chunked", headers=NOTHING),
]


@pytest.mark.parametrize("fault", DRIPS, ids=lambda fault: fault.drip)
def test_what_frames_the_bytes_and_never_ends_is_a_timeout(server: ShardServer, fault: Fault) -> None:
    server.misbehave("a.tar", fault)
    with pytest.raises(OriginTimeout, match=r"a\.tar.*given up after 2 attempts"):
        read(server, attempts=2)
    assert len(server.log) == 2


@pytest.mark.parametrize("fault", DRIPS, ids=lambda fault: fault.drip)
def test_what_frames_the_bytes_and_never_ends_once_is_mended(server: ShardServer, fault: Fault) -> None:
    server.misbehave("a.tar", replace(fault, first=1, headers={}))
    assert read(server) == BODY


def test_a_range_that_crawls_is_asked_for_again(server: ShardServer) -> None:
    origin = open_origin(f"{server.url}/a.tar", options=replace(QUICK, slow_seconds=0.3))
    version = origin.version()
    server.misbehave("a.tar", Fault(first=1, bytes_per_second=1000))
    assert origin.read(300_000, 320_000, version) == BODY[300_000:320_000]
    assert len(server.log) == 3
    origin.close()


def test_a_server_that_is_away_is_unavailable(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(OriginUnavailable, match=r"refused.*given up after 4 attempts"):
            read(None, f"http://127.0.0.1:{taken.getsockname()[1]}/a.tar")  # type: ignore[arg-type]


def test_a_server_that_comes_back_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(BODY)
    with ShardServer(tmp_path) as server:
        server.misbehave("a.tar", Fault(first=1, cut_after_bytes=300_000))
        stream = open_origin(f"{server.url}/a.tar", options=QUICK).open()
        chunks = stream.chunks()
        got = next(chunks)
    with ShardServer(tmp_path, port=server.port):
        got += b"".join(chunks)
    stream.close()
    assert got == BODY


def test_a_host_without_an_address_is_unavailable() -> None:
    with pytest.raises(OriginUnavailable, match=r"no address for the host 'nowhere\.invalid'"):
        read(None, "http://nowhere.invalid/a.tar", attempts=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["169.254.169.254", "[::ffff:169.254.169.254]", "[fe80::1]"])
def test_metadata_addresses_are_refused(address: str) -> None:
    with pytest.raises(OriginDenied, match="link-local"):
        read(None, f"http://{address}/latest/meta-data/")  # type: ignore[arg-type]


# --- who is told what ---


def test_user_and_headers_go_to_the_urls_own_host_only(server: ShardServer, tmp_path: Path) -> None:
    with ShardServer(tmp_path) as other:
        server.misbehave("a.tar", Fault(status=302, headers={"Location": f"{other.url}/b.tar?sig=hunter2"}))
        url = server.url.replace("http://", "http://me:hunter2@") + "/a.tar"
        origin = open_origin(url, {"headers": {"X-Key": "hunter2"}}, QUICK)
        assert b"".join(origin.open().chunks()) == OTHER
    first, second = (
        {name.lower(): value for name, value in log[0].headers.items()} for log in (server.log, other.log)
    )
    assert first["x-key"] == "hunter2"
    assert first["authorization"].startswith("Basic ")
    assert not {"x-key", "authorization"} & set(second)


@pytest.mark.parametrize(
    ("user", "sent"),
    [("hf_TOKEN", b"hf_TOKEN:"), ("us%E2%82%ACer:p%40:w", "us\u20acer:p@:w".encode()), (":pw", b":pw")],
)
def test_a_urls_user_is_sent_as_utf_8_and_with_a_colon(server: ShardServer, user: str, sent: bytes) -> None:
    assert read(server, server.url.replace("http://", f"http://{user}@") + "/a.tar") == BODY
    assert server.log[0].headers["Authorization"] == f"Basic {base64.b64encode(sent).decode()}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Key", "hunter2\u20ac"),
        ("X-Key", "hunter2\r\nX-More: x"),
        ("X-Key", "hunter2\n more"),
        ("X-Key", "hunter2\0"),
        ("X-Key: hunter2", "x"),
        ("X-K\xe9y", "hunter2"),
        ("", "hunter2"),
    ],
)
def test_a_header_that_cannot_be_sent_is_named_without_its_value(
    server: ShardServer, name: str, value: str
) -> None:
    with pytest.raises(OriginError, match=r"a\.tar: the header '(X-K.y)?' can't be sent") as caught:
        open_origin(f"{server.url}/a.tar", {"headers": {name: value}}, QUICK).open()
    assert "hunter2" not in str(caught.value)
    assert not server.log


@pytest.mark.parametrize(
    "fault",
    [
        *(Fault(informational=statuses) for statuses in ((100,), (102,), (103, 100, 103), (199,) * 60)),
        *(
            Fault(headers={"Content-Encoding": encoding})
            for encoding in ("aws-chunked", "UTF-8", "none", "binary", "aws-chunked, identity", "")
        ),
    ],
)
def test_what_leaves_a_body_as_it_is_is_read(server: ShardServer, fault: Fault) -> None:
    server.misbehave("a.tar", fault)
    assert read(server) == BODY


def test_a_server_that_only_informs_is_given_up(server: ShardServer) -> None:
    server.misbehave("a.tar", Fault(informational=(103,) * 1000))
    with pytest.raises(OriginUnavailable, match="informational"):
        read(server)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=403),
        Fault(status=503),
        Fault(status=400, body=b"<Error><Code>hunter2</Code></Error>"),
        Fault(cut_after_bytes=10),
        Fault(silent=True),
        Fault(headers={"Content-Encoding": "br"}),
        Fault(headers={"Content-Encoding": "hunter2"}),
        Fault(status=302, headers={"Location": "ftp://x/?token=hunter2"}),
        Fault(status=302, headers={"Location": "http://169.254.169.254/?token=hunter2"}),
    ],
)
def test_no_secret_is_in_an_error_or_a_repr(server: ShardServer, fault: Fault) -> None:
    server.misbehave("a.tar", fault)
    url = server.url.replace("http://", "http://me:hunter2@") + "/a.tar?X-Amz-Signature=hunter2"
    origin = open_origin(url, {"headers": {"X-Key": "hunter2"}}, OriginOptions(attempts=1, stall_seconds=0.2))
    with pytest.raises((OriginError, ShardFormatError)) as caught:
        list(origin.open().chunks())
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in f"{error!s} {error!r}"
        error = error.__cause__
    assert "hunter2" not in f"{origin!r} {origin.url}"


def test_https_is_read_and_resumed(tmp_path: Path, trusted: tuple[str, str]) -> None:
    (tmp_path / "a.tar").write_bytes(BODY)
    with ShardServer(tmp_path, tls=trusted) as server:
        server.misbehave(
            "a.tar", Fault(first=1, cut_after_bytes=300_000), Fault(first=1, stall_after_bytes=300_000)
        )
        assert read(server) == BODY
        assert [request.start for request in server.log] == [0, 300_000, 600_000]


def test_many_records_of_tls_that_are_there_are_one_piece(tmp_path: Path, trusted: tuple[str, str]) -> None:
    (tmp_path / "a.tar").write_bytes(BODY)
    with ShardServer(tmp_path, tls=trusted) as server:
        options = OriginOptions(chunk_bytes=256 * 1024)
        with contextlib.closing(open_origin(f"{server.url}/a.tar", options=options).open()) as stream:
            pieces = []
            for piece in stream.chunks():
                pieces.append(piece)
                if len(pieces) < 4:
                    time.sleep(0.2)  # by then there are many
    assert b"".join(pieces) == BODY
    assert max(map(len, pieces)) > 2 * (16 << 10)


def test_half_a_record_of_tls_does_not_keep_a_whole_one_waiting(certificate: tuple[str, str]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    coming, sending = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(coming, sending, server_side=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.settimeout(3600)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.sslsocket_class = sockets._PatientTLSSocket

    def shake_hands() -> None:
        while True:
            try:
                server.do_handshake()
                break
            except ssl.SSLWantReadError:
                far.sendall(sending.read())
                coming.write(far.recv(1 << 16))
        far.sendall(sending.read())

    shaking = threading.Thread(target=shake_hands)
    shaking.start()
    with client.wrap_socket(near) as reader, far:
        shaking.join()
        server.write(BODY[:10_000])
        whole = sending.read()
        server.write(BODY[10_000:20_000])
        second = sending.read()
        far.sendall(whole + second[:5_000])
        buffer = bytearray(1 << 16)
        assert reader.recv_into(buffer) == 10_000  # or it waits for the rest, which nobody sends
        far.sendall(second[5_000:])
        far.close()  # without TLS's own end
        assert reader.recv_into(memoryview(buffer)[10_000:]) == 10_000
        assert reader.recv_into(bytearray(10)) == 0  # the end that came behind it isn't lost
        assert reader.gettimeout() == 3600
    assert buffer[:20_000] == BODY[:20_000]


def test_a_read_asks_for_about_what_comes() -> None:
    size = ReadSize(100_000)
    for got, then in [(32 << 10, 64 << 10), (64 << 10, 100_000), (100_000, 100_000), (30_000, 100_000)]:
        size.came(got)
        assert size.bytes == then
    for then in (50_000, 32 << 10, 32 << 10):
        size.came(1_000)
        assert size.bytes == then
    assert ReadSize(1_000).bytes == 1_000


def test_https_fails_where_the_certificate_is_not_trusted(
    tmp_path: Path, certificate: tuple[str, str]
) -> None:
    sockets._tls_context.cache_clear()
    with ShardServer(tmp_path, tls=certificate) as server, pytest.raises(OriginError, match="certificate"):
        read(server)
    assert isinstance(sockets._tls_context(""), ssl.SSLContext)


# --- the end of a loader ---


@pytest.mark.parametrize(
    "fault",
    [
        Fault(silent=True),
        Fault(stall_after_bytes=100_000),
        Fault(status=503, headers={"Retry-After": "60"}),
        *DRIPS,
    ],
    ids=[
        "for an answer",
        "for bytes",
        "before another attempt",
        *("for the end of a header", "behind a 100 Continue", "for a chunk", "for the end of trailers"),
    ],
)
@pytest.mark.sampled(3)
def test_a_stopped_loader_ends_every_wait(server: ShardServer, fault: Fault, no_leaks: Any) -> None:
    server.misbehave("a.tar", fault)
    stop = threading.Event()
    options = OriginOptions(stall_seconds=60)
    with no_leaks():
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(OriginStopped):
            list(open_origin(f"{server.url}/a.tar", options=options, stop=stop).open().chunks())


def test_a_stopped_loader_does_not_wait_for_a_connection() -> None:
    stop = threading.Event()
    with socket.socket() as full:  # accepts nobody: its queue is full
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for other in waiting:
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        threading.Timer(0.2, stop.set).start()
        url = f"http://127.0.0.1:{full.getsockname()[1]}/a.tar"
        with pytest.raises(OriginStopped):
            open_origin(url, options=OriginOptions(connect_seconds=60), stop=stop).open()
        for other in waiting:
            other.close()


def test_a_stopped_loader_does_not_wait_for_a_tls_handshake(no_leaks: Any) -> None:
    stop = threading.Event()
    sockets._tls_context("")
    with no_leaks(), socket.create_server(("127.0.0.1", 0)) as silent:  # its queue takes whoever connects
        threading.Timer(0.2, stop.set).start()
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/a.tar"
        with pytest.raises(OriginStopped):
            open_origin(url, options=OriginOptions(connect_seconds=3600), stop=stop).open()


def test_a_tls_handshake_without_an_end_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/a.tar"
        with pytest.raises(OriginTimeout, match=r"but sends nothing for 0\.3 s"):
            read(None, url, connect_seconds=0.3, attempts=1)  # type: ignore[arg-type]


# --- which version there is, by a request for one byte ---


@pytest.mark.parametrize("fault", [Fault(), Fault(ignore_range=True)])
def test_a_version_is_asked_for_by_one_byte_and_no_body_is_read(fault: Fault, server: ShardServer) -> None:
    server.misbehave("a.tar", fault)
    tally = Tally()
    version = open_origin(f"{server.url}/a.tar", options=QUICK, counters=tally).version()
    assert version.size == len(BODY)
    assert version.etag
    assert version.last_modified
    (request,) = server.requests("a.tar")
    assert (request.method, request.start, request.stop) == ("GET", 0, 1)
    assert tally["origin_bytes"] == 0


def test_an_empty_file_has_a_version_too(server: ShardServer) -> None:
    (server.root / "empty.tar").write_bytes(b"")
    assert open_origin(f"{server.url}/empty.tar", options=QUICK).version().size == 0


def test_a_version_is_asked_for_again_after_a_failure(server: ShardServer) -> None:
    server.misbehave("a.tar", Fault(first=2, status=503))
    assert open_origin(f"{server.url}/a.tar", options=QUICK).version().size == len(BODY)
    server.misbehave("a.tar", Fault(status=503))
    with pytest.raises(OriginUnavailable, match="4 attempts"):
        open_origin(f"{server.url}/a.tar", options=QUICK).version()


def connections_to(server: ShardServer) -> set[int]:
    """The ports on this side of the connections that stand."""
    port = int(server.url.rpartition(":")[2])
    return {
        found.laddr.port
        for found in psutil.Process().net_connections()
        if found.raddr and found.raddr.port == port and found.status == psutil.CONN_ESTABLISHED
    }


def test_reads_share_a_connection_and_ask_for_nothing_else(server: ShardServer, no_leaks: Any) -> None:
    with no_leaks():
        origin = open_origin(f"{server.url}/a.tar", options=QUICK)
        version = origin.version()
        used = set()
        for start in (700_000, 5, 300_000):
            assert origin.read(start, start + 20_000, version) == BODY[start : start + 20_000]
            used |= connections_to(server)
        assert len(used) == 1
        assert [(seen.start, seen.sent) for seen in server.log[1:]] == [
            (start, 20_000) for start in (700_000, 5, 300_000)
        ]
        origin.close()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(ignore_range=True),
        Fault(first=1, cut_after_bytes=10_000),
        Fault(first=1, silent=True),
        Fault(first=2, status=503),
        Fault(first=1, status=416),
        Fault(first=1, headers={"Content-Range": "bytes 5-9/10"}),
    ],
    ids=str,
)
def test_a_read_that_fails_is_mended(fault: Fault, server: ShardServer) -> None:
    origin = open_origin(f"{server.url}/a.tar", options=QUICK)
    version = origin.version()
    server.misbehave("a.tar", fault)
    assert origin.read(300_000, 320_000, version) == BODY[300_000:320_000]
    assert len(server.log) > 2
    origin.close()


def test_a_read_that_cannot_be_mended_is_an_error(server: ShardServer) -> None:
    origin = open_origin(f"{server.url}/a.tar", options=QUICK)
    version = origin.version()
    server.misbehave("a.tar", Fault(status=403))
    with pytest.raises(OriginDenied, match=r"a\.tar"):
        origin.read(0, 10, version)
    origin.close()
