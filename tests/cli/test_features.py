"""`streamload features` on rows that a decorated module stored in a process of its own."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch

from streamload import Batches, Features, make_loader
from streamload.cli import main
from streamload.cli.features.show import text_of
from streamload.derived.proof.code import Describer
from streamload.derived.store import database
from streamload.derived.store.catalog import DamagedRow, delete_damaged, open_catalog
from streamload.derived.store.keys import Naming
from streamload.derived.store.results import Result
from streamload.derived.store.row_store import RowPlace, RowStore, close_stores
from streamload.derived.store.sealed import NOTE, digest_of_parts, flat, leaves_in, seal
from streamload.errors import CacheError
from streamload.testing.shards import write_shards
from tests.support.commands import run_forked
from tests.support.disks import read_only, small_disk, why_no_small_disk
from tests.support.kills import Child

MAKER = """
import dataclasses, json, sys
import numpy as np
import torch
from torch import nn
import streamload

@dataclasses.dataclass
class Out:
    pooled: torch.Tensor
    more: dict

@streamload.cache_module(cache_path=sys.argv[1])
class Extractor(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, width))

    def forward(self, x):
        pooled = x @ self.weight
        return Out(pooled, {"half": (pooled.bfloat16(),), "most": pooled.argmax(1)})

@streamload.cache_module(cache_path=sys.argv[1], cache_name="tags [x]")
class Tagger(nn.Module):
    def forward(self, x, few=True):
        return {"count": 3, "tags": x.sum(1).numpy()}

torch.manual_seed(0)
x = torch.randn(7, 16)
keys = [f"{at}.jpg" for at in range(7)]
for seed in (1, 2):
    torch.manual_seed(seed)
    out = Extractor()(x, cache_key=keys)
    streamload.cache_info(Extractor)  # what waits is stored: each has a time of its own
    np.savez(f"{sys.argv[2]}/{seed}.npz", pooled=out.pooled, most=out.more["most"],
             half=out.more["half"][0].view(torch.uint16))
torch.manual_seed(3)
Extractor(width=6)(x[:2], cache_key=keys[:2])
tagger = Tagger()
for rows in (2, 3):
    np.save(f"{sys.argv[2]}/tags{rows}.npy", tagger(x[:rows], cache_key=f"first {rows}")["tags"])
"""
KEYS = [f"{at}.jpg" for at in range(7)]
NAMES = ["rows", "rows.db"]
OF_CACHE = ("ls", "verify", "gc", "clear")
"""Commands of `streamload cache`, which know rows, too."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Rows are read a few at a time."""
    monkeypatch.setattr(database, "_PORTION_BYTES", 500)


class Made(NamedTuple):
    """What the maker made.

    Attributes:
        path: the cache_path of its modules.
        results: by fingerprint of "Extractor", in the order in which they were stored.
        others: the fingerprints of the third extractor and of the tagger.
    """

    path: str
    results: dict
    others: list


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    command = [sys.executable, "-c", MAKER, folder / "features", folder]
    subprocess.run(command, check=True, timeout=120, cwd=folder)
    (folder / "features" / "rows" / "notes of mine.txt").write_text("foreign")
    return folder


@pytest.fixture
def made(made_once, tmp_path):
    shutil.copytree(made_once / "features", tmp_path / "features")
    with table(tmp_path / "features") as rows:
        found = rows.execute("SELECT key FROM rows WHERE used NOT NULL ORDER BY place").fetchall()
    in_order = list(dict.fromkeys(key[:16].hex() for (key,) in found))
    results = {of: arrays_in(made_once / f"{at + 1}.npz") for at, of in enumerate(in_order[:2])}
    return Made(str(tmp_path / "features"), results, in_order[2:])


def arrays_in(path):
    with np.load(path) as arrays:
        return dict(arrays)


@contextlib.contextmanager
def table(path):
    """The database of rows, as SQLite has it."""
    with contextlib.closing(sqlite3.connect(os.path.join(path, *NAMES))) as connection, connection:
        yield connection


def content(path):
    """All that is in the database, with the times by which rows go."""
    with table(path) as rows:
        return rows.execute("SELECT place, key, used, stored, label, value FROM rows ORDER BY key").fetchall()


@pytest.fixture
def features(capsys, monkeypatch):
    """Run a command; gives its exit code, stdout and stderr."""

    def run(command, *arguments):
        monkeypatch.setattr(sys, "argv", ["streamload", *group_of(command), *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        try:
            main()
        except SystemExit as exc:
            return exc.code or 0, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def group_of(command):
    """A command with its group and the kind of what it is for."""
    return ["cache", command, "--kind", "columns"] if command in OF_CACHE else ["features", command]


def as_json(features, *arguments, code=0):
    found, out, err = features(*arguments, "--json")
    assert found == code, err
    report = json.loads(out)
    return report["rows"] if arguments[0] in OF_CACHE else report


def one_line(ran):
    """The one line of an expected failure."""
    code, _, err = ran
    assert code == 2
    (line,) = err.splitlines()
    return line


@pytest.mark.deep
def test_ls_shows_each_fingerprint_with_its_label(features, made):
    report = as_json(features, "ls", "--path", made.path)
    rows = {row["fingerprint"]: row for row in report["fingerprints"]}
    assert list(rows) == [*made.results, *made.others]  # by label, then by the last use
    for of, row in rows.items():
        with table(made.path) as stored:
            ((count, size),) = stored.execute(
                "SELECT count(*), sum(length(value)) FROM rows WHERE hex(key) LIKE ?",
                (f"{of}%",),
            )
        assert (row["rows"], row["size_bytes"]) == (count, size)
        assert (row["device"], row["dtype"], row["has_note"]) == ("cpu", "torch.float32", True)
        assert row["last_read"] is None
    assert [row["label"] for row in rows.values()] == ["Extractor"] * 3 + ["tags [x]"]
    assert [row["rows"] for row in rows.values()] == [7, 7, 2, 2]
    code, out, _ = features("ls", "--cache-dir", made.path)
    assert code == 0
    assert all(of[:12] in out for of in rows)
    assert "tags [x]" in out
    assert "last read" not in out
    assert "18 rows of 4 fingerprints" in out


def test_ls_shows_reads_that_were_noted_and_rows_without_a_note(features, made):
    first = next(iter(made.results))
    with table(made.path) as rows:
        rows.execute("UPDATE rows SET used = 2e12 WHERE hex(key) LIKE ?", (f"{first}%",))
        rows.execute("DELETE FROM rows WHERE key = ?", (NOTE + bytes.fromhex(first),))
    found = as_json(features, "ls", "--path", made.path)["fingerprints"]
    (row,) = [row for row in found if row["fingerprint"] == first]
    assert (row["has_note"], row["device"]) == (False, None)
    assert row["last_read"] == "2033-05-18T03:33:20+00:00"
    _, out, _ = features("ls", "--path", made.path)
    assert "2033-05-18 03:33Z" in out
    assert "no note" in out
    assert features("show", first, "--path", made.path)[0] == 0
    assert "no note" in features("show", first, "--path", made.path)[1]
    assert as_json(features, "show", first, "--path", made.path)["parts"] is None
    assert "has no whole note" in one_line(
        features("why", first, found[0]["fingerprint"], "--path", made.path)
    )


def test_a_label_is_on_its_line_and_moves_no_cursor(features, made):
    first = next(iter(made.results))
    with table(made.path) as rows:
        rows.execute("UPDATE rows SET label = ?", ("a\nlabel\x1b[2J\u202e",))
    for command in (("ls",), ("show", first), ("gc", "--stale", "--dry-run"), ("clear", "--dry-run")):
        code, out, _ = features(*command, "--path", made.path)
        assert code == 0
        assert not {"\x1b", "\u202e"} & set(out)
        assert "\nlabel" not in out
        assert (r"a\nlabel\x1b[2J\u202e" in out) == (command[0] != "clear")
    assert as_json(features, "ls", "--path", made.path)["fingerprints"][0]["label"].startswith("a\nlabel")


def test_the_default_is_the_cache_directory(features, made, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", made.path)
    assert len(as_json(features, "ls")["fingerprints"]) == 4


def test_show_has_the_parts_that_make_the_fingerprint(features, made):
    for of in made.results:
        report = as_json(features, "show", of[:7].upper(), "--path", made.path)
        assert report["fingerprint"] == of
        assert [row["rows"] for row in report["rows"]] == [7]
        with open_catalog(RowPlace(made.path).root) as catalog:
            parts = catalog.parts(bytes.fromhex(of))
        assert digest_of_parts(parts).hex() == of
        assert report["parts"] == flat(parts)
        code, out, _ = features("show", of, "--path", made.path)
        assert code == 0
        shown = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line.split()[1:]}
        assert shown["arguments.width"] == "5"
        assert shown["settings.torch"] == torch.__version__
        assert shown["weights"] == parts["weights"]
        assert shown["class"] == "Extractor"


def test_a_prefix_has_to_tell_one_fingerprint(features, made):
    assert "no fingerprint begins with 'x'" in one_line(features("show", "x", "--path", made.path))
    assert "4 fingerprints begin with ''" in one_line(features("show", "", "--path", made.path))
    with table(made.path) as rows:
        for digest in (b"\xab" * 16, b"\xab" * 15 + b"\0"):
            rows.execute("INSERT INTO rows VALUES (NULL, ?, 'it', 1, 1, x'')", (digest + bytes(16),))
    assert "2 fingerprints begin with 'ababab'" in one_line(features("show", "ababab", "--path", made.path))
    assert as_json(features, "show", "ab" * 16, "--path", made.path)["fingerprint"] == "ab" * 16


def test_why_names_the_parts_that_differ(features, made):
    (one, other), wider = made.results, made.others[0]
    report = as_json(features, "why", one[:8], other[:8], "--path", made.path)
    assert (report["a"], report["b"]) == (one, other)
    assert [found["part"] for found in report["differences"]] == ["weights"]
    for side, of in (("a", one), ("b", other)):
        shown = as_json(features, "show", of, "--path", made.path)
        assert report["differences"][0][side] == shown["parts"]["weights"]
    report = as_json(features, "why", one, wider, "--path", made.path)
    assert {found["part"] for found in report["differences"]} == {"arguments.width", "weights"}
    code, out, _ = features("why", one, wider, "--path", made.path)
    assert code == 0
    assert ["arguments.width", "5", "6"] in [line.split() for line in out.splitlines()]
    code, out, _ = features("why", one, one, "--path", made.path)
    assert (code, out) == (0, f"{one} is both: they are equal\n")


def damage(path, bodies):
    """Flip a bit in rows where the file has them."""
    file = os.path.join(path, *NAMES)
    with open(file, "rb") as read:
        whole = bytearray(read.read())
    for body in bodies:
        at = whole.index(body)
        whole[at + len(body) - 3] ^= 8
    with open(file, "wb") as write:
        write.write(whole)


def test_verify_finds_the_rows_that_are_damaged_and_deletes_those(features, made):
    report = as_json(features, "verify", "--path", made.path)
    assert (report["rows"], report["damaged"], report["deleted"]) == (18, [], 0)
    assert report["notes"] >= 4
    with table(made.path) as rows:
        bad = rows.execute("SELECT key, value FROM rows WHERE used NOT NULL ORDER BY key").fetchall()[3::5]
    damage(made.path, [value for _, value in bad])
    before = content(made.path)
    report = as_json(features, "verify", "--path", made.path, code=1)
    assert {found["name"] for found in report["damaged"]} == {key.hex() for key, _ in bad}
    assert all("fails its checksum" in found["cause"] for found in report["damaged"])
    code, out, _ = features("verify", "--path", made.path)
    assert code == 1
    assert f"{len(bad)} damaged, 0 deleted" in out
    assert content(made.path) == before
    code, out, _ = features("verify", "--repair", "--path", made.path)
    assert code == 0
    assert f"{len(bad)} damaged, {len(bad)} deleted" in out
    keys = {key for key, _ in bad}
    assert content(made.path) == [row for row in before if row[1] not in keys]
    assert features("verify", "--path", made.path)[0] == 0


def test_verify_changes_nothing_and_reads_what_is_stored_beside_it(features, made):
    before = content(made.path)
    store, key = RowStore(RowPlace(made.path)), bytes(32)
    try:
        store.write([(key, seal(key, b'["v",null]', b"", 0))], "new")  # in the log, of a process that runs
        assert as_json(features, "verify", "--path", made.path)["rows"] == 19
        assert "new" in {row["label"] for row in as_json(features, "ls", "--path", made.path)["fingerprints"]}
        for command in ("ls", "gc", "verify"):
            assert features(command, "--path", made.path)[0] == 0
        assert key in store.read([key], "new")
    finally:
        store.close()
    assert [stored for stored in content(made.path) if stored[1] != key] == before


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ("UPDATE rows SET key = randomblob(32) WHERE place = ?", "fails its checksum"),
        ("UPDATE rows SET value = x'80034b2a2e' WHERE place = ?", "has no head"),
        ("UPDATE rows SET value = 3 WHERE place = ?", "it isn't stored as bytes"),
        ("UPDATE rows SET key = NULL WHERE place = ?", "it isn't stored as bytes"),
        ("UPDATE rows SET value = substr(value, 1, 40) WHERE place = ?", "fails its checksum"),
        ("UPDATE rows SET value = x'' WHERE place = ?", "has no head"),
    ],
)
def test_verify_finds_what_others_wrote(features, made, change, cause):
    with table(made.path) as rows:
        ((place,),) = rows.execute("SELECT max(place) FROM rows")
        rows.execute(change, (place,))
    (found,) = as_json(features, "verify", "--path", made.path, code=1)["damaged"]
    assert cause in found["cause"]
    assert as_json(features, "verify", "--path", made.path, "--repair")["deleted"] == 1
    assert features("verify", "--path", made.path)[0] == 0


def test_verify_finds_layouts_and_notes_that_are_of_something_else(features, made):
    key = next(iter(made.results))
    names = [bytes.fromhex(key) + bytes([at]) * 16 for at in range(3)]
    layouts = [b'["t","float32",[3]]', b'["q",1]', b'["n","|O",[1]]']
    note = NOTE + bytes.fromhex(key)
    store = RowStore(RowPlace(made.path))
    store.write(
        [(name, seal(name, layout, bytes(8), 0)) for name, layout in zip(names, layouts, strict=True)], "x"
    )
    store.write_note(note, b'{"class": "Another"}', "Extractor")
    store.close()
    found = as_json(features, "verify", "--path", made.path, code=1)["damaged"]
    causes = {one["name"]: one["cause"] for one in found}
    assert "has 8 bytes where its layout says 12" in causes[names[0].hex()]
    assert "can't be read" in causes[names[1].hex()]
    assert "can't be read" in causes[names[2].hex()]
    assert "is of another fingerprint" in causes[note.hex()]
    assert len(causes) == 4


def test_a_row_that_was_stored_anew_since_it_was_looked_at_is_not_deleted(made):
    with open_catalog(RowPlace(made.path).root, writable=True) as catalog:
        ((place, stored),) = catalog.connection.execute("SELECT place, stored FROM rows LIMIT 1")
        assert delete_damaged(catalog, [DamagedRow(place, stored - 1, b"", "", "")]) == 0
        assert delete_damaged(catalog, [DamagedRow(place, stored, b"", "", "")]) == 1


def test_what_was_opened_to_read_cannot_delete(made):
    before = content(made.path)
    with (
        pytest.raises(CacheError, match="attempt to write a readonly database"),
        open_catalog(RowPlace(made.path).root) as catalog,
    ):
        catalog.delete(catalog.fingerprints()[0])
    assert content(made.path) == before


def test_a_broken_database_is_said_and_replaced_where_that_is_asked(features, made):
    with open(os.path.join(made.path, *NAMES), "r+b") as file:
        file.write(b"no database at all")
    assert "is broken (file is not a database)" in one_line(features("ls", "--path", made.path))
    report = as_json(features, "verify", "--path", made.path, code=1)
    assert "is broken" in report["broken"]
    code, out, _ = features("verify", "--path", made.path)
    assert code == 1
    assert "a broken file" in out
    assert features("verify", "--repair", "--path", made.path)[0] == 0
    assert as_json(features, "ls", "--path", made.path)["fingerprints"] == []
    assert features("verify", "--path", made.path)[0] == 0
    assert as_json(features, "gc", "--dry-run", "--path", made.path)["databases"] == ["rows.db.broken"]
    assert as_json(features, "gc", "--path", made.path)["databases"] == ["rows.db.broken"]
    assert "rows.db.broken" not in os.listdir(os.path.join(made.path, "rows"))


def test_gc_leaves_the_newest_fingerprint_of_each_label_and_its_arguments(features, made):
    first, newest = made.results
    old = [first]
    before = content(made.path)
    report = as_json(features, "gc", "--stale", "--dry-run", "--path", made.path)
    assert [found["fingerprint"] for found in report["stale"]] == old
    assert report["notes"] == sorted(old)
    assert content(made.path) == before
    assert as_json(features, "gc", "--path", made.path)["stale"] == []
    assert content(made.path) == before
    code, out, _ = features("gc", "--stale", "--path", made.path)
    assert code == 0
    assert "deleted 7 rows, 1 notes and 0 broken or old files" in out
    left = as_json(features, "ls", "--path", made.path)["fingerprints"]
    assert {row["fingerprint"] for row in left} == {newest, *made.others}
    gone = {bytes.fromhex(of) for of in old}
    kept = [row for row in before if row[1][:16] not in gone and row[1][5:] not in gone]
    assert content(made.path) == kept
    assert as_json(features, "verify", "--path", made.path)["rows"] == 11
    assert newest in {row["fingerprint"] for row in left}


def test_gc_takes_a_read_that_was_noted_for_a_use(features, made):
    first = next(iter(made.results))
    with table(made.path) as rows:
        rows.execute("UPDATE rows SET used = 2e12 WHERE hex(key) LIKE ?", (f"{first}%",))
    stale = as_json(features, "gc", "--stale", "--dry-run", "--path", made.path)["stale"]
    assert {found["fingerprint"] for found in stale} == {*made.results} - {first}


def test_gc_deletes_old_notes_without_rows_and_stores_of_before(features, made):
    first = bytes.fromhex(next(iter(made.results)))
    with table(made.path) as rows:
        rows.execute("DELETE FROM rows WHERE substr(key, 1, 16) = ?", (first,))
    assert as_json(features, "gc", "--path", made.path)["notes"] == []  # its rows may be on their way
    with table(made.path) as rows:
        rows.execute("UPDATE rows SET stored = 1 WHERE key = ?", (NOTE + first,))
    os.mkdir(os.path.join(made.path, "rows", "r0"))
    report = as_json(features, "gc", "--path", made.path)
    assert (report["notes"], report["databases"]) == ([first.hex()], ["r0"])
    assert {"rows.db", "notes of mine.txt"} <= {*os.listdir(os.path.join(made.path, "rows"))}
    assert "r0" not in os.listdir(os.path.join(made.path, "rows"))
    assert len(as_json(features, "ls", "--path", made.path)["fingerprints"]) == 3


def test_clear_deletes_a_label_or_all_and_no_other_files(features, made):
    before = content(made.path)
    assert "say --yes" in one_line(features("clear", "tags [x]", "--path", made.path))
    assert features("clear", "--dry-run", "--path", made.path)[1].startswith("would delete 18 rows in ")
    assert content(made.path) == before
    assert as_json(features, "clear", "tags", "--yes", "--path", made.path)["rows"] == 0
    assert as_json(features, "clear", "tags [x]", "--yes", "--path", made.path)["rows"] == 2
    left = as_json(features, "ls", "--path", made.path)["fingerprints"]
    assert [row["fingerprint"] for row in left] == [*made.results, made.others[0]]
    assert features("clear", "--yes", "--path", made.path)[1].startswith("deleted 16 rows in ")
    assert content(made.path) == []
    assert os.path.exists(os.path.join(made.path, "rows", "notes of mine.txt"))


def test_export_gives_numpy_the_results_of_the_module(features, made, tmp_path):
    for of, expected in made.results.items():
        out = tmp_path / "deep" / of
        report = as_json(features, "export", of, out, "--path", made.path)
        assert (report["layouts"], report["damaged"]) == ([7], 0)
        assert sorted(os.listdir(out)) == ["fingerprint.json", "layout-0"]
        about = json.loads((out / "fingerprint.json").read_text())
        assert digest_of_parts(about["parts"]).hex() == about["fingerprint"] == of
        names = np.load(out / "layout-0" / "names.npy").astype(str).tolist()
        naming = Naming(bytes.fromhex(of), b"", is_row=True)
        order = [names.index(naming.name(key).hex()) for key in KEYS]
        assert names == sorted(names)
        layout = json.loads((out / "layout-0" / "layout.json").read_text())
        found = {leaf["path"]: leaf for leaf in layout["leaves"]}
        assert layout["rows"] == 7
        for path, name, dtype in (
            (".pooled", "pooled", "float32"),
            (".more['half'][0]", "half", "bfloat16"),
            (".more['most']", "most", "int64"),
        ):
            leaf = np.load(out / "layout-0" / found[path]["file"], mmap_mode="r", allow_pickle=False)
            assert found[path]["dtype"] == dtype
            assert leaf.dtype == expected[name].dtype
            assert list(leaf.shape) == [7, *found[path]["shape"]]
            assert np.array_equal(leaf[order], expected[name])
    assert set(os.listdir(tmp_path / "deep")) == set(made.results)  # nothing is left of the way there


def test_export_has_a_folder_for_each_layout(features, made, made_once, tmp_path):
    report = as_json(features, "export", made.others[1], tmp_path / "out", "--path", made.path)
    assert report["layouts"] == [1, 1]
    found = {}
    for at in range(2):
        layout = json.loads((tmp_path / "out" / f"layout-{at}" / "layout.json").read_text())
        (leaf,) = layout["leaves"]
        array = np.load(tmp_path / "out" / f"layout-{at}" / leaf["file"])
        assert leaf["path"] == "['tags']"
        assert layout["layout"][1][0] == ["count", ["v", 3]]
        found[array.shape] = array[0]
    for rows in (2, 3):
        assert np.array_equal(found[1, rows], np.load(made_once / f"tags{rows}.npy"))


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_export_writes_the_keys_that_are_given_beside_the_rows(features, made, tmp_path, suffix):
    of, expected = next(iter(made.results.items()))
    lines = [key if suffix == "txt" else json.dumps(key) for key in [*KEYS[1:], "no.jpg"]]
    (tmp_path / f"keys.{suffix}").write_text("".join(f"{line}\n" for line in lines))
    command = ("export", of, tmp_path / "out", "--keys", tmp_path / f"keys.{suffix}", "--path", made.path)
    assert as_json(features, *command)["named"] == 6
    keys = (tmp_path / "out" / "layout-0" / "keys.txt").read_text().splitlines()
    assert sorted(keys) == sorted(["", *lines[:-1]])
    leaf = np.load(tmp_path / "out" / "layout-0" / "leaf-0.npy")
    for at, line in enumerate(lines[:-1]):
        assert np.array_equal(leaf[keys.index(line)], expected["pooled"][at + 1])


def test_export_names_a_key_of_a_whole_result_and_fails_for_what_is_none(features, made, tmp_path):
    (tmp_path / "keys.txt").write_text("first 3\nfirst 2\n")
    command = ("--keys", tmp_path / "keys.txt", "--path", made.path)
    assert as_json(features, "export", made.others[1], tmp_path / "out", *command)["named"] == 2
    for at in range(2):
        layout = json.loads((tmp_path / "out" / f"layout-{at}" / "layout.json").read_text())
        (rows,) = layout["leaves"][0]["shape"]
        assert (tmp_path / "out" / f"layout-{at}" / "keys.txt").read_text() == f"first {rows}\n"
    for line in ("{", '{"a": 1}'):
        (tmp_path / "keys.jsonl").write_text(f"3\n{line}\n")
        command = ("--keys", tmp_path / "keys.jsonl", "--path", made.path)
        assert "keys.jsonl, line 2: " in one_line(
            features("export", made.others[1], tmp_path / "no", *command)
        )


def test_export_leaves_damaged_rows_out_and_fails(features, made, tmp_path):
    of = next(iter(made.results))
    with table(made.path) as rows:
        key, value = rows.execute(
            "SELECT key, value FROM rows WHERE substr(key, 1, 16) = ?",
            (bytes.fromhex(of),),
        ).fetchone()
    damage(made.path, [value])
    code, out, _ = features("export", of, tmp_path / "out", "--path", made.path)
    assert code == 1
    assert "left out: 1 damaged rows" in out
    names = np.load(tmp_path / "out" / "layout-0" / "names.npy").astype(str).tolist()
    assert len(names) == 6
    assert key.hex() not in names


def test_export_overwrites_nothing_and_leaves_nothing_when_it_fails(features, made, tmp_path):
    of = next(iter(made.results))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "exists already" in one_line(features("export", of, tmp_path / "full", "--path", made.path))
    assert os.listdir(tmp_path / "full") == ["file"]
    names = [bytes.fromhex(of) + at.to_bytes(16, "big") for at in range(70)]
    store = RowStore(RowPlace(made.path))
    store.write([(name, seal(name, b'["v",%d]' % at, b"", 0)) for at, name in enumerate(names)], "x")
    store.close()
    before = sorted(os.listdir(tmp_path))
    assert "more than 64 layouts" in one_line(features("export", of, tmp_path / "out", "--path", made.path))
    assert sorted(os.listdir(tmp_path)) == before


def test_commands_run_beside_a_process_that_stores_and_reads(features, made, tmp_path):
    def work(stage):
        store = RowStore(RowPlace(made.path))
        lost = 0
        for at in range(300):
            names = [
                bytes([at // 100]) * 16 + at.to_bytes(8, "big") + one.to_bytes(8, "big") for one in range(5)
            ]
            layout, body = b'["t","uint8",[2000]]', bytes(2000)
            store.write([(name, seal(name, layout, body, 0)) for name in names], "busy")
            lost += sum(row.body != body for row in store.read(names, "busy").values())
        counts = store.counts
        store.close()
        return [counts.stored + counts.refused, counts.corrupt, lost]  # a busy disk may refuse some

    with Child(work) as child:
        for round_ in range(4):
            assert features("ls", "--path", made.path)[0] == 0
            assert features("verify", "--path", made.path)[0] == 0
            assert features("gc", "--stale", "--path", made.path)[0] == 0
            of = as_json(features, "ls", "--path", made.path)["fingerprints"][0]["fingerprint"]
            assert features("export", of, tmp_path / f"out{round_}", "--path", made.path)[0] == 0
        assert features("clear", "busy", "--yes", "--path", made.path)[0] == 0
        assert child.finish(120) == [1500, 0, 0]
    assert features("verify", "--path", made.path)[0] == 0


@pytest.mark.parametrize(
    "value",
    [
        *(1, -1.5, 1e300, True, None, "a 'b'", ..., range(3), 2j, slice(1, 2), torch.float16),
        *([1, "x", [None]], (1,), (), ("a", 2.0), {"a": (1, 2), 3: []}, {7}),
    ],
)
def test_arguments_are_shown_as_they_would_be_written(value):
    assert text_of(Describer().value(value, "it")) == repr(value)


def test_a_class_with_its_hook_is_shown_as_it_is_described():
    classes = [["code", "Linear"], ["code", "hook"]]
    assert text_of(classes) == json.dumps(classes)


DTYPES = {
    str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)
}


@pytest.mark.parametrize("name", [name for name in DTYPES if not name.startswith(("q", "bits"))])
def test_the_bytes_of_any_dtype_are_counted_as_torch_does(name):
    (leaf,) = leaves_in(json.dumps(["t", name, [2, 3]]).encode())
    assert leaf.stop == 6 * DTYPES[name].itemsize


def test_the_leaves_of_any_layout_are_those_that_are_read():
    value = {"a": [torch.zeros(2, 3), (None, torch.ones(2, dtype=torch.bool))], 1: np.zeros((2, 4), ">i2")}
    result = Result(value, 2)
    leaves = leaves_in(result.layout)
    assert [leaf.path for leaf in leaves] == ["['a'][0]", "['a'][1][1]", "[1]"]
    for at, body in enumerate(result.bodies()):
        assert leaves[-1].stop == len(body)
        for leaf, given in zip(leaves, result.leaves, strict=True):
            array = np.frombuffer(body[leaf.start : leaf.stop], leaf.stored).reshape(leaf.shape)
            assert np.array_equal(array, np.asarray(given)[at])


class Small(torch.nn.Module):
    """What a loader's feature is computed by."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Conv2d(3, 4, 32, stride=32)

    def forward(self, images):
        return self.project(images).mean((2, 3))


def test_rows_that_a_loader_stored_are_listed_verified_and_exported(features, tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    write_shards(tmp_path / "shards", [3, 4])
    feature = Features(Small().eval())
    options = {
        "batch_size": 2,
        "output": "dict",
        "train": False,
        "num_workers": 0,
        "batches": Batches(features={"f": feature}),
    }
    try:
        with make_loader(str(tmp_path / "shards"), **options) as loader:
            expected = torch.cat([feature(batch).clone() for batch in loader]).numpy()
    finally:
        close_stores()
    (row,) = as_json(features, "ls")["fingerprints"]
    assert (row["label"], row["rows"], row["has_note"]) == ("Small", 7, True)
    parts = as_json(features, "show", row["fingerprint"])["parts"]
    assert parts["inputs.inputs"] == "image"
    assert features("show", row["fingerprint"])[0] == 0
    assert as_json(features, "verify")["damaged"] == []
    assert as_json(features, "export", row["fingerprint"], tmp_path / "out")["layouts"] == [7]
    leaf = np.load(tmp_path / "out" / "layout-0" / "leaf-0.npy")
    assert sorted(leaf.tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize("kind", ["missing", "empty", "no database", "a file"])
def test_where_there_are_no_rows_nothing_is_made(features, tmp_path, kind):
    path = tmp_path / "none"
    if kind in ("empty", "no database"):
        (path / "rows").mkdir(parents=True, mode=0o700)
        path.chmod(0o700)
        if kind == "no database":
            (path / "rows" / "lock").touch()
    elif kind == "a file":
        path.touch()
    before = sorted(tmp_path.rglob("*"))
    code, out, _ = features("ls", "--path", path)
    assert (code, out) == (0, f"there are no rows in {path / 'rows'}\n")
    assert as_json(features, "ls", "--path", path)["fingerprints"] == []
    assert as_json(features, "verify", "--path", path)["rows"] == 0
    assert as_json(features, "gc", "--stale", "--path", path)["stale"] == []
    assert as_json(features, "clear", "--yes", "--path", path)["rows"] == 0
    for command in (("show", "a"), ("why", "a", "b"), ("export", "a", tmp_path / "out")):
        assert f"there are no rows in {path / 'rows'}" in one_line(features(*command, "--path", path))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(bool(why_no_small_disk()), reason=why_no_small_disk())
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_read_only_disk_can_be_read(made, tmp_path, is_killed):
    of = next(iter(made.results))

    def run(*arguments):
        ran = run_forked([*group_of(arguments[0]), *arguments[1:]])
        return ran.returncode, ran.stdout + ran.stderr

    def work(stage):
        disk = tmp_path / "disk"
        small_disk(disk, 8 << 20)
        path = str(disk / "features")
        shutil.copytree(made.path, path)
        if is_killed:  # the log of a process that was killed is left
            killed = os.fork()
            if not killed:
                connection = sqlite3.connect(os.path.join(path, *NAMES))
                connection.execute("UPDATE rows SET label = 'later' WHERE label = 'tags [x]'")
                connection.commit()
                os._exit(0)
            os.waitpid(killed, 0)
        read_only(disk)
        found = [run("ls", "--json", "--path", path), run("verify", "--path", path)]
        found.append(run("export", of, str(tmp_path / "out"), "--path", path))
        found += [
            run("why", *made.results, "--path", path),
            run("gc", "--stale", "--dry-run", "--path", path),
        ]
        return [*found, run("clear", "--yes", "--path", path), run("verify", "--repair", "--path", path)]

    with Child(work) as child:
        *reading, clearing, deleting = child.finish(120)
    assert [code for code, _ in reading] == [0] * 5, reading
    labels = [row["label"] for row in json.loads(reading[0][1])["rows"]["fingerprints"]]
    assert labels == ["Extractor"] * 3 + ["later" if is_killed else "tags [x]"]
    assert np.load(tmp_path / "out" / "layout-0" / "leaf-0.npy").shape == (7, 5)
    for code, said in (clearing, deleting):
        assert code == 2
        assert "the directory is read-only" in said


def test_a_directory_of_others_fails(features, made):
    os.chmod(os.path.join(made.path, "rows"), 0o777)
    assert "others may write" in one_line(features("ls", "--path", made.path))
    os.chmod(os.path.join(made.path, "rows"), 0o700)
    file = os.path.join(made.path, *NAMES)
    os.rename(file, file + ".moved")
    os.symlink(file + ".moved", file)
    assert "symbolic link" in one_line(features("ls", "--path", made.path))
