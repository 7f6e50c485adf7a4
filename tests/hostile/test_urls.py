"""URLs made to harm: where a server may send us; a secret in a URL is in nothing that is left or shown."""

from __future__ import annotations

import base64
import os
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Shards
from streamload.errors import OriginDenied, UrlError
from streamload.loader.schedule import RunSchedule
from streamload.loader.worker_config import worker_config_for
from streamload.origins.origin import OriginOptions, open_origin
from streamload.testing.server import Fault, ShardServer
from tests.fuzzing.blocks import END, member
from tests.support.hostile import outcomes, sample

SECRET = "S3CRET-canary"


def serve(directory: Path) -> ShardServer:
    for name in ("a", "b", "c"):
        (directory / f"{name}.tar").write_bytes(sample(f"{name}-1") + sample(f"{name}-2") + END)
    return ShardServer(directory)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


GOOD = ["a-1", "a-2", "c-1", "c-2"]


@pytest.mark.parametrize(
    "place",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://2852039166/latest/",
        "http://0xa9fea9fe/",
        "http://[::ffff:169.254.169.254]/",
        "http://[fd00:ec2::254]/",
        "file:///etc/passwd",
        "ftp://host/a.tar",
        "pipe:cat /etc/passwd",
    ],
)
def test_a_redirect_to_where_no_shard_can_be_is_refused(place: str, data: Path, tmp_path: Path) -> None:
    with serve(data) as server:
        server.misbehave("b.tar", Fault(status=302, headers={"Location": place}))
        urls = [f"{server.url}/{name}.tar" for name in "abc"]
        (found,) = outcomes([urls], tmp_path)
        assert (found.keys, found.given_up) == (GOOD, 1)
        (raised,) = outcomes([urls], tmp_path / "raising", on_error="raise")
    assert raised.error in {"OriginDenied", "OriginNotFound"}  # of `pipe:` it is a relative address
    assert "root:" not in found.log + raised.log


def test_a_metadata_service_is_not_asked_even_if_it_is_listed(data: Path, tmp_path: Path) -> None:
    with serve(data) as server:
        urls = [f"{server.url}/a.tar", "http://169.254.169.254/latest/meta-data/", f"{server.url}/c.tar"]
        (found,) = outcomes([urls], tmp_path)
    assert (found.keys, found.given_up) == (GOOD, 1)
    assert "link-local" in found.log


def test_a_local_file_that_is_no_shard_is_not_read_on(data: Path, tmp_path: Path) -> None:
    (tmp_path / "passwords").write_text(f"a list of names and words: {SECRET}\n" * 100)
    with serve(data) as server:
        urls = [f"{server.url}/a.tar", f"file://{tmp_path}/passwords", f"{server.url}/c.tar"]
        (found,) = outcomes([urls], tmp_path)
    assert (found.keys, found.given_up) == (GOOD, 1)
    assert "not a tar but text" in found.log  # to see what it is, and no more
    assert "a list of names" not in found.log
    assert SECRET not in found.log


@pytest.mark.parametrize(
    "url", ["-o/etc/passwd", "--output=x", "-", "a\0.tar", "http://h/\r\nX: y", "\ud800.tar"]
)
def test_urls_that_look_like_something_else_are_refused(url: str) -> None:
    with pytest.raises(UrlError):
        streamload.make_loader(url)


FAULTS = {
    "none": [],
    "denied": [Fault(status=403, body=b"<Error><Code>SignatureDoesNotMatch</Code></Error>")],
    "cut twice": [Fault(first=2, cut_after_bytes=700)],
    "unavailable once": [Fault(first=1, status=503, headers={"Retry-After": "0"})],
    "a page": [Fault(body=b"<html>sign in</html>")],
    "another version": [
        Fault(first=1, cut_after_bytes=700),
        Fault(headers={"ETag": '"other"'}, body=b"x" * 9000),
    ],
    "a redirect": [Fault(first=1, status=302, headers={"Location": f"/c.tar?sig={SECRET}"})],
    "a redirect in a ring": [Fault(status=302, headers={"Location": f"/b.tar?token={SECRET}"})],
    "a redirect elsewhere": [
        Fault(status=302, headers={"Location": f"http://me:{SECRET}@169.254.169.254/{SECRET}?x"})
    ],
    "a size that lies": [Fault(headers={"Content-Range": "bytes 5-9/10"}, status=206)],
}


@pytest.mark.parametrize("case", FAULTS)
@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_a_secret_of_a_url_is_in_no_log_error_file_or_repr(
    case: str, on_error: str, data: Path, tmp_path: Path
) -> None:
    with serve(data) as server:
        server.misbehave("b.tar", *FAULTS[case])
        place = server.url.partition("://")[2]
        urls = [f"http://me:{SECRET}@{place}/{name}.tar?X-Amz-Signature={SECRET}&y=1" for name in "abc"]
        (found,) = outcomes([urls], tmp_path, on_error=on_error)
        names = {name.lower() for request in server.log for name in request.headers}
        assert "authorization" in names  # it was sent, though
    if case == "a redirect elsewhere":
        found = found._replace(log=found.log.replace(f"169.254.169.254/{SECRET}", ""))  # a path is no secret
    encoded = base64.b64encode(f"me:{SECRET}".encode()).decode()
    assert SECRET not in found.log
    assert encoded not in found.log
    assert "urllib3" in found.log  # at DEBUG it talks
    for path in (tmp_path / "cache-0").rglob("*"):
        assert SECRET not in str(path)
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


COMMANDS = {
    "a proxy's user": "curl -sf -x me:{S}@127.0.0.1:9 {url}/{name} || cat {path}",
    "a scheme-less user": "curl -sf me:{S}@127.0.0.1:9/{name} || cat {path}",
    "a scheme-less signature": "curl -sf '127.0.0.1:9/{name}?X-Amz-Signature={S}' || cat {path}",
    "options of others": "true -Dfs.s3a.secret.key={S} -K {S} && cat {path}",
    "what curl -v tells": "curl -svf -H 'Private: {S}' -u me:{S} {url}/{name} | cat",
}


def url_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"__key__": sample["__key__"], "value": sample["__url__"]}


@pytest.mark.parametrize("case", COMMANDS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_secret_of_a_command_is_in_no_log_error_file_or_url(
    case: str, fails: bool, data: Path, tmp_path: Path
) -> None:
    with serve(data) as server:
        if fails:
            server.misbehave("b.tar", Fault(status=403))
            (tmp_path / "data" / "b.tar").unlink()
        command = "pipe:" + COMMANDS[case].replace("{S}", SECRET).replace("{url}", server.url)
        urls = [
            command.replace("{name}", f"{name}.tar").replace("{path}", f"{data}/{name}.tar") for name in "abc"
        ]
        options = {"shared_cache": str(tmp_path / "shared"), "write_back": True}
        options |= {"map_sample": url_of, "on_error": "raise" if fails else "skip"}
        (found,) = outcomes([urls], tmp_path, **options)
    assert bool(found.error) is fails
    shown = f"{found.log} {found.values} {found.error}"
    assert SECRET not in shown
    assert base64.b64encode(f"me:{SECRET}".encode()).decode() not in shown
    assert fails or all(value.startswith("pipe:") and value.endswith(".tar") for value in found.values)
    for path in [*(tmp_path / "cache-0").rglob("*"), *(tmp_path / "shared").rglob("*")]:
        assert SECRET not in str(path)
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("secret", ["xx/yyyyyyyy+zz", "yyyyyyyyzz"])
def test_a_bucket_with_keys_in_it_is_refused_without_them(secret: str) -> None:
    with pytest.raises(UrlError, match="storage_options") as caught:
        streamload.make_loader(f"s3://AKIAKEYID:{secret}@bucket/a.tar")
    assert "yyyyyyyy" not in str(caught.value)
    assert "AKIAKEYID" not in str(caught.value)


def test_a_secret_is_in_no_cause_of_an_error(data: Path) -> None:
    with serve(data) as server:
        place = server.url.partition("://")[2]
        for fault in (
            Fault(status=302, headers={"Location": f"http://[{SECRET}/"}),
            Fault(cut_after_bytes=3),
        ):
            server.misbehave("b.tar", fault)
            url = f"http://me:{SECRET}@{place}/b.tar?token={SECRET}"
            with pytest.raises(streamload.errors.StreamloadError) as caught:
                list(open_origin(url, options=OriginOptions(attempts=1)).open().chunks())
            assert SECRET not in "".join(traceback.format_exception(caught.value))
    options = {"endpoint_url": f"http://{SECRET}.invalid:port", "secret": SECRET, "key": "k"}
    with pytest.raises(streamload.errors.StreamloadError) as caught:
        open_origin("s3://bucket/b.tar", options, OriginOptions(attempts=1)).version()
    assert SECRET not in "".join(traceback.format_exception(caught.value))


NASTY = "\x1b[2J\x1b]0;title\x07\r\nWARNING forged \x9b1m\u202e\u2028"


def test_control_characters_reach_no_log_and_no_error(data: Path, tmp_path: Path) -> None:
    members = member(f"b{NASTY}.jpg", b"no image") + member(f"b{NASTY}.txt", b"x")
    (tmp_path / "data" / "b.tar").write_bytes(members + END)
    with ShardServer(data) as server:
        urls = [f"{server.url}/b.tar"]
        (found,) = outcomes([urls], tmp_path)
        pipe = f"pipe:printf '{NASTY!s}' >&2; exit 127"
        (raised,) = outcomes([[pipe]], tmp_path / "raising", on_error="raise")
    assert "forged" in found.log
    assert "forged" in raised.log
    for text in (found.log, raised.log):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]", text)
        assert not re.search("^WARNING forged", text, re.M)


def test_an_error_is_printable_and_one_of_a_worker_keeps_the_lines_of_its_traceback() -> None:
    error = OriginDenied(f"{NASTY}\udcff")
    assert str(error) == r"\x1b[2J\x1b]0;title\x07\r\nWARNING forged \x9b1m\u202e\u2028\udcff"
    assert str(type(error)(str(error))) == str(error)
    told = "Caught OriginDenied in DataLoader worker process 0.\nOriginal Traceback (most recent):\n x\x1b"
    assert str(OriginDenied(told)) == told.replace("\x1b", r"\x1b")


def test_a_secret_is_in_no_repr_or_metric(data: Path, tmp_path: Path) -> None:
    options = {"key": "me", "secret": SECRET}
    with serve(data) as server:
        url = f"{server.url}/a.tar?token={SECRET}"
        with streamload.make_loader(
            [url],
            train=False,
            num_workers=0,
            cache_dir=tmp_path / "cache",
            shards=Shards(storage_options=options),
        ) as loader:
            schedule = RunSchedule(loader.options, lambda epoch: None)
            recipe, placed = worker_config_for(loader.options, schedule)
            for _ in loader:
                shown = [
                    loader,
                    loader.options,
                    loader.stats(),
                    loader.stats().as_dict(),
                    loader.state_dict(),
                    recipe,
                    placed,
                    *recipe.shards,
                ]
                assert SECRET not in "".join(f"{thing!r} {thing!s}" for thing in shown)
                assert SECRET not in repr(vars(loader))


@pytest.mark.parametrize(("name", "error"), [("missing.tar", "OriginNotFound"), ("fifo", "OriginError")])
def test_a_local_file_that_cannot_be_read_is_an_error_and_no_wait(
    name: str, error: str, data: Path, tmp_path: Path
) -> None:
    with serve(data) as server:
        os.mkfifo(tmp_path / "fifo")
        urls = [f"{server.url}/a.tar", str(tmp_path / name), f"{server.url}/c.tar"]
        (found,) = outcomes([urls], tmp_path)
        (raised,) = outcomes([urls], tmp_path / "raising", on_error="raise")
    assert (found.keys, found.given_up, raised.error) == (GOOD, 1, error)
