"""The command line: it starts without torch, says what is wrong in one line, and packs what it is given."""

import csv
import io
import json
import math
import os
import re
import resource
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from streamload.cache import memory
from streamload.cache.tier import Tier, memory_root
from streamload.cli import main
from streamload.cli.doctor import examine
from streamload.cli.options import roots_of
from streamload.cli.terminal import print_table
from streamload.errors import CacheError
from streamload.options import directories, read_settings
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from streamload.transforms.kernel import VECTORS, why_not

COMMANDS = ("bench", "doctor", "pack", "version", "warm", "cache", "features")


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def streamload(capsys, monkeypatch):
    """Run the command in this process: `streamload("doctor", STREAMLOAD_AHEAD="1GB")`."""

    def run(*arguments, **variables):
        monkeypatch.setattr(sys, "argv", ["streamload", *map(str, arguments)])
        for name, value in {"COLUMNS": "200", **variables}.items():
            monkeypatch.setenv(name, value)
        returncode = 0
        try:
            main()
        except SystemExit as exc:
            returncode = exc.code or 0
        return Done(returncode, *capsys.readouterr())

    return run


def one_line(done):
    """The one line of an expected failure."""
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("streamload: ")
    return lines[0]


def a_jpeg(colour="red"):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(buffer, "JPEG")
    return buffer.getvalue()


def members(shard):
    with tarfile.open(shard) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


@pytest.fixture
def folder(tmp_path):
    """Three images with captions, one without, one of another kind, one with a dot in its name."""
    images = tmp_path / "images"
    (images / "deep").mkdir(parents=True)
    for name, caption in (
        ("a.jpg", "an a"),
        ("b.JPG", " a b\n"),
        ("deep/c.d.png", "a ç"),
        ("mute.jpg", None),
    ):
        (images / name).write_bytes(a_jpeg())
        if caption is not None:
            (images / name).with_suffix(".txt").write_text(caption, encoding="utf-8")
    (images / "film.gif").write_bytes(b"GIF89a")
    return images


def test_help_lists_every_command(streamload):
    done = streamload("--help")
    assert done.returncode == 0
    assert all(f" {command} " in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(streamload, command):
    done = streamload(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["bench", "--help"], ["version"], ["doctor"], ["cache", "ls"], ["features", "ls"]],
)
@pytest.mark.sampled(3)
def test_no_command_imports_torch_to_start(arguments, tmp_path):
    script = f"""
import sys
from streamload.cache import memory
from streamload.cli import main
sys.argv = ["streamload", *{arguments!r}]
try:
    main()
except SystemExit:
    pass
print("torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "STREAMLOAD_CACHE_DIR": str(tmp_path)},
    )
    assert done.stderr.splitlines()[-1] == "False"


def test_a_command_ends_without_a_search_for_garbage():
    script = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count() > len(gc.get_objects()), file=sys.stderr))  # the last
from streamload.cli import main
sys.argv = ["streamload", "version"]
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1] == "True"


def test_help_needs_nothing_heavy():
    script = (
        "import sys, streamload.cli; print(*{'numpy', 'fsspec', 'webdataset', 'rich.table'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []


def test_pack_makes_the_shards_that_tarfile_reads(streamload, folder, tmp_path):
    target = tmp_path / "shards"
    done = streamload("pack", folder, target, "--samples-per-shard", 2, "--prefix", "train-", "--no-shuffle")
    assert done.returncode == 0, done.stderr
    assert json.loads((target / "sizes.json").read_text()) == {"train-00000.tar": 2, "train-00001.tar": 1}
    assert sorted(path.name for path in target.iterdir()) == [
        "sizes.json",
        "train-00000.tar",
        "train-00001.tar",
    ]
    assert members(target / "train-00000.tar") == {
        "a.jpg": a_jpeg(),
        "a.txt": b"an a",
        "b.jpg": a_jpeg(),
        "b.txt": b"a b",
    }
    assert members(target / "train-00001.tar") == {"deep/c_d.png": a_jpeg(), "deep/c_d.txt": "a ç".encode()}
    assert "left out: 1 without a caption" in done.stdout


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_pack_reads_tables(streamload, folder, tmp_path, kind):
    rows = [
        ("a.jpg", "one, two"),
        ("b.JPG", "a b"),
        ("gone.jpg", "nothing"),
        ("film.gif", "a film"),
        ("a.jpg", "again"),
    ]
    table = folder / f"table.{kind}"
    with table.open("w", newline="") as out:
        if kind == "jsonl":
            out.writelines(json.dumps({"path": image, "text": text}) + "\n" for image, text in rows)
        else:
            writer = csv.writer(out, delimiter="\t" if kind == "tsv" else ",")
            writer.writerows([("path", "text"), *rows])
    columns = ("--image-column", "path", "--caption-column", "text")
    done = streamload("pack", table, tmp_path / "shards", *columns)
    assert done.returncode == 0, done.stderr
    found = members(tmp_path / "shards" / "00000.tar")
    texts = {name: text.decode() for name, text in found.items() if name.endswith(".txt")}
    assert texts == {"a.txt": "one, two", "b.txt": "a b", "a~2.txt": "again"}
    assert "1 whose image is not there" in done.stdout
    assert "1 whose image is not one of" in done.stdout


@pytest.mark.parametrize(
    ("caption", "said"),
    [
        (
            '["a", {"en": "b"}]',
            "row 1: an entry of the list 'caption' is a dict, {'en': 'b'}; expected a string: --keep-columns",
        ),
        ('{"en": "a"}', "is a dict"),
        ("true", "is a bool"),
        ('"\\ud800"', "half of a surrogate pair"),
        ("null", "1 without a caption"),
        ("NaN", "1 without a caption"),
        ("1e999", "1 without a caption"),
        ('" "', "1 without a caption"),
    ],
)
def test_pack_writes_no_caption_that_is_not_text(streamload, folder, tmp_path, caption, said):
    (folder / "t.jsonl").write_text(f'{{"image": "a.jpg", "caption": {caption}}}\n')
    assert re.search(said, one_line(streamload("pack", folder / "t.jsonl", tmp_path / "out")))


def test_pack_writes_numbers_in_decimal_and_keeps_values_of_any_type(streamload, folder, tmp_path):
    rows = [
        {"image": "a.jpg", "caption": 2001, "x": ["a"]},
        {"image": "b.JPG", "caption": 0.5, "x": math.nan},
    ]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = streamload("pack", folder / "t.jsonl", tmp_path / "out", "--keep-columns", "x", "--no-shuffle")
    assert done.returncode == 0, done.stderr
    found = members(tmp_path / "out" / "00000.tar")
    assert (found["a.txt"], found["b.txt"]) == (b"2001", b"0.5")
    assert (found["a.json"], found["b.json"]) == (b'{"x": ["a"]}', b'{"x": null}')


def test_pack_shuffles_samples_over_all_shards_and_always_alike(streamload, tmp_path):
    table = tmp_path / "table.csv"
    (tmp_path / "a.jpg").write_bytes(a_jpeg())
    table.write_text("image,caption\n" + "".join(f"a.jpg,{number}\n" for number in range(100)))
    packed = []
    for target in (tmp_path / "one", tmp_path / "two"):
        done = streamload("pack", table, target, "--samples-per-shard", 50)
        assert done.returncode == 0, done.stderr
        texts = [members(target / name) for name in ("00000.tar", "00001.tar")]
        packed.append([int(text) for own in texts for name, text in own.items() if name.endswith(".txt")])
    assert packed[0] == packed[1] != sorted(packed[0]) == list(range(100))
    assert 10 < sum(number < 50 for number in packed[0][:50]) < 40


def test_what_pack_makes_webdataset_reads(streamload, folder, tmp_path):
    done = streamload("pack", folder, tmp_path / "shards", "--no-shuffle")
    assert done.returncode == 0, done.stderr
    from webdataset.tariterators import group_by_keys, tar_file_expander

    with open(tmp_path / "shards" / "00000.tar", "rb") as shard:
        samples = list(group_by_keys(tar_file_expander([{"url": shard.name, "stream": shard}])))
    assert [(sample["__key__"], sample["txt"].decode()) for sample in samples] == [
        ("a", "an a"),
        ("b", "a b"),
        ("deep/c_d", "a ç"),
    ]


def test_pack_fails_with_one_line_and_leaves_nothing(streamload, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    target = tmp_path / "target"
    assert "there is no image" in one_line(streamload("pack", tmp_path / "empty", target))
    assert list(target.iterdir()) == []
    (tmp_path / "t.zip").write_bytes(b"PK")
    assert "neither a folder" in one_line(streamload("pack", tmp_path / "t.zip", target))
    assert "No such file" in one_line(streamload("pack", tmp_path / "no.parquet", target))
    assert "No such file" in one_line(streamload("pack", tmp_path / "no.csv", target))
    (tmp_path / "t.csv").write_text("image,title\na.jpg,x\n")
    assert "row 1 has no 'caption', only 'image', 'title'" in one_line(
        streamload("pack", tmp_path / "t.csv", target)
    )
    (tmp_path / "t.jsonl").write_text("{image: 1}\n")
    assert "not JSON" in one_line(streamload("pack", tmp_path / "t.jsonl", target))
    assert list(target.iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ('a.jpg\tan a\nb.JPG\t"so\na.jpg\tx\n', "row at line 3: unexpected end of data; if quotes are"),
        ('a.jpg\tan a\nb.JPG\t"so" it is\n', r"row at line 3: .* give --no-quotes"),
        ("a.jpg\tan a\nb.JPG\tsaid\tmore\n", "row at line 3: more fields than columns"),
        ("a.jpg\tan a\nb.JPG\t\udcff\n", r"line 3: not UTF-8 text \(invalid start byte\)"),
    ],
)
def test_a_row_that_pack_cannot_read_is_named_and_none_is_swallowed(streamload, folder, rows, said):
    table, target = folder / "t.tsv", folder / "shards"
    table.write_text(f"image\tcaption\n{rows}", errors="surrogateescape")
    assert re.search(said, one_line(streamload("pack", table, target)))
    assert not target.exists()


def test_pack_takes_quotes_for_characters_where_that_is_asked(streamload, folder):
    (folder / "t.tsv").write_text('image\tcaption\na.jpg\t"so\nb.JPG\t"so" it is\n')
    done = streamload("pack", folder / "t.tsv", folder / "shards", "--no-quotes")
    assert done.returncode == 0, done.stderr
    found = members(folder / "shards" / "00000.tar")
    assert (found["a.txt"], found["b.txt"]) == (b'"so', b'"so" it is')


@pytest.mark.parametrize("kept", ["width,note", "*"])
def test_pack_keeps_columns_of_a_table_as_json(streamload, folder, tmp_path, kept):
    table = folder / "table.csv"
    table.write_text("image,caption,width,note\na.jpg,an a,8,\nb.JPG,a b,9,odd\n")
    done = streamload(
        "pack", str(table), str(tmp_path / "out"), "--keep-columns", kept, "--no-shuffle", "--json"
    )
    report = json.loads(done.stdout)
    assert report == {"target": str(tmp_path / "out"), "shards": {"00000.tar": 2}, "left_out": {}}
    found = members(tmp_path / "out" / "00000.tar")
    notes = [json.loads(found[f"{key}.json"]) for key in "ab"]
    asked = [{"width": "8", "note": ""}, {"width": "9", "note": "odd"}]
    more = [{"image": "a.jpg", "caption": "an a"}, {"image": "b.JPG", "caption": "a b"}]
    assert notes == ([{**m, **a} for m, a in zip(more, asked, strict=True)] if kept == "*" else asked)


@pytest.mark.parametrize(
    ("target", "options", "says"),
    [
        ("s3://bucket/shards", [], "is not a local folder"),
        ("out", ["--keep-columns", "width"], "for tables"),
    ],
)
def test_pack_refuses_what_it_can_not_do(streamload, folder, tmp_path, target, options, says):
    done = streamload("pack", str(folder), target, *options)
    assert says in one_line(done)
    assert not (tmp_path / "s3:").exists()


def test_pack_does_not_write_over_shards(streamload, folder, tmp_path):
    target = tmp_path / "shards"
    assert streamload("pack", folder, target).returncode == 0
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    assert "has 00000.tar already" in one_line(streamload("pack", folder, target))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_doctor_shows_each_setting_and_where_it_comes_from(streamload, tmp_path):
    done = streamload("doctor", STREAMLOAD_CACHE_DIR=str(tmp_path / "tier"), STREAMLOAD_CACHE_SIZE="500GB")
    assert done.returncode == 0, done.stdout
    text = " ".join(done.stdout.split())
    assert f"cache directory {tmp_path / 'tier'} STREAMLOAD_CACHE_DIR" in text
    assert "cache size 500.0 GB STREAMLOAD_CACHE_SIZE" in text
    assert "ahead 1.1 GB default (STREAMLOAD_AHEAD is not set)" in text
    assert "revalidate never default (STREAMLOAD_REVALIDATE is not set)" in text
    assert "(1 GB or 2% of the disk) default (STREAMLOAD_FREE_DISK is not set)" in text
    reason = why_not()
    path = f"torch's kernel, as {reason}" if reason else f"its own kernel, with {VECTORS}"
    assert f"resizing by {path}" in text
    assert not (tmp_path / "tier").exists()
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_how_many_open_files_processes_and_maps_a_run_may_have(streamload, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(900, limits[0]), limits[1]))
    try:
        done = streamload("doctor", STREAMLOAD_CACHE_DIR=str(tmp_path / "tier"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    text = " ".join(done.stdout.split())
    assert f"open files {min(limits[1], 1 << 20):,} for each process" in text  # the hard limit is used
    assert "processes and threads" in text
    assert "memory maps" in text


def test_doctor_advises_to_allow_more_open_files_where_the_hard_limit_is_low(tmp_path):
    command = f"ulimit -n 900; exec '{sys.executable}' -m streamload doctor"
    environment = {**os.environ, "STREAMLOAD_CACHE_DIR": str(tmp_path / "tier"), "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-c", command], check=False, capture_output=True, text=True, env=environment
    )
    text = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert "open files 900 for each process" in text
    assert "ulimit -Hn 4096" in text


def test_doctor_asks_for_the_first_and_last_shard_of_each_source(streamload, tmp_path):
    write_shards(tmp_path / "data", [3] * 4, seed=1)
    with ShardServer(tmp_path / "data") as server:
        sources = f"{server.url}/{{00000..00003}}.tar?token=secret::{tmp_path}/data/{{00001..00002}}.tar"
        done = streamload("doctor", sources, STREAMLOAD_CACHE_DIR=str(tmp_path / "tier"))
        assert done.returncode == 0, done.stdout
        assert "4 of 4 first and last ones are available" in done.stdout
        assert {request.path for request in server.log} == {"00000.tar", "00003.tar"}
        server.misbehave("00003.tar", Fault(status=404))
        (tmp_path / "data" / "00001.tar").unlink()
        done = streamload("doctor", sources, STREAMLOAD_CACHE_DIR=str(tmp_path / "tier"))
        said = " ".join(done.stdout.split())
        assert done.returncode == 1
        assert "2 of 4 first and last ones are available" in said
        assert f"{server.url}/00003.tar: the server answers 404 Not Found" in said
        assert "00001.tar" in said
        assert "secret" not in said
        server.misbehave("00000.tar", Fault(body=b"<html>Please sign in.</html>" * 40))
        done = streamload("doctor", f"{server.url}/00000.tar", STREAMLOAD_CACHE_DIR=str(tmp_path / "tier"))
        assert done.returncode == 1
        assert "00000.tar" in done.stdout


def test_doctor_says_whether_shards_on_a_mount_would_be_copied(streamload, tmp_path, monkeypatch):
    write_shards(tmp_path / "nas", [3] * 4, seed=1)
    table = f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / {tmp_path}/nas rw - lustre mds:/nas rw\n"
    monkeypatch.setattr(directories, "_own_mounts", lambda: table)
    for cache_dir, expected in (
        (tmp_path / "tier", f"(lustre at {tmp_path}/nas), and copied: the cache at {tmp_path}/tier can keep"),
        (tmp_path / "nas" / "tier", f"as the cache at {tmp_path}/nas/tier is on the same one"),
    ):
        done = streamload(
            "doctor", f"{tmp_path}/nas/{{00000..00003}}.tar", "--json", STREAMLOAD_CACHE_DIR=str(cache_dir)
        )
        findings = {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}
        assert expected in findings["mounts"]["value"] + findings["mounts"]["advice"]


def test_doctor_shows_what_a_web_server_can_do(streamload, tmp_path):
    write_shards(tmp_path / "data", [3], seed=1)
    with ShardServer(tmp_path / "data") as server:
        url = f"{server.url.replace('//', '//user:secret@')}/00000.tar"
        said = streamload("doctor", url, STREAMLOAD_CACHE_DIR=str(tmp_path / "tier")).stdout
        assert "byte ranges, sizes, versions by ETag" in " ".join(said.split())
        assert "gives all of a shard" not in " ".join(said.split())
        server.misbehave("*", Fault(ignore_range=True, headers={"ETag": ""}))
        done = streamload("doctor", url, STREAMLOAD_CACHE_DIR=str(tmp_path / "tier"))
        assert done.returncode == 0, done.stdout
        said = " ".join(done.stdout.split())
        assert "no byte ranges, sizes, versions by date" in said
        assert "It gives all of a shard for each request" in said
        assert "secret" not in said


def test_doctor_takes_options_of_the_object_store_and_refuses_urls_that_are_none(streamload, tmp_path):
    done = streamload("doctor", "{00..", STREAMLOAD_CACHE_DIR=str(tmp_path / "tier"))
    assert done.returncode == 1
    assert "can't be listed" in done.stdout
    write_shards(tmp_path / "root" / "bucket", [3], seed=1)
    with ShardServer(tmp_path / "root") as server:
        options = json.dumps({"anon": True, "endpoint_url": server.url})
        where = {"STREAMLOAD_CACHE_DIR": str(tmp_path / "tier")}
        done = streamload("doctor", "s3://bucket/00000.tar", "--storage-options", options, **where)
    assert done.returncode == 0, done.stdout
    assert "1 of 1 first and last ones are available" in done.stdout


@pytest.mark.parametrize("variable", ["STREAMLOAD_CACHE_SIZE", "STREAMLOAD_AHEAD"])
def test_doctor_fails_naming_a_variable_that_can_not_be_read(streamload, variable):
    done = streamload("doctor", **{variable: "lots"})
    assert done.returncode == 1
    assert f"{variable}='lots' is not a size" in " ".join(done.stdout.split())


def test_doctor_names_a_home_that_does_not_exist(streamload):
    done = streamload("doctor", STREAMLOAD_CACHE_DIR="~no-such-user/cache")
    assert done.returncode == 1
    assert "there is no such home directory; give an absolute path" in " ".join(done.stdout.split())


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_doctor_names_a_cache_dir_that_this_user_may_not_even_look_into(streamload):
    os.seteuid(54321)
    try:
        done = streamload("doctor", STREAMLOAD_CACHE_DIR="/root/cache")
    finally:
        os.seteuid(0)
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "the cache directory /root/cache can't be reached by uid 54321: Permission denied" in said


def test_doctor_fails_with_the_next_step_when_the_cache_dir_is_a_file(streamload, tmp_path):
    (tmp_path / "file").touch()
    done = streamload("doctor", STREAMLOAD_CACHE_DIR=str(tmp_path / "file"))
    assert done.returncode == 1
    assert "Set STREAMLOAD_CACHE_DIR to a directory" in " ".join(done.stdout.split())


def test_doctor_fails_when_the_cache_dir_can_not_be_written(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    if os.getuid() == 0:
        closed = "/proc/streamload"  # nobody can make a directory there, not even root
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(closed))
    refused = [finding for finding in examine() if finding.unusable]
    assert [finding.subject for finding in refused] == ["writable"]
    assert "can't be written" in refused[0].advice


def test_doctor_fails_where_a_run_would_and_with_its_words(streamload, tmp_path):
    Tier(tmp_path / "open", 1 << 20)
    (tmp_path / "open").chmod(0o770)
    Tier(tmp_path / "other", 1 << 20)
    (tmp_path / "other" / "tier.json").write_text('{"format": 99, "limit_bytes": 1}')
    for place in (tmp_path / "open", tmp_path / "other"):
        with pytest.raises(CacheError) as refused:
            Tier(place, 1 << 20)
        done = streamload("doctor", STREAMLOAD_CACHE_DIR=str(place))
        assert done.returncode == 1
        assert str(refused.value) in " ".join(done.stdout.split())


@pytest.mark.skipif(os.geteuid() != 0, reason="to make a directory of root's needs root")
def test_doctor_names_the_directory_that_is_made_in_a_volume_of_all(streamload, tmp_path):
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o777)
    done = streamload("doctor", STREAMLOAD_CACHE_DIR=str(tmp_path / "volume"))
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert f"cache directory {tmp_path / 'volume' / 'streamload-0'} STREAMLOAD_CACHE_DIR" in text
    assert list((tmp_path / "volume").iterdir()) == []


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        ("disk", "cache on disk at {disk} STREAMLOAD_CACHE"),
        ("memory", "cache in memory at {memory} STREAMLOAD_CACHE"),
        ("auto", "cache auto: in memory if the data is known to take at most 70.0 MB, else on disk"),
    ],
)
def test_doctor_says_which_cache_a_run_would_take_and_why(streamload, cache, says, tmp_path, shm):
    variables = {"STREAMLOAD_CACHE_DIR": str(tmp_path / "disk"), "STREAMLOAD_MEMORY_SIZE": "70MB"}
    done = streamload("doctor", STREAMLOAD_CACHE=cache, **variables)
    assert list(shm.iterdir()) == []
    root = f"{shm}/streamload-{os.geteuid()}"
    text = " ".join(done.stdout.split())
    assert says.format(disk=tmp_path / "disk", memory=root) in text
    assert "memory size 70.0 MB STREAMLOAD_MEMORY_SIZE" in text
    assert (f"room in memory 70.0 MB at {root}" in text) is (cache != "disk")
    assert ("writable yes" in text) is (cache != "memory")


def test_doctor_with_no_disk_fails_unless_memory_will_do(streamload, tmp_path, monkeypatch, shm):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "file"))
    assert streamload("doctor", STREAMLOAD_CACHE="memory").returncode == 0
    done = streamload("doctor", STREAMLOAD_CACHE="auto")
    assert done.returncode == 0
    assert f"auto: in memory at {shm}" in " ".join(done.stdout.split())
    monkeypatch.setattr(memory, "PLACE", Path("/proc/streamload"))  # where nothing can be stored
    done = streamload("doctor", STREAMLOAD_CACHE="auto")
    assert done.returncode == 1
    assert "there is too little memory" in " ".join(done.stdout.split())


def test_cache_ls_of_no_cache_fails_with_one_line(streamload, tmp_path):
    assert "there is no streamload cache at" in one_line(
        streamload("cache", "ls", "--cache-dir", tmp_path / "none")
    )


@pytest.mark.parametrize("options", ["{anon: true}", "[1]"])
def test_warm_fails_on_storage_options_that_are_no_json_object(streamload, options, tmp_path):
    done = streamload("warm", "s3://bucket/0.tar", "--cache-dir", tmp_path, "--storage-options", options)
    assert "--storage-options" in one_line(done)


def test_warm_through_a_shared_cache_and_doctor_on_it(streamload, tmp_path):
    write_shards(tmp_path / "data", [9, 8])
    shared, cache = tmp_path / "shared", tmp_path / "cache"
    variables = {"STREAMLOAD_SHARED_CACHE": str(shared), "STREAMLOAD_SHARED_WRITE_BACK": "1"}

    def said_by_doctor():
        return " ".join(streamload("doctor", STREAMLOAD_CACHE_DIR=str(cache), **variables).stdout.split())

    assert f"shared cache {shared} STREAMLOAD_SHARED_CACHE" in said_by_doctor()
    assert "its shards none yet" in said_by_doctor()
    with ShardServer(tmp_path / "data") as server:
        urls = f"{server.url}/{{00000..00001}}.tar"
        options = ("--shared-cache", shared, "--shared-cache-options", "{}")
        done = streamload("warm", urls, "--cache-dir", cache, *options, "--write-back")
        assert "2 were stored in the shared cache" in done.stdout
        done = streamload("warm", urls, "--cache-dir", tmp_path / "second", *options)
    assert done.returncode == 0
    assert " 0 B arrived and " in done.stdout
    assert "from the shared cache" in done.stdout
    assert "its shards can be read" in said_by_doctor()
    assert "write back yes STREAMLOAD_SHARED_WRITE_BACK" in said_by_doctor()
    assert "its storage can be written" in said_by_doctor()


def test_warm_fails_where_the_shared_cache_does_not_take_what_it_is_to_store(streamload, tmp_path):
    write_shards(tmp_path / "data", [3])
    (tmp_path / "file").touch()
    shared = tmp_path / "file" / "tier"
    with ShardServer(tmp_path / "data") as server:
        url = f"{server.url}/00000.tar"
        done = streamload(
            "warm", url, "--cache-dir", tmp_path / "cache", "--shared-cache", shared, "--write-back"
        )
    assert done.returncode == 1
    assert f"{url}: the shared cache {shared} can't write" in done.stdout
    said = streamload("doctor", STREAMLOAD_SHARED_CACHE=str(shared), STREAMLOAD_SHARED_WRITE_BACK="1")
    assert said.returncode == 0
    assert "Trainings go on without it" in said.stdout


def test_doctor_fails_on_a_shared_cache_that_is_no_folder(streamload):
    said = streamload("doctor", STREAMLOAD_SHARED_CACHE="https://host/x?token=swordfish")
    assert said.returncode == 1
    assert "STREAMLOAD_SHARED_CACHE=" in said.stdout
    assert "swordfish" not in said.stdout
    assert "Trainings go on" not in said.stdout


def test_version_prints_the_installed_version(streamload):
    from importlib.metadata import version

    assert streamload("version").stdout.strip() == version("streamload")


def test_doctor_prints_its_findings_as_json(streamload, tmp_path):
    done = streamload("doctor", "--json", STREAMLOAD_CACHE_DIR=str(tmp_path / "cache"))
    report = json.loads(done.stdout)
    assert report["ok"] is (done.returncode == 0) is True
    found = {finding["subject"]: finding for finding in report["findings"]}
    assert found["cache directory"]["value"] == str(tmp_path / "cache")
    assert found["cache directory"]["source"] == "STREAMLOAD_CACHE_DIR"


def test_version_is_an_option_and_a_command(streamload):
    assert streamload("--version").stdout == streamload("version").stdout != ""


def test_warm_of_local_shards_says_that_their_data_stays_and_as_json(streamload, tmp_path):
    paths = [str(path) for path in write_shards(tmp_path / "data", [3, 4])]
    done = streamload("warm", *paths, "--cache-dir", str(tmp_path / "cache"))
    assert "2 of them are local files: only their indexes are in the cache" in done.stdout
    done = streamload("warm", *paths, "--cache-dir", str(tmp_path / "cache"), "--json")
    report = json.loads(done.stdout)
    assert (report["shards_complete"], report["shards_found_complete"], report["shards_local"]) == (2, 2, 2)
    assert report["failures"] == {}


def test_an_unknown_command_fails_with_usage(streamload):
    done = streamload("trian")
    assert done.returncode == 2
    assert "trian" in done.stderr


def test_rows_of_a_table_stay_on_one_line_in_a_pipe(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    url = f"https://host/{'folder/' * 40}00000.tar"
    print_table(("shard", ">size"), [(url, "5 MB")])
    assert capsys.readouterr().out.splitlines()[1].split() == [url, "5", "MB"]
    monkeypatch.setenv("COLUMNS", "80")
    print_table(("shard", ">size"), [(url, "5 MB")])
    assert max(map(len, capsys.readouterr().out.splitlines())) == 80


def test_without_a_name_commands_look_into_the_caches_on_disk_and_in_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "disk"))
    assert roots_of(None) == [tmp_path / "disk", memory_root(read_settings())]
    assert roots_of([str(tmp_path / "other")]) == [tmp_path / "other"]
