"""`streamload warm` and `streamload cache` on a real server and a real tier."""

import io
import json
import os
import sys

import pytest

from examples.photograph_shards import write_photograph_shards
from streamload.cache.locks import FileLock
from streamload.cache.tier import Tier
from streamload.cli import main
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from tests.support.tiers import Filled, flip, listing, payload_start

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
    before = listing(tmp_path / "tier")
    listed(streamload, tmp_path / "tier")
    assert listing(tmp_path / "tier") == before


def test_a_url_with_a_password_is_not_shown(shards, streamload, tmp_path):
    with ShardServer(shards) as server:
        url = f"{server.url}/00000.tar?X-Amz-Signature=hush"
        streamload("warm", url, "--cache-dir", tmp_path / "tier", "--cache-size", "1GB")
    code, out, _ = streamload("cache", "ls", "--json", "--cache-dir", tmp_path / "tier")
    assert code == 0
    assert "00000.tar" in out
    assert "hush" not in out


@pytest.fixture
def held(shards, streamload, tmp_path):
    """A tier that holds all shards, and the server that they came from."""
    with ShardServer(shards) as server:
        urls = f"{server.url}/{{00000..{SHARDS - 1:05d}}}.tar"
        streamload("warm", urls, "--cache-dir", tmp_path / "tier", "--cache-size", "1GB")
        yield server, tmp_path / "tier"


def damage_one(tier):
    """Flip a bit of the first shard's data; gives the digest."""
    shard = sorted((tier / "shards").iterdir())[0]
    flip(shard / "data", payload_start(shard, 1))
    return shard.name


def test_cache_stat_tells_how_full_the_cache_is(held, streamload):
    _, tier = held
    (tier / "notes.txt").write_text("mine")
    before = listing(tier)
    code, out, _ = streamload("cache", "stat", "--json", "--cache-dir", tier)
    assert code == 0
    report = json.loads(out)
    assert report["published"]["count"] == SHARDS
    assert report["samples"] == SHARDS * SAMPLES
    assert report["used_bytes"] == report["published"]["size_bytes"] > 0
    assert report["limit_bytes"] == 10**9
    assert report["foreign"] == [{"path": str(tier / "notes.txt"), "what": "a file"}]
    code, out, _ = streamload("cache", "stat", "--cache-dir", tier)
    assert code == 0
    assert "of at most 1.0 GB" in out
    assert f"not part of the cache, left alone: {tier / 'notes.txt'} (a file)" in out
    assert any(line.split()[:3] == ["published", "shards", str(SHARDS)] for line in out.splitlines())
    assert listing(tier) == before


def test_cache_verify_says_that_all_is_good(held, streamload):
    _, tier = held
    code, out, err = streamload("cache", "verify", "--cache-dir", tier)
    assert (code, err.strip()) == (0, "")  # older richs end their bar with a line, shown or not
    assert f"{SHARDS} shards and 0 parts with {SHARDS * SAMPLES} samples" in out
    assert "no damage" in out
    code, out, _ = streamload("cache", "verify", "--json", "--jobs", "3", "--cache-dir", tier)
    report = json.loads(out)
    assert code == 0
    assert report["read_bytes"] > 0
    assert report | {"read_bytes": 0} == {
        "cache_dir": str(tier),
        "shards": SHARDS,
        "parts": 0,
        "gone": 0,
        "samples": SHARDS * SAMPLES,
        "read_bytes": 0,
        "bad_facts": 0,
        "bad": [],
        "foreign": [],
    }


def test_cache_verify_fails_with_what_is_bad_and_mends_it_on_request(held, streamload):
    server, tier = held
    digest = damage_one(tier)
    code, out, _ = streamload("cache", "verify", "--cache-dir", tier)
    assert code == 1
    assert "fails its checksum" in out
    assert "1 damaged" in out
    assert (tier / "shards" / digest).exists()
    code, out, _ = streamload("cache", "verify", "--repair", "--json", "--cache-dir", tier)
    (bad,) = json.loads(out)["bad"]
    assert code == 0
    assert (bad["digest"], bad["taken_out"], bad["repaired"]) == (digest, True, True)
    assert bad["url"].startswith(server.url)
    assert streamload("cache", "verify", "--cache-dir", tier)[0] == 0


def test_cache_verify_fails_if_what_is_bad_cannot_be_fetched_again(held, streamload):
    server, tier = held
    damage_one(tier)
    server.misbehave("*", Fault(status=403))
    code, out, _ = streamload("cache", "verify", "--repair", "--cache-dir", tier)
    assert code == 1
    assert "not fetched again" in out
    assert "1 damaged" in out
    assert streamload("cache", "verify", "--cache-dir", tier)[0] == 0  # what is there is good


def test_cache_verify_fetches_by_the_urls_that_it_is_given(shards, streamload, tmp_path):
    tier = tmp_path / "tier"
    with ShardServer(shards) as server:
        urls = f"{server.url}/{{00000..{SHARDS - 1:05d}}}.tar?version=2"
        streamload("warm", urls, "--cache-dir", tier, "--cache-size", "1GB")
        damage_one(tier)
        code, out, _ = streamload("cache", "verify", "--repair", urls, "--cache-dir", tier)
        assert code == 0
        assert "fetched again" in out
    assert streamload("cache", "verify", "--cache-dir", tier)[0] == 0


def test_cache_gc_removes_garbage_and_evicts_down_to_a_limit(held, streamload):
    _, tier = held
    trash = tier / "trash" / f"{'d' * 32}.00000000"
    trash.mkdir()
    (trash / "data").write_bytes(bytes(4097))
    code, out, _ = streamload("cache", "gc", "--dry-run", "--json", "--cache-dir", tier)
    report = json.loads(out)
    assert code == 0
    assert (report["dry_run"], report["removed_bytes"]) == (True, 8192)
    assert trash.exists()
    code, out, _ = streamload("cache", "gc", "--kind", "prepared", "--cache-dir", tier)
    assert code == 0
    assert "removed 1 items, 8.2 KB" in out
    assert f"trash/{trash.name}" in out
    assert not trash.exists()
    used = listed(streamload, tier)["used_bytes"]
    code, out, _ = streamload("cache", "gc", "--limit", str(used - 1), "--json", "--cache-dir", tier)
    report = json.loads(out)
    assert code == 0
    assert [item["why"] for item in report["removed"]] == ["over the limit"]
    assert report["used_bytes"] == used - report["removed_bytes"] == listed(streamload, tier)["used_bytes"]
    assert listed(streamload, tier)["limit_bytes"] == used - 1


def test_cache_gc_with_a_limit_that_is_none_fails(held, streamload):
    _, tier = held
    code, _, err = streamload("cache", "gc", "--limit", "much", "--cache-dir", tier)
    assert code == 2
    assert "--limit='much' is not a size" in err
    for kind in ("shards", "prepared", "columns"):
        code, _, err = streamload("cache", "gc", "--limit", "1KB", "--kind", kind, "--cache-dir", tier)
        assert code == 2
        assert "--limit is of the whole cache" in err
    assert len(listed(streamload, tier)["shards"]) == SHARDS


def test_cache_clear_asks_on_a_terminal_and_elsewhere_wants_to_be_told(held, streamload, monkeypatch):
    _, tier = held
    code, _, err = streamload("cache", "clear", "--cache-dir", tier)
    assert code == 2
    assert "say --yes" in err
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    code, _, err = streamload("cache", "clear", "--cache-dir", tier)
    assert code == 1
    assert f"Remove {SHARDS} items" in err
    assert len(listed(streamload, tier)["shards"]) == SHARDS
    code, out, _ = streamload("cache", "clear", "--dry-run", "--cache-dir", tier)
    assert code == 0
    assert f"would remove {SHARDS} items" in out
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert streamload("cache", "clear", "--cache-dir", tier)[0] == 0
    assert listed(streamload, tier) == {
        "cache_dir": str(tier),
        "used_bytes": 0,
        "limit_bytes": 10**9,
        "rows_bytes": 0,
        "shards": [],
    }


def test_cache_clear_says_what_stays_because_it_is_in_use(held, streamload):
    _, tier = held
    shard = sorted((tier / "shards").iterdir())[0]
    reader = FileLock.acquire(shard / "names", shared=True)
    code, out, _ = streamload("cache", "clear", "--yes", "--cache-dir", tier)
    assert code == 0
    assert "a process has it open" in out
    assert f"removed {SHARDS - 1} items" in out
    reader.close()
    code, out, _ = streamload("cache", "clear", "--yes", "--json", "--cache-dir", tier)
    assert [item["path"] for item in json.loads(out)["removed"]] == [f"shards/{shard.name}"]


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "clear"])
def test_a_directory_that_is_no_cache_is_an_error_and_stays_as_it_is(command, streamload, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    code, _, err = streamload("cache", command, "--cache-dir", tmp_path)
    assert code == 2
    assert "there is no streamload cache" in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


class Terminal(io.StringIO):
    """What a user types."""

    def isatty(self):
        return True


def test_cache_ls_and_stat_show_an_index_without_data_as_what_it_is(streamload, tmp_path):
    filled = Filled(tmp_path)
    try:
        filled.index_only(1)
        states = {row["url"]: row["state"] for row in listed(streamload, filled.root)["shards"]}
        assert states[filled.urls[1]] == "index only"
        assert sorted(states.values())[:-1] == ["complete"] * (len(filled.urls) - 1)
        _, out, _ = streamload("cache", "stat", "--cache-dir", filled.root)
        assert any(line.split()[:4] == ["indexes", "without", "data", "1"] for line in out.splitlines())
    finally:
        filled.close()


def test_a_cache_in_memory_is_found_listed_and_cleared_as_any_other(
    shards, streamload, shm, tmp_path, monkeypatch
):
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "disk"))
    root = shm / f"streamload-{os.geteuid()}"
    with ShardServer(shards) as server:
        urls = f"{server.url}/{{00000..{SHARDS - 1:05d}}}.tar"
        code, out, err = streamload("warm", urls, "--cache", "memory", "--memory-size", "100MB")
    assert code == 0, err
    assert f"{SHARDS} of {SHARDS} shards are in {root}" in out
    assert listed(streamload, root)["limit_bytes"] == 10**8
    code, _, err = streamload("cache", "ls")  # the one on disk was meant
    assert code == 2
    assert f"but one at {root}: --cache-dir={root}" in err
    for where in ("memory", "auto"):
        monkeypatch.setenv("STREAMLOAD_CACHE", where)
        code, out, _ = streamload("cache", "ls", "--json")
        assert code == 0
        assert len(json.loads(out)["shards"]) == SHARDS
    Tier(tmp_path / "disk", 10**9)
    assert json.loads(streamload("cache", "ls", "--json")[1])["cache_dir"] == str(tmp_path / "disk")
    monkeypatch.setenv("STREAMLOAD_CACHE", "memory")
    assert streamload("cache", "clear", "--yes")[0] == 0
    assert json.loads(streamload("cache", "ls", "--json")[1])["shards"] == []
