"""`take_inventory`, `collect_garbage`, `clear`: what they name, what they remove, what they never touch."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamload import descriptors
from streamload.cache.demand import DemandFile, files, next_uses
from streamload.cache.fill import fill
from streamload.cache.garbage import Removal, clear, collect_garbage
from streamload.cache.inventory import Inventory, take_inventory
from streamload.cache.locks import FileLock
from streamload.cache.part import Part
from streamload.cache.shard import shard_of
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier
from streamload.daemon.warm import warm
from streamload.testing.shards import write_shards
from tests.support.processes import waiting
from tests.support.tiers import SAMPLES, SHARDS, Filled, flip, listing, payload_start, until


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    filled = Filled(tmp_path)
    yield filled
    filled.close()


def removed(removal: Removal) -> dict[str, str]:
    return {item.path: item.why for item in removal.removed}


def claim(filled: Filled, number: int) -> Part:
    filled.tier.trash(filled.shard(number))
    part = filled.tier.claim(filled.digest(number))
    assert part is not None
    return part


def test_an_inventory_tells_all_that_is_there_and_changes_nothing(filled: Filled) -> None:
    filled.index_only(3)
    orphan = filled.orphan(3)
    live = claim(filled, 2)
    assert live.reserve(50_000, 0)
    (filled.root / "trash" / f"{'e' * 32}.00000000").mkdir()
    (filled.root / "trash" / f"{'e' * 32}.00000000" / "data").write_bytes(bytes(5000))
    run = DemandFile(filled.root / "runs")
    run.announce([filled.digest(number) for number in (0, 1, 2, 0)])
    reader = ShardView(filled.tier, shard_of(filled.urls[0], None))
    before = listing(filled.root)
    found = take_inventory(filled.tier)
    assert listing(filled.root) == before
    assert (found.published.count, found.samples) == (2, 2 * SAMPLES)
    assert (found.live_parts.count, found.orphaned_parts.count, found.index_only.count) == (1, 1, 1)
    assert found.tombstones.count == 0
    assert found.live_parts.size_bytes >= 50_000
    assert orphan.exists()
    assert (found.trash.count, found.trash.size_bytes) == (1, 8192)
    assert found.run_files.count == 1
    assert [(one.pid, one.shards, one.held) for one in found.runs] == [(os.getpid(), 3, 2)]
    assert found.open_shards == (filled.urls[0],)
    assert found.used_bytes == filled.tier.used_bytes
    assert found.limit_bytes == 10**9
    assert found.oldest_use is not None
    assert found.newest_use is not None
    assert found.oldest_use <= found.newest_use
    assert not found.foreign
    again = json.loads(json.dumps(found.as_dict()))
    assert again["published"] == {"count": 2, "size_bytes": found.published.size_bytes}
    assert set(again) == {"cache_dir", *Inventory.__dataclass_fields__} - {"root"}
    reader.close()
    run.close()
    live.discard()


def test_an_inventory_of_an_empty_tier(tmp_path: Path) -> None:
    found = take_inventory(Tier(tmp_path / "tier", 1000))
    assert (found.used_bytes, found.samples, found.oldest_use, found.runs) == (0, 0, None, ())


def plant(filled: Filled, tmp_path: Path) -> dict[Path, str]:
    """Put things into a tier that it did not make."""
    root = filled.root
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_text("years of work")
    planted = {root / "notes.txt": "a file", root / "shards" / "thesis": "a directory"}
    (root / "notes.txt").write_text("mine")
    (root / "shards" / "thesis").mkdir()
    for room, name in [("shards", "a" * 32), ("parts", f"{'b' * 32}.00000000"), ("gone", "c" * 32)]:
        (root / room / name).symlink_to(elsewhere)
        planted[root / room / name] = "a symbolic link"
    (root / "trash" / f"{'d' * 32}.00000000").symlink_to(elsewhere)
    planted[root / "trash" / f"{'d' * 32}.00000000"] = "a symbolic link"
    for name in (f"{filled.digest(1)}.bak", "README"):
        (root / "parts" / name).write_text("mine")
        planted[root / "parts" / name] = "a file"
    os.mkfifo(root / "runs" / "1.00000000")
    planted[root / "runs" / "1.00000000"] = "a FIFO"
    (root / "runs" / "2.00000000").symlink_to(elsewhere / "data")
    planted[root / "runs" / "2.00000000"] = "a symbolic link"
    (root / "runs" / "todo").write_text("mine")
    planted[root / "runs" / "todo"] = "a file"
    (root / "trash" / "kept").write_text("mine")
    planted[root / "trash" / "kept"] = "a file"
    (filled.shard(2) / "labels.csv").write_text("mine")
    planted[filled.shard(2) / "labels.csv"] = "a file"
    return planted


def test_what_the_tier_did_not_make_is_told_and_stays_whatever_is_removed(
    filled: Filled, tmp_path: Path
) -> None:
    planted = plant(filled, tmp_path)
    assert {one.path: one.what for one in take_inventory(filled.tier).foreign} == planted
    removals = [collect_garbage(filled.tier, all_parts=True, limit_bytes=1), clear(filled.tier)]
    for removal in removals:
        assert {one.path: one.what for one in removal.foreign} == planted
    assert [(item.path, item.why) for item in removals[1].kept] == [
        (f"shards/{filled.digest(2)}", "it holds files that the tier did not make")
    ]
    for path in planted:
        assert path.exists() or path.is_symlink() or path.is_fifo(), path
    assert (tmp_path / "elsewhere" / "data").read_text() == "years of work"
    assert [shard.digest for shard in filled.tier.shards()] == [filled.digest(2)]


def test_planted_things_hinder_no_run(filled: Filled, tmp_path: Path) -> None:
    plant(filled, tmp_path)
    filled.tier.sweep()
    filled.tier.trash(filled.shard(1))
    assert warm(filled.urls, cache_dir=filled.root).shards_complete == SHARDS
    run = DemandFile(filled.root / "runs")
    assert next_uses(filled.root / "runs", [filled.digest(0)]) == {}
    run.close()


def test_garbage_is_what_nobody_can_use(filled: Filled, tmp_path: Path) -> None:
    good = filled.orphan(3)
    superseded = filled.orphan(2)
    kept_aside = superseded.rename(tmp_path / superseded.name)
    assert warm(filled.urls[2], cache_dir=filled.root).shards_complete == 1
    outlived = filled.index_only(2, published=True)
    superseded = kept_aside.rename(filled.root / "parts" / kept_aside.name)
    index_only = filled.index_only(1)
    rotten = filled.orphan(1)
    flip(rotten / "data", payload_start(rotten, 0))
    empty = claim(filled, 0)
    empty.leave()
    never_begun = filled.root / "parts" / f"{'a' * 32}.00000000"
    never_begun.mkdir()
    tombstone = filled.tier.claim("b" * 32)
    assert tombstone is not None
    stands = tombstone.give_up()
    assert stands is not None
    other = filled.tier.claim("c" * 32)
    assert other is not None
    fallen = other.give_up()
    assert fallen is not None
    fallen.close()
    trash = filled.root / "trash" / f"{'d' * 32}.00000000"
    trash.mkdir()
    (trash / "data").write_bytes(bytes(4097))
    (filled.root / "runs" / "1.00000000").write_bytes(bytes(8))
    half = filled.root / "tier.json.new"
    half.write_text("{")
    live = DemandFile(filled.root / "runs")
    before = listing(filled.root)
    used = filled.tier.used_bytes
    expected = {
        f"parts/{superseded.name}": "its shard is published",
        f"parts/{rotten.name}": "a fill would start over",
        f"parts/{empty.path.name}": "a fill would start over",
        f"parts/{never_begun.name}": "a fill would start over",
        f"gone/{'c' * 32}": "a tombstone of dead processes",
        f"trash/{trash.name}": "was being deleted",
        f"bare/{outlived.name}": "its shard is published",
        "runs/1.00000000": "its process is dead",
        half.name: "was being written",
    }
    would = collect_garbage(filled.tier, dry_run=True)
    assert listing(filled.root) == before
    assert removed(would) == expected
    did = collect_garbage(filled.tier)
    assert removed(did) == expected
    assert would.removed_bytes == did.removed_bytes == used - filled.tier.used_bytes
    assert would.used_bytes == did.used_bytes == filled.tier.used_bytes
    assert [item.url for item in did.removed if item.path == f"parts/{superseded.name}"] == [filled.urls[2]]
    assert good.exists()
    assert index_only.exists()
    assert filled.shard(2).exists()
    assert filled.tier.tombstone("b" * 32).exists()
    assert files(filled.root / "runs") == [live._path]
    assert not collect_garbage(filled.tier).removed
    assert list(removed(collect_garbage(filled.tier, all_parts=True)).values()) == ["a part without a filler"]
    assert not good.exists()
    live.close()
    stands.close()


def test_a_part_of_a_pipe_is_garbage_as_nothing_tells_its_version(tmp_path: Path) -> None:
    import threading

    (path,) = write_shards(tmp_path / "data", [SAMPLES], seed=44)
    tier = Tier(tmp_path / "tier", 10**9)
    shard = shard_of(f"pipe:head -c 20000 {path}; sleep 600", None)
    part = tier.claim(shard.digest)
    assert part is not None
    stop = threading.Event()

    def origin() -> object:
        from streamload.origins.origin import open_origin

        return open_origin(shard.url, stop=stop)

    thread = threading.Thread(
        target=fill, args=(part, shard, origin), kwargs={"next_use": lambda: 0.0, "stop": stop}
    )
    thread.start()
    view = ShardView(tier, shard)
    until(lambda: (view.refresh(), view.count)[1])
    assert not collect_garbage(tier).removed
    view.close()
    stop.set()
    thread.join()
    assert list(removed(collect_garbage(tier)).values()) == ["a fill would start over"]


def test_what_is_open_or_being_filled_stays(filled: Filled) -> None:
    orphan = filled.orphan(3)
    read_part = ShardView(filled.tier, shard_of(filled.urls[3], None))
    live = claim(filled, 2)
    reader = ShardView(filled.tier, shard_of(filled.urls[0], None))
    removal = clear(filled.tier)
    assert list(removed(removal)) == [f"shards/{filled.digest(1)}"]
    assert {item.path: item.why for item in removal.kept} == {
        f"shards/{filled.digest(0)}": "a process has it open",
        f"parts/{orphan.name}": "a process fills or reads it",
        f"parts/{live.path.name}": "a process fills or reads it",
    }
    assert not collect_garbage(filled.tier, all_parts=True).removed
    read_part.close()
    reader.close()
    live.leave()
    assert len(clear(filled.tier).removed) == 3
    assert Tier.open(filled.root).limit_bytes == 10**9
    assert filled.tier.used_bytes == 0


def test_a_limit_is_set_and_what_is_needed_last_goes(filled: Filled) -> None:
    sizes = {shard.digest: shard.size_bytes for shard in filled.tier.shards()}
    run = DemandFile(filled.root / "runs")
    run.announce([filled.digest(number) for number in (2, 0, 3)])  # and never 1
    limit = sum(sizes.values()) - sizes[filled.digest(1)] - 1
    would = collect_garbage(filled.tier, limit_bytes=limit, dry_run=True)
    assert Tier.open(filled.root).limit_bytes == 10**9
    did = collect_garbage(filled.tier, limit_bytes=limit)
    assert [item.path for item in did.removed] == [f"shards/{filled.digest(n)}" for n in (1, 3)]
    assert removed(would) == removed(did)
    assert {item.why for item in did.removed} == {"over the limit"}
    assert would.used_bytes == did.used_bytes == filled.tier.used_bytes <= limit
    assert would.limit_bytes == did.limit_bytes == Tier.open(filled.root).limit_bytes == limit
    run.close()


def test_a_limit_that_cannot_be_met_evicts_all_but_what_is_open(filled: Filled) -> None:
    reader = ShardView(filled.tier, shard_of(filled.urls[0], None))
    removal = collect_garbage(filled.tier, limit_bytes=1)
    assert len(removal.removed) == SHARDS - 1
    assert removal.used_bytes > removal.limit_bytes == 1
    assert [shard.digest for shard in filled.tier.shards()] == [filled.digest(0)]
    reader.close()


def test_a_run_begins_by_removing_parts_whose_shard_is_published_or_that_never_began(
    filled: Filled, tmp_path: Path
) -> None:
    part = filled.orphan(1).rename(tmp_path / "aside")
    assert warm(filled.urls[1], cache_dir=filled.root).shards_complete == 1
    superseded = part.rename(filled.root / "parts" / f"{filled.digest(1)}.00000000")
    good = filled.orphan(2)
    never_begun = filled.root / "parts" / f"{filled.digest(3)}.00000000"
    never_begun.mkdir()
    filler = FileLock.acquire(superseded / "index")
    assert filler is not None
    filled.tier.sweep()
    assert (superseded.exists(), good.exists(), never_begun.exists()) == (True, True, False)
    filler.close()
    filled.tier.sweep()
    assert (superseded.exists(), good.exists()) == (False, True)
    assert filled.shard(1).exists()


def sweep_again_and_again(root: Path, ready: multiprocessing.synchronize.Event) -> None:
    tier = Tier(root)
    while True:
        tier.sweep()
        ready.set()


def test_a_run_announces_itself_though_others_remove_dead_runs_all_the_time(tmp_path: Path) -> None:
    """Its file is there for a moment before it is locked, and then looks like a dead process's."""
    tier = Tier(tmp_path / "tier", 1000)
    with waiting(sweep_again_and_again, tier.root):
        for _ in range(1500):
            run = DemandFile(tier.root / "runs")
            run.announce(["a" * 32])
            assert run.path in files(tier.root / "runs")
            until(lambda run=run: files(tier.root / "runs") == [run.path])  # the others go
            run.close()


def fill_and_wait(root: Path, url: str, ready: multiprocessing.synchronize.Event) -> None:
    tier = Tier(root)
    part = tier.claim(shard_of(url, None).digest)
    assert part is not None
    ready.set()
    signal.pause()


def test_the_part_of_another_living_process_stays_until_that_is_killed(filled: Filled) -> None:
    filled.tier.trash(filled.shard(1))
    with waiting(fill_and_wait, filled.root, filled.urls[1]):
        assert take_inventory(filled.tier).live_parts.count == 1
        assert not collect_garbage(filled.tier, all_parts=True).removed
    assert take_inventory(filled.tier).orphaned_parts.count == 1
    assert len(collect_garbage(filled.tier).removed) == 1


def test_trash_that_somebody_reads_still_stays_and_counts_until_he_is_through(filled: Filled) -> None:
    reader = ShardView(filled.tier, shard_of(filled.urls[1], None))
    filled.tier.trash(filled.shard(1))
    (trash,) = (filled.root / "trash").iterdir()
    for dry_run in (True, False):
        removal = collect_garbage(filled.tier, limit_bytes=filled.tier.used_bytes - 1, dry_run=dry_run)
        assert len(removal.removed) == 1
        assert removal.removed[0].why == "over the limit"
        assert [(item.path, item.url) for item in removal.kept] == [(f"trash/{trash.name}", filled.urls[1])]
        assert trash.exists()
    assert removal.used_bytes == filled.tier.used_bytes <= removal.limit_bytes
    assert all(reader.read(number) is not None for number in range(SAMPLES))
    reader.close()
    assert removed(collect_garbage(filled.tier)) == {f"trash/{trash.name}": "was being deleted"}


def test_a_part_stays_in_which_lies_what_the_tier_did_not_make(filled: Filled) -> None:
    mine = filled.orphan(3) / "labels.csv"
    mine.write_text("mine")
    collect_garbage(filled.tier, all_parts=True)
    assert mine.read_text() == "mine"


def test_a_reader_lets_go_of_a_part_once_it_reads_the_published_shard(filled: Filled) -> None:
    part, shard = filled.orphan(0), shard_of(filled.urls[0], None)
    before = descriptors.count()
    with contextlib.closing(ShardView(filled.tier, shard)) as view:
        arriving = view.count
        filled.tier.trash(part)
        warm(filled.urls, cache_dir=filled.root, cache_size="1GB")
        until(lambda: (view.refresh(), view.ended)[1])
        assert view.count == SAMPLES > arriving > 0
        held = descriptors.count() - before
        with contextlib.closing(ShardView(filled.tier, shard)):
            assert descriptors.count() - before == 2 * held
