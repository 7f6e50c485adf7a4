"""The idea itself: samples are used while their shards still arrive, and each byte is asked for once."""

from __future__ import annotations

import collections
import time
from pathlib import Path

import pytest

import streamload
from streamload import Order
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards

COUNTS = [40, 55, 30, 47, 61, 38]


def brace(server: ShardServer, count: int) -> str:
    return f"{server.url}/{{00000..{count - 1:05d}}}.tar"


def test_batches_come_out_while_no_shard_is_complete(tmp_path: Path) -> None:
    """The server falls silent after 30 % of each shard: all batches that those bytes cover are yielded."""
    paths = write_shards(tmp_path / "data", COUNTS, seed=1)
    arrived = {
        key for path in paths for key, members in read_oracle(path) if all_within(path, key, members, 0.3)
    }
    with (
        ShardServer(tmp_path / "data") as server,
        streamload.make_loader(
            brace(server, len(COUNTS)),
            batch_size=4,
            num_workers=2,
            shuffle=1,
            order=Order(lanes=len(COUNTS)),
            batches=streamload.Batches(with_keys=True),
            cache_dir=tmp_path / "cache",
            cache_size="1TB",
        ) as loader,
    ):
        server.stop_after(0.3)
        batches = iter(loader)
        # Six lanes give one sample in turn, so the shard with the fewest whole samples is the limit.
        least = min(sum(key.startswith(path.stem) for key in arrived) for path in paths)
        covered = (least * len(COUNTS) - 1) // 4
        assert covered >= 8
        keys = []
        for _ in range(covered):
            _, _, origin = next(batches)
            keys += origin["__key__"]
            assert loader.stats().shards_complete == 0
        assert set(keys) <= arrived
        server.go_on()
        for _, _, origin in batches:
            keys += origin["__key__"]
        whole = [key for path in paths for key, _ in read_oracle(path)]
        dropped = sum(COUNTS) % 4
        assert len(keys) == sum(COUNTS) - dropped
        assert not collections.Counter(keys) - collections.Counter(whole)
        assert loader.stats().shards_complete == len(COUNTS)


@pytest.mark.parametrize("workers", [0, 2])
def test_after_the_first_batches_later_shards_come_though_the_training_stands_still(
    tmp_path: Path, workers: int
) -> None:
    write_shards(tmp_path / "data", COUNTS, seed=1)
    with (
        ShardServer(tmp_path / "data") as server,
        streamload.make_loader(
            brace(server, len(COUNTS)),
            batch_size=4,
            num_workers=workers,
            shuffle=1,
            order=Order(lanes=1),
            workers=streamload.Workers(prefetch_factor=1),
            cache_dir=tmp_path / "cache",
            cache_size="1TB",
        ) as loader,
    ):
        batches = iter(loader)
        for _ in range(2):  # without workers the second one is where more are wanted
            next(batches)
        deadline = time.monotonic() + 60
        while len(asked := {request.path for request in server.log}) < len(COUNTS):
            assert time.monotonic() < deadline, f"only {sorted(asked)} were asked for"
            time.sleep(0.05)


def all_within(path: Path, key: str, members: dict[str, bytes], share: float) -> bool:
    """Whether a sample lies in the first share of a tar, and the header behind it too."""
    content = path.read_bytes()
    last = max(content.find(payload) + len(payload) for payload in members.values())
    return last + 1024 <= share * len(content)


@pytest.mark.parametrize("workers", [0, 4])
@pytest.mark.sampled(1)
def test_each_byte_is_asked_for_once_and_nothing_in_the_second_epoch(tmp_path: Path, workers: int) -> None:
    paths = write_shards(tmp_path / "data", COUNTS, seed=2)
    with (
        ShardServer(tmp_path / "data", bytes_per_second=3e6) as server,
        streamload.make_loader(
            brace(server, len(COUNTS)),
            batch_size=3,
            num_workers=workers,
            cache_dir=tmp_path / "cache",
            cache_size="1TB",
        ) as loader,
    ):
        for _ in range(2):
            assert sum(len(texts) for _, texts in loader) == sum(COUNTS) - sum(COUNTS) % 3
            for path in paths:
                assert_disjoint_and_whole(server.ranges(path.name), path.stat().st_size)
        stats = loader.stats()
        assert stats.origin_bytes == sum(path.stat().st_size for path in paths)
        assert stats.origin_requests == len(server.log) == len(paths)
        assert stats.seconds_to_first_batch is not None


def assert_disjoint_and_whole(ranges: list[tuple[int, int]], size: int) -> None:
    at = 0
    for start, stop in sorted(ranges):
        assert start == at
        at = stop
    assert at == size


def test_a_constructor_touches_nothing(tmp_path: Path) -> None:
    loader = streamload.make_loader("http://127.0.0.1:9/{0..9}.tar", cache_dir=tmp_path / "cache")
    assert "10 shards" in repr(loader)
    assert not (tmp_path / "cache").exists()
    loader.close()
