"""When two URLs are one shard, and what may be shown of them."""

import os

import pytest

from streamload.errors import UrlError
from streamload.urls import (
    basename,
    digest,
    folder_of,
    identity,
    is_local,
    local_path,
    redact,
    redact_text,
    scheme,
    scrub,
    secrets_of,
)


@pytest.fixture(autouse=True)
def _no_endpoints(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "https://b.s3.amazonaws.com/a.tar?X-Amz-Signature=1&X-Amz-Date=2",
            "https://b.s3.amazonaws.com/a.tar?X-Amz-Signature=3&X-Amz-Expires=9",
        ),
        ("https://h/a.tar?sv=1&sig=abc&se=2030", "https://h/a.tar"),
        ("https://h/a.tar?Expires=1&Signature=x&Key-Pair-Id=K", "https://h/a.tar"),
        ("https://me:secret@h/a.tar", "https://h/a.tar"),
        ("https://h/a.tar?token=1&access_token=2&API_KEY=3", "https://h/a.tar?token=4"),
        ("https://h/a.tar?v=1&token=1", "https://h/a.tar?v=1"),
        ("https://me@h/a.tar", "https://h/a.tar"),
        ("HTTPS://Host:443/a.tar", "https://host/a.tar"),
        ("http://h:80/a.tar#part", "http://h/a.tar"),
        ("s3a://bucket/a.tar", "s3://bucket/a.tar"),
        ("file:///data/a.tar", "/data/a.tar"),
        ("file:a.tar", "./x/../a.tar"),
    ],
)
def test_these_are_one_shard(one, other):
    assert identity(one) == identity(other)
    assert digest(one) == digest(other)
    assert len(digest(one)) == 32


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://h/x/a.tar", "https://h/y/a.tar"),
        ("https://h/a.tar", "http://h/a.tar"),
        ("https://h/a.tar", "https://h:8443/a.tar"),
        ("https://h/a.tar?version=1", "https://h/a.tar?version=2"),
        ("https://h/get?st=1", "https://h/get?st=2"),
        ("https://h/get?tokens=1", "https://h/get?tokens=2"),
        ("s3://bucket/a.tar", "gs://bucket/a.tar"),
        ("s3://bucket/a.tar?versionId=1", "s3://bucket/a.tar?versionId=2"),
        ("hf://datasets/me/x@v1/a.tar", "hf://datasets/me/x@v2/a.tar"),
        ("pipe:cat a.tar", "pipe:cat b.tar"),
        ("/a/0.tar", "/b/0.tar"),
    ],
)
def test_these_are_two_shards(one, other):
    assert identity(one) != identity(other)
    assert digest(one) != digest(other)


def test_an_endpoint_is_part_of_the_identity(monkeypatch):
    plain = digest("s3://b/a.tar")
    minio = {"endpoint_url": "http://minio:9000/"}
    assert digest("s3://b/a.tar", minio) != plain
    assert digest("s3://b/a.tar", {"client_kwargs": {"endpoint_url": "http://MINIO:9000"}}) == digest(
        "s3://b/a.tar", minio
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://minio:9000")
    assert digest("s3://b/a.tar") == digest("s3://b/a.tar", minio)
    assert digest("https://h/a.tar") == digest("https://h/a.tar", minio)


def test_credentials_are_no_part_of_the_identity():
    options = {"key": "k", "secret": "s", "endpoint_url": "http://k:s@minio:9000"}
    assert "s@" not in identity("s3://b/a.tar", options)
    assert identity("s3://b/a.tar", options) == identity(
        "s3://b/a.tar", {"endpoint_url": "http://minio:9000"}
    )


def test_schemes_and_local_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert [scheme(u) for u in ("pipe:x", "/a", "a.tar", "file:///a", "S3://b/a", "gcs://b/a")] == [
        "pipe", "file", "file", "file", "s3", "gs",
    ]  # fmt: skip
    assert os.fspath(local_path("file:///a b/c.tar")) == "/a b/c.tar"
    assert os.fspath(local_path("file://localhost/c.tar")) == "/c.tar"
    assert os.fspath(local_path("~/c.tar")) == "/home/me/c.tar"
    assert is_local("c.tar")
    assert not is_local("pipe:cat c.tar")


def test_local_paths_fails_for_what_is_far_away():
    with pytest.raises(UrlError, match="not a local file"):
        local_path("https://h/a.tar")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://h/x/a.tar?y=b/c", "a.tar"),
        ("s3://b/x/a.tar", "a.tar"),
        ("/x/a.tar", "a.tar"),
        ("pipe:curl -s 'https://h/x/a.tar?y=1' | cat", "a.tar"),
        ("pipe:aws s3 cp s3://b/x/a.tar -", "a.tar"),
        ("pipe:gzip -dc /x/a.tar.gz", "a.tar.gz"),
        ("pipe:make-a-shard 7", "pipe"),
    ],
)
def test_basenames(url, name):
    assert basename(url) == name


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:pw@h/x/a.tar?sig=s#f", "https://h/x/a.tar"),
        ("s3://k:s@b/a.tar?versionId=1", "s3://b/a.tar"),
        ("abfs://c@account.dfs.core.windows.net/a.tar", "abfs://c@account.dfs.core.windows.net/a.tar"),
        ("hf://datasets/me/x@main/a.tar", "hf://datasets/me/x@main/a.tar"),
        ("/x/a.tar", "/x/a.tar"),
        ("s3://KEY:SE/CR+ET@b/a.tar", "s3://b/a.tar"),
        ("webhdfs://h:9870/x@1/a.tar", "webhdfs://h:9870/x@1/a.tar"),
        ("webhdfs://me@h:9870/x@1/a.tar", "webhdfs://h:9870/x@1/a.tar"),
        ("smb://me;pw@h/a.tar", "smb://h/a.tar"),
        ("https://h/x;token=s3/a.tar;v=1", "https://h/x;token=***/a.tar;v=1"),
        ("https://h/a.tar%3Ftoken=s3", "https://h/a.tar"),
        ("https://h/a.tar%253Ftoken%253Ds3", "https://h/a.tar"),
        ("https://h/what%3F/a.tar", "https://h/what%3F/a.tar"),
        ("pipe:curl -fsS https://h:80/x/a.tar?y=1 | cat", "pipe:curl https://h:80 a.tar"),
        ("pipe:aws s3 cp s3://b/x/a.tar -", "pipe:aws s3://b a.tar"),
        ("pipe:X='a b' Y=1 /usr/bin/zstd -dc /x/a.tar.zst", "pipe:zstd a.tar.zst"),
        ("pipe:X=$(cat secret now) get a.tar", "pipe:command a.tar"),
        ("pipe:(cd /x; cat *)", "pipe:command"),
        ("pipe:curl https://h/get?a.tar", "pipe:curl https://h a.tar"),
    ],
)
def test_what_is_shown_of_a_url(url, shown):
    assert redact(url) == shown


@pytest.mark.parametrize(
    "command",
    [
        "curl -H 'Authorization: Bearer S3CRET' https://h/a.tar",
        'curl -sH "X-Api-Key: S3CRET" https://h/a.tar',
        "curl '-HX-Api-Key: S3CRET' https://h/a.tar",
        "curl -HX-Any:S3CRET https://h/a.tar",
        "curl --header 'Private: S3CRET' https://h/a.tar",
        "curl --header='Private: S3CRET' https://h/a.tar",
        "curl -u me:S3CRET https://h/a.tar",
        "curl -ume:S3CRET https://h/a.tar",
        "curl --user me:S3CRET https://h/a.tar",
        "curl --oauth2-bearer S3CRET https://h/a.tar",
        "curl -b session=S3CRET https://h/a.tar",
        "curl --proxy-user me:S3CRET https://h/a.tar",
        "curl 'https://h/a.tar?X-Amz-Signature=S3CRET&y=1'",
        "curl https://me:S3CRET@h/a.tar",
        "wget --http-password=S3CRET -qO- https://h/a.tar",
        "AWS_SECRET_ACCESS_KEY=S3CRET aws s3 cp s3://b/a.tar -",
        "env HF_TOKEN='S3CRET' hf download x",
        "azcopy cp 'https://x.blob.core.windows.net/c/a.tar?sv=1&sig=S3CRET' -",
        "mc --password S3CRET cat x/a.tar",
        "get --api-key S3CRET https://h/a.tar",
        "get --api_key=S3CRET https://h/a.tar",
        "get --access-key 'S3CRET' https://h/a.tar",
        "az storage blob download --account-key S3CRET -n a.tar",
        "curl https://h/a.tar.gpg | gpg --batch --passphrase S3CRET -d",
        "rclone cat --sftp-pass S3CRET r:a.tar",
        "rclone cat --webdav-pass=S3CRET r:a.tar",
        "curl https://h/a.enc | openssl enc -d -aes-256-cbc -k S3CRET",
        "openssl enc -d -pass pass:S3CRET -in a.enc",
        "openssl enc -d -passin 'pass:S3CRET' -in a.enc",
        "sshpass -p S3CRET ssh u@h cat /a.tar",
        "sshpass -v -pS3CRET ssh u@h cat /a.tar",
        "http -a me:S3CRET https://h/a.tar",
        "http --ignore-stdin -a 'me:S3CRET' https://h/a.tar",
        "curl -d S3CRET https://h/a.tar",
        "curl -fsSd 'pw=1&x=S3CRET y' https://h/a.tar",
        "curl -dS3CRET -d 'x=S3CRET' https://h/a.tar",
        "curl '-dx=1 S3CRET' https://h/a.tar",
        'curl https://h/a.tar -F "key=S3CRET;type=x"',
        "curl --data S3CRET https://h/a.tar",
        "curl --data-urlencode=S3CRET https://h/a.tar",
        'curl --data-raw \'{"x": "S3CRET"}\' https://h/a.tar',
        'curl --json \'{"x": "S3CRET"}\' https://h/a.tar',
        "curl --url-query x=S3CRET https://h/a.tar",
        "curl --form x=S3CRET --form-string y=S3CRET https://h/a.tar",
        "bash -c 'curl -s -d S3CRET https://h/a.tar'",
        "curl -x me:S3CRET@proxy:3128 https://h/a.tar",
        "curl -x http://me:S3CRET@proxy:3128 https://h/a.tar",
        "curl me:S3CRET@h/a.tar",
        "curl 'h.example/a.tar?X-Amz-Signature=S3CRET&X-Amz-Date=1'",
        "curl h.example/get?sig=S3CRET'&'a.tar",
        "hadoop fs -Dfs.s3a.secret.key=S3CRET -cat s3a://b/a.tar",
        "swift -K S3CRET download c a.tar -o -",
        "unzip -P S3CRET -p a.zip a.tar",
        "curl -v -H 'Private: S3CRET' https://h/a.tar",
        "A=1 B='x S3CRET' get a.tar",
    ],
)
def test_secrets_of_a_command_are_not_shown(command):
    url = f"pipe:{command}"
    shown = redact(url)
    assert "S3CRET" not in shown
    assert redact(shown) == shown
    assert "S3CRET" not in scrub(f"+ {command}\nsh: {command}: it failed", secrets_of(url))
    assert "S3CRET" not in scrub("> Private: S3CRET, x\n* user S3CRET\n", secrets_of(url))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("curl -fsSLk -o - https://h/x/a.tar | gzip -dc", "curl: (22) The requested URL returned error: 404"),
        ("cat /data/x/a.tar", "cat: /data/x/a.tar: No such file or directory"),
        (
            "aws s3 cp s3://b/x/a.tar -",
            "fatal error: An error occurred (403) when calling HeadObject: Forbidden",
        ),
        ("ssh -p 22 h cat a.tar", "ssh: connect to host h port 22: Connection refused"),
    ],
)
def test_what_a_command_said_is_shown_where_no_secret_is_in_it(command, said):
    assert scrub(said, secrets_of(f"pipe:{command}")) == said


def test_a_header_that_curl_tells_of_is_not_shown():
    said = (
        "> GET /a.tar?sig=S3CRET HTTP/1.1\r\n> Private: S3CRET\r\n< X-Any: S3CRET\r\n< HTTP/1.1 404 Not Found"
    )
    assert "S3CRET" not in redact_text(said)
    assert "HTTP/1.1 404 Not Found" in redact_text(said)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("https://me:S3CRET@h/a.tar", None),
        ("https://me:S3%43RET@h/a.tar", None),
        ("https://S3CRET@h/a.tar", None),
        ("s3://KEY:xx/S3CRET@b/a.tar", None),
        ("https://h/a.tar?x=S3CRET&y=1#S3CRET", None),
        ("https://h/x;token=S3CRET/a.tar", None),
        ("https://h/a.tar%3Ftoken=S3CRET", None),
        ("webhdfs://me:S3CRET@h/a.tar", None),
        ("s3://b/a.tar", {"client_kwargs": {"aws_secret_access_key": "S3CRET"}}),
        ("https://h/a.tar", {"headers": {"X-Any": "Bearer S3CRET"}}),
        ("https://h/a.tar", {"headers": {"https://h": {"X-Any": "S3CRET"}}}),
    ],
)
def test_the_secrets_of_a_url_are_known_literally(url, options):
    found = secrets_of(url, options)
    assert "S3CRET" not in scrub(f"no bucket 'KEY:xx/S3CRET@b'{'' if 'xx' in url else ' for S3CRET'}", found)
    assert not {"h", "b", "a.tar"} & set(found)
    if "me:" in url:
        assert "bWU6UzNDUkVU" not in scrub("Basic? bWU6UzNDUkVU", found)


@pytest.mark.parametrize(
    "some",
    ["curl ", "curl -d ", "curl '", 'curl "\\"', "openssl ", "openssl -k ", "http ", "pass:", "--a-", "-d"],
)
@pytest.mark.sampled(3)
def test_a_long_command_is_redacted_in_linear_time(some):
    redact_text(some * 30_000)  # or the test's time limit
    redact(f"pipe:{some * 30_000}")
    secrets_of(f"pipe:{some * 30_000}")


def test_secrets_in_what_a_command_said_are_not_shown():
    said = "> Authorization: Basic S3CRET\r\nhttps://h/a.tar?token=S3CRET failed\nset-cookie: S3CRET"
    assert "S3CRET" not in redact_text(said)
    assert "failed" in redact_text(said)


def test_the_name_in_a_command_with_a_long_token_is_found_in_linear_time():
    token = "x" * 300_000
    assert basename(f"pipe:curl -H 'X: {token}' https://h/x/a.tar") == "a.tar"


def test_a_folder_has_the_files_below_it_and_not_those_of_one_whose_name_begins_alike():
    assert folder_of("/data/a/b.tar", ["/data2", "/data"]) == "/data"
    assert folder_of("/data2/a.tar", ["/data"]) is None
    assert folder_of("file:///data/../data2/a.tar", ["/data/"]) is None
    assert folder_of("/anything/a.tar", ["/"]) == "/"
    assert folder_of("s3://data/a.tar", ["/"]) is None
