"""Nodes that want the same shard at the same moment fetch it once, and wait for nobody who has gone.

How it shows that it works: trainings in processes of their own, each with a cache of its own, are brought to
where all of them want the same shards, while the origin holds back the second half of every file. The
origin's own log then says what was fetched, and the batches are those of a training that is alone.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from streamload.cache.shard import Shard, ShardList, shard_of
from streamload.cache.shared import sharing, single_flight
from streamload.cache.shared.leases import Leases
from streamload.cache.shared.sharing import SharedOptions, Sharing
from streamload.cache.shared.single_flight import SingleFlight, spare_of
from streamload.daemon.options import ServiceOptions
from streamload.daemon.service import Service
from streamload.errors import OriginStopped
from streamload.metrics import Counters
from streamload.node import is_dead_or_stopped, own_address
from streamload.order.plan import OrderOptions, pieces
from streamload.origins.origin import Version, open_origin
from streamload.testing.shards import ShardOptions
from streamload.topology import RunAttempt, Topology
from streamload.urls import expand_urls
from tests.support import flat, tiers
from tests.support.kills import Child, Stage
from tests.support.sharing import Origin, Place, opened

COUNTS = (30, 25, 40, 20)
LARGE = ShardOptions(padding_bytes=(3_000, 30_000))
SECONDS = 150.0
until = functools.partial(tiers.until, seconds=SECONDS)
pytestmark = pytest.mark.timeout(2 * SECONDS)


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    made = Origin(tmp_path / "data", COUNTS, options=LARGE)
    yield made
    made.close()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "shared"), {})


class Nodes:
    """Trainings and daemons, each a process with a cache of its own; all of them end with the block."""

    def __init__(self, origin: Origin, tmp_path: Path):
        self.origin, self.tmp_path = origin, tmp_path
        self._end = tmp_path / "end"
        self._stack = ExitStack()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.origin.server.go_on()
        self._stack.close()

    def training(self, name: str, place: Place | None, **options: Any) -> Child:
        """One epoch, then storing goes on until `finish`; its stage is "waits" once it waits for another."""
        given: dict[str, Any] = {"batch_size": 10, "num_workers": 0, "cache_size": "50GB", "seed": 5}
        if place is not None:
            given |= {"shared_cache": place.url, "shared_cache_options": place.options, "write_back": True}

        def work(stage: Stage) -> Any:
            made = {**given, **options, "cache_dir": self.tmp_path / f"node-{name}"}
            with flat.make_loader(self.origin.urls, **made) as loader:
                done = threading.Event()

                def watch() -> None:
                    while not done.wait(0.02):
                        if loader.stats().shared_waits:
                            stage.enter("waits")
                            return

                watching = threading.Thread(target=watch)
                watching.start()
                loader.set_epoch(1)
                batches = []
                for images, texts in loader:
                    digest = hashlib.blake2b(images.numpy().tobytes(), digest_size=8)
                    batches.append([digest.hexdigest(), *texts])
                done.set()
                watching.join()
                stage.enter("read")
                until(lambda: place is None or self._end.exists())
                seen = loader.stats().as_dict()
            return [batches, seen]

        return self._stack.enter_context(Child(work, limit_seconds=SECONDS))

    def daemon(self, place: Place, concurrency: int) -> Child:
        """Brings all to the shared cache, and ends."""
        options = ServiceOptions(
            urls=tuple(self.origin.urls),
            shared_cache=place.url,
            shared_cache_options=place.options,
            cache_dir=self.tmp_path / "daemon",
            cache_size="50GB",
            concurrency=concurrency,
            once=True,
            notices="none",
            listen="none",
        )

        def work(stage: Stage) -> Any:
            with Service(options) as service:
                status = service.run()
            return [status.failed, status.bytes_arrived]

        return self._stack.enter_context(Child(work, limit_seconds=SECONDS))

    def alone(self) -> Any:
        """The batches of a training without a shared cache; the origin's log begins behind it."""
        batches, _ = self.training("alone", None).finish(SECONDS)
        self.origin.server.log.clear()
        return batches

    def finish(self, trainings: list[Child]) -> tuple[list[Any], list[dict[str, Any]]]:
        """The batches and the numbers of trainings that have read all."""
        until(lambda: all(str(one.stage) == "read" or one.join(0) is not None for one in trainings))
        self._end.touch()
        found = [one.finish(SECONDS) for one in trainings]
        return [batches for batches, _ in found], [seen for _, seen in found]


@pytest.fixture
def nodes(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """They wait for a store that is starved by a busy machine, where they would go on without it."""
    monkeypatch.setattr(sharing, "_TIMEOUT_SECONDS", SECONDS)
    with Nodes(origin, tmp_path) as nodes:
        yield nodes


def stored(place: Place) -> int:
    return sum(name.endswith("/index") for name in place.objects().names("shards"))


def leased(place: Place) -> list[str]:
    return place.objects().names("leases")


def check_fetched_once(origin: Origin) -> None:
    """Nobody began a file that another had begun; one who is held up may ask again for the rest."""
    for path in origin.paths:
        assert [start for start, _ in origin.server.ranges(path.name)].count(0) == 1


@pytest.mark.parametrize("kind", ["folder", pytest.param("s3", marks=pytest.mark.deep)])
def test_three_trainings_that_start_at_once_take_the_origins_bytes_once(
    nodes: Nodes, place: Place, kind: str, request: pytest.FixtureRequest
) -> None:
    if kind == "s3":
        place = Place("s3://bucket/turns/tier", request.getfixturevalue("s3").storage_options)
    expected, origin = nodes.alone(), nodes.origin
    origin.server.stop_after(0.5)
    three = [nodes.training(name, place) for name in ("a", "b", "c")]
    until(lambda: sum(str(one.stage) == "waits" for one in three) >= 2)
    origin.server.go_on()
    until(lambda: stored(place) == len(COUNTS))
    given, seen = nodes.finish(three)
    assert given == [expected] * 3
    assert sum(one["shared_errors"] for one in seen) == 0
    check_fetched_once(origin)
    assert sum(one["origin_bytes"] for one in seen) == origin.bytes
    assert sum(one["shared_stored"] for one in seen) == len(COUNTS)
    assert sum(one["shared_waits"] for one in seen) >= 2
    assert all(one["shared_wait_seconds"] > 0 for one in seen if one["shared_waits"])
    assert leased(place) == []


@pytest.mark.parametrize(("how", "is_known"), [("killed", True), ("killed", False), ("stopped", False)])
@pytest.mark.sampled(1)
def test_a_holder_that_goes_is_not_waited_for(
    nodes: Nodes, place: Place, how: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its own node that is known at once; on others its lease doesn't change any more."""
    if not is_known:
        monkeypatch.setattr(single_flight, "own_address", lambda: "")
        monkeypatch.setitem(SingleFlight.__init__.__kwdefaults__, "lease_seconds", 2.0)
    expected, origin = nodes.alone(), nodes.origin
    origin.server.stop_after(0.5)
    holder = nodes.training("a", place)
    until(lambda: leased(place) and origin.sent > 0)
    others = [nodes.training(name, place) for name in ("b", "c")[: 1 + is_known]]
    until(lambda: all(str(one.stage) == "waits" for one in others))
    holder.kill() if how == "killed" else holder.stop()
    fetched = origin.sent
    until(lambda: origin.sent > fetched)  # one of the others has the turn
    origin.server.go_on()
    until(lambda: stored(place) == len(COUNTS))
    given, seen = nodes.finish(others)
    assert given == [expected] * len(others)
    assert sum(one["origin_bytes"] for one in seen) < 2 * origin.bytes


def test_a_shared_cache_that_goes_while_nodes_wait_in_it_is_done_without(nodes: Nodes, place: Place) -> None:
    expected, origin = nodes.alone(), nodes.origin
    origin.server.stop_after(0.5)
    trainings = [nodes.training("a", place)]
    until(lambda: leased(place))
    trainings.append(nodes.training("b", place))
    until(lambda: any(str(one.stage) == "waits" for one in trainings))
    Path(place.url).rename(nodes.tmp_path / "away")
    Path(place.url).touch()
    origin.server.go_on()
    given, seen = nodes.finish(trainings)
    assert given == [expected] * 2
    assert sum(one["shared_errors"] for one in seen) > 0


def test_where_no_lease_can_be_written_each_node_fetches_and_stores(nodes: Nodes, place: Place) -> None:
    Path(place.url).mkdir()
    (Path(place.url) / "leases").symlink_to("leases")  # it can't be opened
    expected = nodes.alone()
    training = nodes.training("a", place)
    until(lambda: stored(place) == len(COUNTS))
    given, (seen,) = nodes.finish([training])
    assert given == [expected]
    assert 0 < seen["shared_errors"] <= len(COUNTS)  # asked for once a shard, by fills side by side
    assert (seen["shared_stored"], seen["origin_bytes"]) == (len(COUNTS), nodes.origin.bytes)


@pytest.mark.parametrize("first", ["daemon", pytest.param("training", marks=pytest.mark.deep)])
def test_a_training_and_a_daemon_at_once_take_the_origins_bytes_once(
    nodes: Nodes, place: Place, first: str
) -> None:
    expected, origin = nodes.alone(), nodes.origin
    origin.server.stop_after(0.5)
    begin: dict[str, Callable[[], Child]] = {
        "daemon": lambda: nodes.daemon(place, 2),
        "training": lambda: nodes.training("a", place),
    }
    begun = {first: begin.pop(first)()}
    until(lambda: leased(place))
    begun |= {name: start() for name, start in begin.items()}
    if first == "daemon":
        until(lambda: str(begun["training"].stage) == "waits")
    origin.server.go_on()
    failed, arrived = begun["daemon"].finish(SECONDS)
    given, (seen,) = nodes.finish([begun["training"]])
    assert (failed, given) == ({}, [expected])
    assert arrived + seen["origin_bytes"] == origin.bytes
    check_fetched_once(origin)
    assert leased(place) == []


def test_a_training_that_stores_nothing_waits_for_a_daemon_too(nodes: Nodes, place: Place) -> None:
    expected, origin = nodes.alone(), nodes.origin
    origin.server.stop_after(0.5)
    daemon = nodes.daemon(place, len(COUNTS))
    until(lambda: len(leased(place)) == len(COUNTS))
    training = nodes.training("a", place, write_back=False)
    until(lambda: str(training.stage) == "waits")
    origin.server.go_on()
    given, (seen,) = nodes.finish([training])
    assert daemon.finish(SECONDS) == [{}, origin.bytes]
    assert given == [expected]
    assert seen["origin_bytes"] == 0
    check_fetched_once(origin)


class Waiter:
    """One process's turns, and how often it looked for the shard that it wants."""

    def __init__(self, origin: Origin, place: Place, **options: Any):
        self.shard = origin.shard(0)
        self.tier, self.counts = opened(place)
        assert self.tier.held(self.shard) is None
        given = {"wait_seconds": 3600.0, "stores": lambda: True, **options}
        self.turns = SingleFlight(self.tier, **given)
        self.stop = threading.Event()
        self.looks = 0
        self.is_there = False

    def look(self) -> str | None:
        self.looks += 1
        return "there" if self.is_there else None

    def find(self) -> str | None:
        return self.turns.find(self.shard, self.look, self.stop)


@pytest.fixture
def waiter(origin: Origin, place: Place) -> Iterator[Callable[..., Waiter]]:
    with ExitStack() as stack:

        def made(**options: Any) -> Waiter:
            one = Waiter(origin, place, **options)
            stack.callback(one.turns.close)
            return one

        yield made


Make = Callable[..., Waiter]


@pytest.fixture
def other(place: Place) -> Iterator[Leases]:
    """A daemon on another node."""
    with closing(Leases(place.objects(), lease_seconds=0.4)) as leases:
        yield leases


def test_the_turn_is_taken_once_and_given_back(waiter: Make, place: Place) -> None:
    one = waiter()
    assert one.find() is None
    assert one.looks == 1  # somebody might have been through in between
    assert leased(place) == [f"leases/{one.shard.digest}.json"]
    one.turns.keep(one.shard)
    one.turns.end(one.shard)
    assert len(leased(place)) == 1  # it is being stored
    one.turns.stored(one.shard)
    assert leased(place) == []


def test_what_is_there_by_then_is_not_fetched(waiter: Make, place: Place) -> None:
    one = waiter()
    one.is_there = True
    assert one.find() == "there"
    assert leased(place) == []


def test_who_has_waited_takes_what_is_there(waiter: Make, place: Place, other: Leases) -> None:
    one = waiter()
    assert other.take(one.shard.digest)
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(one.find()))
    thread.start()
    until(lambda: one.counts.snapshot().shared_waits == 1)
    assert (one.looks, found) == (0, [])
    one.is_there = True
    other.release(one.shard.digest)
    thread.join()
    assert found == ["there"]
    assert (one.looks, leased(place)) == (1, [])


def test_what_its_holder_stores_just_before_the_wait_is_not_fetched(
    waiter: Make, place: Place, other: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = waiter()
    assert other.take(one.shard.digest)
    take = one.turns._leases.take

    def take_too_late(task: str) -> bool:
        is_mine = take(task)
        one.is_there = True
        other.release(task)
        return is_mine

    monkeypatch.setattr(one.turns._leases, "take", take_too_late)
    assert one.find() == "there"
    assert one.looks == 1
    assert (one.counts.snapshot().shared_waits, leased(place)) == (0, [])


def test_the_turn_of_a_holder_that_gives_it_back_just_before_the_wait_is_taken(
    waiter: Make, place: Place, other: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = waiter()
    assert other.take(one.shard.digest)
    take, tries = one.turns._leases.take, []

    def take_too_late(task: str) -> bool:
        tries.append(task)
        is_mine = take(task)
        other.release(task)
        return is_mine

    monkeypatch.setattr(one.turns._leases, "take", take_too_late)
    assert one.find() is None
    assert len(tries) == 2
    assert leased(place) == [f"leases/{one.shard.digest}.json"]


def test_leases_that_are_never_seen_keep_no_shard_waiting(
    waiter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that takes what is written, and doesn't show it yet."""
    one = waiter()
    monkeypatch.setattr(one.turns._leases, "take", lambda task: False)
    assert one.find() is None
    assert one.counts.snapshot().shared_waits == 0


def test_a_holder_that_is_too_slow_is_waited_for_once(
    waiter: Make, other: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    one = waiter(wait_seconds=0.5)
    assert other.take(one.shard.digest)
    with caplog.at_level(logging.WARNING):
        assert one.find() is None
        waited = one.counts.snapshot()
        assert (waited.shared_waits, one.looks) == (1, 0)
        assert waited.shared_wait_seconds > 0.4
        assert one.find() is None
    assert one.counts.snapshot().shared_waits == 1
    assert len([line for line in caplog.messages if "STREAMLOAD_SHARED_WAIT" in line]) == 1


class Passing:
    """A clock that goes on when somebody waits, by an event that never comes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


@pytest.mark.parametrize("how", ["dead", "slow"])
def test_many_holders_who_bring_nothing_are_not_waited_for_one_after_the_other(
    waiter: Make, place: Place, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whoever may write leases could hold every shard in a name of its own."""
    monkeypatch.setattr(single_flight, "_SETTLE_SECONDS", 0.0)
    clock = Passing()
    one = waiter(wait_seconds=120.0, clock=clock)
    began = clock.now
    for number in range(60):
        shard = shard_of(f"http://elsewhere.invalid/{number}.tar", None)
        assert one.tier.held(shard) is None

        def show(shard: Shard = shard, number: int = number) -> None:
            beat = 7 if how == "dead" else int(clock.now)
            content = {"format": 1, "holder": f"{number:016x}", "beat": beat}
            place.objects().write(f"leases/{shard.digest}.json", json.dumps(content).encode())

        show()

        class Waits(Passing):
            def wait(self, seconds: float, show: Callable[[], None] = show) -> bool:
                show()
                return clock.wait(seconds)

        assert one.turns.find(shard, one.look, Waits()) is None  # type: ignore[arg-type]
        clock.now += 10.0  # in which it is fetched
    waited = clock.now - began - 60 * 10
    assert 120 <= waited <= 120 + (clock.now - began) / 10 + 1


def test_waits_that_bring_something_cost_nothing_of_the_budget(waiter: Make, place: Place) -> None:
    clock = Passing()
    one = waiter(wait_seconds=120.0, clock=clock)
    name = f"leases/{one.shard.digest}.json"

    class Waits(Passing):
        """The holder is through after 100 s."""

        def wait(self, seconds: float) -> bool:
            clock.wait(seconds)
            one.is_there = clock.now >= began + 100
            if one.is_there:
                place.objects().delete(name)
            else:
                write()
            return False

    def write() -> None:
        content = {"format": 1, "holder": "ab" * 8, "beat": int(clock.now)}
        place.objects().write(name, json.dumps(content).encode())

    for _ in range(8):
        began, one.is_there = clock.now, False
        write()
        assert one.turns.find(one.shard, one.look, Waits()) == "there"  # type: ignore[arg-type]


def test_a_lease_that_is_dead_or_stopped_is_taken_over(waiter: Make, place: Place) -> None:
    one = waiter(lease_seconds=0.4)
    name = f"leases/{one.shard.digest}.json"
    place.objects().write(name, json.dumps({"format": 1, "holder": "ab" * 8, "beat": 7}).encode())
    assert one.find() is None
    assert one.looks == 2  # when the wait was over, and with the lease in hand
    assert b"ab" * 8 not in (place.objects().read(name) or b"")


def write_lease(place: Place, shard: Shard, **values: Any) -> None:
    content = {"format": 1, "holder": "ab" * 8, "beat": 1, "address": "elsewhere.1.2", **values}
    place.objects().write(f"leases/{shard.digest}.json", json.dumps(content).encode())


def fetch_at(turns: SingleFlight, now: list[float], shard: Shard) -> None:
    """Fetch 1000 bytes in a second by the clock."""

    class Bytes:
        version = Version(size=1000)

        def chunks(self) -> Iterator[bytes]:
            now[0] += 1.0
            yield bytes(1000)

        def close(self) -> None:
            pass

    stream = turns.fetching(shard, Bytes(), 0)
    assert len(b"".join(stream.chunks())) == 1000
    stream.close()


SLOW = {"seconds": 10.0, "bytes": 100, "size": 1000, "due": 7.5, "host": "far-1"}


def test_a_holder_on_a_much_slower_node_is_overtaken_by_one_process(
    waiter: Make, place: Place, origin: Origin
) -> None:
    now = [0.0]
    first, second = (waiter(spare=1, clock=lambda: now[0]) for _ in range(2))
    for each in (first, second):
        fetch_at(each.turns, now, origin.shard(1))
    write_lease(place, first.shard, **SLOW)
    assert first.find() is None
    assert first.counts.snapshot().shared_overtakes == 1
    second.is_there = True  # it waits for the shared copy, whoever stores it
    assert second.find() == "there"
    assert second.counts.snapshot().shared_overtakes == 0
    assert len(leased(place)) == 2
    first.turns.end(first.shard)
    assert leased(place) == [f"leases/{first.shard.digest}.json"]


@pytest.mark.parametrize(
    ("values", "spare"),
    [
        ({}, 0),
        ({"address": own_address()}, 1),
        ({"address": ""}, 1),
        ({"bytes": 800}, 1),  # it lacks 2.5 s, and all of it would take 1 s here
        ({"bytes": 1000}, 1),
        ({"size": 0}, 1),
        ({"due": 0.0, "bytes": 0, "size": 0}, 1),  # a daemon, which doesn't tell
    ],
)
def test_no_other_holder_is_overtaken(
    values: dict[str, Any], spare: int, waiter: Make, place: Place, origin: Origin
) -> None:
    now = [0.0]
    one = waiter(spare=spare, clock=lambda: now[0], wait_seconds=100.0)
    fetch_at(one.turns, now, origin.shard(1))

    class Passing:
        """The wait is over after some looks."""

        looks = 0

        def wait(self, seconds: float) -> bool:
            self.looks += 1
            now[0] += 40.0
            write_lease(place, one.shard, beat=self.looks, **{**SLOW, "due": 1000.0, **values})
            return False

    write_lease(place, one.shard, **{**SLOW, **values})
    assert one.turns.find(one.shard, one.look, Passing()) is None  # type: ignore[arg-type]
    assert one.counts.snapshot().shared_overtakes == 0


@pytest.mark.parametrize(
    ("values", "overtakes"),
    [({}, 1), ({"bytes": 0, "size": 0}, 1), ({"bytes": 20_000_000, "size": 1_000_000_000}, 0)],
)
def test_who_has_fetched_nothing_yet_overtakes_a_holder_that_is_slow_by_any_measure(
    values: dict[str, Any], overtakes: int, waiter: Make, place: Place
) -> None:
    one = waiter(spare=1, wait_seconds=0.5)
    write_lease(place, one.shard, **{**SLOW, **values})
    assert one.find() is None
    assert one.counts.snapshot().shared_overtakes == overtakes


def test_any_process_overtakes_for_a_border_shard_of_its_groups(
    waiter: Make, place: Place, origin: Origin
) -> None:
    now = [0.0]
    one = waiter(borders={origin.shard(0).digest}, clock=lambda: now[0], wait_seconds=0.5)
    fetch_at(one.turns, now, origin.shard(1))

    class Passes:
        def wait(self, seconds: float) -> bool:
            now[0] += seconds
            return False

    for shard, overtakes in ((origin.shard(1), 0), (origin.shard(0), 1)):
        write_lease(place, shard, **SLOW)
        assert one.tier.held(shard) is None
        assert one.turns.find(shard, one.look, Passes()) is None  # type: ignore[arg-type]
        assert one.counts.snapshot().shared_overtakes == overtakes


@pytest.mark.parametrize(
    ("nodes", "ranks", "workers", "shards"), [(4, 2, 1, 24), (128, 8, 4, 100_000), (1250, 8, 4, 1_000_000)]
)
def test_each_process_of_every_node_may_overtake_for_the_borders_of_its_groups(
    nodes: int, ranks: int, workers: int, shards: int
) -> None:
    options = SharedOptions("/mnt/shared", write_back=True)
    order = OrderOptions(0, nodes, 8, 64)
    listed = ShardList(expand_urls(f"https://a.example/{{0000000..{shards - 1:07d}}}.tar"), None)
    borders = 0
    for node in {0, 1, nodes // 2, nodes - 1}:
        shared = [listed[int(shard)] for shard in pieces(order, shards, node).parts]
        here = Topology(node * ranks, nodes * ranks, 0, ranks, node, nodes)
        in_run = options.in_run(RunAttempt.launched("data", {}), shards, shared, nodes, here, workers)
        assert in_run.borders == {shard.digest for shard in shared}
        assert in_run.spare == 0  # all others are this node's alone
        borders = max(borders, len(in_run.borders))
    assert borders == (0 if shards % nodes == 0 else 2)


def test_where_several_nodes_read_a_group_each_process_may_overtake_within_one_nth_of_the_shards() -> None:
    for shards, groups, nodes, ranks, workers in [
        (1000, 1, 4, 8, 4),
        (100_000, 4, 3, 2, 1),
        (24, 1, 4, 2, 0),
    ]:
        processes = nodes * ranks * max(1, workers)
        spare = {
            spare_of(shards, groups, Topology(rank, nodes * ranks, 0, ranks, 0, nodes), workers)
            for rank in range(nodes * ranks)
        }
        (each,) = spare
        assert each >= 1
        assert each * processes <= max(shards // nodes, processes)
    assert spare_of(1000, 1, Topology(), 4) == 0


def test_a_long_wait_says_for_what_for_whom_and_since_when(
    waiter: Make, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    one = waiter(clock=lambda: now[0], wait_seconds=60.0)

    class Passing:
        def wait(self, seconds: float) -> bool:
            now[0] += 4.0
            return False

    write_lease(place, one.shard, **SLOW)
    assert one.turns.find(one.shard, one.look, Passing()) is None  # type: ignore[arg-type]
    lines = [line for line in caplog.messages if line.startswith("waiting for ")]
    assert lines[0].startswith(f"waiting for {one.shard.name} in the shared cache: the node far-1 has been ")
    assert "fetching it for 18 s, 100 B of 1.0 KB so far" in lines[0]
    assert len(lines) < 3


def test_nobody_waits_if_asked_not_to(waiter: Make, place: Place, other: Leases) -> None:
    one = waiter(wait_seconds=0.0)
    assert other.take(one.shard.digest)
    assert one.find() is None
    assert (one.looks, one.counts.snapshot().shared_waits) == (0, 0)


def test_without_anything_to_store_no_lease_is_written(waiter: Make, place: Place) -> None:
    one = waiter(stores=lambda: False)
    assert one.find() is None
    assert not Path(place.url).exists()


def test_leases_that_fail_three_times_in_a_row_are_left_alone_for_a_minute(
    waiter: Make, place: Place
) -> None:
    Path(place.url).mkdir()
    (Path(place.url) / "leases").symlink_to("leases")  # it can't be opened
    now = [0.0]
    one = waiter(clock=lambda: now[0])
    failures = []
    for now[0] in (0.0, 1.0, 2.0, 3.0, 61.0, 63.0):
        assert one.find() is None
        failures.append(one.counts.snapshot().shared_errors)
    assert failures == [1, 2, 3, 3, 3, 4]


@pytest.mark.parametrize("ended_by", ["stop", "close"])
def test_a_wait_ends_with_the_training(waiter: Make, other: Leases, ended_by: str) -> None:
    one = waiter()
    assert other.take(one.shard.digest)
    ended: list[type[BaseException]] = []

    def find() -> None:
        try:
            one.find()
        except OriginStopped as exc:
            ended.append(type(exc))

    thread = threading.Thread(target=find)
    thread.start()
    until(lambda: one.counts.snapshot().shared_waits == 1)
    one.stop.set() if ended_by == "stop" else one.turns.close()
    thread.join()
    assert ended == [OriginStopped]


def test_what_a_turn_costs(origin: Origin, place: Place) -> None:
    """Beside what storing takes, as docs/guides/shared-cache.md says."""
    origin.warm(origin.server.root.parent / "first", place, write_back=True)  # so that its format is known
    for shard in (origin.shard(number) for number in range(2)):
        for name in place.objects().names(f"shards/{shard.digest}"):
            place.objects().delete(name)
    asked: list[str] = []
    with closing(Sharing(SharedOptions(place.url, write_back=True), Counters())) as sharing:
        assert sharing.tier is not None
        backend: Any = sharing.tier.objects._backend
        for what in ("read", "write", "create", "delete", "names"):
            plain = getattr(backend, what)

            def counted(name: str, *more: Any, _what: str = what, _plain: Any = plain) -> Any:
                asked.append(f"{_what} {name.split('/')[0]}")
                return _plain(name, *more)

            setattr(backend, what, counted)
        for number in range(2):
            asked.clear()
            stop, shard = threading.Event(), origin.shard(number)
            through = sharing.through(shard, open_origin(shard.url), stop)
            through.open().close()
            through.close()
    expected = ["read shards", *["read leases", "create leases", "read leases"], "read shards"]
    assert asked == [*expected, "read leases", "delete leases"]


def test_an_address_tells_only_of_this_machine() -> None:
    assert own_address()
    assert not is_dead_or_stopped(own_address())

    def say(stage: Stage) -> str:
        return own_address()

    with Child(say) as child:
        gone = child.finish(30)
    assert is_dead_or_stopped(gone)
    place, number, began = own_address().split(".")
    assert is_dead_or_stopped(f"{place}.{number}.{int(began) + 1}")  # the number was given to another
    elsewhere = place[::-1]
    unknown = ["", "x", f"{elsewhere}.{number}.1", f"{place}.{number}", f"{place}.-1.{began}", f"{place}.x.1"]
    assert not any(map(is_dead_or_stopped, unknown))


def test_a_stopped_process_is_dead_or_stopped() -> None:
    def wait(stage: Stage) -> None:
        stage.enter(own_address())
        time.sleep(60)

    with Child(wait) as child:
        until(lambda: bool(str(child.stage)))
        address = str(child.stage)
        assert not is_dead_or_stopped(address)
        child.stop()
        assert is_dead_or_stopped(address)
        child.go_on()
        until(lambda: not is_dead_or_stopped(address))


def test_a_fill_that_waits_leaves_its_thread_to_others(origin: Origin, place: Place, other: Leases) -> None:
    """With one thread, what another node fetches doesn't hold up what nobody does."""
    root = origin.server.root.parent
    done: list[Any] = []
    assert other.take(origin.shard(0).digest)
    thread = threading.Thread(
        target=lambda: done.append(origin.warm(root / "one", place, write_back=True, concurrency=1))
    )
    thread.start()
    until(lambda: stored(place) == len(COUNTS) - 1)
    assert origin.server.ranges(origin.paths[0].name) == []
    other.release(origin.shard(0).digest)
    thread.join()
    assert (done[0].shards_complete, done[0].failures, stored(place)) == (len(COUNTS), {}, len(COUNTS))
    assert origin.is_whole(root / "one")
    assert origin.sent == origin.bytes
    assert not any(line.name.startswith("streamload-fill") for line in threading.enumerate())


def test_two_warm_ups_at_once_share_the_work(
    origin: Origin, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_TIMEOUT_SECONDS", SECONDS)  # a busy machine starves the store
    root = origin.server.root.parent
    origin.server.stop_after(0.5)
    reports: list[Any] = []

    def fill(name: str) -> None:
        reports.append(origin.warm(root / name, place, write_back=True, concurrency=2))

    threads = [threading.Thread(target=fill, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    until(lambda: len(leased(place)) >= 3)  # more than one of them begins with
    origin.server.go_on()
    for thread in threads:
        thread.join()
    check_fetched_once(origin)
    assert sum(report.bytes_arrived for report in reports) == origin.bytes
    assert sum(report.shared_stored for report in reports) == len(COUNTS)
    for name, report in itertools.product(("one", "two"), reports):
        assert report.shards_complete == len(COUNTS)
        assert origin.is_whole(root / name)
