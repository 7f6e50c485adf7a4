"""Tars of all kinds with links and other odd members: the samples are the files that GNU tar extracts."""

import os
import socket
import subprocess
from pathlib import Path

import pytest
import xxhash

from streamload.errors import CacheCorrupt
from streamload.shards.index import IndexReader, IndexWriter
from streamload.shards.samples import ShardScanner
from streamload.shards.tar import normal_path
from tests.fuzzing.blocks import END, base_256, header, long_name, member, octal, padded, pax, seal
from tests.fuzzing.tars import payloads, read_back, scan

OUTSIDE, LATER, SPARSE = "outside the tar", "a later member", "a sparse file"
LEFT_OUT = "a link to a member that is left out"


def link(name, target, kind=b"1", size=0):
    """A hard link, or another kind of member that names a target."""
    block = header(name.encode(), octal(size), kind)
    return seal(block[:157] + target.encode()[:100].ljust(100, b"\0") + block[257:])


def symlink(name, target):
    return link(name, target, b"2")


FIRST = member("0.jpg", b"image 0") + member("0.txt", b"caption 0")
ONE = member("1.jpg", b"image 1")
LONG = "f/" * 60 + "0.txt"

# The bytes before the end marker, and the causes for which members are left out.
BY_HAND = {
    "a hard link backwards": (FIRST + ONE + link("1.txt", "0.txt"), []),
    "a sample of links alone": (FIRST + link("1.jpg", "0.jpg") + link("1.txt", "0.txt"), []),
    "a link between own members": (FIRST + ONE + link("1.cls", "0.txt") + member("1.txt", b"own"), []),
    "a link before own members": (FIRST + link("1.txt", "0.txt") + ONE, []),
    "a link to a member of the same sample": (FIRST + link("0.caption", "0.txt"), []),
    "a hard link to a hard link": (FIRST + link("1.txt", "0.txt") + ONE + link("1.cls", "1.txt"), []),
    "a symbolic link to a hard link": (FIRST + link("1.txt", "0.txt") + symlink("2.txt", "1.txt"), []),
    "a hard link to a symbolic link": (FIRST + symlink("1.txt", "0.txt") + link("2.txt", "1.txt"), []),
    "a symbolic link in a folder": (
        member("a/0.txt", b"t") + symlink("b/0.txt", "../a/0.txt") + symlink("a/1.txt", "0.txt"),
        [],
    ),
    "a symbolic link to a later member": (symlink("0.txt", "1.txt") + member("1.txt", b"later"), [LATER]),
    "a symbolic link out of the tar": (FIRST + ONE + symlink("1.txt", "../0.txt"), [OUTSIDE]),
    "an absolute symbolic link": (FIRST + ONE + symlink("1.txt", "/0.txt"), [OUTSIDE]),
    "symbolic links in a circle": (
        symlink("0.txt", "1.txt") + symlink("1.txt", "0.txt") + ONE,
        [OUTSIDE, LEFT_OUT],
    ),
    "a symbolic link to itself": (symlink("0.txt", "0.txt") + ONE, [OUTSIDE]),
    "a link to a folder": (header(b"d/", kind=b"5") + ONE + symlink("1.txt", "d"), [OUTSIDE]),
    "a link through a linked folder": (
        member("d/0.txt", b"t") + symlink("e", "d") + symlink("1.txt", "e/0.txt") + ONE,
        [OUTSIDE],
    ),
    "a link to a link that is left out": (
        symlink("0.txt", "/x") + symlink("1.txt", "0.txt") + ONE,
        [OUTSIDE, LEFT_OUT],
    ),
    "a link to a duplicated name": (
        FIRST + member("x/0.txt", b"before") + member("x/0.txt", b"after") + link("1.txt", "x/0.txt"),
        [],
    ),
    "a link to a member of no sample": (member("caption", b"shared") + ONE + link("1.txt", "caption"), []),
    "a link to an empty file": (member("0.txt", b"") + ONE + link("1.txt", "0.txt"), []),
    "a hard link with a size": (FIRST + ONE + link("1.txt", "0.txt", size=9), []),
    "a long GNU link name": (
        member(LONG, b"long") + ONE + header(b"k", octal(len(LONG) + 1), b"K")
        + padded(LONG.encode() + b"\0") + link("1.txt", LONG[:100]),
        [],
    ),
    "long GNU names of link and target": (
        member(LONG, b"long") + header(b"k", octal(len(LONG) + 1), b"K") + padded(LONG.encode() + b"\0")
        + long_name(b"g/" * 60 + b"0.txt") + link("cut", "cut"),
        [],
    ),
    "a pax linkpath": (FIRST + ONE + pax((b"linkpath", b"0.txt")) + link("1.txt", "other"), []),
    "./ before names": (
        member("./0.jpg", b"i") + member("./0.txt", b"t") + link("./1.txt", "./0.txt")
        + link("./1.jpg", "0.jpg"),
        [],
    ),
    "absolute names": (member("/a/0.txt", b"t") + link("/a/1.txt", "/a/0.txt"), []),
    "devices, fifos and folders between": (
        FIRST + header(b"1.null", kind=b"6") + header(b"d/", kind=b"5") + ONE + header(b"f", kind=b"6")
        + link("1.txt", "0.txt"),
        [],
    ),
    "a volume header": (header(b"label", kind=b"V") + FIRST + ONE + link("1.txt", "0.txt"), []),
    "an incremental dump's folder": (
        header(b"d/", octal(7), b"D") + padded(b"Y0.txt\0") + FIRST + link("1.txt", "0.txt"),
        [],
    ),
    "times of an incremental dump": (
        seal(header(b"0.txt", octal(3))[:257] + b"ustar  \0" + bytes(80) + b"14740563726\0" + bytes(155))
        + padded(b"abc") + link("1.txt", "0.txt"),
        [],
    ),
    "V7 headers": (
        seal(header(b"0.txt", octal(3), b"\0")[:257] + bytes(255)) + padded(b"abc")
        + seal(link("1.txt", "0.txt")[:257] + bytes(255)),
        [],
    ),
    "a base-256 size": (header(b"0.txt", base_256(3)) + padded(b"abc") + link("1.txt", "0.txt"), []),
    "odd pax values": (
        pax((b"mtime", b"1e400"), (b"uid", b"-1"), (b"comment", b"\xff=\0"), (b"size", b"3"))
        + header(b"0.txt") + padded(b"abc") + link("1.txt", "0.txt"),
        [],
    ),
    "names that aren't UTF-8": (
        member("\udcff.txt", b"t") + ONE
        + seal(header(b"1.txt", kind=b"1")[:157] + b"\xff.txt".ljust(100, b"\0") + header()[257:]),
        [],
    ),
    "an old GNU sparse file with a long map": (
        FIRST + seal(header(b"1.jpg", octal(3), b"S")[:482] + b"\1" + octal(2048) + bytes(17))
        + bytes(504) + b"\1" + bytes(7) + bytes(512) + padded(b"abc") + member("1.txt", b"t"),
        [SPARSE],
    ),
    "a link to a sparse file": (
        pax((b"GNU.sparse.map", b"0,3"), (b"GNU.sparse.size", b"900"), (b"GNU.sparse.name", b"0.jpg"))
        + header(b"x", octal(3)) + padded(b"abc") + ONE + link("1.png", "0.jpg"),
        [SPARSE, LEFT_OUT],
    ),
}  # fmt: skip
UNLIKE_GNU = ("odd pax values", "an old GNU sparse file with a long map", "a link to a sparse file",
              "a hard link with a size")  # fmt: skip
"""GNU tar refuses these, or fills in what was left out."""


def extracted(data: bytes, folder: Path) -> dict[str, bytes]:
    """What GNU tar extracts, by path; links followed within the folder alone."""
    folder.mkdir()
    done = subprocess.run(
        ["tar", "-x", "-f", "-", "-C", folder, "--no-same-owner"], input=data, capture_output=True
    )
    assert done.returncode in (0, 2), done.stderr
    files = {}
    for path in folder.rglob("*"):
        real = Path(os.path.realpath(path))
        if real.is_file() and real.is_relative_to(folder):
            files[os.fsdecode(os.path.relpath(path, folder))] = real.read_bytes()
    return files


def scanned(data: bytes, chunk_bytes: int = 700):
    scanner = ShardScanner(read_back=read_back(data))
    entries = [
        entry
        for at in range(0, len(data), chunk_bytes)
        for entry in scanner.feed(data[at : at + chunk_bytes])
    ]
    last, warnings = scanner.finish()
    return entries + last, " ".join(warnings)


@pytest.mark.parametrize("kind", BY_HAND)
def test_samples_have_the_files_that_tar_extracts_or_a_cause(kind, tmp_path):
    between, causes = BY_HAND[kind]
    data = between + END
    entries, warnings = scanned(data)
    ours = {
        f"{normal_path(entry.key)}.{extension}": payload
        for entry in entries
        for extension, payload in payloads(data, entry).items()
    }
    for cause in (OUTSIDE, LATER, SPARSE, LEFT_OUT):
        assert (cause in warnings) == (cause in causes), warnings
    if kind not in UNLIKE_GNU:
        theirs = extracted(data, tmp_path / "x")
        assert ours.items() <= theirs.items()
        samples = {name for name in theirs if "." in os.path.basename(name)}
        assert causes or samples == ours.keys()
    for entry in entries:
        content = payloads(data, entry)
        assert entry.checksum == xxhash.xxh3_64_intdigest(b"".join(content.values()))
        assert entry.sizes == {extension: len(payload) for extension, payload in content.items()}
        resumed = ShardScanner.after(entry, read_back=read_back(data))
        assert scan(data, resumed, 512).entries == entries[entry.number + 1 :]


FLAGS = ["", "--format=v7", "--format=ustar", "--format=oldgnu", "--format=gnu", "--format=posix", "-b 1",
         "-V label", "-S --format=posix", "-S --sparse-version=0.0 --format=posix",
         "-S --sparse-version=0.1 --format=posix",
         "-S --format=gnu", "--listed-incremental=/dev/null --format=gnu", "--owner=:4000000000"]  # fmt: skip


@pytest.mark.parametrize("flags", FLAGS)
def test_a_folder_packed_by_tar_has_the_samples_that_it_extracts(flags, tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.jpg").write_bytes(b"image" * 200 * number)
        text = folder / f"{number:02}.txt"
        if number % 2:
            text.hardlink_to(folder / "00.txt")
        elif number == 4:
            text.symlink_to("02.txt")
        else:
            text.write_bytes(b"a caption %d" % number)
    with (folder / "10.jpg").open("r+b") as file:
        file.truncate(1 << 20)
    os.mkfifo(folder / "05.fifo")
    with socket.socket(socket.AF_UNIX) as unused:
        unused.bind(str(folder / "06.socket"))
    packed = tmp_path / "packed.tar"
    subprocess.run(
        ["tar", *flags.split(), "--sort=name", "-cf", packed, "-C", folder, "."],
        check=False,
        capture_output=True,
    )
    data = packed.read_bytes()
    entries, warnings = scanned(data, 1 << 16)
    theirs = extracted(data, tmp_path / "x")
    ours = {
        f"{normal_path(entry.key)}.{extension}": payload
        for entry in entries
        for extension, payload in payloads(data, entry).items()
    }
    is_sparse = "-S" in flags
    assert {name for name in theirs if name not in ours} == ({"10.jpg"} if is_sparse else set())
    assert ours == {name: theirs[name] for name in ours}
    assert ("1 × a sparse file" in warnings) == is_sparse
    assert [entry.has_unsupported for entry in entries] == [
        is_sparse and entry.key == "./10" for entry in entries
    ]


def test_links_of_concatenated_tars_end_with_the_first_tar():
    entries, warnings = scanned(FIRST + END + ONE + link("1.txt", "0.txt") + END)
    assert [entry.key for entry in entries] == ["0"]
    assert "after the end marker" in warnings


def test_a_scanner_without_earlier_bytes_gives_links_no_checksum():
    data = FIRST + ONE + link("1.txt", "0.txt") + END
    first, second = scan(data, ShardScanner(), 512).entries
    assert (first.checksum is None, second.checksum is None) == (False, True)
    assert payloads(data, second)["txt"] == b"caption 0"


def test_an_index_keeps_links_and_a_record_without_their_flag_is_refused(tmp_path):
    data = b"".join(between for between, _ in BY_HAND.values()) + END
    entries, _ = scanned(data)
    writer = IndexWriter(tmp_path, {})
    writer.write(writer.pack(entries))
    writer.write(writer.pack_end("complete", len(data), "", ()))
    writer.close()
    with IndexReader(tmp_path) as reader:
        assert reader.entries(range(reader.count)) == entries
        linked = next(entry for entry in entries if entry.span is not None)
        reader._buffer.flags.writeable = True
        reader._buffer["flags"][linked.number] -= 4
        with pytest.raises(CacheCorrupt, match="names"):
            reader.entry(linked.number)


@pytest.mark.parametrize("kind", [b"1", b"2"])
def test_many_links_cost_little_and_are_counted(kind):
    data = b"".join(link(f"{number}.txt", f"{number + 1}.txt", kind) for number in range(20_000)) + END
    entries, warnings = scanned(data, 1 << 20)
    assert (entries, "20,000 × a link to something outside" in warnings) == ([], True)


def test_links_of_a_tar_with_too_many_members_are_left_out(monkeypatch):
    monkeypatch.setattr("streamload.shards.links.MEMBERS_LIMIT", 3)
    entries, warnings = scanned(FIRST + link("1.txt", "0.txt") + link("2.txt", "0.txt") + ONE + END)
    assert [entry.key for entry in entries] == ["0", "1"]
    assert "1 × a link after" in warnings
    monkeypatch.undo()
    monkeypatch.setattr("streamload.shards.links.LINKED_LIMIT_BYTES", 10)
    assert (
        "1 × a link after links to"
        in scanned(FIRST + link("1.txt", "0.txt") + link("2.txt", "0.txt") + END)[1]
    )
