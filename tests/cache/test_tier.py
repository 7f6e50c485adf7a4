"""Claims, reservations, publishing and eviction in a real directory, among real processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.synchronize
import os
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from streamload.cache.demand import DemandFile, next_uses
from streamload.cache.directory import bytes_below, write_whole
from streamload.cache.locks import FileLock, exclusive
from streamload.cache.part import Part
from streamload.cache.tier import Tier
from streamload.errors import CacheError, CacheFull
from tests.support.processes import waiting

A, B, C = (letter * 32 for letter in "abc")
KIB = 1024


def tier_of(path: Path, limit: int = 1 << 20) -> Tier:
    return Tier(path / "tier", limit)


def fill(tier: Tier, digest: str, size: int, next_use: float = 0) -> Part:
    part = tier.claim(digest)
    assert part is not None
    assert part.reserve(size, next_use)
    (part.path / "names").write_bytes(b"")
    (part.path / "data").write_bytes(os.urandom(size))
    return part


def publish(tier: Tier, digest: str, size: int) -> Path:
    fill(tier, digest, size).publish()
    return tier.published(digest)


def test_a_published_shard_is_there_and_cannot_be_claimed_again(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    path = publish(tier, A, 100)
    assert (path / "data").stat().st_size == 100
    assert tier.claim(A) is None
    assert not tier.parts(A)
    assert [(s.digest, s.kind) for s in tier.shards()] == [(A, "shards")]


def test_a_shard_with_a_living_filler_cannot_be_claimed(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    part = fill(tier, A, 100)
    assert Tier(tier.root).claim(A) is None
    part.leave()
    taken = tier.claim(A)
    assert taken is not None
    assert taken.orphan is not None
    assert taken.orphan.path == part.path


def test_a_shard_that_is_published_while_a_claim_looks_is_not_claimed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_of(tmp_path)
    part = fill(tier, A, 100)
    listed = Tier.parts

    def publish_first(self: Tier, digest: str) -> list[Path]:
        with pytest.MonkeyPatch.context() as without_the_lock:  # as by a version that takes none to publish
            without_the_lock.setattr(part.budget, "settling", lambda *_: contextlib.nullcontext())
            part.publish()
        return listed(self, digest)

    monkeypatch.setattr(Tier, "parts", publish_first)
    assert tier.claim(A) is None
    assert [shard.kind for shard in tier.shards()] == ["shards"]


def test_a_part_that_is_published_while_the_tier_is_measured_counts(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    publish(tier, B, 100)
    part = fill(tier, A, 100)
    found = set()
    for shard in tier.shards():
        found.add(shard.digest)
        if part.path.exists():
            part.publish()
    assert found == {A, B}


def test_a_directory_that_is_spoiled_while_it_is_measured_is_closed(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "part").mkdir()
    for name in ("data", "index"):
        (tmp_path / "part" / name).write_bytes(b"some")
    look, opened = os.scandir, []

    def spoiled(path: Path) -> Any:
        opened.append(look(path))
        path.rename(tmp_path / "away")
        path.write_bytes(b"no directory")
        return opened[0]

    monkeypatch.setattr(os, "scandir", spoiled)
    with pytest.raises(NotADirectoryError):
        bytes_below(tmp_path / "part")
    assert list(opened[0]) == []  # else it had another entry, and a descriptor
    monkeypatch.undo()


def test_another_version_in_place_of_a_shard_is_measured_anew(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    fill(tier, A, 100).publish()
    before = tier.used_bytes
    tier.trash(tier.published(A))
    fill(tier, A, 100_000).publish()
    assert tier.used_bytes > before + 90_000


def claim_and_wait(root: Path, ready: multiprocessing.synchronize.Event) -> None:
    fill(Tier(root), A, 100)
    ready.set()
    signal.pause()


def decide_and_wait(root: Path, ready: multiprocessing.synchronize.Event) -> None:
    with exclusive(root / "lock"):
        ready.set()
        signal.pause()


def test_what_a_killed_filler_held_is_free_at_once(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    with waiting(claim_and_wait, tier.root):
        assert tier.claim(A) is None
    part = tier.claim(A)
    assert part is not None
    assert part.orphan is not None
    (part.path / "names").write_bytes(b"")
    part.publish()
    assert not tier.parts(A)


def test_a_start_keeps_what_a_killed_filler_left_unless_nothing_can_come_of_it(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    with waiting(claim_and_wait, tier.root):
        tier.sweep()
        assert len(tier.parts(A)) == 1  # its filler lives
    (left,) = tier.parts(A)
    shutil.copytree(left, never_begun := left.with_name(left.name.replace(A, B)))
    (never_begun / "index").unlink()
    publish(tier, C, 100)
    shutil.copytree(left, published := left.with_name(left.name.replace(A, C)))
    tier.sweep()
    assert left.exists()
    assert not never_begun.exists()
    assert not published.exists()
    assert tier.published(C).exists()
    part = tier.claim(A)
    assert part is not None
    assert part.orphan is not None
    assert (part.orphan.path / "data").stat().st_size == 100


def test_reservations_of_all_parts_count_before_a_byte_is_written(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 150 * KIB)
    one, two = tier.claim(A), tier.claim(B)
    assert one is not None
    assert two is not None
    assert one.reserve(60 * KIB, 0)
    assert not two.reserve(60 * KIB, 0)
    one.discard()
    assert two.reserve(60 * KIB, 0)


def test_a_shard_beyond_the_limit_says_how_much_it_needs(tmp_path: Path) -> None:
    part = tier_of(tmp_path, 100 * KIB).claim(A)
    assert part is not None
    with pytest.raises(CacheFull, match=r"221,184 bytes.*102,400.*cache_size"):
        part.reserve(200 * KIB, 0)


def test_room_is_made_by_evicting_what_nobody_reads(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 140 * KIB)
    kept = publish(tier, A, 40 * KIB)
    gone = publish(tier, B, 40 * KIB)
    reader = FileLock.acquire(kept / "names", shared=True)
    assert reader is not None
    part = fill(tier, C, 50 * KIB)
    assert kept.exists()
    assert not gone.exists()
    assert tier.used_bytes <= tier.limit_bytes
    assert not part.reserve(100 * KIB, 0)
    reader.close()
    assert part.reserve(100 * KIB, 0)


def test_a_shard_that_lost_its_file_of_names_is_in_nobodys_way(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 400 * KIB)
    damaged = publish(tier, A, 200 * KIB)
    (damaged / "names").unlink()  # by a power failure, say; no run visits it any more
    publish(tier, B, 200 * KIB)
    assert [shard.digest for shard in tier.shards()] == [B]


def test_eviction_follows_what_the_live_runs_will_visit(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 140 * KIB)
    for digest in (A, B):
        publish(tier, digest, 40 * KIB)
    run = DemandFile(tier.root / "runs")
    run.announce([A, C, B])
    fill(tier, C, 40 * KIB, next_use=1)
    assert tier.published(A).exists()
    assert not tier.published(B).exists()
    run.close()


def test_a_fill_ahead_waits_unless_it_is_needed_sooner_than_its_victims(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 140 * KIB)
    for digest in (A, B):
        publish(tier, digest, 40 * KIB)
    run = DemandFile(tier.root / "runs")
    run.announce([A, B, C])
    part = tier.claim(C)
    assert part is not None
    assert not part.reserve(40 * KIB, 2)
    run.announce([B, C])
    assert next_uses(tier.root / "runs", [A, B, C]) == {B: 0.0, C: 1.0}
    assert part.reserve(40 * KIB, 1)
    assert not tier.published(A).exists()
    run.close()


def test_the_word_of_a_run_ends_with_its_process(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    child = os.fork()
    if not child:
        DemandFile(runs).announce([A])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(runs.iterdir())) == 1
    assert next_uses(runs, [A]) == {}
    assert not list(runs.iterdir())


def test_a_fork_that_closes_what_a_run_announces_ends_none_of_it(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    run = DemandFile(tier.root / "runs")
    run.announce([A])
    child = multiprocessing.get_context("fork").Process(target=run.close)
    child.start()
    child.join()
    assert next_uses(tier.root / "runs", [A]) == {A: 0.0}
    run.close()
    assert next_uses(tier.root / "runs", [A]) == {}


def test_the_second_publisher_drops_its_own(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    late = fill(tier, A, 100)
    early = tier.published(A)
    early.mkdir()
    (early / "data").write_bytes(b"first")
    late.publish()
    assert (early / "data").read_bytes() == b"first"
    assert not tier.parts(A)
    assert not list((tier.root / "trash").iterdir())


def test_who_stops_after_another_has_published_leaves_nothing(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    late = fill(tier, A, 100)
    tier.published(A).mkdir()
    late.leave()
    assert not tier.parts(A)
    assert not list((tier.root / "trash").iterdir())


def test_a_claim_that_the_disk_refuses_lets_go_of_what_it_would_have_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_of(tmp_path)
    fill(tier, A, 100).leave()
    (left,) = tier.parts(A)
    with monkeypatch.context() as patched:
        patched.setattr("secrets.token_hex", lambda count: left.name.partition(".")[2])
        with pytest.raises(FileExistsError):
            tier.claim(A)
    part = tier.claim(A)
    assert part is not None
    assert part.orphan is not None
    assert part.orphan.path == left


def test_a_verdict_stands_while_somebody_lives_who_has_acted_on_it(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    tombstone = fill(tier, A, 10).give_up()
    assert tombstone is not None
    assert tier.claim(A) is None
    tombstone.close()
    assert tier.claim(A) is not None
    assert not tier.tombstone(A).exists()


def test_a_verdict_of_which_only_a_half_is_left_stands_for_nobody(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    tombstone = fill(tier, A, 10).give_up()
    assert tombstone is not None
    (tier.tombstone(A) / "names").unlink()
    assert tier.claim(A) is not None
    assert not tier.tombstone(A).exists()
    tombstone.close()


def test_what_the_tier_did_not_make_stays(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 140 * KIB)
    foreign = tier.root / "shards" / "thesis.tex"
    foreign.write_text("years of work")
    publish(tier, A, 80 * KIB)
    publish(tier, B, 80 * KIB)
    assert foreign.read_text() == "years of work"
    assert [s.digest for s in tier.shards()] == [B]


def test_a_limit_is_kept_with_the_tier(tmp_path: Path) -> None:
    root = tier_of(tmp_path, 12345).root
    assert Tier(root).limit_bytes == 12345
    assert Tier.open(root).limit_bytes == 12345


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda root: root.chmod(0o777), "others may write"),
        (lambda root: (root / "tier.json").write_text('{"format": 99, "limit_bytes": 1}'), "format 99"),
        (lambda root: (root / "tier.json").write_text("[]"), "not a record"),
        (lambda root: ((root / "gone").rmdir(), (root / "gone").symlink_to("/tmp")), "symbolic link"),
    ],
)
def test_a_directory_that_cannot_be_trusted_is_refused(tmp_path: Path, spoil: object, says: str) -> None:
    root = tier_of(tmp_path).root
    spoil(root)  # type: ignore[operator]
    with pytest.raises(CacheError, match=says):
        Tier(root)


def test_a_place_that_cannot_be_made_says_which_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"file/tier can't be used.*STREAMLOAD_CACHE_DIR"):
        Tier(tmp_path / "file" / "tier", 1)
    with pytest.raises(CacheError, match="no streamload cache"):
        Tier.open(tmp_path)


def test_a_process_that_is_stopped_while_it_decides_blocks_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamload.cache.locks.PATIENCE_SECONDS", 0.3)
    tier = tier_of(tmp_path)
    with waiting(decide_and_wait, tier.root) as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(CacheError, match="makes no progress"):
            tier.claim(A)
    assert tier.claim(A) is not None


def test_a_wait_counts_from_when_the_lock_last_went_from_one_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many who decide, one after the other, aren't one that doesn't go on."""
    monkeypatch.setattr("streamload.cache.locks.PATIENCE_SECONDS", 1.0)
    tier = tier_of(tmp_path)
    decided = threading.Event()

    def decide() -> None:
        part = tier.claim(A)
        assert part is not None
        part.discard()
        decided.set()

    with exclusive(tier.root / "lock"):
        waiter = threading.Thread(target=decide)
        waiter.start()
        with (tier.root / "lock").open("r+b", buffering=0) as file:  # as the next ones would
            for number in range(12):
                time.sleep(0.2)
                file.seek(0)
                file.write(number.to_bytes(16, "little"))
    waiter.join()
    assert decided.is_set()


def test_a_child_that_is_forked_while_a_thread_decides_does_not_hold_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamload.cache.locks.PATIENCE_SECONDS", 1.0)
    tier = tier_of(tmp_path)
    holds, goes_on = threading.Event(), threading.Event()

    def decide() -> None:
        with exclusive(tier.root / "lock"):
            holds.set()
            goes_on.wait()

    thread = threading.Thread(target=decide)
    thread.start()
    holds.wait()
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        goes_on.set()
        thread.join()
        assert tier.claim(A) is not None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_waits_are_the_nearest_visits_of_all_live_runs(tmp_path: Path) -> None:
    rng = random.Random(3)
    digests = [rng.randbytes(16).hex() for _ in range(50)]
    digests += [digest[:16] + "0" * 16 for digest in digests[:20]]  # prepared forms: the same short name
    told = [rng.choices(digests[:40], k=30) for _ in range(3)]
    expected: dict[str, float] = {}
    with ExitStack() as stack:
        for visits in told:
            run = DemandFile(tmp_path)
            stack.callback(run.close)
            run.announce(visits)
            for digest in digests:
                near = [at for at, visit in enumerate(visits) if visit[:16] == digest[:16]]
                if near:
                    expected[digest] = min(expected.get(digest, 1e9), near[0])
        assert next_uses(tmp_path, digests) == expected
    assert next_uses(tmp_path, digests) == {}


def test_a_disk_that_refuses_a_sign_of_life_once_ends_nothing(tmp_path: Path) -> None:
    part = fill(tier_of(tmp_path), A, 100)
    away = part.path.rename(tmp_path / "away")
    part.path.write_bytes(b"")  # not a directory
    part.touch()
    part.path.unlink()
    away.rename(part.path)
    before = (part.path / "index").stat().st_mtime_ns
    part.touch()
    assert (part.path / "index").stat().st_mtime_ns > before


def test_what_has_long_gone_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamload.cache.directory._FORGOTTEN", 3)
    tier = tier_of(tmp_path)
    for number in range(20):
        digest = f"{number:032x}"
        publish(tier, digest, 10)
        assert tier.used_bytes > 0
        tier.trash(tier.published(digest))
    assert len(tier._measured) <= 2 * 1 + 3 + 1


def delete_and_die(root: Path, after: int) -> None:
    """Take a shard away, and be killed when so many of its files are deleted."""
    unlink, deleted = os.unlink, 0

    def killed_first(*args: Any, **named: Any) -> None:
        nonlocal deleted
        if deleted == after:
            os.kill(os.getpid(), signal.SIGKILL)
        deleted += 1
        unlink(*args, **named)

    os.unlink = killed_first
    Tier(root).trash(root / "shards" / A)


@pytest.mark.parametrize("after", [0, 1])
def test_a_living_process_removes_what_a_killed_one_was_deleting(tmp_path: Path, after: int) -> None:
    tier = Tier(tmp_path / "tier", 1 << 20, enforce_seconds=0)
    publish(tier, A, 100)
    child = os.fork()
    if not child:
        delete_and_die(tier.root, after)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list(tier.own("trash"))) == 1
    tier.budget.enforce_limits()
    assert list(tier.own("trash")) == []


def test_what_was_taken_away_while_it_was_read_goes_once_nobody_reads_it(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier", 1 << 20, enforce_seconds=0)
    reader = FileLock.acquire(publish(tier, A, 100) / "names", shared=True)
    assert reader is not None
    tier.trash(tier.published(A))
    tier.budget.enforce_limits()
    assert len(list(tier.own("trash"))) == 1
    reader.close()
    tier.budget.enforce_limits()
    assert list(tier.own("trash")) == []


def noted(tier: Tier) -> int | None:
    """What the tier takes at most, as its lock's file says."""
    return tier.budget._noted_bytes()


def test_a_fill_beside_many_shards_looks_at_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_of(tmp_path, 1 << 30)
    for number in range(40):
        publish(tier, f"{number:032x}", 100)
    looked_at: list[str] = []
    held = Tier._held

    def seen(self: Tier, kind: str, entry: os.DirEntry[str]) -> Any:
        looked_at.append(kind)
        return held(self, kind, entry)

    monkeypatch.setattr(Tier, "_held", seen)
    another = Tier(tier.root, enforce_seconds=0)  # as a process that has just begun
    part = fill(another, A, 100_000)
    assert part.reserve(200_000, 0)
    part.publish()
    another.budget.enforce_limits()
    assert another.budget.bound.startswith("its limit")
    assert looked_at == []
    assert another.used_bytes == noted(another)
    assert len(looked_at) == 41


@pytest.mark.parametrize("seed", range(4))
def test_what_is_noted_is_never_less_than_what_a_tier_takes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tiers = [tier_of(tmp_path, 900 * KIB), Tier(tmp_path / "tier", enforce_seconds=0)]
    parts: list[tuple[Part, int]] = []
    digests = [f"{number:032x}" for number in range(12)]
    with ExitStack() as stack:
        for _ in range(150):
            tier = rng.choice(tiers)
            match rng.choice(
                ["claim", "claim", "grow", "publish", "publish", "discard", "leave", "give up", "trash"]
            ):
                case "claim":
                    part = tier.claim(rng.choice(digests))
                    if part is not None:
                        parts.append((part, 0))
                case "grow" if parts:
                    part, size = parts.pop(rng.randrange(len(parts)))
                    larger = size + rng.randrange(100 * KIB)
                    if larger > size and part.reserve(larger, 0):
                        (part.path / "names").write_bytes(b"")
                        (part.path / "data").write_bytes(bytes(larger - rng.randrange(larger - size)))
                        size = larger
                    parts.append((part, size))
                case "publish" | "discard" | "leave" | "give up" as how if parts:
                    part, size = parts.pop(rng.randrange(len(parts)))
                    if how == "give up" and size:
                        tombstone = part.give_up()
                        assert tombstone is not None
                        stack.callback(tombstone.close)
                    elif how == "publish" and size:
                        part.publish()
                    else:
                        part.leave() if how == "leave" else part.discard()
                case "trash":
                    tier.trash(tier.published(rng.choice(digests)))
            tier.budget.enforce_limits()
            at_most = noted(tier)
            assert at_most is None or tier.used_bytes <= at_most
            assert tier.used_bytes <= tier.limit_bytes
        assert tier.budget.count() == tier.used_bytes == noted(tier)
        for part, _ in parts:
            part.discard()


def test_a_version_that_notes_nothing_leaves_no_note_that_holds(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 1 << 20)
    publish(tier, A, 100)
    assert noted(tier) is not None
    with (tier.root / "lock").open("r+b") as lock:
        lock.write(os.urandom(16))  # the stamp of who decides: all that was there once
    assert noted(tier) is None
    publish(tier, B, 100)
    assert noted(tier) == tier.used_bytes


def test_a_note_that_was_written_in_part_or_changed_does_not_hold(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 1 << 20)
    publish(tier, A, 100)
    content = (tier.root / "lock").read_bytes()
    for spoiled in (b"", content[:-1], content[:16], content[:-9] + b"\1" + content[-8:]):
        (tier.root / "lock").write_bytes(spoiled)
        assert noted(tier) is None
    part = tier.claim(B)
    assert part is not None
    assert part.reserve(100, 0)
    assert noted(tier) == tier.used_bytes
    part.discard()


def test_a_lock_is_that_of_a_path_as_long_as_its_file_is_there(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with contextlib.closing(FileLock.acquire(path, create=True)) as lock:
        assert lock.is_of(path)
        path.unlink()
        assert not lock.is_of(path)
        with contextlib.closing(FileLock.acquire(path, create=True)) as other:
            assert other.is_of(path)
            assert not lock.is_of(path)
    assert not lock.is_of(path)


def test_a_record_is_whole_although_no_lock_holds_others_back(tmp_path: Path) -> None:
    record, texts = tmp_path / "tier.json", [str(number) * 20_000 for number in range(3)]
    write_whole(record, texts[0])

    def write(text: str) -> None:
        for _ in range(300):
            write_whole(record, text)

    with ThreadPoolExecutor(len(texts)) as pool:
        written = [pool.submit(write, text) for text in texts]
        while not all(future.done() for future in written):
            assert record.read_text() in texts
    assert [future.result() for future in written] == [None] * len(texts)
    assert list(tmp_path.iterdir()) == [record]
