"""What every origin keeps to: bytes in order from any byte, one version, typed errors, nothing left over."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from streamload.errors import DatasetChanged, OriginNotFound, OriginStopped
from streamload.origins.origin import Origin, OriginOptions, Version, open_origin
from streamload.origins.protocol import Unproven
from streamload.testing.server import ShardServer
from tests.support.s3 import S3Server
from tests.support.tally import Tally

BODY = random.Random(1).randbytes(1_000_003)
OTHER = random.Random(2).randbytes(1_000_003)
QUICK = OriginOptions(
    attempts=3,
    backoff_seconds=0.01,
    stall_seconds=5.0,
    first_part_bytes=50_000,
    part_limit_bytes=200_000,
    chunk_bytes=70_000,
)


@dataclass
class Place:
    """Somewhere for shards to live: how to put one there, and what fsspec needs to find it."""

    put: Callable[[bytes], object]
    url: str
    missing: str
    storage_options: dict[str, Any] | None = None
    knows_versions: bool = True
    has_ranges: bool = True
    has_backends: bool = False
    """Another ETag and date may be another backend's: the size and the bytes tell."""

    def origin(self, url: str | None = None, **facts: Any) -> Origin:
        return open_origin(url or self.url, self.storage_options, facts.pop("options", QUICK), **facts)


@pytest.fixture(params=["http", "s3", "s3fs", "memory", "sync-http", "pipe", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    file = tmp_path / "a.tar"
    file.write_bytes(BODY)

    def rewrite(body: bytes) -> None:
        before = file.stat().st_mtime_ns
        file.write_bytes(body)
        os.utime(file, ns=(before + 10**9, before + 10**9))

    if request.param == "http":
        with ShardServer(tmp_path) as server:
            yield Place(rewrite, f"{server.url}/a.tar", f"{server.url}/b.tar", has_backends=True)
    elif request.param in {"s3", "s3fs"}:
        s3: S3Server = request.getfixturevalue("s3")
        url = s3.put("bucket", "a.tar", BODY)
        missing = "s3://bucket/b.tar"
        storage = s3.storage_options | ({"s3_additional_kwargs": {}} if request.param == "s3fs" else {})
        yield Place(lambda body: s3.put("bucket", "a.tar", body), url, missing, storage)
    elif request.param == "memory":
        files = fsspec.filesystem("memory")
        files.pipe("/a.tar", BODY)
        yield Place(lambda body: files.pipe("/a.tar", body), "memory://a.tar", "memory://b.tar")
        files.rm("/a.tar")
    elif request.param == "sync-http":
        request.getfixturevalue("sync_http")
        with ShardServer(tmp_path) as server:
            yield Place(rewrite, f"sync-{server.url}/a.tar", f"sync-{server.url}/b.tar")
    elif request.param == "pipe":
        yield Place(
            rewrite, f"pipe:cat {file}", f"pipe:cat {file}.missing", knows_versions=False, has_ranges=False
        )
    else:
        yield Place(rewrite, str(file), str(tmp_path / "b.tar"))


@pytest.mark.parametrize("start", [0, 1, 49_999, 50_000, 123_456, len(BODY) - 1, len(BODY)])
def test_the_bytes_come_in_order_from_any_byte(place: Place, start: int) -> None:
    tally = Tally()
    stream = place.origin(counters=tally).open(start)
    assert b"".join(stream.chunks()) == BODY[start:]
    stream.close()
    stream.close()
    assert tally["origin_requests"] >= 1
    assert tally["origin_bytes"] in {len(BODY) - start, len(BODY)}  # a pipe begins at byte 0
    assert not tally["origin_retries"]


def test_the_size_is_known_before_the_bytes_where_the_origin_says_it(place: Place) -> None:
    stream = place.origin().open()
    assert stream.version.size == (len(BODY) if place.knows_versions else None)
    stream.close()


def test_a_version_is_that_of_the_bytes_and_costs_next_to_none(place: Place) -> None:
    tally = Tally()
    origin = place.origin(counters=tally)
    version = origin.version()
    assert tally["origin_bytes"] == 0
    stream = place.origin().open()
    assert version.difference(stream.version) is None
    stream.close()
    assert version == (stream.version if place.knows_versions else Version())
    place.put(OTHER)
    changed = version.difference(place.origin().version())
    assert (changed is not None) is place.knows_versions


def test_the_version_of_a_shard_that_is_missing_is_an_error(place: Place) -> None:
    if place.knows_versions:
        with pytest.raises(OriginNotFound):
            place.origin(place.missing).version()


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (49_999, 50_001), (100_000, 900_000), (5, len(BODY))])
def test_a_read_gives_its_bytes_alone(place: Place, start: int, stop: int) -> None:
    version = place.origin().version()
    tally = Tally()
    origin = place.origin(counters=tally)
    for _ in range(2):
        assert origin.read(start, stop, version) == BODY[start:stop]
    if place.has_ranges:
        assert tally["origin_bytes"] == 2 * (stop - start)
    origin.close()
    origin.close()


def test_a_read_of_another_version_is_an_error(place: Place) -> None:
    if place.knows_versions:
        origin = place.origin()
        version = origin.version()
        assert origin.read(0, 10, version) == BODY[:10]
        place.put(OTHER[:-1] if place.has_backends else OTHER)
        with pytest.raises(DatasetChanged, match=r"a\.tar"):
            origin.read(10, 20, version)
        origin.close()


def test_a_resumed_read_is_the_same_version(place: Place) -> None:
    origin = place.origin()
    first = origin.open()
    head = next(iter(first.chunks()))
    first.close()
    if not place.knows_versions:
        with pytest.raises(Unproven, match="nothing tells its versions apart"):
            origin.open(len(head), first.version)
        return
    rest = origin.open(len(head), first.version)
    assert head + b"".join(rest.chunks()) == BODY
    rest.close()


def test_a_resumed_read_is_the_same_version_fails_after_an_overwrite(place: Place) -> None:
    origin = place.origin()
    first = origin.open()
    got = [next(iter(first.chunks()))]
    first.close()
    place.put(OTHER)
    with pytest.raises((DatasetChanged, Unproven)):
        got.extend(origin.open(len(got[0]), first.version).chunks())
    assert BODY.startswith(b"".join(got))


def test_a_shorter_version_is_another_version(place: Place) -> None:
    origin = place.origin()
    first = origin.open()
    version = first.version
    first.close()
    place.put(BODY[:300_000])
    with pytest.raises((DatasetChanged, Unproven)):
        list(origin.open(500_000, version).chunks())


def test_a_missing_shard_is_soon_not_found(place: Place) -> None:
    tally = Tally()
    with pytest.raises(OriginNotFound, match=r"b\.tar|missing") as caught:
        list(place.origin(place.missing, counters=tally).open().chunks())
    assert isinstance(caught.value, FileNotFoundError)
    assert tally["origin_retries"] == (2 if place.has_backends else 0)  # another backend may have it


@pytest.mark.sampled(3)
def test_nothing_is_left_over_after_a_close_in_the_middle(place: Place, no_leaks: Any) -> None:
    list(place.origin().open().chunks())  # opens what stays open for good: fsspec's loop, its connections
    with no_leaks():
        origin = place.origin()
        for _ in range(3):
            stream = origin.open()
            next(iter(stream.chunks()))
            stream.close()
        whole = origin.open()
        assert b"".join(whole.chunks()) == BODY
        whole.close()


def test_a_stopped_loader_gets_no_more_bytes(place: Place) -> None:
    stop = threading.Event()
    stream = place.origin(stop=stop).open()
    chunks = stream.chunks()
    next(chunks)
    stop.set()
    with pytest.raises(OriginStopped):
        next(chunks)
    stream.close()


def test_versions_are_compared_by_what_both_know() -> None:
    one = Version(10, '"a"', "Monday")
    assert one.difference(Version(10, '"a"', "Tuesday")) is None
    assert one.difference(Version()) is None
    assert "size" in (one.difference(Version(11, '"a"', "Monday")) or "")
    assert "etag" in (one.difference(Version(10, '"b"', "Monday")) or "")
    assert "last modified" in (one.difference(Version(10, None, "Tuesday")) or "")
    assert Version(None, '"a"').completed(Version(5, '"x"', "Monday")) == Version(5, '"a"', "Monday")
