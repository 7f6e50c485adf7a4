"""`warm` and what it finds in the tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from streamload.cache import demand
from streamload.cache.demand import DemandFile
from streamload.cache.shard import shard_of
from streamload.daemon.status import Failures
from streamload.daemon.warm import warm
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support.kills import Child
from tests.support.tiers import until


def test_what_a_killed_warm_up_left_of_another_version_is_fetched_anew(tmp_path: Path) -> None:
    """It was taken for the end of the shard, and the warm-up failed for want of a verdict."""
    cache = tmp_path / "cache"
    write_shards(tmp_path / "data", [40], seed=1)
    with ShardServer.spawn(tmp_path / "data") as server:
        url = f"{server.url}/00000.tar"
        server.stop_after(0.5)
        with Child(lambda stage: warm(url, cache_dir=cache, cache_size="10MB").shards) as child:
            until(lambda: any(path.stat().st_size > 1000 for path in cache.glob("parts/*/index")))
            child.kill()
        (path,) = write_shards(tmp_path / "data", [41], seed=2)
        server.go_on()
        report = warm(url, cache_dir=cache, cache_size="10MB")
        assert (report.shards_complete, report.failures) == (1, {})
        (data,) = cache.glob("shards/*/data")
        assert data.read_bytes() == path.read_bytes()


def test_shards_that_only_a_hidden_query_tells_apart_are_counted_each(tmp_path: Path) -> None:
    with ShardServer(tmp_path) as server:
        urls = [f"{server.url}/a.tar?part={k}" for k in range(3)]
        report = warm(urls, cache_dir=tmp_path / "cache", cache_size="10MB")
    shown = f"{server.url}/a.tar"
    assert list(report.failures) == [shown, f"{shown} (2)", f"{shown} (3)"]
    failures = Failures(1.0)
    for k in range(3):
        failures.note(f"digest {k}", shown, f"why {k}")
    assert failures.reasons() == {shown: "why 0", f"{shown} (2)": "why 1", f"{shown} (3)": "why 2"}


class Listed:
    """Shards behind a server, and a tier for them that holds some."""

    def __init__(self, tmp_path: Path, counts: list[int]):
        self.paths = write_shards(tmp_path / "data", counts, options=ShardOptions(image_side=(200, 201)))
        self.sizes = [path.stat().st_size for path in self.paths]
        self.server = ShardServer(tmp_path / "data")
        self.urls = [f"{self.server.url}/{path.name}" for path in self.paths]
        self.root = tmp_path / "tier"

    def room_for(self, *numbers: int) -> int:
        """The limit of a tier that has room for these shards and no more."""
        return sum(self.sizes[number] + (16 << 10) for number in numbers) + (112 << 10)

    def held(self) -> list[int]:
        names = {path.name for path in (self.root / "shards").iterdir()}
        return [k for k, url in enumerate(self.urls) if shard_of(url, None).digest in names]


@pytest.fixture
def listed(tmp_path: Path) -> Iterator[Callable[..., Listed]]:
    with ExitStack() as stack:

        def make(*counts: int) -> Listed:
            made = Listed(tmp_path, list(counts))
            stack.callback(made.server.close)
            return made

        yield make


def test_where_the_room_is_gone_the_rest_is_left_and_nothing_goes_for_it(
    listed: Callable[..., Listed],
) -> None:
    """It evicted what it had just filled, and said of all that it had ever filled that it was there."""
    some = listed(*[20] * 14)
    limit = some.room_for(0, 1, 2)
    report = warm(some.urls, cache_dir=some.root, cache_size=limit, concurrency=1)
    assert some.held() == [0, 1, 2]
    assert (report.shards, report.shards_complete, report.shared_failures) == (14, 3, {})
    assert list(report.no_room) == list(report.failures) == some.urls[3:]
    assert all(f"its limit of {limit:,} bytes; raise cache_size" in why for why in report.failures.values())
    assert report.bytes_arrived == sum(some.sizes[:3])
    asked = {request.path for request in some.server.log}
    assert len(asked) < 14
    report = warm(some.urls[::-1], cache_dir=some.root, cache_size=limit, concurrency=4)
    assert some.held() == [0, 1, 2]
    assert (report.shards_complete, report.shards_found_complete, report.bytes_arrived) == (3, 3, 0)


def test_a_shard_that_is_larger_than_the_cache_doesnt_keep_others_out(
    listed: Callable[..., Listed],
) -> None:
    """The warm-up had no end."""
    some = listed(60, 20, 20)
    report = warm(some.urls, cache_dir=some.root, cache_size=some.room_for(1, 2), concurrency=1)
    assert some.held() == [1, 2]
    assert list(report.no_room) == some.urls[:1]


def test_what_a_run_will_read_and_what_is_listed_stays_and_the_rest_goes(
    listed: Callable[..., Listed],
) -> None:
    some = listed(*[20] * 6)
    limit = some.room_for(0, 1, 2)
    warm(some.urls[3:], cache_dir=some.root, cache_size=limit)
    assert some.held() == [3, 4, 5]
    with closing(DemandFile(some.root / "runs")) as trainer:
        trainer.announce([shard_of(some.urls[4], None).digest])
        report = warm(
            [some.urls[k] for k in (0, 5, 1, 2)], cache_dir=some.root, cache_size=limit, concurrency=1
        )
    assert some.held() == [0, 4, 5]
    assert list(report.no_room) == some.urls[1:3]


def test_more_are_kept_than_one_run_can_announce(
    listed: Callable[..., Listed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "VISITS_KEPT", 2)
    some = listed(*[20] * 8)
    warm(some.urls, cache_dir=some.root, cache_size=some.room_for(0, 1, 2, 3, 4), concurrency=1)
    assert some.held() == [0, 1, 2, 3, 4]


def test_what_is_stored_in_the_shared_cache_makes_way(listed: Callable[..., Listed], tmp_path: Path) -> None:
    some = listed(*[20] * 8)
    report = warm(
        some.urls,
        cache_dir=some.root,
        cache_size=some.room_for(0, 1, 2),
        shared_cache=tmp_path / "shared",
        write_back=True,
        concurrency=2,
    )
    assert (report.failures, report.shared_failures, report.shared_stored) == ({}, {}, 8)
    assert report.shards_complete == len(some.held()) < 8
    assert report.bytes_arrived == sum(some.sizes)


def test_a_command_of_unknown_size_that_has_no_room_in_the_middle_is_left(
    listed: Callable[..., Listed],
) -> None:
    some = listed(20, 20)
    urls = [f"pipe:cat {path}" for path in some.paths]
    report = warm(urls, cache_dir=some.root, cache_size=some.room_for(0) + some.sizes[1] // 3, concurrency=1)
    assert report.shards_complete == 1
    assert list(report.no_room) == [f"pipe:cat {some.paths[1].name}"]
