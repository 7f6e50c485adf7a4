"""Each part of a URL is honoured, or refused by an error that names it: none is dropped in silence."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from streamload.errors import OptionError, OriginError, OriginNotFound, StreamloadError, UrlError
from streamload.origins import signing
from streamload.origins.origin import OriginOptions, open_origin
from streamload.origins.stores import StoreFiles, _refuse_lost_parts
from streamload.testing.server import ShardServer
from streamload.urls import expand_urls
from tests.support.signed_s3 import Keys, SignedS3

BODY = random.Random(1).randbytes(200_000)
OPTIONS = OriginOptions(attempts=2, backoff_seconds=0.01, first_get_bytes=50_000)


@pytest.fixture(autouse=True)
def no_memory() -> None:
    """Forget the credentials of other tests."""
    signing._accesses.clear()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[SignedS3]:
    with SignedS3() as server:
        for name, value in {**server.environ(), **Keys(1).environ()}.items():
            monkeypatch.setenv(name, value)
        for key in ("a.tar", "a.tar#x", "a.tar?x=1", "a b+%2F;p=1.tar"):
            server.put("bucket", key, key.encode() + BODY)
        yield server


def read(url: str, options: dict[str, Any] | None = None) -> bytes:
    (listed,) = expand_urls([url])
    return b"".join(open_origin(listed, options, OPTIONS).open().chunks())


@pytest.mark.parametrize("options", [{}, {"version_aware": True}, {"s3_additional_kwargs": {}}])
def test_a_version_of_an_object_is_read(options: dict[str, Any], s3: SignedS3) -> None:
    if "s3_additional_kwargs" in options:
        fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert read("s3://bucket/a.tar?versionId=3sL4kq.tJ_", options) == b"a.tar" + BODY
    gets = [exchange.path for exchange in s3.log if exchange.method == "GET" and exchange.status < 300]
    assert gets
    assert all("versionId=3sL4kq.tJ_" in path for path in gets)


@pytest.mark.parametrize("key", ["a.tar#x", "a.tar?x=1", "a b+%2F;p=1.tar"])
def test_what_looks_like_a_part_is_of_the_key_of_an_object(key: str, s3: SignedS3) -> None:
    assert read(f"s3://bucket/{key}") == key.encode() + BODY


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("s3://bucket/a.tar?versionId=", "version's number"),
        ("s3://bucket/a.tar?versionId=1&x=2", "version's number"),
        ("s3://bucket/a.tar?versionId=1#x", "version's number"),
        ("s3://key:secret@bucket/a.tar", "keys within"),
        ("gs://key:secret@bucket/a.tar", "keys within"),
        ("http://host/a.tar#x", "fragment"),
        ("https://host/a#1.tar?x=1", "fragment"),
        ("https://host:port/a.tar", "host, port"),
        ("file://host/a.tar", "names the host 'host'"),
    ],
)
def test_a_part_that_cannot_be_honoured_is_refused_by_its_name(url: str, named: str) -> None:
    pytest.importorskip("gcsfs") if url.startswith("gs") else None
    with pytest.raises(UrlError, match=named):
        expand_urls([url])


@pytest.mark.parametrize("url", ["s3://user@bucket/a.tar", "s3://bucket:80/a.tar", "s3://bucket"])
def test_a_bucket_with_other_parts_is_refused_by_its_name(url: str, s3: SignedS3) -> None:
    with pytest.raises(StreamloadError, match="bucket"):
        read(url)
    assert not [exchange for exchange in s3.log if exchange.status < 300]


def test_parts_of_a_web_url_are_sent(tmp_path: Path) -> None:
    (tmp_path / "a;p=1.tar").write_bytes(BODY)
    with ShardServer(tmp_path) as server:
        place = server.url.replace("http://", "http://me:pw@")
        assert read(f"{place}/a;p=1.tar?x=1&y=%2F") == BODY
        assert {request.headers["Authorization"] for request in server.log} == {"Basic bWU6cHc="}


@pytest.mark.parametrize("name", ["a.tar?x=1", "a.tar#x", "a;p=1.tar", "a%20b.tar", "me@host.tar"])
def test_what_looks_like_a_part_is_of_the_name_of_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "a.tar").write_bytes(b"another")
    assert read(f"file://{tmp_path}/{name}") == name.encode()
    assert read(f"pipe:cat '{tmp_path}/{name}'") == name.encode()
    fsspec.filesystem("memory").pipe(f"/parts/{name}", name.encode())
    assert read(f"memory://parts/{name}") == name.encode()


def test_a_part_of_a_name_on_the_hub_is_looked_for_as_such() -> None:
    files = fsspec.get_filesystem_class("hf")
    for name in ("a.tar?x=1", "a.tar#x", "a;p=1.tar"):
        assert files._strip_protocol(f"hf://datasets/owner/name/{name}") == f"datasets/owner/name/{name}"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hdfs://me@node:9000/a.tar", {"host": "node", "port": 9000, "user": "me"}),
        ("ftp://me:pw@host:99/a.tar", {"host": "host", "port": 99, "username": "me", "password": "pw"}),
        ("webhdfs://me@node:9000/a.tar", {"host": "node", "port": 9000, "user": "me"}),
    ],
)
def test_host_and_user_of_other_schemes_reach_their_file_system(
    url: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = fsspec.get_filesystem_class(url.partition(":")[0])
    seen: dict[str, Any] = {}
    monkeypatch.setattr(type(kind), "__call__", lambda _, **given: seen.update(given))
    StoreFiles(url, {"timeout": 3}).open()
    assert seen.items() >= {**expected, "timeout": 3}.items()


@pytest.mark.parametrize(
    ("url", "path", "part"),
    [
        ("ftp://host/a.tar?x=1", "/a.tar", "query"),
        ("abfs://container@account/a.tar#x", "container/a.tar", "fragment"),
        ("hdfs://host/a.tar?x=1#y", "/a.tar#y", "query"),
    ],
)
def test_a_part_that_a_file_system_drops_is_refused_by_its_name(url: str, path: str, part: str) -> None:
    with pytest.raises(UrlError, match=f"the {part} of"):
        _refuse_lost_parts(url, path)
    if url.startswith("ftp"):
        with pytest.raises(UrlError, match=f"the {part} of 'ftp://host/a.tar' would be lost"):
            open_origin(url, options=OPTIONS).open()


def test_a_ring_of_roles_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    roles = {"one": "two", "two": "one"}
    (tmp_path / "config").write_text(
        "".join(
            f"[profile {name}]\nrole_arn = arn:aws:iam::1:role/{name}\nsource_profile = {source}\n"
            for name, source in roles.items()
        )
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "one")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OptionError, match=r"Infinite loop.*one.*mend the AWS configuration"):
        read("s3://ring/a.tar")


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("SECRET", "isn't a JSON object"),
        ("[1]", "isn't a JSON object"),
        ('{"Version": 2, "SecretAccessKey": "SECRET"}', "Unsupported version '2'"),
        ('{"Version": 1, "SecretAccessKey": "SECRET"}', "'AccessKeyId'"),
        (None, "No such file"),
    ],
)
def test_nonsense_of_a_credential_process_names_the_program(
    output: str | None, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "give-keys"
    if output is not None:
        program.write_text(f"#!/bin/sh\necho '{output}'\n")
        program.chmod(0o755)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {program} --password SECRET\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OriginError, match="the credential_process give-keys") as caught:
        read(f"s3://nonsense/{problem[:3].strip()}.tar")
    assert problem in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_an_odd_region_in_an_answer_spoils_no_other_request(s3: SignedS3) -> None:
    s3.region, s3.elsewhere = "..", 301
    with pytest.raises(OriginError, match="301"):
        read("s3://bucket/a.tar")
    s3.region = "nowhere-1"  # a region that can be signed for, and is wrong
    assert read("s3://bucket/a.tar") == b"a.tar" + BODY
    s3.region = "us-east-1"
    assert read("s3://bucket/a.tar") == b"a.tar" + BODY


def test_a_clock_that_is_wrong_is_named(s3: SignedS3) -> None:
    s3.valid, s3.refusal = set(), (403, "RequestTimeTooSkewed")
    with pytest.raises(
        OriginError, match=r"the clock of this machine says .* GMT and the store's .* GMT: set"
    ):
        read("s3://bucket/a.tar")
    assert len(s3.log) == 1


def test_an_object_that_is_missing_is_said_to_be_so_whatever_its_parts(s3: SignedS3) -> None:
    with pytest.raises(OriginNotFound):
        read("s3://bucket/b.tar?versionId=1")
