"""Compressed shards: any gzip that `gzip -dc` reads gives the same tar, and a bomb fills nothing."""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

import streamload
from streamload.daemon.warm import warm
from streamload.errors import DatasetChanged, ShardCut, ShardError, ShardFormatError, UrlError
from streamload.origins.origin import has_ranges, open_origin
from streamload.origins.unpacked import unpacked
from streamload.testing.server import Fault, ShardServer
from streamload.urls import Compression, checks, compression, expand_urls
from tests.fuzzing.blocks import END
from tests.support import flat
from tests.support.hostile import outcomes, read_both_ways, sample
from tests.support.s3 import S3Server

BODY = random.Random(3).randbytes(70_000) + bytes(200_000) + random.Random(4).randbytes(30_001)


def split(data: bytes, seed: int) -> Iterator[bytes]:
    sizes = random.Random(seed)
    while data:
        size = sizes.choice([1, 2, 100, 5_000, 70_000])
        yield data[:size]
        data = data[size:]


def until_error(
    packed: bytes, seed: int, packed_by: Compression = "gzip"
) -> tuple[bytes, type[ShardError] | None]:
    tar = bytearray()
    try:
        for chunk in unpacked(split(packed, seed), packed_by, "a.tar.gz"):
            tar += chunk
    except ShardError as exc:
        return bytes(tar), type(exc)
    return bytes(tar), None


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(body)


PACK: dict[Compression, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, 1, mtime=0),
    "zstd": zstd,
}


def members(*bodies: bytes, packed_by: Compression = "gzip") -> bytes:
    return b"".join(map(PACK[packed_by], bodies))


@pytest.mark.parametrize("packed_by", PACK)
@pytest.mark.parametrize("seed", range(8))
def test_any_split_of_any_members_gives_the_tar(seed: int, packed_by: Compression) -> None:
    cut = random.Random(seed).randrange(len(BODY))
    whole = members(BODY, packed_by=packed_by)
    before, after = (members(part, packed_by=packed_by) for part in (BODY[:cut], BODY[cut:]))
    empty = members(b"", packed_by=packed_by)
    for packed in (whole, before + empty + after, whole + bytes(seed * 5_000), before + bytes(seed) + after):
        assert until_error(packed, seed, packed_by) == (BODY, None)


def test_a_skippable_frame_is_skipped_as_pzstd_writes_one_first() -> None:
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
    assert until_error(skippable + members(BODY, packed_by="zstd"), 1, "zstd") == (BODY, None)


def test_zstd_that_ends_early_is_a_cut_shard_with_all_that_came() -> None:
    packed = members(BODY, packed_by="zstd")
    for stop in range(5, len(packed), 997):
        tar, error = until_error(packed[:stop], stop, "zstd")
        assert error is ShardCut
        assert BODY.startswith(tar)


def test_gzip_that_ends_early_is_a_cut_shard_with_all_that_came(caplog: pytest.LogCaptureFixture) -> None:
    packed = members(BODY[:3_000], BODY[3_000:4_000])
    for stop in range(3, len(packed)):
        if stop != len(members(BODY[:3_000])) and not 0 <= stop - len(members(BODY[:3_000])) < 3:
            tar, error = until_error(packed[:stop], stop)
            assert error is ShardCut
            assert BODY.startswith(tar)
    assert not caplog.records


@pytest.mark.parametrize("packed_by", PACK)
@pytest.mark.parametrize("place", [100, 40_000, -3])
def test_damaged_data_give_the_same_bytes_before_their_error_however_they_came(
    place: int, packed_by: Compression
) -> None:
    packed = bytearray(members(BODY, packed_by=packed_by))
    packed[place] ^= 0xFF
    outcomes_by_split = {until_error(bytes(packed), seed, packed_by) for seed in range(5)}
    assert len(outcomes_by_split) == 1
    tar, error = outcomes_by_split.pop()
    assert error is not None
    assert len(tar) < len(BODY)


def test_what_follows_gzip_is_not_read_and_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "streamload"):
        assert until_error(members(BODY) + b"garbage" * 9_000, 1) == (BODY, None)
    assert "what follows its gzip data was not read" in caplog.text


@pytest.mark.parametrize("plain", [b"", b"x", BODY, b"<html>"])
def test_what_is_not_compressed_passes_unchanged(plain: bytes) -> None:
    assert until_error(plain, 1) == (plain, None)


@pytest.mark.parametrize(
    ("packed_by", "bomb", "most_at_once"),
    [
        ("gzip", gzip.compress(bytes(16 << 20), 9) * 50, 512 << 10),
        ("zstd", zstd(bytes(16 << 20)) * 50, 32 << 20),
    ],
    ids=PACK,
)
def test_a_bomb_is_refused_before_it_fills_anything(
    packed_by: Compression, bomb: bytes, most_at_once: int
) -> None:
    sizes: list[int] = []
    with pytest.raises(ShardFormatError, match="256 times as many are accepted"):
        sizes.extend(map(len, unpacked(split(bomb, 1), packed_by, "bomb")))
    assert max(sizes) <= most_at_once
    assert sum(sizes) < 128 << 20


@pytest.mark.parametrize("encoding", ["x-gzip", "gzip"])
def test_a_server_that_names_the_gzip_of_the_file_as_an_encoding_is_read(
    encoding: str, tmp_path: Path
) -> None:
    (tmp_path / "a.tgz").write_bytes(members(BODY))
    with ShardServer(tmp_path) as server:
        server.misbehave("a.tgz", *[Fault(headers={"Content-Encoding": encoding})] * 9)
        with contextlib.closing(open_origin(f"{server.url}/a.tgz").open()) as stream:
            assert b"".join(stream.chunks()) == BODY


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("a.tar", None),
        ("/d.tar.gz/a.tar", None),
        ("/d/a.TAR.GZ", "gzip"),
        ("https://h/a.tgz?X-Amz-Signature=1", "gzip"),
        ("https://h/a.tar?name=b.tgz", None),
        ("s3://b/a.tar.zst", "zstd"),
        ("pipe:curl -fsSL https://h/a.tar.gz", "gzip"),
        ("pipe:aws s3 cp s3://b/a.tzst -", "zstd"),
        ("pipe:gzip -dc '/d/a.tgz'", "gzip"),
        ("pipe:cat a.tar.gzip", None),
    ],
)
def test_the_name_says_how_a_shard_may_be_compressed(url: str, expected: str | None) -> None:
    assert compression(url) == expected


def test_zstd_is_read_where_python_or_a_package_can_and_refused_with_the_command_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(expand_urls("shards/{0..9}.tar.zst")) == 10
    monkeypatch.setattr(checks, "zstd_module", lambda: None)
    with pytest.raises(UrlError, match=r"zstd -d --rm \*\.zst"):
        expand_urls("shards/{0..9}.tar.zst")


def test_a_folder_without_tars_gives_its_compressed_ones(tmp_path: Path) -> None:
    for name in ("b.tgz", "a.tar.gz", "notes.txt"):
        (tmp_path / name).touch()
    assert [os.path.basename(url) for url in expand_urls(str(tmp_path))] == ["a.tar.gz", "b.tgz"]
    (tmp_path / "c.tar").touch()
    assert [os.path.basename(url) for url in expand_urls(str(tmp_path))] == ["c.tar"]


SAMPLES = b"".join(sample(f"in-gzip-{number}") for number in range(30))


def test_compressed_shards_train_beside_plain_ones_from_files_servers_and_commands(tmp_path: Path) -> None:
    shards = {"a.tar": sample("plain") + END, "b.tar.gz": gzip.compress(SAMPLES + END)}
    found = read_both_ways(tmp_path, shards)
    assert found.keys == ["plain", *(f"in-gzip-{number}" for number in range(30))]
    assert (found.given_up, found.skipped, found.error) == (0, {}, "")
    assert found.log.count("compressed shards, such as") == 1
    file = tmp_path / "data" / "b.tar.gz"
    sources = [[f"pipe:cat {file}"], [f"pipe:gzip -dc {file}"], [f"file://{file}"]]
    pipes = tmp_path / "pipes"
    for outcome in outcomes(sources, pipes):
        assert outcome.keys == found.keys[1:]


def test_a_cut_compressed_shard_gives_the_samples_before_the_cut_and_says_so(tmp_path: Path) -> None:
    packed = gzip.compress(SAMPLES + END)
    found = read_both_ways(tmp_path, {"a.tgz": packed[: len(packed) // 2], "b.tar": sample("plain") + END})
    assert found.keys[-1] == "plain"
    assert found.given_up == 1
    assert "its gzip data are cut at byte" in found.log


def test_a_compressed_bomb_by_name_is_given_up_and_the_others_train(tmp_path: Path) -> None:
    info = tarfile.TarInfo("bomb.jpg")
    info.size = 400 << 20
    bomb = gzip.compress(info.tobuf()) + gzip.compress(bytes(16 << 20), 9) * 25
    found = read_both_ways(tmp_path, {"a.tar.gz": bomb, "b.tar": sample("plain") + END})
    assert (found.keys, found.given_up) == (["plain"], 1)
    assert "bytes of gzip data unpack to" in found.log


def test_a_compressed_file_that_was_replaced_is_unpacked_again(tmp_path: Path) -> None:
    file = tmp_path / "a.tar.gz"

    def keys() -> list[str]:
        loader = streamload.make_loader(
            str(file), None, batch_size=4, num_workers=0, train=False, output="dict",
            batches=streamload.Batches(with_keys=True), cache_dir=tmp_path / "cache",
        )  # fmt: skip
        with loader:
            return [key for batch in loader for key in batch["__key__"]]

    for name in ("first", "second", "second"):
        if name == "first" or keys() != [name]:
            file.write_bytes(gzip.compress(sample(name) + END))
        assert keys() == [name]


def test_a_compressed_shard_is_read_from_any_byte_under_its_version_and_a_changed_one_is_noticed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.tar.gz"
    file.write_bytes(gzip.compress(BODY))
    with ShardServer(tmp_path) as server:
        for url in (f"{server.url}/a.tar.gz", str(file)):
            assert not has_ranges(url)
            origin = open_origin(url)
            version = origin.version()
            assert version.size is None
            assert version.is_traceable
            with contextlib.closing(origin.open(1_000, version)) as stream:
                assert b"".join(stream.chunks()) == BODY[1_000:]
            assert origin.read(69_990, 70_050, version) == BODY[69_990:70_050]
            os.utime(file, ns=(1, 10**18 + len(url)))
            with pytest.raises(DatasetChanged):
                origin.open(1_000, version)


def packed_shards(tmp_path: Path) -> list[Path]:
    """A plain shard and one of each compressed kind, with thirty samples each."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, pack in [
        ("a.tar", bytes),
        ("b.tar.gz", PACK["gzip"]),
        ("c.tgz", PACK["gzip"]),
        ("d.tar.zst", zstd),
    ]:
        body = b"".join(sample(f"{name[0]}-{number:02d}") for number in range(30)) + END
        (folder / name).write_bytes(pack(body))
    return sorted(folder.iterdir())


def trained_keys(urls: list[str], cache: Path, **options: Any) -> tuple[list[str], Any]:
    defaults: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "train": False, "with_keys": True}
    with flat.make_loader(urls, cache_dir=cache, output="dict", **{**defaults, **options}) as loader:
        return [key for batch in loader for key in batch["__key__"]], loader.stats()


PACKED_KEYS = [f"{letter}-{number:02d}" for letter in "abcd" for number in range(30)]


def test_compressed_shards_come_from_s3_by_training_and_by_warm(tmp_path: Path) -> None:
    with S3Server() as s3:
        s3.create_bucket("bucket")
        urls = [s3.put("bucket", path.name, path.read_bytes()) for path in packed_shards(tmp_path)]
        storage = {"storage_options": s3.storage_options}
        keys, stats = trained_keys(urls, tmp_path / "cold", **storage)
        assert (keys, stats.shards_given_up) == (PACKED_KEYS, 0)
        report = warm(urls, cache_dir=tmp_path / "warm", cache_size="1GB", **storage)
        assert (report.shards_complete, report.failures) == (4, {})
        keys, stats = trained_keys(urls, tmp_path / "warm", **storage)
        assert (keys, stats.shards_published) == (PACKED_KEYS, 0)


def test_what_a_node_has_unpacked_others_read_from_the_shared_cache(tmp_path: Path) -> None:
    paths, shared = packed_shards(tmp_path), {"shared_cache": str(tmp_path / "shared"), "write_back": True}
    with ShardServer(tmp_path / "data") as server:
        urls = [f"{server.url}/{path.name}" for path in paths]
        report = warm(urls, cache_dir=tmp_path / "warm", cache_size="1GB", **shared)
        assert (report.shared_stored, report.failures, report.shared_failures) == (4, {}, {})
        requests = len(server.log)
        keys, stats = trained_keys(urls, tmp_path / "second", **shared)
        assert (keys, stats.shared_hits) == (PACKED_KEYS, 4)
        sent_bytes = sum(request.sent for request in server.log[requests:])
        assert sent_bytes <= 4  # at most a byte each, to ask for the version
        repacked = members(b"".join(sample(f"b-{number:02d}") for number in range(31)) + END)
        paths[1].write_bytes(repacked)  # another version: the shared copy is of the one before
        keys, _ = trained_keys(urls, tmp_path / "third", revalidate="start", **shared)
        assert sorted({*keys} - {*PACKED_KEYS}) == ["b-30"]
