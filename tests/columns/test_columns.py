"""Columns: rows come back to the bit or not at all, whoever wrote them, and however that ended."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from streamload.cache.directory import Directory
from streamload.cache.eviction import HeldShard
from streamload.cache.inventory import foreign, take_inventory
from streamload.cache.locks import is_locked
from streamload.cache.tier import Tier
from streamload.columns import catalog
from streamload.columns.column import GROUP_ROWS, ColumnFile
from streamload.columns.columns import Address, Columns, RowRoom, name_of, recorded_bytes
from streamload.errors import CacheCorrupt
from tests.support.kills import Child, Moment, Stage

FINGERPRINT, LAYOUT = bytes(range(16)), b'["n","|u1",[100]]'
SAMPLES = 1500
CHECKSUMS = [random.Random(number).getrandbits(64) for number in range(SAMPLES)]
Stored = tuple[bytes, bytes, bytes]


def room_of(home: Path, limit_bytes: int = 1 << 30) -> RowRoom:
    return RowRoom(partial(Tier, home, limit_bytes))


def columns_at(home: Path) -> Columns:
    return Columns(home, room_of(home))


def alike(number: int, version: int = 0, name: bytes = b"n" * 16) -> Stored:
    """A row of a fixed size; another version of its sample has another checksum."""
    address = Address(FINGERPRINT, name, number, CHECKSUMS[number] ^ version)
    return address.pack(), LAYOUT, random.Random(number + version * SAMPLES).randbytes(100)


def unlike(number: int, version: int = 0, name: bytes = b"n" * 16) -> Stored:
    """Rows of any size."""
    body = random.Random(number + version * SAMPLES).randbytes((number * 37 + version) % 900)
    address = Address(FINGERPRINT[::-1], name, number, CHECKSUMS[number] ^ version)
    return address.pack(), b'["n","|u1",[%d]]' % len(body), body


def text(number: int, version: int = 0, name: bytes = b"n" * 16) -> Stored:
    """Several rows of a sample."""
    body = random.Random(number + version * SAMPLES).randbytes(50 + version)
    address = Address(b"t" * 16, name, number, version + 1, CHECKSUMS[number])
    return address.pack(), LAYOUT, body


KINDS: dict[str, Callable[..., Stored]] = {"alike": alike, "unlike": unlike, "texts": text}


def wrong_rows(columns: Columns, rows: list[Stored]) -> tuple[int, list[bytes]]:
    """How many of these rows are there, and which of them have other bytes."""
    known = {address: (layout, body) for address, layout, body in rows}
    read = columns.read(list(known))
    return len(read), [
        address for address, (layout, body) in read.items() if (layout, bytes(body)) != known[address]
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_any_order_come_back_and_no_other_version_does(tmp_path: Path, kind: str) -> None:
    make = KINDS[kind]
    rng = random.Random(3)
    columns, stored = columns_at(tmp_path), dict[bytes, Stored]()
    for _ in range(40):
        first = rng.randrange(SAMPLES - 64)
        numbers = rng.sample(range(first, first + 64), rng.randrange(1, 64))
        batch = [make(number, rng.randrange(2) if kind == "texts" else 0) for number in numbers]
        assert columns.write(batch) == len(batch)
        stored.update({row[0]: row for row in batch})
    assert wrong_rows(columns_at(tmp_path), [*stored.values()]) == (len(stored), [])
    others = [make(number, 7) for number in range(SAMPLES)]
    assert columns.read([address for address, *_ in others]) == {}
    changed = [make(number, 7) for number in range(0, SAMPLES, 10)]
    assert columns.write(changed) == len(changed)
    there, wrong = wrong_rows(columns, [*stored.values(), *changed])
    assert not wrong
    lost = (
        0
        if kind == "texts"
        else sum(row[0][32:36] in {other[0][32:36] for other in changed} for row in stored.values())
    )
    assert there == len(stored) + len(changed) - lost
    assert not list(foreign(Tier.open(tmp_path)))


def test_rows_of_another_layout_lie_beside_those_of_the_first(tmp_path: Path) -> None:
    columns = columns_at(tmp_path)
    plain = [alike(number) for number in range(20)]
    address, _, _ = alike(30)
    longer, empty = (address, b'["n","|u1",[7]]', b"7 bytes"), (alike(31)[0], b'["v",null]', b"")
    huge = (alike(32)[0], b" " * 5000, b"a layout of more than a head")
    assert columns.write([*plain, longer, empty, huge]) == 23
    assert wrong_rows(columns, [*plain, longer, empty, huge]) == (23, [])


def test_a_file_that_is_no_column_is_replaced(tmp_path: Path) -> None:
    columns = columns_at(tmp_path)
    columns.write([alike(1)])
    (path,) = (tmp_path / "columns").glob("*/rows.*")
    for damaged in (b"", b"x" * 5000, path.read_bytes().replace(LAYOUT, LAYOUT[::-1], 1)):
        path.write_bytes(damaged)
        with pytest.raises(CacheCorrupt, match="is no column"):
            ColumnFile.open(str(path))
        assert columns.read([alike(1)[0]]) == {}
        assert columns.write([alike(1)]) == 1
        assert wrong_rows(columns, [alike(1)]) == (1, [])
    other = path.with_name("rows." + "0" * 32)  # of another fingerprint
    path.rename(other)
    with pytest.raises(CacheCorrupt):
        ColumnFile.open(str(other))


def test_any_flipped_bit_costs_a_row_and_gives_no_wrong_one(tmp_path: Path) -> None:
    rows = [alike(number) for number in range(40)] + [unlike(number) for number in range(40)]
    columns_at(tmp_path).write(rows)
    rng = random.Random(1)
    files = sorted((tmp_path / "columns").glob("*/rows.*"))
    for _ in range(60):
        path = rng.choice(files)
        before = path.read_bytes()
        places = np.flatnonzero(np.frombuffer(before, np.uint8))
        data = bytearray(before)
        data[int(rng.choice(places))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        assert wrong_rows(Columns(tmp_path, None), rows)[1] == []
        path.write_bytes(before)


def test_texts_that_are_drawn_anew_for_ever_take_a_bounded_room(tmp_path: Path) -> None:
    columns = columns_at(tmp_path)
    rows = [text(5, version) for version in range(400)]
    for row in rows:
        if not columns.read([row[0]]):
            columns.write([row])
    there, wrong = wrong_rows(columns, rows)
    assert (there, wrong) == (128, [])
    before_bytes = on_disk(tmp_path)
    assert columns.write(rows[200:]) == 0
    assert on_disk(tmp_path) == before_bytes
    assert columns.write([text(6, 300)]) == 1


@pytest.fixture
def file_limit() -> Iterator[None]:
    """Files may have 64 KiB: a write is cut there, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_rows_are_said_to_be_stored_as_a_full_disk_takes(
    tmp_path: Path, kind: str, file_limit: None
) -> None:
    columns, rows = columns_at(tmp_path), [KINDS[kind](number) for number in range(GROUP_ROWS + 400)]
    told = sum(columns.write(rows[start : start + 50]) for start in range(0, len(rows), 50))
    there, wrong = wrong_rows(columns, rows)
    assert (there, wrong) == (told, [])
    assert 0 < told < len(rows)


def _write_for_ever(stage: Stage, home: Path, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    columns = columns_at(home)
    columns.write([KINDS[kind](seed)])
    stage.enter("writing")
    while True:
        first = rng.randrange(SAMPLES - 64)
        version = rng.randrange(2) if kind == "texts" else seed % 3 == 2
        rows = [
            KINDS[kind](number, version if number % 10 == 0 else 0) for number in range(first, first + 64)
        ]
        there = columns.read([address for address, *_ in rows])  # as a run does
        columns.write([row for row in rows if row[0] not in there])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kills", [6, pytest.param(340, marks=pytest.mark.deep)])
def test_writers_that_are_killed_leave_whole_rows_alone(tmp_path: Path, kind: str, kills: int) -> None:
    """Three at a time, one of them with another version of a tenth of the samples; others read meanwhile."""
    rng, reader = random.Random(kills), Columns(tmp_path, None)
    rows = [KINDS[kind](number, version) for number in range(SAMPLES) for version in (0, 1)]
    read = 0
    with ExitStack() as stack:
        for kill in range(0, kills, 3):
            children = [
                stack.enter_context(
                    Child(
                        partial(_write_for_ever, home=tmp_path, kind=kind, seed=kill + number),
                        kill_at=Moment("writing", rng.uniform(0.002, 0.06)),
                    )
                )
                for number in range(3)
            ]
            there, wrong = wrong_rows(reader, rng.sample(rows, 400))
            for child in children:
                child.join(60)
                assert child.status == -signal.SIGKILL, child.error
            assert not wrong
            read += there
    there, wrong = wrong_rows(reader, rows)
    assert there + read > 0
    assert not wrong
    assert not list(foreign(Tier.open(tmp_path)))


def test_a_forked_child_goes_on_with_the_columns_of_its_parent(tmp_path: Path) -> None:
    columns = columns_at(tmp_path)
    columns.write([text(0), alike(0)])

    def work(stage: Stage) -> int:
        return columns.write([text(number) for number in range(1, 50)])

    with Child(work) as child:
        columns.write([text(number, 1) for number in range(1, 50)])
        assert child.finish(60) == 49
    rows = [text(number) for number in range(50)] + [text(number, 1) for number in range(1, 50)]
    assert wrong_rows(columns, rows)[1] == []


def shards_in(tier: Tier, sizes: list[int]) -> None:
    """Published shards, opened one second after the other."""
    for number, size in enumerate(sizes):
        directory = tier.published(f"{number:032x}")
        directory.mkdir(mode=0o700)
        (directory / "data").write_bytes(bytes(size))
        (directory / "names").touch()
        os.utime(directory, (1000 + number, 1000 + number))
    tier.budget.count()


def rows_of_shard(shard: int, size: int = 4000) -> list[Stored]:
    name = shard.to_bytes(16, "big")
    return [
        (Address(FINGERPRINT, name, number, CHECKSUMS[number]).pack(), LAYOUT, os.urandom(size))
        for number in range(50)
    ]


def on_disk(home: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in home.rglob("*") if path.is_file())


def test_rows_take_the_room_of_shards_that_are_needed_last_but_half_of_the_limit_at_most(
    tmp_path: Path,
) -> None:
    limit_bytes = 16 << 20
    tier = Tier(tmp_path, limit_bytes)
    shards_in(tier, [500 << 10] * 28)
    columns = Columns(tmp_path, RowRoom(lambda: tier))
    for shard in range(60):
        columns.write(rows_of_shard(shard))
        assert on_disk(tmp_path) <= limit_bytes
    left = sorted(int(path.name, 16) for path in (tmp_path / "shards").iterdir())
    assert left == list(range(28 - len(left), 28))  # those that were opened longest ago went
    assert 12 <= len(left) < 18
    held = [shard for shard in range(60) if columns.read([row[0] for row in rows_of_shard(shard)])]
    assert held[-1] == 59
    assert 20 < len(held) < 45
    assert take_inventory(tier).columns.size_bytes <= limit_bytes // 2 + (500 << 10)  # left of a shard


def test_a_run_over_more_rows_than_there_is_room_for_finds_some_of_them_in_each_pass(tmp_path: Path) -> None:
    old, shards = Columns(tmp_path, room_of(tmp_path, 8 << 20)), range(50)
    for shard in range(100, 110):
        old.write(rows_of_shard(shard))
    for path in (tmp_path / "columns").iterdir():
        os.utime(path, (1000, 1000))
    columns = Columns(tmp_path, room_of(tmp_path, 8 << 20))
    read = 0
    for _ in range(4):
        read = 0
        for shard in shards:
            rows = rows_of_shard(shard)
            there = columns.read([address for address, *_ in rows])
            columns.write([row for row in rows if row[0] not in there])
            read += len(there)
    assert read > 0.1 * 50 * len(shards)
    assert not any(old.read([address for address, *_ in rows_of_shard(shard)]) for shard in range(100, 110))


def test_rows_that_have_more_than_half_of_the_limit_go_for_shards(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 8 << 20)
    columns = Columns(tmp_path, RowRoom(lambda: tier))
    for shard in range(33):
        columns.write(rows_of_shard(shard))
    assert tier.budget.count() > 6 << 20  # as nobody else needs room
    part = tier.claim("a" * 32)
    assert part is not None
    assert tier.budget.reserve(part.path, 3 << 20, 1.0)
    assert take_inventory(tier).columns.size_bytes > 4 << 20
    other = tier.claim("b" * 32)
    assert other is not None
    assert not tier.budget.reserve(
        other.path, 3 << 20, 1.0
    )  # the rows have half now, and the other is filled
    for claimed in (part, other):
        claimed.discard()


def test_a_limit_that_is_lowered_takes_rows_after_shards(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 16 << 20)
    columns = Columns(tmp_path, RowRoom(lambda: tier))
    for shard in range(12):
        columns.write(rows_of_shard(shard))
    shards_in(tier, [500 << 10] * 8)
    rows_bytes = take_inventory(tier).columns.size_bytes
    tier.budget.limit.set(6 << 20)
    tier.budget._enforced_at = 0.0
    tier.budget.enforce_limits()
    left = take_inventory(tier)
    assert left.columns.size_bytes == rows_bytes
    assert left.used_bytes <= 6 << 20
    tier.budget.limit.set(1 << 20)
    tier.budget._enforced_at = 0.0
    tier.budget.enforce_limits()
    left = take_inventory(tier)
    assert left.used_bytes <= 1 << 20
    assert 0 < left.columns.size_bytes <= 512 << 10


def test_shards_go_for_other_shards_without_a_look_at_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many columns there are, they cost an eviction of shards neither time nor memory."""
    tier = Tier(tmp_path, 16 << 20)
    columns = Columns(tmp_path, RowRoom(lambda: tier))
    for shard in range(12):
        columns.write(rows_of_shard(shard))
    shards_in(tier, [500 << 10] * 20)
    with tier.deciding() as usage:
        assert usage.at_most is not None  # they were measured lately
        usage.note(usage.at_most._replace(measure_at=time.time_ns() // 1_000_000 + 600_000))
    monkeypatch.setattr(tier, "columns", lambda: pytest.fail("columns were listed"))
    for number in range(100, 110):
        part = tier.claim(f"{number:032x}")
        assert part is not None
        assert tier.budget.reserve(part.path, 5 << 20, 1.0)
        part.discard()
    monkeypatch.undo()
    left = take_inventory(tier)
    assert left.published.count < 20
    assert left.columns.count == 12


def test_what_is_recorded_of_columns_is_no_less_than_they_take(tmp_path: Path) -> None:
    assert recorded_bytes(tmp_path) == 0
    writers = [columns_at(tmp_path) for _ in range(3)]
    for shard in range(6):
        for writer in writers:
            writer.write(rows_of_shard(shard, 700))
    tier = Tier.open(tmp_path)
    taken = take_inventory(tier).columns.size_bytes
    assert taken <= recorded_bytes(tmp_path) <= taken + 8 * (1 << 20)
    assert tier.budget.count() == tier.used_bytes
    assert recorded_bytes(tmp_path) == take_inventory(tier).columns.size_bytes


def test_columns_that_come_and_go_while_they_are_measured_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(tmp_path, 64 << 20)
    columns = Columns(tmp_path, RowRoom(lambda: tier))
    for shard in range(12):
        columns.write(rows_of_shard(shard))
    other = Tier.open(tmp_path)
    others = Columns(tmp_path, RowRoom(lambda: other))
    measured = Directory.columns

    def meanwhile(directory: Directory) -> Iterator[HeldShard]:
        held = list(measured(directory))
        yield from held[:6]
        monkeypatch.undo()
        with other.deciding() as usage:
            gone = [*held[:3], *held[9:]]  # those that were measured, and those that weren't
            for path in other.budget._trash(gone, usage):
                other.delete(path)
        for shard in range(12, 17):
            others.write(rows_of_shard(shard))
        yield from held[6:9]

    monkeypatch.setattr(Directory, "columns", meanwhile)
    tier.budget.count()
    there = take_inventory(tier)
    assert there.columns.count == 11
    assert recorded_bytes(tmp_path) >= there.columns.size_bytes
    tier.budget.count()
    assert recorded_bytes(tmp_path) == there.columns.size_bytes


def test_columns_are_measured_by_one_process_and_not_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(tmp_path, 16 << 20)
    columns = Columns(tmp_path, RowRoom(lambda: tier))
    for shard in range(12):
        columns.write(rows_of_shard(shard))
    shards_in(tier, [500 << 10] * 20)
    reader, *others = [Tier.open(tmp_path) for _ in range(4)]
    measured, walks = Directory.columns, list[bool]()

    def watched(directory: Directory) -> Iterator[HeldShard]:
        walks.append(is_locked(tmp_path / "lock"))
        for other in others:  # they go on meanwhile, and don't measure
            assert other.budget.reserve_beside(4 << 20)
        assert len(walks) == 1
        yield from measured(directory)

    with tier.deciding() as usage:
        assert usage.at_most is not None
        usage.note(usage.at_most._replace(measure_at=0))
    monkeypatch.setattr(Directory, "columns", watched)
    part = reader.claim("a" * 32)
    assert part is not None
    assert reader.budget.reserve(part.path, 6 << 20, 1.0)
    part.discard()
    assert walks == [False]


def test_no_shard_goes_for_room_that_processes_reserved_for_rows_and_left(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 64 << 20)
    shards_in(tier, [2 << 20] * 16)
    for shard in range(30):
        writer = Columns(tmp_path, room_of(tmp_path, 64 << 20))  # each keeps a megabyte
        writer.write(rows_of_shard(shard, 10)[:1])
    assert recorded_bytes(tmp_path) > 20 << 20
    tier = Tier.open(tmp_path)
    part = tier.claim("a" * 32)
    assert part is not None
    assert tier.budget.reserve(part.path, 4 << 20, 1.0)
    assert tier.count_of("shards") == 16
    assert recorded_bytes(tmp_path) < 1 << 20
    part.discard()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_neighbours_reserves_little_more_than_it_takes(tmp_path: Path, kind: str) -> None:
    columns = Columns(tmp_path, room_of(tmp_path, 256 << 10))
    rng = random.Random(2)
    for start in (0, 200, 400):
        rows = [KINDS[kind](number) for number in range(start, start + 40)]
        assert columns.write(rows) == len(rows)
        assert wrong_rows(columns, rows) == (len(rows), [])
    for _ in range(20):  # and any others no less
        rows = [KINDS[kind](number) for number in sorted(rng.sample(range(SAMPLES), 3))]
        columns.write(rows)
        assert recorded_bytes(tmp_path) >= take_inventory(Tier.open(tmp_path)).columns.size_bytes


def test_rows_that_are_more_than_was_reserved_are_reserved_with_the_next(tmp_path: Path) -> None:
    room = room_of(tmp_path, 64 << 20)
    assert room.has(4096)
    reserved_bytes = recorded_bytes(tmp_path)
    room.take(reserved_bytes + (100 << 10))
    assert room.has(4096)
    assert recorded_bytes(tmp_path) >= reserved_bytes + (104 << 10)


def test_a_directory_that_cannot_be_written_is_read_all_the_same(tmp_path: Path) -> None:
    rows = [alike(number) for number in range(9)]
    columns_at(tmp_path).write(rows)
    reader = Columns(tmp_path, None)
    assert reader.write(rows) == 0
    assert wrong_rows(reader, rows) == (9, [])


def test_columns_are_listed_and_deleted_by_fingerprint(tmp_path: Path) -> None:
    columns = columns_at(tmp_path)
    for name in (b"a" * 16, b"b" * 16):
        columns.write([make(number, 0, name) for make in KINDS.values() for number in range(0, 700, 3)])
    listed = {held.fingerprint: held for held in catalog.fingerprints(tmp_path)}
    assert {fingerprint: held.rows for fingerprint, held in listed.items()} == dict.fromkeys(
        (FINGERPRINT, FINGERPRINT[::-1], b"t" * 16), 2 * 234
    )
    found = [(row.name, row.place, row.row) for row in catalog.rows_of(tmp_path, FINGERPRINT[::-1])]
    assert [(name, place, layout, bytes(body)) for name, place, (layout, body) in found] == [
        (name, number, *unlike(number)[1:]) for name in (b"a" * 16, b"b" * 16) for number in range(0, 700, 3)
    ]
    whole = [row.is_whole(CHECKSUMS[row.place]) for row in catalog.rows_of(tmp_path, FINGERPRINT[::-1])]
    assert all(whole)
    catalog.remove(listed[FINGERPRINT])
    assert {held.fingerprint for held in catalog.fingerprints(tmp_path)} == {FINGERPRINT[::-1], b"t" * 16}
    assert columns.read([alike(0, 0, b"a" * 16)[0]]) == {}
    Path(columns.asked(b"t" * 16, b"a" * 16)).touch()
    for held in catalog.fingerprints(tmp_path):
        catalog.remove(held)
    assert not list((tmp_path / "columns").iterdir())


def test_a_name_is_that_of_the_first_samples() -> None:
    checksums = np.array(CHECKSUMS[:40], "<u8")
    assert name_of(checksums) == name_of(checksums[:16])
    changed = checksums.copy()
    changed[20] ^= 1
    assert name_of(changed) == name_of(checksums)
    changed[3] ^= 1
    assert name_of(changed) != name_of(checksums)
