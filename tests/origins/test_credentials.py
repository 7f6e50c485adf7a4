"""Credentials go to places that the user named, and plans lead to no address of this network."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamload.daemon.warm import warm
from streamload.errors import OptionError, OriginDenied, OriginError
from streamload.origins import access
from streamload.origins.access import (
    granted,
    headers_for,
    refuse_address,
    refuse_host,
    warn_of_shared_headers,
)
from streamload.origins.origin import OriginOptions, open_origin
from streamload.origins.protocol import Named
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.urls import expand_urls, origin_of

QUICK = OriginOptions(attempts=1, connect_seconds=2.0, stall_seconds=1.0)
NOBODY = Named()
TOKEN = {"Authorization": "Bearer S3CRET"}


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[ShardServer, ShardServer]]:
    (tmp_path / "a.tar").write_bytes(b"a" * 1000)
    with ShardServer(tmp_path) as one, ShardServer(tmp_path) as other:
        yield one, other


def read(url: str, storage: Any = None, named: Named | None = None) -> bytes:
    return b"".join(open_origin(url, storage, QUICK, named=named).open().chunks())


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://Host.example:443/x/a.tar?y=1", "https://host.example"),
        ("http://me:pw@host.:8000/a.tar", "http://host:8000"),
        ("http://[::1]:80/a.tar", "http://[::1]"),
        ("s3a://bucket/x/a.tar", "s3://bucket"),
        ("s3://k:s@bucket/a.tar?versionId=1", "s3://bucket"),
        ("abfs://c@account.dfs.core.windows.net/a.tar", "abfs://c@account.dfs.core.windows.net"),
        ("hf://datasets/owner/name@main/x/a.tar", "hf://datasets/owner/name"),
        ("hf://owner/name/x/a.tar", "hf://owner/name"),
        (r"http://trusted\@evil.example/a.tar", "http://evil.example"),
        (r"http://trusted\.evil/a.tar", ""),
        ("http://trusted%2eevil/a.tar", ""),
        ("pipe:curl https://host/a.tar", ""),
        ("/data/a.tar", ""),
    ],
)
def test_whom_credentials_for_a_url_belong_to(url: str, origin: str) -> None:
    assert origin_of(url) == origin


REFUSED = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "0.0.0.0", "224.0.0.1", "240.0.0.1",
    "192.0.2.1", "::1", "::", "::ffff:10.0.0.1", "::7f00:1", "fc00::1", "fec0::1", "ff02::1",
    "64:ff9b::a00:1", "64:ff9b:1::a00:1", "2002:a00:1::", "2001:0:a00:1::",
]  # fmt: skip
METADATA = [
    "169.254.169.254", "fe80::1%eth0", "168.63.129.16", "100.100.100.200", "fd00:ec2::254",
    "::ffff:169.254.169.254", "2002:a9fe:a9fe::1", "64:ff9b::a9fe:a9fe", "64:ff9b::a83f:8110", "::a9fe:a9fe",
]  # fmt: skip


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_is_not_public_is_refused_unless_the_user_named_the_host(address: str) -> None:
    with pytest.raises(OriginDenied, match="--origin http://host:81"):
        refuse_address("host", 81, address, NOBODY)
    with pytest.raises(OriginDenied):  # another port is another server
        refuse_address("host", 81, address, Named.of(["http://host", "s3://host"]))
    refuse_address("Host.", 81, address, Named.of(["http://host:81"]))
    refuse_address("host", 81, address, None)


@pytest.mark.parametrize("address", METADATA)
@pytest.mark.parametrize("named", [None, NOBODY, Named.of(["http://host:80"])])
def test_a_metadata_service_is_refused_whoever_named_it(address: str, named: Named | None) -> None:
    with pytest.raises(OriginDenied, match="a cloud's credentials"):
        refuse_address("host", 80, address, named)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "2002:808:808::", "64:ff9b::808:808"]
)
def test_a_public_address_is_not_refused(address: str) -> None:
    refuse_address("host", 80, address, NOBODY)


@pytest.mark.parametrize("host", ["127.0.0.1.", "2130706433", "0x7f.1", "0177.0.0.1", "[::1]", "127.1"])
def test_an_address_is_known_in_any_notation(host: str) -> None:
    with pytest.raises(OriginDenied):
        refuse_host(host, 80, NOBODY)
    refuse_host("name.example", 80, NOBODY)


def test_what_a_name_means_is_looked_at_where_it_is_connected_to(
    servers: tuple[ShardServer, ShardServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = servers
    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: known("127.0.0.1", *a, **k))
    url = server.url.replace("127.0.0.1", "public.example") + "/a.tar"
    with pytest.raises(OriginDenied, match=r"public\.example is at 127\.0\.0\.1"):
        read(url, None, NOBODY)
    assert server.log == []
    assert len(read(url, None, Named.of([server.url.replace("127.0.0.1", "public.example")]))) == 1000


def test_parallel_ranges_are_refused_where_the_host_has_another_address_by_then(
    servers: tuple[ShardServer, ShardServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = servers
    known, public = socket.getaddrinfo, iter([True])
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: known("127.0.0.1", *a, **k))
    monkeypatch.setattr(access, "_is_public", lambda ip: next(public, False))
    url = server.url.replace("127.0.0.1", "public.example") + "/a.tar"
    ranges = replace(
        QUICK, first_get_bytes=100, first_part_bytes=100, quick_bytes_per_second=float("inf"), attempts=1
    )
    stream = open_origin(url, None, ranges, named=NOBODY).open()
    with pytest.raises(OriginError, match=r"public\.example is at 127\.0\.0\.1"):
        b"".join(stream.chunks())
    assert len(server.log) == 1


def test_a_redirect_of_a_named_host_leads_to_no_host_that_is_not_named(
    servers: tuple[ShardServer, ShardServer],
) -> None:
    server, other = servers
    server.misbehave("a.tar", Fault(status=302, headers={"Location": f"{other.url}/a.tar"}))
    with pytest.raises(OriginDenied, match="--origin"):
        read(f"{server.url}/a.tar", {"headers": TOKEN}, Named.of([server.url]))
    assert other.log == []
    assert read(f"{server.url}/a.tar", {"headers": TOKEN}, Named.of([server.url, other.url]))
    assert "Authorization" not in other.log[-1].headers


def test_a_proxy_is_not_made_to_lead_there_either(
    servers: tuple[ShardServer, ShardServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, other = servers
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", proxy.url)
    for host in ("127.0.0.1", "2130706433", "localhost"):
        with pytest.raises(OriginDenied, match="--origin"):
            read(other.url.replace("127.0.0.1", host) + "/a.tar", None, NOBODY)
    assert proxy.log == []
    read("http://public.invalid/a.tar", None, NOBODY)  # the proxy itself may be anywhere
    assert proxy.log


def test_a_plan_that_names_a_place_gets_no_options_but_the_endpoint() -> None:
    secrets = {"headers": TOKEN, "key": "K", "secret": "S", "token": "T", "profile": "p", "session": object()}
    client = {"endpoint_url": "http://near:9000", "region_name": "r", "aws_secret_access_key": "S"}
    given = {**secrets, "endpoint_url": "http://near:9000", "client_kwargs": client, "config_kwargs": {}}
    kept = {
        "endpoint_url": "http://near:9000",
        "client_kwargs": {"endpoint_url": "http://near:9000", "region_name": "r"},
    }
    assert granted("https://h/a.tar", given, NOBODY) == {}
    assert granted("s3://b/a.tar", given, NOBODY) == {**kept, "anon": True}
    assert granted("gs://b/a.tar", given, NOBODY) == {**kept, "token": "anon"}
    assert granted("hf://datasets/o/n/a.tar", given, NOBODY) == {**kept, "token": False}
    for url in ("az://c/a.tar", "abfs://c@account/a.tar"):
        with pytest.raises(OriginDenied, match="--origin"):
            granted(url, given, NOBODY)
    named = Named.of(["https://h", "s3://b", "hf://datasets/o/n"])
    for url in ("https://h/a.tar", "s3://b/a.tar", "hf://datasets/o/n@v1/a.tar"):
        assert granted(url, given, named) == given
    for url in ("https://h:8443/a.tar", "http://h/a.tar", "s3://c/a.tar", "hf://datasets/o/other/a.tar"):
        assert "S" not in granted(url, given, named).values()
    assert granted("s3://any/a.tar", given, None) == given


def test_headers_are_for_the_host_that_they_are_under() -> None:
    headers = {
        "X-All": "1",
        "https://one.example": {"Authorization": "one", "x-all": "2"},
        "two.example": {"Authorization": "two"},
        "three.example:8443": {"Authorization": "three"},
    }
    assert headers_for("https://one.example/a.tar", headers) == {"Authorization": "one", "x-all": "2"}
    assert headers_for("http://one.example/a.tar", headers) == {"X-All": "1"}
    assert headers_for("http://TWO.example:81/a.tar", headers)["Authorization"] == "two"
    assert headers_for("https://three.example:8443/a.tar", headers)["Authorization"] == "three"
    assert headers_for("https://three.example/a.tar", headers) == {"X-All": "1"}
    assert headers_for("https://two.example.evil/a.tar", headers) == {"X-All": "1"}
    assert headers_for("https://one.example/a.tar", None) == {}


def test_each_of_two_hosts_sees_its_own_header(servers: tuple[ShardServer, ShardServer]) -> None:
    own = {server.url: {"X-Key": f"of {number}"} for number, server in enumerate(servers)}
    for server in servers:
        read(f"{server.url}/a.tar", {"headers": own})
    assert [server.log[0].headers["X-Key"] for server in servers] == ["of 0", "of 1"]


@pytest.mark.parametrize(
    ("urls", "headers", "warned"),
    [
        ("https://h/{0..9}.tar", TOKEN, False),
        (["https://h/a.tar", "https://h:443/b.tar", "s3://b/a.tar", "/data/a.tar"], TOKEN, False),
        ("https://h{1..2}/a.tar", TOKEN, True),
        (["https://h/a.tar", "http://h/a.tar"], TOKEN, True),
        (["https://h/a.tar", "hf://datasets/o/n/a.tar"], TOKEN, True),
        ("https://h{1..2}/a.tar", {"User-Agent": "me"}, False),
        ("https://h{1..2}/a.tar", {"https://h1": TOKEN}, False),
        ("https://h{1..2}/a.tar", None, False),
    ],
)
def test_a_header_for_several_hosts_is_warned_of(
    urls: Any, headers: Any, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="streamload"):
        warn_of_shared_headers(expand_urls(urls), {"headers": headers})
    assert ("Authorization" in caplog.text and "headers" in caplog.text) is warned
    assert "S3CRET" not in caplog.text


def test_a_warm_up_of_two_hosts_warns_and_the_header_goes_to_both(
    servers: tuple[ShardServer, ShardServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warm([f"{s.url}/a.tar" for s in servers], cache_dir=tmp_path / "tier", storage_options={"headers": TOKEN})
    assert sum("Authorization" in record.getMessage() for record in caplog.records) == 1
    assert all(server.log[0].headers["Authorization"] == "Bearer S3CRET" for server in servers)


@pytest.mark.parametrize(
    "text", ["", "host", "https://", "https://h/a", "https://h?x", "file:///a", "s3://b/c"]
)
def test_an_origin_that_names_more_or_less_than_a_place_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="origin="):
        Named.of([text])
    assert access.Named.of(["https://H/", "s3://b/"]).origins == {"https://h", "s3://b"}
