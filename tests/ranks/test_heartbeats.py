"""Which ranks have died or fallen silent, by what they write into a store of torch.distributed."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.distributed import HashStore, TCPStore

from streamload.errors import RankFailed
from streamload.node import own_address
from streamload.ranks import distributed
from streamload.ranks.agreement import Agreement
from streamload.ranks.heartbeats import GONE_SECONDS, SILENT_SECONDS, Heartbeats, ranges_of
from streamload.ranks.monitor import Ranks
from streamload.ranks.store import wait_for_keys
from tests.support.kills import Child, Stage
from tests.support.tiers import until

RANKS = 4


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ranks(clock: Clock) -> list[Ranks]:
    """Two ranks on each of two nodes, which have all begun an epoch."""
    store = HashStore()
    made = [Ranks(store, rank, RANKS) for rank in range(RANKS)]
    for each in made:
        each.heartbeats = Heartbeats(store, each.rank, RANKS, clock)
        each.host = f"host-{each.rank // 2}"
        each.heartbeats.beat(each.host)
        each.report("goes on")
    made[0].read_reports()
    assert made[0].heartbeats.look() == []
    return made


def test_a_node_without_heartbeats_is_named_on_all_ranks(
    ranks: list[Ranks], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.now += SILENT_SECONDS / 2
    for each in ranks[:2]:
        each.heartbeats.beat(each.host)
    ranks[0].report_silence()
    assert not caplog.messages
    clock.now += SILENT_SECONDS / 2
    ranks[0].report_silence()
    ranks[1].read_reports()
    line = (
        f"ranks 2–3 of 4 on host-1: no heartbeat for {SILENT_SECONDS:.0f} s. The node is down or cut off, or "
        f"its processes have ended or are stopped"
    )
    assert caplog.messages == [line, line]
    ranks[0].report_silence()
    assert len(caplog.messages) == 2
    assert ranks[0].heartbeats.gone() == {}
    clock.now += GONE_SECONDS
    assert ranks[0].heartbeats.gone().keys() == {2, 3}
    for each in (ranks[1], ranks[3]):
        each.heartbeats.beat(each.host)
    assert ranks[0].heartbeats.look() == []
    assert ranks[0].heartbeats.gone().keys() == {2}


def test_a_decision_ends_with_the_name_and_host_of_a_rank_that_falls_silent_also_of_rank_0(
    ranks: list[Ranks], clock: Clock
) -> None:
    ranks[3].raise_if_ended("agreed on the weights")
    clock.now += GONE_SECONDS
    ranks[0].heartbeats.look()
    message = (
        "one of 4 ranks ended while all agreed on the weights: rank {} of 4 on host-{}: "
        f"no heartbeat for {GONE_SECONDS:.0f} s"
    )
    for waiting, silent in ((0, 1), (3, 0)):
        with pytest.raises(RankFailed) as caught:
            ranks[waiting].raise_if_ended("agreed on the weights")
        assert str(caught.value) == message.format(silent, silent // 2)
    ranks[0].heartbeats.beat(ranks[0].host)
    ranks[3].raise_if_ended("agreed on the weights")


def test_ranks_between_two_epochs_are_not_silent(ranks: list[Ranks], clock: Clock) -> None:
    for each in ranks:
        each.heartbeats.beat(each.host, is_running=False)
    clock.now += 100 * SILENT_SECONDS
    assert ranks[0].heartbeats.look() == []
    assert ranks[0].heartbeats.gone() == {}


def test_a_process_of_this_machine_that_has_died_is_seen_at_once(ranks: list[Ranks]) -> None:
    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
    child.start()
    store, prefix = ranks[0].store, ""
    child.join()
    gone = own_address().rpartition(".")[0].rpartition(".")[0] + f".{child.pid}.1"
    prefix = f"streamload/beat/{own_address().partition('.')[0]}"
    number = store.add(prefix, 1)
    store.set(f"{prefix}/{number}", json.dumps([3, gone]))
    until(lambda: ranks[1].heartbeats.gone() == {3: "its process died"})


def test_ranks_in_words() -> None:
    assert ranges_of([3]) == "rank 3"
    assert ranges_of([5, 2, 3]) == "ranks 2–3, 5"


def test_ranks_are_named_with_their_hosts_where_these_differ(ranks: list[Ranks]) -> None:
    assert ranks[0].name_of(3) == "rank 3 of 4 on host-1"
    assert ranks[0].name_of(0) == "rank 0 of 4 on host-0"
    alone = Ranks(HashStore(), 0, 2)
    assert alone.name_of(1) == "rank 1 of 2"


def test_one_rank_decides_without_asking_another() -> None:
    assert Agreement(1).decide("it", 3, lambda values: values) == [3]


def sockets() -> int:
    """How many this process has open."""
    targets = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(target).startswith("socket:") for target in targets)


def test_decisions_open_no_connection_and_leave_little_in_the_store() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def as_rank(rank: int) -> Callable[[Stage], Any]:
        def decides(stage: Stage) -> Any:
            store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
            distributed.store_of = lambda _: store  # type: ignore[assignment]
            torch.distributed.get_rank = lambda: rank  # type: ignore[assignment]
            before, agreement, left = sockets(), Agreement(RANKS), []
            for step in range(4):
                decision = agreement.decide("the sum", [step, rank], lambda values: [*map(sum, values)])
                assert decision == [step + each for each in range(RANKS)]
                left.append(store.num_keys())
            return [sockets() - before, left]

        return decides

    with ExitStack() as stack:
        ranks = [stack.enter_context(Child(as_rank(rank))) for rank in range(RANKS)]
        results = [rank.finish(60) for rank in ranks]
    assert [opened for opened, _ in results] == [0] * RANKS
    assert all(left[-1] <= left[1] + 3 for _, left in results)


@pytest.mark.parametrize("waits_in_the_store", [False, True])
def test_a_wait_that_times_out_prints_nothing(waits_in_the_store: bool, capfd: Any) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    if waits_in_the_store:
        with pytest.raises(RuntimeError):
            store.wait(["key"], timedelta(seconds=0.1))
        assert "timed out" in capfd.readouterr().err  # which is why none of ours does
        return
    assert not wait_for_keys(store, ["key"], 0.1)
    server.set("key", "")
    assert wait_for_keys(store, ["key"], 60.0)
    assert capfd.readouterr().err == ""
