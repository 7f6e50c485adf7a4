"""A rank that waits for its data, or has failed, is known to all ranks of the run, whatever they are doing.

How it shows that it works: two real ranks on two nodes step together; the shards of one are taken away, and
the other sits in an all-reduce meanwhile. What each logged and raised is compared. The log that they share is
tried by itself in a store of torch.distributed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing

import streamload
from streamload import Cache, Order, Workers
from streamload.errors import OriginOutage, RankFailed
from streamload.ipc import ControlBlock
from streamload.loader import worker_config
from streamload.metrics.findings import SlowestRank
from streamload.origins.origin import OriginOptions
from streamload.ranks import distributed, monitor
from streamload.ranks.loaders import RankLoaders
from streamload.ranks.monitor import RankMonitor, Ranks
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from streamload.worker import blocked
from tests.support.tiers import until

WAIT_SECONDS = 2


def key_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def in_a_hurry() -> None:
    """Tenths of seconds where a training has seconds."""
    monitor._POLL_SECONDS, monitor._STILL_SECONDS = 0.1, 0.3
    monitor._WAIT_SECONDS = monitor._OUTAGE_SECONDS = 0.5
    blocked.REPORT_SECONDS = 0.1
    worker_config.OriginOptions = functools.partial(  # type: ignore[attr-defined]
        OriginOptions, attempts=2, backoff_seconds=0.01, backoff_limit_seconds=0.05
    )


def train(rank: int, urls: list[str], place: Path) -> None:
    """One of two ranks: steps with the other, and writes down what it logged and how it ended."""
    in_a_hurry()
    os.environ["STREAMLOAD_ORIGIN_WAIT"] = str(WAIT_SECONDS)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("streamload").addHandler(handler)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2
    )
    loader = streamload.make_loader(
        urls[rank],
        workers=Workers(map_sample=key_of, multiprocessing_context="fork"),
        batch_size=4,
        num_workers=1,
        order=Order(num_batches=1000, groups=2, rank=rank, world_size=2, lanes=1),
        shuffle=0,
        cache=Cache(ahead="1KB"),
        cache_dir=place / f"node-{rank}",
        cache_size="1GB",
    )
    ends = []
    batches = iter(loader)
    try:
        for step, _ in enumerate(batches):
            torch.distributed.all_reduce(torch.ones(1))
            if step == 1:
                (place / f"trains-{rank}").touch()
    except Exception as exc:
        ends.append([type(exc).__name__, str(exc)])
    said.append(f"outages: {loader.stats().origin_outages}, slowest: {loader.observer.slowest}")
    (place / f"{rank}.json").write_text(json.dumps([said, ends]))
    if rank == 0:  # the all-reduce has ended by the other's end, and the training asks for another batch
        with pytest.raises(RankFailed) as caught:
            next(batches)
        ends.append(["RankFailed", str(caught.value)])
    loader.close()
    (place / f"{rank}.json").write_text(json.dumps([said, ends]))
    os._exit(0)  # gloo waits for a peer that has gone


@pytest.mark.deep
def test_all_ranks_are_told_which_one_waits_for_what_and_until_when_and_end_together(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [12] * 12, seed=5)
    with ShardServer(tmp_path / "data") as near, ShardServer(tmp_path / "data") as far:
        urls = [f"{server.url}/{{00000..00011}}.tar" for server in (near, far)]
        far.stop_after(0.9)  # of each shard: so that none is held when they go
        context = torch.multiprocessing.spawn(train, (urls, tmp_path), nprocs=2, join=False)
        until(lambda: (tmp_path / "trains-1").exists())
        far.misbehave("*", Fault(status=404))
        far.go_on()
        while not context.join():
            pass
        (said, ends), (said_there, ends_there) = (
            json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)
        )
        url = far.url
    assert any(line.startswith("outages: 0, slowest: rank 1") for line in said)
    assert "outages: 1, slowest: None" in said_there
    waits = [line for line in said if line.startswith("rank 1 of 2 has waited")]
    assert waits
    assert any(f"for {url}/000" in line and "404 Not Found" in line for line in waits)
    assert any("retried until" in line and "STREAMLOAD_ORIGIN_WAIT" in line for line in waits)
    assert any(line.startswith("rank 1 of 2 has waited") for line in said_there)
    ((kind, text),) = ends_there
    assert kind == "OriginOutage"
    assert text.startswith("rank 1 of 2: ")
    assert f"{url}/000" in text
    assert "404 Not Found" in text
    failed = [line for line in said if line.startswith("rank 1 of 2 has failed")]
    assert f"OriginOutage: {url}/000" in failed[0]
    assert ends[0][0] == "RuntimeError"  # gloo's, as the other has gone
    assert ends[1][1].startswith("rank 1 of 2 has failed: OriginOutage: ")


@pytest.fixture
def ranks() -> list[Ranks]:
    store = torch.distributed.HashStore()
    return [Ranks(store, rank, 3) for rank in range(3)]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.message for record in caplog.records]
    caplog.clear()
    return said


def test_several_ranks_that_wait_are_one_line(ranks: list[Ranks], caplog: pytest.LogCaptureFixture) -> None:
    ranks[2].report("waits", "30 s for b.tar")
    ranks[1].report("waits", "31 s for a.tar")
    ranks[0].read_reports()
    assert messages(caplog) == ["rank 1 of 3 has waited 31 s for a.tar (and 1 more)"]
    ranks[0].read_reports()
    ranks[1].report("goes on")
    ranks[0].read_reports()
    assert messages(caplog) == ["rank 1 of 3 continues"]


def test_a_rank_that_waits_no_longer_when_others_look_is_no_line(
    ranks: list[Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    ranks[1].report("waits", "30 s for a.tar")
    ranks[1].report("goes on")
    ranks[0].read_reports()
    assert not messages(caplog)


class Waits:
    """A rank's own waits, as its observer has them."""

    def __init__(self) -> None:
        self.slowest: SlowestRank | None = None
        self.ticked = threading.Event()

    def compare_waits(self, compare: Callable[[float], SlowestRank | None]) -> None:
        self.slowest = compare(0.0)

    def tick(self) -> None:
        self.ticked.set()


def test_the_rank_that_waits_most_is_known_to_the_others(ranks: list[Ranks]) -> None:
    assert [rank.compare_waits(0.0) for rank in ranks] == [None, None, None]
    assert ranks[1].compare_waits(0.3) is None
    assert ranks[0].compare_waits(0.0) == SlowestRank(1, 0.3)
    assert ranks[2].compare_waits(0.2) == SlowestRank(1, 0.3)
    assert ranks[2].compare_waits(0.5) is None
    assert [rank.compare_waits(0.3) for rank in ranks] == [SlowestRank(2, 0.5), SlowestRank(2, 0.5), None]
    assert ranks[2].compare_waits(0.1) is None
    assert ranks[0].compare_waits(0.0) == SlowestRank(2, 0.1)
    assert ranks[0].compare_waits(0.4) is None
    assert ranks[2].compare_waits(0.1) == SlowestRank(0, 0.4)


def test_a_rank_that_has_gone_is_not_the_slowest_for_long(ranks: list[Ranks]) -> None:
    ranks[1].compare_waits(0.6)
    looks = [ranks[0].compare_waits(0.1) for _ in range(6)]
    assert looks[0] == SlowestRank(1, 0.6)
    assert looks[-1] is None
    assert ranks[2].compare_waits(0.0) == SlowestRank(0, 0.1)


def test_while_a_training_stands_still_its_thread_looks_at_the_alerts(
    ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_STILL_SECONDS", 0.0)
    waits = Waits()
    with watched(ranks[0], monkeypatch, waits) as (_, control):
        control.want(False)
        assert waits.ticked.wait(60)


@contextlib.contextmanager
def watched(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, waits: Waits | None = None
) -> Iterator[tuple[RankMonitor, ControlBlock]]:
    monkeypatch.setattr(monitor, "_POLL_SECONDS", 0.01)
    control = ControlBlock(1)
    waits = waits or Waits()
    watch = RankMonitor(ranks, control, waits.compare_waits, waits.tick)
    yield watch, control
    watch.close()
    assert threading.active_count() == 1 or not watch._thread.is_alive()


def test_a_rank_that_has_failed_ends_the_others_until_it_goes_on(
    ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OriginOutage("a.tar: the server answers 404 Not Found")
    with watched(ranks[0], monkeypatch) as (one, _), watched(ranks[1], monkeypatch) as (other, _):
        other.fail(error)
        assert str(error) == "rank 1 of 3: a.tar: the server answers 404 Not Found"
        ranks[0].read_reports()
        for _ in range(2):
            with pytest.raises(RankFailed, match=r"rank 1 of 3 has failed: OriginOutage: a\.tar: the"):
                one.check()
        one.fail(RankFailed("rank 1 of 3 has failed"))  # that is known
        assert not ranks[0].has_failed
        other.check()  # it asks for another batch
        one.check()
        other.check()


def test_the_error_of_a_worker_is_told_without_its_traceback(
    ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = (
        "Caught OriginOutage in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    )
    error = OriginOutage(f'{text}  File "x.py"\nstreamload.errors.OriginOutage: a.tar: 404\n')
    with watched(ranks[1], monkeypatch) as (other, _):
        other.fail(error)
    ranks[0].read_reports()
    assert messages(caplog) == ["rank 1 of 3 has failed, and with it the run: OriginOutage: a.tar: 404"]


def test_a_training_that_takes_steps_never_reads_the_log(
    ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks[1].report("waits", "30 s for a.tar")
    with watched(ranks[0], monkeypatch) as (watch, control):
        looked = threading.Event()
        monkeypatch.setattr(watch, "_report_wait", looked.set)
        for _ in range(3):
            control.want(True)
            control.want(False)
            looked.clear()
            assert looked.wait(60)
        assert not messages(caplog)
        monkeypatch.setattr(monitor, "_STILL_SECONDS", 0.0)
        until(lambda: caplog.records)


def test_a_store_that_has_gone_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def add(self, key: str, n: int) -> int:
            raise torch.distributed.DistNetworkError("failed to recv, got 0 bytes")

        def set(self, key: str, value: str) -> None:
            raise torch.distributed.DistNetworkError("failed to send")

        def check(self, keys: list[str]) -> bool:
            raise torch.distributed.DistNetworkError("failed to recv, got 0 bytes")

    with watched(Ranks(Gone(), 0, 2), monkeypatch) as (watch, control):
        monkeypatch.setattr(monitor, "_STILL_SECONDS", 0.0)
        control.want(False)
        watch._thread.join(60)
        watch.check()
        watch.fail(OriginOutage("a.tar"))


class Counted:
    """A store that counts its requests, but for looks at whether something is there."""

    def __init__(self, store: Any):
        self.store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += name != "check"
        return getattr(self.store, name)


def decide_together(rank: int, world_size: int, file: Path, answers: Any) -> None:
    """Agree on the sum of the ranks that take part, and say how many requests that took."""
    distributed._AGREE_SECONDS = 0.5 if file.name == "without" else 60.0
    distributed._FIRST_LOOK_SECONDS = 60.0
    store = Counted(torch.distributed.FileStore(str(file), world_size))
    distributed.store_of = lambda _: store  # type: ignore[assignment]
    torch.distributed.get_rank = lambda: rank  # type: ignore[assignment]
    said: list[str] = []
    distributed.logger.warning = lambda text, *values: said.append(text % values)  # type: ignore[assignment]
    decision = distributed.agree("sum", rank + 1, sum, world_size)
    answers.put((decision, store.requests, said))


@pytest.mark.parametrize(("name", "first"), [("all", 0), ("without", 1)])
def test_ranks_decide_once_by_a_few_requests_each_also_where_rank_0_takes_no_part(
    name: str, first: int, tmp_path: Path
) -> None:
    context, world_size = torch.multiprocessing.get_context("fork"), 6
    answers = context.Queue()
    ranks = [
        context.Process(target=decide_together, args=(rank, world_size, tmp_path / name, answers))
        for rank in range(first, world_size)
    ]
    for each in ranks:
        each.start()
    decisions, requests, said = zip(*(answers.get(timeout=60) for _ in ranks), strict=True)
    for each in ranks:
        each.join()
    assert len(set(decisions)) == 1
    lines = [line for of_rank in said for line in of_rank]
    if first == 0:
        assert not lines
        assert decisions[0] == sum(range(1, world_size + 1))
        assert sorted(requests)[:-1] == [2] * (world_size - 1)  # set, get
    else:
        assert any("goes on without the values of ranks [0" in line for line in lines)
        assert 0 < decisions[0] <= sum(range(2, world_size + 1))


def start_together(rank: int, world_size: int, port: int, answers: Any) -> None:
    """Decide, compare loaders and report an outage by a connection of its own; count the requests of each."""
    distributed._AGREE_SECONDS = 150.0
    store = Counted(torch.distributed.TCPStore("127.0.0.1", port, wait_for_workers=False))
    distributed.store_of = lambda _: store  # type: ignore[assignment]
    torch.distributed.get_rank = lambda: rank  # type: ignore[assignment]
    logging.disable(logging.CRITICAL)
    requests = [0]
    decision = distributed.agree("sum", rank + 1, sum, world_size)
    requests.append(store.requests)
    comparison = RankLoaders(store, rank, world_size).add({"seed": 0, "batch_size": 4})
    for _ in range(5):  # batches
        comparison.check()
    requests.append(store.requests)
    ranks = Ranks(store, rank, world_size)  # type: ignore[arg-type]
    ranks.report("waits", "30 s for https://host/000001.tar")
    store.store.add("reported", 1)
    while store.store.add("reported", 0) < world_size:
        time.sleep(0.2)
    ranks.read_reports()
    requests.append(store.requests)
    answers.put((rank, decision, [after - before for before, after in itertools.pairwise(requests)]))


def serve_store(port: Any) -> None:
    """Serve a store until killed; a process with the threads of a store had better not fork."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(server.port)
    signal.pause()


@pytest.mark.deep
def test_256_ranks_of_one_store_take_a_few_requests_each() -> None:
    context, world_size = torch.multiprocessing.get_context("fork"), 256
    answers = context.Queue()
    server = context.Process(target=serve_store, args=(answers,))
    server.start()
    port = answers.get(timeout=60)
    ranks = [
        context.Process(target=start_together, args=(rank, world_size, port, answers))
        for rank in range(world_size)
    ]
    for each in ranks:
        each.start()
    try:
        done = sorted(answers.get(timeout=100) for _ in ranks)
    finally:
        for each in (*ranks, server):
            each.kill()
            each.join()
    assert [rank for rank, _, _ in done] == [*range(world_size)]
    assert {decision for _, decision, _ in done} == {world_size * (world_size + 1) // 2}
    decide, compare, report = zip(*(requests for *_, requests in done), strict=True)
    assert sum(decide) <= 2 * world_size + 2  # its value, the decision; one reads all values at once
    assert max(compare) <= 5
    assert sum(report) <= 10 * world_size  # 5, and a few summaries of what others reported meanwhile
