"""Lists of URLs that are made on use, against plain lists of the same strings."""

import os
import pickle
import random
import tracemalloc

import braceexpand
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.errors import UrlError
from streamload.urls import UrlList, checks, expand_urls, patterns
from streamload.urls.listing import chained
from tests.fuzzing import urls as fuzzed

MILLION = "https://host/cc12m/{000000..999999}.tar"


def unchecked(pattern: str | list[str]) -> UrlList:
    return UrlList(chained(patterns._expanded([pattern] if isinstance(pattern, str) else pattern)))


def right_patterns(count: int, seed: int = 0):
    rng = random.Random(seed)
    cases = (fuzzed._right(rng) for _ in range(count))
    return [(case.pattern, case.expected) for case in cases]


@pytest.mark.parametrize(("pattern", "expected"), right_patterns(150))
def test_a_list_is_as_the_plain_list_of_its_urls(pattern, expected):
    urls = expand_urls(pattern)
    assert urls == expected
    assert len(urls) == len(expected)
    assert list(urls) == expected
    assert [urls[place] for place in range(len(urls))] == expected
    assert [urls[place] for place in range(-len(urls), 0)] == expected
    assert list(reversed(urls)) == expected[::-1]
    assert pickle.loads(pickle.dumps(urls)) == expected
    with pytest.raises(IndexError):
        urls[len(urls)]
    rng = random.Random(str(pattern))
    places = [None, *range(-len(expected) - 1, len(expected) + 2)]
    for _ in range(20):
        chosen = slice(rng.choice(places), rng.choice(places), rng.choice([None, 1, 2, 3, -1, -2]))
        assert urls[chosen] == expected[chosen]
        assert urls[chosen] + urls == expected[chosen] + expected


def test_equal_lists_are_equal_and_hash_alike_however_they_were_written():
    ways = ["/a/{0..2}.tar", "/a/{0,1,2}.tar", "/a/0.tar::/a/{1..2}.tar", ["/a/{0..1}.tar", "/a/2.tar"]]
    lists = [expand_urls(way) for way in ways]
    assert len(set(lists)) == 1
    assert expand_urls("/a/{0..3}.tar") not in lists
    assert expand_urls("/a/{1,0,2}.tar") not in lists
    assert lists[0] != "/a/0.tar"


def test_the_same_patterns_have_one_fingerprint_and_others_another(monkeypatch):
    assert expand_urls(MILLION).fingerprint() == expand_urls([MILLION]).fingerprint()
    assert expand_urls("/a.tar::/b.tar").fingerprint() == expand_urls(["/a.tar", "/b.tar"]).fingerprint()
    monkeypatch.setenv("WDS_X", "x")
    others = [
        MILLION, MILLION.replace("host", "other"), MILLION.replace("000000", "000001"),
        MILLION.replace("{000000..", "{0..").replace("999999", "999999..2"), "/{a,b}{c,d}", "/{a,b}::/{c,d}",
        "/{ac,bd}", "/{a,b}c::/{c,d}", "/${X}", "/{0..9}", "/{00..09}", "/{0..9}/{0..9}", "/','",
    ]  # fmt: skip
    lists = [*map(expand_urls, others), expand_urls("/{0..9}")[::2], expand_urls("/{0..9}")[1:]]
    assert len({urls.fingerprint() for urls in lists}) == len(lists)


def test_a_million_urls_cost_no_memory_to_make_to_hand_over_and_to_use():
    tracemalloc.start()
    try:
        urls = expand_urls(MILLION)
        assert (len(urls), urls[-1], urls[123_456]) == (
            1_000_000,
            "https://host/cc12m/999999.tar",
            "https://host/cc12m/123456.tar",
        )
        urls.fingerprint(), repr(urls), hash(urls), urls[5:900_000:7]
        assert len(pickle.dumps(urls)) < 1000
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_of_a_million_urls_only_the_ends_are_checked(monkeypatch):
    checked = []
    monkeypatch.setattr(patterns, "check", lambda url, known: checked.append(url))
    expand_urls(MILLION)
    assert checked == ["https://host/cc12m/000000.tar", "https://host/cc12m/999999.tar"]
    checked.clear()
    expand_urls("https://host{0..9}/{0..99}.tar::{-5..5}/x::s3://b{a,/b}/{0..9}{c,d}")
    hosts = [f"https://host{n}/{m}.tar" for n in range(10) for m in (0, 99)]
    starts = [f"{n}/x" for n in range(-5, 6)]
    lists = [f"s3://b{x}/{n}{y}" for x in ("a", "/b") for n in (0, 9) for y in "cd"]
    assert checked == hosts + starts + lists
    checked.clear()
    expand_urls("shard-{0..999999}.tar::d{0..999999}/{a,b}::s{3..5}://b/{0..9}::~{0..2}")
    files = ["shard-0.tar", "shard-999999.tar", "d0/a", "d0/b", "d999999/a", "d999999/b"]
    assert checked == [*files, *(f"s{n}://b/{m}" for n in (3, 4, 5) for m in (0, 9)), "~0", "~1", "~2"]


_PIECES = ["/", "//", ":", "://", "-", "", " ", "\n", "~", "~root/", "@", "[", "]", "?", "#", "%", "a",
           "x.tar", "http", "s3", "file", "local", "pipe:", "nosuch", "localhost", "host", "1", "80", "\0",
           "$", "é", "{0..3}", "{-2..2}", "{2..-2}", "{08..11}", "{a,b/}", "{,/}", "{://,x}",
           "{0..2,/{0..2}/}"]  # fmt: skip


def same_refusal_as_of_all(pattern: str) -> None:
    """Checking the kinds refuses what checking all refuses, with the same words; else neither does."""
    try:
        urls = unchecked(pattern)
    except UrlError:
        return
    said = []
    for looked_at in (urls, urls.kinds()):
        known: set[str] = set()
        try:
            for url in looked_at:
                checks.check(url, known)
            said.append("")
        except UrlError as exc:
            said.append(str(exc))
    assert said[0] == said[1]
    places = {url: place for place, url in reversed(list(enumerate(urls)))}
    found = [places[url] for url in urls.kinds()]
    assert found or not len(urls)


@given(st.lists(st.sampled_from(_PIECES), min_size=1, max_size=7).map("".join))
def test_the_kinds_of_urls_are_refused_as_all_of_them_are(pattern):
    same_refusal_as_of_all(pattern)


@pytest.mark.parametrize("seed", range(4))
def test_the_kinds_of_urls_that_begin_well_are_refused_as_all_of_them_are(seed):
    rng = random.Random(seed)
    begins = [
        "https://host/",
        "http://",
        "s3://b",
        "s3://",
        "/d/",
        "",
        "~",
        "file://",
        "pipe:",
        "https:/",
        " ",
        "d",
        "s",
        "train-",
    ]
    for _ in range(500):
        same_refusal_as_of_all(rng.choice(begins) + "".join(rng.choices(_PIECES, k=rng.randint(1, 5))))


def test_a_list_that_was_expanded_is_not_expanded_again():
    urls = expand_urls(r"/\{0..1\}/{0..1}.tar")
    assert list(urls) == ["/{0..1}/0.tar", "/{0..1}/1.tar"]
    assert expand_urls(urls) is urls


def test_a_repr_shows_no_secret():
    assert "hunter2" not in repr(expand_urls("https://me:hunter2@host/{0..9}.tar?token=hunter2"))
    assert repr(expand_urls("/a/{0..1234}.tar")) == "<UrlList of 1,235 from '/a/0.tar'>"


def test_many_braces_that_mean_themselves_are_one_text():
    pattern = "/" + "{}" * 5000 + "{x}" * 1000
    assert list(expand_urls(pattern)) == list(braceexpand.braceexpand(pattern))


def test_an_explicit_list_is_kept_as_it_is():
    given_ = [f"/a/{n}{os.sep}x.tar" for n in range(2000)]
    assert list(expand_urls(given_)) == given_
    assert list(expand_urls(given_).kinds()) == given_
