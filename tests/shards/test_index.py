"""The index: what was appended is read back; what is torn, flipped or foreign is never taken for an entry."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from streamload.errors import CacheCorrupt
from streamload.shards import index
from streamload.shards.index import IndexReader
from streamload.shards.record import COMPLETE, OWN_LAYOUT, RECORD
from streamload.shards.samples import Entry
from tests.support.indexes import WrittenIndex

META = {"url": "https://host/a.tar", "size": 12345, "etag": '"x"', "last_modified": None}


def entries_of(count, **changes):
    return [
        Entry(
            n,
            f"k{n}",
            (("jpg", n * 4096 + 512, 700), ("txt", n * 4096 + 2048, n % 7)),
            width=10 + n,
            height=20,
            caption_bytes=n % 7,
            checksum=n * 0x9E3779B97F4A7C15 % (1 << 64),
        )._replace(**changes)
        for n in range(count)
    ]


def write(directory, entries, finish=True):
    directory.mkdir(exist_ok=True)
    with WrittenIndex(directory, META) as writer:
        writer.append(entries)
        if finish:
            writer.finish(COMPLETE, 99_000, warnings=["w"])
    return directory


def read(directory):
    with IndexReader(directory) as reader:
        return [reader.entry(n) for n in range(reader.count)]


def header_bytes(directory):
    return int.from_bytes((directory / "index").read_bytes()[8:12], "little")


def test_an_index_with_a_sound_record_of_another_of_its_shard_is_not_complete(tmp_path):
    one, other = write(tmp_path / "a", entries_of(5)), write(tmp_path / "b", entries_of(5, width=99))
    place = header_bytes(one) + 2 * RECORD.itemsize
    record = (other / "index").read_bytes()[place : place + RECORD.itemsize]
    with (one / "index").open("r+b") as file:
        file.seek(place)
        file.write(record)
    for directory in (one, other):
        with IndexReader(directory) as reader:
            assert reader.is_complete == (directory == other)


def test_a_reader_that_looks_between_two_writes_finds_whole_entries(tmp_path, monkeypatch):
    expected, looks, write_at = entries_of(3), [], index.write_at

    def write_then_look(*given):
        write_at(*given)
        looks.append(read(tmp_path))

    with WrittenIndex(tmp_path, META) as writer:
        monkeypatch.setattr(index, "write_at", write_then_look)
        for entry in expected:
            writer.append([entry])
    assert all(found == expected[: len(found)] for found in looks)
    assert looks[-1] == expected


ODD = [
    Entry(0, "näme/\udcff\n\0", (("jpg", 512, 0),), 0, 0, 0, None),
    Entry(1, "k" * 65_000, (("", 1 << 40, 1 << 39), ("seg.png", (1 << 40) + (1 << 39), 1)), 9, 9, 0, 0),
    Entry(2, "", (("txt", 5120, 1 << 33),), 1 << 40, 1, 1 << 33, (1 << 64) - 1),
]


def test_entries_come_back_as_they_were_appended(tmp_path):
    written = entries_of(100)
    with IndexReader(write(tmp_path, written)) as reader:
        assert [reader.entry(n) for n in range(100)] == written
        assert (reader.ended, reader.is_complete, reader.status, reader.size) == (
            True,
            True,
            COMPLETE,
            99_000,
        )
        assert reader.warnings == ["w"]
        assert reader.meta == {**META, "format": 1}


def test_odd_keys_and_sizes_come_back(tmp_path):
    most = (1 << 32) - 1
    assert read(write(tmp_path, ODD)) == [*ODD[:2], ODD[2]._replace(width=most, caption_bytes=most)]


@pytest.mark.parametrize("prepared", [None, ("1.jpg", 99)])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_only_several_images_add_their_sizes_to_the_names(tmp_path, count, prepared):
    members = tuple((f"{number}.jpg", 512 + 1024 * number, 512) for number in range(count))
    sizes = tuple((1000 + number, 7) for number in range(count))
    entry = Entry(0, "k", members, 1000, 7, 0, 1, prepared, image_sizes=sizes if count > 1 else ())
    (found,) = read(write(tmp_path, [entry], finish=False))
    assert found == entry
    assert [*found.images.items()] == [(f"{number}.jpg", size) for number, size in enumerate(sizes)]
    frame = ["k", [list(member) for member in members], *([list(prepared)] if prepared else [])]
    if count > 1:
        frame = [*frame[:2], list(prepared) if prepared else None, [list(size) for size in sizes]]
    assert (tmp_path / "names").read_bytes()[8:] == json.dumps(frame, separators=(",", ":")).encode()


def test_an_index_without_entries_is_complete(tmp_path):
    with IndexReader(write(tmp_path, [])) as reader:
        assert (reader.count, reader.is_complete, reader.layouts()) == (0, True, {})
        assert not reader.refresh()


def test_asking_for_an_entry_that_is_not_there_fails(tmp_path):
    with IndexReader(write(tmp_path, entries_of(3))) as reader:
        for number in (-1, 3):
            with pytest.raises(IndexError):
                reader.entry(number)


def test_records_are_one_read_only_array(tmp_path):
    with IndexReader(write(tmp_path, entries_of(50))) as reader:
        records = reader.records
        assert records.dtype == RECORD
        assert records["width"].tolist() == list(range(10, 60))
        assert not records.flags.writeable


def test_a_reader_follows_while_a_shard_arrives(tmp_path):
    written = entries_of(300)
    with WrittenIndex(tmp_path, META) as writer, IndexReader(tmp_path) as reader:
        assert (reader.count, reader.ended, reader.refresh()) == (0, False, False)
        early = None
        for stop in (1, 2, 66, 300):
            writer.append(written[reader.count : stop])
            assert (reader.refresh(), reader.refresh(), reader.count) == (True, False, stop)
            early = reader.records if early is None else early
        assert [reader.entry(n) for n in range(300)] == written
        assert early.shape == (1,)
        writer.finish("complete", 7)
        assert (reader.refresh(), reader.refresh(), reader.is_complete) == (True, False, True)


def test_a_reader_follows_a_writer_in_another_process(tmp_path):
    script = f"""
from pathlib import Path
from tests.shards.test_index import META, entries_of
from tests.support.indexes import WrittenIndex
entries = entries_of(4000)
with WrittenIndex(Path({str(tmp_path)!r}), META) as writer:
    print("ready", flush=True)
    for at in range(0, 4000, 3):
        writer.append(entries[at : at + 3])
    writer.finish("complete", 1)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"ready\n"
        written, seen = entries_of(4000), 0
        with IndexReader(tmp_path) as reader:
            while not reader.ended:
                assert process.poll() in (None, 0)
                if reader.refresh() and reader.count > seen:
                    assert reader.entry(reader.count - 1) == written[reader.count - 1]
                    seen = reader.count
            assert [reader.entry(n) for n in range(reader.count)] == written
    assert process.returncode == 0


def test_a_large_index_is_read_at_once_and_piece_by_piece(tmp_path):
    written = entries_of(40_000)
    with WrittenIndex(tmp_path, META) as writer:
        writer.append(written)
        with IndexReader(tmp_path) as reader:
            assert (reader.count, reader.ended) == (40_000, False)
            writer.finish("complete", 1)
            assert reader.refresh()
            assert reader.is_complete
    with IndexReader(tmp_path) as reader:
        assert reader.is_complete
        assert reader.entry(39_999) == written[39_999]


def test_a_reader_keeps_reading_when_its_directory_is_renamed_or_removed(tmp_path):
    written = entries_of(10)
    part = tmp_path / "part"
    part.mkdir()
    with WrittenIndex(part, META) as writer, IndexReader(part) as reader:
        writer.append(written[:4])
        part.rename(tmp_path / "published")
        assert reader.refresh()
        shutil.rmtree(tmp_path / "published")
        writer.append(written[4:])
        assert reader.refresh()
        assert [reader.entry(n) for n in range(10)] == written


def test_a_shard_that_was_given_up_leaves_its_entries_and_the_cause(tmp_path):
    with WrittenIndex(tmp_path, META) as writer:
        writer.append(entries_of(5))
        writer.finish("cut", 4096, cause="cut at byte 4,096")
    with IndexReader(tmp_path) as reader:
        assert (reader.count, reader.ended, reader.is_complete) == (5, True, False)
        assert (reader.status, reader.cause) == ("cut", "cut at byte 4,096")


@pytest.mark.parametrize("finish", [True, False])
def test_a_torn_last_record_is_not_read(tmp_path, finish):
    whole = write(tmp_path / "whole", entries_of(5), finish)
    data = (whole / "index").read_bytes()
    for torn in range(1, RECORD.itemsize + 1):
        (whole / "index").write_bytes(data[:-torn])
        with IndexReader(whole) as reader:
            assert (reader.count, reader.ended, reader.damaged) == (5 if finish else 4, False, False)
            (whole / "index").write_bytes(data)
            assert reader.refresh()
            assert (reader.count, reader.ended) == (5, finish)


@pytest.mark.parametrize(
    ("record", "finish"), [(0, True), (4, True), (5, True), (0, False), (2, False), (4, False)]
)
def test_a_flipped_bit_in_a_record_ends_the_reading_there(tmp_path, record, finish):
    write(tmp_path, entries_of(5), finish)
    data = (tmp_path / "index").read_bytes()
    start = header_bytes(tmp_path) + record * RECORD.itemsize
    for byte in range(RECORD.itemsize):
        flipped = bytearray(data)
        flipped[start + byte] ^= 1 << byte % 8
        (tmp_path / "index").write_bytes(flipped)
        with IndexReader(tmp_path) as reader:
            assert (reader.count, reader.ended, reader.damaged) == (record, False, True)
            (tmp_path / "index").write_bytes(data)
            assert reader.refresh()
            assert (reader.count, reader.ended, reader.damaged) == (5, finish, False)


def test_records_in_another_order_or_of_another_index_are_not_read(tmp_path):
    write(tmp_path, entries_of(5), finish=False)
    data = (tmp_path / "index").read_bytes()
    start = header_bytes(tmp_path)
    first, second = data[start : start + 64], data[start + 64 : start + 128]
    (tmp_path / "index").write_bytes(data[:start] + first + first + second)
    assert len(read(tmp_path)) == 1
    # An end that counts right, but belongs to other records.
    other = (write(tmp_path / "other", entries_of(5, width=1)) / "index").read_bytes()
    (tmp_path / "index").write_bytes(data + other[-64:])
    with IndexReader(tmp_path) as reader:
        assert (reader.count, reader.ended, reader.damaged) == (5, False, True)


def test_flipped_or_missing_names_fail(tmp_path):
    write(tmp_path, entries_of(5), finish=False)
    names = (tmp_path / "names").read_bytes()
    (tmp_path / "names").write_bytes(names[:-1])
    with IndexReader(tmp_path) as reader:
        assert reader.entry(3) == entries_of(5)[3]
        with pytest.raises(CacheCorrupt, match="names at byte"):
            reader.entry(4)
    (tmp_path / "names").write_bytes(bytes([names[0] ^ 1]) + names[1:])
    with IndexReader(tmp_path) as reader, pytest.raises(CacheCorrupt, match="names at byte 0"):
        reader.layouts()


@pytest.mark.parametrize("byte", [*range(64), 100])
def test_a_flipped_bit_in_the_header_fails(tmp_path, byte):
    write(tmp_path, entries_of(2))
    data = bytearray((tmp_path / "index").read_bytes())
    data[byte] ^= 4
    (tmp_path / "index").write_bytes(data)
    with pytest.raises(CacheCorrupt, match="fetch the shard again"):
        IndexReader(tmp_path)


def test_an_index_of_another_version_fails_and_says_so(tmp_path):
    write(tmp_path, entries_of(2))
    data = (tmp_path / "index").read_bytes()
    (tmp_path / "index").write_bytes(data.replace(b"SLINDEX1", b"SLINDEX2"))
    with pytest.raises(CacheCorrupt, match="another version of streamload"):
        IndexReader(tmp_path)


@settings(max_examples=200)
@given(st.binary(max_size=400), st.booleans())
def test_garbage_is_no_index(tmp_path_factory, garbage, with_magic):
    directory = tmp_path_factory.mktemp("garbage")
    (directory / "index").write_bytes(b"SLINDEX1" * with_magic + garbage)
    (directory / "names").write_bytes(garbage)
    with pytest.raises(CacheCorrupt):
        IndexReader(directory)


@settings(max_examples=300)
@given(st.data())
def test_damage_gives_a_true_prefix_or_a_typed_error(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("damaged")
    written = entries_of(6)
    write(directory, written)
    for name in ("index", "names"):
        content = bytearray((directory / name).read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at : at + 1] = data.draw(st.sampled_from([b"", b"\0", b"\xff", content[:64]]))
        (directory / name).write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    with contextlib.suppress(CacheCorrupt), IndexReader(directory) as reader:
        for number in range(reader.count):
            assert reader.entry(number) == written[number]
        reader.refresh()
        assert not reader.ended or reader.count == 6


def test_what_is_no_regular_file_is_neither_followed_nor_waited_for(tmp_path):
    write(tmp_path / "there", entries_of(1))
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "index").symlink_to(tmp_path / "there" / "index")
    with pytest.raises(OSError, match="symbolic"):
        IndexReader(linked)
    with pytest.raises(OSError, match="symbolic"):
        WrittenIndex(linked, META)
    piped = tmp_path / "piped"
    piped.mkdir()
    os.mkfifo(piped / "index")
    with pytest.raises(CacheCorrupt, match="regular file"):
        IndexReader(piped)


def test_an_index_is_never_written_twice_but_an_empty_file_may_be_there(tmp_path):
    (tmp_path / "index").touch()
    write(tmp_path, entries_of(2))
    with pytest.raises(FileExistsError):
        WrittenIndex(tmp_path, META)
    assert read(tmp_path) == entries_of(2)


def test_an_index_whose_header_is_not_there_yet_fails(tmp_path):
    with pytest.raises(FileNotFoundError):
        IndexReader(tmp_path)
    (tmp_path / "index").touch()
    (tmp_path / "names").touch()
    with pytest.raises(CacheCorrupt, match="no header yet"):
        IndexReader(tmp_path)


def test_entries_out_of_turn_or_behind_the_end_fail(tmp_path):
    with WrittenIndex(tmp_path, META) as writer:
        with pytest.raises(ValueError, match="entry 1 after 0"):
            writer.append(entries_of(2)[1:])
        writer.append(entries_of(1))
        writer.finish()
        with pytest.raises(ValueError, match="finished"):
            writer.append(entries_of(2)[1:])
        with pytest.raises(ValueError, match="end already"):
            writer.finish()
    assert read(tmp_path) == entries_of(1)


@pytest.mark.parametrize("room_bytes", [1, 30, 64, 200])
def test_an_append_that_failed_for_want_of_room_can_be_made_again(tmp_path, room_bytes):
    written = entries_of(8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with WrittenIndex(tmp_path, META) as writer, IndexReader(tmp_path) as reader:
        writer.append(written[:2])
        size = (tmp_path / "index").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + room_bytes, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                writer.append(written[2:])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        reader.refresh()
        assert [reader.entry(n) for n in range(reader.count)] == written[: reader.count]
        writer.append(written[2:])
        writer.finish("complete", 1)
        reader.refresh()
        assert (reader.count, reader.is_complete) == (8, True)
        assert [reader.entry(n) for n in range(8)] == written


def test_layouts_are_shared_until_there_are_too_many_kinds(tmp_path):
    kinds = [Entry(n, "k", ((f"e{n}", 512 * n, 1),), 0, 0, 0, None) for n in range(4100)]
    kinds.append(Entry(4100, "k", (("e7", 0, 1),), 0, 0, 0, None))
    kinds.append(Entry(4101, "k", (("x" * 5000, 0, 1),), 0, 0, 0, None))
    with IndexReader(write(tmp_path, kinds)) as reader:
        layouts = reader.layouts()
        records = reader.records["layout"]
        assert len(layouts) == 4096
        assert (records[4095:4100] == OWN_LAYOUT).tolist() == [False, True, True, True, True]
        assert layouts[records[4100].item()] == ("e7",)
        assert records[4101] == OWN_LAYOUT
        assert read(tmp_path) == kinds


def test_layouts_grow_with_the_index(tmp_path):
    with WrittenIndex(tmp_path, META) as writer, IndexReader(tmp_path) as reader:
        writer.append(entries_of(2))
        reader.refresh()
        assert reader.layouts() == {0: ("jpg", "txt")}
        writer.append([Entry(2, "k", (("png", 0, 1),), 0, 0, 0, None)])
        reader.refresh()
        assert reader.layouts() == {0: ("jpg", "txt"), 1: ("png",)}


def test_the_files_are_ours_alone_and_the_writer_knows_their_size(tmp_path):
    with WrittenIndex(tmp_path, META) as writer:
        writer.append(entries_of(9))
        assert writer.size_bytes == sum((tmp_path / name).stat().st_size for name in ("index", "names"))
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("index", "names")} == {0o600}


def test_names_are_json_that_other_tools_can_read(tmp_path):
    write(tmp_path, ODD[:1])
    record = np.fromfile(tmp_path / "index", RECORD, offset=header_bytes(tmp_path))[0]
    start = int(record["names_start"])
    frame = (tmp_path / "names").read_bytes()[start : start + int(record["names_length"])]
    assert json.loads(frame[8:]) == [ODD[0].key, [["jpg", 512, 0]]]


def test_names_that_are_another_entrys_are_damage(tmp_path):
    """Frames of equal length whose own checks hold, one in the other's place."""
    written = entries_of(5)
    write(tmp_path, written)
    records = np.fromfile(tmp_path / "index", RECORD, offset=header_bytes(tmp_path))
    starts, lengths = records["names_start"].tolist(), records["names_length"].tolist()
    first, second = (slice(starts[n], starts[n] + lengths[n]) for n in (3, 4))
    names = bytearray((tmp_path / "names").read_bytes())
    names[first], names[second] = names[second], names[first]
    (tmp_path / "names").write_bytes(names)
    with IndexReader(tmp_path) as reader:
        assert reader.entry(0) == written[0]
        for number in (3, 4):
            with pytest.raises(CacheCorrupt, match=f"not those of entry {number}"):
                reader.entry(number)


@pytest.mark.parametrize(
    ("field", "value"),
    [("names_length", 0xFFFF_FFFF), ("names_start", (1 << 64) - 1), ("names_start", 1 << 40)],
)
def test_a_forged_place_of_names_is_damage_and_takes_no_memory(tmp_path, field, value):
    write(tmp_path, entries_of(3), finish=False)
    data = bytearray((tmp_path / "index").read_bytes())
    record = np.frombuffer(data, RECORD, offset=header_bytes(tmp_path))[1:2]
    record[field] = value
    record["check"] = xxh3_64_intdigest(record.tobytes()[:56])
    (tmp_path / "index").write_bytes(data)
    with IndexReader(tmp_path) as reader:
        assert reader.count == 3
        with pytest.raises(CacheCorrupt, match="names at byte"):
            reader.entry(1)
