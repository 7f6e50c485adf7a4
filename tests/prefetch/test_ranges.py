"""Samples read by range: neighbours in one request, several at once, exactly the bytes asked for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streamload.cache.shard import Shard, ShardRange, shard_of
from streamload.errors import DatasetChanged, OriginNotFound
from streamload.origins.origin import Origin, Version, open_origin
from streamload.prefetch.ranges import Ranges
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer

SIZE = 4 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        content = b"".join(f"{name}{number:07d}".encode() for number in range(SIZE // 8))
        (tmp_path / "data" / f"{name}.tar").write_bytes(content)
    with ShardServer(tmp_path / "data", latency_seconds=0.05) as server:
        yield server


def wanted(server: ShardServer, name: str, start: int, stop: int) -> ShardRange:
    shard = shard_of(f"{server.url}/{name}.tar", None)
    return ShardRange(shard, open_origin(shard.url).version(), start, stop)


def opened(shard: Shard) -> Origin:
    return open_origin(shard.url, stop=threading.Event())


def content(server: ShardServer, one: ShardRange) -> bytes:
    return (server.root / Path(one.shard.name).name).read_bytes()[one.start : one.stop]


def test_neighbours_are_asked_for_together_and_others_at_the_same_time(server: ShardServer) -> None:
    near = [wanted(server, "a", at, at + 900) for at in range(0, 40_000, 1000)]
    far = [wanted(server, name, at, at + 900) for name in "ab" for at in range(1 << 20, SIZE, 1 << 20)]
    server.log.clear()
    with closing(Ranges(opened)) as ranges:
        ranges.want([*far, *near])
        assert [ranges.read(one) for one in [*near, *far]] == [content(server, one) for one in [*near, *far]]
        assert len(server.log) == 1 + len(far)
        assert sum(request.sent for request in server.log) == 39_900 + 900 * len(far)
        asked = sorted((request.seconds, request.ended) for request in server.log)
        under_way = max(sum(begin < until < end for begin, end in asked) for _, until in asked)
        assert under_way + 1 > 2  # of those that others overlap
        alone = wanted(server, "b", 5, 50)
        assert ranges.read(alone) == content(server, alone)


def test_what_was_asked_for_and_is_not_read_is_forgotten(server: ShardServer) -> None:
    version = wanted(server, "a", 0, 1).version
    shard = shard_of(f"{server.url}/a.tar", None)
    places = itertools.cycle(range(0, SIZE, 256 << 10))
    with closing(Ranges(opened)) as ranges:
        for turn, at in zip(range(8), places, strict=False):
            ranges.want([ShardRange(shard, version, at, at + 10)])
            assert len(ranges._blocks) <= min(turn + 1, 4)


def test_what_goes_wrong_is_said_to_whoever_reads(server: ShardServer) -> None:
    one, other = wanted(server, "a", 0, 10), wanted(server, "b", 0, 10)
    with closing(Ranges(opened)) as ranges:
        ranges.want([other._replace(version=Version(7, '"another"', None))])
        with pytest.raises(DatasetChanged):
            ranges.read(other)
        assert ranges.read(other) == content(server, other)
        server.misbehave("a.tar", Fault(status=404))
        ranges.want([one])
        with pytest.raises(OriginNotFound):
            ranges.read(one)


class Told:
    """An origin that tells which of its reads overlap."""

    def __init__(self, together: threading.Barrier):
        self.reads, self.is_closed = list[int](), False
        self._together = together

    def read(self, start: int, stop: int, version: Version) -> bytes:
        if start == 1 << 30:
            raise OriginNotFound("not there")
        self.reads.append(start)
        if start:
            self._together.wait(60)
        return bytes(stop - start)

    def close(self) -> None:
        self.is_closed = True


def test_each_origin_is_read_by_one_thread_at_a_time_and_closed_once_it_has_failed() -> None:
    shard, version, origins = shard_of("http://host/a.tar", None), Version(1), list[Told]()
    together = threading.Barrier(2)

    def opened_here(shard: Shard) -> Any:
        origins.append(Told(together))
        return origins[-1]

    def part(start: int) -> ShardRange:
        return ShardRange(shard, version, start, start + 10)

    with closing(Ranges(opened_here)) as ranges:
        ranges.read(part(0))
        far_apart = [part(10 << 20), part(20 << 20)]
        ranges.want(far_apart)
        assert [ranges.read(one) for one in far_apart] == [bytes(10)] * 2
        assert sorted(len(origin.reads) for origin in origins) == [1, 2]
        with pytest.raises(OriginNotFound):
            ranges.read(part(1 << 30))
        assert [origin.is_closed for origin in origins].count(True) == 1
    assert all(origin.is_closed for origin in origins)
