"""Understood commands against the real curl and aws: the same bytes and headers, and what a pipe can't do."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamload.daemon.warm import warm
from streamload.errors import (
    OriginCut,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginUnavailable,
    StreamloadError,
)
from streamload.origins import origin as origins
from streamload.origins.origin import OriginOptions, import_origins, open_origin
from streamload.testing.faults import EMPTY_PAGE, Fault
from streamload.testing.server import Request as Seen
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from streamload.urls import command_environment, expand_urls
from streamload.urls.commands import CommandRequest, Opaque, parse_command
from tests.support.s3 import S3Server

BODY = random.Random(1).randbytes(1_000_003)
OTHER = random.Random(2).randbytes(700_001)
QUICK = OriginOptions(attempts=3, backoff_seconds=0.01, stall_seconds=1.0, connect_seconds=2.0)
CANARY = "S3CRET-canary"
AWS = shutil.which("aws") or shutil.which("aws", path=Path(sys.executable).parent)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any configuration, and a process that hasn't said anything yet."""
    for name in list(os.environ):
        if re.match(r"(?i)AWS_|CURL_HOME|FSSPEC_|XDG_CONFIG|BASH_|(https?|all|no)_proxy$", name):
            monkeypatch.delenv(name)
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setattr(command_environment, "_own_home", lambda: str(place))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    command_environment._look.cache_clear()
    origins._log_once.cache_clear()
    return place


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[ShardServer, ShardServer]]:
    """One with a.tar, and with r.tar, which is b.tar at the other."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.tar").write_bytes(BODY)
    (root / "b.tar").write_bytes(OTHER)
    with ShardServer(root) as server, ShardServer(root) as other:
        server.misbehave("r.tar", Fault(status=302, headers={"Location": f"{other.url}/b.tar"}))
        server.misbehave("s.tar", Fault(status=307, headers={"Location": "/a.tar"}))
        yield server, other


def run(command: str) -> bytes:
    """What the real command prints."""
    return subprocess.run(["bash", "-c", command], check=True, stdout=subprocess.PIPE).stdout


def read(command: str, **options: Any) -> bytes:
    """What its pipe gives."""
    given = OriginOptions(**{**{name: getattr(QUICK, name) for name in QUICK.__slots__}, **options})
    stream = open_origin(f"pipe:{command}", None, given).open()
    try:
        return b"".join(stream.chunks())
    finally:
        stream.close()


def headers(seen: Seen) -> dict[str, str]:
    """What was sent, but for what each client says of itself, and for which bytes it begins with."""
    lines = {name.lower(): value for name, value in seen.headers.items()}
    for own in ("accept-encoding", "range"):
        lines.pop(own, None)
    if re.match("curl/", lines["user-agent"]):
        del lines["user-agent"]
    return lines


UNDERSTOOD = [
    "curl {url}/a.tar",
    "curl -s {url}/a.tar",
    "  curl\t-s   {url}/a.tar  \n",
    "/usr/bin/curl -s {url}/a.tar",
    "curl -fsSL {url}/a.tar",
    "curl -f -s -L {url}/a.tar",
    "curl -q -s {url}/a.tar",
    "'curl' \"-s\" '{url}'/a.tar",
    "curl {url}/a.tar -s",
    "curl -s --url {url}/a.tar",
    "curl -s -o - {url}/a.tar",
    "curl -so- {url}/a.tar",
    "curl --silent --show-error --fail --location --output - {url}/a.tar",
    "curl -sS --fail-with-body {url}/a.tar",
    "curl -sL {url}/r.tar",
    "curl -sL {url}/s.tar",
    "curl -sL --max-redirs 1 {url}/r.tar",
    "curl -s '{url}/a.tar?x=1&y=%20z'",
    "curl -s -H 'X-Key: a b' {url}/a.tar",
    "curl -sHX-Key:ab {url}/a.tar",
    "curl -s -H 'X-One: 1' -H \"X-Two: it's 2\" {url}/a.tar",
    "curl -s -H 'Accept: application/x-tar' -A 'agent/1 (x)' {url}/a.tar",
    "curl -s -H 'user-agent: mine' {url}/a.tar",
    "curl -sL -H 'Authorization: Bearer abc' -H 'Cookie: c=d; e=f' {url}/r.tar",
    "curl -sL -H 'X-Key: b' {url}/s.tar",
    "curl -sL --oauth2-bearer abc {url}/r.tar",
    "curl -s --oauth2-bearer abc {url}/a.tar",
    "curl -s -u me:pw {url}/a.tar",
    "curl -sLu 'me:p w:x' {url}/r.tar",
    "curl -s --basic --user me: {url}/a.tar",
    "curl -s {me}/a.tar",
    "curl -s -e http://elsewhere/ {url}/a.tar",
    "curl -s -b c=d {url}/a.tar",
    "curl -s --cookie 'c=d; e=f' {url}/a.tar",
    "curl -sf --retry 3 --retry-delay 1 --retry-max-time 60 --retry-connrefused {url}/a.tar",
    "curl -sf --retry 3 --retry-all-errors {url}/a.tar",
    "curl -s --connect-timeout 5.5 --max-time 60 -y 30 -Y 1000 {url}/a.tar",
    "curl -sN --tcp-nodelay --no-keepalive --http1.1 -X GET {url}/a.tar",
    "curl -sg --no-progress-meter --tlsv1.2 --keepalive-time 10 {url}/a.tar",
    "curl -sv --progress-bar {url}/a.tar",
]


@pytest.mark.parametrize("command", UNDERSTOOD)
def test_an_understood_curl_command_gives_what_curl_prints_and_sends_what_curl_sends(
    command: str, servers: tuple[ShardServer, ShardServer]
) -> None:
    server, other = servers
    command = command.format(url=server.url, me=server.url.replace("//", "//m%65:p%20w@"))
    assert isinstance(parse_command(command), CommandRequest)
    real = run(command)
    natively = read(command)
    assert natively == real
    assert real in (BODY, OTHER)
    for log in (server.log, other.log):
        half = len(log) // 2
        assert [headers(seen) for seen in log[half:]] == [headers(seen) for seen in log[:half]]


def test_any_header_of_a_command_that_may_be_a_secret_stays_with_the_host_that_it_names(
    servers: tuple[ShardServer, ShardServer],
) -> None:
    server, other = servers
    assert read(f"curl -sL -H 'X-Key: {CANARY}' -e http://from/ -A me {server.url}/r.tar") == OTHER
    assert server.log[0].headers["X-Key"] == CANARY
    assert CANARY not in str(other.log[0].headers)
    assert (other.log[0].headers["Referer"], other.log[0].headers["User-Agent"]) == ("http://from/", "me")


REAL = [
    "curl -s {url}/a.tar | cat",
    "curl -s {url}/a.tar 2>/dev/null",
    "U={url}; curl -s $U/a.tar",
    "curl -s `echo {url}`/a.tar",
    "curl -s \\\n  {url}/a.tar",
    "curl -s {url}/a.tar?x=1",
    "curl -s {url}/a.tar {url}/b.tar",
    "curl -s '{url}/{{a,b}}.tar'",
    "curl -s '{url}/[a-b].tar'",
    "curl -sr 10-99 {url}/a.tar",
    "curl -s --compressed {url}/a.tar",
    "curl -si {url}/a.tar | tail -c 100",
    "curl -sk {url}/a.tar",
    "curl -s -4 {url}/a.tar",
    "curl -s --limit-rate 100M {url}/a.tar",
    "curl -s -w end {url}/a.tar",
    "curl -s -H 'Range: bytes=0-9' {url}/a.tar",
    "curl -s --resolve far.invalid:80:127.0.0.1 {url}/a.tar",
    "curl -s --noproxy '*' {url}/a.tar",
    "curl -sL -b c=d {url}/r.tar",
]


@pytest.mark.parametrize("command", REAL)
def test_any_other_curl_command_is_run_as_it_is(
    command: str, servers: tuple[ShardServer, ShardServer]
) -> None:
    server, _ = servers
    command = command.format(url=server.url)
    assert isinstance(parse_command(command), Opaque)
    assert read(command) == run(command)
    assert not any("streamload" in seen.headers["User-Agent"] for seen in server.log)


def test_a_curlrc_is_heeded_by_running_curl(servers: tuple[ShardServer, ShardServer], home: Path) -> None:
    server, _ = servers
    (home / ".curlrc").write_text(f'header = "X-From: curlrc"\nurl = {server.url}/b.tar\n')
    assert read(f"curl -s {server.url}/a.tar") == OTHER + BODY
    assert server.log[0].headers["X-From"] == "curlrc"
    assert read(f"curl -qs {server.url}/a.tar") == BODY


@pytest.mark.parametrize("option", ["-n", "--netrc", "--netrc-optional", "--netrc-file {home}/.netrc"])
def test_a_netrc_is_read_only_for_a_command_that_says_so(
    option: str, servers: tuple[ShardServer, ShardServer], home: Path
) -> None:
    server, _ = servers
    netrc = home / ".netrc"
    netrc.write_text(f"machine 127.0.0.1 login me password {CANARY}\n")
    netrc.chmod(0o600)
    with contextlib.closing(open_origin(f"{server.url}/a.tar", None, QUICK)) as origin:
        assert b"".join(origin.open().chunks()) == BODY
        origin.read(0, 10, origin.version())
    assert read(f"curl -s {server.url}/a.tar") == BODY
    assert not any("Authorization" in seen.headers for seen in server.log)
    assert read(f"curl -s {option.format(home=home)} {server.url}/a.tar") == BODY
    assert server.log[-1].headers["Authorization"].startswith("Basic ")


def test_a_netrc_of_another_host_is_not_for_this_one(
    servers: tuple[ShardServer, ShardServer], home: Path
) -> None:
    server, _ = servers
    (home / ".netrc").write_text(f"machine 127.0.0.11 login me password {CANARY}\n")
    assert read(f"curl -sn {server.url}/a.tar") == BODY
    assert "Authorization" not in server.log[-1].headers


# --- what a pipe can't do ---


def test_a_broken_connection_is_resumed_at_its_byte(servers: tuple[ShardServer, ShardServer]) -> None:
    server, _ = servers
    server.misbehave("a.tar", Fault(first=1, cut_after_bytes=300_000))
    assert read(f"curl -fsS -u me:pw {server.url}/a.tar") == BODY
    assert [seen.start for seen in server.log] == [0, 300_000]
    assert server.ranges("a.tar") == [(0, 300_000), (300_000, len(BODY))]
    assert server.log[1].headers["If-Range"]
    assert server.log[1].headers["Authorization"] == server.log[0].headers["Authorization"]


def test_the_size_is_known_and_a_dead_fillers_bytes_are_taken_up(
    servers: tuple[ShardServer, ShardServer],
) -> None:
    server, _ = servers
    origin = open_origin(f"pipe:curl -s {server.url}/a.tar", None, QUICK)
    stream = origin.open()
    version = stream.version
    stream.close()
    assert version.size == len(BODY)
    assert version.etag
    rest = origin.open(999_000, version)
    assert b"".join(rest.chunks()) == BODY[999_000:]
    rest.close()


def test_a_cut_without_curls_f_is_found(servers: tuple[ShardServer, ShardServer]) -> None:
    server, _ = servers
    server.misbehave("a.tar", Fault(cut_after_bytes=0))
    with pytest.raises(OriginCut):
        read(f"curl -s {server.url}/a.tar")


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(status=404, body=EMPTY_PAGE), OriginNotFound),
        (Fault(status=403, body=EMPTY_PAGE), OriginDenied),
        (Fault(status=500, body=EMPTY_PAGE), OriginUnavailable),
        (Fault(status=451, body=EMPTY_PAGE), OriginError),
    ],
)
def test_an_errors_page_is_an_error_without_curls_f_too(
    fault: Fault, error: type[OriginError], servers: tuple[ShardServer, ShardServer]
) -> None:
    server, _ = servers
    server.misbehave("a.tar", fault)
    assert run(f"curl -s {server.url}/a.tar") == EMPTY_PAGE
    with pytest.raises(error, match=r"a\.tar"):
        read(f"curl -s {server.url}/a.tar")


def test_a_redirect_without_curls_l_is_an_error_that_says_so(
    servers: tuple[ShardServer, ShardServer],
) -> None:
    server, other = servers
    with pytest.raises(OriginError, match="curl -L"):
        read(f"curl -fsS {server.url}/r.tar")
    assert not other.log


def test_more_redirects_than_allowed_are_an_error(servers: tuple[ShardServer, ShardServer]) -> None:
    server, _ = servers
    server.misbehave("t.tar", Fault(status=302, headers={"Location": "/s.tar"}))
    assert read(f"curl -sL --max-redirs 2 {server.url}/t.tar") == BODY
    with pytest.raises(OriginError, match="more than 1 times"):
        read(f"curl -sL --max-redirs 1 {server.url}/t.tar")


@pytest.mark.parametrize("proxied", [False, True])
@pytest.mark.parametrize(
    "host", ["169.254.169.254", "0xa9fea9fe", "[::ffff:169.254.169.254]", "[fd00:ec2::254]"]
)
def test_a_redirect_to_a_metadata_service_is_refused(
    host: str, proxied: bool, servers: tuple[ShardServer, ShardServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, proxy = servers
    server.misbehave("a.tar", Fault(status=302, headers={"Location": f"http://{host}/latest?{CANARY}"}))
    proxy.misbehave("a.tar", Fault(status=302, headers={"Location": f"http://{host}/latest?{CANARY}"}))
    url = f"pipe:curl -sL {server.url}/a.tar"
    if proxied:
        monkeypatch.setenv("http_proxy", proxy.url)
        url = "http://far-away.invalid/a.tar"
    with pytest.raises(OriginDenied, match="link-local") as caught:
        open_origin(url, None, QUICK).open()
    assert CANARY not in str(caught.value)
    assert not proxied or len(proxy.log) == 1


@pytest.mark.parametrize(
    "where", ["http://[::1", "http:///x", "//", "http://h:99999/", f"http://h:{CANARY}/"]
)
def test_a_redirect_to_nowhere_is_an_error(where: str, servers: tuple[ShardServer, ShardServer]) -> None:
    server, _ = servers
    server.misbehave("a.tar", Fault(status=302, headers={"Location": where}))
    with pytest.raises(OriginError, match=r"a\.tar") as caught:
        read(f"curl -sL {server.url}/a.tar", attempts=1)
    assert CANARY not in str(caught.value)


def test_credentials_do_not_go_from_https_to_http() -> None:
    from streamload.origins.web_client import _is_same_host

    assert _is_same_host("https://h/a", "https://h/b")
    assert _is_same_host("http://h/a", "https://h/b")
    assert not _is_same_host("https://h/a", "http://h/b")
    assert not _is_same_host("https://h/a", "https://h:8443/b")


# --- what is said of it ---


def test_one_line_in_the_log_says_which_way_is_taken(
    servers: tuple[ShardServer, ShardServer], caplog: pytest.LogCaptureFixture
) -> None:
    server, _ = servers
    with caplog.at_level(logging.INFO, logger="streamload"):
        for options in ("-s", "-sL", "-sk", "-fsk", "--compressed -s"):
            read(f"curl {options} -H 'X-Key: {CANARY}' {server.url}/a.tar")
        read(f"curl -s {server.url}/a.tar | cat")
        read("true")
    lines = [record.message for record in caplog.records]
    assert lines == [
        "pipe: curl commands are opened natively: all of their flags are supported",
        "pipe: curl commands are run by bash: -k isn't a supported option",
        "pipe: curl commands are run by bash: --compressed isn't a supported option",
        "pipe: other commands are run by bash: it is not a single curl or aws command in plain words",
    ]


def test_what_commands_need_is_imported_before_workers_are_forked() -> None:
    script = (
        "import sys\n"
        "from streamload.origins.origin import import_origins\n"
        "import_origins(['pipe:curl -s http://h/a.tar', 'pipe:cat a.tar'])\n"
        "assert {'streamload.origins.web', 'streamload.origins.pipe'} <= set(sys.modules)\n"
        "assert 'streamload.origins.s3' not in sys.modules\n"
        "import_origins(['pipe:aws s3 cp s3://bucket/a.tar -'])\n"
        "assert 'streamload.origins.s3' in sys.modules and 's3fs' not in sys.modules\n"
        "import_origins(['s3://bucket/a.tar'], {'session': None})\n"
        "assert 's3fs' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    import_origins([])


FAULTS = [
    Fault(status=403),
    Fault(status=404),
    Fault(status=503),
    Fault(silent=True),
    Fault(cut_after_bytes=10),
    Fault(stall_after_bytes=10),
    Fault(status=500),
    Fault(status=302, headers={"Location": f"http://me:{CANARY}@127.0.0.1:9/?t={CANARY}"}),
    Fault(status=302, headers={"Location": f"ftp://me:{CANARY}@h/?t={CANARY}"}),
    Fault(status=302, headers={"Location": f"http://169.254.169.254/?t={CANARY}"}),
]


@pytest.mark.parametrize("behind", ["", " | cat"], ids=["natively", "run"])
@pytest.mark.parametrize("fault", FAULTS)
def test_no_secret_of_a_command_is_in_an_error_a_log_or_a_repr(
    fault: Fault,
    behind: str,
    servers: tuple[ShardServer, ShardServer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, _ = servers
    server.misbehave("a.tar", fault)
    command = (
        f"curl -fsSLHX-Foo:{CANARY} -u me:{CANARY} -H 'Cookie: c={CANARY}' "
        f"'{server.url}/a.tar?sig={CANARY}'{behind}"
    )
    assert isinstance(parse_command(command), Opaque if behind else CommandRequest)
    with caplog.at_level(logging.DEBUG):
        origin = open_origin(
            f"pipe:{command}", None, OriginOptions(attempts=2, backoff_seconds=0.01, stall_seconds=0.3)
        )
        with pytest.raises(StreamloadError) as caught:
            list(origin.open().chunks())
    error: BaseException | None = caught.value
    while error is not None:
        assert CANARY not in f"{error!s} {error!r}"
        error = error.__cause__
    assert CANARY not in f"{origin!r} {origin.url} {caplog.text}"


@pytest.mark.parametrize(
    "urls",
    [
        f"-oProxyCommand=https://me:{CANARY}@h/",
        f"https://-o/a.tar?t={CANARY}",
        f"s3://-o/a.tar?t={CANARY}",
        f"https://me:{CANARY}/x@h/a.tar",
        f"https://me:x/{CANARY}@h/a.tar",
        f"https://me:{CANARY}?x@h/a.tar",
        f"https://me:{CANARY}@h:port/a.tar",
        f"https://me:{CANARY}@/a.tar",
        f"https://me:{CANARY}@h/{{a.tar?t={CANARY}",
        f"https://me:{CANARY}@h/{{0...9}}?t={CANARY}",
        f"https://me:{CANARY}@h/${{NO_SUCH}}?t={CANARY}",
        f"nothing://me:{CANARY}@h/a.tar?t={CANARY}",
        f"pipe:curl -u me:{CANARY} {{ http://h/",
    ],
)
def test_a_url_that_nobody_can_open_is_refused_without_its_secrets(urls: str) -> None:
    with pytest.raises(StreamloadError) as caught:
        expand_urls(urls)
    error: BaseException | None = caught.value
    while error is not None:
        assert CANARY not in f"{error!s} {error!r}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_no_secret_of_a_command_is_in_a_tiers_files(
    servers: tuple[ShardServer, ShardServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, _ = servers
    for path in write_shards(server.root, [3, 4], seed=1):
        assert path.exists()
    command = f"curl -sLHX-Foo:{CANARY} -u me:{CANARY} '{server.url}/{{00000..00002}}.tar?sig={CANARY}'"
    for urls in (
        f"pipe:{command}",
        f"pipe:{command} | cat",
        f"{server.url}/{{00000..00002}}.tar?token={CANARY}",
    ):
        tier = tmp_path / f"tier{len(urls)}"
        with caplog.at_level(logging.DEBUG):
            report = warm(urls, cache_dir=tier, cache_size="1GB")
        assert report.shards_complete == 2
        assert CANARY not in repr(report)
        for path in tier.rglob("*"):
            assert CANARY not in path.name
            assert path.is_dir() or CANARY.encode() not in path.read_bytes()
    assert CANARY not in caplog.text


# --- aws ---


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        server.create_bucket("bucket")
        server.put("bucket", "x/private.tar", BODY)
        server.put("bucket", "a b+c=d'.tar", OTHER)
        server.put("bucket", "public.tar", OTHER, public=True)
        yield server


@pytest.mark.skipif(not AWS, reason="needs the aws command")
@pytest.mark.parametrize(
    "command",
    [
        "aws s3 cp s3://bucket/x/private.tar -",
        "aws s3 cp 's3://bucket/a b+c=d'\"'.tar\" - --quiet",
        "aws s3 cp --only-show-errors --no-progress s3://bucket/x/private.tar - --region us-east-1",
        "aws --endpoint-url {endpoint} s3 cp s3://bucket/x/private.tar -",
        "aws s3 cp s3://bucket/public.tar - --no-sign-request --endpoint-url={endpoint}/",
        "aws s3 cp --profile other s3://bucket/x/private.tar - --cli-read-timeout 30",
    ],
)
@pytest.mark.sampled(2)
def test_an_understood_aws_command_gives_what_aws_prints(
    command: str, s3: S3Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environ.items():
        if "{endpoint}" not in command or name != "AWS_ENDPOINT_URL":
            monkeypatch.setenv(name, value)
    if "--no-sign-request" in command or "--profile" in command:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (home / ".aws").mkdir()
    (home / ".aws" / "credentials").write_text(
        f"[other]\naws_access_key_id = {s3.key}\naws_secret_access_key = {s3.secret}\n"
    )
    command = command.format(endpoint=s3.endpoint)
    assert isinstance(parse_command(command), CommandRequest)
    natively = read(command, stall_seconds=30)
    assert natively in (BODY, OTHER)
    assert natively == run(command)


def test_an_aws_command_without_credentials_asks_nobody_anonymously(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(OriginDenied):
        read(f"aws s3 cp s3://bucket/public.tar - --region us-east-1 --endpoint-url {s3.endpoint}")


def test_an_aws_commands_own_options_count_and_not_those_of_listed_urls(s3: S3Server) -> None:
    wrong = {"endpoint_url": "http://127.0.0.1:9", "key": "x", "secret": "y"}
    url = f"pipe:aws s3 cp s3://bucket/public.tar - --no-sign-request --endpoint-url {s3.endpoint}"
    assert b"".join(open_origin(url, wrong, QUICK).open().chunks()) == OTHER


@pytest.mark.skipif(not AWS, reason="needs the aws command")
def test_any_other_aws_command_is_run_as_it_is(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environ.items():
        monkeypatch.setenv(name, value)
    command = "aws s3 cp s3://bucket/public.tar - --page-size 10"
    assert isinstance(parse_command(command), Opaque)
    assert read(command, stall_seconds=60) == OTHER
