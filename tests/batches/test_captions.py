"""Captions are read as they stand, strictly, from a text or from JSON; of several by preference, or drawn."""

import collections
import json
import random

import pytest

from streamload.batches.caption_choice import CaptionChoice
from streamload.batches.captions import MAX_CAPTION_BYTES, read_caption
from streamload.errors import CaptionError, SampleError
from streamload.order.hashing import mix


def read_field(data, field="caption", seed=0):
    return CaptionChoice.parse(f"json:{field}").read({"json": data}, seed)


def read(text_key, members, probs=None, seed=0):
    members = {
        name: data if isinstance(data, bytes) else json.dumps(data).encode() for name, data in members.items()
    }
    return CaptionChoice.parse(text_key, probs).read(members, seed)


@pytest.mark.parametrize(
    "text", ["a cat", "", " två katter\r\n", "猫 🐈", "\ufeffwith a mark", "x" * 1_000_000]
)
def test_a_text_is_the_caption_as_it_stands(text):
    assert read_caption(memoryview(text.encode())) == text
    assert read_field(memoryview(json.dumps({"caption": text}).encode())) == text


@pytest.mark.parametrize("data", [b"caf\xe9", b"\xff\xfea\0", b"\xed\xa0\x80", "猫".encode()[:2]])
def test_a_text_that_is_not_utf8_fails(data):
    with pytest.raises(CaptionError, match=f"{len(data)} bytes is not UTF-8 at byte"):
        read_caption(data)


def test_a_field_with_a_dot_in_its_name_is_one_field():
    assert read_field(b'{"a": {"b": "no"}, "a.b": "yes"}', "a.b") == "yes"
    assert read_field(b'{"a": {"b": {"c": "no"}, "b.c": "yes"}}', "a.b.c") == "yes"
    assert read_field(b'{"a.b": {"c": "yes"}, "a": {"b.c": "no"}}', "a.b.c") == "yes"
    assert read_field(b'{"a[0]": "yes", "a": ["no"]}', "a[0]") == "yes"


@pytest.mark.parametrize(
    ("path", "caption"),
    [
        ("meta.caption", "deep"),
        ("captions[0]", "first"),
        ("captions[1]", "second"),
        ("objects[1].text", "of two"),
        ("grid[1][0]", "c"),
        ("objects[1].tags[0]", "tag"),
    ],
)
def test_a_path_leads_into_objects_and_lists(path, caption):
    meta = {
        "meta": {"caption": "deep"},
        "captions": ["first", "second"],
        "objects": [{"text": "of one"}, {"text": "of two", "tags": ["tag"]}],
        "grid": [["a", "b"], ["c"]],
    }
    assert read(f"json:{path}", {"json": meta}) == caption
    assert read(f"json:{path}", {"json": {"other": 1, **meta}}, seed=mix(3)) == caption


def test_the_entries_of_a_list_itself():
    assert read("json:[1]", {"json": ["a", "b"]}) == "b"
    assert read("json:[1].text", {"json": [{}, {"text": "b"}]}) == "b"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("meta.alt", "no field 'meta.alt'"),
        ("captions[2]", r"no field 'captions\[2\]'"),
        ("captions[-1]", "no field"),
        ("captions[x]", "no field"),
        ("caption[0]", "no field"),  # a letter of a string is none
        (
            "captions",
            r"is a list; expected a string \(an entry of a list is captions\[0\], or captions\[\*\]",
        ),
        ("none[*]", "no field"),
        ("numbers[*]", "is a int; expected a string"),
        ("meta", "is a dict; expected a string"),
        ("[0]", "no field"),
    ],
)
def test_a_path_to_no_caption_fails(path, why):
    meta = {"caption": "a", "meta": {"caption": "b"}, "captions": ["c", "d"], "none": [], "numbers": [1, 2]}
    with pytest.raises(CaptionError, match=why):
        read(f"json:{path}", {"json": meta})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("members", "caption"),
    [
        ({"json": {"caption": "a", "alt": "b"}, "txt": b"c"}, "a"),
        ({"json": {"alt": "b"}, "txt": b"c"}, "b"),
        ({"json": {"caption": "", "alt": " \n"}, "txt": b"c"}, "c"),
        ({"json": {"caption": None, "alt": 7}, "txt": b"c"}, "c"),
        ({"json": b"{no json", "txt": b"c"}, "c"),
        ({"json": ["a"], "txt": b"c"}, "c"),
        ({"txt": b"c"}, "c"),
        ({"json": {"caption": "a"}, "txt": b"\xff"}, "a"),
        ({"json": {"caption": " ", "alt": ""}, "txt": b""}, " "),
        ({"json": {"caption": 1}, "txt": b"\n"}, "\n"),
    ],
)
def test_the_first_choice_that_is_not_blank_is_used(members, caption, seed):
    assert read("json:caption;json:alt;txt", members, seed=seed) == caption


def test_where_no_choice_gives_a_caption_the_error_is_of_the_first():
    with pytest.raises(CaptionError, match="no field 'caption'"):
        read("json:caption;txt", {"json": {}, "txt": b"\xff"})


def test_an_entry_that_is_drawn_is_any_that_is_a_caption():
    meta = {"captions": ["a", "", None, "b", " ", "\ud83d", "c", 3]}
    drawn = collections.Counter(read("json:captions[*]", {"json": meta}, seed=mix(n)) for n in range(3000))
    assert sorted(drawn) == ["a", "b", "c"]
    assert all(850 < count < 1150 for count in drawn.values())
    meta = {"objects": [{"texts": ["a", "b"]}, {"texts": ["c"]}, {}]}
    drawn = collections.Counter(
        read("json:objects[*].texts[*]", {"json": meta}, seed=mix(n)) for n in range(3000)
    )
    assert sorted(drawn) == ["a", "b", "c"]
    assert all(850 < count < 1150 for count in drawn.values())
    assert {
        read("json:captions[*];txt", {"json": {"captions": ["", 1]}, "txt": b"c"}, seed=n) for n in range(9)
    } == {"c"}


def weighted_order(keys, weights):
    """As open_clip_train.data._weighted_order of its development version."""
    positive = [[key, weight] for key, weight in zip(keys, weights, strict=True) if weight > 0]
    order = []
    while positive:
        place = random.choices(range(len(positive)), weights=[weight for _, weight in positive], k=1)[0]
        order.append(positive.pop(place)[0])
    return order + [key for key, weight in zip(keys, weights, strict=True) if weight <= 0]


def extracted(meta, keys, weights):
    """As its JsonCaptionExtractor."""
    for key in keys if weights is None else weighted_order(keys, weights):
        value = meta.get(key)
        if isinstance(value, str) and value.strip():
            return value.strip()
    return ""


@pytest.mark.parametrize("probs", [(0.7, 0.3), (5, 0, 2.5), (0, 0, 1), (1, 1, 1), (0, 0), (0.2,)])
@pytest.mark.parametrize("missing", ["", "a", "ab"])
def test_choices_are_drawn_as_often_as_by_openclip(probs, missing):
    fields = {name: "" if name in missing else name.upper() for name in "abc"}
    random.seed(1)
    weights = [*probs, *[0] * (3 - len(probs))]
    theirs = collections.Counter(extracted(fields, "abc", weights) for _ in range(4000))
    choice = CaptionChoice.parse("json:a;json:b;json:c", probs)
    members = {"json": json.dumps(fields).encode()}
    ours = collections.Counter(choice.read(members, mix(n)) for n in range(4000))
    assert ours.keys() == theirs.keys()
    assert all(abs(ours[text] - theirs[text]) < 200 for text in ours)
    assert choice.is_drawn == (sum(prob > 0 for prob in probs) > 1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"text": "a cat"}', "no field 'caption'; it has ..text"),
        (b"{}", "no field 'caption'"),
        (b'{"caption": null}', "is a NoneType; expected a string"),
        (b'{"caption": ["a", "b"]}', "is a list; expected a string"),
        (b'["a cat"]', "a list; expected an object"),
        (b'"a cat"', "a str; expected an object"),
        (b'{"caption": "a cat', "can't be read as JSON"),
        (b"", "can't be read as JSON"),
        (b'{"caption": "caf\xe9"}', "can't be read as JSON"),
        (b'{"caption": "\\ud83d"}', "half of a surrogate pair"),
        (b'{"caption": "\xed\xa0\x80"}', "half of a surrogate pair"),
        (b'{"n": ' + b"9" * 5000 + b"}", "can't be read as JSON"),
        (b"[" * 1_000_000, "can't be read as JSON"),
        (b'{"caption":' * 300_000, "can't be read as JSON"),
        (b"[" * 1_000_000 + b"]" * 1_000_000, "can't be read as JSON"),
    ],
)
def test_a_json_without_that_caption_fails(data, why):
    with pytest.raises(CaptionError, match=why):
        read_field(data)


@pytest.mark.parametrize("read", [read_caption, read_field])
def test_a_member_that_is_too_large_fails_unread(read):
    with pytest.raises(CaptionError, match="at most"):
        read(b" " * (MAX_CAPTION_BYTES + 1))


def test_the_error_says_little_of_a_large_object():
    with pytest.raises(SampleError) as caught:
        read_field(json.dumps({f"field{number}" * 30: 1 for number in range(5000)}).encode())
    assert len(str(caught.value)) < 500
