"""Indexes of joined files: each key's row, whatever the order; made once for a node; cleared; damaged."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import multiprocessing
import os
import random
import shutil
import tarfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import streamload
from streamload import Join
from streamload.errors import CacheError, OptionError, OriginNotFound
from streamload.join import index, table
from streamload.join.index import MappedRows, Written, write_index
from streamload.join.table import JoinTable, held_joins, open_table
from streamload.testing.server import ShardServer
from tests.join.test_joined import FORMATS, write_file
from tests.support.commands import run_forked

ROWS = [{"key": f"k{place}", "caption": f"c {place}", "score": place / 4} for place in range(7)]


def opened_rows(folder: Path, written: Written) -> MappedRows:
    mapped = MappedRows(folder, written.rows, written.row_bytes)
    assert mapped.keys_digest() == written.keys
    return mapped


@pytest.mark.parametrize("seed", range(6))
def test_each_key_has_its_row_and_no_other_has_one(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    rows = {
        "".join(rng.choices("ab/é東\udc80 01", k=rng.randrange(1, 9))): {"n": rng.random(), "t": "\ud800x"}
        for _ in range((1, 40, 3000)[seed % 3])
    }
    monkeypatch.setattr(index, "_ROWS_AT_ONCE", len(rows) // 3 + 1 if seed < 3 else 1 << 18)
    shuffled = [*rows.items(), *rng.choices([*rows.items()], k=3), (None, {"n": 0})]  # with equal rows
    rng.shuffle(shuffled)
    written = write_index(tmp_path, shuffled)
    assert (written.rows, written.without_key) == (len(rows) + 3, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"keys", "rows"}
    mapped = opened_rows(tmp_path, written)
    assert {key: json.loads(bytes(mapped.row(key))) for key in rows} == rows
    assert not any(mapped.row(f"{key}?") for key in rows)


def test_hashes_that_lie_unevenly_are_found(tmp_path, monkeypatch):
    """All within the first thousandth: a guess by their share is far off."""
    keys = [f"{place}" for place in range(3000)]
    monkeypatch.setattr(index, "_hash", lambda key: (int(key) * 7 + (1 << 40), 0))
    mapped = opened_rows(tmp_path, write_index(tmp_path, ((key, {"k": key}) for key in keys)))
    assert all(json.loads(bytes(mapped.row(key))) == {"k": key} for key in keys)
    assert mapped.row("-1") is None
    assert mapped.row("3000") is None


def test_keys_with_equal_halves_of_a_hash_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_hash", lambda key: (5, len(key)))
    mapped = opened_rows(tmp_path, write_index(tmp_path, [("a", {"n": 1})]))
    assert bytes(mapped.row("b")) == b'{"n":1}'
    assert mapped.row("bb") is None


def test_a_key_with_two_rows_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r'two rows have one key: \{"n":1\} and \{"n":2\}'):
        write_index(tmp_path, [("a", {"n": 1}), ("b", {"n": 1}), ("a", {"n": 2})])


def test_damaged_rows_are_told(tmp_path):
    written = write_index(tmp_path, [("a", {"n": 1}), ("b", {"n": 2})])
    whole = (tmp_path / "rows").read_bytes()
    for damaged in (whole[:-1] + b"]", whole[:30] + bytes(len(whole) - 30)):
        (tmp_path / "rows").write_bytes(damaged)
        with pytest.raises(CacheError, match="clear --kind joins") as raised:
            opened_rows(tmp_path, written).row("b")
        assert type(raised.value) is CacheError  # shards are read again for a CacheCorrupt, for ever


@pytest.mark.parametrize("name", ["about.json", "keys", "rows"])
def test_a_damaged_index_is_made_again(tmp_path, name, caplog):
    join = Join(write_file(tmp_path / "rows.jsonl", ROWS))
    for damage in (b"", b"[]", b"\xff{", None, "cut", "zeros", "folder"):
        open_table(join, tmp_path)
        gc.collect()
        (folder,) = (path for path in (tmp_path / "joins").iterdir() if path.is_dir())
        whole = (folder / name).read_bytes()
        if damage == "folder":
            shutil.rmtree(folder)
            folder.touch()
        elif damage is None:
            (folder / name).unlink()
        elif damage != "zeros" or name == "keys":
            cut = {"cut": whole[:16], "zeros": bytes(len(whole))}
            (folder / name).write_bytes(cut.get(damage, damage))  # type: ignore[call-overload]
        opened = open_table(join, tmp_path)
        for row in ROWS:
            assert json.loads(bytes(opened.row(row["key"], {})))["caption"] == row["caption"]
    assert "is made again" in caplog.text


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_of_each_format_has_the_same_rows(tmp_path, suffix):
    opened = open_table(Join(write_file(tmp_path / f"rows.{suffix}", ROWS)), tmp_path)
    for row in ROWS:
        expected = {name: row[name] for name in ("caption", "score")}
        if suffix == "csv":
            expected["score"] = str(expected["score"])
        assert json.loads(bytes(opened.row(row["key"], {}))) == expected
    some = open_table(Join(tmp_path / f"rows.{suffix}", columns=["caption"]), tmp_path)
    assert json.loads(bytes(some.row("k3", {}))) == {"caption": "c 3"}
    assert open_table(Join(tmp_path / f"rows.{suffix}", columns=["key"]), tmp_path).row("k3", {}) == b"{}"


def test_keys_of_json_are_text_or_whole_numbers(tmp_path):
    rows = [{"uid": 7, "n": 1}, {"uid": "8", "n": 2}, {"uid": 9.0, "n": 3}, {"uid": None, "n": 4}]
    rows += [{"uid": True, "n": 5}, {"uid": [7], "n": 6}, {"uid": "", "n": 7}, {"uid": "", "n": 8}]
    opened = open_table(Join(write_file(tmp_path / "rows.jsonl", rows), "meta.json:uid"), tmp_path)
    for text, n in {b'{"uid": "7"}': 1, b'{"uid": 8}': 2, b'{"uid": 9}': 3, b'{"uid": 7.0}': 1}.items():
        assert json.loads(bytes(opened.row("key", {"meta.json": text}))) == {"n": n}
    for text in (
        b'{"uid": true}',
        b'{"uid": null}',
        b"{}",
        b"[7]",
        b"{",
        b"\xff",
        b'{"uid": 7.5}',
        b"[" * 9999,
    ):
        assert opened.row("7", {"meta.json": text}) is None
    assert opened.row("7", {"json": b'{"uid": 7}'}) is None
    nested = [{"meta.uid": 7, "n": 1}]
    opened = open_table(Join(write_file(tmp_path / "nested.jsonl", nested), "json:meta.uid"), tmp_path)
    for text in (b'{"meta": {"uid": 7}}', b'{"meta.uid": 7}'):
        assert opened.row("key", {"json": text}) == b'{"n":1}'


def test_cells_that_json_lacks(tmp_path):
    made = pyarrow.table({"key": ["a"], "day": [date(2026, 1, 31)], "list": [[1, 2]], "raw": [b"\xff"]})
    parquet.write_table(made, tmp_path / "rows.parquet")
    join = Join(tmp_path / "rows.parquet", columns=["day", "list"])
    row = open_table(join, tmp_path).row("a", {})
    assert json.loads(bytes(row)) == {"day": "2026-01-31", "list": [1, 2]}
    with pytest.raises(OptionError, match="a column has bytes: leave it out by columns="):
        open_table(Join(tmp_path / "rows.parquet"), tmp_path)


def test_files_that_cant_be_read_say_why(tmp_path):
    files = {
        "a.csv": ("key,caption\na,b,c\n", "line 2 has 3 fields; expected 2"),
        "empty.csv": ("", "no column key or __key__ or sample_key"),
        "head.csv": ("key,caption\n", "no row with a key"),
        "list.jsonl": ("[1]\n", r"line 1 is \[1\]; expected an object"),
        "number.jsonl": ("7\n", "line 1 is 7; expected an object"),
        "other.jsonl": (
            '{"key": "a"}\n{"id": "b"}\n',
            "an object with key or __key__ or sample_key",
        ),
        "cut.jsonl": ('{"key": "a"', "can't be read"),
        "cut.parquet": ("PAR1", "can't be read"),
        "bad.jsonl": ('{"key": "a"}\n\n{"key"\n', "bad.jsonl': line 3 can't be read"),
        "cut.npz": ("PK", "can't be read"),
        "empty.npz": ("", "empty.npz': the file can't be read"),
        "no_rows.jsonl": ("", "no_rows.jsonl': the file has no row with a key"),
    }
    for name, (text, match) in files.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(OptionError, match=match):
            open_table(Join(tmp_path / name), tmp_path)
    with (tmp_path / "array.npz").open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(OptionError, match="the file is one array"):
        open_table(Join(tmp_path / "array.npz"), tmp_path)
    np.savez(tmp_path / "objects.npz", key=np.array(["a", None]))
    np.savez(tmp_path / "lengths.npz", key=np.array([b"a", b"b"]), caption=np.array(["c"]))
    for name, match in {"objects.npz": "can't be read", "lengths.npz": "different lengths"}.items():
        with pytest.raises(OptionError, match=match):
            open_table(Join(tmp_path / name), tmp_path)
    with pytest.raises(OptionError, match="no column absent"):
        open_table(Join(write_file(tmp_path / "x.jsonl", ROWS), columns=["absent"]), tmp_path)
    with pytest.raises(OriginNotFound):
        open_table(Join(tmp_path / "absent.csv"), tmp_path)
    assert not list(held_joins(tmp_path))
    assert not list(tmp_path.glob("joins/*.new"))
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="can't be written"):
        open_table(Join(tmp_path / "x.jsonl"), tmp_path / "file")


def _open(path: Path, cache: Path, marks: Path) -> None:
    read = table.read_rows

    def reading(*arguments: Any) -> Iterator[Any]:
        (marks / str(os.getpid())).touch()
        time.sleep(0.2)  # so that the others ask meanwhile
        yield from read(*arguments)

    table.read_rows = reading
    assert open_table(Join(path), cache).row("k3", {}) == b'{"caption":"c 3","score":0.75}'


def test_one_process_of_a_node_reads_the_file(tmp_path):
    path, marks = write_file(tmp_path / "rows.jsonl", ROWS), tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "joins").mkdir()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_open, args=(path, tmp_path, marks)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(list(marks.iterdir())) == 1


def test_a_file_of_a_web_server_is_fetched_once_until_it_changes(tmp_path):
    write_file(tmp_path / "data.parquet", ROWS)
    with ShardServer(tmp_path) as server:
        join = Join(f"{server.url}/data.parquet")
        for _ in range(2):
            assert len(open_table(join, tmp_path / "cache")._rows) == len(ROWS)
        size = (tmp_path / "data.parquet").stat().st_size
        assert sum(request.sent for request in server.log) < 2 * size
        write_file(tmp_path / "data.parquet", [*ROWS, {"key": "k9", "caption": "new", "score": 1.0}])
        os.utime(tmp_path / "data.parquet", (2e9, 2e9))
        assert open_table(join, tmp_path / "cache").row("k9", {}) is not None
    gc.collect()
    (held,) = held_joins(tmp_path / "cache")
    assert (held.rows, held.source) == (len(ROWS) + 1, join.url)


def test_a_path_of_fsspec_is_read(tmp_path):
    import fsspec

    with fsspec.open("memory://joins/rows.csv", "w") as file:
        file.write("key,caption\na,b\n")
    assert open_table(Join("memory://joins/rows.csv"), tmp_path).row("a", {}) == b'{"caption":"b"}'


def test_the_command_lists_and_clears_what_no_process_uses(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    used = open_table(Join(write_file(tmp_path / "used.csv", ROWS)), tmp_path / "cache")
    open_table(Join(write_file(tmp_path / "free.csv", ROWS)), tmp_path / "cache")
    gc.collect()
    (tmp_path / "cache" / "joins" / f"{'0' * 32}.lock").touch()
    (left := tmp_path / "cache" / "joins" / f"{'0' * 32}.{'1' * 16}.new").mkdir()

    def command(*arguments: str) -> Any:
        done = run_forked(["cache", *arguments, "--kind", "joins", "--cache-dir", str(tmp_path / "cache")])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["joins"] if "--json" in arguments else done.stdout

    listed = {(Path(row["file"]).name, row["rows"], row["is_open"]) for row in command("ls", "--json")}
    assert listed == {("used.csv", 7, True), ("free.csv", 7, False), ("(not finished)", 0, False)}
    assert "used.csv" in command("ls")
    assert len(command("clear", "--dry-run", "--json")) == 2
    command("gc")
    assert not left.exists()
    assert "free.csv" in command("clear", "--yes")
    assert [Path(row["file"]).name for row in command("ls", "--json")] == ["used.csv"]
    assert used.row("k3", {}) is not None
    with contextlib.suppress(FileNotFoundError):
        JoinTable(tmp_path / "absent", used.join)
        raise AssertionError
    assert streamload.Join is Join
