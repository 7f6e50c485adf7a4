"""Which commands are understood, and what they ask for; bash itself says what the words of a command are."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from streamload.urls import (
    command_environment,
    digest,
    expand_urls,
    identity,
    redact,
)
from streamload.urls.commands import CommandRequest, Opaque, parse_command, plain_words


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any configuration."""
    for name in list(os.environ):
        if re.match(r"(?i)AWS_|CURL_|FSSPEC_|XDG_CONFIG|BASH_|(https?|all|no)_proxy$", name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(command_environment, "_own_home", lambda: str(tmp_path))
    command_environment._look.cache_clear()
    return tmp_path


def asked(command: str) -> CommandRequest:
    command_environment._look.cache_clear()
    request = parse_command(command)
    assert isinstance(request, CommandRequest), request
    return request


def reason(command: str) -> str:
    command_environment._look.cache_clear()
    request = parse_command(command)
    assert isinstance(request, Opaque), request
    return request.reason


PIECES = st.one_of(
    st.sampled_from(["s3://b/k.tar", "https://h/a.tar", "http://u:p@h:80/a?b=c", "\n", "\t", "A=b", "$(id)"]),
    st.sampled_from(["-s", "-L", "-fsSL", "-o", "-", "-H", "'A: b'", "--retry", "3", "-u", "me:pw", "-sSo-"]),
    st.sampled_from(["aws", "s3", "cp", "curl", "--endpoint-url", "--region", "x", "="]),
    st.sampled_from("\"'\\|&;<>()$`*?[]{}~#!^"),
    st.text(max_size=4),
)
COMMANDS = st.one_of(
    st.text(),
    st.lists(PIECES).map(" ".join),
    st.lists(PIECES).map("".join),
    st.lists(PIECES).map(lambda pieces: "curl http://h/a.tar " + " ".join(pieces)),
    st.lists(PIECES).map(lambda pieces: "aws s3 cp s3://bucket/a.tar - " + " ".join(pieces)),
)


@pytest.mark.deep
@settings(max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(COMMANDS)
@example("curl http://h/a.tar -H 'A: $(id)'")
@example("curl http://h/a.tar -H 'A: b' ; id")
@example("curl http://h/a.tar\nid")
@example("curl http://h/a.tar?x=1")
def test_understanding_never_raises_and_never_reads_over_what_means_something_to_a_shell(
    command: str,
) -> None:
    request = parse_command(command)
    identity(f"pipe:{command}")
    redact(f"pipe:{command}")
    if isinstance(request, CommandRequest):
        outside = re.sub(r"'[^']*'|\"[^\"]*\"", "", command).strip(" \t\n")
        assert not set(outside) & set("|&;<>()$`*?[]{}~#!^\\\n\"'")
        assert "$" not in "".join(re.findall(r"\"[^\"]*\"", re.sub(r"'[^']*'", "", command)))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(COMMANDS, st.lists(PIECES).map(lambda pieces: "curl 'a b'\"c 'd'\" " + " ".join(pieces))))
@example("curl 'a'\"b\"c '' \"it's\" 'say \"so\"' a=b")
@example("curl \t'\t' a ")
@example('curl "$HOME"')
@example(r'curl "a\\b"')
def test_words_are_those_of_bash(command: str) -> None:
    words = plain_words(command)
    if words is None or words[0] != "curl":
        return
    said = subprocess.run(
        ["bash", "-c", "curl() { printf '%s\\0' \"$@\"; }; " + command],
        capture_output=True,
        check=True,
        cwd="/",
    )
    assert said.stdout.decode() == "".join(f"{word}\0" for word in words[1:]) or len(words) == 1


def test_a_curl_command_is_a_request_with_its_headers() -> None:
    request = asked(
        "curl -fsS -L -u 'me:p w' -H 'X-Key: a b ' -A agent/1 --retry 3 -m 60 'https://h:8443/a%20b.tar?x=1&y=2'"
    )
    assert (request.program, request.url) == ("curl", "https://h:8443/a%20b.tar?x=1&y=2")
    assert request.headers == {"User-Agent": "agent/1", "Accept": "*/*"}
    assert request.own_headers == {"X-Key": "a b", "Authorization": "Basic bWU6cCB3"}
    assert request.redirects == 50
    assert asked("curl http://me:p%20w@h/a.tar").own_headers == {"Authorization": "Basic bWU6cCB3"}
    assert asked("curl http://h/a.tar").redirects == 0
    assert asked("curl -L --max-redirs 3 http://h/a.tar").redirects == 3
    assert asked("curl --oauth2-bearer t.o-k http://h/a").own_headers == {"Authorization": "Bearer t.o-k"}
    assert "p w" not in repr(request)
    assert "bWU6" not in repr(request)


def test_an_aws_command_is_a_request_with_storage_options() -> None:
    request = asked(
        "aws --endpoint-url http://minio:9000 s3 cp s3://b-1/x/a.tar - "
        "--region=eu-x-1 --no-sign-request --quiet"
    )
    assert (request.program, request.url) == ("aws", "s3://b-1/x/a.tar")
    assert request.storage_options == {
        "anon": True,
        "endpoint_url": "http://minio:9000",
        "client_kwargs": {"region_name": "eu-x-1"},
    }
    assert asked("aws s3 cp s3://b-1/a.tar - --profile me").storage_options == {
        "anon": False,
        "profile": "me",
    }


URL = "http://h/a.tar"


# Each line is one command; U is a URL, S an S3 object.
RUN_AS_THEY_ARE = r"""
cat a.tar
true
'
curl
curl -s
curl ''
wget -qO- U
curl U | cat
curl U || true
curl U &
curl U; true
(curl U)
curl U > /dev/stdout
curl U 2>/dev/null
curl \U
curl $URL
curl "$URL"
curl -H "A: $HOME" U
curl -H "A: `id`" U
curl -H "A: \"b" U
curl -H A:$'b' U
curl `url`
curl $(url)
A=b curl U
exec curl U
curl U?x=1
curl http://h/*.tar
curl 'http://h/{a,b}.tar'
curl 'http://h/[1-2].tar'
curl U U
curl U --url U
curl h/a.tar
curl ftp://h/a
curl file:///a.tar
curl -H 'A: ü' U
curl http://h/ü.tar
curl http://h/../a.tar
curl http://h/%2e%2E/a.tar
curl http://h:99999/a
curl http://h:1:2/a
curl http://@h/a
curl http://me@h/a
curl http://h/a#b
curl 'http://h/a b'
curl http://h/%zz
curl 'http://[::1]/a'
curl U --
curl U -
curl -k U
curl --insecure U
curl -r 0-9 U
curl -C - U
curl -x p U
curl --noproxy '*' U
curl -E c.pem U
curl --cacert c.pem U
curl -K f U
curl -n U
curl -o a.tar U
curl -O U
curl -I U
curl -i U
curl -d a=b U
curl -X POST U
curl -G U
curl -w '%{http_code}' U
curl --compressed U
curl --limit-rate 1M U
curl --resolve h:80:1.2.3.4 U
curl --connect-to ::x: U
curl -4 U
curl --digest -u a:b U
curl -u me U
curl -b jar U
curl -L -b a=b U
curl -H @file U
curl -H 'A:' U
curl -H 'A;' U
curl -H 'Range: bytes=0-9' U
curl -H 'Host: x' U
curl -H 'accept-encoding: gzip' U
curl -H 'A: b' -H 'a: c' U
curl -u a:b -H 'Authorization: x' U
curl -u a:b -u c:d U
curl -u a:b http://c:d@h/a.tar
curl --retry x U
curl --retry=3 U
curl --silen U
curl -sZ U
curl U -H
curl --location-trusted U
curl -z x U
aws
aws s3 ls s3://bucket/
aws s3 cp S .
aws s3 cp - S
aws s3 cp s3://bucket/ -
aws s3 cp s3://bucket -
aws s3 cp s3://bucket/a* -
aws s3 sync a b
aws s3 cp S - --recursive
aws s3 cp S - --no-verify-ssl
aws s3 cp S - --ca-bundle x
aws s3 cp S - --sse-c
aws s3 cp S - --region
aws s3 cp S - --region ''
aws s3 cp S - --profile -x
aws s3 cp S - --endpoint-url x
aws s3 cp S - --endpoint-url http://me:pw@h
aws s3 cp S - --request-payer
aws s3 cp S - | cat
aws s3 cp S - --query x
aws s3 cp S - --quiet=1
aws s3 cp S - --region a --region b
aws s3 cp S - -
aws s3 cp S - --exclude x
aws s3 cp S - --dryrun
aws --quiet s3 cp S -
aws s3 cp s3://arn:aws:s3/a -
aws s3 cp s3://bucket/a?b -
aws s3 cp s3://bucket//a -
aws s3 cp s3://bucket/../a -
aws s3api get-object --bucket b --key k -
"""


@pytest.mark.parametrize(
    "command",
    [
        *re.sub(r"\bS\b", "s3://bucket/a.tar", re.sub(r"\bU\b", URL, RUN_AS_THEY_ARE)).split("\n"),
        f"curl {URL}\ntrue",
        f"curl \\\n {URL}",
    ],
)
def test_a_command_with_anything_else_in_it_is_run_as_it_is(command: str) -> None:
    assert reason(command)
    assert identity(f"pipe:{command}") == f"pipe:{command}"


def test_a_reason_names_the_option_and_no_value() -> None:
    assert "--compressed" in reason(f"curl --compressed {URL}")
    assert "-k" in reason(f"curl -sk {URL}")
    for command in (
        f"curl -pS3CRET {URL}",
        f"curl --x-token=S3CRET {URL}",
        f"curl --retry S3CRET {URL}",
        f"curl -u S3CRET {URL}",
        f"curl -H S3CRET {URL}",
        f"curl -o S3CRET {URL}",
        "curl http://h/S3CRET#S3CRET",
        "aws s3 cp s3://bucket/a - --S3CRET=S3CRET",
        "aws s3 cp s3://bucket/a S3CRET",
    ):
        assert "S3CRET" not in reason(command)


@pytest.mark.parametrize("place", [".curlrc", ".config/curlrc"])
def test_a_curlrc_means_the_real_command(home: Path, place: str) -> None:
    asked(f"curl {URL}")
    (home / place).parent.mkdir(exist_ok=True)
    (home / place).write_text("max-filesize = 1\n")
    assert reason(f"curl {URL}") == "there is a .curlrc"
    assert reason(f"curl -sq {URL}")  # -q is only heeded in front
    asked(f"curl -qs {URL}")


@pytest.mark.parametrize("variable", ["CURL_HOME", "XDG_CONFIG_HOME"])
def test_a_curlrc_elsewhere_means_the_real_command(
    home: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "there").mkdir()
    (home / "there" / ".curlrc").write_text("insecure\n")
    asked(f"curl {URL}")
    monkeypatch.setenv(variable, str(home / "there"))
    assert reason(f"curl {URL}") == "there is a .curlrc"


@pytest.mark.parametrize(
    ("name", "value", "command"),
    [
        ("http_proxy", "http://proxy:1", f"curl {URL}"),
        ("ALL_PROXY", "http://proxy:1", f"curl {URL}"),
        ("HTTPS_PROXY", "http://proxy:1", "aws s3 cp s3://bucket/a.tar -"),
        ("CURL_CA_BUNDLE", "/ca.pem", "curl https://h/a.tar"),
        ("BASH_ENV", "/aliases.sh", f"curl {URL}"),
        ("BASH_FUNC_curl%%", "() { echo mine; }", f"curl {URL}"),
        ("FSSPEC_S3_ENDPOINT_URL", "http://minio:9000", "aws s3 cp s3://bucket/a.tar -"),
    ],
)
def test_a_variable_that_matters_means_the_real_command(
    name: str, value: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(command)
    monkeypatch.setenv(name, value)
    assert name.split("_S3")[0].partition("%%")[0] in reason(command)
    assert value not in reason(command)


def test_a_wrapper_of_curl_means_the_real_command(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = home / "curl"
    wrapper.write_text("#!/bin/sh\nexec /usr/bin/curl -k $@\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    assert "script" in reason(f"curl {URL}")


def test_a_configuration_of_aws_that_only_aws_reads_means_the_real_command(home: Path) -> None:
    command = "aws s3 cp s3://bucket/a.tar -"
    (home / ".aws").mkdir()
    (home / ".aws" / "config").write_text("[default]\nregion = us-east-1\n")
    assert asked(command).named_by_url
    (home / ".aws" / "config").write_text("[plugins]\nendpoint = awscli_plugin_endpoint\n[default]\n")
    assert "plugins" in reason(command)
    (home / ".aws" / "config").write_text("[default]\nendpoint_url = http://minio:9000\n")
    assert not asked(command).named_by_url  # which service it is stands somewhere else
    (home / ".aws" / "cli").mkdir()
    (home / ".aws" / "cli" / "alias").write_text("[toplevel]\ns3 = ec2\n")
    assert "aliases" in reason(command)


@pytest.mark.parametrize(
    ("command", "url"),
    [
        ("curl -fsSL https://h/a.tar", "https://h/a.tar"),
        ("curl -s -u me:pw 'https://h/a.tar'", "https://h/a.tar"),
        ("curl -H 'Authorization: Bearer x' https://me.h/a.tar", "https://me.h/a.tar"),
        ("curl https://me:pw@h/a.tar --retry 3", "https://h/a.tar"),
        ("curl 'https://h/a.tar?X-Amz-Signature=1&X-Amz-Date=2'", "https://h/a.tar"),
        ("aws s3 cp s3://bucket/a.tar - --quiet --region us-east-1", "s3://bucket/a.tar"),
    ],
)
def test_an_understood_command_is_the_shard_of_its_url(command: str, url: str) -> None:
    assert identity(f"pipe:{command}") == identity(url)
    assert digest(f"pipe:{command}") == digest(url)


@pytest.mark.parametrize(
    "command",
    [
        "curl -H 'Accept: application/octet-stream' https://h/a.tar",
        "curl -b user=me https://h/a.tar",
        "curl -H 'X-Tenant: me' https://h/a.tar",
        "curl -k https://h/a.tar",
        "aws s3 cp s3://bucket/a.tar - --profile me",
    ],
)
def test_a_command_that_may_choose_other_bytes_keeps_an_identity_of_its_own(command: str) -> None:
    assert identity(f"pipe:{command}") == f"pipe:{command}"


def test_an_endpoint_is_part_of_an_aws_commands_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "pipe:aws s3 cp s3://bucket/a.tar -"
    minio = f"{plain} --endpoint-url http://minio:9000"
    assert digest(minio) == digest("s3://bucket/a.tar", {"endpoint_url": "http://minio:9000/"})
    assert digest(minio) != digest(plain)
    assert digest(plain, {"endpoint_url": "http://minio:9000"}) == digest(plain)  # those are for listed URLs
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert digest(plain) == digest(minio)


def test_patterns_give_commands_that_are_understood() -> None:
    commands = expand_urls("pipe:curl -fsSL https://h/{000..002}.tar")
    assert [asked(command.removeprefix("pipe:")).url for command in commands] == [
        f"https://h/00{n}.tar" for n in range(3)
    ]
