"""What a worker's reader tells of the shards that come."""

from __future__ import annotations

from pathlib import Path

from streamload.cache import demand
from streamload.cache.shard import shard_of
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from tests.support import flat

SHARDS, SAMPLES = 12, 8


def test_at_the_end_of_an_epoch_the_shards_of_the_next_one_are_told_of(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [SAMPLES] * SHARDS)
    with ShardServer(tmp_path / "data") as server:
        urls = [f"{server.url}/{number:05d}.tar" for number in range(SHARDS)]
        names = {demand.short(shard_of(url, None).digest): url for url in urls}
        one_by_one = {"num_workers": 0, "lanes": 1, "shuffle": 4, "map_sample": dict, "with_keys": True}
        with flat.make_loader(
            urls, batch_size=SAMPLES, cache_dir=tmp_path / "tier", cache_size="1GB", **one_by_one
        ) as loader:
            for _ in loader:
                (run,) = demand.files(tmp_path / "tier" / "runs")
                told = [names[visit] for visit in demand.visits_of(run).tolist()]
            assert sorted(told) == urls
            for step, batch in enumerate(loader):  # a window of half a shard
                assert set(batch["__url__"]) <= set(told[max(0, step - 1) : step + 2])
