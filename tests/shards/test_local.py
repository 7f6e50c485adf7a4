"""Local tars: the same entries as a full scan, without reading the payloads."""

import errno
import os
import resource

import pytest

from streamload.errors import DatasetChanged, OriginError, OriginNotFound, ShardCut, ShardFormatError
from streamload.shards.index import LocalVersion
from streamload.shards.local import index_local
from streamload.shards.samples import ShardScanner
from streamload.testing.shards import ShardOptions, write_shards


@pytest.fixture
def shard(tmp_path):
    options = ShardOptions(padding_bytes=(0, 60_000), extra={"bin": bytes(100_000), "cls": b""})
    (path,) = write_shards(tmp_path, [150], options=options)
    return path


def indexed(path, warnings=None):
    return [entry for entries in index_local(path, warnings) for entry in entries]


def test_entries_are_those_of_a_full_scan_without_checksums(shard):
    scanner = ShardScanner()
    scanned = [entry._replace(checksum=None) for entry in scanner.feed(shard.read_bytes())]
    warnings = []
    assert indexed(shard, warnings) == scanned
    assert len(scanned) == 150
    assert warnings == []


def test_payloads_are_not_read(shard, monkeypatch):
    read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: read.append(n) or pread(fd, n, at))
    indexed(shard)
    assert sum(read) < shard.stat().st_size / 3


@pytest.mark.parametrize("cut", [512 * 7 + 100, 150_000, 1])
def test_a_cut_file_fails_and_is_named(shard, cut):
    os.truncate(shard, shard.stat().st_size - 10_240 * 2 - cut)
    with pytest.raises(ShardCut, match=f"{shard}.*cut"):
        indexed(shard)


def test_a_file_without_end_marker_gives_a_warning(shard):
    last = indexed(shard)[-1]
    os.truncate(shard, last.stop + -last.stop % 512)
    warnings = []
    assert indexed(shard, warnings)[-1] == last
    assert ["no end marker" in warning for warning in warnings] == [True]


def test_a_file_that_is_written_over_meanwhile_fails(shard):
    found = index_local(shard)
    next(found)
    os.utime(shard, ns=(1, 1))  # it has its size
    with pytest.raises(DatasetChanged, match="it was written to while it was indexed"):
        list(found)


def test_a_file_that_is_written_to_meanwhile_fails(shard):
    found = index_local(shard)
    next(found)
    with shard.open("ab") as file:
        file.write(b"more")
    with pytest.raises(DatasetChanged, match="written to"):
        list(found)


def test_a_file_that_is_replaced_meanwhile_is_indexed_as_it_was(shard):
    before, whole, opened = LocalVersion.of(shard), indexed(shard), []
    found = index_local(shard, opened=opened.append)
    first = next(found)
    shard.with_name("fresh").write_bytes(b"another")
    shard.with_name("fresh").rename(shard)
    assert first + [entry for some in found for entry in some] == whole
    assert opened == [before]


def test_what_is_no_tar_fails(tmp_path):
    with pytest.raises(OriginNotFound, match="no such file"):
        indexed(tmp_path / "missing.tar")
    with pytest.raises(OriginError, match="regular file"):
        indexed(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OriginError, match="regular file"):
        indexed(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    with pytest.raises(ShardFormatError, match="empty"):
        indexed(tmp_path / "empty")
    (tmp_path / "page").write_text("<html>")
    with pytest.raises(ShardFormatError, match=r"page.*web page"):
        indexed(tmp_path / "page")


def test_where_too_many_files_are_open_it_is_not_the_shard_that_cannot_be_had(shard):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), limits[1]))
        try:
            with pytest.raises(OSError) as raised:
                indexed(shard)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert raised.value.errno == errno.EMFILE
    assert not isinstance(raised.value, OriginError)
    assert len(indexed(shard)) == 150


def test_a_version_changes_with_the_file(shard):
    before = LocalVersion.of(shard)
    assert LocalVersion.of(shard) == before
    os.utime(shard, ns=(1, 1))
    assert LocalVersion.of(shard) != before


def test_damage_costs_no_sample_in_front_of_it(shard):
    """However near, and though a file is read by pieces larger than a header."""
    data = bytearray(shard.read_bytes())
    whole = indexed(shard)
    for number in (1, 2, 17, len(whole) - 1):
        broken = shard.with_name("broken.tar")
        broken.write_bytes(data[: whole[number].start - 512] + b"x" * 512 + data[whole[number].start :])
        found, entries = [], index_local(broken)
        with pytest.raises(ShardFormatError, match=r"broken\.tar: the tar is damaged at byte"):
            found.extend(some for some in entries)
        found = [entry for some in found for entry in some]
        assert found == whole[: number - 1]  # the one before isn't known to be whole
