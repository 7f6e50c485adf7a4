"""Samples read into memory that is used again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from streamload.cache.shard import shard_of
from streamload.cache.shard_copy import ReadMemory
from streamload.cache.shard_view import ShardView
from tests.support.tiers import SAMPLES, Filled


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    filled = Filled(tmp_path)
    yield filled
    filled.close()


def test_what_is_read_into_it_is_what_is_read_without_it(filled: Filled) -> None:
    memory = ReadMemory(40_000)
    view = ShardView(filled.tier, shard_of(filled.urls[0], None))
    for _ in range(2):
        memory.reset()
        kept = []
        for number in range(SAMPLES):
            alone, together = view.read(number), view.read(number, memory=memory)
            assert alone is not None
            assert alone == together
            kept.append(({name: bytes(data) for name, data in alone[1].items()}, together[1]))
        assert all(alone == together for alone, together in kept)
    view.close()


def test_what_has_no_room_gets_memory_of_its_own_and_what_was_taken_stays_until_it_is_begun_anew() -> None:
    memory = ReadMemory(100)
    first, second = memory.take(60), memory.take(40)
    assert not memory.is_full
    third = memory.take(1)
    assert memory.is_full
    for part, byte in ((first, b"a"), (second, b"b"), (third, b"c")):
        part[:] = byte * len(part)
    assert bytes(first) + bytes(second) + bytes(third) == b"a" * 60 + b"b" * 40 + b"c"
    memory.reset()
    assert not memory.is_full
    memory.take(2)[:] = b"xy"
    assert bytes(first[:3]) == b"xya"


def test_it_is_full_with_more_than_is_wanted_which_still_has_its_place_there() -> None:
    memory = ReadMemory(100)
    memory.reset(most_bytes=50)
    first = memory.take(50)
    assert not memory.is_full
    second = memory.take(30)
    assert memory.is_full
    first[:], second[:] = b"a" * 50, b"b" * 30
    memory.reset()
    assert bytes(memory.take(80)) == b"a" * 50 + b"b" * 30
    assert not memory.is_full
