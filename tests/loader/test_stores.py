"""Shards in S3: a real server's buckets, by s3:// and by the aws command; endpoints are never mixed."""

from __future__ import annotations

import collections
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload.testing.shards import read_oracle, write_shards
from tests.support import flat
from tests.support.s3 import S3Server

COUNTS = [12, 30, 7]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[S3Server, list[Path]]]:
    paths = write_shards(tmp_path_factory.mktemp("s3"), COUNTS, seed=21)
    with S3Server() as server:
        server.create_bucket("shards")
        for path in paths:
            server.put("shards", path.name, path.read_bytes(), public=True)
        yield server, paths


def keys(loader: streamload.Loader) -> list[str]:
    with loader:
        return sorted(key for _, _, origin in loader for key in origin["__key__"])


def make(urls: str, cache: Path, **options: Any) -> streamload.Loader:
    return flat.make_loader(
        urls, batch_size=1, num_workers=2, with_keys=True, cache_dir=cache, cache_size="1GB", **options
    )


def oracle(paths: list[Path]) -> list[str]:
    return sorted(key for path in paths for key, _ in read_oracle(path))


URLS = "s3://shards/{00000..00002}.tar"


def test_a_custom_endpoint_and_the_second_epoch_from_disk(
    s3: tuple[S3Server, list[Path]], tmp_path: Path
) -> None:
    server, paths = s3
    loader = make(URLS, tmp_path, storage_options=server.storage_options)
    first = [key for _, _, origin in loader for key in origin["__key__"]]
    fetched = loader.stats().origin_bytes
    assert fetched == sum(path.stat().st_size for path in paths)
    second = keys(loader)
    assert sorted(first) == second == oracle(paths)
    assert loader.stats().origin_bytes == fetched


def test_a_public_bucket_needs_no_credentials(
    s3: tuple[S3Server, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, paths = s3
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    options = {"endpoint_url": server.endpoint, "anon": True}
    assert keys(make(URLS, tmp_path / "cache", storage_options=options)) == oracle(paths)


@pytest.mark.skipif(
    shutil.which("aws") is None and not (Path(sys.executable).parent / "aws").exists(),
    reason="the aws command isn't installed here",
)
@pytest.mark.parametrize("behind", ["", " | cat"], ids=["opened natively", "run"])
@pytest.mark.deep
def test_the_aws_command_in_a_pipe(
    behind: str, s3: tuple[S3Server, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, paths = s3
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert keys(make(f"pipe:aws s3 cp {URLS} -{behind}", tmp_path)) == oracle(paths)


@pytest.mark.deep
def test_a_missing_object_and_a_wrong_key_are_typed(s3: tuple[S3Server, list[Path]], tmp_path: Path) -> None:
    server, _ = s3
    options = {"storage_options": server.storage_options, "on_error": "raise"}
    with pytest.raises(streamload.errors.OriginNotFound, match=r"s3://shards/nothing\.tar"):
        keys(make("s3://shards/nothing.tar", tmp_path, **options))
    with pytest.raises(streamload.errors.OriginNotFound):
        keys(make("s3://no-such-bucket/00000.tar", tmp_path, **options))


@pytest.mark.deep
def test_two_endpoints_with_equal_keys_are_never_mixed(
    s3: tuple[S3Server, list[Path]], tmp_path: Path
) -> None:
    server, paths = s3
    others = write_shards(tmp_path / "other", [9, 4, 5], seed=22)
    with S3Server() as other:
        other.create_bucket("shards")
        for path in others:
            other.put("shards", path.name, path.read_bytes())
        seen = collections.Counter[str]()
        for endpoint in (server, other, server):
            seen.update(keys(make(URLS, tmp_path / "cache", storage_options=endpoint.storage_options)))
        assert seen == collections.Counter(oracle(paths) * 2 + oracle(others))
