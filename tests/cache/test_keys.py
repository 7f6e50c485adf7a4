"""Key specifications, and which entries of an index have what a run needs."""

import pytest

from streamload.cache.selection import KeySpec, usable
from streamload.cache.shard import shard_of
from streamload.errors import OptionError
from streamload.shards.index import IndexReader
from streamload.shards.samples import Entry
from tests.support.indexes import WrittenIndex

IMAGE = KeySpec.parse("jpg;png;jpeg;webp")
TEXT = KeySpec.parse("txt;json:caption")


@pytest.fixture
def reader(tmp_path):
    kinds = [
        "jpg txt",
        "jpg",
        "txt",
        "png json",
        "seg.png txt",
        "jpg json txt",
        "cls",
        f"jpg txt {'x' * 2000}",
    ]
    with WrittenIndex(tmp_path, {}) as writer:
        for number, kind in enumerate(kinds * 2):
            members = tuple((extension, 512, 1) for extension in kind.split())
            writer.append([Entry(number, "k", members, 0, 0, 0, None)])
    with IndexReader(tmp_path) as reader:
        yield reader


def test_a_key_is_extensions_in_order_of_preference():
    assert IMAGE.extensions == ("jpg", "png", "jpeg", "webp")
    assert KeySpec.parse(" TXT ; .json:Caption ").choices == (("txt", None), ("json", "Caption"))
    assert KeySpec.parse("meta.json:text").choices == (("meta.json", "text"),)


@pytest.mark.parametrize(
    "text", ["", "jpg;", ";", "json:", "txt:caption", ":x", "jpg,png", "jpg png", "*.jpg"]
)
def test_a_key_that_says_nothing_fails(text):
    with pytest.raises(OptionError, match="is not a key"):
        KeySpec.parse(text)


def test_the_first_choice_that_a_sample_has_is_taken():
    assert TEXT.choose({"json": 1, "txt": 2}) == ("txt", None)
    assert TEXT.choose({"json": 1}) == ("json", "caption")
    assert TEXT.choose({"jpg": 1}) is None


def test_usable_entries_have_an_image_and_a_text(reader):
    assert usable(reader, [IMAGE, TEXT]).tolist() == [True, False, False, True, False, True, False, True] * 2
    assert usable(reader, [IMAGE]).tolist() == [True, True, False, True, False, True, False, True] * 2
    assert usable(reader, [TEXT]).tolist() == [True, False, True, True, True, True, False, True] * 2


def test_without_keys_all_entries_are_usable(reader):
    assert usable(reader, []).tolist() == [True] * 16


@pytest.mark.parametrize("start", [0, 3, 8, 15, 16])
def test_usable_entries_can_be_asked_for_from_a_number_on(reader, start):
    assert usable(reader, [IMAGE, TEXT], start).tolist() == usable(reader, [IMAGE, TEXT]).tolist()[start:]


def test_an_index_without_entries_has_none(tmp_path):
    with WrittenIndex(tmp_path, {}), IndexReader(tmp_path) as reader:
        assert usable(reader, [IMAGE, TEXT]).tolist() == []


def test_another_form_of_a_shard_has_a_name_of_its_own_that_begins_alike():
    url = "http://host/0.tar"
    shards = [shard_of(url, None), shard_of(url, None, is_copied=True)]
    shards += [shard_of(url, None, recipe).prepared for recipe in ("raw-200", "raw-300")]
    assert len({shard.digest for shard in shards}) == 4
    assert len({shard.digest[:16] for shard in shards}) == 1
