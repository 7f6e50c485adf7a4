"""The tar parser against `tarfile`: all formats, any chunks, damage, hostile input."""

import io
import itertools
import os
import random
import struct
import tarfile
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.errors import ShardCut, ShardError, ShardFormatError
from streamload.shards.tar import (
    EXTENDED_LIMIT_BYTES,
    HARD_LINK,
    NOTE,
    SPARSE,
    SYMBOLIC_LINK,
    Member,
    TarParser,
)
from tests.fuzzing.blocks import END, base_256, header, long_name, octal, padded, pax, seal
from tests.fuzzing.tars import LoudInfo

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def oracle(data):
    """Regular members and links as `Member`s, and whether tarfile read to the end without complaint."""
    members = []
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|", tarinfo=LoudInfo.for_one_tar()) as tar:
            for info in tar:
                if info.isreg() and not info.issparse():
                    note = info.pax_headers.get(NOTE, "")
                    members.append(Member(info.name, info.offset_data, info.size, note))
                elif info.islnk() or info.issym():
                    kind = HARD_LINK if info.islnk() else SYMBOLIC_LINK
                    members.append(Member(info.name, info.offset_data, 0, "", kind, info.linkname))
                tar.members = []
                if info.size > 1 << 24:  # tarfile would "seek" there block by block
                    return members, False
    except (tarfile.TarError, ValueError, RecursionError, IndexError, OverflowError, MemoryError):
        return members, False
    return members, True


def parse(data, cuts=()):
    """Members and their payloads as the parser gives them for chunks that end at `cuts`."""
    parser = TarParser()
    members, payloads = [], []
    for start, stop in itertools.pairwise([0, *sorted(cuts), len(data)]):
        for member, payload in parser.feed(data[start:stop]):
            if not members or members[-1] is not member:
                members.append(member)
                payloads.append(b"")
            payloads[-1] += payload
    parser.finish()
    return members, payloads


def archive(members, tar_format, pax_headers=None):
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=tar_format, errors="surrogateescape", pax_headers=pax_headers
    ) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    return out.getvalue()


def some_members(long_names):
    rng = random.Random(5)
    names = ["a.jpg", "folder/b.b.txt", "c", "ünïcödé/ß.jpg", "trailing.slash.jpg"]
    if long_names:
        names += ["n" * 300 + ".jpg", "d/" * 200 + "x.txt", "not-utf8-\udcff\udc80.jpg"]
    return [(name, rng.randbytes(rng.choice([0, 1, 511, 512, 513, 5000]))) for name in names]


@pytest.mark.parametrize("tar_format", FORMATS)
def test_members_are_those_that_tarfile_gives(tar_format):
    members = some_members(long_names=tar_format != "ustar")
    data = archive(members, FORMATS[tar_format])
    found, payloads = parse(data)
    assert ([tuple(member) for member in found], True) == oracle(data)
    assert [(member.name, payload) for member, payload in zip(found, payloads, strict=True)] == members


def test_a_note_is_of_the_member_behind_it_alone():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, records in (("a.txt", {}), ("b.jpg", {NOTE: "5 ü \udcff"}), ("c.txt", {"comment": "no"})):
            info = tarfile.TarInfo(name)
            info.pax_headers = records
            tar.addfile(info)
    found, _ = parse(out.getvalue())
    assert [member.note for member in found] == ["", "5 ü \udcff", ""]
    assert ([tuple(member) for member in found], True) == oracle(out.getvalue())


def test_long_ustar_names_use_the_prefix():
    data = archive([("p/" * 60 + "a.jpg", b"x")], tarfile.USTAR_FORMAT)
    assert [tuple(member) for member in parse(data)[0]] == oracle(data)[0]


def test_global_pax_headers_that_say_nothing_of_members_are_passed_over():
    data = archive([("a.jpg", b"x"), ("ü.txt", b"y")], tarfile.PAX_FORMAT, {"comment": "0123", "mtime": "1"})
    assert [tuple(member) for member in parse(data)[0]] == oracle(data)[0]


@pytest.mark.parametrize("record", [(b"path", b"all.jpg"), (b"size", b"3")])
def test_global_pax_headers_that_rename_or_resize_members_are_refused(record):
    with pytest.raises(ShardFormatError, match="global pax header"):
        parse(pax(record, kind=b"g") + header() + END)


def test_sizes_in_base_256_and_in_pax_records_are_read():
    by_base = header(size=base_256(700)) + padded(bytes(700)) + END
    by_pax = pax((b"size", b"700")) + header() + padded(bytes(700)) + END
    for data in (by_base, by_pax):
        assert [tuple(member) for member in parse(data)[0]] == oracle(data)[0] != []


def test_the_first_of_several_extended_headers_names_the_member_as_in_tarfile():
    first_long = long_name(b"l.jpg")
    other = long_name(b"o.jpg")
    x = pax((b"path", b"x.jpg"), (b"size", b"3"))
    for first, second in itertools.permutations([first_long, other, x], 2):
        data = first + second + header(size=octal(3)) + padded(b"abc") + END
        assert [tuple(member) for member in parse(data)[0]] == oracle(data)[0] != []
    sizes = [pax((b"size", size)) for size in (b"3", b"512", b"600")]
    for first, second in itertools.permutations(sizes, 2):
        data = first + second + header(size=octal(3)) + padded(b"abc" + bytes(600)) + END
        assert [tuple(member) for member in parse(data)[0]] == oracle(data)[0] != []


def test_signed_header_checksums_are_accepted():
    block = header(b"\xe9t\xe9.jpg")
    signed = sum(struct.unpack("148b8x356b", block)) + 256
    data = block[:148] + b"%06o\0 " % signed + block[156:] + END
    assert [tuple(member) for member in parse(data)[0]] == oracle(data)[0] != []


@pytest.mark.parametrize("name", [b"sample0001.jpg", b"\xe9t\xe9.jpg"])
def test_each_bit_that_is_flipped_in_a_header_is_noticed(name):
    whole = header(name, octal(700)) + padded(bytes(700)) + END
    assert parse(whole)[0]
    for place in itertools.chain(range(148), range(156, 512)):  # a checksum can be written in several ways
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            with pytest.raises(ShardError, match=r"a header has a wrong checksum|not a tar|looks like"):
                parse(bytes(flipped))


def test_members_that_are_not_regular_files_are_passed_over_but_for_links():
    kinds = [header(b"x", octal(512), kind) for kind in (b"1", b"2", b"3", b"4", b"5", b"6")]
    unknown = header(b"u", octal(512), b"Z") + bytes(512)
    v7_folder = header(b"folder/", octal(512), b"\0")
    data = b"".join(kinds) + unknown + v7_folder + header(kind=b"\0") + header(b"b.txt", kind=b"7") + END
    assert [tuple(member) for member in parse(data)[0]] == oracle(data)[0]
    assert [member.name for member in parse(data)[0]] == ["x", "x", "a.jpg", "b.txt"]


def test_a_zero_block_ends_the_tar_as_in_tarfile_and_data_behind_it_is_noticed():
    data = header() + bytes(512) + header(b"b.jpg") + END
    assert [tuple(member) for member in parse(data)[0]] == oracle(data)[0]
    parser = TarParser()
    parser.feed(data)
    assert (parser.ended, parser.trailing) == (True, True)
    parser = TarParser()
    parser.feed(header() + bytes(10240))
    assert (parser.ended, parser.trailing) == (True, False)


@settings(max_examples=60)
@given(st.data())
def test_any_split_of_the_bytes_gives_the_same_members(data):
    tar_format = data.draw(st.sampled_from(list(FORMATS)))
    whole = archive(some_members(long_names=tar_format != "ustar"), FORMATS[tar_format])
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=30))
    assert parse(whole, cuts) == parse(whole)


def test_single_bytes_give_the_same_members():
    whole = archive(some_members(long_names=True)[-3:], tarfile.PAX_FORMAT)
    assert parse(whole, range(len(whole))) == parse(whole)


def test_payloads_are_views_of_the_chunk():
    data = archive([("a.bin", bytes(100_000))], tarfile.GNU_FORMAT)
    ((_, payload),) = TarParser().feed(data)
    assert payload.obj is data


def test_skipping_payloads_gives_the_same_members():
    data = archive(some_members(long_names=True), tarfile.PAX_FORMAT)
    parser = TarParser()
    found = []
    while parser.position < len(data):
        parser.skip(parser.skippable)
        for member, _ in parser.feed(data[parser.position : parser.position + 512]):
            if member not in found:
                found.append(member)
    assert found == parse(data)[0]


def test_skipping_more_than_payload_fails():
    parser = TarParser()
    parser.feed(header(size=octal(10)))
    with pytest.raises(ValueError, match="512 bytes may be skipped"):
        parser.skip(513)


def test_a_cut_at_any_byte_is_noticed_unless_a_member_ends_there():
    data = archive([("a.jpg", bytes(700)), ("n" * 120 + ".txt", b"y")], tarfile.GNU_FORMAT)
    borders = {512 + 1024}
    end = 512 + 1024 + 1024 + 512 + 512
    for cut in range(1, end):
        parser = TarParser()
        parser.feed(data[:cut])
        if cut in borders:
            parser.finish()
        elif cut < 512:
            with pytest.raises(ShardFormatError, match="shorter than one block"):
                parser.finish()
        else:
            with pytest.raises(ShardCut, match=f"at byte {cut}"):
                parser.finish()


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"\x1f\x8b\x08\0", "gzip"),
        (b"\xfd7zXZ\0", "xz"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"BZh91AY&SY", "bzip2"),
        (b"PK\x03\x04", "zip"),
        (b"\n <!DOCTYPE html><html>", "web page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>", "XML.*access"),
        (b'{"error": "no"}', "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
        (b"\x89PNG", "begins with"),
    ],
)
@pytest.mark.parametrize("length", [60, 5000])
def test_what_is_not_a_tar_is_named(start, said, length):
    parser = TarParser()
    with pytest.raises(ShardFormatError, match=said):  # noqa: PT012 - short ones are told at the end
        parser.feed(start.ljust(length, b"."))
        parser.finish()


def test_an_empty_shard_fails():
    with pytest.raises(ShardFormatError, match="empty"):
        TarParser().finish()


HUGE = b"\x80" + (1 << 62).to_bytes(11, "big")
HOSTILE = {
    "unknown pax sparse member": pax((b"GNU.sparse.major", b"1")),
    "size of 2^62": header(size=HUGE),
    "negative size": header(size=b"\xff" * 12),
    "negative octal size": header(size=b"-0000000010\0"),
    "no number": header(size=b"12345678zzz\0"),
    "pax size that is negative": pax((b"size", b"-1")) + header(),
    "second pax size that is negative": pax((b"size", b"0")) + pax((b"size", b"-1")) + header(),
    "pax size of 10^5 digits": pax((b"size", b"9" * 100_000)) + header(),
    "pax size of 2^62": pax((b"size", b"%d" % (1 << 62))) + header(),
    "pax header of 64 MiB": header(size=octal(64 << 20), kind=b"x") + bytes(1 << 20),
    "long name of 64 MiB": header(size=octal(64 << 20), kind=b"L") + bytes(1 << 20),
    "chained long names": header(size=octal(6), kind=b"L") + padded(b"l.jpg\0"),
    "chained empty pax headers": header(kind=b"x"),
    "pax records without end": header(size=octal(1 << 20), kind=b"x") + b"2 " * (1 << 19),
    "pax record longer than its header": header(size=octal(512), kind=b"x") + padded(b"999 path=a\n"),
    "pax record of length 0": header(size=octal(512), kind=b"x") + padded(b"0 path=a\n"),
    "wrong checksum": header()[:-1] + b"x",
    "garbage": random.Random(0).randbytes(4096),
    "long name before the end marker": header(size=octal(6), kind=b"L") + padded(b"l.jpg\0"),
}
REPEATED = {"chained long names": 100_000, "chained empty pax headers": 100_000}
"""So often, in its test alone: 150 MB would stay in each process that collects the tests."""


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("at_start", [True, False])
def test_hostile_headers_are_refused_in_little_memory(case, at_start):
    before = b"" if at_start else header(size=octal(9)) + padded(b"something")
    data = before + HOSTILE[case] * REPEATED.get(case, 1) + END
    tracemalloc.start()
    parser = TarParser()
    with pytest.raises(ShardFormatError, match=r"byte \d+|not a tar"):  # noqa: PT012
        for at in range(0, len(data), 1 << 16):
            parser.feed(memoryview(data)[at : at + (1 << 16)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * EXTENDED_LIMIT_BYTES


@pytest.mark.parametrize("size", [40, 5000])
def test_text_in_place_of_a_tar_is_called_text_and_not_quoted(size):
    with pytest.raises(ShardFormatError, match="not a tar but text") as caught:
        parse((b"No access for the token hunter2.\n" * 200)[:size])
    assert "hunter2" not in str(caught.value)


def test_a_size_of_8_gib_that_lies_is_a_cut():
    with pytest.raises(ShardCut, match="lacks"):
        parse(header(size=base_256(8 << 30)) + bytes(5000))


@pytest.mark.parametrize("size", [-1, -700, 700 - (1 << 88)])
def test_a_negative_size_is_an_error(size):
    with pytest.raises(ShardFormatError, match=f"a member of {size} bytes"):
        parse(header(size=base_256(size)) + padded(bytes(700)) + END)


def test_names_of_64_kb_are_read():
    name = "x" * 65_000 + ".jpg"
    for tar_format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        (member,), _ = parse(archive([(name, b"")], tar_format))
        assert member.name == name


@pytest.mark.parametrize("naming", ["GNU", "pax"])
def test_a_long_name_is_no_directory_for_a_slash_at_byte_100(naming):
    name = b"d" * 99 + b"/" + b"a.jpg"
    before = long_name(name) if naming == "GNU" else pax((b"path", name))
    own = header(name[:100], octal(3), kind=b"\0")
    (member,), payloads = parse(before + own + padded(b"abc") + END)
    assert (member.name, payloads) == (name.decode(), [b"abc"])


def seeds():
    rich = pax((b"path", b"p.jpg"), (b"mtime", b"1.5")) + header(size=octal(30)) + padded(bytes(30))
    yield (rich + long_name(b"long.txt") + header(b"b", octal(3)) + END)
    yield pax((b"comment", b"c"), kind=b"g") + header(b"f/", kind=b"5") + header(prefix=b"pre") + rich + END
    for tar_format in FORMATS.values():
        yield archive(some_members(long_names=tar_format != tarfile.USTAR_FORMAT)[:6], tar_format)


def mutate(data, rng):
    """Damage some bytes; mostly in headers, and then often with a checksum that holds again."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(data))
        kind = rng.randrange(7)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice(b"\0 0123789-x=\n\xff\x80gxLKS5")
        elif kind == 2:
            block = at // 512 * 512
            data += bytes(max(0, block + 512 - len(data)))
            field = rng.choice([range(157), range(124, 136), range(156, 157), range(345, 500)])
            for _ in range(rng.choice([1, 1, 4, 12])):
                data[block + rng.choice(field)] = rng.choice(b"\0 01237-x/\xff\x80gxXLKS0567")
            data[block : block + 512] = seal(bytes(data[block : block + 512]))
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            del data[at // 512 * 512 : at // 512 * 512 + 512 * rng.choice([1, 1, 2])]
        elif kind == 5:
            data[at // 512 * 512 : at // 512 * 512] = bytes(512) if rng.random() < 0.3 else data[:512]
        else:
            data[at:at] = rng.randbytes(rng.choice([1, 16, 512]))
        if not data:
            break
    return bytes(data)


def check_mutant(data, rng):
    """What the parser gives is what tarfile gives; where it stops, it says so by a typed error."""
    theirs, they_finished = oracle(data)
    parser, ours, error = TarParser(), [], None
    try:
        step = rng.choice([1 << 20, 700, 512, 97])
        for at in range(0, len(data), step):
            for member, _ in parser.feed(data[at : at + step]):
                if not ours or ours[-1] is not member:
                    ours.append(member)
        parser.finish()
    except ShardError as exc:
        error = exc
    given = [member for member in ours if member.kind != SPARSE]
    common = min(len(given), len(theirs))
    assert given[:common] == theirs[:common]
    if they_finished:
        assert len(given) == len(theirs) or (error is not None and len(given) < len(theirs))
    return error is None


@pytest.mark.parametrize("number", range(5))
@pytest.mark.sampled(2)
def test_damaged_tars_give_what_tarfile_gives_or_a_typed_error(number):
    start = list(seeds())[number]
    rng = random.Random(int(os.environ.get("FUZZ_SEED", "1")) * 100 + number)
    whole = sum(
        check_mutant(mutate(start, rng), rng) for _ in range(int(os.environ.get("FUZZ_CASES", "1500")))
    )
    assert whole > 0
