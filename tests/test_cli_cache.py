"""`streamload warm` and `streamload cache ls` on a real server and a real tier."""

import json
import sys

import pytest

from streamload.cli import main
from streamload.testing.photographs import write_photograph_shards
from streamload.testing.server import ShardServer

SHARDS, SAMPLES = 3, 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shards")
    write_photograph_shards(directory, SHARDS * SAMPLES, SAMPLES)
    return directory


@pytest.fixture
def streamload(capsys, monkeypatch):
    """Run a command; gives its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["streamload", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        try:
            main()
        except SystemExit as exc:
            return exc.code or 0, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def listed(streamload, tier):
    code, out, _ = streamload("cache", "ls", "--json", "--cache-dir", tier)
    assert code == 0
    return json.loads(out)


def test_warm_fills_a_tier_once_and_cache_ls_shows_it(shards, streamload, tmp_path):
    with ShardServer(shards) as server:
        urls = f"{server.url}/{{00000..{SHARDS - 1:05d}}}.tar"
        code, out, err = streamload("warm", urls, "--cache-dir", tmp_path / "tier", "--cache-size", "1GB")
        assert code == 0, err
        assert f"{SHARDS} of {SHARDS} shards are in" in out
        requests = len(server.log)
        code, out, err = streamload("warm", urls, "--cache-dir", tmp_path / "tier", "--cache-size", "1GB")
        assert code == 0, err
        assert f"({SHARDS} were before), 0 B arrived" in out
        assert len(server.log) == requests
    report = listed(streamload, tmp_path / "tier")
    assert report["limit_bytes"] == 10**9
    assert 0 < report["used_bytes"] < 10**9
    sizes = {f"{server.url}/{path.name}": path.stat().st_size for path in shards.glob("*.tar")}
    found = {row["url"]: row for row in report["shards"]}
    assert {url: row["size_bytes"] for url, row in found.items()} == sizes
    assert {(row["state"], row["samples"]) for row in found.values()} == {("complete", SAMPLES)}


def test_cache_ls_prints_a_table(shards, streamload, tmp_path):
    with ShardServer(shards) as server:
        streamload("warm", f"{server.url}/00000.tar", "--cache-dir", tmp_path / "tier", "--cache-size", "1GB")
    code, out, _ = streamload("cache", "ls", "--cache-dir", tmp_path / "tier")
    assert code == 0
    assert f"{server.url}/00000.tar" in out
    assert "complete" in out
    assert f"1 shards in {tmp_path / 'tier'}" in out
    assert "of at most 1.0 GB" in out


def test_warm_fails_naming_the_shard_that_is_not_there_and_keeps_the_others(shards, streamload, tmp_path):
    with ShardServer(shards) as server:
        urls = (f"{server.url}/00000.tar", f"{server.url}/99999.tar")
        code, out, _ = streamload("warm", *urls, "--cache-dir", tmp_path / "tier", "--cache-size", "1GB")
    assert code == 1
    assert "1 of 2 shards are in" in out
    assert "99999.tar: " in out
    complete = [
        row["url"] for row in listed(streamload, tmp_path / "tier")["shards"] if row["state"] == "complete"
    ]
    assert complete == [urls[0]]


def test_looking_at_a_cache_changes_nothing(shards, streamload, tmp_path):
    with ShardServer(shards) as server:
        streamload("warm", f"{server.url}/00000.tar", "--cache-dir", tmp_path / "tier", "--cache-size", "1GB")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "tier").rglob("*")}
    listed(streamload, tmp_path / "tier")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "tier").rglob("*")} == before


def test_a_url_with_a_password_is_not_shown(shards, streamload, tmp_path):
    with ShardServer(shards) as server:
        url = f"{server.url}/00000.tar?X-Amz-Signature=hush"
        streamload("warm", url, "--cache-dir", tmp_path / "tier", "--cache-size", "1GB")
    code, out, _ = streamload("cache", "ls", "--json", "--cache-dir", tmp_path / "tier")
    assert code == 0
    assert "00000.tar" in out
    assert "hush" not in out
