"""Captions are read as they stand, strictly, from a text or from one field of a JSON object."""

import json

import pytest

from streamload.batches.captions import MAX_CAPTION_BYTES, read_caption
from streamload.errors import CaptionError, SampleError


@pytest.mark.parametrize(
    "text", ["a cat", "", " två katter\r\n", "猫 🐈", "\ufeffwith a mark", "x" * 1_000_000]
)
def test_a_text_is_the_caption_as_it_stands(text):
    assert read_caption(memoryview(text.encode())) == text
    assert read_caption(memoryview(json.dumps({"caption": text}).encode()), "caption") == text


@pytest.mark.parametrize("data", [b"caf\xe9", b"\xff\xfea\0", b"\xed\xa0\x80", "猫".encode()[:2]])
def test_a_text_that_is_not_utf8_fails(data):
    with pytest.raises(CaptionError, match=f"{len(data)} bytes is not UTF-8 at byte"):
        read_caption(data)


def test_a_field_with_a_dot_in_its_name_is_one_field():
    assert read_caption(b'{"a": {"b": "no"}, "a.b": "yes"}', "a.b") == "yes"


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
        read_caption(data, "caption")


@pytest.mark.parametrize("field", [None, "caption"])
def test_a_member_that_is_too_large_fails_unread(field):
    with pytest.raises(CaptionError, match="at most"):
        read_caption(b" " * (MAX_CAPTION_BYTES + 1), field)


def test_the_error_says_little_of_a_large_object():
    with pytest.raises(SampleError) as caught:
        read_caption(json.dumps({f"field{number}" * 30: 1 for number in range(5000)}).encode(), "caption")
    assert len(str(caught.value)) < 500
