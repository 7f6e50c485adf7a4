"""Pages of live runs: read as they were written, gone with their process, and never in the training's way.

How it shows that it works: pages are compared with what was given; processes are killed; a file system that
is full, other clocks, damage at each byte, and names made to do harm are given, and what a reader sees is
compared with what it should.
"""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.cache.garbage import collect_garbage
from streamload.cache.inventory import foreign
from streamload.cache.tier import Tier
from streamload.metrics import COUNTERS, GIVEN
from streamload.observe import page
from streamload.observe.page import (
    MOST_SOURCES,
    Instant,
    PageFile,
    RunPage,
    as_dict,
    files,
    names_of_sources,
    read_runs,
)

BEGAN = Instant("boot", 5 * 10**9, 1000.0)
PAGE = RunPage(
    run="a1",
    rank=1,
    world_size=8,
    pid=17,
    host="node",
    began=BEGAN,
    written=Instant("boot", 65 * 10**9, 1060.0),
    workers=4,
    sources=("laion", "cc"),
    counters={"origin_bytes": 7, "data_wait_ns": 3_000_000_000, "samples_skipped_decode": 2},
    wait_buckets=(5, 0, 1, *[0] * 21),
    gauges={
        "samples": {("laion",): 640.0, ("cc",): 64.0},
        "source_wait_seconds": {("laion",): 1.5},
        "still_seconds": {(): 4.0},
    },
    verdict="the origin gives 38 MB/s",
    alerts={"data wait": "waited 31 %"},
)


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path, 1 << 30)


def test_a_page_is_read_as_it_was_written(tier: Tier) -> None:
    file = PageFile(tier.root)
    file.write(PAGE)
    (found,) = read_runs([tier.root, tier.root, tier.root / "none"])
    assert dataclasses.replace(found, reader=None) == PAGE
    file.write(dataclasses.replace(PAGE, verdict=""))
    (found,) = read_runs([tier.root])
    assert found.verdict == ""
    file.close()
    file.close()
    assert read_runs([tier.root]) == []
    assert files(tier.root) == []


def test_the_snapshot_of_a_page_has_its_numbers() -> None:
    assert PAGE.cumulative_buckets()[-1] == (float("inf"), 6)
    snapshot = PAGE.snapshot()
    assert (snapshot.origin_bytes, snapshot.data_wait_seconds) == (7, 3.0)
    assert snapshot.samples_skipped["decode"] == 2
    assert (snapshot.source_samples, snapshot.source_wait_seconds) == (
        {"laion": 640, "cc": 64},
        {"laion": 1.5, "cc": 0.0},
    )


def test_a_page_of_every_counter_and_many_sources_takes_a_few_kilobytes() -> None:
    counters = dict.fromkeys(COUNTERS, 10**13)
    names = names_of_sources(f"source {place}" for place in range(8))
    labelled = {metric.name: {(name,) if metric.labels else (): 1 / 3 for name in names} for metric in GIVEN}
    page = dataclasses.replace(
        PAGE, counters=counters, sources=names, gauges=labelled, wait_buckets=(10**9,) * 24
    )
    assert len(page.encode()) < 7000


@given(seconds=st.floats(0, 10**6), set_back=st.floats(-(10**6), 10**6))
def test_an_age_goes_by_the_clock_that_nobody_sets(seconds: float, set_back: float) -> None:
    later = Instant("boot", BEGAN.monotonic_ns + int(seconds * 1e9), BEGAN.unix + seconds - set_back)
    assert later.seconds_since(BEGAN) == pytest.approx(seconds, abs=1e-6)
    elsewhere = later._replace(boot="another machine")
    assert elsewhere.seconds_since(BEGAN) == pytest.approx(max(0.0, seconds - set_back), abs=1e-6)


def test_what_stands_still_grows_older_with_the_page() -> None:
    reader = PAGE.written._replace(monotonic_ns=PAGE.written.monotonic_ns + 30 * 10**9)
    read = dataclasses.replace(PAGE, reader=reader)
    assert (read.age_seconds, read.still_seconds, read.run_seconds) == (30.0, 34.0, 60.0)
    assert dataclasses.replace(read, gauges={}).still_seconds == 0.0


@given(cut=st.integers(0, 2000), place=st.integers(0, 2000), bit=st.integers(0, 7))
def test_a_page_that_is_damaged_or_half_written_is_none(cut: int, place: int, bit: int) -> None:
    content = PAGE.encode()
    assert RunPage.decode(content[: min(cut, len(content) - 1)], BEGAN) is None
    damaged = bytearray(content)
    damaged[place % len(content)] ^= 1 << bit
    assert RunPage.decode(bytes(damaged), BEGAN) is None
    assert RunPage.decode(content + damaged, BEGAN) is not None


def test_a_page_of_another_version_is_none_and_unknown_names_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = dataclasses.replace(
        PAGE, counters={"dreams": 3, "origin_bytes": 7}, gauges={"source_mood": {("a",): 1.0}}
    )
    found = RunPage.decode(page.encode(), BEGAN)
    assert found is not None
    assert (dict(found.counters), dict(found.gauges)) == ({"origin_bytes": 7}, {})
    monkeypatch.setattr("streamload.observe.page.FORMAT", 2)
    later = PAGE.encode()
    monkeypatch.undo()
    assert RunPage.decode(later, BEGAN) is None


def publish_and_wait(root: Path, ready: object) -> None:
    file = PageFile(root)
    file.write(dataclasses.replace(PAGE, pid=os.getpid()))
    ready.set()  # type: ignore[attr-defined]
    signal.pause()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_killed_rank_published_is_gone_at_once_and_deleted_by_the_next_run(
    method: str, tier: Tier
) -> None:
    context = multiprocessing.get_context(method)
    ready = context.Event()
    rank = context.Process(target=publish_and_wait, args=(tier.root, ready))
    rank.start()
    assert ready.wait(60)
    assert [page.pid for page in read_runs([tier.root])] == [rank.pid]
    rank.kill()
    rank.join()
    assert read_runs([tier.root]) == []
    assert len(files(tier.root)) == 1
    with_page = PageFile(tier.root)
    assert files(tier.root) == [with_page.path]
    with_page.close()


def test_a_stopped_rank_is_still_there_and_its_page_grows_older(tier: Tier) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    rank = context.Process(target=publish_and_wait, args=(tier.root, ready))
    rank.start()
    assert ready.wait(60)
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGSTOP)
    (first,) = read_runs([tier.root])
    (second,) = read_runs([tier.root])
    assert second.age_seconds > first.age_seconds
    rank.kill()
    rank.join()


def test_a_forked_child_neither_holds_nor_deletes_the_page(tier: Tier) -> None:
    file = PageFile(tier.root)
    file.write(PAGE)
    context = multiprocessing.get_context("fork")
    begun, end = context.Event(), context.Event()
    child = context.Process(target=lambda: (file.close(), begun.set(), end.wait()))
    child.start()
    assert begun.wait(60)
    assert len(read_runs([tier.root])) == 1
    assert file._lock is not None
    file._lock.close()  # as if this process had been killed
    assert read_runs([tier.root]) == []
    end.set()
    child.join()


def test_a_full_disk_is_logged_once_and_publishing_goes_on_once_there_is_room(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = PageFile(tier.root)
    file.write(PAGE)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(page.os, "pwrite", full)
    for _ in range(3):
        file.write(dataclasses.replace(PAGE, rank=2))
    assert len([r for r in caplog.records if "can't be written" in r.message]) == 1
    monkeypatch.undo()
    file.write(dataclasses.replace(PAGE, rank=3))
    assert [page.rank for page in read_runs([tier.root])] == [3]
    file.close()


def test_a_disk_that_is_full_from_the_start_takes_no_page_and_stops_nobody(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(page.os, "posix_fallocate", full)
    file = PageFile(tier.root)
    file.write(PAGE)
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert (read_runs([tier.root]), files(tier.root)) == ([], [])
    file.close()


def test_pages_are_the_tiers_own_and_collected_with_it(tier: Tier) -> None:
    file = PageFile(tier.root)
    file.write(PAGE)
    assert list(foreign(tier)) == []
    collect_garbage(tier)
    assert len(read_runs([tier.root])) == 1
    assert file._lock is not None
    file._lock.close()
    collect_garbage(tier)
    assert files(tier.root) == []


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(codec=None), max_size=200), max_size=20))
def test_any_names_of_sources_are_short_printable_and_all_different(names: list[str]) -> None:
    shown = names_of_sources(names)
    assert len(set(shown)) == len(shown) == len(names)
    assert all(len(name) <= 64 and name.isprintable() for name in shown)
    page = dataclasses.replace(PAGE, sources=shown, gauges={"samples": {(name,): 1.0 for name in shown}})
    found = RunPage.decode(page.encode(), BEGAN)
    assert found is not None
    assert (found.sources, found.gauges) == (shown, page.gauges)


def test_long_names_that_differ_late_stay_different_and_secrets_are_cut() -> None:
    shown = names_of_sources([f"{'x' * 80}{n}" for n in range(300)])
    assert len(set(shown)) == len(shown) == MOST_SOURCES
    (name,) = names_of_sources(["https://user:hunter2@host/a.tar?X-Amz-Signature=abcdef"])
    assert "hunter2" not in name
    assert "abcdef" not in name


def test_a_page_as_plain_values_is_json() -> None:
    plain = as_dict(dataclasses.replace(PAGE, reader=PAGE.written))
    assert plain["gauges"]["samples"] == {"laion": 640.0, "cc": 64.0}
    assert plain["age_seconds"] == 0.0


def test_a_file_that_others_put_there_is_no_page(tier: Tier) -> None:
    for name in ("1.metrics", "x.00000000.metrics"):
        (tier.root / "runs" / name).write_bytes(PAGE.encode())
    os.mkfifo(tier.root / "runs" / "1.00000000.metrics")
    (tier.root / "runs" / "2.00000000.metrics").symlink_to("/etc/passwd")
    assert read_runs([tier.root]) == []
