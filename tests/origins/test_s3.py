"""S3 over our own connections: what botocore signs is what is sent, by a store that checks each signature."""

from __future__ import annotations

import concurrent.futures
import datetime
import hashlib
import http.server
import importlib.util
import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.loaders
import fsspec.config
import pytest

from streamload.cache.shared.objects import Objects
from streamload.errors import DatasetChanged, OptionError, OriginDenied, OriginError, OriginUnavailable
from streamload.origins import origin as origin_module
from streamload.origins import signing
from streamload.origins.origin import OriginOptions, abilities_of, import_origins, open_origin
from streamload.origins.protocol import Named
from streamload.origins.signing import is_ours
from tests.support.signed_s3 import Keys, SignedS3
from tests.support.tally import Tally

BODY = random.Random(1).randbytes(300_000)
OTHER = random.Random(2).randbytes(300_000)
OPTIONS = OriginOptions(
    attempts=5,
    connect_seconds=100.0,
    stall_seconds=100.0,
    backoff_seconds=0.01,
    backoff_limit_seconds=0.1,
    first_get_bytes=100_000,
    first_part_bytes=50_000,
)
PARTS = OriginOptions(first_get_bytes=50_000, first_part_bytes=50_000, quick_bytes_per_second=float("inf"))


@pytest.fixture
def s3() -> Iterator[SignedS3]:
    with SignedS3() as server:
        server.put("bucket", "a.tar", BODY)
        yield server


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A place without credentials."""
    for name in [*os.environ]:
        if name.startswith("AWS_") or name == "REQUESTS_CA_BUNDLE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    signing._warn_anonymous.cache_clear()
    return tmp_path


def storage(s3: SignedS3, keys: Keys = Keys(1), **more: Any) -> dict[str, Any]:  # noqa: B008
    given = {"key": keys.access_key, "secret": keys.secret, "token": keys.token}
    return {"endpoint_url": s3.endpoint, **given, **more}


def read(url: str, options: dict[str, Any], patience: OriginOptions = OPTIONS, **facts: Any) -> bytes:
    return b"".join(open_origin(url, options, patience, **facts).open().chunks())


def test_a_shard_takes_two_requests_and_no_s3fs(s3: SignedS3) -> None:
    s3.put("bucket", "large.tar", BODY * 140)
    script = (
        "import json, sys\n"
        "from streamload.origins.origin import import_origins, open_origin\n"
        "from streamload.urls import expand_urls\n"
        "(url,), options = expand_urls('s3://bucket/large.tar'), json.loads(sys.argv[1])\n"
        "import_origins([url], options)\n"
        "assert sum(map(len, open_origin(url, options).open().chunks())) == 42_000_000\n"
        "assert not {'s3fs', 'aiobotocore', 'aiohttp', 'fsspec', 'asyncio'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script, json.dumps(storage(s3))], check=True)
    assert [exchange.method for exchange in s3.log] == ["GET"] * 2


def test_parallel_ranges_are_signed_each(s3: SignedS3) -> None:
    assert read("s3://bucket/a.tar", storage(s3), PARTS) == BODY
    assert len(s3.log) > 3
    assert abilities_of("s3://bucket/a.tar").versions == "ETag"


@pytest.mark.parametrize(
    "name",
    ["endpoints", "partitions", "sdk-default-configuration", "s3/2006-03-01/service-2", "s3/2006-03-01/none"],
)
def test_descriptions_of_services_are_those_that_botocore_loads(name: str) -> None:
    path = str(Path(botocore.loaders.Loader.BUILTIN_DATA_PATH) / name)
    theirs, ours = botocore.loaders.JSONFileLoader(), signing._Models()
    assert ours.exists(path) is theirs.exists(path) is not name.endswith("none")
    assert json.dumps(ours.load_file(path)) == json.dumps(theirs.load_file(path))


@pytest.mark.parametrize("status", [301, 307, 400])
def test_four_fills_at_once_find_the_region_of_a_bucket(s3: SignedS3, status: int) -> None:
    s3.region, s3.elsewhere = "eu-west-1", status
    for number in range(4):
        s3.put("bucket", f"{number}.tar", BODY)
    options = storage(s3, client_kwargs={"region_name": "us-west-2"})
    tally = Tally()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        urls = [f"s3://bucket/{number}.tar" for number in range(4)] * 3
        bodies = list(pool.map(lambda url: read(url, options, counters=tally), urls))
    assert bodies == [BODY] * 12
    assert 1 <= s3.codes()["AuthorizationHeaderMalformed"] <= 4
    assert not tally["origin_retries"]


def test_a_redirect_without_a_region_is_an_error_that_sends_no_signature_there(s3: SignedS3) -> None:
    with SignedS3() as other:
        s3.region, s3.elsewhere = "", 301
        with pytest.raises(OriginError, match="answers 301"):
            read("s3://bucket/a.tar", storage(s3))
        assert not other.log


@pytest.mark.parametrize(
    "key",
    [
        "a//b",
        "/a",
        "//a",
        "100%",
        "%41",
        "%2e%2e/a",
        "ü/ñ 日本",
        "a+b=c&d;e,f",
        "a#b",
        "a?b",
        "a:b@c",
        "~a'(*)!",
        "a/",
    ],
)
@pytest.mark.sampled(6)
def test_a_key_of_any_characters_is_the_one_that_is_read(s3: SignedS3, key: str) -> None:
    s3.put("bucket", key, BODY)
    assert is_ours(f"s3://bucket/{key}", storage(s3))
    assert read(f"s3://bucket/{key}", storage(s3)) == BODY


@pytest.mark.parametrize("key", ["a/../b", "./a", "a/.", ".."])
def test_a_key_that_http_would_change_is_left_to_s3fs(key: str) -> None:
    assert not is_ours(f"s3://bucket/{key}", {})


def test_the_host_is_signed_as_it_is_sent_through_a_proxy(
    s3: SignedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", s3.endpoint)
    monkeypatch.delenv("no_proxy", raising=False)
    for endpoint in ("http://store.example", "http://store.example:80", "http://store.example:9000"):
        assert read("s3://bucket/a.tar", storage(s3, endpoint_url=endpoint)) == BODY
    assert not s3.codes()


@pytest.mark.parametrize("ignores_conditions", [False, True])
@pytest.mark.parametrize("options", [OPTIONS, PARTS], ids=["one connection", "parallel ranges"])
def test_an_object_that_is_overwritten_between_two_requests_is_an_error(
    s3: SignedS3, ignores_conditions: bool, options: OriginOptions
) -> None:
    s3.ignores_conditions = ignores_conditions
    s3.call_after(2, lambda: s3.objects.update({"bucket/a.tar": OTHER}))
    pieces: list[bytes] = []
    with pytest.raises(DatasetChanged):
        pieces.extend(open_origin("s3://bucket/a.tar", storage(s3), options).open().chunks())
    assert BODY.startswith(b"".join(pieces))


def test_a_range_of_an_overwritten_object_is_an_error(s3: SignedS3) -> None:
    origin = open_origin("s3://bucket/a.tar", storage(s3), OPTIONS)
    version = origin.version()
    assert origin.read(7, 9, version) == BODY[7:9]
    s3.objects["bucket/a.tar"] = OTHER
    with pytest.raises(DatasetChanged):
        origin.read(7, 9, version)
    origin.close()


@pytest.mark.parametrize("states_size", [True, False])
def test_an_empty_object_is_empty_and_the_end_of_another_too(s3: SignedS3, states_size: bool) -> None:
    s3.states_size = states_size
    s3.put("bucket", "empty.tar", b"")
    assert read("s3://bucket/empty.tar", storage(s3)) == b""
    assert open_origin("s3://bucket/empty.tar", storage(s3)).version().size == 0
    ended = open_origin("s3://bucket/a.tar", storage(s3), OPTIONS).open(len(BODY))
    assert b"".join(ended.chunks()) == b""


def test_a_missing_object_that_may_not_be_listed_is_denied_with_the_likely_cause(s3: SignedS3) -> None:
    s3.denied.add("bucket/gone.tar")
    with pytest.raises(OriginDenied, match="s3:ListBucket"):
        read("s3://bucket/gone.tar", storage(s3))
    assert len(s3.log) == 1


def test_slow_down_is_retried_by_us_alone(s3: SignedS3) -> None:
    s3.slow_downs = 3
    tally = Tally()
    assert read("s3://bucket/a.tar", storage(s3), counters=tally) == BODY
    assert tally["origin_retries"] == 3
    s3.slow_downs = 100
    with pytest.raises(OriginUnavailable, match="SlowDown"):
        read("s3://bucket/a.tar", storage(s3))


def test_a_requester_pays_if_told_to(s3: SignedS3) -> None:
    s3.payer = True
    with pytest.raises(OriginDenied):
        read("s3://bucket/a.tar", storage(s3))
    assert read("s3://bucket/a.tar", storage(s3, requester_pays=True)) == BODY


def test_a_public_object_needs_no_credentials(s3: SignedS3, caplog: pytest.LogCaptureFixture) -> None:
    s3.public.add("bucket/a.tar")
    for options in ({"anon": True}, {}, {}):
        assert read("s3://bucket/a.tar", {"endpoint_url": s3.endpoint, **options}) == BODY
    assert {exchange.access_key for exchange in s3.log} == {""}
    assert [record.message[:24] for record in caplog.records] == ["No AWS credentials found"]


def test_credentials_that_come_after_a_denial_are_taken(s3: SignedS3, home: Path) -> None:
    options = {"endpoint_url": s3.endpoint}
    with pytest.raises(OriginDenied) as denied:
        read("s3://bucket/a.tar", options)
    assert getattr(denied.value, "may_be_renewed", False)
    Keys(1).write_file(home / "credentials")
    assert read("s3://bucket/a.tar", options) == BODY


def test_a_plan_s_bucket_at_the_users_private_endpoint_is_read(s3: SignedS3) -> None:
    s3.public.add("bucket/a.tar")
    assert read("s3://bucket/a.tar", storage(s3), named=Named.of([])) == BODY
    assert {exchange.access_key for exchange in s3.log} == {""}
    assert read("s3://bucket/a.tar", storage(s3), named=Named.of(["s3://bucket"])) == BODY
    assert s3.log[-1].access_key == "AK1"


def test_an_endpoint_of_a_metadata_service_is_refused() -> None:
    options = {"endpoint_url": "http://169.254.169.254", "anon": True}
    with pytest.raises(OriginDenied, match="link-local"):
        read("s3://bucket/a.tar", options)


def test_a_certificate_is_trusted_by_the_bundle_of_aws(
    certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    with SignedS3(tls=certificate) as server:
        server.put("bucket", "a.tar", BODY)
        with pytest.raises(OriginError, match="certificate"):
            read("s3://bucket/a.tar", storage(server))
        (home / "config").write_text(f"[profile own]\nca_bundle = {certificate[0]}\n")
        assert read("s3://bucket/a.tar", storage(server, profile="own")) == BODY
        monkeypatch.setenv("AWS_CA_BUNDLE", certificate[0])
        assert read("s3://bucket/a.tar", storage(server, use_listings_cache=False)) == BODY
        monkeypatch.setenv("AWS_CA_BUNDLE", str(home / "none"))
        with pytest.raises(OriginError, match="none can't be loaded"):
            read("s3://bucket/a.tar", storage(server, use_listings_cache=True))


def test_a_fork_reads_on_whatever_its_parent_was_doing(s3: SignedS3) -> None:
    options = storage(s3)
    assert read("s3://bucket/a.tar", options) == BODY
    with signing.access_for(signing.configured(options))._lock:
        child = multiprocessing.get_context("fork").Process(target=_read_and_exit, args=(options,))
        child.start()
    child.join()
    assert child.exitcode == 0


def _read_and_exit(options: dict[str, Any]) -> None:
    assert read("s3://bucket/a.tar", options) == BODY


def test_no_error_shows_a_secret_nor_one_that_was_renewed(
    s3: SignedS3, home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"endpoint_url": s3.endpoint}
    Keys(1).write_file(home / "credentials")
    assert read("s3://bucket/a.tar", options) == BODY
    Keys(2).write_file(home / "credentials")
    s3.valid = {Keys(2)}
    s3.echoes_token = True
    origin = open_origin("s3://bucket/none.tar?X-Amz-Signature=0123456789", options, OPTIONS)
    with caplog.at_level(logging.DEBUG, "streamload"), pytest.raises(OriginError) as caught:
        origin.open()
    shown = f"{caught.value!r} {caught.value.__cause__!r} {origin!r} {caplog.text}"
    assert "***" in shown
    assert not any(secret in shown for secret in (Keys(2).secret, Keys(2).token, "0123456789"))


@pytest.mark.parametrize(
    "options",
    [
        {"session": None},
        {"s3_additional_kwargs": {"SSECustomerKey": "k"}},
        {"local_expiry_check": True},
        {"asynchronous": True},
        {"no_such_option": 1},
        {"client_kwargs": {"verify": False}},
        {"client_kwargs": "text"},
        {"config_kwargs": {"proxies": {"http": "http://p"}}},
        {"config_kwargs": {"client_cert": "file"}},
        {"key": "k", "username": "k"},
    ],
)
def test_an_option_that_only_s3fs_understands_is_left_to_it(options: dict[str, Any]) -> None:
    assert not is_ours("s3://bucket/a.tar", options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"anon": True, "use_ssl": False, "requester_pays": True, "version_aware": True},
        {"username": "k", "password": "s", "token": "t", "profile": "p", "endpoint_url": "http://h"},
        {"default_block_size": 5, "default_fill_cache": False, "default_cache_type": "none"},
        {"use_listings_cache": True, "listings_expiry_time": 1, "cache_regions": True},
        {"max_concurrency": 3, "fixed_upload_size": True},
        {"client_kwargs": {"region_name": "eu-west-1", "endpoint_url": "http://h", "use_ssl": False}},
        {"config_kwargs": {"s3": {"addressing_style": "path"}, "signature_version": "s3v4"}},
        {"config_kwargs": {"connect_timeout": 1, "read_timeout": 1, "retries": {}, "user_agent_extra": "x"}},
    ],
)
def test_other_options_need_no_s3fs(options: dict[str, Any]) -> None:
    assert is_ours("s3://bucket/a.tar", options)


@pytest.mark.parametrize(
    ("url", "is_read_directly"),
    [
        ("s3://bucket/a.tar", True),
        ("s3a://Upper_Old.bucket/a.tar", True),
        ("s3://mine-abcdef-s3alias/a.tar", True),
        ("s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/a.tar", True),
        ("s3://arn:aws:s3::123456789012:accesspoint/mine.mrap/a.tar", False),
        ("s3://arn:aws:s3-object-lambda:eu-west-1:123456789012:accesspoint/mine/a.tar", False),
        ("s3://bucket--use1-az4--x-s3/a.tar", False),
        ("s3://user:password@bucket/a.tar", False),
        ("s3://bucket", False),
    ],
)
def test_buckets_that_need_other_requests_are_left_to_s3fs(url: str, is_read_directly: bool) -> None:
    assert is_ours(url, {}) is is_read_directly


def test_s3fs_reads_for_an_option_that_only_it_knows_and_one_line_says_so(
    s3: SignedS3, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streamload")
    origin_module._log_once.cache_clear()
    for _ in range(2):
        origin = open_origin("s3://bucket/a.tar", storage(s3, s3_additional_kwargs={}), OPTIONS)
        assert "StoreOrigin" in repr(origin)
    assert b"".join(origin.open().chunks()) == BODY
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("s3://bucket: s3fs reads it")


def test_without_s3fs_what_needs_it_names_the_extra_and_all_else_is_read(
    s3: SignedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "s3fs" else there(name))
    assert read("s3://bucket/a.tar", storage(s3)) == BODY
    for act in (origin_module.open_origin, lambda url, options: import_origins([url], options)):
        with pytest.raises(OptionError, match=r"needs s3fs.* pip install 'streamload\[s3\]'"):
            act("s3://bucket/a.tar", storage(s3, s3_additional_kwargs={}))
        with pytest.raises(OptionError, match="s3fs"):
            act("s3://bucket--use1-az4--x-s3/a.tar", storage(s3))
    with pytest.raises(OptionError, match=r"shared cache in S3 needs s3fs.*streamload\[s3\]"):
        Objects("s3://bucket/tier", storage(s3))
    assert read("s3://bucket/a.tar", storage(s3)) == BODY


def test_the_configuration_of_fsspec_counts_and_the_options_before_it(
    s3: SignedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"key": "AK9", "secret": "SK9", "token": "T"}
    monkeypatch.setitem(fsspec.config.conf, "s3", storage(s3))
    assert read("s3://bucket/a.tar", {}) == BODY
    monkeypatch.setitem(fsspec.config.conf, "s3", {**storage(s3), **wrong})
    assert read("s3://bucket/a.tar", storage(s3)) == BODY
    monkeypatch.setitem(fsspec.config.conf, "s3", {"s3_additional_kwargs": {}})
    assert not is_ours("s3://bucket/a.tar", {})


def test_a_profile_has_keys_endpoint_and_region(s3: SignedS3, home: Path) -> None:
    s3.region = "eu-central-1"
    keys = Keys(1)
    (home / "config").write_text(
        f"[profile other]\nregion = {s3.region}\nendpoint_url = {s3.endpoint}\n"
        f"aws_access_key_id = {keys.access_key}\naws_secret_access_key = {keys.secret}\n"
        f"aws_session_token = {keys.token}\n"
    )
    assert read("s3://bucket/a.tar", {"profile": "other"}) == BODY
    with pytest.raises(OriginDenied, match="nobody"):
        read("s3://bucket/a.tar", {"profile": "nobody"})


class Service:
    """A service of AWS that gives out credentials; a context manager.

    Args:
        answers: by the beginning of the path.
    """

    def __init__(self, answers: dict[str, str]) -> None:
        service = self
        self.paths: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Log nothing."""

            def do_GET(self) -> None:
                service.paths.append(self.path)
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                paths = [path for path in answers if self.path.startswith(path)]
                body = answers[max(paths, key=len)].encode()
                self.send_response(200)
                self.send_header("X-aws-ec2-metadata-token-ttl-seconds", "21600")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_PUT(self) -> None:
                self.do_GET()

            def do_POST(self) -> None:
                self.do_GET()

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _later(seconds: float = 36_000) -> str:
    moment = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def test_a_role_of_the_instance_signs(s3: SignedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(1)
    given = {"Code": "Success", "AccessKeyId": keys.access_key, "SecretAccessKey": keys.secret}
    place = "/latest/meta-data/iam/security-credentials/"
    answers = {
        "/latest/api/token": "session",
        place: "role",
        f"{place}role": json.dumps({**given, "Token": keys.token, "Expiration": _later()}),
    }
    with Service(answers) as metadata:
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
        assert read("s3://bucket/a.tar", {"endpoint_url": s3.endpoint}) == BODY
        asked = len(metadata.paths)
        assert read("s3://bucket/a.tar", {"endpoint_url": s3.endpoint}) == BODY
        assert len(metadata.paths) == asked


def test_a_role_of_a_web_identity_signs(s3: SignedS3, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    keys = Keys(1)
    answer = (
        '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        "<AssumeRoleWithWebIdentityResult><Credentials>"
        f"<AccessKeyId>{keys.access_key}</AccessKeyId><SecretAccessKey>{keys.secret}</SecretAccessKey>"
        f"<SessionToken>{keys.token}</SessionToken><Expiration>{_later()}</Expiration></Credentials>"
        "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    )
    (home / "identity").write_text("identity")
    with Service({"/": answer}) as sts:
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(home / "identity"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        assert read("s3://bucket/a.tar", {"endpoint_url": s3.endpoint}) == BODY


def test_a_login_by_sso_signs(s3: SignedS3, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    keys = Keys(1)
    role = {"accessKeyId": keys.access_key, "secretAccessKey": keys.secret, "sessionToken": keys.token}
    start = "https://company.awsapps.com/start"
    until = (time.time() + 36_000) * 1000
    (home / "config").write_text(
        f"[default]\nsso_start_url = {start}\nsso_region = us-east-1\n"
        "sso_account_id = 123456789012\nsso_role_name = reader\n"
    )
    cached = home / f"{hashlib.sha1(start.encode()).hexdigest()}.json"
    cached.write_text(json.dumps({"startUrl": start, "accessToken": "token", "expiresAt": _later()}))
    monkeypatch.setattr("botocore.credentials.SSOProvider._SSO_TOKEN_CACHE_DIR", str(home))
    with Service({"/": json.dumps({"roleCredentials": {**role, "expiration": int(until)}})}) as portal:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", portal.url)
        assert read("s3://bucket/a.tar", {"endpoint_url": s3.endpoint}) == BODY


def test_a_role_whose_new_credentials_have_expired_is_denied_and_may_be_renewed(
    s3: SignedS3, home: Path
) -> None:
    printed = home / "printed.json"
    (home / "config").write_text(f"[default]\ncredential_process = /bin/cat {printed}\n")
    Keys(1).write_process_output(printed, seconds=-60)
    with pytest.raises(OriginDenied) as denied:
        read("s3://bucket/a.tar", {"endpoint_url": s3.endpoint})
    assert getattr(denied.value, "may_be_renewed", False)
    Keys(1).write_process_output(printed)
    assert read("s3://bucket/a.tar", {"endpoint_url": s3.endpoint}) == BODY


def test_a_credential_process_that_hangs_is_a_timeout_and_is_run_again(s3: SignedS3, home: Path) -> None:
    config = "[default]\ncredential_process = {}\n"
    (home / "config").write_text(config.format("/bin/sleep 3"))
    options = {"endpoint_url": s3.endpoint}
    with pytest.raises(OriginError, match=r"no credentials for 0\.3 s"):
        read("s3://bucket/a.tar", options, OriginOptions(attempts=1, stall_seconds=0.3))
    Keys(1).write_process_output(home / "printed.json")
    (home / "config").write_text(config.format(f"/bin/cat {home / 'printed.json'}"))
    assert read("s3://bucket/a.tar", options) == BODY
