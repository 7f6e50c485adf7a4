"""Lists of shards that are made on use, and what names a list."""

import pickle

import numpy as np
import pytest

from streamload.cache.shard import LOOKED_THROUGH, ShardList, fingerprint, shard_of, spread
from streamload.urls import expand_urls

STORAGE = {"key": "me", "secret": "hunter2", "endpoint_url": "http://store:9000"}


def shards(pattern: str | list[str], storage: dict[str, str] | None = None) -> ShardList:
    return ShardList(expand_urls(pattern), storage)


@pytest.mark.parametrize(
    ("pattern", "storage"),
    [
        ("https://me:hunter2@host/{00..12}.tar?token=hunter2", None),
        ("s3://bucket/{a,b}/{0..3}.tar", STORAGE),
        ("/data/{0..3}.tar::pipe:curl -s https://host/{0..3}.tar", None),
    ],
)
def test_shards_are_those_of_their_urls_one_by_one(pattern, storage):
    listed = shards(pattern, storage)
    expected = [shard_of(url, storage) for url in expand_urls(pattern)]
    assert list(listed) == expected
    assert [listed[place] for place in range(len(listed))] == expected
    assert listed[np.int64(3)] == expected[3]
    assert listed[-1] == expected[-1]
    assert list(listed[1:5:2]) == expected[1:5:2]
    assert [listed.digest(place) for place in range(len(listed))] == [shard.digest for shard in expected]
    assert list(pickle.loads(pickle.dumps(listed))) == expected
    assert "hunter2" not in repr(listed)
    with pytest.raises(IndexError):
        listed[len(listed)]


def test_a_million_shards_are_handed_over_in_a_few_bytes_and_few_of_them_are_kept():
    listed = shards("https://host/{000000..999999}.tar")
    for place in range(0, 100_000, 7):
        assert listed[place].name == f"https://host/{place:06d}.tar"
    assert listed[7] == listed[7]
    assert listed._shard.cache_info().currsize <= 1024
    assert len(pickle.dumps(listed)) < 1000


def test_few_shards_have_a_fingerprint_of_their_own_however_they_are_listed():
    signed = "https://host/{0..3}.tar?X-Amz-Signature=1&X-Amz-Date=2"
    ways = [
        "https://host/{0..3}.tar",
        "https://host/{3..0}.tar",
        [f"https://host/{n}.tar" for n in range(4)],
        signed,
    ]
    assert len({fingerprint(shards(way)) for way in ways}) == 1
    assert fingerprint(list(shards(ways[0]))) == fingerprint(shards(ways[0]))
    assert fingerprint(shards("https://host/{0..4}.tar")) != fingerprint(shards(ways[0]))


def test_many_shards_are_known_by_their_patterns():
    many = [f"https://host/{{0..{LOOKED_THROUGH + more}}}.tar" for more in range(3)]
    assert len({fingerprint(shards(pattern)) for pattern in many}) == 3
    assert fingerprint(shards(many[0])) == fingerprint(shards([many[0]]))


@pytest.mark.parametrize("count", [0, 1, LOOKED_THROUGH, LOOKED_THROUGH + 1, 25 * LOOKED_THROUGH])
def test_of_many_shards_some_from_all_over_are_looked_at_and_of_few_all(count):
    listed = shards("/{000000..999999}.tar")[:count]
    some = spread(listed)
    assert len(some) == count or LOOKED_THROUGH / 2 < len(some) <= LOOKED_THROUGH
    if count:
        assert some[0] == listed[0]
        assert int(some[-1].name[1:7]) >= count - count // LOOKED_THROUGH - 1
