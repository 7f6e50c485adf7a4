"""Credentials for web servers and the Hub that end while shards are read: functions, files, tokens."""

from __future__ import annotations

import json
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamload.cache.shared.store import Store
from streamload.cli.options import storage_options_of
from streamload.errors import OptionError, OriginDenied, OriginError, OriginOutage, ShardFormatError
from streamload.options.storage import FileOptions
from streamload.origins import endpoints
from streamload.origins.access import warn_of_shared_headers
from streamload.origins.origin import OriginOptions, open_origin
from streamload.origins.protocol import Named
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.urls import digest, expand_urls
from streamload.urls.identity import is_signed_form
from tests.support.signed_s3 import Keys, SignedS3
from tests.support.tally import Tally

BODY = random.Random(1).randbytes(300_000)
OPTIONS = OriginOptions(
    attempts=3,
    connect_seconds=100.0,
    stall_seconds=100.0,
    backoff_seconds=0.01,
    backoff_limit_seconds=0.1,
    first_get_bytes=20_000,
    quick_bytes_per_second=0.0,
    first_part_bytes=20_000,
    part_limit_bytes=40_000,
    outage_seconds=600.0,
)
IN_PARTS = replace(OPTIONS, quick_bytes_per_second=float("inf"))


class Issuer:
    """The user's functions, and the token that they return now.

    Attributes:
        token: the current one.
        asked: the URLs that they got.
        failure: raised instead.
    """

    def __init__(self) -> None:
        self.token = "token-1"
        self.asked: list[str] = []
        self.failure: Exception | None = None

    def headers(self, url: str) -> dict[str, str]:
        self._is_asked(url)
        return {"Authorization": f"Bearer {self.token}"}

    def sign(self, url: str) -> str:
        self._is_asked(url)
        return f"{url}{'&' if '?' in url else '?'}X-Amz-Signature={self.token}&X-Amz-Date=1"

    def _is_asked(self, url: str) -> None:
        self.asked.append(url)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    place = tmp_path / "served"
    place.mkdir()
    for name in "abcd":
        (place / f"{name}.tar").write_bytes(BODY)
    with ShardServer(place) as server:
        server.misbehave("*", Fault(requires="token-1"))
        yield server


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """Nothing remembered of endpoints from one test to the next."""
    end = endpoints.remember()
    yield
    end()


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


def by(kind: str, issuer: Issuer) -> dict[str, Any]:
    return {kind: getattr(issuer, kind)}


BOTH = pytest.mark.parametrize("kind", ["headers", "sign"])


def read(
    server: ShardServer,
    name: str,
    storage: Mapping[str, Any],
    options: OriginOptions = OPTIONS,
    counters: Tally | None = None,
) -> bytes:
    return b"".join(open_origin(f"{server.url}/{name}.tar", storage, options, counters).open().chunks())


def end_after(server: ShardServer, requests: int, status: int | None = None) -> None:
    server.misbehave("*", Fault(first=requests, requires="token-1"), Fault(requires="token-2", status=status))


@BOTH
@pytest.mark.parametrize("status", [401, 403, 400])
def test_a_function_is_asked_again_when_its_token_ends_in_a_shard(
    server: ShardServer, issuer: Issuer, kind: str, status: int
) -> None:
    end_after(server, 1, status)
    origin = open_origin(f"{server.url}/a.tar", by(kind, issuer), OPTIONS, tally := Tally())
    chunks = origin.open().chunks()
    first = next(chunks)
    issuer.token = "token-2"
    assert first + b"".join(chunks) == BODY
    assert [request.status for request in server.log] == [206, status, 206]
    assert tally["origin_retries"] == 0
    assert issuer.asked == [f"{server.url}/a.tar"] * 2


@BOTH
def test_ranges_in_parallel_share_one_renewal(server: ShardServer, issuer: Issuer, kind: str) -> None:
    end_after(server, 3)
    origin = open_origin(f"{server.url}/a.tar", by(kind, issuer), IN_PARTS)
    chunks = origin.open().chunks()
    first = next(chunks)
    issuer.token = "token-2"
    assert first + b"".join(chunks) == BODY
    assert len(issuer.asked) == 2


def test_ranges_are_read_with_the_renewed_headers(server: ShardServer, issuer: Issuer) -> None:
    origin = open_origin(f"{server.url}/a.tar", by("headers", issuer), OPTIONS)
    version = origin.version()
    assert origin.read(10, 20, version) == BODY[10:20]
    issuer.token = "token-2"
    server.misbehave("*", Fault(requires="token-2"))
    assert origin.read(20, 30, version) == BODY[20:30]
    origin.close()


@BOTH
def test_without_a_new_token_the_wait_ends_by_name(server: ShardServer, issuer: Issuer, kind: str) -> None:
    assert read(server, "a", by(kind, issuer)) == BODY
    server.misbehave("*", Fault(requires="token-2"))
    issuer.asked.clear()
    with pytest.raises(OriginOutage, match=rf"b\.tar: .* 401 .*'{kind}'\] still has the same credentials"):
        read(server, "b", by(kind, issuer), replace(OPTIONS, outage_seconds=0.5))
    assert issuer.asked.count(f"{server.url}/b.tar") > 2  # asked anew before each attempt


@BOTH
def test_a_token_that_comes_during_the_wait_costs_no_shard(
    server: ShardServer, issuer: Issuer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(server, "a", by(kind, issuer)) == BODY
    server.misbehave("*", Fault(requires="token-2"))
    timer = threading.Timer(0.5, lambda: setattr(issuer, "token", "token-2"))
    timer.start()
    assert read(server, "b", by(kind, issuer)) == BODY
    timer.join()
    assert [record.message.rpartition(" ")[2] for record in caplog.records][-1] == "back"
    assert "token-" not in caplog.text


@BOTH
def test_a_token_that_is_refused_at_the_beginning_is_denied_at_once(
    server: ShardServer, issuer: Issuer, kind: str
) -> None:
    issuer.token = "other"
    with pytest.raises(OriginDenied, match=r"a\.tar: the server answers 401 .*still has the same"):
        read(server, "a", by(kind, issuer))
    assert len(server.log) == 1


@BOTH
def test_a_function_that_fails_in_mid_run_is_waited_for(
    server: ShardServer, issuer: Issuer, kind: str
) -> None:
    assert read(server, "a", by(kind, issuer)) == BODY
    issuer.failure = RuntimeError("no token for token-1")
    timer = threading.Timer(0.3, lambda: setattr(issuer, "failure", None))
    timer.start()
    assert read(server, "b", by(kind, issuer)) == BODY
    timer.join()
    issuer.failure = RuntimeError("no token for token-1")
    with pytest.raises(OriginOutage, match=rf"storage_options\['{kind}'\] failed with RuntimeError"):
        read(server, "c", by(kind, issuer), replace(OPTIONS, outage_seconds=0.2))


def test_a_shard_that_is_denied_alone_is_given_up(server: ShardServer, issuer: Issuer) -> None:
    assert read(server, "a", by("headers", issuer)) == BODY
    server.misbehave("b.tar", Fault(status=403))
    with pytest.raises(OriginDenied, match="403"):
        read(server, "b", by("headers", issuer))
    assert read(server, "c", by("headers", issuer)) == BODY


def test_a_signed_url_that_a_store_calls_expired_is_waited_for(server: ShardServer) -> None:
    def storage(token: str) -> dict[str, Any]:
        return {"headers": {"X-Token": token}}

    assert read(server, "a", storage("token-1")) == BODY
    expired = Fault(requires="token-2", status=400, body=b"<Error><Code>ExpiredToken</Code></Error>")
    server.misbehave("*", expired)
    with pytest.raises(OriginOutage, match=r"b\.tar: .* 400 .*\(ExpiredToken\): the token has expired"):
        read(server, "b", storage("token-1"), replace(OPTIONS, outage_seconds=0.3))


def test_a_shard_that_a_store_calls_expired_alone_is_given_up_whichever_is_asked_first(
    server: ShardServer, issuer: Issuer
) -> None:
    expired = Fault(status=400, body=b"<Error><Code>ExpiredToken</Code></Error>")
    server.misbehave("b.tar", expired)
    timer = threading.Timer(0.2, read, (server, "a", by("headers", issuer)))
    timer.start()
    with pytest.raises(OriginError, match="400") as denied:
        read(server, "b", by("headers", issuer))
    timer.join()
    assert not isinstance(denied.value, OriginOutage)


@pytest.mark.parametrize(
    ("kind", "result", "message"),
    [
        ("sign", lambda url: url.replace("a.tar", "b.tar"), r"'sign'\] returned .*/b\.tar for .*/a\.tar"),
        ("sign", lambda url: "https://elsewhere.example/a.tar?sig=hunter2", r"returned https://elsewhere"),
        ("sign", lambda url: None, "returned NoneType"),
        ("headers", lambda url: [("Authorization", "hunter2")], r"'headers'\] returned list"),
    ],
)
def test_what_a_function_returns_is_checked(
    server: ShardServer, kind: str, result: Callable[[str], Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        read(server, "a", {kind: result})
    assert "hunter2" not in repr(caught.value)
    assert server.log == []


@pytest.mark.parametrize(
    ("listed", "signed", "is_same"),
    [
        ("https://host/a.tar", "https://HOST:443/a.tar?OSSAccessKeyId=k&Signature=s&Expires=1", True),
        ("https://host/a.tar?x=1&sig=old&se=1", "https://host/a.tar?x=1&sig=new&se=2", True),
        ("https://host/a b.tar", "https://host/a%20b.tar?sig=s", True),
        ("https://host/a.tar?x=1", "https://host/a.tar?x=2&sig=s", False),
        ("https://host/a.tar", "http://host/a.tar?sig=s", False),
        ("https://host/a.tar", "https://host:8443/a.tar?sig=s", False),
        ("https://host/a.tar", "https://[/a.tar", False),
    ],
)
def test_a_signature_does_not_make_another_shard(listed: str, signed: str, is_same: bool) -> None:
    assert is_signed_form(listed, signed) is is_same


def test_the_secrets_of_renewed_credentials_are_not_shown(server: ShardServer, issuer: Issuer) -> None:
    issuer.token = "hunter2-of-today"
    server.misbehave("a.tar", Fault(headers={"Content-Encoding": issuer.token}))
    with pytest.raises(ShardFormatError) as caught:
        read(server, "a", by("headers", issuer))
    assert "comes with Content-Encoding" in str(caught.value)
    assert "hunter2" not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_where_only_a_plan_names_a_server_no_function_is_called(server: ShardServer, issuer: Issuer) -> None:
    storage = by("headers", issuer) | by("sign", issuer)
    origin = open_origin(f"{server.url}/a.tar", storage, OPTIONS, named=Named())
    with pytest.raises(OriginDenied, match="no public address"):
        origin.open()
    assert issuer.asked == []


def test_functions_are_no_part_of_a_shards_name(issuer: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    storage = by("headers", issuer) | by("sign", issuer)
    for url in ("https://host/a.tar", "s3://bucket/a.tar"):
        assert digest(url, storage) == digest(url)
    warn_of_shared_headers(expand_urls(["https://one/a.tar", "https://two/a.tar"]), storage)
    assert caplog.records == []


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "options.json"


def write(file: Path, token: str) -> None:
    file.write_text(json.dumps({"headers": {"Authorization": f"Bearer {token}"}}))


def test_a_file_of_options_is_read_again_when_its_headers_are_refused(
    server: ShardServer, file: Path
) -> None:
    write(file, "token-1")
    storage = storage_options_of(f"@{file}")
    assert storage is not None
    assert read(server, "a", storage) == BODY
    write(file, "token-2")
    server.misbehave("*", Fault(requires="token-2"))
    tally = Tally()
    assert read(server, "b", storage, counters=tally) == BODY
    assert tally["origin_retries"] == 0
    assert read(server, "c", storage) == BODY  # with the new token from the first request on
    assert [request.status for request in server.log].count(401) == 1
    assert "token" not in repr(storage)


def test_a_file_that_is_half_written_or_stays_the_same_is_waited_for(
    server: ShardServer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, "token-1")
    storage = storage_options_of(f"@{file}")
    assert storage is not None
    assert read(server, "a", storage) == BODY
    server.misbehave("*", Fault(requires="token-2"))
    timers = [
        threading.Timer(0.2, file.write_text, ['{"headers": {"Authoriz']),
        threading.Timer(0.4, write, [file, "token-2"]),
    ]
    for timer in timers:
        timer.start()
    assert read(server, "b", storage) == BODY
    for timer in timers:
        timer.join()
    assert f"{file} still has the same credentials" in caplog.records[0].message


def test_on_a_node_without_the_file_its_contents_are_used_and_the_message_names_it(
    server: ShardServer, file: Path
) -> None:
    write(file, "token-1")
    storage = pickle.loads(pickle.dumps(storage_options_of(f"@{file}")))
    file.unlink()
    assert isinstance(storage, FileOptions)
    assert read(server, "a", storage) == BODY
    server.misbehave("*", Fault(requires="token-2"))
    with pytest.raises(OriginOutage, match=rf"{file} can't be read: No such file"):
        read(server, "b", storage, replace(OPTIONS, outage_seconds=0.3))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SignedS3]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with SignedS3() as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        for name in "abc":
            server.put("bucket", f"{name}.tar", BODY)
        yield server


def write_keys(file: Path, keys: Keys, endpoint: str) -> None:
    names = {"key": keys.access_key, "secret": keys.secret, "token": keys.token}
    options = {"endpoint_url": endpoint, **names}
    file.with_name("shared.json").write_text(json.dumps(options))
    file.write_text(json.dumps({"headers": {"X-Token": "of web servers"}, **options}))


def test_keys_of_s3_in_a_file_of_options_are_read_again(s3: SignedS3, file: Path) -> None:
    write_keys(file, Keys(1), s3.endpoint)
    storage = storage_options_of(f"@{file}")
    shared = storage_options_of(f"@{file.with_name('shared.json')}")
    store = Store("s3://bucket", shared or {}, 10.0, None)

    def read_s3(name: str, options: OriginOptions = OPTIONS) -> bytes:
        return b"".join(open_origin(f"s3://bucket/{name}.tar", storage, options).open().chunks())

    assert read_s3("a") == BODY
    assert store.read("a.tar", len(BODY)) == BODY
    write_keys(file, Keys(2), s3.endpoint)
    s3.valid = {Keys(2)}
    assert read_s3("b") == BODY
    assert store.read("a.tar", len(BODY)) == BODY
    s3.valid = set()
    with pytest.raises(OriginOutage, match=rf"the token has expired .*; {file} is still the same"):
        read_s3("c", replace(OPTIONS, outage_seconds=0.3))
    write_keys(file, Keys(3), "http://elsewhere.example")
    s3.valid = {Keys(3)}
    with pytest.raises(OriginOutage, match="names another endpoint now"):
        read_s3("c", replace(OPTIONS, outage_seconds=0.3))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardServer]:
    facts = json.dumps({"id": "me/data", "sha": "0" * 40}).encode()
    place = tmp_path / "hub"
    for name in (
        "api/datasets/me/data/revision/main",
        *(f"datasets/me/data/resolve/main/{n}.tar" for n in "abc"),
    ):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(facts if name.startswith("api") else BODY)
    with ShardServer(place) as server:
        server.misbehave("*", Fault(requires="token-1"))
        server.misbehave("api/datasets/me/data", Fault(body=facts))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
        yield server


def read_hub(hub: ShardServer, name: str, options: OriginOptions = OPTIONS, **storage: Any) -> bytes:
    origin = open_origin(f"hf://datasets/me/data/{name}.tar", {"endpoint": hub.url, **storage}, options)
    return b"".join(origin.open().chunks())


@pytest.mark.parametrize("place", ["file", "environment"])
def test_the_token_of_the_hub_is_read_again_when_it_is_refused(
    hub: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def give(token: str) -> None:
        if place == "file":
            (tmp_path / "token").write_text(token)
        else:
            monkeypatch.setenv("HF_TOKEN", token)

    give("token-1")
    assert read_hub(hub, "a") == BODY
    hub.misbehave("*", Fault(first=1, requires="token-1"), Fault(requires="token-2"))
    origin = open_origin("hf://datasets/me/data/b.tar", {"endpoint": hub.url}, OPTIONS, tally := Tally())
    chunks = origin.open().chunks()
    first = next(chunks)
    give("token-2")
    assert first + b"".join(chunks) == BODY
    assert tally["origin_retries"] == 0
    hub.misbehave("*", Fault(requires="token-3"))
    with pytest.raises(OriginOutage, match="the environment or token file still has the same"):
        read_hub(hub, "c", replace(OPTIONS, outage_seconds=0.3))


def test_a_repository_that_was_denied_for_a_while_is_not_taken_for_missing(
    hub: ShardServer, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("other")
    hub.misbehave("api/datasets/me/data", Fault(status=401))
    hub.misbehave("api/datasets/me/data/revision/main", Fault(status=401))
    with pytest.raises(OriginDenied):
        read_hub(hub, "a")
    (tmp_path / "token").write_text("token-1")
    hub.misbehave("api/datasets/me/data", Fault(body=b'{"id": "me/data"}'))
    hub.misbehave("api/datasets/me/data/revision/main", Fault(body=b'{"id": "me/data"}'))
    assert read_hub(hub, "a") == BODY


def test_a_function_of_headers_gets_the_hubs_url_and_comes_before_its_token(
    hub: ShardServer, tmp_path: Path, issuer: Issuer
) -> None:
    (tmp_path / "token").write_text("other")
    assert read_hub(hub, "a", headers=issuer.headers) == BODY
    assert issuer.asked == ["hf://datasets/me/data/a.tar"]
