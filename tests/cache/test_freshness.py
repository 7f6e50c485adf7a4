"""Whether the tier has what the origin has: who is asked how often, and never two versions as one."""

from __future__ import annotations

import collections
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Cache, Order, Workers
from streamload.cache import freshness
from streamload.cache.fill import Filled, FillOptions, fill
from streamload.cache.freshness import Freshness
from streamload.cache.locks import FileLock
from streamload.cache.shard import Shard, shard_of
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier
from streamload.daemon.warm import warm
from streamload.errors import DatasetChanged
from streamload.metrics import Counters
from streamload.origins.origin import Version, open_origin
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from tests.support import flat

COUNTS = [20, 30, 25, 15]
NAMES = [f"{number:05d}.tar" for number in range(len(COUNTS))]


def texts(sample: dict[str, Any]) -> dict[str, Any]:
    return {"text": sample["txt"].decode()}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", COUNTS, seed=41)
    return tmp_path / "data"


@pytest.fixture
def server(data: Path) -> Iterator[ShardServer]:
    with ShardServer(data) as server:
        yield server


def overwrite(path: Path, word: bytes = b"other") -> None:
    """Put another version of a shard in its place, at once and of the same size: ETag and date differ."""
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(path.read_bytes().replace(b"noise from shard", word + b" from shard"))
    assert fresh.stat().st_size == path.stat().st_size
    os.utime(fresh, (path.stat().st_mtime + 10, path.stat().st_mtime + 10))
    fresh.rename(path)


def make(server: ShardServer, tmp_path: Path, **options: Any) -> streamload.Loader:
    urls = f"{server.url}/{{00000..{len(COUNTS) - 1:05d}}}.tar"
    given = {"batch_size": 1, "num_workers": 2, "map_sample": texts, "shuffle": 20, "cache_size": "1TB"}
    return flat.make_loader(urls, cache_dir=tmp_path / "cache", **{**given, **options})


def words(batches: Any) -> dict[int, collections.Counter[str]]:
    """The first words of the captions that were seen, for each shard: which version they are of."""
    seen: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for batch in batches:
        for text in batch["text"]:
            seen[int(text.split()[3])][text.split()[0]] += 1
    return dict(seen)


def whole(*words: str) -> dict[int, dict[str, int]]:
    return {shard: {word: COUNTS[shard]} for shard, word in enumerate(words)}


def questions(server: ShardServer, since: int) -> collections.Counter[str]:
    """The requests for one byte, by path."""
    asked = [request for request in server.log[since:] if (request.start, request.stop) == (0, 1)]
    return collections.Counter(request.path for request in asked)


def transfers(server: ShardServer, since: int) -> collections.Counter[str]:
    """All other requests."""
    asked = [request for request in server.log[since:] if (request.start, request.stop) != (0, 1)]
    return collections.Counter(request.path for request in asked)


@pytest.mark.parametrize(
    ("revalidate", "first", "second"), [("never", 0, 0), ("start", 1, 0), ("always", 1, 1)]
)
@pytest.mark.sampled(1)
def test_an_origin_is_asked_as_often_as_was_said_and_once_for_all_workers(
    revalidate: str, first: int, second: int, server: ShardServer, tmp_path: Path
) -> None:
    with make(server, tmp_path) as loader:
        assert words(loader) == whole(*["noise"] * 4)
    asked = len(server.log)
    with make(server, tmp_path, revalidate=revalidate) as loader:
        for times in (first, second):
            assert words(loader) == whole(*["noise"] * 4)
            assert questions(server, asked) == (dict.fromkeys(NAMES, times) if times else {})
            assert not transfers(server, asked)
            asked = len(server.log)
        stats = loader.stats()
        assert stats.shards_revalidated == (first + second) * len(NAMES)
        assert stats.shards_changed == stats.shards_unverified == 0
        assert stats.tier_hits == 2 * len(NAMES)


@pytest.mark.parametrize("revalidate", ["start", "always"])
def test_a_cold_run_asks_nothing_beyond_its_transfers(
    revalidate: str, server: ShardServer, tmp_path: Path
) -> None:
    with make(server, tmp_path, revalidate=revalidate) as loader:
        assert words(loader) == whole(*["noise"] * 4)
    assert transfers(server, 0) == dict.fromkeys(NAMES, 1)
    assert not questions(server, 0)


def test_the_variable_says_the_same_as_the_argument(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMLOAD_REVALIDATE", "start")
    for _ in range(2):
        with make(server, tmp_path) as loader:
            words(loader)
    assert questions(server, 0) == dict.fromkeys(NAMES, 1)


@pytest.mark.parametrize(
    ("revalidate", "seen"), [("never", "noise"), ("start", "other"), ("always", "other")]
)
@pytest.mark.sampled(1)
def test_a_shard_that_changed_between_runs_is_fetched_anew_where_the_origin_is_asked(
    revalidate: str, seen: str, server: ShardServer, data: Path, tmp_path: Path
) -> None:
    with make(server, tmp_path) as loader:
        words(loader)
    overwrite(data / NAMES[1])
    asked = len(server.log)
    with make(server, tmp_path, revalidate=revalidate) as loader:
        assert words(loader) == whole("noise", seen, "noise", "noise")
        changed = int(revalidate != "never")
        assert loader.stats().shards_changed == changed
        assert transfers(server, asked) == ({NAMES[1]: 1} if changed else {})


@pytest.mark.parametrize(
    ("revalidate", "seen"), [("never", "noise"), ("start", "noise"), ("always", "other")]
)
@pytest.mark.sampled(1)
def test_a_shard_that_changes_in_a_pass_stays_as_it_was_to_the_end_of_the_pass(
    revalidate: str, seen: str, server: ShardServer, data: Path, tmp_path: Path
) -> None:
    with make(server, tmp_path) as loader:
        words(loader)
    with make(server, tmp_path, revalidate=revalidate, lanes=4) as loader:
        batches = iter(loader)
        begun = [next(batches) for _ in range(5)]  # all four lanes have begun
        overwrite(data / NAMES[1])
        assert words([*begun, *batches]) == whole(*["noise"] * 4)
        assert words(loader) == whole("noise", seen, "noise", "noise")


def test_a_shard_that_changes_while_it_is_fetched_is_never_a_mix(
    server: ShardServer, data: Path, tmp_path: Path
) -> None:
    size = (data / NAMES[1]).stat().st_size
    later = Fault(first=1, status=503, headers={"Retry-After": "1"})
    server.misbehave(NAMES[1], Fault(first=1, cut_after_bytes=size // 2), later)
    changed = threading.Thread(target=lambda: (wait_for(server, NAMES[1], 2), overwrite(data / NAMES[1])))
    changed.start()
    with make(server, tmp_path, revalidate="start") as loader:
        seen = words(loader)
    changed.join()
    assert set(seen[1]) == {"noise"}
    assert 0 < seen[1]["noise"] < COUNTS[1]
    with make(server, tmp_path, revalidate="start") as loader:
        assert words(loader) == whole("noise", "other", "noise", "noise")


def wait_for(server: ShardServer, path: str, requests: int) -> None:
    while len(server.requests(path)) < requests:
        server.closed.wait(0.01)


def test_an_origin_that_cannot_be_reached_leaves_the_copies_in_use_and_is_warned_of_once(
    server: ShardServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(server, tmp_path) as loader:
        words(loader)
    server.misbehave("*", Fault(status=503))
    with make(server, tmp_path, revalidate="start", num_workers=0) as loader:
        for _ in range(2):
            assert words(loader) == whole(*["noise"] * 4)
        assert loader.stats().shards_unverified == len(NAMES)
        assert loader.stats().shards_revalidated == 0
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [server.url in text and "503" in text for text in warnings] == [True]


def test_a_pipe_knows_no_version_is_never_run_again_for_one_and_says_so_once(
    server: ShardServer, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = f"pipe:cat {data}/{{00000..00003}}.tar"
    for revalidate in ("never", "start"):
        with streamload.make_loader(
            urls,
            batch_size=1,
            num_workers=0,
            workers=Workers(map_sample=texts),
            cache_dir=tmp_path / "cache",
            cache_size="1TB",
            cache=Cache(revalidate=revalidate),
        ) as loader:
            assert words(loader) == whole(*["noise"] * 4)
            stats = loader.stats()
    assert stats.origin_requests == 0
    assert stats.shards_unverified == len(NAMES)
    assert caplog.text.count("reports no versions of shards") == 1


@pytest.mark.parametrize(("revalidate", "fetched"), [("never", {}), ("start", {NAMES[2]: 1})])
def test_a_warm_up_fetches_what_has_changed_where_the_variable_says_so(
    revalidate: str,
    fetched: dict[str, int],
    server: ShardServer,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STREAMLOAD_REVALIDATE", revalidate)
    url = f"{server.url}/{{00000..00003}}.tar"
    warm(url, cache_dir=tmp_path / "cache", cache_size="1GB")
    overwrite(data / NAMES[2])
    asked = len(server.log)
    report = warm(url, cache_dir=tmp_path / "cache")
    assert report.shards_complete == len(NAMES)
    assert transfers(server, asked) == fetched
    assert len(questions(server, asked)) == (len(NAMES) if revalidate == "start" else 0)


def test_local_files_are_compared_without_being_asked_for(data: Path, tmp_path: Path) -> None:
    for word in ("noise", "other"):
        with streamload.make_loader(
            f"{data}/{{00000..00003}}.tar",
            batch_size=1,
            num_workers=0,
            workers=Workers(map_sample=texts),
            cache_dir=tmp_path / "cache",
            cache_size="1TB",
            cache=Cache(revalidate="start"),
        ) as loader:
            assert words(loader) == whole("noise", word, "noise", "noise")
            assert loader.stats().shards_revalidated == 0
        overwrite(data / NAMES[1])


def one_rank(rank: int, url: str, cache: Path, barrier: Any) -> None:
    with streamload.make_loader(
        url,
        batch_size=1,
        num_workers=0,
        workers=Workers(map_sample=texts),
        order=Order(num_batches=20, rank=rank, world_size=2),
        cache_dir=cache,
        cache=Cache(revalidate="start"),
    ) as loader:
        assert len(list(loader)) == 20
        barrier.wait(60)


@pytest.mark.deep
def test_the_ranks_of_a_node_ask_once_together(server: ShardServer, tmp_path: Path) -> None:
    with make(server, tmp_path) as loader:
        words(loader)
    asked = len(server.log)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    url = f"{server.url}/{{00000..00003}}.tar"
    ranks = [
        context.Process(target=one_rank, args=(rank, url, tmp_path / "cache", barrier)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    assert questions(server, asked) == dict.fromkeys(NAMES, 1)


# --- one process, step by step ---


class Node:
    """A tier, and the processes of runs on it, each with what it knows of versions."""

    def __init__(self, server: ShardServer, root: Path):
        self.counts = Counters()
        self.tier = Tier(root, 1 << 30, self.counts)
        self.shard = shard_of(f"{server.url}/{NAMES[0]}", None)
        self.stop = threading.Event()

    def ask(self, shard: Shard, stop: threading.Event) -> Version:
        return open_origin(shard.url, counters=self.counts, stop=stop).version()

    def process(self, run: str, **options: Any) -> Freshness:
        given = {"each_epoch": False, "ask": self.ask, "counts": self.counts, **options}
        return Freshness(self.tier, run, **given)

    def fill(self, freshness: Freshness | None = None) -> Filled:
        part = self.tier.claim(self.shard.digest)
        assert part is not None
        origin = open_origin(self.shard.url, counters=self.counts, stop=self.stop)
        watched = origin if freshness is None else freshness.watched(self.shard, origin)
        return fill(part, self.shard, lambda: watched, next_use=lambda: 0.0, stop=self.stop).result

    def view(self, freshness: Freshness) -> ShardView:
        return ShardView(self.tier, self.shard, freshness=freshness)


@pytest.fixture
def node(server: ShardServer, tmp_path: Path) -> Node:
    return Node(server, tmp_path / "tier")


def read_all(view: ShardView) -> set[bytes]:
    found = set()
    for number in range(view.count):
        read = view.read(number)
        assert read is not None
        _, members = read
        found.add(bytes(members["txt"][:5]))
    return found


def test_no_reader_begins_before_the_answer_and_who_has_begun_keeps_what_it_has(
    node: Node, server: ShardServer, data: Path
) -> None:
    node.fill()
    early = ShardView(node.tier, node.shard)
    overwrite(data / NAMES[0])
    process = node.process("a")
    process.begin("0")
    late = node.view(process)
    assert late.reader is None
    assert late.was_complete
    assert process.check(node.shard, node.stop)
    assert not node.tier.published(node.shard.digest).exists()
    assert read_all(early) == {b"noise"}
    assert node.fill(process) is Filled.PUBLISHED
    while not late.refresh():
        node.stop.wait(0.01)
    assert read_all(late) == {b"other"}
    for view in (early, late):
        view.close()
    process.close()


def test_the_processes_of_a_run_share_an_answer_and_another_run_asks_for_its_own(node: Node) -> None:
    node.fill()
    one, two, other = node.process("a"), node.process("a"), node.process("b")
    for process in (one, two, other):
        process.begin("0")
    assert one.check(node.shard, node.stop)
    assert two.is_current(node.shard)
    assert not other.is_current(node.shard)
    asked = node.counts.snapshot().origin_requests
    assert two.check(node.shard, node.stop)
    assert node.counts.snapshot().origin_requests == asked
    for process in (one, two, other):
        process.close()


def test_answers_end_with_the_last_process_of_their_run(node: Node) -> None:
    node.fill()
    for _ in range(2):
        process = node.process("a")
        process.begin("0")
        assert not process.is_current(node.shard)
        assert process.check(node.shard, node.stop)
        assert process.is_current(node.shard)
        process.close()
        assert not list((node.tier.root / "runs").iterdir())


def test_a_page_is_turned_with_each_epoch_only_where_that_was_asked_for(node: Node) -> None:
    node.fill()
    for each_epoch in (False, True):
        process = node.process(f"each_{each_epoch}", each_epoch=each_epoch)
        process.begin("0")
        assert process.check(node.shard, node.stop)
        process.begin("1")
        assert process.is_current(node.shard) is not each_epoch
        process.close()


def test_a_fill_that_goes_on_over_the_end_of_an_epoch_counts_in_the_next(
    node: Node, server: ShardServer
) -> None:
    process = node.process("a", each_epoch=True)
    process.begin("0")
    server.stop_after(0.3)
    thread = threading.Thread(target=node.fill, args=(process,))
    thread.start()
    while not process.is_current(node.shard):
        node.stop.wait(0.01)
    process.begin("1")
    assert process.is_current(node.shard)
    server.go_on()
    thread.join()
    process.filled(node.shard)
    process.begin("2")
    assert not process.is_current(node.shard)
    process.close()


def test_a_fill_whose_version_is_known_as_an_epoch_ends_counts_in_the_next(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = node.process("a", each_epoch=True)
    process.begin("0")
    next_epoch = threading.Thread(target=process.begin, args=("1",))

    def begin_next_epoch(*_: object) -> None:
        next_epoch.start()
        next_epoch.join(0.2)  # it may have to wait for this fill

    monkeypatch.setattr(freshness, "refuse_other", begin_next_epoch)
    process.fills(node.shard, Version(etag="one"))
    next_epoch.join()
    assert process.is_current(node.shard)
    process.close()


def test_a_copy_of_another_version_than_the_run_goes_by_is_an_error(
    node: Node, server: ShardServer, data: Path
) -> None:
    """The run's copy is evicted, and another run, which asks nobody, has fetched the new version."""
    process = node.process("a")
    process.begin("0")
    node.fill(process)
    node.tier.trash(node.tier.published(node.shard.digest))
    overwrite(data / NAMES[0])
    assert node.fill() is Filled.PUBLISHED
    with pytest.raises(DatasetChanged, match=r"00000.tar is not the version.*etag was"):
        node.view(process)
    process.close()


def test_a_run_does_not_fetch_another_version_than_it_goes_by(
    node: Node, server: ShardServer, data: Path
) -> None:
    process = node.process("a")
    process.begin("0")
    node.fill(process)
    node.tier.trash(node.tier.published(node.shard.digest))
    overwrite(data / NAMES[0])
    assert node.fill(process) is Filled.GAVE_UP
    view = node.view(process)
    assert view.gave_up
    assert view.reader is not None
    assert view.reader.status == "DatasetChanged"
    view.close()
    process.close()


def test_a_run_that_asks_nobody_goes_by_one_version_all_the_same(node: Node, data: Path) -> None:
    """One of its processes has begun with a copy; then another run finds that it has changed."""
    node.fill()
    one, two = node.process("a", ask=None, each_epoch=True), node.process("a", ask=None, each_epoch=True)
    for process in (one, two):
        process.begin("0")
    early = node.view(one)
    overwrite(data / NAMES[0])
    other = node.process("b")
    other.begin("0")
    assert other.check(node.shard, node.stop)
    assert node.fill(other) is Filled.PUBLISHED
    assert read_all(early) == {b"noise"}
    with pytest.raises(DatasetChanged):
        node.view(two)
    two.begin("1")
    late = node.view(two)
    assert read_all(late) == {b"other"}
    for held in (early, late, one, two, other):
        held.close()


def test_a_process_that_asks_and_is_stopped_is_not_waited_for_without_end(node: Node) -> None:
    node.fill()
    stopped = FileLock.acquire(node.tier.published(node.shard.digest) / "index")
    assert stopped is not None
    process = node.process("a", patience_seconds=0.2)
    process.begin("0")
    assert not process.check(node.shard, node.stop)
    while not process.check(node.shard, node.stop):
        node.stop.wait(0.01)
    assert process.is_current(node.shard)
    stopped.close()
    process.close()


def test_a_line_that_a_full_disk_has_cut_is_passed_over(node: Node) -> None:
    node.fill()
    process = node.process("a")
    process.begin("0")
    (page,) = (node.tier.root / "runs").glob("*.page")
    with page.open("ab") as file:
        file.write(b'["cut off in the mid\n[]\n{"a": 1}\n["' + b"0" * 32 + b'", null, null, null]\n')
    assert not process.is_current(node.shard)
    assert process.version("0" * 32) == Version()
    assert process.check(node.shard, node.stop)
    assert process.is_current(node.shard)
    process.close()


@pytest.mark.parametrize(
    "damage", [lambda index: index.write_bytes(b"rot"), Path.unlink], ids=["rotten", "gone"]
)
def test_a_copy_that_cannot_be_read_is_taken_away_instead_of_asked_about(
    damage: Callable[[Path], object], node: Node
) -> None:
    """Without an index nobody can lock it, so that it seemed to be asked about elsewhere."""
    node.fill()
    damage(node.tier.published(node.shard.digest) / "index")
    asked = node.counts.snapshot().origin_requests
    process = node.process("a")
    process.begin("0")
    assert process.check(node.shard, node.stop)
    assert not process.is_current(node.shard)
    assert not node.tier.published(node.shard.digest).exists()
    assert node.counts.snapshot().origin_requests == asked
    process.close()


@pytest.mark.parametrize("where", ["bare", "spare"])
def test_what_is_kept_in_another_way_is_asked_about_like_a_published_shard(
    where: str, node: Node, data: Path, tmp_path: Path
) -> None:
    """An index without data in the tier, and a shard in the tier that stands in for it."""
    fallback_tier = Tier(tmp_path / "spare", 1 << 30, node.counts)
    tiers = (node.tier, fallback_tier)
    holder = node.tier if where == "bare" else fallback_tier
    copy = (holder.index_only if where == "bare" else holder.published)(node.shard.digest)
    part = holder.claim(node.shard.digest)
    assert part is not None
    origin = open_origin(node.shard.url, counters=node.counts, stop=node.stop)
    options = FillOptions(index_only=where == "bare")
    fill(part, node.shard, lambda: origin, options, next_use=lambda: 0.0, stop=node.stop)
    for epoch, is_new in enumerate((False, True)):
        process = node.process(f"run{epoch}")
        process.begin("0")
        if is_new:
            overwrite(data / NAMES[0])
        view = ShardView(lambda: tiers, node.shard, lambda *_: b"", process)
        assert view.reader is None
        assert process.has_to_ask(node.shard, tiers)
        assert process.check(node.shard, node.stop, tiers)
        assert not process.has_to_ask(node.shard, tiers)
        assert copy.exists() is not is_new
        assert process.is_current(node.shard) is not is_new
        view.close()
        process.close()
    assert node.counts.snapshot().shards_changed == 1
