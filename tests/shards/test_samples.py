"""Samples from members: the WebDataset convention, whole samples only, takeover at every border."""

import io
import random
import re
import tarfile

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from streamload.errors import ShardCut, ShardFormatError
from streamload.shards.index import IndexReader
from streamload.shards.local import index_local
from streamload.shards.samples import NAME_LIMIT_BYTES, Entry, ShardScanner, split_name
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.support.conversations import FORMATS, sizes_by_pillow, write_conversations
from tests.support.indexes import WrittenIndex


def tar_of(members, tar_format=tarfile.PAX_FORMAT):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format, errors="surrogateescape") as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    return out.getvalue()


def scan(data, chunk_bytes=1 << 20, scanner=None):
    scanner = scanner or ShardScanner()
    entries = []
    for at in range(scanner.position, len(data), chunk_bytes):
        entries += scanner.feed(memoryview(data)[at : at + chunk_bytes])
    last, warnings = scanner.finish()
    return entries + last, warnings


def samples(data, entries):
    return [(e.key, {x: data[at : at + size] for x, at, size in e.members}) for e in entries]


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    options = ShardOptions(without_text_every=5, folder="a.b/", extra={"SEG.png": b"x", "cls": b""})
    (path,) = write_shards(tmp_path_factory.mktemp("shards"), [40], seed=3, options=options)
    return path


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_those_of_the_oracle(tmp_path, tar_format):
    (path,) = write_shards(
        tmp_path, [30], options=ShardOptions(format=tar_format, folder="ü/" * 20, without_text_every=3)
    )
    data = path.read_bytes()
    entries, warnings = scan(data)
    assert samples(data, entries) == read_oracle(path)
    assert [entry.number for entry in entries] == list(range(30))
    assert warnings == []


def test_entries_know_size_caption_and_checksum(shard):
    data = shard.read_bytes()
    for entry, (_, members) in zip(scan(data)[0], read_oracle(shard), strict=True):
        assert (entry.width, entry.height) == Image.open(io.BytesIO(members["jpg"])).size
        assert entry.caption_bytes == len(members.get("txt", b""))
        assert entry.checksum == xxhash.xxh3_64_intdigest(b"".join(members.values()))
        assert entry.sizes == {extension: len(payload) for extension, payload in members.items()}
        assert (entry.start, entry.stop) == (entry.members[0][1], sum(entry.members[-1][1:]))


@settings(max_examples=40)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=200), st.booleans())
def test_any_split_of_the_bytes_gives_the_same_entries(shard, lengths, checksums):
    data = shard.read_bytes()[: 60 * 512]
    whole = ShardScanner(checksums=checksums)
    parts = ShardScanner(checksums=checksums)
    found = []
    while parts.position < len(data):
        for length in lengths:
            found += parts.feed(data[parts.position : parts.position + length])
    assert found == whole.feed(data) != []
    assert (parts.position, parts.whole_stop) == (whole.position, whole.whole_stop)


def test_image_sizes_do_not_depend_on_chunks():
    out = io.BytesIO()
    Image.new("RGB", (50, 60)).save(out, "JPEG", icc_profile=bytes(50_000))
    hidden = io.BytesIO()
    Image.new("RGB", (50, 60)).save(hidden, "JPEG", icc_profile=bytes(150_000))
    data = tar_of([("a.jpg", out.getvalue()), ("b.jpg", hidden.getvalue()), ("c.jpg", b"\xff\xd8")])
    for chunk_bytes in (1 << 20, 4096, 1000, 7):
        sizes = [(entry.width, entry.height) for entry in scan(data, chunk_bytes)[0]]
        assert sizes == [(50, 60), (0, 0), (0, 0)]


def test_the_first_image_gives_the_size():
    first, second = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (5, 6)).save(first, "PNG")
    Image.new("RGB", (7, 8)).save(second, "JPEG")
    members = [("a.txt", b""), ("a.png", first.getvalue()), ("a.jpg", second.getvalue())]
    ((entry,), _) = scan(tar_of(members))
    assert (entry.width, entry.height) == (5, 6)


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 4096, 700, 61])
def test_entries_have_the_size_of_each_image_in_order(tmp_path, chunk_bytes):
    (path,) = write_conversations(tmp_path, [60], seed=chunk_bytes)
    expected = [sizes_by_pillow(members) for _, members in read_oracle(path)]
    assert {len(sizes) for sizes in expected} == set(range(9))
    assert any(size == (0, 0) for sizes in expected for _, size in sizes)
    entries = scan(path.read_bytes(), chunk_bytes)[0]
    assert [list(entry.images.items()) for entry in entries] == expected
    in_place = [entry for part in index_local(path) for entry in part]
    assert [list(entry.images.items()) for entry in in_place] == expected
    with WrittenIndex(tmp_path, {}) as writer:
        writer.append(entries)
    with IndexReader(tmp_path) as reader:
        assert reader.entries(range(60)) == entries


def test_the_size_of_a_sample_is_that_of_its_first_image_without_a_prefix(tmp_path):
    (path,) = write_conversations(tmp_path, [200], seed=3)
    seen = set()
    for entry, (_, members) in zip(scan(path.read_bytes())[0], read_oracle(path), strict=True):
        sizes = dict(sizes_by_pillow(members))
        plain = [size for extension, size in sizes.items() if extension in FORMATS]
        first = [*plain, *sizes.values(), (0, 0)][0]
        assert (entry.width, entry.height) == first
        seen.add((len(plain), min(len(sizes), 3)))
    assert seen == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)}


def test_an_entry_is_given_out_once_the_next_key_was_read():
    data = tar_of([("a.jpg", b"1"), ("a.txt", b"2"), ("b.jpg", b"3"), ("b.jpg", b"4")], tarfile.GNU_FORMAT)
    scanner = ShardScanner()
    given = {at + 1: len(scanner.feed(data[at : at + 1])) for at in range(len(data))}
    borders = [at for at, count in given.items() if count]
    assert borders == [5 * 512, 7 * 512, 9 * 512]  # two headers of other samples, then one zero block


ODD_NAMES = [
    "a", "a.", ".a", "a.B.c", "A.JPG", "x/.jpg", "x.y/.jpg", "x/y.z/.jpg", "//.jpg", "/abs/a.jpg", "../a.jpg",
    "x/../../a.txt", "./a.txt", "./.txt", "a.b/c", "a.b/c.d", "__meta__", "__meta__.json", "__a.b__",
    "____/a.jpg", "__x__/a.jpg", "__x/a.jpg", "x/__y__.txt", "__", "__.__", "a b.jpg", "a\tb.txt", "ä.jpg",
    "\udcff.jpg", "a\nb.jpg", "a\nb/c.jpg", "a.b\nc/d.jpg", "x/a\nb/c.d.e", "z.tar.gz", "k" * 300 + ".jpg",
    "d/" * 150 + "a.jpg", ".", "..", "a..b", "..a", "x/..jpg",
]  # fmt: skip


def webdataset_split(name):
    """The names as webdataset's own functions see them: `tar_file_iterator`, then `group_by_keys`."""
    from webdataset.tariterators import base_plus_ext

    if "/" not in name and name.startswith("__") and name.endswith("__"):
        return None
    if re.match(r"__[^/]*__($|/)", name):
        return None
    key, extension = base_plus_ext(name)
    return None if key is None else (key, extension.lower())


@pytest.mark.parametrize("name", ["._a.jpg", "./._a.jpg", "data/._a.jpg", "data/._", "a.b/._c.d"])
def test_files_of_macos_belong_to_no_sample(name):
    assert split_name(name) is None


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_split_as_webdataset_does(name):
    assert split_name(name) == webdataset_split(name)


@settings(max_examples=500)
@given(st.text(alphabet="aB._/\n", max_size=14).filter(lambda name: not name.endswith("__\n")))
def test_any_name_is_split_as_webdataset_does(name):
    expected = webdataset_split(name)
    if expected is not None and expected[1].startswith("__") and expected[1].endswith("__"):
        expected = None
    if name.rpartition("/")[2].startswith("._"):
        expected = None
    assert split_name(name) == expected


@pytest.mark.filterwarnings("ignore")
def test_archives_with_odd_names_give_the_samples_of_webdatasets_pipeline():
    from webdataset.tariterators import group_by_keys, tar_file_expander

    rng = random.Random(4)
    names = [name for name in ODD_NAMES if "\0" not in name]
    data = tar_of([(name, rng.randbytes(20)) for name in names])
    source = [{"url": "x", "stream": io.BytesIO(data)}]
    theirs = [
        (s.pop("__key__"), {k: v for k, v in s.items() if k != "__url__"})
        for s in group_by_keys(tar_file_expander(source))
    ]
    assert samples(data, scan(data)[0]) == theirs != []


def test_names_of_64_kb_are_split_in_linear_time():
    assert split_name("a/" * (1 << 20)) is None
    assert split_name("a/" * (1 << 20) + ".b") == ("a/" * (1 << 20), "b")
    assert split_name("\n" * (1 << 20) + "a.b") == ("\n" * (1 << 20) + "a", "b")


def test_interleaved_keys_and_repeated_extensions_start_samples():
    names = ["a.jpg", "b.jpg", "a.txt", "a.jpg", "a.JPG", "a.txt", "a.Txt"]
    entries, _ = scan(tar_of([(name, b"x") for name in names]))
    assert [(entry.key, list(entry.sizes)) for entry in entries] == [
        ("a", ["jpg"]),
        ("b", ["jpg"]),
        ("a", ["txt", "jpg"]),
        ("a", ["jpg", "txt"]),
        ("a", ["txt"]),
    ]


def test_members_that_would_replace_a_samples_own_fields_are_passed_over():
    entries, _ = scan(tar_of([("a.jpg", b""), ("a.__url__", b""), ("a.__KEY__", b""), ("a.txt", b"")]))
    assert [list(entry.sizes) for entry in entries] == [["jpg", "txt"]]


def test_a_sample_with_endless_members_fails(monkeypatch):
    monkeypatch.setattr("streamload.shards.samples.NAMES_LIMIT_BYTES", 1 << 18)
    scanner = ShardScanner()
    given = 0
    with pytest.raises(ShardFormatError, match=r"'a' has \d+ members"):  # noqa: PT012
        for number in range(1 << 18):
            given += len(scanner.feed(tarfile.TarInfo(f"a.{number}").tobuf(tarfile.GNU_FORMAT)))
    assert given == 0
    assert scanner.position < 512 * 2048


def test_a_tar_without_end_marker_gives_all_samples_and_a_warning(shard):
    data = shard.read_bytes()
    whole, _ = scan(data)
    border = whole[-1].stop + -whole[-1].stop % 512
    entries, warnings = scan(data[:border])
    assert entries == whole
    assert ["no end marker" in warning for warning in warnings] == [True]


def test_a_tar_that_is_cut_within_a_sample_fails_and_gives_no_part_of_it(shard):
    data = shard.read_bytes()
    whole, _ = scan(data)
    for cut in (whole[7].start + 10, whole[7].stop + 1, whole[7].members[1][1] - 100):
        scanner = ShardScanner()
        assert scanner.feed(data[:cut]) == whole[:7]
        with pytest.raises(ShardCut, match=f"byte {cut}"):
            scanner.finish()


def test_a_tar_behind_another_is_left_out_with_a_warning(shard):
    data = shard.read_bytes()
    entries, warnings = scan(data + data)
    assert entries == scan(data)[0]
    assert ["after the end marker" in warning for warning in warnings] == [True]


def test_a_tar_without_samples_is_empty():
    assert scan(tar_of([])) == ([], [])
    assert scan(tar_of([("README", b"text")])) == ([], [])


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_scanner_can_take_up_at_every_border(tar_format):
    names = ["a.jpg", "a.txt", "README", "b" * 200 + ".jpg", "c.jpg", "c.jpg", "__m__/x.jpg"]
    names += ["ü.jpg", "ü.txt"]
    data = tar_of([(name, name.encode() * 40) for name in names], tar_format)
    entries, _ = scan(data)
    assert len(entries) == 5
    for known in range(len(entries) + 1):
        scanner = ShardScanner.after(entries[known - 1] if known else None)
        assert (scan(data, 700, scanner)[0]) == entries[known:]
    scanner = ShardScanner()
    for at in range(0, len(data), 512):
        for entry in scanner.feed(data[at : at + 512]):
            assert scanner.whole_stop == ShardScanner.after(entry).position


def test_skipped_payloads_leave_entries_without_checksum(shard):
    data = shard.read_bytes()
    scanner = ShardScanner()
    entries = []
    while scanner.position < len(data):
        scanner.skip(scanner.skippable())
        entries += scanner.feed(data[scanner.position : scanner.position + 512])
    whole, _ = scan(data)
    assert [(e.key, e.members, e.width, e.height) for e in entries] == [
        (e.key, e.members, e.width, e.height) for e in whole
    ]
    assert {entry.checksum for entry in entries} == {None}


def test_entries_are_values():
    entry = Entry(0, "k", (("jpg", 512, 3),), 1, 2, 0, None)
    with pytest.raises(AttributeError):
        entry.key = "other"


@pytest.mark.parametrize("character", ["a", "é", "\udcff"])
def test_members_with_names_that_are_too_long_are_left_out_and_told(character):
    start = 20_000 * character
    rest = NAME_LIMIT_BYTES - len(start.encode("utf-8", "surrogateescape")) - len(".txt")
    longest, longer = (start + "b" * (rest + added) + ".txt" for added in (0, 1))
    members = [
        ("a.txt", b"1"),
        (longer, b"2"),
        ("a.cls", b"3"),
        (longest, b"4"),
        (longer, b"5"),
        ("c.txt", b"6"),
    ]
    entries, warnings = scan(tar_of(members, tarfile.GNU_FORMAT))
    assert [entry.key for entry in entries] == ["a", longest[:-4], "c"]
    assert [extension for extension, _, _ in entries[0].members] == ["txt", "cls"]
    assert warnings == ["2 members are left out: their names have more than 65,536 bytes"]
