"""What a state says of shards, while a reader's lanes read another pass than the state is of."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from streamload.cache.selection import Selection
from streamload.cache.shard import ShardList
from streamload.cache.shard_cache import ShardCache
from streamload.cache.tier import Tier
from streamload.metrics import Counters
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from streamload.urls.patterns import expand_urls
from streamload.worker.arrivals import CheckedArrivals
from tests.support import flat

SAMPLES = 30


def test_a_shard_that_was_given_up_is_so_in_states_of_its_pass_although_lanes_read_the_next(
    tmp_path: Path,
) -> None:
    write_shards(tmp_path / "data", [SAMPLES] * 2, seed=3)
    with ShardServer(tmp_path / "data") as server:
        urls = f"{server.url}/{{00000..00001}}.tar"
        with flat.make_loader(
            urls, batch_size=10, num_workers=0, text_key=None, cache_dir=tmp_path / "tier"
        ) as loader:
            assert len(list(loader)) == 6
        cache = ShardCache(
            Tier.open(tmp_path / "tier"), ShardList(expand_urls(urls), None), Selection(()),
            skip=True, counts=Counters(), counted=lambda shard: True,
        )  # fmt: skip
        with closing(cache):
            opened = np.array([1])
            whole = CheckedArrivals(cache, 0, {}, 0, lambda: 0).begun(opened, 0)[1]
            assert (whole.samples, whole.ended, whole.given_up) == (SAMPLES, True, -1)
            recorded = whole._replace(samples=12, given_up=12, entries=0, contents=0)
            current_pass = 1
            arrivals = CheckedArrivals(cache, 0, {1: recorded}, 0, lambda: current_pass)
            assert len(arrivals.arrived(1)[0]) == SAMPLES
            assert arrivals.begun(opened, 0)[1] == recorded
            assert arrivals.begun(opened, 1)[1] == whole
            current_pass = 0
            numbers, ended = arrivals.arrived(1)
            assert (len(numbers), ended) == (12, True)
