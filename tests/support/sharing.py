"""What the tests of shared caches have in common: places for one, and origins that count what they send."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.stores.store import KINDS, Store
from streamload.cache.shard import Shard, shard_of
from streamload.cache.shared.objects import Objects
from streamload.cache.shared.tier import SharedTier
from streamload.daemon.warm import WarmReport, warm
from streamload.metrics import Counters
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from tests.support.s3 import S3Server

KINDS_OF_PLACES = ["folder", "s3", "swift", "memory"]


class Place(NamedTuple):
    """Where a shared cache can be."""

    url: str
    options: dict[str, Any]

    def objects(self) -> Objects:
        return Objects(self.url, self.options)


@contextlib.contextmanager
def running_s3() -> Iterator[S3Server]:
    with S3Server() as server:
        server.create_bucket("bucket")
        yield server


@contextlib.contextmanager
def running_swift() -> Iterator[Store]:
    kind = KINDS["swift"]
    if kind.why_not():
        pytest.skip(kind.why_not())
    with Store(kind) as store:
        yield store


def place_of(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A new place of the kind that is the fixture's parameter; its module has the fixtures s3 and swift."""
    own = f"of-{random.getrandbits(64):x}"
    if request.param == "s3":
        return Place(f"s3://bucket/{own}/tier", request.getfixturevalue("s3").storage_options)
    if request.param == "swift":
        store: Store = request.getfixturevalue("swift")
        return Place(f"s3://{store.bucket}/{own}/tier", store.storage_options(store.endpoint))
    if request.param == "memory":
        return Place(f"memory://{own}/tier", {})
    return Place(str(tmp_path / own / "tier"), {})


class Origin:
    """A server of some shards, which knows what was asked of it."""

    def __init__(self, place: Path, counts: tuple[int, ...] = (30, 25, 40), query: str = "", **options: Any):
        self.paths = write_shards(place, counts, seed=61, **options)
        self.server = ShardServer(place)
        self.urls = [f"{self.server.url}/{path.name}{query}" for path in self.paths]
        self.bytes = sum(path.stat().st_size for path in self.paths)

    def close(self) -> None:
        self.server.close()

    def shard(self, number: int) -> Shard:
        return shard_of(self.urls[number], None)

    @property
    def sent(self) -> int:
        """Bytes of shards that it has sent so far."""
        return sum(stop - start for path in self.paths for start, stop in self.server.ranges(path.name))

    def warm(self, root: Path, place: Place | None, **options: Any) -> WarmReport:
        """Fill a node's own tier through a shared cache."""
        given = {} if place is None else {"shared_cache": place.url, "shared_cache_options": place.options}
        return warm(self.urls, cache_dir=root, cache_size="1GB", **given, **options)

    def is_whole(self, root: Path) -> bool:
        """Whether a tier has all shards, byte for byte."""
        return all(
            (root / "shards" / self.shard(number).digest / "data").read_bytes() == path.read_bytes()
            for number, path in enumerate(self.paths)
        )


def opened(place: Place) -> tuple[SharedTier, Counters]:
    """A shared cache, and what is counted of it."""
    counts = Counters()
    return SharedTier(place.objects(), counts), counts
