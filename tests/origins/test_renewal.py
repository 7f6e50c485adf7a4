"""Credentials of S3 that end while shards are read: renewed beside the run, or not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import streamload
from streamload import Shards
from streamload.cache.shared.s3_store import S3Store
from streamload.cache.shared.store import Store
from streamload.errors import OriginDenied, OriginOutage
from streamload.origins import endpoints
from streamload.origins.origin import OriginOptions, open_origin
from streamload.testing.shards import write_shards
from tests.support.signed_s3 import Keys, SignedS3
from tests.support.tally import Tally

BODY = random.Random(1).randbytes(300_000)
OPTIONS = OriginOptions(
    attempts=3,
    connect_seconds=100.0,
    stall_seconds=100.0,
    first_get_bytes=20_000,
    quick_bytes_per_second=float("inf"),  # always in parallel ranges
    backoff_seconds=0.01,
    backoff_limit_seconds=0.1,
    first_part_bytes=20_000,
    part_limit_bytes=40_000,
    outage_seconds=600.0,
)


@pytest.fixture
def s3() -> Iterator[SignedS3]:
    with SignedS3() as server:
        for name in "abc":
            server.put("bucket", f"{name}.tar", BODY)
        yield server


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3: SignedS3) -> Iterator[Path]:
    """No credentials but those that a test gives, and nothing remembered of endpoints."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    end = endpoints.remember()
    yield tmp_path
    end()


def read(s3: SignedS3, name: str, options: OriginOptions = OPTIONS, counters: Tally | None = None) -> bytes:
    # fsspec keeps file systems by their options: the endpoint of each test tells them apart
    storage = {"endpoint_url": s3.endpoint}
    return b"".join(open_origin(f"s3://bucket/{name}.tar", storage, options, counters).open().chunks())


def put_into_environment(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in keys.environ().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("after", [1, 2, 3, 5, 9])
@pytest.mark.sampled(4)
def test_keys_of_a_rewritten_file_are_taken_at_whatever_request_the_old_ones_end(
    s3: SignedS3, home: Path, after: int
) -> None:
    def rotate() -> None:
        Keys(2).write_file(home / "credentials")
        s3.valid = {Keys(2)}

    Keys(1).write_file(home / "credentials")
    assert read(s3, "a") == BODY
    s3.call_after(after, rotate)
    tally = Tally()
    assert read(s3, "b", counters=tally) == BODY
    assert read(s3, "c") == BODY
    assert {exchange.access_key for exchange in s3.log[-5:]} == {"AK2"}
    assert 1 <= s3.codes()["ExpiredToken"] + s3.codes()["400"] <= 3  # two ranges may be under way
    assert tally["origin_retries"] == 0


@pytest.mark.parametrize(
    "refusal",
    [
        (400, "ExpiredToken"),
        (400, "InvalidToken"),
        (400, "TokenRefreshRequired"),
        (403, "InvalidAccessKeyId"),
        (403, "RequestExpired"),
        (401, "ExpiredToken"),
    ],
)
@pytest.mark.sampled(4)
def test_each_answer_to_keys_that_have_ended_makes_them_be_read_anew(
    s3: SignedS3, monkeypatch: pytest.MonkeyPatch, refusal: tuple[int, str]
) -> None:
    put_into_environment(Keys(1), monkeypatch)
    assert read(s3, "a") == BODY
    s3.refusal, s3.valid = refusal, {Keys(2)}
    put_into_environment(Keys(2), monkeypatch)
    assert read(s3, "b") == BODY


def test_keys_that_a_process_prints_are_asked_for_before_their_expiration(s3: SignedS3, home: Path) -> None:
    printed = home / "printed.json"
    (home / "config").write_text(f"[default]\ncredential_process = /bin/cat {printed}\n")
    Keys(1).write_process_output(printed)
    assert read(s3, "a") == BODY
    Keys(2).write_process_output(printed)
    s3.valid = {Keys(2)}
    assert read(s3, "b") == BODY


def test_keys_that_come_during_the_wait_cost_no_shard(
    s3: SignedS3, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Keys(1).write_file(home / "credentials")
    assert read(s3, "a") == BODY
    s3.valid = {Keys(2)}
    s3.call_after(20, lambda: Keys(2).write_file(home / "credentials"))
    assert read(s3, "b") == BODY
    (away, back) = (record.message for record in caplog.records)
    assert f"the token has expired (ExpiredToken); {home / 'credentials'} still has the same" in away
    assert "bucket is back" in back
    assert not any(keys.secret in away or keys.token in away for keys in (Keys(1), Keys(2)))


def test_a_file_that_is_empty_for_a_moment_costs_no_shard(s3: SignedS3, home: Path) -> None:
    Keys(1).write_file(home / "credentials")
    assert read(s3, "a") == BODY
    s3.valid = {Keys(2)}
    (home / "credentials").write_text("[default]\naws_access_key_id = AK2\n")
    s3.call_after(10, lambda: (home / "credentials").write_text(""))
    s3.call_after(20, lambda: Keys(2).write_file(home / "credentials"))
    assert read(s3, "b") == BODY


def test_without_new_keys_the_wait_ends_by_name(s3: SignedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    put_into_environment(Keys(1), monkeypatch)
    assert read(s3, "a") == BODY
    s3.valid = set()
    with pytest.raises(OriginOutage, match=r"the token has expired .*the environment.* still has the same"):
        read(s3, "b", replace(OPTIONS, outage_seconds=0.5))


def test_keys_that_have_ended_before_the_first_answer_end_the_run_at_once(
    s3: SignedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_into_environment(Keys(1), monkeypatch)
    s3.valid = set()
    with pytest.raises(OriginOutage, match=r"a\.tar: the token has expired \(ExpiredToken\)"):
        read(s3, "a")
    methods = [exchange.method for exchange in s3.log if "a.tar" in exchange.path]
    assert methods == ["GET"]


def test_a_training_without_limits_loses_no_shard_to_keys_that_have_ended(
    s3: SignedS3, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers fork before any of them has got anything: one may ask with the first keys, another late."""
    monkeypatch.setenv("STREAMLOAD_ORIGIN_WAIT", "1")
    put_into_environment(Keys(1), monkeypatch)
    urls = [s3.put("bucket", path.name, path.read_bytes()) for path in write_shards(home / "data", [3] * 6)]

    def end() -> None:
        s3.valid = set()

    s3.call_after(1, end)
    shards = Shards(text_key=None, max_bad_shards=None, max_bad_samples=None)
    with (
        pytest.raises(OriginOutage, match="the token has expired"),
        streamload.make_loader(
            urls, None, batch_size=2, num_workers=2, cache_dir=home / "cache", shards=shards
        ) as loader,
    ):
        list(loader)


def test_a_shard_that_is_denied_alone_is_not_waited_for(
    s3: SignedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_into_environment(Keys(1), monkeypatch)
    assert read(s3, "a") == BODY
    s3.denied.add("bucket/b.tar")
    with pytest.raises(OriginDenied, match=r"b\.tar"):
        read(s3, "b")
    assert read(s3, "c") == BODY


def test_an_empty_object_is_empty(s3: SignedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    put_into_environment(Keys(1), monkeypatch)
    s3.put("bucket", "empty.tar", b"")
    assert read(s3, "empty") == b""


@pytest.mark.parametrize("backend", [S3Store, Store])
def test_the_objects_of_a_shared_cache_are_read_with_new_keys(
    backend: type[Store], s3: SignedS3, home: Path
) -> None:
    s3.put("bucket", "tier/note", b"content")
    Keys(1).write_file(home / "credentials")
    store = backend("s3://bucket/tier", {"endpoint_url": s3.endpoint}, 10.0, None)
    assert store.read("note", 100) == b"content"
    Keys(2).write_file(home / "credentials")
    s3.valid = {Keys(2)}
    assert store.read("note", 100) == b"content"
    Keys(3).write_file(home / "credentials")
    s3.valid = {Keys(3)}
    assert store.modified("note") is not None
