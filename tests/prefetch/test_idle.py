"""Preparing in idle time: the bytes of `warm --prepare`, at a pace, within the limit, of no other version."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamload.cache.demand import DemandFile
from streamload.cache.freshness import Freshness
from streamload.cache.shard import Shard, ShardList, version_of
from streamload.cache.tier import Tier
from streamload.daemon.warm import warm
from streamload.derived.prepare.preparation import Preparation
from streamload.metrics import Counters
from streamload.origins.origin import Version
from streamload.prefetch.idle import IdlePace, IdlePreparer
from streamload.shards.index import IndexReader
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from streamload.urls import expand_urls
from tests.support.tiers import flip, payload_start, until

COUNTS = [30, 8, 8]
RECIPE = Preparation.parse("raw-32")


class Place:
    """A tier that has some shards as they are, and what `warm --prepare` makes of them."""

    def __init__(self, root: Path):
        self.root = root
        write_shards(root / "data", COUNTS, seed=3, options=ShardOptions(image_side=(200, 300)))
        self.server = ShardServer(root / "data")
        urls = [f"{self.server.url}/{number:05d}.tar" for number in range(len(COUNTS))]
        warm(urls, cache_dir=root / "warm", cache_size="1GB", prepare=RECIPE)
        warm(urls, cache_dir=root / "tier", cache_size="1GB")
        self.shards = ShardList(expand_urls(urls), None, RECIPE.name)
        self.tier, self.counts = Tier(root / "tier"), Counters()
        self.freshness = self.log("run")
        self.asked = len(self.server.log)

    def log(self, run: str, *, each_epoch: bool = False) -> Freshness:
        """A version log; where each epoch begins another, versions are current once the run has asked."""
        ask = (lambda shard, stop: Version()) if each_epoch else None
        freshness = Freshness(self.tier, run, each_epoch=each_epoch, ask=ask, counts=self.counts)
        freshness.begin("0")
        return freshness

    def prepare(
        self, is_idle: Callable[[], bool] = lambda: True, freshness: Freshness | None = None
    ) -> IdlePreparer:
        return IdlePreparer(
            *(self.tier, self.shards, RECIPE.derive, freshness or self.freshness),
            counts=self.counts, share=1.0, is_idle=is_idle,
        )  # fmt: skip

    def form(self, number: int) -> Shard:
        form = self.shards[number].prepared
        assert form is not None
        return form

    def has(self, number: int) -> bool:
        """Whether a shard is prepared; then its bytes are those that `warm --prepare` makes."""
        path = self.tier.published(self.form(number).digest)
        if not path.exists():
            return False
        expected = Tier(self.root / "warm").published(self.form(number).digest)
        assert (path / "data").read_bytes() == (expected / "data").read_bytes()
        return True

    def part_bytes(self, number: int) -> int:
        """How much of a prepared form has been written."""
        parts = self.tier.parts(self.form(number).digest)
        return sum((part / "data").stat().st_size for part in parts if (part / "data").exists())


class Gate:
    """Idle until the first shard is being written, then not, until it is opened."""

    def __init__(self, place: Place):
        self._place = place
        self.is_open = False
        self.holds = threading.Event()

    def __call__(self) -> bool:
        if not self.is_open and self._place.part_bytes(0):
            self.holds.set()
            return False
        return True


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.freshness.close()
    place.server.close()


def test_all_is_prepared_once_from_the_copies_alone_by_however_many(place: Place) -> None:
    preparers = [place.prepare() for _ in range(3)]
    until(lambda: all(map(place.has, range(len(COUNTS)))))
    for each in preparers:
        each.close()
    assert place.counts.snapshot().shards_published == len(COUNTS)
    assert len(place.server.log) == place.asked
    assert not list(place.tier.own("parts"))


def test_nothing_is_prepared_while_there_is_other_work(place: Place) -> None:
    gate = Gate(place)
    preparer = place.prepare(gate)
    assert gate.holds.wait(60)
    written = place.part_bytes(0)
    time.sleep(0.3)
    assert place.part_bytes(0) == written
    assert not place.has(0)
    gate.is_open = True
    until(lambda: place.has(0))
    preparer.close()


def test_the_work_is_a_share_of_the_processor_at_most() -> None:
    """The pauses follow from the CPU time of the thread: work ÷ (work + pauses) is the share."""
    paused: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            paused.append(timeout or 0.0)
            return False

    def work(share: float) -> None:
        pace = IdlePace(share, lambda: True, Stop())
        for _ in range(200):
            sum(range(20_000))
            pace.keep()
        worked.append(time.thread_time())

    worked: list[float] = []
    for share in (0.1, 1.0):  # each in a thread whose CPU time begins at 0
        thread = threading.Thread(target=work, args=(share,))
        thread.start()
        thread.join()
        if share == 1.0:
            assert not paused
        else:
            assert worked[0] <= share * (worked[0] + sum(paused)) * 1.2
        paused.clear()


def test_one_that_stops_half_way_is_continued_to_the_same_bytes(place: Place) -> None:
    gate = Gate(place)
    preparer = place.prepare(gate)
    assert gate.holds.wait(60)
    preparer.close()
    assert place.part_bytes(0)
    again = place.prepare()
    until(lambda: place.has(0))
    again.close()
    assert place.tier.counts.snapshot().shards_taken_over == 1


def test_one_that_is_killed_half_way_leaves_what_the_next_one_continues(place: Place) -> None:
    child = os.fork()
    if not child:
        try:
            place.prepare(Gate(place), place.log("child"))
            time.sleep(600)
        finally:
            os._exit(1)
    until(lambda: place.part_bytes(0) > 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not place.has(0)
    again = place.prepare()
    until(lambda: all(map(place.has, range(len(COUNTS)))))
    again.close()
    assert not list(place.tier.own("parts"))


def test_a_damaged_copy_is_never_prepared_but_removed(place: Place) -> None:
    copy = place.tier.published(place.shards[1].digest)
    flip(copy / "data", payload_start(copy, 5) + 40)
    preparer = place.prepare()
    until(lambda: place.has(0) and place.has(2))
    preparer.close()
    assert not place.has(1)
    assert not copy.exists()
    assert place.tier.counts.snapshot().checksum_failures == 1


def test_where_the_copy_goes_the_prepared_form_is_left_to_others(place: Place) -> None:
    """Whoever needs the shard then mustn't wait for one that is paused."""
    gate = Gate(place)
    preparer = place.prepare(gate)
    assert gate.holds.wait(60)
    place.tier.trash(place.tier.published(place.shards[0].digest))
    part = None

    def claimed() -> bool:
        nonlocal part
        part = place.tier.claim(place.form(0).digest)
        return part is not None

    until(claimed)
    assert part is not None
    part.discard()
    preparer.close()


def test_a_version_that_the_run_no_longer_reads_is_not_published(place: Place) -> None:
    freshness, gate = place.log("other", each_epoch=True), Gate(place)
    for shard in place.shards:
        with IndexReader(place.tier.published(shard.digest)) as index:
            freshness.agree(shard, version_of(index))
    preparer = place.prepare(gate, freshness)
    assert gate.holds.wait(60)
    freshness.begin("1")
    gate.is_open = True
    until(lambda: repr(preparer) == "<IdlePreparer 1 looks, 0 failed>")
    preparer.close()
    assert not any(map(place.has, range(len(COUNTS))))
    freshness.close()


def test_without_room_nothing_is_evicted_that_a_run_may_need_and_the_limit_holds(place: Place) -> None:
    tier = place.tier
    tier.budget.limit.set(tier.used_bytes + 100_000)
    demand = DemandFile(tier.root / "runs")
    demand.announce([shard.digest for shard in place.shards])
    preparer = place.prepare()
    until(lambda: "1 looks" in repr(preparer))
    assert not all(map(place.has, range(len(COUNTS))))
    assert tier.used_bytes <= tier.limit_bytes
    assert all(tier.has_whole(shard) for shard in place.shards)
    preparer.close()
    demand.close()


def test_a_copy_whose_prepared_form_has_come_is_evicted_first_unless_it_is_opened(place: Place) -> None:
    tier = place.tier
    preparer = place.prepare()
    until(lambda: all(map(place.has, range(len(COUNTS)))))
    preparer.close()
    copies = [tier.published(shard.digest) for shard in place.shards]
    for number in range(len(COUNTS)):
        os.utime(tier.published(place.form(number).digest), (1, 1))  # opened long ago
    os.utime(copies[0])
    excess = tier.budget.excess(0, lambda held: True, ())
    assert {held.path for held in excess[:2]} == set(copies[1:])
