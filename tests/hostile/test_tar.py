"""Shards made to harm: each is read in little memory and time, and costs no sample that is sound.

Every shard stands between two good ones and is read as a local file and from a web server (hostile.py).
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import pickle
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.fuzzing.blocks import END, base_256, header, long_name, member, octal, padded, pax, seal
from tests.support.hostile import among_good_ones, picture, read_both_ways, sample

BEFORE, AFTER = sample("earlier") + sample("before"), sample("after") + END
LONG = long_name(b"l.jpg")


class Refused(NamedTuple):
    """What stands between good samples, and why the rest of the shard is given up because of it."""

    between: bytes
    says: str
    error: str = "ShardFormatError"
    is_name_read: bool = False
    """Only then is it known that the sample in front of it has no more members."""
    times: int = 1
    """How often it stands there."""


def sparse() -> bytes:
    """GNU's sparse member of 1 GiB whose data is 512 bytes."""
    block = bytearray(header(b"sparse.jpg", octal(512), b"S"))
    block[386:410] = b"%011o\0%011o\0" % ((1 << 30) - 512, 512)
    block[483:495] = octal(1 << 30)
    return seal(block) + bytes(512)


REFUSED = {
    "a sparse member of unknown form": Refused(
        pax((b"GNU.sparse.major", b"7"), (b"GNU.sparse.realsize", b"1073741824"))
        + member("s.jpg", bytes(512)),
        "sparse",
    ),
    "a size of 2^62": Refused(header(b"a.jpg", base_256(1 << 62), b"0"), "4611686018427387904 bytes"),
    "a negative size": Refused(header(b"a.jpg", base_256(-1024), b"0"), "a member of -1024 bytes"),
    "a negative octal size": Refused(header(b"a.jpg", b"-0000002000\0", b"0"), "a member of -1024 bytes"),
    "a size of 8 GiB that isn't there": Refused(
        header(b"a.jpg", base_256(8 << 30), b"0"), "cut at byte", "ShardCut", True
    ),
    "a pax size beyond the shard": Refused(
        pax((b"size", b"1000000")) + member("a.jpg", b"x"), "cut at byte", "ShardCut", True
    ),
    "a pax size into the next payload": Refused(
        pax((b"size", b"1100")) + member("a.jpg", b"x"), "checksum", is_name_read=True
    ),
    "a negative pax size": Refused(pax((b"size", b"-5")) + member("a.jpg", b"x"), "pax size of"),
    "a pax header of 64 MiB": Refused(
        header(b"p", octal(64 << 20), b"x") + bytes(1 << 20), "1048576 are allowed"
    ),
    "a pax record that overruns its header": Refused(
        header(b"p", octal(11), b"x") + padded(b"999 path=a\n"), "pax record"
    ),
    "100,000 long names for one member": Refused(LONG, "more than 16 extended headers", times=100_000),
    "a wrong header checksum": Refused(member("a.jpg", b"x").replace(b"ustar", b"Ustar"), "checksum"),
    "garbage": Refused(random.Random(0).randbytes(4096), "checksum"),
    "a long name for no member": Refused(LONG + bytes(512), "instead of its member"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_on_gives_what_is_before_it_and_a_typed_error(case: str, tmp_path: Path) -> None:
    between, says, error, is_name_read, times = REFUSED[case]
    shard = BEFORE + between * times + AFTER
    found = among_good_ones(tmp_path, shard)
    whole = ["earlier", "before"] if is_name_read else ["earlier"]
    assert (found.keys, found.given_up, found.skipped, found.error) == (whole, 1, {}, "")
    assert f"hostile.tar is skipped after {len(whole)} samples: " in found.log
    assert says in found.log
    (tmp_path / "raising").mkdir()
    raised = among_good_ones(tmp_path / "raising", shard, on_error="raise")
    assert raised.error == error


COMPRESSED = {
    "gzip": gzip.compress(bytes(32 << 20), 1),
    "xz": lzma.compress(bytes(4 << 20), preset=0),
    "bzip2": bz2.compress(bytes(4 << 20), 1),
    "zstd": b"\x28\xb5\x2f\xfd\xa4\0\0\0\x40" + b"\x02\0\x10\0\xff" * 1000,
}


@pytest.mark.parametrize("kind", COMPRESSED)
def test_a_compressed_bomb_named_tar_is_named_and_not_unpacked(kind: str, tmp_path: Path) -> None:
    found = among_good_ones(tmp_path, COMPRESSED[kind])
    assert (found.keys, found.given_up, found.error) == ([], 1, "")
    assert f"{kind} data" in found.log


def test_sizes_in_base_256_and_by_pax_are_read_where_they_are_true(tmp_path: Path) -> None:
    image = picture()
    by_base = header(b"base.jpg", base_256(len(image)), b"0") + padded(image) + member("base.txt", b"b")
    by_pax = pax((b"size", b"%d" % len(image))) + header(b"pax.jpg", octal(0), b"0") + padded(image)
    found = among_good_ones(tmp_path, BEFORE + by_base + by_pax + member("pax.txt", b"p") + AFTER)
    assert (found.keys, found.given_up, found.skipped) == (
        ["earlier", "before", "base", "pax", "after"],
        0,
        {},
    )


def test_sparse_members_are_left_out_and_named(tmp_path: Path) -> None:
    by_pax = pax(
        (b"GNU.sparse.map", b"0,512"), (b"GNU.sparse.name", b"p.jpg"), (b"GNU.sparse.size", b"1073741824")
    )
    between = (
        sparse() + member("sparse.txt", b"t") + by_pax + member("s.jpg", bytes(512)) + member("p.txt", b"t")
    )
    found = among_good_ones(tmp_path, BEFORE + between + AFTER)
    assert (found.keys, found.given_up, found.skipped) == (
        ["earlier", "before", "after"],
        0,
        {"unsupported": 2},
    )
    assert "2 × a sparse file ('sparse.jpg')" in found.log


def test_links_devices_and_fifos_are_no_images_and_are_not_followed(tmp_path: Path) -> None:
    between = b""
    for kind in (b"1", b"2", b"3", b"4", b"5", b"6"):
        block = bytearray(header(b"kind-" + kind + b".jpg", octal(512), kind))
        block[157:168] = b"/etc/passwd"
        between += seal(block) + member(f"kind-{kind.decode()}.txt", b"a caption")
    found = among_good_ones(tmp_path, BEFORE + between + AFTER)
    assert (found.keys, found.given_up) == (["earlier", "before", "after"], 0)
    assert found.skipped == {"missing": 4, "unsupported": 2}
    assert "2 × a link to something outside the tar ('kind-1.jpg' -> '/etc/passwd')" in found.log


def test_repeated_and_interleaved_keys_are_samples_of_their_own(tmp_path: Path) -> None:
    image = picture()
    interleaved = [("x.jpg", image), ("y.jpg", image), ("x.txt", b"x"), ("y.txt", b"y")]
    repeated = [("z.jpg", image), ("z.jpg", image), ("z.txt", b"z"), ("z.txt", b"again")]
    between = b"".join(member(name, payload) for name, payload in interleaved + repeated)
    found = among_good_ones(tmp_path, BEFORE + sample("same") + sample("same") + between + AFTER)
    assert found.keys == ["earlier", "before", "same", "same", "z", "after"]
    assert (found.given_up, found.skipped) == (0, {"missing": 6})


def test_names_of_any_kind_are_keys_and_never_paths(tmp_path: Path) -> None:
    image = picture()
    keys = ["../up", "/etc/absolute", "a/../../b", "n" * 64_000, "not-utf8-\udcff\udc80", "line\nbreak", "-o"]
    between = b"".join(member(f"{key}.jpg", image) + member(f"{key}.txt", b"t") for key in keys)
    for extension, payload in (("jpg", image), ("txt", b"t")):
        between += pax((b"path", b"nul\0byte." + extension.encode())) + member("x", payload)
    between += (
        member("", b"no name") + member("no-extension", b"") + member(".hidden", b"") + member("dir/.x", b"")
    )
    found = among_good_ones(tmp_path, BEFORE + between + AFTER)
    assert found.keys == ["earlier", "before", *keys, "nul\0byte", "after"]
    assert (found.given_up, found.skipped) == (0, {"missing": 1})  # `dir/.x` has the key `dir/` and no image
    assert sorted(os.listdir(tmp_path)) == ["cache-0", "cache-1", "data"]
    inside = [path.name for path in (tmp_path / "cache-1").rglob("*") if path.is_file()]
    assert not [name for name in inside if "up" in name or "hidden" in name or len(name) > 200]


def test_what_stands_behind_a_zero_block_is_not_read_and_that_is_said(tmp_path: Path) -> None:
    found = among_good_ones(tmp_path, BEFORE + bytes(512) + AFTER)
    assert (found.keys, found.given_up) == (["earlier", "before"], 0)
    assert "hostile.tar: data after the end marker was not read" in found.log


@pytest.mark.parametrize("gap_bytes", [20 << 10, 3 << 20])
def test_a_tar_far_behind_the_end_of_another_is_noticed(gap_bytes: int, tmp_path: Path) -> None:
    found = among_good_ones(tmp_path, BEFORE + bytes(gap_bytes) + AFTER)
    assert (found.keys, found.given_up) == (["earlier", "before"], 0)
    assert "after the end marker" in found.log


def test_a_tar_without_end_marker_gives_all_of_it_and_says_so(tmp_path: Path) -> None:
    found = among_good_ones(tmp_path, BEFORE + sample("after"))
    assert (found.keys, found.given_up) == (["earlier", "before", "after"], 0)
    assert "hostile.tar: no end marker" in found.log


@pytest.mark.parametrize("cut", [1, 200, 511])
def test_a_cut_within_a_header_is_an_error_behind_the_whole_samples(cut: int, tmp_path: Path) -> None:
    found = among_good_ones(tmp_path, BEFORE + sample("whole") + AFTER[:cut])
    assert (found.keys, found.given_up) == (["earlier", "before"], 1)
    assert "cut within a header" in found.log


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def as_given(raw: dict[str, Any]) -> dict[str, Any]:
    return {"value": {name: value for name, value in raw.items() if isinstance(value, bytes)}}


def traps(path: Path) -> dict[str, bytes]:
    pickled = pickle.dumps(Trap(path))
    array = io.BytesIO()
    np.save(array, np.array([Trap(path)], dtype=object), allow_pickle=True)
    names = ("pyd", "pkl", "pickle", "pth", "pt", "ten", "cbor", "msgpack")
    return {**dict.fromkeys(names, pickled), "npy": array.getvalue(), "npz": array.getvalue()}


@pytest.mark.parametrize("option", [{}, {"map_sample": as_given}])
def test_pickles_are_bytes_that_nothing_ever_loads(option: dict[str, Any], tmp_path: Path) -> None:
    trap, directory = tmp_path / "sprung", tmp_path / "read"
    directory.mkdir()
    members = traps(trap)
    found = among_good_ones(directory, BEFORE + sample("trap", **members) + AFTER, **option)
    assert found.keys == ["earlier", "before", "trap", "after"]
    if option:
        assert found.values[2] == {"jpg": picture(), "txt": b"a caption", **members}
    assert not trap.exists()
    pickle.loads(members["pickle"])
    assert trap.exists()  # it would have worked


@pytest.mark.parametrize(
    ("option", "cause"), [({"text_key": "pickle"}, "caption"), ({"image_key": "npy"}, "decode")]
)
def test_pickles_are_no_text_and_no_image(option: dict[str, Any], cause: str, tmp_path: Path) -> None:
    trap, directory = tmp_path / "sprung", tmp_path / "read"
    directory.mkdir()
    shard = sample("one", **traps(trap)) + sample("two") + sample("three", **traps(trap)) + END
    found = read_both_ways(directory, {"hostile.tar": shard}, **option)
    assert (found.keys, found.skipped, found.error) == ([], {cause: 2, "missing": 1}, "TooManyBadSamples")
    assert not trap.exists()
