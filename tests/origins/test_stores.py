"""Object stores: a real S3 front, a misbehaving one, and a server that speaks like the Hugging Face Hub."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from streamload.errors import (
    DatasetChanged,
    OptionError,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginStopped,
    OriginTimeout,
    OriginUnavailable,
)
from streamload.origins import signing, stores
from streamload.origins.origin import OriginOptions, open_origin
from streamload.origins.protocol import Session
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from tests.support.s3 import S3Server
from tests.support.tally import Tally

BODY = random.Random(1).randbytes(1_000_003)
OTHER = random.Random(2).randbytes(1_000_003)
QUICK = OriginOptions(
    attempts=3,
    backoff_seconds=0.01,
    stall_seconds=5.0,
    connect_seconds=2,
    first_get_bytes=100_000,
    quick_bytes_per_second=float("inf"),  # a plain server is asked for parallel ranges, as a store
    first_part_bytes=100_000,
    part_limit_bytes=400_000,
)
PATIENT = replace(QUICK, stall_seconds=60.0)
"""For tests that count requests: the first call makes botocore's client, on a busy machine in seconds."""


@pytest.fixture(autouse=True)
def _no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials but those that a test gives."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    signing._warn_anonymous.cache_clear()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        server.create_bucket("bucket")
        server.put("bucket", "private.tar", BODY)
        server.put("bucket", "public.tar", BODY, public=True)
        yield server


@pytest.fixture
def front(tmp_path: Path) -> Iterator[ShardServer]:
    """A plain file server is an S3 front, too, for whoever asks anonymously by path."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a.tar").write_bytes(BODY)
    with ShardServer(tmp_path) as server:
        yield server


def read(url: str, storage_options: dict[str, Any] | None = None, **facts: Any) -> bytes:
    return b"".join(open_origin(url, storage_options, facts.pop("options", QUICK), **facts).open().chunks())


def anonymous(front: ShardServer) -> dict[str, Any]:
    return {"anon": True, "endpoint_url": front.url}


def test_parts_grow_and_cover_the_object_once(front: ShardServer) -> None:
    tally = Tally()
    assert read("s3://bucket/a.tar", anonymous(front), options=PATIENT, counters=tally) == BODY
    sent = sorted(front.ranges("bucket/a.tar"))
    assert [start for start, _ in sent] == [0, *(stop for _, stop in sent[:-1])]
    assert sent[0] == (0, 100_000)
    assert (
        tally["origin_bytes"]
        == len(BODY)
        == sum(stop - start for start, stop in front.ranges("bucket/a.tar"))
    )
    assert tally["origin_requests"] == len(front.log)


def test_credentials_of_the_options_are_used(s3: S3Server) -> None:
    assert read("s3://bucket/private.tar", s3.storage_options) == BODY


def test_without_any_credentials_a_public_bucket_is_read_with_one_line_in_the_log(
    s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="streamload"):
        for name in ("public.tar", "public2.tar"):
            s3.put("bucket", name, BODY, public=True)
            assert read(f"s3://bucket/{name}", {"endpoint_url": s3.endpoint}) == BODY
    assert [record.message.split(":")[0] for record in caplog.records] == ["No AWS credentials found"]


def test_without_any_credentials_a_private_bucket_is_denied(s3: S3Server) -> None:
    with pytest.raises(OriginDenied, match=r"s3://bucket/private\.tar"):
        read("s3://bucket/private.tar", {"endpoint_url": s3.endpoint})


def test_a_missing_bucket_and_a_folder_are_not_found(s3: S3Server) -> None:
    s3.put("bucket", "folder/a.tar", b"x")
    for url in ("s3://nobucket/a.tar", "s3://bucket/folder"):
        with pytest.raises(OriginNotFound):
            read(url, s3.storage_options)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=503),
        Fault(status=500),
        Fault(status=429),
        Fault(cut_after_bytes=1000),
        Fault(silent=True),
    ],
    ids=["503", "500", "429", "cut", "silent"],
)
def test_failing_requests_are_sent_again_and_only_by_us(front: ShardServer, fault: Fault) -> None:
    once = Fault(**{**{name: getattr(fault, name) for name in Fault.__slots__}, "first": 1})
    front.misbehave("bucket/a.tar", Fault(first=2), once, Fault())
    tally = Tally()
    assert read("s3://bucket/a.tar", anonymous(front), counters=tally) == BODY
    assert tally["origin_retries"] >= 1  # a busy machine may be silent, too
    # of the ranges that are asked for beside the one that failed it may be that nothing was sent any more
    assert len(front.log) <= tally["origin_requests"] <= len(front.log) + QUICK.parts


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(status=503), OriginUnavailable),
        (Fault(status=403), OriginDenied),
        (Fault(silent=True), OriginTimeout),
    ],
    ids=["503", "403", "silent"],
)
def test_a_store_that_fails_for_good_is_an_error_of_its_type(
    front: ShardServer, fault: Fault, error: type[OriginError]
) -> None:
    front.misbehave("bucket/a.tar", fault)
    stall_seconds = 1.0 if fault.silent else 60.0
    short = OriginOptions(attempts=2, backoff_seconds=0.01, stall_seconds=stall_seconds)
    with pytest.raises(error, match=r"s3://bucket/a\.tar"):
        read("s3://bucket/a.tar", anonymous(front), options=short)


@pytest.mark.parametrize(
    "fault",
    [Fault(ignore_range=True), Fault(headers={"Content-Range": "bytes 5-9/1000003"})],
    ids=["ranges ignored", "wrong Content-Range"],
)
def test_a_store_without_ranges_is_read_as_a_web_server_without(front: ShardServer, fault: Fault) -> None:
    front.misbehave("bucket/a.tar", fault)
    assert read("s3://bucket/a.tar", anonymous(front)) == BODY


def test_the_bytes_of_a_range_come_before_all_of_it_is_there(front: ShardServer) -> None:
    front.stop_after(0.5)
    whole = 2 * len(BODY)
    one_part = replace(QUICK, first_get_bytes=whole, first_part_bytes=whole, chunk_bytes=50_000)
    chunks = open_origin("s3://bucket/a.tar", anonymous(front), one_part).open().chunks()
    head = next(chunks)
    front.go_on()
    assert head + b"".join(chunks) == BODY
    assert len(front.ranges("bucket/a.tar")) == 1


def test_a_slow_range_is_no_stall(front: ShardServer) -> None:
    front.misbehave("bucket/a.tar", Fault(first=1), Fault(bytes_per_second=len(BODY) / 9))
    one_part = replace(QUICK, first_part_bytes=2 * len(BODY), chunk_bytes=2 * len(BODY), stall_seconds=6.5)
    tally = Tally()
    assert read("s3://bucket/a.tar", anonymous(front), options=one_part, counters=tally) == BODY
    assert not tally["origin_retries"]


def test_an_object_overwritten_between_two_parts_is_an_error(front: ShardServer) -> None:
    front.misbehave("bucket/a.tar", Fault(first=3), Fault(body=OTHER))
    got: list[bytes] = []
    with pytest.raises(DatasetChanged):
        got.extend(open_origin("s3://bucket/a.tar", anonymous(front), QUICK).open().chunks())
    assert BODY.startswith(b"".join(got))


def test_an_overwrite_is_found_where_conditions_are_ignored(front: ShardServer) -> None:
    front.misbehave(
        "bucket/a.tar", Fault(first=3), Fault(ignore_conditions=True, headers={"ETag": '"other"'})
    )
    with pytest.raises(DatasetChanged, match="etag"):
        read("s3://bucket/a.tar", anonymous(front))


def test_a_stopped_loader_does_not_wait_for_a_store(front: ShardServer) -> None:
    front.misbehave("bucket/a.tar", Fault(first=1), Fault(silent=True))
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(OriginStopped):
        read("s3://bucket/a.tar", anonymous(front), options=replace(QUICK, stall_seconds=60.0), stop=stop)


@pytest.mark.usefixtures("sync_http")
def test_a_file_system_without_asyncio_that_hangs_is_given_up_and_asked_anew(front: ShardServer) -> None:
    healthy = [Fault(first=3), Fault(silent=True, first=1), Fault(first=2)]
    front.misbehave("bucket/a.tar", *healthy, Fault(stall_after_bytes=1000, first=1), Fault())
    tally = Tally()
    impatient = replace(QUICK, stall_seconds=0.5)
    assert read(f"sync-{front.url}/bucket/a.tar", options=impatient, counters=tally) == BODY
    assert tally["origin_retries"] == 2


@pytest.mark.usefixtures("sync_http")
def test_a_call_that_hangs_keeps_its_file_system_and_nobody_else_is_given_that(front: ShardServer) -> None:
    front.misbehave("bucket/a.tar", Fault(silent=True, first=1), Fault())
    session = Session(replace(QUICK, stall_seconds=0.2))
    origin, other = (stores.StoreOrigin(f"sync-{front.url}/bucket/a.tar", {}, session) for _ in range(2))
    hanging = origin.files
    with pytest.raises(OriginTimeout):
        origin.version()
    assert origin.version().size == len(BODY)
    assert hanging is not origin.files is other.files


@pytest.mark.usefixtures("sync_http")
def test_a_file_system_without_asyncio_that_hangs_for_good_is_an_error(front: ShardServer) -> None:
    front.misbehave("bucket/a.tar", Fault(first=2), Fault(silent=True))
    impatient = replace(QUICK, attempts=2, stall_seconds=0.2)
    with pytest.raises(OriginTimeout, match=r"/bucket/a\.tar: no answer for 0\.2 s"):
        read(f"sync-{front.url}/bucket/a.tar", options=impatient)


@pytest.mark.usefixtures("sync_http")
def test_a_stopped_loader_does_not_wait_for_a_file_system_without_asyncio(front: ShardServer) -> None:
    front.misbehave("bucket/a.tar", Fault(first=2), Fault(silent=True))
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(OriginStopped):
        read(f"sync-{front.url}/bucket/a.tar", options=replace(QUICK, stall_seconds=600.0), stop=stop)


def test_a_range_that_comes_short_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    MemoryFileSystem().pipe("/short.tar", BODY)
    whole, cut = MemoryFileSystem.cat_file, list[int]()

    def cat_file(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        data: bytes = whole(self, path, start=start, end=end)
        if start and not cut:
            cut.append(start)
            return data[:-10]
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    tally = Tally()
    assert read("memory://short.tar", options=QUICK, counters=tally) == BODY
    assert tally["origin_retries"] == len(cut) == 1


def test_options_that_no_file_system_takes_are_an_option_error() -> None:
    with pytest.raises((OptionError, OriginError), match="memory://"):
        read("memory://a.tar", {"skip_instance_cache": True, "protocol": object()})


def test_no_secret_of_the_options_is_in_an_error(front: ShardServer) -> None:
    front.misbehave("*", Fault(status=403))
    options = {"endpoint_url": front.url, "key": "me", "secret": "hunter2", "token": "hunter2"}
    origin = open_origin("s3://bucket/a.tar", options, QUICK)
    with pytest.raises(OriginDenied) as caught:
        list(origin.open().chunks())
    assert "hunter2" not in f"{caught.value!r} {origin!r}"


def test_the_hub_is_read_as_plain_http_with_its_token_kept_to_itself(tmp_path: Path) -> None:
    hub, far = tmp_path / "hub", tmp_path / "cdn"
    for path, text in {
        hub / "api/datasets/me/data/revision/main": json.dumps({"id": "me/data", "sha": "0" * 40}),
        hub / "api/datasets/me/data": json.dumps({"id": "me/data", "sha": "0" * 40}),
    }.items():
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
        if not path.is_dir():
            path.write_text(text)
    far.mkdir()
    (far / "blob").write_bytes(BODY)
    with ShardServer(hub) as server, ShardServer(far) as cdn:
        place = "datasets/me/data/resolve/main/a.tar"
        for name in ("api/datasets/me/data", "api/datasets/me/data/revision/main"):
            server.misbehave(name, Fault(body=json.dumps({"id": "me/data", "sha": "0" * 40}).encode()))
        server.misbehave(place, Fault(status=302, headers={"Location": f"{cdn.url}/blob?X-Amz-Signature=s"}))
        cdn.misbehave("blob", Fault(first=1, cut_after_bytes=300_000))
        options = {"endpoint": server.url, "token": "hf_hunter2"}
        plain = OriginOptions(attempts=3, backoff_seconds=0.01)
        assert read("hf://datasets/me/data/a.tar", options, options=plain) == BODY
        assert [request.start for request in cdn.log] == [0, 300_000]
        asked = [request.headers for request in server.requests(place)]
        assert all(headers["Authorization"] == "Bearer hf_hunter2" for headers in asked)
        assert all("Authorization" not in request.headers for request in cdn.log)


def drip(place: Path) -> ShardServer:
    """A store whose every answer has a header without an end."""
    server = ShardServer(place)
    server.misbehave("*", Fault(drip="header"))
    return server


def test_a_head_that_never_ends_is_a_timeout_of_a_store(tmp_path: Path) -> None:
    with drip(tmp_path) as server:
        options = OriginOptions(attempts=1, stall_seconds=0.4)
        origin = open_origin("s3://bucket/a.tar", {"anon": True, "endpoint_url": server.url}, options)
        with pytest.raises(OriginTimeout, match=r"a\.tar"):
            origin.open()


def test_a_loader_that_stops_does_not_wait_for_the_head_of_a_store(tmp_path: Path) -> None:
    stop = threading.Event()
    with drip(tmp_path) as server:
        storage = {"anon": True, "endpoint_url": server.url}
        origin = open_origin("s3://bucket/a.tar", storage, OriginOptions(stall_seconds=3600), stop=stop)
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(OriginStopped):
            origin.open()
