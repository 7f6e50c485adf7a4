"""Patterns to URLs, with the braceexpand library and webdataset as oracles."""

import pickle

import braceexpand
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from streamload.errors import UrlError
from streamload.urls import expand_urls, patterns


@pytest.mark.parametrize(
    "pattern",
    [
        "/data/{0000..0012}.tar",
        "/data/{8..11}.tar",
        "/data/{08..11}.tar",
        "/data/{3..-2}.tar",
        "/data/{-01..3}.tar",
        "/data/{0..10..3}.tar",
        "/data/{a..e}{2,1}.tar",
        "/data/{X..c}.tar",
        "/data/{a,b{0..2},}.tar",
        "/data/{only}{}.tar",
        r"/data/\{0..2\}.tar",
        "/data/{train,val}/{00..01}.tar",
    ],
)
def test_braces_expand_as_in_braceexpand(pattern):
    assert expand_urls(pattern) == list(braceexpand.braceexpand(pattern))


@given(
    st.lists(
        st.sampled_from(["{", "}", ",", "..", "0", "07", "12", "a", "b/", "-"]), min_size=1, max_size=12
    ).map(lambda parts: "/x" + "".join(parts))
)
def test_what_expands_does_so_as_in_braceexpand_and_the_rest_is_a_url_error(pattern):
    try:
        ours = expand_urls(pattern)
    except UrlError:
        return
    assert ours == list(braceexpand.braceexpand(pattern))


def test_sources_are_joined_in_order():
    assert expand_urls("/a/{0..1}.tar::/b/{0..1}.tar") == ["/a/0.tar", "/a/1.tar", "/b/0.tar", "/b/1.tar"]


def test_the_double_colon_of_an_address_separates_nothing():
    assert expand_urls("http://[::1]:8000/{0..1}.tar::/b.tar") == [
        "http://[::1]:8000/0.tar",
        "http://[::1]:8000/1.tar",
        "/b.tar",
    ]


def test_each_item_of_a_list_is_a_pattern():
    assert expand_urls(["/a/{0..1}.tar", "/b.tar"]) == ["/a/0.tar", "/a/1.tar", "/b.tar"]


def test_variables_are_put_in_also_where_a_value_holds_one(monkeypatch):
    monkeypatch.setenv("WDS_ROOT", "${BASE}/cc12m")
    monkeypatch.setenv("WDS_BASE", "https://host")
    assert expand_urls("${ROOT}/{0..1}.tar") == ["https://host/cc12m/0.tar", "https://host/cc12m/1.tar"]


def test_variables_are_put_in_fails_with_the_name_of_the_missing_one(monkeypatch):
    monkeypatch.delenv("WDS_ROOT", raising=False)
    with pytest.raises(UrlError, match="WDS_ROOT"):
        expand_urls("${ROOT}/0.tar")


def test_braces_of_a_command_expand():
    assert expand_urls("pipe:curl -s 'https://host/{00..01}.tar' | cat") == [
        "pipe:curl -s 'https://host/00.tar' | cat",
        "pipe:curl -s 'https://host/01.tar' | cat",
    ]


@pytest.mark.parametrize(
    "command",
    [
        "pipe:cat $HOME/a.tar ${OTHER}",
        "pipe:cat ${X:-{a,b}} ${Y:-a,b}",
        "pipe:cat a | awk '{print}'",
        "pipe:cat a | awk '{print $1, $2}'",
        "pipe:{ cat a; cat b; }",
        r"pipe:cat my\ file.tar | tr '\{' x",
    ],
)
def test_shell_text_of_a_command_survives(command):
    assert expand_urls(command) == [command]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ([], "empty"),
        ("", "empty URL"),
        ("/a.tar::", "empty URL"),
        ("/a/{0000..0003.tar", "unbalanced brace"),
        ("/a/0000..0003}.tar", "unbalanced brace"),
        ("/a/{0..}.tar", "no range"),
        ("/a/{0000...0003}.tar", "no range"),
        ("/a/{0000-0003}.tar", "no range"),
        ("/a/{..3}.tar", "no range"),
        ("-o/etc/passwd", "option"),
        ("--help", "option"),
        ("pipe:", "without a command"),
        ("nosuch://bucket/a.tar", "unknown scheme 'nosuch'"),
        ("s3://", "names no object"),
        ("http:///a.tar", "no host"),
        ("http://host:x/a.tar", "not a URL"),
        ("https:/host/a.tar", "without '//'"),
        ("http://host/a\r\nHost: other", "control character"),
        ("file://other-host/a.tar", "names the host"),
        ("simplecache::s3://bucket/a.tar", "chain"),
        (["/a.tar", 7], "not int"),
        ("/a/{0..999999999}.tar", "more than"),
    ],
)
def test_a_typo_fails_with_what_is_wrong(pattern, says):
    with pytest.raises(UrlError, match=says):
        expand_urls(pattern)


def test_too_many_urls_fail_before_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr(patterns, "MAX_URLS", 1000)
    with pytest.raises(UrlError, match="more than 1,000"):
        expand_urls("/{0..99}/{0..99}.tar")


def test_a_scheme_whose_package_is_missing_fails_with_its_name(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gcsfs" else real(name))
    with pytest.raises(UrlError, match="gcsfs"):
        expand_urls("gs://bucket/a.tar")


def test_errors_of_patterns_show_no_secret():
    with pytest.raises(UrlError) as caught:
        expand_urls("https://me:hunter2@host/{0..3.tar?token=hunter2")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("/x{{0..9999}{0..9999},b}.tar", "more than"),
        ("/" + "{a,b}" * 5000, "more than"),
        ("/" + "{" * 3000 + "a,b" + "}" * 3000, "nested more than 50 deep"),
        ("/{0.." + "9" * 5000 + "}.tar", "more than 20 digits"),
        ("/{" + "0" * 4000 + "..1}.tar", "more than 20 digits"),
        ("/{0..9.." + "9" * 5000 + "}.tar", "more than 20 digits"),
        ("~nobody-of-that-name/a.tar", "no home directory"),
        ("/half-\ud800.tar", "surrogate"),
        (" https://host/a.tar", "blanks around"),
        ("{https://host/a.tar}", "scheme within the path"),
    ],
)
def test_what_fuzzing_found_to_hang_to_fill_the_memory_or_to_raise_something_else(pattern, says):
    with pytest.raises(UrlError, match=says) as caught:
        expand_urls(pattern)
    assert len(str(caught.value)) < 1000


def test_a_text_of_many_dots_is_read_in_linear_time():
    pattern = "/{" + "." * 200_000 + "!}"
    assert expand_urls(pattern) == [pattern]


@pytest.mark.parametrize(
    "pattern",
    [
        "s3://b/{0..9999999}::https://me:hunter2@host/a.tar",
        "{https://me:hunter2@host/{0..3.tar,b}",
        "https:/me:hunter2@host/a.tar?token=hunter2",
        "https:////me:hunter2@host/a.tar",
        "file://me:hunter2@host/a.tar",
        "-H https://me:hunter2@host/a.tar",
        " s3://key:hunter2@bucket/a.tar",
        "${MISSING}https://me:hunter2@host/a.tar",
    ],
)
def test_errors_show_no_secret_wherever_it_stands(pattern):
    with pytest.raises(UrlError) as caught:
        expand_urls(pattern)
    assert "hunter2" not in str(caught.value)


def test_local_folders_and_globs_are_listed_and_paths_taken_as_they_are(tmp_path):
    folder = tmp_path / "a [1]"  # no pattern, as there is a folder of this name
    folder.mkdir()
    shards = [folder / f"{name}.tar" for name in ("00", "01", "x{1}")]
    for path in (*shards, folder / "sizes.json"):
        path.touch()
    expected = [str(path) for path in shards]
    escaped = str(shards[2]).replace("{", r"\{").replace("}", r"\}")
    for urls in (
        folder,
        str(folder),
        f"{folder}/",
        f"file://{folder}",
        f"{tmp_path}/a*/*.tar",
        [shards[0], str(shards[1]), escaped],
        (url for url in [shards[0], f"{tmp_path}/*/0[1].tar", escaped]),
    ):
        assert expand_urls(urls) == expected, urls
    assert expand_urls(f"{tmp_path}/{{a [1]/,a*/0?.tar}}") == [*expected, *expected[:2]]
    assert expand_urls("http://[::1]/a?b=*.tar") == ["http://[::1]/a?b=*.tar"]


@pytest.mark.parametrize("name", ["2026-01-01T10::20", "a\\b", "{0..3}", "${X}", "a*b"])
def test_a_path_that_exists_is_one_path(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "0.tar").touch()
    assert expand_urls(folder / "0.tar") == expand_urls(folder) == [str(folder / "0.tar")]
    assert expand_urls(tmp_path / "{a,b}.tar") == [f"{tmp_path}/a.tar", f"{tmp_path}/b.tar"]


def test_relative_paths_stay_where_they_were_and_keep_their_fingerprint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    patterns = [
        "{00..02}.tar",
        "a/b.tar",
        "/abs.tar",
        "http://host/c.tar",
        "~/d.tar",
        "file:/e.tar",
        "file:f.tar",
    ]
    listed = expand_urls(patterns)
    anchored = listed.anchored()
    monkeypatch.chdir("/")
    relative = [f"{tmp_path}/{name}.tar" for name in ("00", "01", "02", "a/b")]
    assert (
        list(anchored)
        == [anchored[place] for place in range(len(anchored))]
        == [
            *relative,
            *patterns[2:-1],
            f"{tmp_path}/f.tar",
        ]
    )
    assert anchored[1:4] == relative[1:]
    assert [anchored.given(place) for place in (0, 3, -1)] == ["00.tar", "a/b.tar", "file:f.tar"]
    assert (anchored[1:4] + anchored[:1]).given(0) == "01.tar"
    assert pickle.loads(pickle.dumps(anchored)) == anchored
    assert anchored.fingerprint() == listed.fingerprint()
    absolute = expand_urls(["/a.tar", "http://host/c.tar"])
    assert absolute.anchored() is absolute


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        ("{tmp}", r"no \*\.tar file in the folder"),
        ("{tmp}/*.tar", "no file matches"),
        (3, "urls is a int"),
        ({"a.tar": 1}, "urls is a dict"),
        ([b"a.tar"], "not bytes"),
        ([["a.tar"]], "not list"),
        (b"a.tar", "urls is a bytes"),
        (webdataset.WebDataset("a.tar", shardshuffle=False), "urls is a WebDataset"),
    ],
)
def test_what_names_no_shards_is_refused_in_one_short_line(urls, says, tmp_path):
    urls = urls.format(tmp=tmp_path) if isinstance(urls, str) else urls
    with pytest.raises(UrlError, match=says) as caught:
        expand_urls(urls)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
