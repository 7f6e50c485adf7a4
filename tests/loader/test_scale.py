"""A run of a million shards on a thousand ranks, of which one is here: what it reads, and what it takes."""

import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Workers
from streamload.cache.shard import LOOKED_THROUGH
from streamload.loader.order_spec import SHARDS_DIGESTED
from streamload.loader.schedule import RunSchedule
from streamload.loader.worker_config import worker_config_for
from streamload.order.plan import pieces
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from streamload.urls import listing
from tests.support import flat

SHARDS = 1_000_000
SAMPLES = 40
LAST_RANK = {
    "RANK": "1023",
    "WORLD_SIZE": "1024",
    "LOCAL_RANK": "7",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "127",
    "GROUP_WORLD_SIZE": "128",
}


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """It has every shard: the same one under any name; and no sizes.json."""
    for name, value in LAST_RANK.items():
        monkeypatch.setenv(name, value)
    (path,) = write_shards(tmp_path / "data", [SAMPLES])
    with ShardServer(tmp_path / "data") as server:
        server.misbehave("*", Fault(body=path.read_bytes()))
        server.misbehave("sizes.json", Fault(status=404))
        yield server


def make(server: ShardServer, cache: Path, **options: Any) -> streamload.Loader:
    given: dict[str, Any] = {"num_workers": 0, "batch_size": 8, "shuffle": 200, "lanes": 4, **options}
    return flat.make_loader(
        f"{server.url}/{{000000..{SHARDS - 1}}}.tar",
        workers=Workers(map_sample=only_key),
        num_samples=10**9,
        with_keys=True,
        cache_dir=cache,
        cache_size="1GB",
        **given,
    )


def read(loader: streamload.Loader, batches: int) -> list[tuple[str, str]]:
    found = []
    for _, batch in zip(range(batches), loader, strict=False):
        found += list(zip(batch["__key__"], batch["__url__"], strict=True))
    return found


@pytest.mark.deep
def test_the_last_of_a_thousand_ranks_reads_the_shards_of_its_group_and_looks_at_few_others(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, walked = [], []
    walk, put_together = listing.Product.__iter__, listing.Product.__getitem__
    monkeypatch.setattr(
        listing.Product, "__getitem__", lambda node, place: made.append(place) or put_together(node, place)
    )
    monkeypatch.setattr(listing.Product, "__iter__", lambda node: (walked.append(u) or u for u in walk(node)))
    tracemalloc.start()
    try:
        with make(server, tmp_path / "cache") as loader:
            found = read(loader, 20)
            _, peak_bytes = tracemalloc.get_traced_memory()
            seen = set(made)
            schedule = RunSchedule(loader.options, lambda epoch: None)
            recipe, placed = worker_config_for(loader.options, schedule)
            placed.close()
    finally:
        tracemalloc.stop()
    group = set(pieces(recipe.sources[0].order, SHARDS, 127).shards.tolist())
    assert len(found) == 20 * 8
    assert {int(url.rpartition("/")[2].removesuffix(".tar")) for _, url in found} < group
    asked = {request.path for request in server.log} - {"sizes.json"}
    assert asked <= {f"{shard:06d}.tar" for shard in group}
    digested = set(range(0, SHARDS, -(-SHARDS // SHARDS_DIGESTED)))  # by which states tell data sets apart
    assert seen <= group | digested  # the first one also for the sizes.json beside it
    assert len(seen) < 8000
    assert len(set(made) - seen) <= LOOKED_THROUGH  # a tier that holds something
    assert len(walked) < 10
    assert peak_bytes < 16 << 20
    assert len(pickle.dumps(recipe.shards)) < 1000
    assert len(pickle.dumps(recipe)) < 100_000


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_workers_read_the_same_whichever_way_they_are_started(
    method: str, server: ShardServer, tmp_path: Path
) -> None:
    with make(server, tmp_path / "alone") as loader:
        alone = read(loader, 8)
    assert alone
    with make(server, tmp_path / method, num_workers=2, multiprocessing_context=method) as loader:
        assert read(loader, 8) == alone
