"""Reading through a shared cache gives what the origin has, whatever becomes of the shared cache."""

from __future__ import annotations

import logging
import os
import random
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.stores.store import Store
from streamload.cache.shared import sharing, tier
from streamload.cache.shared.format import SharedShard
from streamload.cache.shared.write_back import WriteBack
from streamload.cache.tier import Tier
from streamload.daemon.warm import warm
from streamload.errors import OptionError
from streamload.testing.faults import EMPTY_PAGE, Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support.kills import Child
from tests.support.s3 import S3Server
from tests.support.sharing import KINDS_OF_PLACES, Origin, Place, opened, place_of, running_swift
from tests.support.tiers import flip, swap, until

COUNTS = (30, 25, 40)
LARGE = ShardOptions(padding_bytes=(3_000, 30_000))


@pytest.fixture(scope="module")
def swift() -> Iterator[Store]:
    with running_swift() as store:
        yield store


@pytest.fixture(params=KINDS_OF_PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request, tmp_path)


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    made = Origin(tmp_path / "data", COUNTS, options=LARGE)
    yield made
    made.close()


@pytest.fixture
def shared(origin: Origin, tmp_path: Path) -> Place:
    """A shared cache in a folder that holds all shards."""
    place = Place(str(tmp_path / "shared"), {})
    report = origin.warm(tmp_path / "first", place, write_back=True)
    assert (report.shared_stored, report.shared_failures) == (len(COUNTS), {})
    assert origin.sent == origin.bytes
    return place


def data_of(place: Place, origin: Origin, number: int) -> Path:
    (found,) = (Path(place.url) / "shards" / origin.shard(number).digest).glob("*.tar")
    return found


def index_of(place: Place, origin: Origin, number: int) -> Path:
    return Path(place.url) / "shards" / origin.shard(number).digest / "index"


@pytest.mark.sampled(2)
def test_what_one_node_fetched_the_others_have_from_the_shared_cache(
    origin: Origin, place: Place, tmp_path: Path
) -> None:
    """The oracle is the origin's own log: each byte is asked for once, for any number of nodes."""
    assert origin.warm(tmp_path / "first", place, write_back=True).shared_stored == len(COUNTS)
    for node in ("second", "third", "fourth"):
        report = origin.warm(tmp_path / node, place, write_back=True)
        assert (report.shards_complete, report.bytes_arrived, report.shared_stored) == (3, 0, 0)
        assert report.bytes_shared > origin.bytes
        assert origin.is_whole(tmp_path / node)
    assert origin.sent == origin.bytes


def test_what_a_node_had_already_is_stored_too(origin: Origin, place: Place, tmp_path: Path) -> None:
    origin.warm(tmp_path / "first", None)
    report = origin.warm(tmp_path / "first", place, write_back=True)
    assert (report.shards_found_complete, report.shared_stored, report.bytes_arrived) == (3, 3, 0)
    assert origin.warm(tmp_path / "second", place).bytes_arrived == 0
    assert origin.is_whole(tmp_path / "second")


def test_without_write_back_nothing_is_written(origin: Origin, tmp_path: Path) -> None:
    origin.warm(tmp_path / "first", Place(str(tmp_path / "shared"), {}))
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999])
@pytest.mark.parametrize("how", ["flipped", "cut", "longer"])
@pytest.mark.sampled(5)
def test_damaged_data_is_left_at_the_block_and_the_rest_is_the_origins(
    origin: Origin, shared: Place, tmp_path: Path, how: str, share: float
) -> None:
    data = data_of(shared, origin, 1)
    size = data.stat().st_size
    at = int(size * share)
    if how == "flipped":
        flip(data, at)
    elif how == "cut":
        os.truncate(data, at)
    else:
        data.write_bytes(data.read_bytes()[:at] + b"more" + data.read_bytes()[at:])
    before = origin.sent
    report = origin.warm(tmp_path / "second", shared)
    assert (report.shards_complete, report.failures) == (3, {})
    assert origin.is_whole(tmp_path / "second")
    verified = at // 65536 * 65536 if how == "flipped" else 0
    assert origin.sent - before == size - verified


def test_what_is_missing_swapped_or_replaced_there_comes_from_the_origin(
    origin: Origin, shared: Place, tmp_path: Path
) -> None:
    data_of(shared, origin, 0).unlink()
    swap(data_of(shared, origin, 1), data_of(shared, origin, 2))
    index = index_of(shared, origin, 2)
    index.write_bytes(random.Random(1).randbytes(index.stat().st_size))
    before = origin.sent
    report = origin.warm(tmp_path / "second", shared)
    assert report.shards_complete == 3
    assert origin.is_whole(tmp_path / "second")
    assert origin.sent - before == origin.bytes


def test_damage_is_mended_by_whoever_writes_back(origin: Origin, shared: Place, tmp_path: Path) -> None:
    for number in range(3):
        flip(data_of(shared, origin, number), 70_000 * number)
    assert origin.warm(tmp_path / "second", shared, write_back=True).shared_stored == 3
    before = origin.sent
    assert origin.warm(tmp_path / "third", shared).bytes_arrived == 0
    assert origin.is_whole(tmp_path / "third")
    assert origin.sent == before


def test_a_shared_cache_that_is_no_folder_costs_one_warning(
    origin: Origin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root, write_back in (("one", False), ("two", True)):
        with caplog.at_level(logging.WARNING, "streamload"):
            report = origin.warm(
                tmp_path / root, Place(str(tmp_path / "file" / "tier"), {}), write_back=write_back
            )
        assert (report.shards_complete, report.failures) == (3, {})
        assert origin.is_whole(tmp_path / root)
        assert set(report.shared_failures) == (set(origin.urls) if write_back else set())
        said = [record for record in caplog.records if "fails for" in record.getMessage()]
        assert len(said) == int(write_back)  # nothing is read from where nothing can be
        caplog.clear()


def test_a_store_that_is_away_or_never_answers_is_left_for_the_origin(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s"}
        report = origin.warm(tmp_path / "one", Place("s3://bucket/tier", options))
        assert (report.shards_complete, report.bytes_shared) == (3, 0)
    report = origin.warm(tmp_path / "two", Place("s3://bucket/tier", options))
    assert report.shards_complete == 3
    assert origin.sent == 2 * origin.bytes


def test_a_store_that_refuses_is_left_for_the_origin(
    origin: Origin, s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = Place("s3://no-such-bucket/tier", s3.storage_options)
    with caplog.at_level(logging.WARNING, "streamload"):
        report = origin.warm(tmp_path / "one", nowhere, write_back=True)
    assert (report.shards_complete, len(report.shared_failures)) == (3, 3)
    assert origin.is_whole(tmp_path / "one")
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert said.count("fails for") == 1
    assert S3Server.secret not in said


def test_a_copy_of_another_version_is_used_unless_it_is_asked_about(
    origin: Origin, shared: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path / "data", COUNTS, seed=62, options=LARGE)
    old = tmp_path / "old"
    assert origin.warm(old, shared).bytes_arrived == 0
    assert not origin.is_whole(old)
    monkeypatch.setenv("STREAMLOAD_REVALIDATE", "start")
    assert origin.warm(tmp_path / "new", shared, write_back=True).shared_stored == 3
    assert origin.is_whole(tmp_path / "new")
    before = origin.sent
    assert origin.warm(tmp_path / "newer", shared).shards_complete == 3
    assert origin.is_whole(tmp_path / "newer")
    assert origin.sent - before < 100  # it is asked for a byte of each


def test_a_copy_is_used_if_its_origin_does_not_answer(
    origin: Origin, shared: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMLOAD_REVALIDATE", "start")
    origin.server.close()
    assert origin.warm(tmp_path / "second", shared).shards_complete == 3
    assert origin.is_whole(tmp_path / "second")


def test_a_part_that_was_begun_at_the_origin_is_gone_on_with_from_the_shared_cache(
    origin: Origin, shared: Place, tmp_path: Path
) -> None:
    cache, url = tmp_path / "second", origin.urls[2]
    origin.server.stop_after(0.5)
    with Child(lambda stage: warm(url, cache_dir=cache, cache_size="1GB").shards) as child:
        until(lambda: any(path.stat().st_size > 1000 for path in cache.glob("parts/*/index")))
        child.kill()
    origin.server.go_on()
    report = warm(url, cache_dir=cache, cache_size="1GB", shared_cache=shared.url)
    assert (report.shards_complete, report.bytes_arrived) == (1, 0)
    assert (
        0 < report.bytes_shared < origin.paths[2].stat().st_size + index_of(shared, origin, 2).stat().st_size
    )
    (data,) = cache.glob("shards/*/data")
    assert data.read_bytes() == origin.paths[2].read_bytes()


def test_a_copy_that_neither_is_whole_nor_its_origins_any_more_is_begun_anew(
    origin: Origin, shared: Place, tmp_path: Path
) -> None:
    """The origin can't go on with what the shared cache began: the shard isn't given up for that."""
    flip(data_of(shared, origin, 1), 200_000)
    write_shards(tmp_path / "data", COUNTS, seed=62, options=LARGE)
    report = origin.warm(tmp_path / "second", shared)
    assert (report.shards_complete, report.failures) == (3, {})
    held = Tier(tmp_path / "second").published(origin.shard(1).digest) / "data"
    assert held.read_bytes() == origin.paths[1].read_bytes()


def test_a_commands_output_is_shared_and_begun_anew_where_it_breaks_off(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path / "data", [40], seed=1, options=LARGE)
    url, place = f"pipe:cat {path}", str(tmp_path / "shared")
    report = warm(url, cache_dir=tmp_path / "first", cache_size="1GB", shared_cache=place, write_back=True)
    assert report.shared_stored == 1
    size = path.stat().st_size
    report = warm(url, cache_dir=tmp_path / "second", cache_size="1GB", shared_cache=place)
    assert (report.shards_complete, report.bytes_arrived) == (1, 0)
    (stored,) = Path(place).glob("shards/*/*.tar")
    flip(stored, size // 2)
    body = {"second": path.read_bytes()}
    write_shards(tmp_path / "data", [40], seed=2, options=LARGE)  # nothing says so; it must not be mixed
    body["third"] = path.read_bytes()
    report = warm(url, cache_dir=tmp_path / "third", cache_size="1GB", shared_cache=place)
    assert (report.shards_complete, report.bytes_arrived) == (1, len(body["third"]))
    for root, expected in body.items():
        (data,) = (tmp_path / root).glob("shards/*/data")
        assert data.read_bytes() == expected


def test_local_files_are_neither_asked_for_nor_stored(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [5], seed=1)
    place = tmp_path / "shared"
    report = warm(
        str(tmp_path / "data/00000.tar"),
        cache_dir=tmp_path / "tier",
        cache_size="1GB",
        shared_cache=place,
        write_back=True,
    )
    assert (report.shards_complete, report.shared_stored, report.shared_failures) == (1, 0, {})
    assert not place.exists()


def test_a_shard_that_goes_while_it_waits_is_not_stored(origin: Origin, tmp_path: Path) -> None:
    shared, counts = opened(Place(str(tmp_path / "shared"), {}))
    back = WriteBack(shared)
    back.add(origin.shard(0), tmp_path / "gone")
    assert back.wait(60)
    assert counts.snapshot().shared_not_stored == 1
    back.close()
    back.add(origin.shard(1), tmp_path / "gone")
    assert counts.snapshot().shared_not_stored == 2


def test_a_shared_cache_that_takes_nothing_is_tried_again_after_a_while(
    origin: Origin, tmp_path: Path
) -> None:
    origin.warm(tmp_path / "node", None)
    (shard, directory) = origin.shard(0), tmp_path / "node/shards" / origin.shard(0).digest
    shared, _ = opened(Place(str(tmp_path / "shared"), {}))
    (tmp_path / "shared").write_text("in the way")
    now, ended = [0.0], []
    back = WriteBack(shared, ended=lambda shard: ended.append(shard.digest), clock=lambda: now[0])

    def offered(at: float) -> bool:
        """Whether it was tried."""
        now[0] = at
        tried = back.takes
        back.add(shard, directory)
        assert back.wait(60)
        return tried

    assert [offered(0), offered(1), offered(2)] == [True, True, True]
    assert [offered(3), offered(61), offered(62)] == [False, False, True]
    assert [offered(100), offered(181), offered(182)] == [False, False, True]
    (tmp_path / "shared").unlink()
    assert [offered(400), offered(422)] == [False, True]
    assert shared.has(shard)
    (tmp_path / "shared").rename(tmp_path / "stored")
    (tmp_path / "shared").write_text("in the way")
    assert [offered(423), offered(424), offered(425), offered(426)] == [True, True, True, False]
    assert ended == [shard.digest] * 15
    back.close()
    assert not back.takes


def test_a_killed_writer_leaves_nothing_that_others_believe(origin: Origin, tmp_path: Path) -> None:
    place = Place(str(tmp_path / "shared"), {})
    (tmp_path / "shared").mkdir()
    for names in range(1, 8):  # it is killed once so many objects are there
        shutil.rmtree(tmp_path / "first", ignore_errors=True)
        with Child(lambda stage: origin.warm(tmp_path / "first", place, write_back=True).shards) as child:
            until(lambda: len(place.objects().names()) >= names)  # noqa: B023
            child.kill()
        for index in (tmp_path / "shared").glob("shards/*/index"):
            assert (index.parent / SharedShard.unpack(index.read_bytes()).data).exists()
        report = origin.warm(tmp_path / "second", place)
        assert report.shards_complete == 3
        assert origin.is_whole(tmp_path / "second")
        shutil.rmtree(tmp_path / "second")
    assert origin.warm(tmp_path / "third", place, write_back=True).shared_failures == {}
    before = origin.sent
    assert origin.warm(tmp_path / "fourth", place).bytes_arrived == 0
    assert origin.sent == before


def test_a_web_server_can_be_a_shared_cache_that_is_only_read(
    origin: Origin, shared: Place, tmp_path: Path
) -> None:
    with ShardServer(shared.url) as mirror:
        before = origin.sent
        report = origin.warm(tmp_path / "second", Place(mirror.url, {}))
    assert (report.shards_complete, report.bytes_arrived) == (3, 0)
    assert origin.is_whole(tmp_path / "second")
    assert origin.sent == before


@pytest.mark.parametrize("where", ["data", "all"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(silent=True),
        Fault(stall_after_bytes=100_000),
        Fault(bytes_per_second=1_000),
        Fault(cut_after_bytes=100_000),
        Fault(cut_after_bytes=100_000, reset=True),
        Fault(status=503),
        Fault(status=403),
        Fault(body=EMPTY_PAGE),
    ],
    ids=["no answer", "stall", "slow", "cut", "reset", "503", "403", "a page"],
)
@pytest.mark.sampled(6)
def test_a_shared_cache_that_misbehaves_is_left_for_the_origin(
    origin: Origin, shared: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, where: str
) -> None:
    """Where it lasts, whatever it does: each shard is whole, and what was verified isn't fetched again."""
    impatient = replace(tier.BRIEF, stall_seconds=0.2, slow_seconds=0.2, backoff_seconds=0.01)
    monkeypatch.setattr(tier, "BRIEF", impatient)
    monkeypatch.setattr(sharing, "_TIMEOUT_SECONDS", 0.5)
    with ShardServer(shared.url) as mirror:
        for path in Path(shared.url).glob("shards/*/*.tar"):
            mirror.misbehave("*" if where == "all" else str(path.relative_to(shared.url)), fault)
        before = origin.sent
        report = origin.warm(tmp_path / "second", Place(mirror.url, {}))
    assert (report.shards_complete, report.failures) == (3, {})
    assert origin.is_whole(tmp_path / "second")
    assert 0 < origin.sent - before <= origin.bytes


def test_what_is_no_folder_is_refused_by_its_name(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match="shared_cache="):
        origin.warm(tmp_path / "tier", Place("pipe:cat x", {}))
    monkeypatch.setenv("STREAMLOAD_SHARED_CACHE", "https://host/tier?token=swordfish")
    with pytest.raises(OptionError, match="STREAMLOAD_SHARED_CACHE=") as caught:
        origin.warm(tmp_path / "tier", None)
    assert "swordfish" not in str(caught.value)
