"""A shared cache keeps what the tiers of nodes keep, and gives nothing that isn't what was stored."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.stores.store import Store
from streamload.cache.shared.format import BLOCK_BYTES, BlockSums, SharedShard, verified
from streamload.cache.shared.objects import OBJECT_LIMIT_BYTES
from streamload.cache.shared.tier import SharedTier
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt, SharedTierError
from streamload.metrics import Counters
from streamload.origins.origin import open_origin
from streamload.shards.index import IndexReader
from streamload.testing.shards import ShardOptions
from tests.support.sharing import KINDS_OF_PLACES, Origin, Place, opened, place_of, running_swift
from tests.support.tiers import flip, payload_start, swap


@pytest.fixture(scope="module")
def swift() -> Iterator[Store]:
    with running_swift() as store:
        yield store


@pytest.fixture(params=KINDS_OF_PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request, tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "shared"), {})


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    """Shards of some 64 KB blocks each."""
    made = Origin(tmp_path_factory.mktemp("origin"), options=ShardOptions(padding_bytes=(3_000, 30_000)))
    yield made
    made.close()


@pytest.fixture(scope="module")
def local(origin: Origin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node's tier that has all of them."""
    root = tmp_path_factory.mktemp("node") / "tier"
    assert origin.warm(root, None).shards_complete == len(origin.urls)
    return root


def store(origin: Origin, local: Path, place: Place, numbers: tuple[int, ...] = (0, 1, 2)) -> None:
    tier, _ = opened(place)
    for number in numbers:
        assert tier.store(origin.shard(number), Tier(local).published(origin.shard(number).digest))


def test_what_is_stored_is_held_with_its_version_and_its_entries(
    origin: Origin, local: Path, place: Place, tmp_path: Path
) -> None:
    tier, counts = opened(place)
    shard = origin.shard(0)
    assert tier.held(shard) is None
    assert tier.store(shard, Tier(local).published(shard.digest))
    held = opened(place)[0].held(shard)
    assert held is not None
    assert held.version == open_origin(shard.url).version()
    assert (held.size, held.samples) == (origin.paths[0].stat().st_size, 30)
    (tmp_path / "names").write_bytes(held.names)
    (tmp_path / "index").write_bytes(held.index)
    with IndexReader(tmp_path) as ours, IndexReader(Tier(local).published(shard.digest)) as theirs:
        assert ours.is_complete
        assert [ours.entry(n) for n in range(30)] == [theirs.entry(n) for n in range(30)]
    seen = counts.snapshot()
    assert (seen.shared_misses, seen.shared_stored, seen.shared_errors, seen.origin_bytes) == (1, 1, 0, 0)
    names = place.objects().names()
    assert names == [
        "shards/" + shard.digest + "/" + held.data,
        f"shards/{shard.digest}/index",
        "streamload.json",
    ]


def test_its_bytes_come_from_any_byte_on_and_by_range(origin: Origin, local: Path, place: Place) -> None:
    store(origin, local, place, (0,))
    tier, counts = opened(place)
    shard, body = origin.shard(0), origin.paths[0].read_bytes()
    held = tier.held(shard)
    assert held is not None
    for start in (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5, len(body) - 1, len(body)):
        stream = tier.stream(shard, held, start, threading.Event())
        assert b"".join(stream.chunks()) == body[start:]
        stream.close()
    rng = random.Random(1)
    for _ in range(20):
        start, stop = sorted(rng.sample(range(len(body) + 1), 2))
        assert tier.read(shard, held, start, stop) == body[start:stop]
    assert counts.snapshot().shared_bytes > len(body)


def test_a_damaged_range_is_not_given(origin: Origin, local: Path, folder: Place) -> None:
    store(origin, local, folder, (0,))
    tier, _ = opened(folder)
    shard, body = origin.shard(0), origin.paths[0].read_bytes()
    held = tier.held(shard)
    assert held is not None
    at = 2 * BLOCK_BYTES + 77
    flip(Path(folder.url) / "shards" / shard.digest / held.data, at)
    for start, stop in ((at, at + 1), (0, len(body)), (2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 1)):
        with pytest.raises(CacheCorrupt):
            tier.read(shard, held, start, stop)
    assert tier.read(shard, held, 0, 2 * BLOCK_BYTES) == body[: 2 * BLOCK_BYTES]
    assert tier.read(shard, held, 3 * BLOCK_BYTES, len(body)) == body[3 * BLOCK_BYTES :]


def test_storing_the_same_again_stores_nothing(origin: Origin, local: Path, place: Place) -> None:
    store(origin, local, place, (0,))
    names = place.objects().names()
    times = [place.objects().modified(name) for name in names]
    tier, counts = opened(place)
    assert not tier.store(origin.shard(0), Tier(local).published(origin.shard(0).digest))
    assert counts.snapshot().shared_stored == 0
    assert place.objects().names() == names
    assert [place.objects().modified(name) for name in names] == times


def test_a_damaged_copy_is_read_again_once_it_was_replaced(origin: Origin, local: Path, place: Place) -> None:
    store(origin, local, place, (0,))
    shard = origin.shard(0)
    tier, _ = opened(place)
    tier.invalidate(shard)
    assert tier.is_lacking(shard)
    assert tier.store(shard, Tier(local).published(shard.digest))
    assert not tier.is_lacking(shard)
    assert tier.held(shard) is not None


def test_data_without_an_index_is_nothing_and_does_no_harm(origin: Origin, local: Path, place: Place) -> None:
    """Who stored it was killed before the index."""
    store(origin, local, place, (0,))
    shard = origin.shard(0)
    place.objects().delete(f"shards/{shard.digest}/index")
    tier, counts = opened(place)
    assert tier.held(shard) is None
    assert counts.snapshot().shared_errors == 0
    assert tier.store(shard, Tier(local).published(shard.digest))
    assert tier.held(shard) is not None


@pytest.mark.parametrize("what", ["payload", "header", "index", "names", "cut", "another's"])
def test_a_copy_that_is_not_what_arrived_is_not_stored(
    origin: Origin, local: Path, folder: Place, tmp_path: Path, what: str
) -> None:
    root = tmp_path / "tier"
    origin.warm(root, None)
    tier, shard = Tier(root), origin.shard(0)
    held, other = tier.published(shard.digest), tier.published(origin.shard(1).digest)
    if what == "payload":
        flip(held / "data", payload_start(held, 3))
    elif what == "header":
        flip(held / "data", 2)
    elif what == "index":
        flip(held / "index", (held / "index").stat().st_size - 500)
    elif what == "names":
        flip(held / "names", 100)
    elif what == "cut":
        (held / "data").write_bytes((held / "data").read_bytes()[:-2000])
    else:
        swap(held / "data", other / "data")
    shared, _ = opened(folder)
    with pytest.raises(CacheCorrupt):
        shared.store(shard, held)
    assert shared.look(shard) is None
    assert folder.objects().names("shards") == []


def test_each_bit_of_an_index_counts(origin: Origin, local: Path, folder: Place) -> None:
    store(origin, local, folder, (0,))
    packed = folder.objects().read(f"shards/{origin.shard(0).digest}/index")
    assert packed is not None
    assert SharedShard.unpack(packed).pack() == packed
    rng = random.Random(2)
    for at in [*range(60), *rng.sample(range(len(packed)), 300), len(packed) - 1]:
        with pytest.raises(CacheCorrupt):
            SharedShard.unpack(packed[:at] + bytes([packed[at] ^ 1 << rng.randrange(8)]) + packed[at + 1 :])
    for length in [*range(60), *rng.sample(range(len(packed)), 100)]:
        with pytest.raises(CacheCorrupt):
            SharedShard.unpack(packed[:length])


@pytest.mark.parametrize(
    "data", ["../../../etc/passwd", "x.tar", "/etc/passwd", 7, "0123456789abcdef.tar/../x"]
)
def test_an_index_that_names_foreign_data_is_refused(
    origin: Origin, local: Path, folder: Place, data: object
) -> None:
    store(origin, local, folder, (0,))
    shared, _ = opened(folder)
    held = shared.look(origin.shard(0))
    assert held is not None
    forged = dataclasses.replace(held, data=data).pack()  # type: ignore[arg-type]
    with pytest.raises(CacheCorrupt, match=r"as its data|can't be read"):
        SharedShard.unpack(forged)


def test_the_index_of_another_shard_is_refused(origin: Origin, local: Path, folder: Place) -> None:
    store(origin, local, folder, (0, 1))
    one, other = (Path(folder.url) / "shards" / origin.shard(number).digest for number in (0, 1))
    swap(one, other)
    tier, counts = opened(folder)
    assert tier.held(origin.shard(0)) is None
    assert counts.snapshot().shared_errors == 1
    with pytest.raises(CacheCorrupt, match="another shard's"):
        tier.look(origin.shard(0))


def test_an_index_larger_than_any_that_is_stored_is_asked_for_once(
    origin: Origin, local: Path, folder: Place
) -> None:
    store(origin, local, folder, (0, 1))
    index = Path(folder.url) / "shards" / origin.shard(0).digest / "index"
    index.write_bytes(bytes(OBJECT_LIMIT_BYTES + 1))
    tier, counts = opened(folder)
    for _ in range(5):
        assert tier.held(origin.shard(0)) is None
    assert counts.snapshot().shared_errors == 1
    assert tier.held(origin.shard(1)) is not None


def test_a_shard_whose_index_no_node_would_read_is_not_stored(
    origin: Origin, local: Path, folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamload.cache.shared.tier.OBJECT_LIMIT_BYTES", 100)
    tier, _ = opened(folder)
    with pytest.raises(SharedTierError, match="samples are too many for one shard"):
        tier.store(origin.shard(0), Tier(local).published(origin.shard(0).digest))
    assert not (Path(folder.url) / "shards").exists()


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"format": 2}', b"\xff", b"[" * 100_000])
def test_another_versions_format_is_said_and_left_alone(
    origin: Origin, local: Path, folder: Place, text: bytes
) -> None:
    store(origin, local, folder, (0,))
    folder.objects().write("streamload.json", text)
    tier, _ = opened(folder)
    with pytest.raises(SharedTierError, match="this version uses 1"):
        tier.look(origin.shard(0))
    with pytest.raises(SharedTierError, match="this version uses 1"):
        tier.store(origin.shard(1), Tier(local).published(origin.shard(1).digest))
    assert folder.objects().read("streamload.json") == text
    assert tier.held(origin.shard(0)) is None


def test_after_three_failures_it_is_left_alone_for_a_while_and_said_once(
    origin: Origin, folder: Place, caplog: pytest.LogCaptureFixture
) -> None:
    tier, counts = opened(folder)
    (Path(folder.url) / "streamload.json").mkdir(parents=True)  # it can't be read, by root neither
    with caplog.at_level(logging.WARNING, "streamload"):
        for _ in range(5):
            assert tier.held(origin.shard(0)) is None
    assert counts.snapshot().shared_errors == 3
    assert len([record for record in caplog.records if "the shared cache" in record.getMessage()]) == 1


def test_it_is_asked_again_after_its_rest(origin: Origin, local: Path, folder: Place) -> None:
    store(origin, local, folder, (0,))
    place = Path(folder.url)
    (place / "streamload.json").rename(place / "aside")
    (place / "streamload.json").mkdir()
    counts = Counters()
    tier = SharedTier(folder.objects(), counts, rest_seconds=0.0)
    for _ in range(4):
        assert tier.held(origin.shard(0)) is None
    (place / "streamload.json").rmdir()
    (place / "aside").rename(place / "streamload.json")
    assert tier.held(origin.shard(0)) is not None
    assert counts.snapshot().shared_errors == 4


def test_nothing_secret_is_stored(local: Path, folder: Place, tmp_path: Path) -> None:
    signed = Origin(tmp_path / "data", (5,), query="?X-Amz-Signature=swordfish")
    try:
        report = signed.warm(tmp_path / "tier", folder, write_back=True)
        assert report.shared_stored == 1
    finally:
        signed.close()
    for path in Path(folder.url).rglob("*"):
        if path.is_file():
            assert b"swordfish" not in path.read_bytes()
            assert "swordfish" not in str(path)


def consume(given: bytearray, chunks: Iterator[bytes]) -> None:
    """Take what comes, up to an error."""
    for chunk in chunks:
        given += chunk


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 7])
def test_blocks_are_given_once_they_are_right_however_they_are_cut(size: int) -> None:
    rng = random.Random(size)
    body = rng.randbytes(size)
    sums = BlockSums()
    sums.update(body)
    found = sums.finish()
    assert len(found) == -(-size // BLOCK_BYTES)
    for _ in range(20):
        start = rng.randrange(0, size + 1) // BLOCK_BYTES * BLOCK_BYTES
        cuts = sorted({start, size, *(rng.randrange(start, size + 1) for _ in range(rng.randrange(8)))})
        chunks = [body[a:b] for a, b in itertools.pairwise(cuts)]
        assert b"".join(verified(chunks, found, start, size)) == body[start:]
        if start < size:
            at = rng.randrange(start, size)
            bad = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
            chunks = [bad[a:b] for a, b in itertools.pairwise(cuts)]
            given = bytearray()
            with pytest.raises(CacheCorrupt, match="fails its checksum"):
                consume(given, verified(chunks, found, start, size))
            assert bytes(given) == body[start : at // BLOCK_BYTES * BLOCK_BYTES]
        with pytest.raises(CacheCorrupt):
            list(verified([*chunks, b"x"], found, start, size))
    if size:
        with pytest.raises(CacheCorrupt):
            list(verified([body[:-1]], found, 0, size))


def test_the_format_file_says_what_it_is(origin: Origin, local: Path, folder: Place) -> None:
    store(origin, local, folder, (0,))
    assert json.loads((Path(folder.url) / "streamload.json").read_text()) == {"format": 1}
