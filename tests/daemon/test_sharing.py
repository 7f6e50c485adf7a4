"""Daemons and a shared tier: several share the work, and what the dead had is done by others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from streamload.cache.shard import Shard, ShardList
from streamload.cache.shared.objects import Objects
from streamload.cache.shared.tier import SharedTier
from streamload.daemon.options import DaemonOptions, ServiceOptions
from streamload.daemon.service import Service
from streamload.daemon.targets import SharedTarget
from streamload.metrics import Counters
from streamload.origins.origin import OriginOptions
from streamload.testing.server import Fault, ShardServer
from streamload.testing.shards import write_shards
from streamload.urls import expand_urls
from tests.support.kills import Child, Stage
from tests.support.s3 import S3Server

COUNTS = [6, 5, 7, 4, 6, 5]
ORIGIN = OriginOptions(connect_seconds=60, stall_seconds=60, attempts=2, backoff_seconds=0.01)


class Place:
    """An origin and a shared tier, and daemons in processes of their own."""

    def __init__(self, tmp_path: Path, shared: str, options: dict[str, Any] | None):
        self.tmp_path, self.shared, self.options = tmp_path, shared, options
        self.paths = write_shards(tmp_path / "origin", COUNTS)
        self.server: Any = ShardServer.spawn(tmp_path / "origin")
        self.pattern = f"{self.server.url}/{{00000..{len(COUNTS) - 1:05d}}}.tar"
        self.shards = ShardList(expand_urls(self.pattern), None)
        self.objects = Objects(shared, options)

    @property
    def tier(self) -> SharedTier:
        return SharedTier(self.objects, Counters())

    def asked(self, name: str, **more: Any) -> ServiceOptions:
        given: dict[str, Any] = {
            "urls": (self.pattern,),
            "shared_cache": self.shared,
            "shared_cache_options": self.options,
            "cache_dir": self.tmp_path / f"node-{name}",
            "cache_size": "1GB",
            "concurrency": 2,
            "once": True,
            "notices": "none",
            "listen": "none",
            "daemon": DaemonOptions(look_seconds=0.1, retry_seconds=0.1, stopped_seconds=2.0, origin=ORIGIN),
            "lease_seconds": 60.0,
        }
        return ServiceOptions(**{**given, **more})

    def daemon(self, name: str, **more: Any) -> Child:
        asked = self.asked(name, **more)

        def work(stage: Stage) -> Any:
            with Service(asked) as service:
                stage.enter("running")
                status = service.run()
            return [status.done, status.held, status.wanted, status.failed, status.taken_over]

        return Child(work)

    def check_all_held(self) -> None:
        """Every shard is there, byte for byte, and nothing else is left."""
        tier = self.tier
        for shard, path in zip(self.shards, self.paths, strict=True):
            held = tier.look(shard)
            assert held is not None
            assert tier.read(shard, held, 0, held.size) == path.read_bytes()
        assert self.objects.names("leases") == []

    def sent_bytes(self) -> int:
        return sum(stop - start for path in self.paths for start, stop in self.server.ranges(path.name))

    @property
    def data_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def close(self) -> None:
        self.server.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with closing(Place(tmp_path, str(tmp_path / "shared"), None)) as place:
        yield place


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_daemon_brings_all_to_a_folder(place: Place) -> None:
    with place.daemon("a") as child:
        assert child.finish(60)[:4] == [6, 6, 6, {}]
    place.check_all_held()
    assert place.sent_bytes() == place.data_bytes


@pytest.mark.deep
def test_one_daemon_brings_all_to_a_bucket(tmp_path: Path) -> None:
    with S3Server() as server:
        server.create_bucket("bucket")
        with closing(Place(tmp_path, "s3://bucket/shared", server.storage_options)) as place:
            with place.daemon("a") as child:
                assert child.finish(90)[:4] == [6, 6, 6, {}]
            place.check_all_held()


def test_three_daemons_share_the_work_and_each_byte_is_asked_for_once(place: Place) -> None:
    with ExitStack() as stack:
        children = [stack.enter_context(place.daemon(name)) for name in "abc"]
        results = [child.finish(60) for child in children]
    assert sum(done for done, *_ in results) == 6
    assert all(held == wanted == 6 for _, held, wanted, *_ in results)
    place.check_all_held()
    assert place.sent_bytes() == place.data_bytes


def test_what_a_killed_daemon_had_is_done_by_another(place: Place) -> None:
    place.server.stop_after(0.5)
    with place.daemon("a", lease_seconds=1.0) as first, place.daemon("b", lease_seconds=1.0) as second:
        until(lambda: len(place.objects.names("leases")) >= 3)
        first.kill()
        place.server.go_on()
        assert second.finish(60)[1:4] == [6, 6, {}]
    place.check_all_held()


def test_a_daemon_that_comes_back_to_its_node_goes_on_at_once(place: Place) -> None:
    place.server.stop_after(0.5)
    with place.daemon("a", lease_seconds=3600.0) as first:
        until(lambda: len(place.objects.names("leases")) == 2 and len(place.server.log) >= 2)
        first.kill()
    place.server.go_on()
    with place.daemon("a", lease_seconds=3600.0) as again:
        assert again.finish(60)[1:5] == [6, 6, {}, 2]
    place.check_all_held()


def test_a_daemon_that_is_stopped_and_goes_on_harms_nothing(place: Place) -> None:
    place.server.stop_after(0.5)
    with place.daemon("a", lease_seconds=1.0) as first, place.daemon("b", lease_seconds=1.0) as second:
        until(lambda: len(place.objects.names("leases")) >= 3)
        first.stop()
        place.server.go_on()
        assert second.finish(60)[1:4] == [6, 6, {}]
        first.go_on()
        assert first.finish(60)[1:4] == [6, 6, {}]
    place.check_all_held()


def test_sigterm_lets_it_finish_what_it_has_and_exit_well(place: Place) -> None:
    place.server.stop_after(0.5)
    with place.daemon("a", grace_seconds=120.0) as child:
        until(lambda: len(place.objects.names("leases")) == 2 and len(place.server.log) >= 2)
        os.kill(child.pid, signal.SIGTERM)
        place.server.go_on()
        done, *_ = child.finish(60)
    assert done == 2
    assert place.objects.names("leases") == []


def test_sigterm_without_time_hands_back_what_it_has(place: Place) -> None:
    place.server.stop_after(0.5)
    with place.daemon("a", grace_seconds=0.2) as child:
        until(lambda: len(place.objects.names("leases")) == 2)
        os.kill(child.pid, signal.SIGTERM)
        assert child.finish(60)[0] == 0
    assert place.objects.names("leases") == []
    place.server.go_on()
    with place.daemon("b") as child:
        child.finish(60)
    place.check_all_held()


def test_a_store_that_ignores_conditions_costs_only_work(place: Place, monkeypatch: Any) -> None:
    monkeypatch.setattr(Objects, "has_conditions", False)
    with ExitStack() as stack:
        children = [stack.enter_context(place.daemon(name)) for name in "abc"]
        for child in children:
            assert child.finish(60)[1:4] == [6, 6, {}]
    place.check_all_held()


def test_a_shard_that_cant_be_had_is_named_and_the_others_are_brought(place: Place) -> None:
    place.server.misbehave(place.paths[2].name, Fault(status=404))
    with place.daemon("a") as child:
        done, held, wanted, failed, _ = child.finish(60)
    assert (done, held, wanted) == (5, 5, 6)
    assert list(failed) == [place.shards[2].name]
    assert place.objects.names("leases") == []


def test_a_shared_tier_that_takes_nothing_is_said_and_nothing_is_lost(place: Place) -> None:
    Path(place.shared).write_text("no folder")
    with place.daemon("a", once=False) as child:
        assert child.stage.wait_for("running", 60)
        time.sleep(0.5)
        os.kill(child.pid, signal.SIGTERM)
        done, held, *_ = child.finish(60)
    assert (done, held) == (0, 0)
    Path(place.shared).unlink()
    with place.daemon("a") as child:
        child.finish(60)
    place.check_all_held()


def test_a_local_file_isnt_stored_for_others(place: Place) -> None:
    with place.daemon("a", urls=(str(place.paths[0]),)) as child:
        _, held, wanted, failed, _ = child.finish(60)
    assert (held, wanted) == (0, 1)
    assert "file of this machine" in failed[str(place.paths[0])]


def test_a_daemon_of_this_node_reads_through_the_shared_tier(place: Place) -> None:
    with place.daemon("a") as child:
        child.finish(60)
    before = place.sent_bytes()
    with place.daemon("b", into="local") as child:
        assert child.finish(60)[:4] == [6, 6, 6, {}]
    assert place.sent_bytes() == before
    assert len(list((place.tmp_path / "node-b" / "shards").iterdir())) == 6


def test_what_lies_behind_many_that_are_missing_is_not_asked_for(tmp_path: Path) -> None:
    class Counted(SharedTarget):
        asked = 0

        def holds(self, shard: Shard) -> bool:
            self.asked += 1
            return super().holds(shard)

    objects = Objects(str(tmp_path), None)
    shards = list(ShardList(expand_urls("http://host/{0000..0999}.tar"), None))
    for shard in shards[:100]:
        objects.write(f"shards/{shard.digest}/index", b"written last")
    with closing(Counted(SharedTier(objects, Counters()))) as target:
        assert target.missing(shards) == shards[100:]
        assert 164 <= target.asked < 180
        before = target.asked
        assert target.missing(shards) == shards[100:]  # what was seen to be there isn't asked for again
        assert target.asked - before < 80
        for shard in shards[100:]:
            objects.write(f"shards/{shard.digest}/index", b"written last")
        assert target.missing(shards) == []
