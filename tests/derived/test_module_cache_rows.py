"""The store of rows: bounded, shared by processes, whole after kills, and never fooled by damaged bytes."""

import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import streamload
from benchmarks.process_tree import pss_bytes
from streamload import CacheLevel, cache_info, cache_module
from streamload.cache import memory
from streamload.cache.directory import inode_of
from streamload.cache.garbage import clear
from streamload.cache.inventory import foreign
from streamload.cache.tier import Tier
from streamload.derived import log_once
from streamload.derived.proof import project_code
from streamload.derived.store import row_store, table
from streamload.derived.store.catalog import open_catalog
from streamload.derived.store.database import BROKEN, set_aside
from streamload.derived.store.memory import MemoryRows
from streamload.derived.store.results import Result, join, layout_of
from streamload.derived.store.row_store import RowPlace, RowStore
from streamload.derived.store.sealed import seal, unseal
from streamload.errors import CacheCorrupt, CacheError
from tests.support.disks import read_only, small_disk, why_no_small_disk
from tests.support.kills import Child

KIB = 1 << 10
START_METHODS = [
    "fork",
    pytest.param("spawn", marks=pytest.mark.deep),
    pytest.param("forkserver", marks=pytest.mark.deep),
]


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    log_once.cache_clear()
    yield
    row_store.close_stores()


class OpenedRows:
    """The rows of calls in a directory, as a process has them open."""

    def __init__(self, root, limit_bytes):
        self.root = root
        self.store = RowStore(RowPlace(str(root.parent), cache_size=limit_bytes))
        self.counts = self.store.counts
        self.write_note, self.read_note = self.store.write_note, self.store.read_note
        assert self.store.place.root == root

    def read(self, keys):
        return self.store.read(keys, "it")

    def write(self, rows, label):
        """How many are stored."""
        before = self.counts.stored
        self.store.write(rows, label)
        return self.counts.stored - before


@contextlib.contextmanager
def opened(root, limit_bytes=1 << 30):
    found = OpenedRows(root, limit_bytes)
    try:
        yield found
    finally:
        found.store.close()


def cleared(root, label=None):
    with open_catalog(root, writable=True) as catalog:
        return catalog.clear(label)


def by_label(root):
    """The keys of all rows."""
    with open_catalog(root) as catalog:
        return {rows.label: [name for name, _ in catalog.rows(rows)] for rows in catalog.fingerprints()}


def bytes_below(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def key(number):
    return number.to_bytes(32, "big")


def row(number, size=100, seed=0):
    body = random.Random(f"{seed} {number}").randbytes(size)
    return key(number), seal(key(number), b'["n","|u1",[%d]]' % size, body, number)


def bodies(found, numbers):
    return {at: bytes(found[key(at)].body) for at in numbers if key(at) in found}


def expected(numbers, size=100):
    return {at: random.Random(f"0 {at}").randbytes(size) for at in numbers}


def test_rows_come_back_as_they_were(tmp_path):
    with opened(tmp_path / "rows") as store:
        assert store.write([row(at) for at in range(700)], "label") == 700
        found = store.read([key(at) for at in range(1200)])
        assert bodies(found, range(1200)) == expected(range(700))
        assert found[key(3)].input_digest == 3
        assert by_label(store.root) == {"label": [key(at) for at in range(700)]}
        store.write_note(b"note", b"text", "other")
        assert store.read_note(b"note") == b"text"
        assert store.read_note(b"none") is None
    with opened(tmp_path / "rows") as store:
        assert len(store.read([key(at) for at in range(700)])) == 700
        assert cleared(store.root, "label") == 700
        assert by_label(store.root) == {}
        assert store.read_note(b"note") == b"text"
        assert cleared(store.root) == 0
        assert store.read_note(b"note") is None
    assert os.stat(tmp_path / "rows").st_mode & 0o777 == 0o700
    modes = {path.is_dir(): path.stat().st_mode & 0o777 for path in (tmp_path / "rows").rglob("*")}
    assert modes == {False: 0o600}


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 2**64 - 1), st.data())
def test_any_flipped_bit_or_cut_is_found(body, digest, data):
    sealed = seal(key(1), b'["v",1]', body, digest)
    assert bytes(unseal(key(1), sealed).body) == body
    at = data.draw(st.integers(0, 8 * len(sealed) - 1))
    flipped = bytearray(sealed)
    flipped[at // 8] ^= 1 << at % 8
    for bad in (bytes(flipped), sealed[: data.draw(st.integers(0, len(sealed) - 1))], sealed + b"\0"):
        with pytest.raises(CacheCorrupt):
            unseal(key(1), bad)
    with pytest.raises(CacheCorrupt):
        unseal(key(2), sealed)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"3",
        b'["t","float99",[2]]',
        b'["c","os:system",[]]',
        b'["c","subprocess:Popen",[["args",["v","id"]]]]',
        b'["c","builtins:list",[]]',
        b'["c","nowhere:Nothing",[]]',
        b'["q",1]',
        b"[" * 5000,
    ],
)
def test_a_layout_that_is_none_or_names_no_record_is_corrupt(text):
    with pytest.raises(CacheCorrupt):
        layout_of(text)


@given(
    st.lists(st.sampled_from([torch.float32, torch.int8, torch.bfloat16, torch.bool]), max_size=4),
    st.integers(1, 5),
)
def test_rows_of_any_tensors_join_to_what_they_were(dtypes, count):
    value = tuple(torch.randn(count, at, 2).to(dtype) for at, dtype in enumerate(dtypes))
    result = Result(value, count)
    stored = [
        unseal(key(at), seal(key(at), result.layout, body, 1)) for at, body in enumerate(result.bodies())
    ]
    layout, leaves = layout_of(stored[0].layout), join(stored, torch.device("cpu"), is_row=True)
    for one, other in zip(layout.build(leaves), value, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("size", "limit_bytes"),
    [
        pytest.param(200, 512 * KIB, marks=pytest.mark.deep),
        (3000, 512 * KIB),
        (40_000, 3000 * KIB),
    ],
)
def test_what_it_takes_stays_below_its_limit(tmp_path, limit_bytes, size):
    root = tmp_path / "rows"
    total = 2 * limit_bytes // size
    with opened(root, limit_bytes) as store:
        most = 0
        for start in range(0, total, 64):
            store.write([row(at, size) for at in range(start, min(total, start + 64))], "it")
            most = max(most, bytes_below(root))
            store.read([key(0)])
        assert most <= 1.05 * limit_bytes
        kept = [at for at in range(total) if key(at) in store.read([key(at)])]
        assert len(kept) * size > (0.4 if size > 1000 else 0.15) * limit_bytes
        assert store.counts.evicted + store.counts.refused >= total - len(kept)
        assert bodies(store.read([key(at) for at in kept]), kept) == expected(kept, size)


def test_what_was_not_read_for_longest_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "_FULL_ENOUGH", 0.0)
    with opened(tmp_path / "rows", 1000 * KIB) as store:
        for start in range(0, 600, 20):
            store.write([row(at, 3000) for at in range(start, start + 20)], "it")
            assert key(3) in store.read([key(3)])
        assert store.counts.evicted > 200
        assert key(4) not in store.read([key(4)])


def test_what_was_just_stored_stays_longer_than_what_was_read_long_ago(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "_FULL_ENOUGH", 0.0)
    with opened(tmp_path / "rows", 1000 * KIB) as store:
        store.write([row(at, 3000) for at in range(100)], "it")
        assert len(store.read([key(at) for at in range(100)])) == 100
        for start in range(100, 600, 20):
            store.write([row(at, 3000) for at in range(start, start + 20)], "it")
        assert store.counts.evicted > 200
        assert not store.read([key(at) for at in range(100)])
        assert len(store.read([key(at) for at in range(560, 600)])) == 40


def test_rows_that_are_stored_again_replace_those_of_before_among_new_ones(tmp_path):
    with opened(tmp_path / "rows") as store:
        store.write([row(at) for at in range(0, 900, 3)], "first")
        assert store.write([row(at, 200, seed=1) for at in range(600)], "second") == 600
        assert len(store.read([key(at) for at in range(900)])) == 700
        assert bodies(store.read([key(at) for at in range(600, 900)]), range(600, 900)) == expected(
            range(600, 900, 3)
        )
        replaced = bodies(store.read([key(at) for at in range(600)]), range(600))
        assert replaced == {at: random.Random(f"1 {at}").randbytes(200) for at in range(600)}
        with open_catalog(store.root) as catalog:
            counted = {rows.label: (rows.rows, rows.size_bytes) for rows in catalog.fingerprints()}
        sizes = {at: len(row(at, size)[1]) for at, size in ((0, 100), (1, 200))}
        assert counted == {"first": (100, 100 * sizes[0]), "second": (600, 600 * sizes[1])}


def test_a_limit_below_one_row_stores_nothing_and_says_so_once(tmp_path, caplog):
    with opened(tmp_path / "rows", 100 * KIB) as store, caplog.at_level(logging.WARNING):
        for at in range(5):
            assert store.write([row(at, 200_000)], "it") == 0
        assert store.counts.refused == 5
        assert len([one for one in caplog.records if "no room" in one.message]) == 1


@pytest.mark.parametrize("batch", [1, 64, 256])
@pytest.mark.parametrize("size", [1536, 3072])
def test_bytes_on_disk_are_close_to_the_payload_whatever_the_batch(tmp_path, batch, size):
    class Wide(nn.Module):
        def forward(self, x):
            return x.expand(len(x), size // 4)

    module = cache_module(cache_path=str(tmp_path / "here"))(Wide)()
    given = torch.arange(1024.0)[:, None]
    for start in range(0, 1024, batch):
        module(given[start : start + batch], cache_key=list(range(start, start + batch)))
    row_store.close_stores()
    taken = bytes_below(tmp_path / "here" / "rows")
    assert taken <= 1.5 * 1024 * size


def damage(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def test_flipped_bits_in_a_row_are_a_miss_and_counted(tmp_path, caplog):
    root = tmp_path / "rows"
    with opened(root) as store:
        store.write([row(at, 3000) for at in range(20)], "it")
    content = bytearray((root / "rows.db").read_bytes())
    for at, body in expected([3, 7], 3000).items():
        place = content.index(body) + 10 * at
        damage(root / "rows.db", place, bytes([content[place] ^ 4]))
    with opened(root) as store, caplog.at_level(logging.WARNING):
        found = store.read([key(at) for at in range(20)])
        assert set(found) == {key(at) for at in range(20) if at not in (3, 7)}
        assert store.counts.corrupt == 2
        store.write([row(3, 3000)], "it")
        assert bodies(store.read([key(3)]), [3]) == expected([3], 3000)
    assert "fails its checksum" in caplog.text


def test_rows_that_were_swapped_are_misses(tmp_path):
    with opened(tmp_path / "rows") as store:
        store.write([row(1), row(2)], "it")
    with contextlib.closing(sqlite3.connect(tmp_path / "rows" / "rows.db")) as connection, connection:
        connection.execute("UPDATE rows SET key = ? WHERE key = ?", (key(3), key(1)))
        connection.execute("UPDATE rows SET key = ? WHERE key = ?", (key(1), key(2)))
    with opened(tmp_path / "rows") as store:
        assert store.read([key(1), key(2), key(3)]) == {}
        assert store.counts.corrupt == 2


class Planted:
    def __reduce__(self):
        return os.mkdir, ("/tmp/streamload-planted",)


def test_a_planted_pickle_is_never_loaded(tmp_path):
    root = tmp_path / "rows"
    with opened(root) as store:
        store.write([row(at) for at in range(4)], "it")
        store.write_note(b"note", b"text", "it")
    planted = pickle.dumps(Planted())
    with contextlib.closing(sqlite3.connect(root / "rows.db")) as connection, connection:
        connection.execute("UPDATE rows SET value = ? WHERE key = ?", (planted, key(0)))
        connection.execute("UPDATE rows SET value = 'text' WHERE key = ?", (key(1),))
        connection.execute("UPDATE rows SET value = NULL WHERE key = ?", (key(2),))
        connection.execute("UPDATE rows SET value = ? WHERE used IS NULL", (planted,))
    with opened(root) as store:
        assert set(store.read([key(at) for at in range(4)])) == {key(3)}
        assert store.counts.corrupt == 3
        assert store.read_note(b"note") is None
    assert not os.path.exists("/tmp/streamload-planted")


def test_no_module_of_ours_unpickles():
    for path in Path(streamload.__file__).parent.glob("derived/**/*.py"):
        text = path.read_text()
        if path.name not in ("row_check.py", "rebuilding.py"):  # one sends to the other, its child
            assert "import pickle" not in text
        assert "torch.load" not in text


@pytest.mark.parametrize("content", [b"no database at all" * 1000, b"", b"SQLite format 3\0" + bytes(5000)])
def test_a_broken_database_is_replaced_by_an_empty_one(tmp_path, content, caplog):
    root = tmp_path / "rows"
    with opened(root) as store:
        store.write([row(1)], "it")
    for name in ("rows.db-wal", "rows.db-shm"):
        (root / name).unlink(missing_ok=True)
    (root / "rows.db").write_bytes(content)
    with caplog.at_level(logging.WARNING), opened(root) as store:
        assert store.read([key(1)]) == {}
        assert (root / BROKEN).exists() is bool(content)
        assert store.write([row(1)], "it") == 1
        assert key(1) in store.read([key(1)])


def test_a_database_that_breaks_while_it_is_open_is_replaced(tmp_path, caplog):
    root = tmp_path / "rows"
    with opened(root) as store, opened(root) as other, caplog.at_level(logging.WARNING):
        store.write([row(at, 3000) for at in range(400)], "it")
        with contextlib.closing(sqlite3.connect(root / "rows.db")) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = (root / "rows.db").stat().st_size
        for at in range(0, size, 4096):
            damage(root / "rows.db", at, os.urandom(64))
        for one in (store, other):
            for at in range(0, 400, 50):
                assert bodies(one.read([key(at)]), [at]) in ({}, expected([at], 3000))
        assert store.write([row(1)], "it") == 1
        assert bodies(store.read([key(1)]), [1]) == expected([1])
        assert bodies(other.read([key(1)]), [1]) in ({}, expected([1]))


def test_processes_that_find_it_broken_at_once_go_on_with_one_empty_file(tmp_path):
    """One has the old file open meanwhile, and closes it later: it leaves the log of the new one alone."""
    root = tmp_path / "rows"
    context = multiprocessing.get_context("fork")
    is_broken, are_done, answers = context.Event(), context.Event(), context.Queue()

    def holds():
        with opened(root) as store, opened(root) as other:
            store.write([row(at, 3000) for at in range(100)], "it")
            assert len(other.read([key(at) for at in range(100)])) == 100
            with contextlib.closing(sqlite3.connect(root / "rows.db")) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            answers.put(None)
            assert are_done.wait(60)
            other.store.close()
            assert store.write([row(500, 3000)], "it") == 1
            again = bodies(store.read([key(at) for at in range(600)]), range(600))
            assert again == expected([*range(200, 240), 500], 3000)

    def finds(number):
        ours = range(200 + 10 * number, 210 + 10 * number)
        assert is_broken.wait(60)
        with opened(root) as store:
            read = bodies(store.read([key(at) for at in range(100)]), range(100))
            assert read.items() <= expected(range(100), 3000).items()
            assert store.write([row(at, 3000) for at in ours], "it") == 10
            assert bodies(store.read([key(at) for at in ours]), ours) == expected(ours, 3000)
            answers.put(store.counts.corrupt)
            assert are_done.wait(60)  # the log isn't written back by the last who closes

    processes = [context.Process(target=holds)]
    processes += [context.Process(target=finds, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    answers.get(timeout=60)
    for at in range(0, (root / "rows.db").stat().st_size, 4096):
        damage(root / "rows.db", at, bytes(100))
    is_broken.set()
    assert sum(answers.get(timeout=60) for _ in range(4)) >= 1
    are_done.set()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 5
    with opened(root) as store:
        assert len(store.read([key(at) for at in range(600)])) == 41
        assert store.counts.corrupt == 0
    assert {path.name for path in root.iterdir()} <= {"rows.db", BROKEN, "lock"}


def test_a_file_that_took_the_place_of_a_broken_one_is_not_set_aside_by_a_late_finder(tmp_path):
    root = tmp_path / "rows"
    with opened(root) as store:
        store.write([row(1)], "it")
        inode = inode_of(root / "rows.db")
        set_aside(root, inode)
        assert store.read([key(1)]) == {}
        store.write([row(2)], "it")
        set_aside(root, inode)
        assert bodies(store.read([key(2)]), [2]) == expected([2])


def test_the_log_that_a_kill_left_of_a_file_that_was_set_aside_is_not_taken_for_the_next_one_s(tmp_path):
    root = tmp_path / "rows"
    with opened(root) as store:
        store.write([row(at) for at in range(50)], "it")
        log = (root / "rows.db-wal").read_bytes()
    assert len(log) > 4096
    (root / "rows.db").rename(root / BROKEN)
    (root / "rows.db-wal").write_bytes(log)
    (root / "rows.db-shm").write_bytes(bytes(32 * KIB))
    with opened(root) as store:
        assert store.read([key(at) for at in range(50)]) == {}
        assert store.write([row(at) for at in range(50, 60)], "it") == 10
        assert bodies(store.read([key(at) for at in range(60)]), range(60)) == expected(range(50, 60))


def test_a_file_that_was_set_aside_gives_its_room_back_when_rows_need_it(tmp_path):
    root = tmp_path / "rows"
    with opened(root, 3000 * KIB) as store:
        (root / BROKEN).write_bytes(bytes(1000 * KIB))
        store.write([row(at, 3000) for at in range(100)], "it")
        assert (root / BROKEN).exists()
        store.write([row(at, 3000) for at in range(100, 600)], "it")
        assert not (root / BROKEN).exists()
        assert store.counts.evicted < 300
        assert bytes_below(root) <= 3000 * KIB


@pytest.mark.skipif(bool(why_no_small_disk()), reason=why_no_small_disk())
def test_rows_in_a_read_only_directory_are_read_and_none_are_stored(tmp_path, caplog):
    def work(stage):
        small_disk(tmp_path / "disk", 16 << 20)
        (tmp_path / "disk" / "features").mkdir(mode=0o700)
        root = tmp_path / "disk" / "features" / "rows"
        with opened(root) as store:
            store.write([row(at) for at in range(10)], "it")
        read_only(tmp_path / "disk")
        with opened(root) as store, caplog.at_level(logging.WARNING):
            found = len(store.read([key(at) for at in range(20)]))
            stored = [store.write([row(at)], "it") for at in range(10, 15)]
            return [found, stored, store.counts.refused, [entry.message for entry in caplog.records]]

    with Child(work) as child:
        found, stored, refused, (message,) = child.finish(60)
    assert (found, stored, refused) == (10, [0] * 5, 5)
    assert "rows are read, but none are stored" in message


@pytest.mark.parametrize(
    "statement",
    [
        "PRAGMA user_version = 2",
        "DROP INDEX rows_by_use",
        "DROP TABLE rows",
        "ALTER TABLE rows RENAME COLUMN value TO valu\u00e9",
        "UPDATE rows SET used = 'lately', stored = NULL",
        "UPDATE rows SET label = x'ff', key = 'text' WHERE place = 4",
        "DELETE FROM rows",
    ],
)
def test_another_schema_or_damaged_counts_cost_rows_at_most(tmp_path, statement):
    root = tmp_path / "rows"
    with opened(root) as store:
        store.write([row(at, 700) for at in range(10)], "it")
    with contextlib.closing(sqlite3.connect(root / "rows.db", isolation_level=None)) as connection:
        connection.execute(statement)
    with opened(root) as store:
        assert bodies(store.read([key(3)]), [3]) in ({}, expected([3], 700))
        assert store.write([row(3, 700)], "it") == 1
        assert bodies(store.read([key(3)]), [3]) == expected([3], 700)


def test_a_flipped_bit_of_the_schema_costs_rows_at_most(tmp_path):
    """Each byte of the table of tables in turn, some 900 of them: names, types and SQL."""
    root = tmp_path / "rows"
    with opened(root) as store:
        store.write([row(at, 700) for at in range(10)], "it")
    content = (root / "rows.db").read_bytes()
    page = content[: int.from_bytes(content[16:18], "big")]
    first = page.index(b"table")
    random_places = random.Random(0).sample(range(first, len(page)), 25)
    for at in [*range(8), 18, 28, 32, 44, 60, 96, 100, 103, 105, *random_places]:
        damaged = tmp_path / str(at) / "rows"
        damaged.mkdir(parents=True, mode=0o700)
        (damaged / "rows.db").write_bytes(content)
        damage(damaged / "rows.db", at, bytes([content[at] ^ 0x80]))
        with opened(damaged) as store:
            assert bodies(store.read([key(3)]), [3]) in ({}, expected([3], 700))
            assert store.write([row(3, 700)], "it") == 1
            assert bodies(store.read([key(3)]), [3]) == expected([3], 700)


@settings(max_examples=25, deadline=None)
@given(places=st.lists(st.tuples(st.floats(0, 0.999), st.integers(1, 255)), min_size=1, max_size=40))
def test_whatever_bytes_are_damaged_no_wrong_row_is_read(tmp_path_factory, places):
    root = tmp_path_factory.mktemp("damaged") / "rows"
    with opened(root) as store:
        store.write([row(at, 700) for at in range(60)], "it")
    content = bytearray((root / "rows.db").read_bytes())
    for place, change in places:
        content[int(place * len(content))] ^= change
    (root / "rows.db").write_bytes(content)
    with opened(root) as store:
        found = bodies(store.read([key(at) for at in range(60)]), range(60))
        assert found.items() <= expected(range(60), 700).items()
        store.write([row(at, 700) for at in range(60)], "it")
        found = bodies(store.read([key(at) for at in range(60)]), range(60))
        assert found.items() <= expected(range(60), 700).items()


def _damaged(content, rng):
    """Bytes of a database with one of the damages that disks and people make."""
    data = bytearray(content)
    kind = rng.choice(["bit", "bytes", "page", "swap", "cut", "zeros", "head"])
    page = 4096
    first, second = (rng.randrange(len(data) // page) * page for _ in range(2))
    if kind == "bit":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "head":
        data[rng.randrange(200)] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        for _ in range(rng.randrange(1, 60)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == "page":
        data[first : first + page] = rng.randbytes(page)
    elif kind == "zeros":
        data[first : first + page] = bytes(page)
    elif kind == "swap":
        data[first : first + page], data[second : second + page] = (
            data[second : second + page], data[first : first + page],
        )  # fmt: skip
    else:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


@pytest.mark.parametrize("databases", [20, pytest.param(320, marks=pytest.mark.deep)])
def test_no_damage_of_a_database_gives_a_wrong_row_or_stops_storing(tmp_path, databases):
    """In the database and, of every second, in the log that a killed process left."""
    root = tmp_path / "made" / "rows"
    with opened(root, 32 << 20) as store:
        store.write([row(at, 700) for at in range(60)], "it")
        store.write_note(b"note", b"text", "it")
        whole = {name: (root / name).read_bytes() for name in ("rows.db", "rows.db-wal")}
    whole_database = (root / "rows.db").read_bytes()
    read = 0
    for number in range(databases):
        rng = random.Random(number)
        files = {"rows.db": whole_database} if number % 2 else dict(whole)
        name = rng.choice(list(files))
        files[name] = _damaged(files[name], rng) if files[name] else b""
        damaged = tmp_path / f"damaged {number}" / "rows"
        damaged.mkdir(parents=True, mode=0o700)
        for name, data in files.items():
            (damaged / name).write_bytes(data)
        with opened(damaged, 32 << 20) as store:
            for _ in range(2):
                found = bodies(store.read([key(at) for at in range(60)]), range(60))
                assert found.items() <= expected(range(60), 700).items(), number
                assert store.read_note(b"note") in (b"text", None)
                store.write([row(at, 700) for at in range(60)], "it")
            read += len(found)
            found = bodies(store.read([key(at) for at in range(60)]), range(60))
            assert found == expected(range(60), 700), number
    assert read > 50 * databases


def test_a_directory_that_cannot_be_used_is_said_once_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    module = cache_module(cache_path=str(tmp_path / "file"))(Doubles)()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(module(torch.ones(2, 2), cache_key=["a", "b"]), 2 * torch.ones(2, 2))
    assert len(caplog.records) == 1
    assert "rows are neither read nor stored" in caplog.text


def test_a_directory_of_others_fails(tmp_path):
    root = tmp_path / "rows"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(CacheError, match="others may write"), opened(root):
        pass
    root.chmod(0o700)
    (root / "rows.db").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="symbolic link"), opened(root):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_stores_nothing_and_rows_are_read_on(tmp_path, caplog):
    with opened(tmp_path / "rows") as store, caplog.at_level(logging.WARNING):
        store.write([row(1)], "it")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200 * KIB, limits[1]))
        try:
            assert store.write([row(at, 5000) for at in range(2, 90)], "it") == 0
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(caplog.records) == 1
        assert "can't be read or stored for now" in caplog.text
        assert key(1) in store.read([key(1)])
        assert store.write([row(2)], "it") == 1  # there is room again


def test_a_disk_that_fills_up_within_a_transaction_costs_no_rows(tmp_path, caplog):
    with opened(tmp_path / "rows", 1 << 40) as store, caplog.at_level(logging.WARNING):
        assert store.write([row(at) for at in range(100)], "it") == 100
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, limits[1]))
        try:  # more than SQLite holds in memory
            assert store.write([row(at, 200 * KIB) for at in range(200, 300)], "it") == 0
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "can't be read or stored for now" in caplog.text
        assert len(store.read([key(at) for at in range(100)])) == 100
        assert store.write([row(200)], "it") == 1


class Doubles(nn.Module):
    def forward(self, x):
        return 2 * x


@cache_module(cache_level=CacheLevel.MEMORY, max_memory_cache_size_mb=8)
class Extractor(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 64)
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(256.0).reshape(64, 4))
            self.linear.bias.zero_()

    def forward(self, x):
        return self.linear(x)


class Samples(torch.utils.data.Dataset):
    """The article's: preprocessing that is cached, by sample."""

    def __init__(self):
        self.processor = Extractor()

    def __len__(self):
        return 24

    def __getitem__(self, at):
        row = self.processor(torch.full((4,), float(at)), cache_key=f"sample {at}")
        info = cache_info(self.processor)
        return at, row, info.hits, info.rows_computed, os.getpid()


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize("is_built", [False, True])
def test_workers_of_every_kind_compute_each_sample_once(shm, method, is_built):
    multiprocessing.forkserver._forkserver._stop()  # one of an earlier test has the variables of that
    dataset = Samples()
    if is_built:
        dataset.processor.linear  # noqa: B018
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for epoch in range(2):
            loader = torch.utils.data.DataLoader(
                dataset, batch_size=4, num_workers=2, multiprocessing_context=method, timeout=120
            )
            hits, counts = {}, {}
            for numbers, made, hit, calculated, process in loader:
                want = (numbers[:, None, None] * torch.arange(256.0).reshape(64, 4)).sum(-1)
                assert torch.equal(made, want.float())
                for at in range(4):
                    hits[int(process[at])] = int(hit[at])
                    counts[int(process[at])] = int(calculated[at])
            assert os.getpid() not in hits
            assert sum(counts.values()) == (24 if epoch == 0 else 0)
            assert sum(hits.values()) == (0 if epoch == 0 else 24)


def test_rows_in_memory_are_read_without_the_disk_and_go_with_the_process(shm, tmp_path):
    module = Extractor()
    want = module(torch.ones(8, 4), cache_key=list(range(8)))
    store = row_store.open_store(Extractor._streamload_options.place)
    store.flush()
    assert len(store.memory) == 8
    cleared(store.place.root)
    assert torch.equal(module(torch.ones(8, 4), cache_key=list(range(8))), want)
    assert torch.equal(module(torch.ones(1, 4), cache_key=[3]), want[3:4])
    assert cache_info(module).hits == 9
    assert [path.name for path in shm.iterdir()] == [f"streamload-memory-{os.geteuid()}"]
    row_store.close_stores()
    assert list((shm / f"streamload-memory-{os.geteuid()}").iterdir()) == []


def test_a_share_of_memory_that_a_killed_process_had_is_given_to_others(shm, tmp_path):
    first = MemoryRows("it", lambda used_bytes: 1 << 20)
    first.add([(key(at), unseal(*row(at, 10_000))) for at in range(200)], "it")
    assert first.size_bytes > 900_000
    second = MemoryRows("it", lambda used_bytes: 1 << 20)
    second.add([(key(at), unseal(*row(at, 10_000))) for at in range(200)], "it")
    assert second.size_bytes == 0  # the other has all of it
    first._share._held.close()  # as a kill does
    second._share._full_until = 0.0
    second.add([(key(at), unseal(*row(at, 10_000))) for at in range(200)], "it")
    assert second.size_bytes > 900_000
    assert second.get(key(0)) is None  # the least recently added went
    assert bytes(second.get(key(199)).body) == random.Random("0 199").randbytes(10_000)
    second.close()


FILLER = """
import sys
from pathlib import Path
from streamload.cache import memory
from streamload.derived.store.memory import MemoryRows
from streamload.derived.store.sealed import Row

memory.PLACE = Path(sys.argv[1])
limit_bytes, row_bytes = int(sys.argv[2]), 20_000
rows = MemoryRows("it", lambda used_bytes: limit_bytes)
rows.add([(bytes(32), Row(b"layout", bytes([1]) * row_bytes, 1))], "it")
print("ready", flush=True)
sys.stdin.readline()
for at in range(limit_bytes // row_bytes):
    key = int(sys.argv[3]).to_bytes(16, "big") + at.to_bytes(16, "big")
    rows.add([(key, Row(b"layout", bytes([at % 255]) * row_bytes, 1))], "it")
print(rows.size_bytes, flush=True)
sys.stdin.readline()
"""


@pytest.mark.deep
def test_eight_processes_hold_no_more_in_memory_than_the_one_limit_of_their_node(shm):
    limit_bytes = 64 << 20
    fillers = [
        subprocess.Popen(
            [sys.executable, "-c", FILLER, str(shm), str(limit_bytes), str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(8)  # as of two ranks with four workers each
    ]  # fmt: skip
    try:
        assert [filler.stdout.readline() for filler in fillers] == ["ready\n"] * 8
        before = sum(pss_bytes(filler.pid) for filler in fillers)
        for filler in fillers:
            filler.stdin.write("fill\n")
            filler.stdin.flush()
        held_bytes = sum(int(filler.stdout.readline()) for filler in fillers)
        growth = sum(pss_bytes(filler.pid) for filler in fillers) - before
    finally:
        for filler in fillers:
            filler.communicate("end\n", timeout=60)
    assert 0.9 * limit_bytes < held_bytes <= limit_bytes
    assert growth <= 1.05 * limit_bytes


def test_memory_of_which_the_shares_were_removed_is_full_and_rows_are_read(shm):
    rows = MemoryRows("it", lambda used_bytes: 1 << 20)
    shutil.rmtree(shm / f"streamload-memory-{os.geteuid()}")
    rows.add([(key(1), unseal(*row(1)))], "it")
    assert rows.get(key(1)) is None
    rows.close()


def test_memory_stays_within_its_limit(shm):
    limited = cache_module(cache_level=CacheLevel.MEMORY, max_memory_cache_size_mb=0.5)(Widens)
    module = limited()
    for start in range(0, 1024, 64):
        module(torch.arange(float(start), start + 64)[:, None], cache_key=list(range(start, start + 64)))
    made = module(torch.arange(1024.0)[:, None], cache_key=list(range(1024)))
    assert torch.equal(made, torch.arange(1024.0)[:, None].expand(-1, 768))
    assert cache_info(module).hits == 1024  # the others are on disk
    store = row_store.open_store(module._streamload_options.place)
    assert 0.3 * 2**20 < store.memory.size_bytes <= 0.5 * 2**20


class Widens(nn.Module):
    def forward(self, x):
        return x.expand(len(x), 768)


@pytest.mark.parametrize("is_worker", [True, False])
def test_only_a_forked_worker_takes_what_its_parent_found_in_libraries(is_worker, monkeypatch):
    module = cache_module(Widens)()

    def work():
        monkeypatch.setattr(project_code, "_functions_in", lambda package: pytest.fail(package))
        module(torch.ones(2, 1), cache_key=["a", "b"])
        assert gc.get_freeze_count()

    process = multiprocessing.get_context("fork").Process(target=work, daemon=is_worker)
    process.start()
    process.join(60)
    assert process.exitcode == (0 if is_worker else 1)


def test_too_little_memory_is_said_and_the_disk_is_used(shm, monkeypatch, caplog):
    monkeypatch.setattr(memory, "available", lambda: memory.FreeMemory(1000, "memory"))
    with caplog.at_level(logging.WARNING):
        module = Extractor()
        module(torch.ones(8, 4), cache_key=list(range(8)))
    assert "rows aren't kept in memory: there is too little memory" in caplog.text
    assert cache_info(module).stored == 8


@pytest.mark.parametrize(("free_bytes", "is_copied"), [(1 << 30, True), (1 << 20, False)])
def test_auto_is_in_memory_where_the_rows_fit(shm, monkeypatch, free_bytes, is_copied):
    monkeypatch.setattr(memory, "available", lambda: memory.FreeMemory(free_bytes, "memory"))
    store = RowStore(RowPlace("", CacheLevel.AUTO))
    assert (store.memory is not None) is is_copied
    store.close()


def test_a_forked_child_leaves_its_parents_connections_alone(tmp_path):
    module = cache_module(cache_path=str(tmp_path / "here"))(Doubles)()
    module(torch.ones(2, 2), cache_key=["a", "b"])
    for _ in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                ok = torch.equal(module(torch.ones(2, 2), cache_key=["a", "b"]), 2 * torch.ones(2, 2))
                module(torch.ones(1, 2), cache_key=[os.getpid()])
                code = 0 if ok and cache_info(module).hits == 2 else 2
            os._exit(code)
        module(torch.ones(1, 2), cache_key=["of the parent"])
        assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(module(torch.ones(2, 2), cache_key=["a", "b"]), 2 * torch.ones(2, 2))


def test_rows_and_shards_share_a_directory(tmp_path):
    module = cache_module()(Doubles)()
    module(torch.ones(2, 2), cache_key=["a", "b"])
    tier = Tier(tmp_path / "cache", 1 << 30)
    assert list(foreign(tier)) == []
    clear(tier)
    module(torch.ones(2, 2), cache_key=["a", "b"])
    assert cache_info(module).hits == 2


def test_a_directory_for_all_gets_one_of_the_user_s_own(tmp_path):
    tmp_path.chmod(0o777)
    if os.geteuid() == 0:
        assert RowPlace(str(tmp_path)).root == tmp_path / "streamload-0" / "rows"
    module = cache_module(cache_path=str(tmp_path))(Doubles)()
    module(torch.ones(2, 2), cache_key=["a", "b"])
    assert cache_info(module).stored == (2 if os.geteuid() == 0 else 0)


def test_nothing_is_left_open(tmp_path, no_leaks):
    def once(name):
        module = cache_module(cache_path=str(tmp_path / name))(Doubles)()
        module(torch.ones(2, 2), cache_key=["a", "b"])
        row_store.close_stores()

    once("first")
    with no_leaks():
        once("second")


def test_diskcache_isn_t_imported():
    script = "import sys, streamload; streamload.cache_module; print('diskcache' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False"]
