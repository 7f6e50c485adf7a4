"""The daemon: what is wanted is held in the end, whatever else happens; on a real server, with real files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from streamload.cache.demand import DemandFile
from streamload.cache.shard import Shard, ShardList
from streamload.cache.tier import Tier
from streamload.daemon.daemon import Daemon
from streamload.daemon.demand import ListDemand, PrefetchWindow
from streamload.daemon.executor import LocalExecutor, LocalOptions
from streamload.daemon.options import DaemonOptions, ServiceOptions
from streamload.daemon.preemption import Notice
from streamload.daemon.recipes import Recipes
from streamload.daemon.service import Service
from streamload.daemon.status import Status
from streamload.daemon.targets import LocalTarget
from streamload.daemon.task_origins import TaskOrigins, Throttle
from streamload.errors import SharedTierDenied, SharedTierError
from streamload.metrics import Counters
from streamload.origins.origin import OriginOptions
from streamload.testing.server import Fault, ShardServer
from streamload.testing.shards import write_shards
from streamload.urls import expand_urls

ORIGIN = OriginOptions(
    connect_seconds=60, stall_seconds=60, attempts=2, backoff_seconds=0.01, backoff_limit_seconds=0.05
)
ONCE = DaemonOptions(concurrency=2, once=True, look_seconds=0.05, retry_seconds=0.05, origin=ORIGIN)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "origin", [6, 5, 7, 4])
    with ShardServer(tmp_path / "origin") as server:
        yield server


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path / "tier", 1 << 30)


def shards_of(server: ShardServer) -> ShardList:
    return ShardList(expand_urls(f"{server.url}/{{00000..00003}}.tar"), None)


def daemon(shards: ShardList, tier: Tier, options: DaemonOptions = ONCE, **more: Any) -> Daemon:
    wanted = more.pop("wanted", None) or ListDemand(shards, PrefetchWindow())
    throttle = more.pop("throttle", None) or Throttle(None)
    target, counts = LocalTarget(tier), Counters()
    origins = TaskOrigins(counts, None, options.origin, throttle, Recipes())
    local = LocalOptions(options.concurrency, no_room_seconds=options.no_room_seconds)
    executor = LocalExecutor(tier, target, origins.open, local, counts=counts)
    return Daemon(wanted, target, executor, options=options, **more)


def held(tier: Tier) -> set[str]:
    return {path.name for path in tier.own("shards")}


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def running(one: Daemon, notice: Notice) -> Iterator[list[Status]]:
    """A daemon in a thread, told to end with the block."""
    ended: list[Status] = []
    thread = threading.Thread(target=lambda: ended.append(one.run(notice)))
    thread.start()
    try:
        yield ended
    finally:
        notice.give("the test", 30)
        thread.join()


def test_once_brings_all_and_each_byte_once(server: ShardServer, tier: Tier) -> None:
    shards = shards_of(server)
    status = daemon(shards, tier).run(Notice())
    assert held(tier) == {shard.digest for shard in shards}
    assert (status.wanted, status.held, status.done, status.failed) == (4, 4, 4, {})
    assert status.is_complete
    sizes = sum(path.stat().st_size for path in server.root.glob("*.tar"))
    assert status.bytes_arrived == sizes
    again = daemon(shards, tier).run(Notice())
    assert (again.held, again.done, again.bytes_arrived) == (4, 0, 0)


def test_what_a_look_finds_held_before_its_results_are_here_counts_as_done(
    server: ShardServer, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = daemon(shards_of(server), tier, DaemonOptions(look_seconds=0.01, once=True, origin=ORIGIN))
    monkeypatch.setattr(
        one._target, "deliver", lambda shard, _: until(lambda: shard.digest not in one._missing)
    )
    status = one.run(Notice())
    assert (status.held, status.done, status.failed) == (4, 4, {})


def test_a_shard_that_cant_be_had_is_named_and_no_verdict_is_left(server: ShardServer, tier: Tier) -> None:
    (server.root / "00002.tar").unlink()
    status = daemon(shards_of(server), tier).run(Notice())
    assert (status.held, status.done) == (3, 3)
    assert list(status.failed) == [f"{server.url}/00002.tar"]
    assert "404" in status.failed[f"{server.url}/00002.tar"]
    assert not status.is_complete
    assert list(tier.own("gone")) == []


def test_what_failed_is_tried_again_until_it_is_there(server: ShardServer, tier: Tier) -> None:
    server.misbehave("00001.tar", Fault(status=503, first=6))
    notice = Notice()
    going_on = DaemonOptions(look_seconds=0.05, retry_seconds=0.05, origin=ORIGIN)
    one = daemon(shards_of(server), tier, going_on)
    with running(one, notice):
        until(lambda: one.status().failed)
        until(lambda: one.status().is_complete)
    assert one.status().failed == {}


def test_what_is_taken_away_is_brought_again(server: ShardServer, tier: Tier) -> None:
    shards, notice = shards_of(server), Notice()
    one = daemon(shards, tier, DaemonOptions(look_seconds=0.05, origin=ORIGIN))
    with running(one, notice):
        until(lambda: len(held(tier)) == 4)
        tier.trash(tier.published(shards[1].digest))
        until(lambda: len(held(tier)) == 4)


def test_a_notice_lets_what_is_worked_on_come_to_its_end(server: ShardServer, tier: Tier) -> None:
    shards, notice = shards_of(server), Notice()
    server.stop_after(0.5)
    one = daemon(shards, tier, ONCE)
    with running(one, notice) as ended:
        until(lambda: len(one.status().working) == 2 and len(server.log) == 2)
        notice.give("aws", 120)
        until(lambda: "aws" in one.status().notice)
        server.go_on()
    assert ended[0].done == 2
    assert ended[0].held == 2
    assert len(held(tier)) == 2


def test_what_doesnt_fit_into_the_notice_is_left_for_others(server: ShardServer, tier: Tier) -> None:
    shards, notice = shards_of(server), Notice()
    server.stop_after(0.5)
    one = daemon(shards, tier, ONCE)
    with running(one, notice) as ended:
        until(lambda: len(server.log) == 2)
        notice.give("gcp", 0.3)
    assert ended[0].done == 0
    assert ended[0].working == ()
    server.go_on()
    before = sum(request.sent for request in server.log)
    status = daemon(shards, tier).run(Notice())  # what had arrived by then is taken up
    assert status.held == 4
    sizes = sum(path.stat().st_size for path in server.root.glob("*.tar"))
    assert status.bytes_arrived < sizes
    assert before > 0


def test_two_daemons_of_one_node_share_the_work(server: ShardServer, tier: Tier, tmp_path: Path) -> None:
    shards = shards_of(server)
    ended: list[Status] = []
    threads = [
        threading.Thread(target=lambda: ended.append(daemon(shards, Tier(tmp_path / "tier")).run(Notice())))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes = sum(path.stat().st_size for path in server.root.glob("*.tar"))
    assert sum(status.bytes_arrived for status in ended) == sizes
    assert all(status.is_complete for status in ended)


def test_no_room_is_a_failure_that_says_so(server: ShardServer, tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tiny", 64 << 10)
    with closing(DemandFile(tier.root / "runs")) as demand_file:
        options = DaemonOptions(once=True, look_seconds=0.05, no_room_seconds=0.2, origin=ORIGIN)
        status = daemon(shards_of(server), tier, options, announce=demand_file.announce).run(Notice())
    assert status.failed
    assert all("no room" in why or "larger" in why for why in status.failed.values())


def test_a_tier_that_is_too_small_keeps_what_is_needed_first(server: ShardServer, tmp_path: Path) -> None:
    shards = shards_of(server)
    largest = max(path.stat().st_size for path in server.root.glob("*.tar"))
    tier = Tier(tmp_path / "small", 2 * (largest * 9 // 8 + (96 << 10)))
    with closing(DemandFile(tier.root / "runs")) as demand_file:
        options = DaemonOptions(
            concurrency=1, once=True, look_seconds=0.05, no_room_seconds=0.3, retry_seconds=9, origin=ORIGIN
        )
        status = daemon(shards, tier, options, announce=demand_file.announce).run(Notice())
    brought = [shard.digest in held(tier) for shard in shards]
    assert brought[:2] == [True, True]
    assert sorted(status.failed) == [s.name for s, here in zip(shards, brought, strict=True) if not here]


def test_a_list_with_needs_comes_whole(server: ShardServer, tier: Tier) -> None:
    shards = shards_of(server)
    with closing(DemandFile(tier.root / "runs")) as trainer:
        trainer.announce([shards[2].digest])
        found = ListDemand(shards, PrefetchWindow(), tier.root / "runs").look(lambda shard: 1.0)
    assert found == [shards[2], shards[0], shards[1], shards[3]]


def test_what_runs_on_the_node_need_next_comes_first(server: ShardServer, tier: Tier) -> None:
    shards = shards_of(server)
    wanted = ListDemand(shards, PrefetchWindow(size_bytes=1), tier.root / "runs")
    with closing(DemandFile(tier.root / "runs")) as trainer:
        trainer.announce([shards[2].digest, shards[3].digest, shards[0].digest])
        assert wanted.look(lambda shard: 1.0) == [shards[2]]
        everything = ListDemand(shards, PrefetchWindow(size_bytes=100), tier.root / "runs")
        found = everything.look(lambda shard: 1.0)
        assert found == [shards[2], shards[3], shards[0], shards[1]]
        own = ListDemand(shards, PrefetchWindow(size_bytes=1), tier.root / "runs", trainer.path)
        assert own.look(lambda shard: 1.0) == [shards[0]]
    assert wanted.look(lambda shard: 1.0) == [shards[0]]


def test_what_a_dead_run_wanted_is_nobodys_need(server: ShardServer, tier: Tier) -> None:
    shards, runs = shards_of(server), tier.root / "runs"
    if (child := os.fork()) == 0:
        DemandFile(runs).announce([shards[3].digest])
        os._exit(0)  # as if it was killed: its plan stays
    os.waitpid(child, 0)
    assert len(list(runs.iterdir())) == 1
    wanted = ListDemand(shards, PrefetchWindow(size_bytes=1), runs)
    assert wanted.look(lambda shard: 1.0) == [shards[0]]
    with closing(DemandFile(runs)) as trainer:
        trainer.announce([shards[2].digest])
        assert wanted.look(lambda shard: 1.0) == [shards[2]]


def test_a_window_of_bytes_holds_as_much(server: ShardServer) -> None:
    shards = shards_of(server)

    def size(shard: Shard) -> float:
        return 10.0

    for window, count in ((1, 1), (10, 1), (29, 2), (30, 3), (1000, 4)):
        assert len(ListDemand(shards, PrefetchWindow(size_bytes=window)).look(size)) == count


def test_the_bandwidth_cap_holds_over_all_transfers() -> None:
    now = [0.0]
    throttle = Throttle(1000.0, clock=lambda: now[0])
    for _ in range(50):
        both = [throttle.seconds_for(1000), throttle.seconds_for(1000)]  # two transfers wait side by side
        now[0] += max(both)
    assert 99 < now[0] < 101
    now[0] += 1000  # what wasn't used isn't saved up
    throttle.seconds_for(1000)
    assert throttle.seconds_for(1000) > 1.8


def test_a_capped_daemon_brings_the_same_bytes(server: ShardServer, tier: Tier) -> None:
    class Counting(Throttle):
        taken_bytes = 0

        def seconds_for(self, count: int) -> float:
            self.taken_bytes += count
            return super().seconds_for(count)

    throttle, shards = Counting(1e6), shards_of(server)
    status = daemon(shards, tier, throttle=throttle).run(Notice())
    assert status.is_complete
    brought = [(tier.published(shard.digest) / "data").read_bytes() for shard in shards]
    assert brought == [path.read_bytes() for path in sorted(server.root.glob("*.tar"))]
    assert throttle.taken_bytes == sum(map(len, brought))


def test_a_services_bandwidth_caps_all_that_it_takes_from_origins(
    server: ShardServer, tmp_path: Path, monkeypatch: Any
) -> None:
    taken: list[tuple[float | None, int]] = []
    seconds_for = Throttle.seconds_for

    def noted(self: Throttle, count: int) -> float:
        taken.append((self._rate, count))
        return seconds_for(self, count)

    monkeypatch.setattr(Throttle, "seconds_for", noted)
    asked = ServiceOptions(
        (f"{server.url}/{{00000..00003}}.tar",),
        cache_dir=tmp_path / "cache",
        bandwidth="2MB",
        once=True,
        notices="none",
        listen="none",
    )
    with Service(asked) as service:
        assert service.run().is_complete
    assert {rate for rate, _ in taken} == {2e6}
    assert sum(count for _, count in taken) == sum(path.stat().st_size for path in server.root.glob("*.tar"))


def test_it_leaves_nothing_running(server: ShardServer, tier: Tier, no_leaks: Callable[..., Any]) -> None:
    daemon(shards_of(server), tier).run(Notice())
    with no_leaks():
        daemon(shards_of(server), tier).run(Notice())


class Refused(ListDemand):
    """A list that can't be looked at, for want of permission, in some looks."""

    kind: type[SharedTierError] = SharedTierDenied

    def __init__(self, shards: ShardList, looks: range):
        super().__init__(shards, PrefetchWindow())
        self.looks, self.count = looks, 0

    def look(self, size_of: Callable[[Shard], float]) -> list[Shard]:
        self.count += 1
        if self.count in self.looks:
            raise self.kind("the shared cache says no")
        return super().look(size_of)


def test_what_is_refused_from_the_beginning_ends_the_daemon(server: ShardServer, tier: Tier) -> None:
    one = daemon(shards_of(server), tier, wanted=Refused(shards_of(server), range(1, 1000)))
    with pytest.raises(SharedTierDenied, match="says no"):
        one.run(Notice())


def test_what_is_refused_later_is_said_once_and_waited_for(
    server: ShardServer, tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    shards = shards_of(server)
    one = daemon(
        shards,
        tier,
        DaemonOptions(look_seconds=0.05, origin=ORIGIN),
        wanted=(wanted := Refused(shards, range(3, 1000))),
    )
    with running(one, Notice()):
        until(lambda: "says no" in one.status().trouble)
        until(lambda: wanted.count > 6)
        wanted.looks = range(0)
        until(lambda: one.status().is_complete)
    assert caplog.text.count("the demand can't be read now: the shared cache says no") == 1


def test_trouble_at_the_first_look_is_said(
    server: ShardServer, tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(Refused):
        kind = SharedTierError

    status = daemon(shards_of(server), tier, wanted=Away(shards_of(server), range(1, 3))).run(Notice())
    assert status.is_complete
    assert caplog.text.count("the demand can't be read now: the shared cache says no") == 1
