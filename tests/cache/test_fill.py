"""One shard from its origin into a tier: what is published, taken up, given up, refused."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamload.cache.fill import Filled, FillOptions, Outcome, fill
from streamload.cache.part import Part
from streamload.cache.shard import shard_of
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt, CacheError, CacheFull, DatasetChanged
from streamload.metrics import Counters
from streamload.origins.origin import Origin, open_origin
from streamload.shards.index import IndexWriter, Packed
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards
from tests.support.tiers import flip, until

COUNT = 40


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "data", [COUNT], seed=31)
    with ShardServer(tmp_path / "data") as server:
        yield server


class Filler:
    """Fills the server's one shard, as often as it is told."""

    def __init__(self, server: ShardServer, root: Path, limit: int = 1 << 30):
        self.counts = Counters()
        self.tier = Tier(root, limit, self.counts)
        self.shard = shard_of(f"{server.url}/00000.tar", None)
        self.stop = threading.Event()

    def claim(self) -> Part:
        part = self.tier.claim(self.shard.digest)
        assert part is not None
        return part

    def origin(self) -> Origin:
        return open_origin(self.shard.url, counters=self.counts, stop=self.stop)

    def fill(self, size_bytes: int = 0) -> Outcome:
        options = FillOptions(size_bytes)
        return fill(self.claim(), self.shard, self.origin, options, next_use=lambda: 0.0, stop=self.stop)

    def abandon(self, server: ShardServer, fraction: float) -> None:
        """Fill a share of the shard, then die like a process that is stopped in the middle."""
        server.stop_after(fraction)
        part = self.claim()
        arguments = {"next_use": lambda: 0.0, "stop": self.stop}
        thread = threading.Thread(target=fill, args=(part, self.shard, self.origin), kwargs=arguments)
        thread.start()
        view = ShardView(self.tier, self.shard)
        while view.count < COUNT * fraction / 2:
            view.refresh()
        view.close()
        self.stop.set()
        thread.join()
        self.stop.clear()
        server.go_on()


def samples(filler: Filler) -> list[tuple[str, dict[str, bytes]]]:
    with contextlib.closing(ShardView(filler.tier, filler.shard)) as view:
        return contents(view)


def contents(view: ShardView) -> list[tuple[str, dict[str, bytes]]]:
    assert view.ended
    found = []
    for number in range(view.count):
        read = view.read(number)
        assert read is not None
        entry, members = read
        found.append((entry.key, {extension: bytes(data) for extension, data in members.items()}))
    return found


def test_a_filled_shard_is_byte_for_byte_the_origins(server: ShardServer, tmp_path: Path) -> None:
    filler = Filler(server, tmp_path / "tier")
    assert filler.fill().result is Filled.PUBLISHED
    assert samples(filler) == read_oracle(tmp_path / "data" / "00000.tar")
    data = (filler.tier.published(filler.shard.digest) / "data").read_bytes()
    assert data == (tmp_path / "data" / "00000.tar").read_bytes()
    assert filler.tier.claim(filler.shard.digest) is None


def test_a_bare_index_is_not_begun_without_room(server: ShardServer, tmp_path: Path) -> None:
    filler = Filler(server, tmp_path / "tier", limit=16 << 10)
    with pytest.raises(CacheFull):
        fill(
            filler.claim(),
            filler.shard,
            filler.origin,
            FillOptions(index_only=True),
            next_use=lambda: 0.0,
            stop=filler.stop,
        )
    assert not server.log
    assert filler.tier.used_bytes == 0


def test_a_fill_that_is_stopped_before_its_first_sample_leaves_nothing(
    server: ShardServer, tmp_path: Path
) -> None:
    filler = Filler(server, tmp_path / "tier")
    server.stop_after(0.001)
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(filler.fill()))
    thread.start()
    until(lambda: bool(server.ranges("00000.tar")))
    filler.stop.set()
    thread.join()
    assert [outcome.result for outcome in outcomes] == [Filled.STOPPED]
    assert not filler.tier.parts(filler.shard.digest)
    assert not list(filler.tier.own("trash"))


def test_a_stopped_fill_is_taken_up_at_its_last_whole_sample(server: ShardServer, tmp_path: Path) -> None:
    filler = Filler(server, tmp_path / "tier")
    filler.abandon(server, 0.6)
    assert filler.fill().result is Filled.PUBLISHED
    assert samples(filler) == read_oracle(tmp_path / "data" / "00000.tar")
    first, second = server.ranges("00000.tar")
    assert first[0] == 0
    assert second[0] > 0.2 * second[1]
    assert filler.counts.snapshot().shards_taken_over == 1
    assert not filler.tier.parts(filler.shard.digest)


def test_a_stopped_fill_of_a_compressed_shard_is_taken_up_by_unpacking_it_again(
    server: ShardServer, tmp_path: Path
) -> None:
    plain = tmp_path / "data" / "00000.tar"
    (tmp_path / "data" / "00000.tar.gz").write_bytes(gzip.compress(plain.read_bytes(), 1))
    filler = Filler(server, tmp_path / "tier")
    filler.shard = shard_of(f"{server.url}/00000.tar.gz", None)
    filler.abandon(server, 0.6)
    assert filler.fill().result is Filled.PUBLISHED
    assert filler.counts.snapshot().shards_taken_over == 1
    assert samples(filler) == read_oracle(plain)
    assert (filler.tier.published(filler.shard.digest) / "data").read_bytes() == plain.read_bytes()


def test_a_prefix_that_has_rotted_is_taken_up_only_to_there(server: ShardServer, tmp_path: Path) -> None:
    filler = Filler(server, tmp_path / "tier")
    filler.abandon(server, 0.6)
    (orphan,) = filler.tier.parts(filler.shard.digest)
    with (orphan / "data").open("r+b") as data:
        size = data.seek(0, 2)
        data.seek(size // 2)
        byte = data.read(1)
        data.seek(size // 2)
        data.write(bytes([byte[0] ^ 1]))
    assert filler.fill().result is Filled.PUBLISHED
    assert samples(filler) == read_oracle(tmp_path / "data" / "00000.tar")
    assert server.ranges("00000.tar")[1][0] <= size // 2


@pytest.mark.parametrize("kind", ["a FIFO", "a link"])
def test_what_no_filler_made_in_place_of_a_prefix_is_not_opened(
    kind: str, server: ShardServer, tmp_path: Path
) -> None:
    filler = Filler(server, tmp_path / "tier")
    filler.abandon(server, 0.6)
    (orphan,) = filler.tier.parts(filler.shard.digest)
    (orphan / "data").rename(tmp_path / "moved")
    if kind == "a FIFO":
        os.mkfifo(orphan / "data")
    else:
        (orphan / "data").symlink_to(tmp_path / "moved")
    assert filler.fill().result is Filled.PUBLISHED
    assert samples(filler) == read_oracle(tmp_path / "data" / "00000.tar")
    assert filler.counts.snapshot().shards_taken_over == 0


def test_a_prefix_of_another_version_is_thrown_away(server: ShardServer, tmp_path: Path) -> None:
    filler = Filler(server, tmp_path / "tier")
    filler.abandon(server, 0.6)
    write_shards(tmp_path / "data", [COUNT + 1], seed=32)
    assert filler.fill().result is Filled.OUTDATED
    assert filler.fill().result is Filled.PUBLISHED
    assert samples(filler) == read_oracle(tmp_path / "data" / "00000.tar")


def test_a_prefix_whose_version_another_backend_does_not_prove_is_fetched_anew(
    server: ShardServer, tmp_path: Path
) -> None:
    filler = Filler(server, tmp_path / "tier")
    filler.abandon(server, 0.6)
    server.misbehave("00000.tar", Fault(headers={"ETag": '"another"'}))
    assert filler.fill().result is Filled.OUTDATED
    assert filler.fill().result is Filled.PUBLISHED
    assert samples(filler) == read_oracle(tmp_path / "data" / "00000.tar")


@pytest.mark.parametrize("seed", [31, 32])
def test_what_a_command_writes_for_a_second_filler_is_compared_with_what_was_read(
    server: ShardServer, tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "data" / "00000.tar"
    filler = Filler(server, tmp_path / "tier")
    filler.shard = shard_of(f"pipe:head -c 100000 {path}; sleep 60", None)
    part = filler.claim()
    arguments = {"next_use": lambda: 0.0, "stop": filler.stop}
    thread = threading.Thread(target=fill, args=(part, filler.shard, filler.origin), kwargs=arguments)
    thread.start()
    view = ShardView(filler.tier, filler.shard)
    until(lambda: view.refresh() and view.count > 5)
    filler.stop.set()
    thread.join()
    filler.stop.clear()
    write_shards(tmp_path / "data", [COUNT], seed=seed)
    whole = shard_of(f"pipe:cat {path} | cat", None)
    filler.shard = replace(whole, digest=filler.shard.digest)  # a command that doesn't repeat itself
    assert filler.fill().result is Filled.PUBLISHED
    with contextlib.closing(view):
        if seed == 31:
            until(lambda: (view.refresh(), view.ended)[1])
            assert contents(view) == read_oracle(path)
        else:
            with pytest.raises(DatasetChanged, match="other bytes when it was fetched again"):
                until(lambda: (view.refresh(), view.ended)[1])


def test_a_shard_that_cannot_be_had_leaves_a_verdict(server: ShardServer, tmp_path: Path) -> None:
    filler = Filler(server, tmp_path / "tier")
    server.misbehave("00000.tar", Fault(status=404))
    outcome = filler.fill()
    assert outcome.result is Filled.GAVE_UP
    assert filler.tier.claim(filler.shard.digest) is None
    view = ShardView(filler.tier, filler.shard)
    assert view.gave_up
    assert view.count == 0
    assert view.reader is not None
    assert view.reader.status == "OriginNotFound"
    view.close()
    assert outcome.tombstone is not None
    outcome.tombstone.close()
    server.misbehave("00000.tar")
    assert filler.fill().result is Filled.PUBLISHED


def test_a_shard_without_room_is_not_asked_for_again(server: ShardServer, tmp_path: Path) -> None:
    size = (tmp_path / "data" / "00000.tar").stat().st_size
    filler = Filler(server, tmp_path / "tier", limit=2 * size)
    other = filler.tier.claim("f" * 32)
    assert other is not None
    assert other.reserve(size, 0)
    refused = filler.fill()
    assert refused.result is Filled.NO_ROOM
    assert refused.size_bytes == size
    asked = len(server.log)
    assert filler.fill(refused.size_bytes).result is Filled.NO_ROOM
    assert len(server.log) == asked
    other.discard()
    assert filler.fill(size).result is Filled.PUBLISHED


def test_a_local_shard_is_indexed_and_not_copied(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path / "data", [COUNT], seed=33)
    tier = Tier(tmp_path / "tier", 1 << 20)
    shard = shard_of(str(path), None)
    part = tier.claim(shard.digest)
    assert part is not None
    outcome = fill(part, shard, pytest.fail, next_use=lambda: 0.0, stop=threading.Event())
    assert outcome.result is Filled.PUBLISHED
    assert not (tier.published(shard.digest) / "data").exists()
    view = ShardView(tier, shard)
    assert view.count == COUNT
    view.close()
    write_shards(
        tmp_path / "data", [3], seed=34
    )  # another file in its place: the index is of no use any more
    view = ShardView(tier, shard)
    assert view.count == 0
    view.close()
    assert not tier.published(shard.digest).exists()


@pytest.mark.parametrize("way", ["by a rename", "in place"])
def test_a_local_shard_that_is_replaced_by_one_of_equal_size_and_time_is_indexed_anew(
    tmp_path: Path, way: str
) -> None:
    (path,) = write_shards(tmp_path / "data", [COUNT], seed=33)
    (other,) = write_shards(tmp_path / "other", [COUNT + 1], seed=34)
    before = path.stat()
    os.truncate(path, max(before.st_size, other.stat().st_size))
    os.truncate(other, path.stat().st_size)
    tier = Tier(tmp_path / "tier", 1 << 20)
    shard = shard_of(str(path), None)
    for count in (COUNT, COUNT + 1):
        part = tier.claim(shard.digest)
        assert part is not None
        fill(part, shard, pytest.fail, next_use=lambda: 0.0, stop=threading.Event())
        with contextlib.closing(ShardView(tier, shard)) as view:
            assert contents(view) == read_oracle(path)
            assert view.count == count
        if count == COUNT:
            times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
            if way == "in place":
                path.write_bytes(other.read_bytes())
            else:
                other.rename(path)
            os.utime(path, ns=times)
            assert (path.stat().st_mtime_ns, path.stat().st_size) == (times[1], path.stat().st_size)
            ShardView(tier, shard).close()
            assert not tier.published(shard.digest).exists()


@pytest.mark.parametrize("content", [b"no tar" * 900, None])
def test_a_local_shard_that_was_given_up_and_then_removed_is_looked_at_anew(
    content: bytes | None, tmp_path: Path
) -> None:
    """What was known of it was never let go of, and each look took more descriptors."""
    (path,) = write_shards(tmp_path / "data", [COUNT], seed=33)
    path.write_bytes(content or path.read_bytes()[:-20_000])
    tier = Tier(tmp_path / "tier", 1 << 20)
    shard = shard_of(str(path), None)
    for status in ("ShardFormatError" if content else "ShardCut", "OriginNotFound"):
        part = tier.claim(shard.digest)
        assert part is not None
        outcome = fill(part, shard, pytest.fail, next_use=lambda: 0.0, stop=threading.Event())
        assert outcome.tombstone is not None
        with contextlib.closing(ShardView(tier, shard)) as view:
            assert view.reader is not None
            assert view.reader.status == status
        path.unlink(missing_ok=True)
        held = len(os.listdir("/proc/self/fd"))
        with contextlib.closing(ShardView(tier, shard)) as view:
            for _ in range(3):
                time.sleep(0.02)
                view.refresh()
            assert view.ended == tier.tombstone(shard.digest).exists() == (status == "OriginNotFound")
        assert len(os.listdir("/proc/self/fd")) == held
        outcome.tombstone.close()


def test_an_index_is_of_the_file_that_was_read_and_not_of_one_that_took_its_place_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said so of the new one, whose bytes are elsewhere."""
    (path,) = write_shards(tmp_path / "data", [COUNT], seed=33)
    (fresh,) = write_shards(tmp_path / "fresh", [COUNT], seed=34)
    tier = Tier(tmp_path / "tier", 1 << 20)
    shard = shard_of(str(path), None)
    pread = os.pread

    def replaced_first(descriptor: int, count: int, position: int) -> bytes:
        if fresh.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            fresh.rename(path)
        return pread(descriptor, count, position)

    monkeypatch.setattr(os, "pread", replaced_first)
    for expected in (0, COUNT):
        part = tier.claim(shard.digest)
        assert part is not None
        outcome = fill(part, shard, pytest.fail, next_use=lambda: 0.0, stop=threading.Event())
        assert outcome.result is Filled.PUBLISHED
        with contextlib.closing(ShardView(tier, shard)) as view:
            assert view.count == expected
            if expected:
                assert contents(view) == read_oracle(path)


@pytest.mark.parametrize("rate", [None, 60_000.0])
def test_a_damaged_shard_gives_what_is_in_front_of_the_damage_however_it_arrives(
    rate: float | None, tmp_path: Path
) -> None:
    (path,) = write_shards(tmp_path / "data", [COUNT], seed=35)
    samples_before = read_oracle(path)[:25]
    content = bytearray(path.read_bytes())
    header = content.find(f"{read_oracle(path)[26][0]}.jpg".encode())  # of the sample behind the next one
    content[header : header + 512] = bytes([7]) * 512
    path.write_bytes(content)
    with ShardServer(tmp_path / "data", bytes_per_second=rate) as server:
        filler = Filler(server, tmp_path / "tier")
        outcome = filler.fill()
        assert outcome.result is Filled.GAVE_UP
        view = ShardView(filler.tier, filler.shard)
        assert view.reader is not None
        assert view.reader.status == "ShardFormatError"
        assert view.count == len(samples_before)
        view.close()


def test_where_entries_and_bytes_are_of_two_sources_the_damaged_one_is_taken_away(
    server: ShardServer, tmp_path: Path
) -> None:
    """A damaged index cost the sound copy of the shard that its bytes were read from."""
    filler = Filler(server, tmp_path / "tier")
    options = FillOptions(index_only=True)
    fill(filler.claim(), filler.shard, filler.origin, options, next_use=lambda: 0.0, stop=filler.stop)
    with contextlib.closing(ShardView(filler.tier, filler.shard, lambda *_: b"")) as view:
        assert view.is_index_only
        assert filler.fill().result is Filled.PUBLISHED
        until(lambda: (view.find((0,)), not view.is_index_only)[1])
        (index,) = filler.tier.own("trash")  # it is still read
        flip(index / "names", 12)
        assert view.reader is not None
        with pytest.raises(CacheCorrupt):
            view.reader.entry(0)
        view.invalidate()
        assert filler.tier.published(filler.shard.digest).exists()
        until(lambda: (view.refresh(), view.ended)[1])
        assert contents(view) == read_oracle(tmp_path / "data" / "00000.tar")


def test_a_view_outlives_a_tier_that_is_in_trouble(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(tmp_path / "tier", 1 << 30)
    shard = shard_of(f"{server.url}/00000.tar", None)
    with contextlib.closing(ShardView(tier, shard)) as view:
        for room in ("parts", "shards"):  # the second is what a part or a published shard lies in
            (tier.root / room).rename(tier.root / f"{room}.away")
            (tier.root / room).symlink_to(room)  # ELOOP, as any error but "not found" would do
            time.sleep(0.02)
            view.refresh()
        assert view.count == 0
        monkeypatch.setattr("streamload.cache.shard_view.PATIENCE_SECONDS", 0.1)
        time.sleep(0.2)
        with pytest.raises(CacheError, match=r"00000\.tar can't be read from the cache"):
            view.refresh()


def long_names(path: Path, count: int) -> None:
    """A shard whose index is larger than its data: each byte of a name that is no UTF-8 takes six there."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for number in range(count):
            info = tarfile.TarInfo(f"{number:03d}" + 50_000 * "\udcff" + ".txt")
            info.size = 5
            tar.addfile(info, io.BytesIO(b"hello"))


@pytest.mark.parametrize("where", ["far", "local", "bare"])
def test_room_is_made_for_an_index_before_it_is_written(
    where: str, server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_names(tmp_path / "data" / "00000.tar", 12)
    limit = 2_500_000
    filler = Filler(server, tmp_path / "tier", limit)
    if where == "local":
        filler.shard = shard_of(str(tmp_path / "data" / "00000.tar"), None)
    peak, write = 0, IndexWriter.write

    def written(index: IndexWriter, packed: Packed) -> None:
        nonlocal peak
        write(index, packed)
        peak = max(peak, sum(path.stat().st_size for path in filler.tier.root.rglob("*") if path.is_file()))

    monkeypatch.setattr(IndexWriter, "write", written)
    with pytest.raises(CacheFull, match="raise cache_size"):
        fill(
            *(filler.claim(), filler.shard, filler.origin, FillOptions(index_only=where == "bare")),
            next_use=lambda: 0.0,
            stop=filler.stop,
        )
    assert peak <= limit
    assert filler.tier.used_bytes == 0
    larger = Filler(server, tmp_path / "larger", 3 * limit)
    larger.shard = filler.shard
    assert larger.fill().result is Filled.PUBLISHED
    assert len(samples(larger)) == 12
