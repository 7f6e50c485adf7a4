"""Lists of URLs as others may read them: nothing secret goes out, nothing foreign comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.errors import UrlError
from streamload.urls import expand_urls, redact
from streamload.urls.manifest import read_down, write_down

PATTERNS = [
    "https://host/a/{00000..01242}.tar",
    "s3://bucket/{train,more}/{0..99}-{000..123}.tar",
    "https://host/{9..0}.tar::s3://b/x.tar",
    ["https://host/a.tar", "https://host/b.tar"],
    "hf://datasets/o/n/{0..7..2}.tar",
    "https://host/a-{8..12}.tar",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_written_is_read_as_the_same_list(pattern: Any) -> None:
    listed = expand_urls(pattern)
    assert list(read_down(json.loads(json.dumps(write_down(listed))))) == list(listed)


def test_a_pattern_of_a_million_is_written_in_some_hundred_bytes() -> None:
    written = json.dumps(write_down(expand_urls("https://host/d/{0000000..0999999}.tar")))
    assert len(written) < 300
    assert len(read_down(json.loads(written))) == 1_000_000


@pytest.mark.parametrize(
    "pattern",
    [
        "https://me:SECRET@host/{000..120}.tar?X-Amz-Signature=SECRET",
        ["https://host/a.tar?sig=SECRET&se=1", "s3://bucket/b.tar?sig=SECRET"],
        "https://host/{000..120}.tar?token=SECRET",
        "pipe:curl -fsSL -H 'Authorization: Bearer SECRET' https://host/{000..120}.tar",
    ],
)
def test_no_secret_is_written(pattern: Any) -> None:
    listed = expand_urls(pattern)
    written = json.dumps(write_down(listed))
    assert "SECRET" not in written
    assert len(read_down(json.loads(written))) == len(listed)


def test_a_command_that_is_understood_is_written_as_what_it_asks_for() -> None:
    written = write_down(expand_urls("pipe:curl -fsSL https://host/{000..120}.tar"))
    assert written == [["https://host/", 0, 121, 1, 3, ".tar"]]


@pytest.mark.parametrize(
    "pattern",
    [
        "/data/{0..9}.tar",
        "file:///data/a.tar",
        "pipe:cat /data/{0..9}.tar",
        "pipe:curl https://h/a | zcat",
    ],
)
def test_what_is_of_use_here_only_is_not_written(pattern: str) -> None:
    with pytest.raises(UrlError):
        write_down(expand_urls(pattern))


FORGED: list[Any] = [
    None,
    {},
    [],
    "https://host/a.tar",
    [7],
    [None],
    [["https://host/", 0, 2, 1, 3]],
    [["https://host/", 0, 2, 0, 3, ".tar"]],
    [["https://host/", 2, 0, 1, 3, ".tar"]],
    [["https://host/", -2, 0, 1, 3, ".tar"]],
    [["https://host/", True, 2, 1, 3, ".tar"]],
    [["https://host/", 0, 2.0, 1, 3, ".tar"]],
    [["https://host/", 0, 10**30, 1, 3, ".tar"]],
    [["https://host/", 0, 10**12, 1, 3, ".tar"]],
    [["https://host/", 0, 2, 1, 10**9, ".tar"]],
    [["https://host", 0, 2, 1, 3, "/a.tar"]],
    [["https://", 0, 2, 1, 3, "/a.tar"]],
    [["pipe:cat /etc/passwd #https://host/", 0, 2, 1, 3, ".tar"]],
    ["pipe:cat /etc/passwd"],
    ["PIPE:cat /etc/passwd"],
    ["/etc/passwd"],
    ["etc/passwd"],
    ["~/secrets.tar"],
    ["file:///etc/passwd"],
    ["FILE:///etc/passwd"],
    ["local:///etc/passwd"],
    ["memory://a/b.tar"],
    ["git:///a/b.tar"],
    ["reference://a/b.tar"],
    ["zip://a/b.tar"],
    ["simplecache::https://host/a.tar"],
    ["-o/etc/passwd"],
    ["https://-host/a.tar"],
    ["https://host"],
    ["https://me:secret@host/a.tar"],
    ["https://host/a.tar?x=file:///etc/passwd"],
    ["https://host/a\n.tar"],
    ["https://host/\ud800.tar"],
    ["https://host/" + 5000 * "a"],
    [" https://host/a.tar"],
    [""],
]


@pytest.mark.parametrize("value", FORGED, ids=lambda value: repr(value)[:60])
def test_a_forged_list_is_refused(value: Any) -> None:
    with pytest.raises(UrlError):
        read_down(value)


@given(
    st.lists(
        st.one_of(
            st.text(max_size=30),
            st.builds(lambda t: f"https://host/{t}", st.text(max_size=10)),
            st.lists(st.one_of(st.integers(), st.text(max_size=12), st.just("s3://b/")), max_size=7),
        ),
        max_size=4,
    )
)
def test_whatever_comes_is_a_public_list_or_one_error(value: Any) -> None:
    try:
        listed = read_down(value)
    except UrlError:
        return
    for place in {0, len(listed) // 2, len(listed) - 1}:
        assert listed[place].partition("://")[0].lower() in {"http", "https", "s3", "gs", "az", "abfs", "hf"}
        assert redact(listed[place]) == listed[place]
