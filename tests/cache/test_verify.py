"""`verify` and `repair`: every kind of damage is found, and nothing else; what is fetched, from where."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamload.cache.inventory import Foreign, foreign
from streamload.cache.locks import FileLock
from streamload.cache.repair import Repair, repair
from streamload.cache.shard import Shard, shard_of
from streamload.cache.tier import Tier
from streamload.cache.verify import ShardDamage, verify
from streamload.daemon.warm import warm
from streamload.origins.origin import OriginOptions
from streamload.shards.record import HEADER_START, RECORD, read_header
from streamload.testing.faults import Fault
from streamload.testing.shards import write_shards
from tests.support.indexes import WrittenIndex
from tests.support.tiers import SAMPLES, SHARDS, Filled, flip, in_a_child, listing, payload_start, swap

QUICK = OriginOptions(attempts=1, backoff_seconds=0.01)


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    filled = Filled(tmp_path)
    yield filled
    filled.close()


def damages(tier: Tier, **options: object) -> list[ShardDamage]:
    return [look.damage for look in verify(tier, **options) if look is not None and look.damage is not None]  # type: ignore[arg-type]


def repaired(tier: Tier, known: dict[str, Shard] | None = None) -> list[Repair]:
    return list(repair(tier, damages(tier, by_digest=known, take_out=True), by_digest=known, options=QUICK))


def known(*urls: str) -> dict[str, Shard]:
    return {shard.digest: shard for shard in (shard_of(url, None) for url in urls)}


def first_record(shard: Path) -> int:
    index = (shard / "index").read_bytes()
    return read_header(lambda size, offset: index[offset : offset + size])[1]


def flipped_in_data(filled: Filled) -> None:
    flip(filled.shard(1) / "data", payload_start(filled.shard(1), 7))


def flipped_at_the_end_of_data(filled: Filled) -> None:
    flip(filled.shard(1) / "data", payload_start(filled.shard(1), SAMPLES - 1))


def cut_data(filled: Filled) -> None:
    os.truncate(filled.shard(1) / "data", payload_start(filled.shard(1), 7))


def longer_data(filled: Filled) -> None:
    with (filled.shard(1) / "data").open("ab") as data:
        data.write(b"more")


def no_data(filled: Filled) -> None:
    (filled.shard(1) / "data").unlink()


def no_index(filled: Filled) -> None:
    (filled.shard(1) / "index").unlink()


def no_names(filled: Filled) -> None:
    (filled.shard(1) / "names").unlink()


def flipped_in_a_record(filled: Filled) -> None:
    flip(filled.shard(1) / "index", first_record(filled.shard(1)) + 3 * RECORD.itemsize + 8)


def flipped_in_the_header(filled: Filled) -> None:
    flip(filled.shard(1) / "index", HEADER_START.size + 3)


def flipped_in_names(filled: Filled) -> None:
    flip(filled.shard(1) / "names", 40)


def index_without_its_end(filled: Filled) -> None:
    path = filled.shard(1) / "index"
    os.truncate(path, path.stat().st_size - RECORD.itemsize)


def empty_index(filled: Filled) -> None:
    os.truncate(filled.shard(1) / "index", 0)


def another_size_in_the_index(filled: Filled) -> None:
    """An index that holds in itself, of a tar of another length than its version says."""
    path = filled.shard(1)
    (path / "index").unlink()
    (path / "names").unlink()
    with WrittenIndex(path, {"url": filled.urls[1], "digest": filled.digest(1), "size": 5}) as index:
        index.finish(size=(path / "data").stat().st_size)


DAMAGES: dict[Callable[[Filled], None], str] = {
    flipped_in_data: r"sample 7 \(.*\) fails its checksum",
    flipped_at_the_end_of_data: rf"sample {SAMPLES - 1} \(.*\) fails its checksum",
    cut_data: "bytes of data instead of",
    longer_data: "bytes of data instead of",
    no_data: "data is missing",
    no_index: "index is missing",
    no_names: "names is missing",
    flipped_in_a_record: "stops after 3 samples: the next record fails",
    flipped_in_the_header: "its header fails its checksum",
    flipped_in_names: "its names fail their checksum",
    index_without_its_end: f"stops after {SAMPLES} samples: it has no end record",
    empty_index: "no header yet, or a cut one",
    another_size_in_the_index: "states both 5 and",
}


@pytest.mark.parametrize(("harm", "says"), DAMAGES.items(), ids=[harm.__name__ for harm in DAMAGES])
def test_damage_is_found_taken_out_and_fetched_again(
    harm: Callable[[Filled], None], says: str, filled: Filled
) -> None:
    harm(filled)
    before = listing(filled.root)
    (found,) = damages(filled.tier)
    assert listing(filled.root) == before
    assert (found.digest, found.kind, found.taken_out) == (filled.digest(1), "shards", False)
    assert re.search(says, found.cause), found.cause
    tells_its_url = harm not in {no_index, empty_index, flipped_in_the_header}
    assert found.url == (filled.urls[1] if tells_its_url else "")
    (done,) = repaired(filled.tier, None if tells_its_url else known(*filled.urls))
    assert (done.is_done, done.fate) == (True, "fetched again"), done
    assert filled.asked_for() == {"00001.tar"}
    assert not damages(filled.tier)
    assert all(filled.is_whole(number) for number in range(SHARDS))
    assert not list((filled.root / "trash").iterdir())
    assert not list((filled.root / "parts").iterdir())


def test_a_sound_tier_has_every_sample_read_and_is_not_touched(filled: Filled) -> None:
    before = listing(filled.root)
    looks = list(verify(filled.tier, jobs=3))
    assert [look.samples for look in looks if look is not None] == [SAMPLES] * SHARDS
    payloads = sum(look.size_bytes for look in looks if look is not None)
    assert payloads > 0.3 * sum(path.stat().st_size for path in filled.paths)
    assert not any(look.damage for look in looks if look is not None)
    assert listing(filled.root) == before


def test_swapped_data_is_found_on_both_sides(filled: Filled) -> None:
    swap(filled.shard(0) / "data", filled.shard(2) / "data")
    assert {found.digest for found in damages(filled.tier)} == {filled.digest(0), filled.digest(2)}
    assert all(done.is_done for done in repaired(filled.tier))
    assert all(filled.is_whole(number) for number in range(SHARDS))


def test_swapped_shards_are_found_by_their_names(filled: Filled) -> None:
    swap(filled.shard(0), filled.shard(2))
    found = damages(filled.tier)
    assert {one.digest for one in found} == {filled.digest(0), filled.digest(2)}
    assert all("another shard" in one.cause for one in found)
    assert all(done.is_done for done in repaired(filled.tier, known(*filled.urls)))
    assert all(filled.is_whole(number) for number in range(SHARDS))


@pytest.mark.parametrize("name", ["data", "index", "names"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_the_tier_did_not_make_is_told_and_neither_followed_nor_removed(
    name: str, kind: str, filled: Filled, tmp_path: Path
) -> None:
    path = filled.shard(1) / name
    treasure = tmp_path / "treasure"
    path.rename(treasure)  # what a link leads to is sound: only following it would find it so
    if kind == "link":
        path.symlink_to(treasure)
    else:
        os.mkfifo(path)
    (found,) = damages(filled.tier, take_out=True)
    assert ("symbolic link" if kind == "link" else "not a regular file") in found.cause
    assert not found.taken_out
    (done,) = repair(filled.tier, [found])
    assert not done.is_done
    assert path.is_symlink() or path.is_fifo()
    assert treasure.exists()
    assert [one.path for one in foreign(filled.tier)] == [path]


def test_a_planted_directory_link_is_no_shard(filled: Filled, tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    shutil.copytree(filled.shard(0), treasure)
    flip(treasure / "data", payload_start(treasure, 3))
    planted = filled.root / "shards" / ("f" * 32)
    planted.symlink_to(treasure)
    before = listing(treasure)
    assert not damages(filled.tier, take_out=True)
    assert listing(treasure) == before
    assert [(one.path, one.what) for one in foreign(filled.tier)] == [(planted, "a symbolic link")]


def test_a_file_that_may_not_be_read_is_damage_and_no_crash() -> None:
    """As a user without root's rights, who made the tier, but not what one of its files became."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    user = 65534 if os.geteuid() == 0 else os.geteuid()

    def work() -> None:
        filled = Filled(place / "work")
        try:
            (filled.shard(1) / "data").chmod(0)
            (filled.shard(2) / "index").chmod(0)
            filled.shard(3).chmod(0)
            found = {one.digest: one.cause for one in damages(filled.tier)}
            assert found == {
                filled.digest(1): "data can't be read: Permission denied",
                filled.digest(2): "index can't be read: Permission denied",
                filled.digest(3): f"{filled.digest(3)} can't be read: Permission denied",
            }
            done = repaired(filled.tier, known(*filled.urls))
            filled.shard(3).chmod(0o700)
            assert {one.damage.digest: one.is_done for one in done} == {
                filled.digest(1): True,
                filled.digest(2): True,
                filled.digest(3): False,
            }
        finally:
            filled.close()

    try:
        if os.geteuid() == 0:
            os.chown(place, user, user)
            in_a_child(work, uid=user)
        else:
            work()
    finally:
        shutil.rmtree(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_told_and_its_shard_stays(filled: Filled) -> None:
    path = filled.shard(1) / "data"
    flip(path, payload_start(filled.shard(1), 0))
    os.chown(path, 65534, 65534)
    (found,) = damages(filled.tier, take_out=True)
    assert not found.taken_out
    assert path.exists()
    assert [one.what for one in foreign(filled.tier)] == ["a file of another user (uid 65534)"]


def test_an_orphan_is_verified_as_far_as_its_entries_go(filled: Filled) -> None:
    orphan = filled.orphan(2)
    looks = [look for look in verify(filled.tier) if look is not None]
    (part,) = [look for look in looks if look.held.kind == "parts"]
    assert part.damage is None
    assert SAMPLES // 4 <= part.samples < SAMPLES
    flip(orphan / "data", payload_start(orphan, 1))
    (found,) = damages(filled.tier, take_out=True)
    assert (found.kind, found.taken_out) == ("parts", True)
    assert "sample 1" in found.cause
    assert not orphan.exists()
    assert [done.is_done for done in repair(filled.tier, [found])] == [True]
    assert not filled.asked_for()


def test_an_index_without_data_is_verified_by_itself(filled: Filled) -> None:
    index_only = filled.index_only(2)
    looks = [look for look in verify(filled.tier) if look is not None]
    assert [look.samples for look in looks] == [SAMPLES] * SHARDS
    assert looks[-1].size_bytes == 0
    flip(index_only / "names", 40)
    (found,) = damages(filled.tier, take_out=True)
    assert (found.kind, found.taken_out) == ("bare", True)
    assert not index_only.exists()
    assert [done.fate for done in repair(filled.tier, [found])] == ["removed"]


def test_an_index_that_does_not_say_which_shard_it_is_of_is_damage(filled: Filled) -> None:
    path = filled.shard(1)
    (path / "index").unlink()
    (path / "names").unlink()
    with WrittenIndex(path, {"url": filled.urls[1]}) as index:
        index.finish(size=(path / "data").stat().st_size)
    (found,) = damages(filled.tier)
    assert "another shard" in found.cause


def test_an_orphan_whose_filler_died_before_its_first_sample_is_no_damage(filled: Filled) -> None:
    filled.tier.trash(filled.shard(0))
    part = filled.tier.claim(filled.digest(0))
    assert part is not None
    part.leave()
    assert not damages(filled.tier)


def test_a_part_with_a_live_filler_is_left_to_it(filled: Filled) -> None:
    orphan = filled.orphan(2)
    flip(orphan / "data", payload_start(orphan, 1))
    filler = FileLock.acquire(orphan / "index")
    assert filler is not None
    assert not damages(filled.tier, take_out=True)
    filler.close()
    assert len(damages(filled.tier)) == 1


def test_a_shard_that_goes_or_comes_anew_meanwhile_is_no_error(filled: Filled) -> None:
    looks = verify(filled.tier, jobs=1)
    first = next(looks)
    assert first is not None
    for number in range(SHARDS):
        if filled.digest(number) != first.held.digest:
            filled.tier.trash(filled.shard(number))
    rest = list(looks)
    assert len(rest) == SHARDS - 1
    assert not any(look.damage for look in rest if look is not None)
    assert rest[-1] is None


@pytest.mark.parametrize("at", ["the end of the reading", "the decision"])
def test_damage_that_somebody_else_has_mended_meanwhile_is_not_taken_out(
    at: str, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damaged shard is taken away and published anew after it was read."""
    from streamload.cache import verify as module

    flipped_in_data(filled)
    read, look_into = module._ShardCheck.run, module.foreign_in

    def mend() -> None:
        filled.tier.quarantine(filled.shard(1))
        assert warm(filled.urls, cache_dir=filled.root).shards_complete == SHARDS

    def run_and_mend(look: module._ShardCheck) -> None:
        read(look)
        if look.cause:
            mend()

    def look_and_mend(path: Path) -> list[Foreign]:
        mend()
        return look_into(path)

    if at == "the decision":
        monkeypatch.setattr(module, "foreign_in", look_and_mend)
    else:
        monkeypatch.setattr(module._ShardCheck, "run", run_and_mend)
    assert not any(damage.taken_out for damage in damages(filled.tier, take_out=True))
    assert filled.is_whole(1)
    assert filled.shard(1).exists()


def test_a_shard_is_pinned_while_it_is_read(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamload.cache import verify as module
    from streamload.cache.garbage import clear

    cleared = []

    def check(look: module._ShardCheck, *_: object) -> None:
        if not cleared:
            cleared.append(clear(filled.tier))

    monkeypatch.setattr(module._ShardCheck, "_check_samples", check)
    list(verify(filled.tier, jobs=1))
    (kept,) = cleared[0].kept
    assert kept.why == "a process has it open"
    assert len(cleared[0].removed) == SHARDS - 1


def test_a_url_that_the_index_does_not_hold_whole_is_fetched_once_it_is_named(tmp_path: Path) -> None:
    filled = Filled(tmp_path, query="?version=2")
    try:
        flipped_in_data(filled)
        (done,) = repaired(filled.tier)
        assert not done.is_done
        assert "give the shards' URLS" in done.fate
        assert not filled.asked_for()
        assert not filled.shard(1).exists()
        warm(filled.urls, cache_dir=filled.root)
        filled.asked = len(filled.server.log)
        flipped_in_data(filled)
        (done,) = repaired(filled.tier, known(*filled.urls))
        assert done.is_done
        assert filled.is_whole(1)
    finally:
        filled.close()


def test_a_repair_that_is_refused_leaves_no_verdict_for_the_trainings(tmp_path: Path) -> None:
    """The index has no signature, which is no part of a URL's identity: without it the origin may refuse."""
    filled = Filled(tmp_path, query="?X-Amz-Signature=hush")
    try:
        flipped_in_data(filled)
        filled.server.misbehave("00001.tar", Fault(status=403))
        (done,) = repaired(filled.tier)
        assert not done.is_done
        assert "not fetched again" in done.fate
        assert "hush" not in repr(done)
        assert filled.asked_for() == {"00001.tar"}
        assert not filled.tier.tombstone(filled.digest(1)).exists()
        filled.server.misbehave("00001.tar", Fault(body=b"<html>Please sign in.</html>" * 100))
        (done,) = repair(filled.tier, [done.damage], options=QUICK)
        assert not done.is_done
        assert not filled.tier.tombstone(filled.digest(1)).exists()
        assert not list((filled.root / "parts").iterdir())
        filled.server.misbehave("00001.tar")
        assert warm(filled.urls, cache_dir=filled.root).shards_complete == SHARDS
        assert filled.is_whole(1)
    finally:
        filled.close()


def test_a_command_in_an_index_is_never_run_and_a_named_one_is(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path / "data", [SAMPLES], seed=42)
    marker = tmp_path / "marker"
    url = f"pipe:echo run >> {marker}; cat {path}"
    tier = Tier(warm(url, cache_dir=tmp_path / "tier", cache_size="1GB").cache_dir)
    shard = shard_of(url, None)
    flip(tier.published(shard.digest) / "data", payload_start(tier.published(shard.digest), 2))
    marker.unlink()
    (done,) = repaired(tier)
    assert not done.is_done
    assert "give the shards' URLS" in done.fate
    assert not marker.exists()
    warm(url, cache_dir=tmp_path / "tier")
    flip(tier.published(shard.digest) / "data", payload_start(tier.published(shard.digest), 2))
    marker.unlink()
    (done,) = repaired(tier, known(url))
    assert done.is_done
    assert marker.read_text() == "run\n"


def test_a_local_shard_is_compared_with_its_file_only_where_it_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "data", [SAMPLES, SAMPLES], seed=43)
    urls = [str(path) for path in paths]
    tier = Tier(warm(urls, cache_dir=tmp_path / "tier", cache_size="1GB").cache_dir)
    assert not damages(tier)
    os.utime(paths[0])
    flip(tier.published(shard_of(urls[1], None).digest) / "names", 30)
    (found,) = damages(tier)
    assert found.digest == shard_of(urls[1], None).digest
    both = damages(tier, by_digest=known(*urls))
    assert {one.cause for one in both} > {"its file was changed since it was indexed"}
    assert all(done.is_done for done in repaired(tier, known(*urls)))
    assert not damages(tier, by_digest=known(*urls))


def test_a_shard_that_another_process_fetches_meanwhile_is_left_to_it(filled: Filled) -> None:
    flipped_in_data(filled)
    found = damages(filled.tier, take_out=True)
    part = filled.tier.claim(filled.digest(1))
    assert part is not None
    (done,) = repair(filled.tier, found)
    assert (done.fate, done.is_done) == ("removed; another process fetches it again", True)
    part.discard()
    (done,) = repair(filled.tier, found)
    assert done.fate == "fetched again"
    (done,) = repair(filled.tier, found)
    assert done.fate == "fetched again by another process"


def test_a_shard_without_room_is_said_to_be_out(filled: Filled) -> None:
    flipped_in_data(filled)
    found = damages(filled.tier, take_out=True)
    tight = Tier(filled.root, filled.tier.used_bytes + 20_000)
    (done,) = repair(tight, found)
    assert (done.is_done, done.fate) == (False, "removed; there is no space to fetch it again")


def test_verification_that_is_given_up_ends_its_threads(filled: Filled) -> None:
    looks = verify(filled.tier, jobs=2)
    next(looks)
    assert any(thread.name.startswith("streamload-verify") for thread in threading.enumerate())
    looks.close()
    assert not any(thread.name.startswith("streamload-verify") for thread in threading.enumerate())


def test_a_large_sample_is_not_read_into_memory_at_once(tmp_path: Path) -> None:
    size = 48 << 20
    path = tmp_path / "large.tar"
    with tarfile.open(path, "w") as tar, open("/dev/zero", "rb") as zeros:
        info = tarfile.TarInfo("a.jpg")
        info.size = size
        tar.addfile(info, zeros)
    tier = Tier(warm(f"pipe:cat {path}", cache_dir=tmp_path / "tier", cache_size="1GB").cache_dir)
    tracemalloc.start()
    try:
        (look,) = verify(tier, jobs=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert look is not None
    assert look.damage is None
    assert look.size_bytes == size
    assert peak < 8 << 20
