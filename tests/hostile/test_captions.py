"""Captions and JSON made to harm, and members of any size: bounded, counted, and no neighbour is lost."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamload.errors import SampleError
from tests.fuzzing.blocks import END, header, octal
from tests.support import flat
from tests.support.hostile import Outcome, among_good_ones, outcomes, sample

GOOD = json.dumps({"caption": "a good one"}).encode()
BEFORE, AFTER = sample("before", json=GOOD), sample("after", json=GOOD) + END

# What is large is made by its test: each process that collects this file would keep it.
BAD_TEXTS: dict[str, bytes | Callable[[], bytes]] = {
    "not UTF-8": b"caf\xe9",
    "UTF-16": "a cat".encode("utf-16"),
    "5 MB": lambda: b"x" * (5 << 20),
}
BAD_JSON: dict[str, bytes | Callable[[], bytes]] = {
    "10^6 lists deep": lambda: b"[" * 1_000_000,
    "10^6 objects deep": lambda: b'{"caption":' * 1_000_000,
    "10^6 deep and closed": lambda: b'{"caption":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
    "a number of 10^6 digits": lambda: b'{"caption": ' + b"9" * 1_000_000 + b"}",
    "half a surrogate pair": b'{"caption": "\\ud83d"}',
    "no object": b'["a caption"]',
    "no such field": b'{"text": "a caption"}',
    "not a string": b'{"caption": {"a": 1}}',
    "4 MB of objects": lambda: b'{"caption": [' + b"{}," * 1_300_000 + b"{}]}",
    "4 MB of fields": lambda: json.dumps({f"f{n}": n for n in range(250_000)}).encode(),
    "not UTF-8": b'{"caption": "caf\xe9"}',
    "cut": b'{"caption": "a capt',
    "empty": b"",
    "NaN": b"NaN",
}
SOUND = {
    "empty": b"",
    "blank": b" \n",
    "1 MB": b"x" * 1_000_000,
    "with NUL": b"a\0b",
    "with a mark": "\ufeffcaption".encode(),
    "astral": "🐈 " * 10_000,
}


def made(content: bytes | Callable[[], bytes]) -> bytes:
    return content if isinstance(content, bytes) else content()


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_a_caption_that_cannot_be_read_is_skipped_and_counted(case: str, tmp_path: Path) -> None:
    found = among_good_ones(tmp_path, BEFORE + sample("bad", text=made(BAD_TEXTS[case])) + AFTER)
    assert (found.keys, found.skipped, found.error) == (["before", "after"], {"caption": 1}, "")
    assert len(found.log) < 100_000


@pytest.mark.parametrize(
    ("case", "path"), [*((case, "caption") for case in BAD_JSON), ("4 MB of objects", "caption[*]")]
)
def test_a_field_that_cannot_be_read_is_skipped_and_counted(case: str, path: str, tmp_path: Path) -> None:
    # The good shards around it have no JSON: their captions are texts. That of the bad sample isn't UTF-8.
    bad = sample("bad", text=b"caf\xe9", json=made(BAD_JSON[case]))
    found = among_good_ones(tmp_path, BEFORE + bad + AFTER, text_key=f"json:{path};json:caption;txt")
    assert (found.keys, found.skipped, found.error) == (["before", "after"], {"caption": 1}, "")
    assert found.values == ["a good one"] * 2
    assert len(found.log) < 100_000


@pytest.mark.parametrize("text_key", ["txt", "json:alt;txt"])
def test_nothing_of_a_skipped_sample_is_kept(text_key: str, tmp_path: Path) -> None:
    """An error that refers to itself, by the frames it came through, keeps the sample until a collection."""
    (tmp_path / "a.tar").write_bytes(BEFORE + sample("bad", text=b"caf\xe9") + AFTER)
    options: dict[str, Any] = {"num_workers": 0, "train": False, "batch_size": 4, "with_keys": True}
    urls, cache = str(tmp_path / "a.tar"), tmp_path / "cache"
    gc.collect()
    gc.disable()
    try:
        with flat.make_loader(urls, cache_dir=cache, text_key=text_key, **options) as loader:
            assert [extra["__key__"] for _, _, extra in loader] == [["before", "after"]]
        assert not [kept for kept in gc.get_objects() if issubclass(type(kept), SampleError)]
    finally:
        gc.enable()


def test_odd_captions_that_are_sound_come_as_they_stand(tmp_path: Path) -> None:
    texts = {name: text if isinstance(text, bytes) else text.encode() for name, text in SOUND.items()}
    middle = b"".join(sample(name, text=text) for name, text in texts.items())
    found = among_good_ones(tmp_path, BEFORE + middle + AFTER)
    assert (found.keys, found.skipped) == (["before", *texts, "after"], {})
    assert found.values[1:-1] == [text.decode() for text in texts.values()]


def shard_with_large_member(path: Path, name: str, size: int) -> Path:
    """A sample `big` with a member of zeros, a hole in the file, in front of its others."""
    with path.open("wb") as file:
        file.write(BEFORE + header(name.encode(), octal(size), b"0"))
        file.seek(size + -size % 512, 1)
        file.write(sample("big") + AFTER)
    return path


def read_large(tmp_path: Path, name: str, size: int, **options: Any) -> Outcome:
    (tmp_path / "read").mkdir()
    path = shard_with_large_member(tmp_path / "large.tar", name, size)
    return among_good_ones(tmp_path / "read", path, **options)


LARGE_BYTES = 320 << 20


@pytest.mark.parametrize(
    ("name", "options"),
    [("big.json", {"text_key": "json:caption;txt"}), ("big.png", {"image_key": "png;jpg"})],
)
def test_a_caption_or_image_beyond_any_measure_is_never_read(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    found = read_large(tmp_path, name, LARGE_BYTES, **options)
    assert (found.keys, found.skipped, found.error) == (["before", "after"], {"missing": 1}, "")


def test_a_large_member_that_nobody_asked_for_costs_neither_memory_nor_its_sample(tmp_path: Path) -> None:
    found = read_large(tmp_path, "big.mp4", LARGE_BYTES)
    assert (found.keys, found.skipped, found.error) == (["before", "big", "after"], {}, "")


def size_of_video(raw: dict[str, Any]) -> dict[str, Any]:
    return {"value": len(raw.get("mp4", b""))}


def test_map_sample_gets_large_members_whole(tmp_path: Path) -> None:
    found = read_large(tmp_path, "big.mp4", 80 << 20, map_sample=size_of_video)
    assert (found.keys, found.values) == (["before", "big", "after"], [0, 80 << 20, 0])


def test_a_local_string_of_a_gigabyte_is_gone_over(tmp_path: Path) -> None:
    path = shard_with_large_member(tmp_path / "large.tar", "big.json", 1 << 30)
    (found,) = outcomes([[str(path)]], tmp_path, text_key="json:caption;txt")
    assert (found.keys, found.skipped, found.error) == (["before", "after"], {"missing": 1}, "")
