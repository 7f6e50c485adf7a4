"""What a state says of shards, while a reader's lanes read another pass than the state is of."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from streamload.cache.selection import KeySpec, Selection
from streamload.cache.shard import ShardList
from streamload.cache.shard_cache import ShardCache
from streamload.cache.shard_view import OpenFiles
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt
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


def test_a_shard_whose_files_were_given_up_before_its_samples_were_selected_is_opened_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    write_shards(tmp_path / "data", [SAMPLES] * 2, seed=3)
    urls = f"{tmp_path}/data/{{00000..00001}}.tar"
    with flat.make_loader(
        urls, batch_size=10, num_workers=0, text_key=None, cache_dir=tmp_path / "tier"
    ) as loader:
        assert len(list(loader)) == 6
    files = OpenFiles()
    cache = ShardCache(
        Tier.open(tmp_path / "tier"), ShardList(expand_urls(urls), None), Selection((KeySpec.parse("jpg"),)),
        skip=True, counts=Counters(), counted=lambda shard: True, files=files,
    )  # fmt: skip
    with closing(cache):
        first = cache.view(0)
        cache.view(1)  # it keeps its files, as the one that was used last
        while files.give_up():
            pass
        assert first.reader is not None
        assert first.ended
        with pytest.raises(CacheCorrupt, match="closed"):
            first.reader.entry(0)
        numbers, ended = cache.arrived(0)
        assert (len(numbers), ended) == (SAMPLES, True)
